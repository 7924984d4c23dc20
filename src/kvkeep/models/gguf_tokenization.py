"""The tokenizer in a GGUF file: its vocabulary, special tokens and chat template, and the tokens that end a text.

It is built from the rules of llama.cpp, for two kinds of vocabularies: byte-level BPE, whose rule for splitting a text
into words the file names, and SentencePiece BPE, whose merges follow from the scores of its tokens.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvkeep.errors import ModelFileError, UnsupportedModelError
from kvkeep.models.gguf import GGUFFile

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
"""Kinds of tokens, as llama.cpp numbers them; 1 is an ordinary one."""
_SPACE = "▁"
_SENTENCEPIECE = {"unknown": 0, "bos": 1, "eos": 2}
"""Tokens with a role in a SentencePiece vocabulary whose file names none."""
_STRIPS_NO_SPACE = {"<unk>", "<s>", "<|endoftext|>"}
"""Special tokens of Phi-3 after which spaces and newlines stay; they belong to the others."""

_log = logging.getLogger(__name__)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_QWEN2 = rf"{_CONTRACTIONS}{_WORDS}|\p{{N}}{_REST}"
_LLAMA3 = rf"{_CONTRACTIONS}{_WORDS}|\p{{N}}{{1,3}}{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SLASHED = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}{_SLASHED}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}{_SLASHED}"

_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_LISTS = " ?[^(\\s|.,!?…。，、।۔،)]+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_LLAMA3_RULES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais", "mpt", "trillion", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("minerva-7b", "mellum2"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), (_QWEN2,)),
    **dict.fromkeys((*_LLAMA3_RULES, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_GPT4O,)),
    **dict.fromkeys(("poro-chat", "gpt3-finnish"), (_LISTS,)),
    "qwen35": (_QWEN35,),
    "viking": (_LISTS, r"\p{N}"),
    "tekken": (_TEKKEN,),
}
"""llama.cpp's name of a rule → patterns that cut a text into words, one after the other."""
_WHOLE_WORDS = {*_LLAMA3_RULES, "tekken"}
"""Rules under which a word that is a token stays whole, even where no merge leads to it; and under which a text begins
with a token of its own, unless the file says otherwise."""
_COMPOSED = {"qwen2", "qwen35", "stablelm2", "deepseek-r1-qwen", "command-r"}
"""Rules under which letters and their accents are composed first (NFC), as in the models' own tokenizers."""

_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>"),
    *("<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>"),
}
"""Tokens that end a turn by their names, as in llama.cpp: files name one token, and models use several."""


def end_tokens(file: GGUFFile) -> list[int]:
    """Return the ids of the tokens that end a text: first those that the file names, then others known by their
    text.
    """
    tokens, kinds = _vocabulary(file)
    named = [_special(file, name, len(tokens)) for name in ("eos", "eot", "eom")]
    known = (at for at, token in enumerate(tokens) if kinds[at] in (_CONTROL, _USER_DEFINED) and token in _ENDS)
    return list(dict.fromkeys(token for token in (*named, *known) if token is not None))


def tokenizer_of(file: GGUFFile) -> PreTrainedTokenizerBase:
    """Build the tokenizer that a file describes.

    Raises:
        ModelFileError: the file has no vocabulary, a damaged one, or one that does not fit its weights.
        UnsupportedModelError: its kind, or its rule for words, is not known.
    """
    tokens, kinds = _vocabulary(file)
    rows = file.shape("token_embd.weight")[0]
    if len(tokens) > rows:
        raise ModelFileError(
            f"{file.path}: Its vocabulary has {len(tokens)} tokens, and its weights know {rows}. Download the file "
            "again."
        )
    kind = file.text("tokenizer.ggml.model", "none")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of the kind {kind!r:.60}, which kvkeep does not read from a GGUF file. It "
            f"reads {' and '.join(builders)}. Give the model's folder with safetensors."
        )
    backend = builders[kind](file, tokens, kinds)
    special = [token for token, of in zip(tokens, kinds, strict=True) if of in (_CONTROL, _UNKNOWN) and token]
    strips = file.architecture == "phi3" and kind == "llama"
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True, rstrip=strips and token not in _STRIPS_NO_SPACE)
            for token in special
        ]
    )
    whole = _whole(tokens, kinds, backend)
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in whole])
    _enclose(file, backend, tokens)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    roles = {name: _special(file, key, len(tokens)) for name, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=_Handed(backend),
        name_or_path=str(file.path),
        chat_template=file.text("tokenizer.chat_template", "") or None,
        clean_up_tokenization_spaces=False,
        **{name: tokens[token] for name, token in roles.items() if token is not None},
    )


class _Handed:
    """Hands over a tokenizer that transformers would copy, which takes two seconds for a large vocabulary."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self._backend


def _whole(tokens: list[str], kinds: list[int], backend: Tokenizer) -> list[str]:
    """Return the ordinary tokens that must never be split, such as ``<think>``."""
    known = (token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED)
    # several spaces have other characters in Gemma's vocabulary, see `_sentencepiece`: added, they would be new tokens
    return [token for token in known if backend.token_to_id(token) is not None]


def _vocabulary(file: GGUFFile) -> tuple[list[str], list[int]]:
    """Return the texts of all tokens of a file, by their ids, and their kinds as llama.cpp numbers them; without kinds
    in the file all are ordinary.

    Raises:
        ModelFileError: there are none, or they do not fit each other.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelFileError(f"{file.path} has no tokenizer (tokenizer.ggml.tokens). Take a file with a vocabulary.")
    kinds = file.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ModelFileError(f"{file.path}: Its vocabulary has {len(tokens)} tokens, and other numbers of their kinds.")
    return tokens, kinds


def _special(file: GGUFFile, name: str, tokens: int) -> int | None:
    """Return the id of the token with a role such as ``bos``; if the file names none, the usual one of SentencePiece
    vocabularies, or ``None`` for others.

    Args:
        file: the file.
        name: the role.
        tokens: number of tokens in the vocabulary.

    Raises:
        ModelFileError: the vocabulary has no such token.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    usual = _SENTENCEPIECE.get(name) if file.metadata.get("tokenizer.ggml.model") == "llama" else None
    if (found := file.metadata.get(key, usual)) is None:
        return None
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < tokens:
        raise ModelFileError(f"{file.path}: {key} is {found!r:.60}, and its vocabulary has {tokens} tokens.")
    return found


def _byte_level(file: GGUFFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Build a byte-level BPE tokenizer, without its special tokens, from the merges that a file lists.

    Raises:
        ModelFileError: there are no merges, or they do not fit the vocabulary.
        UnsupportedModelError: the rule for words is not known.
    """
    rule = file.text("tokenizer.ggml.pre", "default")
    if rule == "default":
        _log.warning(
            "%s names no rule for splitting words (tokenizer.ggml.pre); texts may be cut in other places.", file.path
        )
    if (patterns := _SPLITS.get(rule)) is None:
        raise UnsupportedModelError(
            f"{file.path} splits words by the rule {rule!r:.60} (tokenizer.ggml.pre), which kvkeep does not know. It "
            f"knows {', '.join(_SPLITS)}. Give the model's folder with safetensors."
        )
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelFileError(
            f"{file.path} has no merges of its tokens (tokenizer.ggml.merges). Download the file again."
        )
    pairs = [_halves(file, merge) for merge in merges]
    backend = Tokenizer(_bpe(file, tokens, pairs, ignore_merges=rule in _WHOLE_WORDS))
    if rule in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _halves(file: GGUFFile, merge: object) -> tuple[str, str]:
    """Split a merge into its two tokens.

    Raises:
        ModelFileError: it has not two.
    """
    halves = merge.split(" ") if isinstance(merge, str) else []
    if len(halves) != 2:
        raise ModelFileError(f"{file.path}: A merge of its tokens is {merge!r:.60}, not two tokens.")
    return halves[0], halves[1]


def _bpe(file: GGUFFile, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> BPE:
    """Build a BPE model from a vocabulary and merges.

    Raises:
        ModelFileError: a merge is of tokens that the vocabulary does not have.
    """
    try:
        return BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges, **options)
    except Exception as error:  # tokenizers raises nothing more specific
        raise ModelFileError(f"{file.path}: Its merges do not fit its vocabulary ({error!s:.120}).") from error


def _sentencepiece(file: GGUFFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Build a SentencePiece BPE tokenizer, without its special tokens, with single bytes for what has no token.

    A text and each part after a special token begin with a space, unless the file says otherwise.

    Raises:
        ModelFileError: the tokens have no scores.
    """
    gemma = file.architecture.startswith("gemma")
    if gemma:  # its files hold several spaces as such, where the model's own tokenizer has other characters
        tokens = [_SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token for token in tokens]
    unknown = _special(file, "unknown", len(tokens))
    options = {} if unknown is None else {"unk_token": tokens[unknown]}
    # Gemma's scores do not follow the order of its merges
    merges = _merges(tokens, kinds, _order(file, tokens, by_score=not gemma))
    backend = Tokenizer(_bpe(file, tokens, merges, fuse_unk=True, byte_fallback=True, **options))
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    texts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.flag("tokenizer.ggml.add_space_prefix", not gemma):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        texts.append(decoders.Strip(" ", 1, 0))  # the space that was put before the text
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(texts)
    return backend


def _order(file: GGUFFile, tokens: list[str], *, by_score: bool) -> list[int]:
    """Return the ids of all tokens in the order in which merges produce the tokens: with ``by_score`` the highest score
    first, else by their numbers.

    Raises:
        ModelFileError: the tokens have no scores.
    """
    numbers = list(range(len(tokens)))
    if not by_score:  # Gemma's scores do not follow the order of its merges
        return numbers
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelFileError(
            f"{file.path}: Its tokens have no scores (tokenizer.ggml.scores). Download the file again."
        )
    return sorted(numbers, key=lambda number: -scores[number])


def _merges(tokens: list[str], kinds: list[int], order: list[int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that together are a token, in the given order of those tokens, and the pairs of one
    token by the length of the first, longest first. Tokens that are unknown, control, unused or bytes have no part in
    any.

    Args:
        tokens: the texts of all tokens.
        kinds: their kinds.
        order: the ids of all tokens, in some order.
    """
    left_out = {_UNKNOWN, _CONTROL, _UNUSED, _BYTE}
    known = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in left_out}
    return [
        (token[:cut], token[cut:])
        for token in map(tokens.__getitem__, order)
        if token in known
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]


def _enclose(file: GGUFFile, backend: Tokenizer, tokens: list[str]) -> None:
    """Let a tokenizer put the special tokens with which a text begins and ends around texts, in place, if the file or
    its kind asks for them.
    """
    begins = (
        file.metadata.get("tokenizer.ggml.model") == "llama" or file.metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    )
    wanted = {"bos": begins, "eos": False}
    around = {
        name: _special(file, name, len(tokens))
        for name, usual in wanted.items()
        if file.flag(f"tokenizer.ggml.add_{name}_token", usual)
    }
    found = {name: token for name, token in around.items() if token is not None}
    first, last = ([f"{tokens[found[name]]}"] if name in found else [] for name in ("bos", "eos"))
    if found:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)],
            special_tokens=[(tokens[token], token) for token in found.values()],
        )
