"""Requests as people write them: texts, conversations, lists of both; and one clear sentence for everything else."""

import json

import numpy as np
import pytest
import torch

import kvkeep
from kvkeep.batch.input import parse
from kvkeep.engine import Engine, Request
from kvkeep.engine.request import Structure, json_structure, structure_of, turn_of
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import BudgetError, InputError
from kvkeep.models.load import load
from kvkeep.models.tiny import embedded

from .models import DEVICE, model

SHORT = SamplingParams(max_new_tokens=4)
CHAT = [{"role": "user", "content": "What does Anna have?"}]


@pytest.fixture(scope="module")
def loaded(comparable):
    return comparable.loaded


@pytest.fixture(scope="module")
def engine(loaded):
    return Engine(*loaded, policy="local", budget=64, rows=2)


def ids_of(loaded, text, **options):
    return tuple(loaded[1](text, **options)["input_ids"])


def test_a_text_goes_through_the_chat_template_and_raw_text_does_not(engine, loaded):
    chat = loaded[1].apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert "What does Anna have?" in chat != "What does Anna have?"
    asked = [
        Request(prompt="What does Anna have?", sampling=SHORT),
        Request(messages=CHAT, sampling=SHORT),
        Request(prompt=ids_of(loaded, chat, add_special_tokens=False), sampling=SHORT),
        Request(prompt="What does Anna have?", raw=True, sampling=SHORT),
        Request(prompt=ids_of(loaded, "What does Anna have?"), sampling=SHORT),
    ]
    found = engine.generate(asked)
    assert len({(one.token_ids, one.prompt_tokens) for one in found[:3]}) == 1
    assert len({(one.token_ids, one.prompt_tokens) for one in found[3:]}) == 1
    assert found[0].prompt_tokens > found[3].prompt_tokens


def test_without_a_chat_template_a_text_is_taken_as_it_is(loaded):
    network, tokenizer = load(embedded())
    tokenizer.chat_template = None
    engine = Engine(network, tokenizer, policy="local", budget=64, rows=1)
    (found,) = engine.generate("Once upon a time", SHORT)
    assert found.prompt_tokens == len(ids_of(loaded, "Once upon a time"))
    with pytest.raises(InputError, match="no chat template; give a prompt instead of messages"):
        engine.generate(Request(messages=CHAT))


def test_one_text_or_request_gives_a_list_of_one(engine):
    (text,) = engine.generate("Once upon a time", SHORT)
    (request,) = engine.generate(Request(prompt="Once upon a time", sampling=SHORT))
    assert text.token_ids == request.token_ids
    assert len(text.token_ids) == 4


def test_texts_and_requests_in_one_list(engine, loaded):
    texts = ["Once upon a time", "The dog saw a"]
    mixed = [texts[0], Request(prompt=texts[1], sampling=SHORT), Request(messages=CHAT, sampling=SHORT), texts[1]]
    found = engine.generate(mixed, SHORT)
    alone = [engine.generate(one, SHORT)[0] for one in mixed]
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    assert dict(engine.run(iter(texts), sampling=SHORT))[1].text == found[1].text
    assert "".join(event.text for event in engine.stream(texts[1], SHORT)) == found[3].text
    number = engine.add(texts[0], SHORT)
    while engine.busy:
        events = engine.step()
    assert events[-1].id == number
    assert events[-1].result.token_ids == found[0].token_ids


def test_a_request_that_was_made_cannot_be_changed_through_its_messages(no_checked_annotations):
    message = dict(CHAT[0])
    request = Request(messages=[message], sampling=SHORT)
    message["content"] = "Something else"
    assert request.messages == tuple(CHAT)
    assert Request(messages=iter(CHAT)).messages == tuple(CHAT)


def calling(arguments, **more):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **more}


@pytest.mark.parametrize("more", [{}, {"content": None}, {"content": ""}], ids=str)
@pytest.mark.parametrize(
    ("given", "want"),
    [
        ('{"city": "Ulm"}', {"city": "Ulm"}),
        ("", {}),
        *((given, given) for given in ({"city": "Ulm"}, "[1]", "null", '"{}"', '{"city": ', '{"a": NaN}', "[" * 9999)),
        ('{"a": "\\ud83d"}', '{"a": "\\ud83d"}'),
    ],
)
def test_calls_of_tools_are_taken_as_clients_write_them(given, want, more, no_checked_annotations):
    sent = calling(given, **more)
    messages = [*CHAT, sent, {"role": "tool", "tool_call_id": "a", "content": "sun"}]
    found = Request(messages=messages, sampling=SHORT).messages
    assert found[1] == calling(want, content="")
    assert sent == calling(given, **more)
    assert Request(messages=found, sampling=SHORT).messages == found
    line = json.dumps({"messages": messages}).encode()
    encoded = []
    parse(1, line, lambda prompt: encoded.append(prompt) or [1], SHORT)
    assert encoded == [list(found)]


@pytest.mark.parametrize("calls", [[], "f", [None, 3, {"function": None}, {"function": {"arguments": 3}}]], ids=str)
def test_calls_of_another_form_stay_as_they_are(calls, no_checked_annotations):
    messages = [*CHAT, {"role": "assistant", "content": "a", "tool_calls": calls}]
    assert Request(messages=messages, sampling=SHORT).messages == tuple(messages)


WRONG = [
    ({}, "either a prompt .* or messages"),
    ({"prompt": "a", "messages": CHAT}, "either a prompt .* or messages"),
    ({"prompt": ""}, "empty text"),
    ({"prompt": " \n"}, "empty text"),
    ({"prompt": "a", "raw": 1}, "raw=1 is neither True nor False"),
    ({"messages": CHAT, "raw": True}, "raw=True leaves the chat template out"),
    ({"messages": []}, "is no conversation"),
    ({"messages": "Hello"}, "is no conversation"),
    ({"messages": CHAT[0]}, "is no conversation"),
    ({"messages": ["Hello"]}, "is no conversation"),
    ({"messages": [{"role": "user"}]}, "is no conversation"),
    ({"messages": [*CHAT, {"role": "assistant"}]}, "is no conversation"),
    ({"messages": [*CHAT, {"role": "assistant", "tool_calls": []}]}, "is no conversation"),
    ({"messages": [{**calling("{}"), "role": "user"}]}, "is no conversation"),
    ({"messages": [*CHAT, {"role": 1, "content": "a"}]}, "is no conversation"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "is no conversation"),
    ({"messages": 3}, "is no conversation"),
    ({"prompt": [[1, 2], [3]]}, r"batch of texts; .*input_ids\[0\]"),
    ({"prompt": torch.ones(1, 2, dtype=torch.long)}, "batch of texts"),
    ({"prompt": np.ones((1, 2), dtype=np.int64)}, "batch of texts"),
    ({"prompt": {"input_ids": [1, 2]}}, "The prompt is a dict; .* prompt.input_ids"),
    ({"prompt": ["a", "b"]}, "'a' is not a whole number"),
    ({"prompt": [1.0]}, "1.0 is not a whole number"),
    ({"prompt": CHAT}, r"is a list of messages.* give a conversation as Request\(messages"),
    ({"prompt": b"a"}, "of the type bytes"),
    ({"prompt": 3}, "of the type int"),
    ({"prompt": torch.tensor(3)}, "of the type Tensor"),
    ({"prompt": []}, "no tokens"),
]


def test_what_is_no_prompt_is_refused_in_one_sentence(no_checked_annotations):
    for asked, said in WRONG:
        with pytest.raises(InputError, match=said) as found:
            Request(**asked)
        assert len(str(found.value)) < 200


WRONG_FIELDS = [
    ({"add_generation_prompt": 0}, "add_generation_prompt=0 is neither True nor False"),
    ({"continue_final_message": True}, "continue_final_message is for messages, and this request has a prompt"),
    ({"tools": [{"type": "function"}]}, "tools are told by the chat template, and a prompt goes without"),
    ({"messages": CHAT, "prompt": None, "tools": "f"}, "tools='f' is no list of tools like"),
    ({"messages": CHAT, "prompt": None, "tools": [3]}, r"tools=\[3\] is no list of tools like"),
    ({"chat_template_kwargs": [1]}, r"chat_template_kwargs=\[1\] is no mapping such as"),
    ({"chat_template_kwargs": {1: 2}}, "is no mapping such as"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "add_generation_prompt, which is a field of the"),
    ({"stop": ["a", 3]}, "is no text and no sequence of texts"),
    ({"stop": 3}, "stop=3 is no text"),
    ({"stop": ["a", ""]}, "An empty stop text would end every generation"),
    ({"stop_token_ids": "7"}, "stop_token_ids='7' is no list of token ids"),
    ({"stop_token_ids": 7}, "stop_token_ids=7 is no list"),
    ({"keep_as": "é" * 101}, r"name=.é{39}… is longer than 200 bytes; give a shorter name"),
    ({"keep_as": ""}, "name='' is no name of a session"),
    ({"keep_as": "a/b"}, "name='a/b' cannot be the name of a session's file"),
    ({"sampling": {"temperature": 1}}, "is no kvkeep.SamplingParams"),
    ({"ignore_end": 1}, "ignore_end=1 is neither True nor False"),
    ({"policy": 3}, "policy=3 is neither a policy nor the name of one"),
    ({"reposition": 1}, "reposition=1 is neither True, False nor None"),
    ({"owner": None}, "owner=None is no text"),
    ({"adapter": 3}, "adapter=3 is no name of an adapter"),
    ({"cache_salt": 3}, "cache_salt=3 is no text"),
    ({"snapshot": 3}, "snapshot=3 is no kvkeep.Snapshot"),
]


def test_a_field_of_the_wrong_kind_is_refused_in_one_sentence(no_checked_annotations):
    for fields, said in WRONG_FIELDS:
        with pytest.raises(InputError, match=said) as found:
            Request(**{"prompt": "a", **fields})
        assert len(str(found.value)) < 200


def test_fields_are_taken_as_people_write_them(no_checked_annotations):
    made = Request(messages=CHAT, tools=iter([{"type": "function"}]), stop="a", stop_token_ids=[5, 3, 5], keep_as="é")
    assert (made.tools, made.stop, made.stop_token_ids) == (({"type": "function"},), ("a",), (3, 5))
    assert Request(prompt="a", stop=iter(["b", "c"]), cache_salt="s").stop == ("b", "c")


def test_what_belongs_to_a_conversation_is_no_part_of_a_turn():
    for fields, said in [
        ({"drops": [(1, [(0, 1)])]}, r"with session\.drop\(\.\.\.\), and a turn names none"),
        ({"adapter": "anna"}, r"adapter from engine\.session\(\.\.\.\); a turn names none"),
        ({"sequence": 1}, "a turn names none"),
        (
            {"prompt": None, "messages": CHAT, "add_generation_prompt": False},
            "add_generation_prompt belongs to a whole",
        ),
    ]:
        with pytest.raises(InputError, match=said):
            turn_of(Request(**{"prompt": (1, 2), **fields}), None)
    told = Request(messages=CHAT, chat_template_kwargs={"enable_thinking": False})
    assert turn_of(told, None) == told


def test_a_form_of_an_answer_is_named_once_and_by_its_name(no_checked_annotations):
    for given, said in [
        (5, "structured_outputs=5 is no mapping such as"),
        ({}, "names 0 forms; give one of json, json_object, regex, choice, grammar"),
        ({"json_object": False, "regex": None}, "names 0 forms"),
        ({"regex": "a", "choice": ["b"]}, "names 2 forms"),
        ({"choise": ["b"]}, "has no 'choise'; did you mean choice"),
        ({"nothing": 1}, "has no 'nothing'; there are json, json_object, regex"),
        ({"json_object": "yes"}, "json_object='yes'; give True, or leave it out"),
        ({"choice": "ab"}, "choice='ab'; give a list of texts"),
        ({"choice": []}, r"choice=\[\]; give a list of texts"),
        ({"choice": ["a", ""]}, "give a list of texts that are not empty"),
        ({"regex": 5}, "regex=5; give a text that is not empty"),
        ({"grammar": ""}, "grammar=''; give a text that is not empty"),
        ({"regex": "a" * 200_000}, "200000 characters, and there may be 131072"),
        ({"regex": "\ud83d"}, "has half of a character"),
    ]:
        with pytest.raises(InputError, match=said):
            structure_of(given)
    assert structure_of({"choice": ["é"], "json_object": False}) == Structure("choice", '["é"]')
    assert structure_of({"regex": "a+"}) == Structure("regex", "a+")
    found = structure_of({"json_object": True})
    assert (found, json.loads(found.text)["type"]) == (json_structure({"type": "object"}), "object")
    assert structure_of(found) is found


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (7, r"int is no list of requests; .* Request\(messages"),
        (None, "NoneType is no list"),
        (b"text", "bytes is no list"),
        (CHAT[0], "dict is no list"),
        (CHAT, r"is a single message.* Give the list of its messages, or Request\(messages"),
        ([1, 2, 3], r"1 is no text and no kvkeep.Request; .* Request\(prompt=ids\)"),
        (torch.tensor([1, 2]), "no text and no kvkeep.Request"),
        (["a", None], "None is no text"),
        (["a", " "], "empty text"),
        (["\ud83d"], "not UTF-8"),
    ],
)
def test_what_is_no_request_is_refused_in_one_sentence(asked, said, engine, no_checked_annotations):
    with pytest.raises(InputError, match=said):
        engine.generate(asked)
    assert not engine.busy


@pytest.mark.parametrize("second", [Request(prompt=(4, 5)), "a text", [CHAT], {"temperature": 1}])
def test_two_requests_without_a_list_are_refused(second, engine, no_checked_annotations):
    for take in (engine.generate, engine.stream, lambda *both: list(engine.run(*both)), engine.add):
        with pytest.raises(InputError, match=r"given as one list: engine\.generate\(\[first, second\]\)"):
            list(take(Request(prompt=(1, 2)), second))
    assert not engine.busy


@pytest.mark.slow
def test_a_list_may_have_texts_conversations_and_token_ids(engine, no_checked_annotations):
    mixed = ["a text", CHAT, tuple(CHAT), (5, 6, 7), [5, 6, 7], torch.tensor([5, 6, 7]), Request(messages=CHAT)]
    found = {place: result.prompt_tokens for place, result in engine.run(mixed, SHORT)}
    chat = found.pop(1)
    assert (found.pop(2), found.pop(6)) == (chat, chat)
    assert [found.pop(place) for place in (3, 4, 5)] == [3, 3, 3]
    assert list(found) == [0]
    (result,) = engine.generate([CHAT], SHORT)
    *_, last = engine.stream(CHAT, SHORT)
    assert last.result.token_ids == result.token_ids


@pytest.mark.parametrize("asked", ["Hello", Request(messages=CHAT), Request(prompt="Hello", raw=True)])
def test_texts_need_a_tokenizer(asked):
    with pytest.raises(InputError, match=r"no tokenizer, and (a text needs|messages need) one: .*Engine\(model, tok"):
        Engine(model("llama"), budget=8, rows=1).generate(asked)


def test_an_engine_names_the_argument_that_is_wrong(no_checked_annotations):
    for options, said in [
        ({"budget": 0.2}, "budget=0.2 is not a whole number; for a fraction use budget_from_ratio"),
        ({"budget": "128"}, "budget='128' is not a whole number"),
        ({"budget": None}, "budget=None is not a whole number"),
        ({"budget": True}, "budget=True is not"),
        ({"budget": -(10**5000)}, "budget is below 1"),
        ({"rows": 2.0}, "rows=2.0 is not a whole number"),
        ({"rows": 0}, "rows is below 1"),
        ({"kv_memory": "2GiB"}, "kv_memory='2GiB' is not a whole number"),
        ({"kv_memory": 10**5000}, "kv_memory is a number of 16610 bits"),
        ({"prefill_chunk": "512"}, "prefill_chunk='512' is not a whole number"),
        ({"tokenizer": "gpt2"}, "A str is no tokenizer"),
    ]:
        with pytest.raises((BudgetError, InputError), match=said):
            Engine(model("llama"), **options)


def test_an_engine_of_a_configuration_takes_its_settings_and_further_ones(no_checked_annotations):
    engine = Engine.from_config({"policy": "tova", "budget": 8, "model": "another"}, model("llama"), budget=6, rows=1)
    assert (str(engine.policy), engine.budget, engine.rows) == ("tova", 6, 1)
    with pytest.raises(InputError, match=r"3 is no configuration; give the path of a kvkeep\.toml, or a mapping"):
        Engine.from_config(3)


@pytest.mark.parametrize("wrong", ["gpt2", ("model", "tokenizer"), None])
def test_an_engine_without_a_model_says_how_to_load_one(wrong, no_checked_annotations):
    with pytest.raises(InputError, match=r"is no model of transformers\. Load one first: .*kvkeep\.load"):
        Engine(wrong)


def test_numbers_of_numpy_and_torch_are_numbers(no_checked_annotations):
    eight = np.int64(8)
    engine = Engine(model("llama"), policy="local", budget=eight, rows=np.int32(2), prefill_chunk=np.int64(4))
    wish = {"budget": torch.tensor(6), "sampling": SHORT}
    kinds = ([1, 2, 3], np.array([1, 2, 3]), torch.tensor([1, 2, 3]), [np.int64(1), torch.tensor(2), 3])
    found = engine.generate([Request(prompt=ids, **wish) for ids in kinds])
    assert len({one.token_ids for one in found}) == 1
    cache = kvkeep.BoundedCache(model("llama").config, "local", eight, prefill_chunk=np.int64(4))
    with torch.inference_mode():
        model("llama")(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], device=DEVICE), past_key_values=cache)
    assert int((cache.positions(0) >= 0).sum(-1).max()) == 8
