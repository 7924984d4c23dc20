"""Answers of a given form: valid under every way to run them, ended where the form ends, and refused for a reason."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import threading
import time

import pytest

pytest.importorskip("llguidance")

import llguidance
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvkeep
from kvkeep.engine import grammar, grammar_probe
from kvkeep.engine.grammar import Constraint, Grammars, masked, without_special_texts
from kvkeep.engine.request import Structure
from kvkeep.errors import KVKeepError, pip_install

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
COMPLEX = "start: A\nA: /(a|b)*a(a|b){20}/ & /(a|b)*b(a|b){19}/ & ~/.*abba.*/"
"""A grammar that the engine takes, and gives up after some tokens."""


@pytest.fixture(scope="module")
def parts(comparable):
    return comparable.loaded


@pytest.fixture(scope="module")
def engine(parts):
    with kvkeep.Engine(*parts, budget=128, rows=4) as made:
        yield made


def request(form, *, prompt="Once upon a time", n=80, temperature=1.0, **options):
    names = kvkeep.Request.__dataclass_fields__
    rest = {name: options.pop(name) for name in list(options) if name in names}
    sampling = kvkeep.SamplingParams(max_new_tokens=n, temperature=temperature, **options)
    return kvkeep.Request(prompt=prompt, structured_outputs=form, sampling=sampling, **rest)


def is_person(text):
    found = json.loads(text)
    assert list(found) == ["name", "age", "tags"]
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 12
    assert type(found["age"]) is int
    assert 0 <= found["age"] <= 120
    assert len(found["tags"]) <= 2
    assert set(found["tags"]) <= {"a", "b"}
    return True


@pytest.mark.slow
def test_forms_run_beside_each_other_and_beside_free_text(engine):
    forms = [{"json": PERSON}, {"regex": "[a-z]{3}-[0-9]"}, None, {"choice": ["yes", "no, é"]}, {"json_object": True}]
    forms += [{"grammar": 'root ::= "x" | "y" root'}, {"grammar": 'start: "x" | "y" start'}, {"json": True}]
    found = engine.generate([request(form, n=60, seed=3) for form in forms])
    person, pattern, free, choice, any_object, gbnf, lark, anything = found
    assert is_person(person.text)
    assert re.fullmatch("[a-z]{3}-[0-9]", pattern.text)
    assert choice.text in ("yes", "no, é")
    assert any_object.text.startswith("{")
    assert re.fullmatch("y*x", gbnf.text)
    assert re.fullmatch("y*x", lark.text)
    assert {one.finish_reason for one in (person, pattern, choice, gbnf, lark)} == {"stop"}
    assert anything.text
    assert free.token_ids == engine.generate([request(None, n=60, seed=3)])[0].token_ids
    assert [one.error for one in found] == [None] * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_any_draw_is_valid(engine, temperature):
    asked = [request({"json": PERSON}, temperature=temperature, seed=seed, n=200) for seed in range(8)]
    assert all(is_person(one.text) for one in engine.generate(asked))


@pytest.mark.slow
def test_an_answer_does_not_depend_on_what_runs_beside_it(engine, parts):
    asked = [request({"json": PERSON}, seed=seed, prompt=f"{seed} dogs", n=90) for seed in range(3)]
    together = engine.generate(asked)
    with kvkeep.Engine(*parts, budget=128, rows=1) as alone:
        assert [one.text for one in together] == [alone.generate(one)[0].text for one in asked]


@pytest.mark.long
def test_texts_of_one_long_prompt_have_a_form_each(engine):
    """They share the memory of the prompt, and draw their first tokens from the same logits."""
    prompt = "the dog saw a cat and " * 60
    asked = [
        request(form, prompt=prompt, sequence=n)
        for n, form in enumerate([{"json": PERSON}, None, {"regex": "q+z"}] * 2)
    ]
    found = engine.generate(asked)
    assert is_person(found[0].text)
    assert is_person(found[3].text)
    assert re.fullmatch("q+z?", found[2].text)
    assert found[1].text[0] not in "{q"
    assert found[4].cached_tokens > 0


def test_other_options_have_their_effect_within_the_form(engine):
    y = engine.tokenizer.encode("y", add_special_tokens=False)[0]
    (found,) = engine.generate(request({"choice": ["x", "y"]}, temperature=0.0, logit_bias={y: 100}, logprobs=2))
    assert found.text == "y"
    assert [one.token_id for one in found.logprobs] == list(found.token_ids)
    assert found.logprobs[0].value < -1  # of the model, not of what the form leaves
    drawn = request({"regex": "[a-z ]{20}"}, top_k=5, top_p=0.9, min_p=0.01, frequency_penalty=2.0)
    assert re.fullmatch("[a-z ]{20}", engine.generate(drawn)[0].text)


@pytest.mark.slow
def test_there_may_be_many_choices_of_any_characters(engine):
    many = [f"choice {n}/\\" for n in range(5000)]
    odd = ["a.*", "(b)", "[c]", "é\n", "x|y", "#&~", "a b\t", '"', "{2}", "^$", "<d>", "-"]
    found = engine.generate([request({"choice": many}), *(request({"choice": [one]}, n=20) for one in odd)])
    assert found[0].text in many
    assert [one.text for one in found[1:]] == odd


def test_a_stop_text_or_the_length_ends_a_form_early(engine):
    (stopped,) = engine.generate(request({"json": PERSON}, stop=('"age"',)))
    assert (stopped.finish_reason, stopped.text[-3:]) == ("stop", '", ')
    (short,) = engine.generate(request({"json": PERSON}, n=3))
    assert (short.finish_reason, len(short.token_ids)) == ("length", 3)


@pytest.mark.slow
def test_the_end_token_comes_where_the_form_allows_it(engine):
    (found,) = engine.generate(request({"regex": "[a-z]+"}, temperature=2.0, n=100, seed=1))
    assert re.fullmatch("[a-z]+", found.text)
    (on,) = engine.generate(request({"regex": "[a-z]{2,}"}, ignore_end=True, n=30))
    assert (on.finish_reason, len(on.token_ids)) == ("length", 30)
    (done,) = engine.generate(request({"regex": "[a-z]{2}"}, ignore_end=True, n=30))
    assert (done.finish_reason, len(done.text)) == ("stop", 2)


@pytest.mark.slow
def test_a_stream_says_the_same(engine):
    asked = request({"json": PERSON}, seed=7)
    (whole,) = engine.generate(asked)
    assert "".join(event.text for event in engine.stream(asked)) == whole.text

    async def read():
        return "".join([event.text async for event in engine.astream(asked)])

    assert asyncio.run(read()) == whole.text


@pytest.mark.slow
def test_a_form_applies_to_one_answer_of_a_session(engine):
    with engine.session() as session:
        first = session.ask(request({"choice": ["yes", "no"]}, prompt="Is it a dog?"))
        second = session.ask(request(None, prompt="Why?", n=12))
        third = session.ask(request({"json": PERSON}, prompt="Who is it?"))
    assert first.text in ("yes", "no")
    assert second.text not in ("yes", "no")
    assert is_person(third.text)
    assert third.cached_tokens > 0


@pytest.mark.slow
def test_a_form_that_becomes_too_complex_ends_its_request_alone(engine):
    other = request({"json": PERSON}, seed=2)
    (before,) = engine.generate(other)
    broken, beside = engine.generate([request({"grammar": COMPLEX}, temperature=0.0), other])
    assert (broken.finish_reason, broken.error[:45]) == ("error", "The grammar of the answer became too complex ")
    assert "<state>" not in broken.error
    assert beside.text == before.text


NODE = {"$defs": {"one": {"$ref": "#/$defs/o~1ther"}, "o/ther": {"$ref": "#/$defs/one"}}}
BAD = {
    "an unknown type": ({"json": {"type": "objekt"}}, "The JSON schema cannot be used: Invalid type: objekt"),
    "an unknown word": ({"json": {"not": {}}}, "Unimplemented keys"),
    "another file": ({"json": {"$ref": "http://127.0.0.1:9/x.json"}}, "The JSON schema cannot be used"),
    "nothing fits": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
    "an unknown option": ({"json": {"x-guidance": {"nonsense": True}}}, "unknown field `nonsense`"),
    "a place that no list has": ({"json": {"$ref": f"#/allOf/{'9' * 5000}", "allOf": [{}]}}, "cannot be used"),
    "a grammar of itself": ({"grammar": "root ::= root"}, "has no text that ends|no text that ends"),
    "a rule of itself": ({"grammar": 'root ::= "x" root'}, "its rule root has no text that ends"),
    "a choice of itself": ({"grammar": 'start: a\na: "x" a | "y" a'}, "its rule a has no text that ends"),
    "rules of each other": ({"grammar": 'root ::= a | b\na ::= "x" b\nb ::= "y" a'}, "its rule a has no text"),
    "a group of itself": ({"grammar": 'root ::= ("x" root)+'}, "its rule root has no text that ends"),
    "a way to no end": ({"grammar": 'root ::= "a" | ("b" on)?\non ::= "c" on'}, "its rule on has no text that ends"),
    "a schema in a grammar": ({"grammar": 'start: "x" %json {"allOf": [{"$ref": "#"}]}'}, "its rule start has no text"),
    "a class": ({"regex": "a["}, "unclosed character class"),
    "looking ahead": ({"regex": "(?=a)"}, "look-ahead and look-behind, is not supported"),
    "nonsense": ({"grammar": "nonsense"}, "The grammar cannot be used"),
    "brackets": ({"grammar": "root ::= " + "(" * 9000}, "The grammar cannot be used"),
}


@pytest.mark.parametrize(("form", "message"), BAD.values(), ids=BAD)
def test_a_bad_form_is_refused(engine, form, message):
    with pytest.raises(kvkeep.InputError, match=message) as caught:
        engine.add(request(form))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    assert not engine.busy


ENDING = {
    "an optional part": {**NODE, "type": "object", "properties": {"x": {"$ref": "#/$defs/one"}, "y": {"const": 1}}},
    "a branch": {**NODE, "anyOf": [{"$ref": "#/$defs/one"}, {"const": 1}]},
    "a list": {"type": "array", "maxItems": 2, "items": {"$ref": "#"}},
    "null": {
        "type": ["object", "null"],
        "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "a cycle on the way": {
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#/properties/b"}, {"const": 1}]}, "b": {"$ref": "#/properties/a"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("schema", ENDING.values(), ids=ENDING)
def test_parts_that_never_end_are_not_begun(engine, schema):
    """Such as a reference that leads to itself: whoever begins it can write no further token."""
    for one in engine.generate([request({"json": schema}, seed=seed, temperature=2.0) for seed in range(4)]):
        assert one.error is None
        if one.finish_reason == "stop":
            json.loads(one.text)


GRAMMARS = {
    "once": ('root ::= ("x" root)?', "x*"),
    "some times": ('root ::= "x" root{0,2}', "x+"),
    "nested": ('start: "(" start ")" | DIGIT\nDIGIT: "1".."3"', r"\(*[123]\)*"),
    "unused": ('start: "x"\nother: "y" other', "x"),
    "settings and comments": ('// a: a\n%ignore / /\nstart: n "."\nn[lazy]: /[^:.]{3}/  # n', r" *[^:.]{3} *\. *"),
    "a schema": ('start: "x" %json {"enum": [1]} | "y" start -> again', "y*x1"),
    "a label": ('start: "y" start -> again|"x"', "y*x"),
}


@pytest.mark.parametrize(("text", "pattern"), GRAMMARS.values(), ids=GRAMMARS)
def test_a_grammar_with_rules_of_itself_may_end(engine, text, pattern):
    found = engine.generate([request({"grammar": text}, seed=seed, temperature=5.0, n=20) for seed in range(2)])
    assert [one.error for one in found] == [None, None]
    assert all(re.fullmatch(pattern, one.text) for one in found if one.finish_reason == "stop")


def deep(levels):
    found = {"type": "string"}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


BOMBS = {
    "a multiple": {"json": {"type": "integer", "multipleOf": 1234567}},
    "multiples": {"json": {"anyOf": [{"type": "integer", "multipleOf": 10**9 + n} for n in range(50)]}},
    "depth": {"json": deep(180)},
    "repetitions": {"regex": "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}b"},
    "a large automaton": {"regex": "(a|b)*a(a|b){300}(c|d)*c(c|d){300}"},
    "classes": {"regex": r"(\p{L}{1,100}\w{1,200}){1,50}"},
    "branches": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(14)]}
    },
    "many properties": {"json": {"type": "object", "properties": {f"p{n}": {} for n in range(5000)}}},
    "itself": {"json": {"$ref": "#"}},
    "an ambiguous grammar": {"grammar": "start: a\na: a a a | /x*/ | "},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_or_bounded(engine, form):
    start = time.monotonic()
    try:
        said = engine.generate(request(form, n=6))[0].error or "no error"
    except kvkeep.InputError as error:
        said = str(error)
    assert any(words in said for words in ("cannot be used", "to compile", "too complex", "itself", "no error"))
    assert time.monotonic() - start < grammar.TIMEOUT_S + 60
    assert engine.generate(request({"choice": ["fine"]}))[0].text == "fine"


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_is_ended(parts, monkeypatch):
    monkeypatch.setattr(grammar, "TIMEOUT_S", 0.001)
    monkeypatch.setattr(grammar, "MEMORY_BYTES", 2**34)
    with kvkeep.Engine(*parts, budget=64, rows=1) as engine:
        with pytest.raises(kvkeep.InputError, match=r"The JSON schema takes more than .* Use a simpler one"):
            engine.add(request({"json": {"type": "integer", "multipleOf": 300_007}}))
        monkeypatch.undo()
        assert engine.generate(request({"choice": ["fine"]}))[0].text == "fine"


def test_a_slow_grammar_holds_up_no_other_request_and_few_wait(engine, monkeypatch):
    """Neither requests with a grammar that is known, nor the steps of the engine."""
    known = request({"choice": ["fine"]})
    engine.generate(known)
    slow, ask = threading.Event(), grammar.SandboxProcess.ask
    monkeypatch.setattr(grammar.SandboxProcess, "ask", lambda *given: slow.wait(60) and ask(*given))
    monkeypatch.setattr(grammar, "MOST_WAITING", 3)
    found = []

    def add(word):
        try:
            found.append(engine.generate(kvkeep.Request(prompt=[5, 6], structured_outputs={"choice": [word]}))[0].text)
        except kvkeep.InputError as error:
            found.append(str(error))

    threads = [threading.Thread(target=add, args=(f"word{n}",)) for n in range(5)]
    for thread in threads:
        thread.start()
    ids = dataclasses.replace(known, prompt=[5, 6])  # no chat template, whose process is slow here as well
    assert engine.generate(ids)[0].text == "fine"
    while len(found) < 2:
        time.sleep(0.01)
    assert found == ["3 new grammars wait to be compiled already. Try again in some seconds."] * 2
    slow.set()
    for thread in threads:
        thread.join()
    assert len([one for one in found if one.startswith("word")]) == 3


@pytest.mark.slow
def test_a_grammar_is_compiled_once_and_few_are_kept(parts, monkeypatch):
    monkeypatch.setattr(grammar, "MOST", 2)
    monkeypatch.setattr(grammar, "_MOST_TRIED", 2)
    asked = []
    ask = grammar.SandboxProcess.ask
    monkeypatch.setattr(grammar.SandboxProcess, "ask", lambda *given: asked.append(given[1]) or ask(*given))
    with kvkeep.Engine(*parts, budget=64, rows=2) as engine:
        for word in ("a", "b", "b", "b", "c", "b", "a"):
            assert engine.generate(request({"choice": [word]}))[0].text == word
    lines = list(map(json.loads, asked))
    assert [one["text"] for one in lines if "kind" in one] == ['["a"]', '["b"]', '["c"]', '["a"]']
    assert len([one for one in lines if "tokenizer" in one]) == 2  # two processes


@pytest.mark.slow
def test_a_closed_engine_leaves_no_process(parts):
    engine = kvkeep.Engine(*parts, budget=64, rows=1)
    engine.generate(request({"choice": ["fine"]}))
    process = engine._admission.grammars._worker._process
    assert process.poll() is None
    engine.close()
    assert process.poll() is not None


def test_without_the_package_the_remedy_is_named(parts, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with (
        kvkeep.Engine(*parts, budget=64, rows=1) as engine,
        pytest.raises(kvkeep.InputError, match=re.escape(pip_install("structured"))),
    ):
        engine.add(request({"choice": ["x"]}))


def test_without_a_tokenizer_it_is_refused(parts):
    with (
        kvkeep.Engine(parts[0], budget=64, rows=1) as engine,
        pytest.raises(kvkeep.InputError, match="needs a fast tokenizer"),
    ):
        engine.add(request({"choice": ["x"]}, prompt=[5, 6]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer versions of Python warn of forks beside threads
def test_a_forked_process_leaves_the_workers_process_alone(engine):
    engine.generate(request({"choice": ["fine"]}))
    worker = engine._admission.grammars._worker
    child = os.fork()
    if not child:
        worker.end()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker.runs


CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize(
    "form",
    [
        {"choice": ["<|end|>"]},
        {"regex": "a<\\|user\\|>b"},
        {"json": {"const": "x<|end|>y"}},
        {"json": {"type": "object", "properties": {"<|pad|>": {"const": 1}}, "required": ["<|pad|>"], **CLOSED}},
        {"grammar": 'start: "<|end|>" "b"'},
        {"grammar": 'root ::= "<|end|>" "b"'},
    ],
)
def test_a_form_may_spell_a_special_token(engine, form):
    (found,) = engine.generate(request(form, n=40, temperature=0.0))
    assert (found.finish_reason, found.error) == ("stop", None)
    assert re.search(r"<\|(end|user|pad)\|>", found.text)


def test_a_grammar_may_name_a_special_token(engine, parts):
    (found,) = engine.generate(
        request({"grammar": 'start: "a" <|user|> "<|user|>" // <|user|>'}, n=40, temperature=0.0)
    )
    user = parts[1].convert_tokens_to_ids("<|user|>")
    assert (found.finish_reason, found.text) == ("stop", "a<|user|>")
    assert found.token_ids.count(user) == 1


# ------------------------------------------------------------------ one letter a token, and no other process

LETTERS = [*"abcdefghijklmnopqrstuvwxyz01234", "<end>", *"56789"]
END = LETTERS.index("<end>")


class Within:
    """Answers as the process that tries grammars, within this one."""

    def __init__(self, *_):
        self.runs, self.asked = False, []

    def ask(self, line, timeout_s):
        self.runs = True
        self.asked.append(json.loads(line))
        return dict(grammar_probe._answer(line, 0))

    def end(self):
        self.runs = False
        grammar_probe._FOUND.clear()


@pytest.fixture
def letters(monkeypatch):
    """The grammars of a tokenizer of 36 letters and an end, the last bit of a word."""
    made = Tokenizer(models.BPE(vocab={text: n for n, text in enumerate(LETTERS)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    monkeypatch.setattr(grammar, "SandboxProcess", Within)
    monkeypatch.setattr(grammar_probe, "limit_memory", lambda more_bytes: None)
    monkeypatch.setattr(grammar_probe, "_FOUND", [])
    return Grammars(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>"), len(LETTERS), {END})


def place(letters, form, **options):
    return letters.constraint(kvkeep.Request(prompt=(1,), structured_outputs=form, **options))


def allowed(constraint):
    """The tokens that may come next."""
    found = masked(torch.zeros(1, len(LETTERS)), [constraint])
    return {LETTERS[token] for token in found.isfinite()[0].nonzero().flatten().tolist()}


def test_a_form_allows_its_next_tokens_and_its_end_unless_that_is_to_be_avoided(letters):
    free, on = (place(letters, {"regex": "ab?"}, ignore_end=avoids) for avoids in (False, True))
    assert allowed(free) == allowed(on) == {"a"}
    for constraint in (free, on):
        constraint.take(LETTERS.index("a"))
    assert (allowed(free), allowed(on)) == ({"b", "<end>"}, {"b"})
    with pytest.raises(KVKeepError, match=r"The grammar of the answer became too complex \(.*\)\. Use a simpler one"):
        free.take(LETTERS.index("c"))
    assert not on.complete
    on.take(LETTERS.index("b"))
    assert on.complete
    assert allowed(on) == {"<end>"}  # where nothing else may follow
    assert on.error is None


def test_rows_without_a_form_keep_their_logits(letters):
    logits = torch.arange(3.0 * len(LETTERS)).view(3, -1)
    assert masked(logits, [None] * 3) is logits
    found = masked(logits, [None, place(letters, {"choice": ["9"]}), None])
    assert torch.equal(found[::2], logits[::2])
    assert found[1].isfinite().nonzero().tolist() == [[LETTERS.index("9")]]
    assert place(letters, None) is None


def test_a_form_that_the_grammar_engine_gives_up_allows_nothing_and_says_why(letters):
    place(letters, {"choice": ["a"]})
    limits = llguidance.LLParserLimits(max_lexer_states=10)
    tokens = grammar_probe._FOUND[0]
    given_up = Constraint(llguidance.LLMatcher(tokens, COMPLEX, log_level=0, limits=limits), tokens.vocab_size, (END,))
    for letter in "abab":
        if allowed(given_up):
            given_up.take(LETTERS.index(letter))
    assert allowed(given_up) == set()
    assert grammar.failure(given_up.error).startswith("The grammar of the answer became too complex (lexer error: too")
    endless = llguidance.LLMatcher(tokens, "start: start", log_level=0)
    endless.compute_logit_bias()
    assert grammar.failure(endless.get_error()) == (
        "The form of the answer has no text that ends: a part of it holds itself in every case, so no token can follow."
    )


def test_forms_of_every_kind_are_translated(letters):
    for form, first in [
        ({"json": {"type": "boolean"}}, {"t", "f"}),
        ({"regex": "[ab]"}, {"a", "b"}),
        ({"choice": ["a.", "[c"]}, {"a"}),
        ({"grammar": 'root ::= "x" | "y" root'}, {"x", "y"}),
        (Structure("lark", 'start: "x" | "z" start'), {"x", "z"}),
    ]:
        assert allowed(place(letters, form)) == first, form


def test_a_form_that_cannot_be_used_is_refused_with_the_reason(letters):
    for form, said in [
        ({"json": {"type": "objekt"}}, "The JSON schema cannot be used: Invalid type: objekt"),
        ({"regex": "a["}, "The regular expression cannot be used: unclosed character class"),
        ({"grammar": "root ::= root"}, "cannot be used: no text that ends: a part of it holds itself in every case"),
        ({"grammar": 'root ::= "x" root'}, "its rule root has no text that ends, as each of its alternatives"),
        ({"grammar": 'start: a\na: "x" a'}, "its rule a has no text that ends"),
        ({"choice": ["a"], "regex": None}, None),
    ]:
        if said is None:
            assert allowed(place(letters, form)) == {"a"}  # a refusal spoils nothing
        else:
            with pytest.raises(grammar.FormError, match=said):
                place(letters, form)


def test_few_forms_are_kept_and_a_process_tries_few(letters, monkeypatch):
    monkeypatch.setattr(grammar, "MOST", 2)
    monkeypatch.setattr(grammar, "_MOST_TRIED", 2)
    for word in ("a", "b", "b", "a", "c", "a", "b"):
        place(letters, {"choice": [word]})
    asked = [one.get("text", "the tokenizer") for one in letters._worker.asked]
    assert asked == ["the tokenizer", '["a"]', '["b"]', "the tokenizer", '["c"]', '["b"]']


def test_a_process_that_takes_too_long_or_does_not_start_is_named(letters, monkeypatch):
    place(letters, {"choice": ["a"]})
    monkeypatch.setattr(Within, "ask", lambda *_: None)
    with pytest.raises(
        grammar.FormError, match=r"The choice takes more than 5 s or 128 MiB to compile\. Use a simpler"
    ):
        place(letters, {"choice": ["b"]})
    letters.close()
    with pytest.raises(grammar.FormError, match=r"cannot be used \(it does not read the tokenizer\)"):
        place(letters, {"choice": ["a"]})


def test_special_tokens_have_no_text_in_vocabularies_of_both_kinds():
    special = {"id": 1, "content": "<unk>", "special": True}
    plain = {"id": 2, "content": "<b>", "special": False}
    hidden = "\U0010fffd1\U0010fffd"
    for before, after in [
        ({"vocab": {"a": 0, "<unk>": 1}}, {"vocab": {"a": 0, hidden: 1}}),
        ({"vocab": [["a", -1.5], ["<unk>", 0.0]]}, {"vocab": [["a", -1.5], [hidden, 0.0]]}),
        ({"vocab": {"<unk>": 1}, "unk_token": "<unk>"}, {"vocab": {hidden: 1}, "unk_token": hidden}),
        ({"vocab": {}, "unk_token": "a"}, {"vocab": {}, "unk_token": "a"}),
    ]:
        found = json.loads(without_special_texts(json.dumps({"added_tokens": [special, plain], "model": before})))
        assert found == {"added_tokens": [{**special, "content": hidden}, plain], "model": after}
