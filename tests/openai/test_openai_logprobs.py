"""Log-probabilities: one entry for each token, whose bytes are the text, in answers, streams and echoed prompts."""

import functools

import pytest
import real_folders
from commands import result_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import kvkeep
from kvkeep.engine.detokenizer import StopText, TokenSpans, TokenTexts
from kvkeep.engine.request import Logprob
from kvkeep.models.load import find
from kvkeep.models.tiny import embedded
from kvkeep.openai.logprobs import ScoredTokens, columns, content, echoed

KINDS = ("bytes", "fallback")


@functools.cache
def tokenizer_of(kind):
    """A tokenizer of byte-level BPE, or one of SentencePiece, which spells rare characters in tokens of one byte."""
    if kind == "bytes":
        return find(embedded()).tokenizer
    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "ab", "é", "你"]
    model = models.BPE({word: place for place, word in enumerate(words)}, [("▁", "a"), ("▁", "b")], byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def texts_of(kind):
    return TokenTexts(tokenizer_of(kind))


def ids_of(kind, text):
    return tokenizer_of(kind).encode(text, add_special_tokens=False)


def scored(ids, top=()):
    return tuple(Logprob(token, -1.0 - place, tuple(top)) for place, token in enumerate(ids))


def bytes_of(entries):
    return bytes(byte for entry in entries for byte in entry["bytes"] or [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["naïve 你好 🎉 a", "😀😃", "a", " a", "e\u0301 👩\u200d🚀", "\ufffd a"])
def test_there_is_an_entry_for_each_token_and_their_bytes_are_the_text(kind, text):
    texts, ids = texts_of(kind), ids_of(kind, text)
    said = texts.decode(ids)
    tokens = ScoredTokens.of(result_of(text=said, finish_reason="length", logprobs=scored(ids)), texts)
    assert [entry.token_id for _, entry in tokens] == ids
    assert bytes_of(content(tokens, texts)).decode() == said
    found = columns(tokens, texts)
    for token, start in zip(found["tokens"], found["text_offset"], strict=True):
        assert "\ufffd" in token or said.startswith(token, start)
    for at in range(len(ids)):  # cut in the middle of a character
        part = ids[: at + 1]
        cut = result_of(text=texts.decode(part), finish_reason="length", logprobs=scored(part))
        assert len(ScoredTokens.of(cut, texts)) == len(part)


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.data())
def test_any_tokens_are_parts_of_the_text(kind, data):
    texts = texts_of(kind)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer_of(kind)) - 1), max_size=12))
    for special in (False, True):
        spans, said = TokenSpans(texts, special=special), texts.decode(ids, special=special)
        found = [token for one in ids for token in spans.add(one)] + spans.end()
        assert len(found) == len(ids)
        assert [token.start for token in found] == sorted(min(token.start, len(said)) for token in found)
        if "\ufffd" not in said:
            assert b"".join(token.bytes or b"" for token in found).decode() == said
        for token, one in zip(found, ids, strict=True):
            assert (token.bytes is None) == (not special and texts.is_special(one))


@settings(deadline=None)
@given(
    st.sampled_from(KINDS),
    st.text("a b你😀", max_size=8),
    st.text("a b你😀", min_size=1, max_size=3),
    st.integers(1, 9),
)
def test_a_stream_has_the_entries_of_the_whole_answer(kind, text, stop, n):
    texts, ids = texts_of(kind), ids_of(kind, text)[:n]
    tail, streamed, length = StopText(lambda ids: texts.decode(ids, special=False), [stop]), [], 0
    one, taken, stopped = ScoredTokens(texts), 0, False
    while taken < len(ids) and not stopped:
        piece, stopped = tail.add(ids[taken])
        piece += "" if stopped or taken + 1 < len(ids) else tail.end()
        one.add(scored(ids)[taken])
        taken, length = taken + 1, length + len(piece)
        streamed += one.within(length)
    reason = "stop" if stopped or len(tail.text) < len(texts.decode(ids[:taken])) else "length"
    result = result_of(text=tail.text, finish_reason=reason, logprobs=scored(ids[:taken]))
    whole = ScoredTokens.of(result, texts)
    assert streamed + one.rest(result) == whole
    assert reason == "stop" or len(whole) == taken


def test_an_end_token_and_a_stop_text_have_no_entries():
    texts, ids = texts_of("bytes"), ids_of("bytes", "a 🎉 a")
    end, user = tokenizer_of("bytes").convert_tokens_to_ids(["<|end|>", "<|user|>"])
    said = texts.decode(ids)
    ended = result_of(text=said, finish_reason="stop", end_token=True, logprobs=scored([*ids, user, end]))
    tokens = ScoredTokens.of(ended, texts)
    assert [entry.token_id for _, entry in tokens] == [*ids, user]
    assert content(tokens, texts)[-1] | {"logprob": 0, "top_logprobs": 0} == {
        "token": "<|user|>",
        "bytes": None,
        "logprob": 0,
        "top_logprobs": 0,
    }
    assert [entry.token_id for _, entry in ScoredTokens.of(ended, texts, whole=True)] == [*ids, user, end]
    shown = result_of(text=said, finish_reason="stop", logprobs=scored([*ids, user, end]))  # the end is to be kept
    assert [entry.token_id for _, entry in ScoredTokens.of(shown, texts)] == [*ids, user, end]
    stopped = result_of(text="a ", finish_reason="stop", logprobs=scored(ids))
    assert "".join(columns(ScoredTokens.of(stopped, texts), texts)["tokens"]).startswith("a")
    assert len(ScoredTokens.of(stopped, texts)) < len(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_alternatives_never_merge(kind):
    texts, ids = texts_of(kind), ids_of(kind, "😀😃")
    others = [*ids_of(kind, "🎉"), *ids_of(kind, " a"), 10**6]
    likeliest = [(token, -0.1 * place) for place, token in enumerate(dict.fromkeys([*others, ids[0]]))]
    ids = ids[:1]
    tokens = ScoredTokens.of(result_of(text="\ufffd", finish_reason="length", logprobs=scored(ids, likeliest)), texts)
    (named,) = columns(tokens, texts)["top_logprobs"]
    assert list(named.values()) == [value for _, value in likeliest]
    assert named[columns(tokens, texts)["tokens"][0]] == dict(likeliest)[ids[0]]
    (entry,) = content(tokens, texts)
    assert len(entry["top_logprobs"]) == len(likeliest)
    assert entry["top_logprobs"][0]["bytes"] == list("🎉".encode()[: len(entry["top_logprobs"][0]["bytes"])])


@pytest.mark.parametrize("kind", KINDS)
def test_echoed_tokens_stand_where_their_offsets_say(kind):
    texts, prompt = texts_of(kind), "a 你 🎉 b"
    begin = tokenizer_of(kind).bos_token_id
    ids, new = [begin, *ids_of(kind, prompt)], ids_of(kind, "😀")
    result = result_of(
        text=texts.decode(new), finish_reason="length", prompt_logprobs=scored(ids[1:]), logprobs=scored(new)
    )
    for given_text in (prompt, texts.decode(ids)):
        found = echoed(given_text, ids, result, texts)
        assert {len(column) for column in found.values()} == {len(ids) + len(new)}
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        text = given_text + result.text
        for token, start in zip(found["tokens"], found["text_offset"], strict=True):
            assert "\ufffd" in token or text.startswith(token, start), (token, start)
        assert text[found["text_offset"][-1]] == "😀"
    lower = echoed(prompt.upper(), ids, result, texts)  # a tokenizer may change a prompt
    assert lower["text_offset"] == sorted(lower["text_offset"])


@pytest.mark.real
@pytest.mark.parametrize("name", real_folders.NAMES)
def test_a_pretrained_model_has_an_entry_for_each_token(name):
    model, tokenizer = kvkeep.load(real_folders.folder(name), dtype="float32")
    texts, prompt = TokenTexts(tokenizer), "Emoji list: 😀 😃 😄 😁 😆 😅 😂 🤣 😊 😇 😀 😃 😄 😁 😆 😅"
    asked = kvkeep.Request(prompt=prompt, raw=True, sampling=kvkeep.SamplingParams(max_new_tokens=12), logprobs=3)
    [result] = kvkeep.Engine(model, tokenizer, budget=128, rows=1).generate([asked])
    tokens = ScoredTokens.of(result, texts)
    assert [entry.token_id for _, entry in tokens] == list(result.token_ids)
    assert bytes_of(content(tokens, texts)).decode("utf-8", "replace") == result.text
    assert {len(named) for named in columns(tokens, texts)["top_logprobs"]} == {3}
