"""Grid, folder and resuming: what is run, what is written, and that nothing is lost or mixed."""

import dataclasses
import errno
import functools
import json
import os
import re

import model_folders
import pytest

from kvkeep import parse, spec
from kvkeep.errors import BudgetError, CapacityError, InputError, PolicyError, UnsupportedModelError
from kvkeep.evals.arms import split_arms, split_policies
from kvkeep.evals.forward import PLAIN, Setup
from kvkeep.evals.grid import Cell, GridArguments, Planned, RequestedBudget, notes
from kvkeep.evals.records import Records, key_of
from kvkeep.evals.run import TaskPart, lay_out, run
from kvkeep.evals.task import Options
from kvkeep.evals.task_names import TEXT_TASKS
from kvkeep.evals.tasks import find
from kvkeep.head_profile import Profile
from kvkeep.models import load as loading
from kvkeep.models.load import quiet
from kvkeep.models.tokenization import Writer
from kvkeep.result_files import MANIFEST, ROWS

OPTIONS = Options(limit=2, window=40, contexts=(300,), facts=2)
BUDGETS = (RequestedBudget(ratio=0.2), RequestedBudget(tokens=12))


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread(), quiet():
        yield


@functools.cache
def writer():
    with quiet():
        checkpoint = loading.find(model_folders.folder())
        return Writer(checkpoint, loading.read_weights(checkpoint))


def laid_out(policies="full,local", budgets=BUDGETS, tasks="perplexity", options=OPTIONS, seeds=(0,), **setup):
    wanted = GridArguments(arms=split_arms(policies), budgets=budgets, setup=Setup(**setup))
    return lay_out(
        writer().checkpoint, "m", find(tasks), wanted, [dataclasses.replace(options, seed=seed) for seed in seeds]
    )


def timeless(rows):
    return [{key: value for key, value in row.items() if key != "wall_s"} for row in rows]


# policies and budgets


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("h2o:recent=32,sinks=4,local", ["h2o:recent=32,sinks=4", "local"]),
        ("full, local ,tova", ["full", "local", "tova"]),
        ("streaming_llm,sinks=2,h2o", ["streaming_llm:sinks=2", "h2o"]),
        ("h2o:sinks=1,h2o:sinks=2", ["h2o:sinks=1", "h2o:sinks=2"]),
        ("h2o,h2o:sinks=0,h2o", ["h2o"]),
        ("random:bursts,sinks=2,h2o", ["random:recent=64,sinks=2,buffer=64", "h2o"]),
    ],
)
def test_a_list_of_policies_with_commas_in_them(text, names):
    assert list(map(spec, split_policies(text))) == names


@pytest.mark.parametrize("text", ["", " , ", "recent=3", "h2o:recnt=3,local", "nothing"])
def test_a_wrong_list_of_policies(text):
    with pytest.raises(PolicyError):
        split_policies(text)


@pytest.mark.parametrize("wrong", [{"ratio": 0.0}, {"ratio": 1.1}, {}, {"tokens": 0}, {"tokens": -3}])
def test_a_wrong_budget(wrong):
    with pytest.raises(BudgetError):
        RequestedBudget(**wrong)


def test_the_grid_runs_full_once_and_resolves_shares_row_by_row():
    cells = laid_out("full,local,h2o", tasks="perplexity,recall").planned
    assert len(cells) == 2 * (1 + 2 + 2)
    full = [planned for planned in cells if planned.cell.policy == "full"]
    assert {planned.cell.budget for planned in full} == {"100%"}
    assert full[1].budgets == tuple(n + 16 for n in full[1].lengths)
    shares = next(p for p in cells if p.cell.task == "recall" and p.cell.budget == "20%")
    assert shares.budgets == tuple(n // 5 for n in shares.lengths)
    assert len({planned.cell for planned in cells}) == len(cells)


def test_arms_that_say_the_same_in_other_words_are_one():
    assert [planned.cell.setup for planned in laid_out("local,local@16,local@8", BUDGETS[:1]).planned] == [
        "",
        "kv-bits=8",
    ]
    assert len(laid_out("local,local@8,full,full@8bit", kv_bits="8").planned) == 3


def test_both_ways_to_ask_in_one_grid_plan_what_does_not_ask_once():
    options = [dataclasses.replace(OPTIONS, ask=ask) for ask in ("inside", "later", "prompt")]
    wanted = GridArguments(arms=split_arms("local"), budgets=BUDGETS, setup=Setup())
    cells = lay_out(writer().checkpoint, "m", find("perplexity,recall"), wanted, options).planned
    assert [(plan.cell.task, "later" in plan.cell.case) for plan in cells[:: len(BUDGETS)]] == [
        ("perplexity", False),
        ("recall", False),
        ("recall", True),
    ]


def test_a_budget_below_the_protected_tokens_names_the_cell():
    with pytest.raises(BudgetError, match=r"perplexity window=40,stride=16: h2o:recent=10 cannot run at 20% of 40 tok"):
        laid_out("h2o:recent=10")


def test_a_policy_that_keeps_every_new_token_needs_room_for_them():
    said = r"agreement .*room=4,window=2 keeps every new token, and up to 5 follow the text\. Give it room=5 or more"
    with pytest.raises(BudgetError, match=said):
        laid_out("snapkv:window=2,decode=grow,room=4", tasks="agreement")
    assert laid_out("snapkv:window=2,decode=grow,room=5", (RequestedBudget(tokens=8),), tasks="agreement").planned


def test_a_note_where_nothing_is_evicted():
    grid = laid_out(budgets=(RequestedBudget(tokens=40), RequestedBudget(tokens=39)))
    assert notes(grid.planned) == [
        "perplexity window=40,stride=16: nothing is evicted at 40: the budget of 40 is not smaller than the 40 tokens "
        "of the text."
    ]
    (said,) = (note for note in grid.notes if "own plain sentences" in note)
    assert all(name in said for name in TEXT_TASKS)
    assert not any("own plain sentences" in note for note in laid_out(tasks="recall").notes)


def test_longer_than_trained_is_noted():
    notes = laid_out(tasks="recall").notes
    assert any(f"more than the {model_folders.TRAINED_LENGTH} that the model was trained for" in note for note in notes)


def test_a_layer_may_evict_where_the_budget_alone_would_not():
    grid = laid_out("local", budgets=(RequestedBudget(tokens=40),), layer_budget="ramp:0.5")
    assert notes(grid.planned) == []


# setups


@pytest.mark.parametrize(
    ("policy", "setup", "differences"),
    [
        ("h2o", {}, ""),
        ("h2o", {"positions": "true"}, ""),
        ("h2o", {"positions": "slot"}, "positions=slot"),
        ("streaming_llm", {"positions": "slot"}, ""),
        ("streaming_llm", {"positions": "true"}, "positions=true"),
        ("h2o", {"layer_budget": "uniform"}, ""),
        ("h2o", {"layer_budget": "ramp"}, "layer-budget=ramp:0.2"),
        ("h2o", {"layer_budget": "ramp:.20"}, "layer-budget=ramp:0.2"),
        ("pyramidkv", {"layer_budget": "pyramid:20"}, ""),
        ("pyramidkv", {"layer_budget": "uniform"}, "layer-budget=uniform"),
        ("h2o", {"prefill_chunk": 8}, "prefill-chunk=8"),
        (
            "h2o",
            {"prefill_chunk": 8, "layer_budget": "ramp:-0.5", "positions": "slot"},
            "positions=slot,layer-budget=ramp:-0.5,prefill-chunk=8",
        ),
    ],
)
def test_a_setup_is_named_by_what_differs_from_the_policys_own(policy, setup, differences):
    assert Setup(**setup).differences(writer().checkpoint, parse(policy)) == differences


def test_weights_of_layers_have_a_name_of_their_own():
    names = {
        Setup(layer_budget=weights).differences(writer().checkpoint, parse("h2o"))
        for weights in ((1.0, 2.0), (1.0, 2.5), (1.0, 2.0))
    }
    assert len(names) == 2
    assert all(name.startswith("layer-budget=calibrated:") for name in names)


def test_a_cache_is_made_as_the_setup_says():
    setup = Setup(positions="slot", layer_budget=(1.0, 2.0), prefill_chunk=8)
    cache = setup.cache(writer().checkpoint, parse("h2o"), [12, 12], first=5)
    assert cache.position_mode == "slot"
    layers = cache.bounded_layers().values()
    assert [layer.budgets for layer in layers] == [(8, 8), (16, 16)]
    assert {layer._prefill_chunk for layer in layers} == {8}
    assert {tuple(layer.plan.sequences) for layer in layers} == {(5, 6)}


@pytest.mark.parametrize(
    ("setup", "error"),
    [
        ({"layer_budget": "slope"}, "Unknown layer budget 'slope'"),
        ({"layer_budget": (1.0, 2.0, 3.0)}, "3 layer weights were given for 2 layers"),
        ({"prefill_chunk": 0}, "The prefill chunk 0"),
    ],
)
def test_a_wrong_setup_is_refused_before_anything_runs(setup, error):
    with pytest.raises(BudgetError, match=error):
        laid_out(**setup)


def test_slot_positions_on_a_model_without_rotary_ones():
    checkpoint = loading.find(model_folders.folder("gpt2"))
    wanted = GridArguments(arms=split_arms("local"), budgets=BUDGETS, setup=Setup(positions="slot"))
    with pytest.raises(UnsupportedModelError, match="'gpt2' model has no rotary"):
        lay_out(checkpoint, "m", find("agreement"), wanted, [OPTIONS])


def test_other_setups_are_rows_of_their_own_and_full_is_run_once(tmp_path):
    run(laid_out(), writer(), Records(tmp_path))
    run(laid_out(layer_budget="ramp:0.5"), writer(), Records(tmp_path))
    run(laid_out(layer_budget="ramp:0.5"), writer(), Records(tmp_path))
    run(laid_out(layer_budget="uniform"), writer(), Records(tmp_path))  # the default, by its name
    rows = Records(tmp_path).rows
    assert [(row["policy"], row["budget"], row["setup"]) for row in rows] == [
        ("full", "100%", ""),
        ("local", "20%", ""),
        ("local", "12", ""),
        ("local", "20%", "layer-budget=ramp:0.5"),
        ("local", "12", "layer-budget=ramp:0.5"),
    ]
    assert rows[1]["score"]["perplexity"] != rows[3]["score"]["perplexity"]
    assert rows[3]["options"] == {
        "positions": None,
        "layer_budget": "ramp:0.5",
        "head_budget": None,
        "kv_bits": None,
        "prefill_chunk": None,
    }


def test_rows_written_before_there_were_setups_count_as_the_default(tmp_path):
    run(laid_out(), writer(), Records(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / ROWS).read_text().splitlines()]
    for row in rows:
        del row["setup"]
    (tmp_path / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {planned.cell for planned in laid_out().planned} == Records(tmp_path).done


# seeds


def test_every_seed_has_rows_of_its_own(tmp_path):
    run(laid_out("local", seeds=(0, 3)), writer(), Records(tmp_path))
    run(laid_out("local", seeds=(3, 1)), writer(), Records(tmp_path))
    rows = Records(tmp_path).rows
    assert [(row["seed"], row["budget"]) for row in rows] == [(s, b) for s in (0, 3, 1) for b in ("20%", "12")]
    assert len({row["score"]["perplexity"] for row in rows}) == 6
    alone = Records(tmp_path / "alone")
    run(laid_out("local", seeds=(3,)), writer(), alone)
    assert timeless(alone.rows) == timeless(rows[2:4])


def test_notes_are_said_once_however_many_seeds():
    notes = laid_out(tasks="recall,perplexity", seeds=(0, 1, 2)).notes
    assert len(notes) == len(set(notes)) == len(laid_out(tasks="recall,perplexity").notes)


# rows


def test_a_row_says_all_about_itself(tmp_path):
    records = Records(tmp_path / "deep" / "er")
    run(laid_out("h2o:recent=2"), writer(), records)
    row = json.loads((tmp_path / "deep" / "er" / ROWS).read_text().splitlines()[0])
    assert row.keys() >= {"task", "case", "policy", "budget", "seed", "version", "score", "memory", "wall_s", "model"}
    assert row.keys() >= {"setup", "options", "device", "dtype", "kvkeep", "torch", "transformers", "python", "rows"}
    assert (row["policy"], row["budget"], row["budget_tokens"], row["text_tokens"]) == ("h2o:recent=2", "20%", 8, 40)
    memory = row["memory"]
    assert memory["full_bytes"] == 2 * 39 * 2 * 2 * 2 * 8 * 4  # rows, tokens, layers, heads, K and V, dim, float32
    assert memory["occupied_bytes"] == 2 * 8 * 2 * 2 * (2 * 8 * 4 + 4 + 4)  # and position, and mass
    assert memory["allocated_bytes"] >= memory["occupied_bytes"] * 9 // 8


def test_a_stopped_run_goes_on_and_gives_the_same_rows(tmp_path):
    whole = Records(tmp_path / "whole")
    run(laid_out(tasks="perplexity,mass"), writer(), whole)

    for stop in (2, 1, 3):
        seen = []

        def on_cell(planned, seen=seen, stop=stop):
            seen.append(planned)
            if len(seen) > stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(laid_out(tasks="perplexity,mass"), writer(), Records(tmp_path / "parts"), on_cell)
    run(laid_out(tasks="perplexity,mass"), writer(), Records(tmp_path / "parts"))
    rows = Records(tmp_path / "parts").rows
    assert timeless(rows) == timeless(whole.rows)
    assert len(rows) == len((tmp_path / "parts" / ROWS).read_text().splitlines()) == 6


def test_nothing_is_run_twice(tmp_path):
    run(laid_out(), writer(), Records(tmp_path))
    before = (tmp_path / ROWS).read_bytes()
    done = []
    run(laid_out("local,tova"), writer(), Records(tmp_path), lambda planned: done.append(planned.cell.policy))
    assert done == ["tova", "tova", "tova"]  # prepared once, run twice
    assert (tmp_path / ROWS).read_bytes().startswith(before)


@pytest.mark.parametrize("torn", [b'{"task": "perpl', b'{"task": "perplexity", "case"}\n', b"\x00\x00\n"])
def test_a_torn_last_line_is_run_again(tmp_path, torn):
    run(laid_out(), writer(), Records(tmp_path))
    whole = (tmp_path / ROWS).read_bytes()
    lines = whole.splitlines(keepends=True)
    (tmp_path / ROWS).write_bytes(b"".join(lines[:-1]) + torn)
    run(laid_out(), writer(), Records(tmp_path))
    found = [json.loads(line) for line in (tmp_path / ROWS).read_text().splitlines()]
    assert timeless(found) == timeless(map(json.loads, lines))


def test_a_damaged_line_in_the_middle_is_refused(tmp_path):
    run(laid_out(), writer(), Records(tmp_path))
    lines = (tmp_path / ROWS).read_bytes().splitlines(keepends=True)
    (tmp_path / ROWS).write_bytes(lines[0] + b"{}\n" + lines[2])
    with pytest.raises(InputError, match=r"Line 2 of .* is no row"):
        Records(tmp_path)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (Options(limit=3, window=40), "'windows' of perplexity was 2 and is 3 now"),
        (Options(limit=2, window=40, text="some words of another text " * 20), "'text' of perplexity was own"),
    ],
)
def test_results_of_other_settings_are_not_mixed(tmp_path, options, what):
    run(laid_out(), writer(), Records(tmp_path))
    before = (tmp_path / ROWS).read_bytes(), (tmp_path / MANIFEST).read_bytes()
    with pytest.raises(InputError, match=what):
        run(laid_out(options=options), writer(), Records(tmp_path))
    assert before == ((tmp_path / ROWS).read_bytes(), (tmp_path / MANIFEST).read_bytes())


@pytest.mark.parametrize("key", ["model", "weights", "dtype"])
def test_results_of_another_model_are_not_mixed(tmp_path, key):
    run(laid_out(), writer(), Records(tmp_path))
    model_folders.edit_json(tmp_path / MANIFEST, **{key: "other"})
    with pytest.raises(InputError, match=r"another run.*was other"):
        run(laid_out(), writer(), Records(tmp_path))


def test_results_of_another_task_version_are_not_mixed(tmp_path, monkeypatch):
    run(laid_out(), writer(), Records(tmp_path))
    monkeypatch.setattr(find("perplexity")[0], "VERSION", 2)
    with pytest.raises(InputError, match="'version' of perplexity was 1 and is 2 now"):
        run(laid_out(), writer(), Records(tmp_path))


def test_tasks_can_be_added_to_a_folder(tmp_path):
    run(laid_out(), writer(), Records(tmp_path))
    run(laid_out(tasks="recall"), writer(), Records(tmp_path))
    assert json.loads((tmp_path / MANIFEST).read_text())["tasks"].keys() == {"perplexity", "recall"}
    assert len(Records(tmp_path).rows) == 6


def test_results_without_their_manifest_are_refused(tmp_path):
    run(laid_out(), writer(), Records(tmp_path))
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(InputError, match="unknown what was run"):
        run(laid_out(), writer(), Records(tmp_path))


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    calls = []
    sync = os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 5:  # the manifest, its folder and two rows had room
            os.truncate(descriptor, os.fstat(descriptor).st_size - 10)  # a part of the row is on the disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"No space left on device. The 2 rows written before are safe.*goes on"):
        run(laid_out(), writer(), Records(tmp_path))
    assert len(Records(tmp_path).rows) == 2
    run(laid_out(), writer(), Records(tmp_path))
    rows = Records(tmp_path).rows
    assert [key_of(row) for row in rows] == [planned.cell for planned in laid_out().planned]


def test_rows_of_a_run_that_ended_in_the_meantime_are_kept(tmp_path):
    late = Records(tmp_path)  # read before the other run wrote anything
    run(laid_out("tova"), writer(), Records(tmp_path))
    run(laid_out("local"), writer(), late)
    found = [json.loads(line) for line in (tmp_path / ROWS).read_text().splitlines()]
    assert [(row["policy"], row["budget"]) for row in found] == [
        (policy, budget) for policy in ("tova", "local") for budget in ("20%", "12")
    ]


def test_a_second_writer_is_refused_while_rows_are_made(tmp_path):
    def second(planned):
        with pytest.raises(InputError, match="Another run is writing to"):
            run(laid_out("tova"), writer(), Records(tmp_path))

    run(laid_out("local"), writer(), Records(tmp_path), second)
    assert [row["policy"] for row in Records(tmp_path).rows] == ["local", "local"]


def test_a_folder_that_vanishes_is_a_clear_error(tmp_path):
    folder = tmp_path / "out"

    def vanish(planned):
        if Records(folder).rows:
            folder.rename(tmp_path / "elsewhere")

    with pytest.raises(InputError, match=r"No such file or directory. Make room"):
        run(laid_out("local"), writer(), Records(folder), vanish)
    assert len(Records(tmp_path / "elsewhere").rows) == 1


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        Records(tmp_path / "file")
    with pytest.raises(InputError, match="Not a directory"):
        run(laid_out(), writer(), Records(tmp_path / "file" / "in"))


def test_a_policy_that_runs_out_of_room_names_its_cell(tmp_path):
    task = find("agreement")[0].load(writer().checkpoint, OPTIONS)
    grid = laid_out("full", tasks="agreement")
    short = Planned(grid.planned[0].cell, parse("full"), PLAIN, (10, 10), (35, 35))
    grid = dataclasses.replace(grid, parts=[TaskPart(task, [short], OPTIONS)])
    with pytest.raises(CapacityError, match="agreement prompt=35,new=5: full at 100%: Row 0"):
        run(grid, writer(), Records(tmp_path))


def test_a_profile_of_heads_is_named_by_its_content(tmp_path):
    checkpoint = loading.find(model_folders.folder())
    shape = {"layers": checkpoint.config.num_hidden_layers, "kv_heads": checkpoint.config.num_key_value_heads}

    def named(file, need):
        heads = ((need,) * shape["kv_heads"],) * shape["layers"]
        Profile(model=shape, heads=heads, least=5).save(tmp_path / file)
        return Setup(head_budget=f"profile:{tmp_path / file}").differences(checkpoint, parse("h2o"))

    first, copied, edited = named("a.json", 0.5), named("b.json", 0.5), named("a.json", 0.25)
    assert first == copied != edited
    assert re.fullmatch(r"head-budget=profile:[0-9a-f]{8}", first)


def test_rows_are_put_into_the_order_of_their_cells_where_they_stand(tmp_path):
    records = Records(tmp_path)
    run(laid_out("tova,local"), writer(), records)
    before = (tmp_path / ROWS).read_bytes().splitlines()
    tova, local = ([planned.cell for planned in laid_out(policy).planned] for policy in ("tova", "local"))
    with records.locked():
        records.open(json.loads((tmp_path / MANIFEST).read_text()))
        records.arrange([local[1], tova[0], Cell("mass", "a", "b", "1", 0)])
        assert (tmp_path / ROWS).read_bytes().splitlines() == [before[at] for at in (3, 1, 2, 0)]
        records.append({**records.rows[0], "policy": "more"})
        records.arrange(list(records.done))
    found = Records(tmp_path).rows
    assert found == records.rows
    assert {row["policy"] for row in found} == {"tova", "local", "more"}


def test_rows_in_order_are_not_written_again(tmp_path, monkeypatch):
    records = Records(tmp_path)
    run(laid_out("local"), writer(), records)
    monkeypatch.setattr(Records, "write_bytes", None)
    records.arrange([planned.cell for planned in laid_out("local").planned])
