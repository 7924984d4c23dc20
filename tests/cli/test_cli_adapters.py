"""``--adapter NAME=FOLDER``: prompts, batch files, conversations and memories, and what is refused."""

import functools
import json

import adapter_folders
import model_folders
import pytest
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.main import app
from kvkeep.models.adapters import merged_into
from kvkeep.models.load import find, quiet, read_weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
PROMPT = "the quick brown fox"
FEW = ("-n", 8, "--dtype", "float32")


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def run(command, *words, stdin=None, code=0):
    result = CliRunner().invoke(app, [command, str(model_folders.folder()), *map(str, words)], input=stdin)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def adapter(*kinds):
    return [word for kind in kinds for word in ("--adapter", f"{kind}={adapter_folders.folder(kind)}")]


@functools.cache
def expected(kind, prompt=PROMPT):
    """The result of an engine with the adapter beside the weights."""
    folders = {} if kind is None else {kind: adapter_folders.folder(kind)}
    with quiet():
        made = kvkeep.Engine(*kvkeep.load(model_folders.folder(), dtype="float32", adapters=folders), rows=1)
    sampling = kvkeep.SamplingParams(max_new_tokens=8)
    return made.generate(kvkeep.Request(prompt=prompt, sampling=sampling, adapter=kind))[0]


@pytest.mark.long
def test_a_prompt_runs_with_its_adapter():
    found = json.loads(run("generate", *adapter("a"), "-p", PROMPT, *FEW, "--json").stdout)
    assert (found["token_ids"], found["adapter"]) == (list(expected("a").token_ids), "a")
    found = json.loads(run("generate", "-p", PROMPT, *FEW, "--json").stdout)
    assert found["token_ids"] == list(expected(None).token_ids)
    assert "adapter" not in found
    both = json.loads(run("generate", *adapter("a"), "-p", PROMPT, *FEW, "--json", "--compare").stdout)
    assert both["full"]["token_ids"] == list(expected("a").token_ids)


@pytest.mark.long
def test_an_adapter_on_shared_weights_stays_beside_them(tmp_path):
    family = ("opt",)
    base, folder = model_folders.folder(*family), adapter_folders.folder("embed", *family)
    with quiet():
        model = read_weights(find(base), "float32", adapters={"e": str(folder)}, merge=True)
    assert merged_into(model) is None
    made = kvkeep.Engine(model, model_folders.tokenizer(), rows=1)
    sampling = kvkeep.SamplingParams(max_new_tokens=8)
    want, plain = made.generate(
        [kvkeep.Request(prompt=PROMPT, sampling=sampling, adapter=adapter) for adapter in ("e", None)]
    )
    assert want.token_ids != plain.token_ids
    words = ["--adapter", f"e={folder}", "-n", "8", "--dtype", "float32"]
    done = CliRunner().invoke(app, ["generate", str(base), *words, "-p", PROMPT, "--json"])
    assert json.loads(done.stdout)["token_ids"] == list(want.token_ids)
    file = str(tmp_path / "m.kvkeep")
    (tmp_path / "text").write_text(PROMPT)
    CliRunner().invoke(app, ["remember", str(base), *words[:2], *words[4:], "-f", str(tmp_path / "text"), "-o", file])
    assert kvkeep.Snapshot.load(file).fingerprint.adapter == "e"
    chat = ["chat", str(base), *words, "--sessions", str(tmp_path), "--session", "talk"]
    done = CliRunner().invoke(app, chat, input=f"{PROMPT}\n")
    assert want.text.strip()[:10] in done.output


def line(number, model=None, **body):
    told = {} if model is None else {"model": model}
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **told, **body}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}


def job(tmp_path, lines, *words, code=0):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    result = run("generate", "--input", source, "--output", output, "--dtype", "float32", *words, code=code)
    return result, [json.loads(entry) for entry in output.read_text().splitlines()] if output.exists() else []


@pytest.mark.long
def test_lines_of_a_batch_file_name_their_adapter(tmp_path):
    base = str(model_folders.folder())
    names = [None, base, f"{base}:a", "any:b", f"{base}:b"]
    lines = [line(number, name) for number, name in enumerate(names)]
    lines += [{"prompt": PROMPT, "options": {"max_new_tokens": 8}, "model": f"m:{kind}"} for kind in "ab"]
    _, found = job(tmp_path, lines, *adapter("a", "b"))
    texts = {
        entry["custom_id"]: entry["response"]["body"]["choices"][0]["text"] for entry in found if "custom_id" in entry
    }
    own = {entry["model"]: entry["completion"]["text"] for entry in found if "completion" in entry}
    assert own == {"m:a": expected("a").text, "m:b": expected("b").text}
    assert texts["0"] == texts["1"]
    assert texts["3"] == texts["4"]
    assert len({texts["0"], texts["2"], texts["3"]}) == 3
    models = {entry["custom_id"]: entry["response"]["body"]["model"] for entry in found if "custom_id" in entry}
    assert models == {"0": base, "1": base, "2": f"{base}:a", "3": f"{base}:b", "4": f"{base}:b"}
    # the same command has nothing left to do; with other adapters it is another job
    result, again = job(tmp_path, lines, *adapter("a", "b"))
    assert again == found
    swapped = ["--adapter", f"a={adapter_folders.folder('b')}", "--adapter", f"b={adapter_folders.folder('a')}"]
    result, _ = job(tmp_path, lines, *swapped, code=2)
    assert "was written with weights" in " ".join(result.output.split())


def test_the_only_adapter_answers_lines_that_name_none(tmp_path):
    base = str(model_folders.folder())
    lines = [
        {"prompt": PROMPT, "options": {"max_new_tokens": 8}, **more} for more in ({}, {"model": base}, {"model": "gpt"})
    ]
    _, found = job(tmp_path, lines, *adapter("a"))
    tokens = {entry["completion"]["line"]: entry["completion"]["text"] for entry in found}
    assert tokens == {1: expected("a").text, 2: expected(None).text, 3: expected("a").text}


def test_a_line_with_an_unknown_adapter_is_bad(tmp_path):
    lines = [line(1), line(2, "x:typo")]
    result, found = job(tmp_path, lines, *adapter("a"), code=2)
    assert 'Line 2 cannot be run: its model is "x:typo", whose adapter is unknown' in " ".join(result.output.split())
    assert not found
    job(tmp_path, lines, *adapter("a"), "--skip-bad")
    (bad,) = map(json.loads, (tmp_path / "out.jsonl.bad").read_text().splitlines())
    assert bad["response"]["body"]["error"]["param"] == "model"


@pytest.mark.long
def test_memories_name_their_adapter(tmp_path):
    text, file = tmp_path / "text.txt", tmp_path / "text.kvkeep"
    text.write_text("the dog and the cat " * 3)
    result = run("remember", *adapter("a"), "-f", text, "-o", file, "--dtype", "float32", "-b", 32)
    assert "--adapter a=" in result.output
    assert "with the adapter a" in " ".join(CliRunner().invoke(app, ["memory", str(file)]).output.split())
    ask = ("--memory", file, "-p", "the fox", "-n", 8)
    first = json.loads(run("generate", *adapter("a"), *ask, "--json").stdout)
    other = ["--adapter", f"other={adapter_folders.folder('a')}"]  # another name of the same weights
    assert json.loads(run("generate", *other, *ask, "--json").stdout)["token_ids"] == first["token_ids"]
    assert "with the adapter a. Give that adapter, too" in " ".join(run("generate", *ask, code=2).output.split())
    said = " ".join(run("generate", *adapter("b"), *ask, code=2).output.split())
    assert "made with the adapter a and not with the adapter b" in said
    named_alike = ["--adapter", f"a={adapter_folders.folder('b')}"]
    assert "weights or adapters" in " ".join(run("generate", *named_alike, *ask, code=2).output.split())
    run("remember", "-f", text, "-o", tmp_path / "plain.kvkeep", "--dtype", "float32", "-b", 32)
    said = run("generate", *adapter("a"), "--memory", tmp_path / "plain.kvkeep", "-p", "the fox", code=2).output
    assert "without an adapter. Leave --adapter out" in " ".join(said.split())
    _, found = job(
        tmp_path, [{"prompt": "the fox", "options": {"max_new_tokens": 8}}], *adapter("b", "a"), "--memory", file
    )
    assert found[0]["completion"]["text"] == first["text"]


@pytest.mark.long
def test_conversations_keep_their_adapter(tmp_path):
    folder = ("--sessions", tmp_path, "--session", "talk", "--dtype", "float32", "-n", 8)
    first = run("chat", *adapter("a"), *folder, stdin="the dog\n")
    assert "--adapter a=" in first.output
    plain = run("chat", *folder[:2], "--session", "plain", *folder[4:], stdin="the dog\n")
    assert plain.stdout != first.stdout
    run("chat", *adapter("a"), *folder, stdin="the cat\n")
    assert "with the adapter a" in " ".join(run("chat", *folder, stdin="the cat\n", code=2).output.split())
    said = " ".join(run("chat", *adapter("b"), *folder, stdin="the cat\n", code=2).output.split())
    assert "adapter" in said


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--adapter", "a"], "names no folder; give NAME=FOLDER"),
        (["--adapter", "a="], "names no folder; give NAME=FOLDER"),
        (["--adapter", "a:b=x"], "is no name for an adapter"),
        (["--adapter", "a/b=x"], "is no name for an adapter"),
        (["--adapter", "=x"], "is no name for an adapter"),
        (["--adapter", "a=x", "--adapter", "a=y"], "two adapters have the name a"),
        (["--adapter", "a=/none"], "folder /none does not exist"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat", "serve", "remember"])
def test_bad_adapters_are_refused_before_anything_is_read(command, words, match, tmp_path):
    more = {
        "generate": ["-p", "the"],
        "chat": ["--sessions", tmp_path / "s"],
        "serve": ["--check"],
        "remember": ["-f", __file__, "-o", tmp_path / "m.kvkeep"],
    }
    said = " ".join(run(command, *words, *more[command], code=2).output.split())
    assert match in said


@pytest.mark.parametrize("command", ["generate", "chat", "remember"])
def test_several_adapters_are_for_files_and_servers(command, tmp_path):
    more = {"generate": ["-p", "the"], "chat": [], "remember": ["-f", __file__, "-o", tmp_path / "m.kvkeep"]}
    said = " ".join(run(command, *adapter("a", "b"), *more[command], code=2).output.split())
    assert "--adapter names a and b" in said


def test_serve_takes_several():
    assert "The settings can be used." in run("serve", *adapter("a", "b"), "--check").output
