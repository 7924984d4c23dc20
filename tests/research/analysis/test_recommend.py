"""Each rule of the recommendation on numbers for which its answer is plain."""

import math
import shlex

import pytest

from kvkeep.research.analysis.recommend import WARNINGS, advise

SHARES = [0.1, 0.2, 0.5]


def budgets(policies, gain=1.0):
    """Policy → (costs, kept) per share, as the measurement gives them."""

    def floats(values):
        return [None if value is None else float(value) for value in values]

    cells = {
        name: {"excess": floats(cost), "error": [0.001] * 3, "kept": floats(kept)}
        for name, (cost, kept) in policies.items()
    }
    return {"budgets": {"budgets": SHARES, "policies": cells, "gain": gain, "n_tokens": 1000, "perplexity": 20.0}}


def test_r1_takes_the_smallest_budget_within_two_percent():
    found = advise(budgets({"h2o": ((0.1, 0.01, 0.0), (0.1, 0.6, 0.9)), "local": ((0.2, 0.03, 0.0), (0, 0, 0.9))}), "")
    assert (found.policy, found.budget) == ("h2o", "20% of the text")
    assert found.command == "kvkeep generate --policy h2o --budget 200"
    assert "+1.0%" in found.reasons[0]
    assert found.risks == ()


def test_r1_counts_the_standard_error():
    almost = math.log(1.02) - 0.0005
    found = advise(budgets({"h2o": ((1, almost, 0.0), (1, 1, 1))}), "org/model")
    assert found.budget == "50% of the text"
    assert found.command.startswith("kvkeep generate org/model --policy")


@pytest.mark.parametrize("name", ["h2o; rm -rf ~", "$(touch x)", "h2o:decay=0.9 'x'", "`id`", "two\nlines"])
def test_the_command_holds_nothing_that_a_shell_would_run(name):
    found = advise(budgets({name: ((1, 0.0, 0.0), (1, 1, 1))}), f"./{name}")
    assert shlex.split(found.command) == ["kvkeep", "generate", f"./{name}", "--policy", name, "--budget", "200"]


def test_r1_keeps_everything_where_nothing_is_close():
    found = advise(budgets({"h2o": ((0.5, 0.4, 0.3), (0, 0, 0)), "tova": ((0.5, 0.4, 0.2), (0, 0, 0))}), "")
    assert found.policy == "full"
    assert "tova at 50% with +22.1%" in found.short
    assert found.command == ""


def test_r1_leaves_out_what_cannot_run():
    found = advise(budgets({"h2o": ((None, 0.0, 0.0), (None, 0.7, 0.9))}), "")
    assert found.budget == "20% of the text"


def test_r2_prefers_who_keeps_the_far_past_over_who_is_cheapest():
    cells = {"local": ((1, 0.001, 0), (0, 0.1, 1)), "keydiff": ((1, 0.015, 0), (0, 0.8, 1))}
    assert advise(budgets(cells), "").policy == "keydiff"
    assert advise(budgets(cells, gain=0.01), "").policy == "local"


def test_r2_leaves_windows_out_where_heavy_hitters_matter():
    cells = {"local": ((1, 0.001, 0), (0, 0.9, 1)), "tova": ((1, 0.015, 0), (0, 0.2, 1))}
    assert advise(budgets(cells), "").policy == "local"
    found = advise(budgets(cells) | LOUD["R5"], "")
    assert found.policy == "tova"
    assert "left out, see R5" in found.reasons[1]
    smaller = cells | {"streaming_llm": ((0.0, 0.0, 0), (0, 0, 0))}
    assert advise(budgets(smaller), "").budget == "10% of the text"
    assert advise(budgets(smaller) | LOUD["R5"], "").budget == "20% of the text"
    del cells["tova"]
    assert advise(budgets(cells) | LOUD["R5"], "").policy == "local"


def test_r2_among_equals_the_cheapest():
    cells = {"tova": ((1, 0.015, 0), (0, 0.80, 1)), "h2o": ((1, 0.005, 0), (0, 0.76, 1))}
    assert advise(budgets(cells), "").policy == "h2o"


def test_r3_names_a_careful_budget_or_says_that_there_is_none():
    cells = {"h2o": ((1, 0.0, 0.0), (0, 0.3, 0.45)), "keydiff": ((1, 1, 0.1), (0, 0, 0.9))}
    found = advise(budgets(cells), "")
    assert "Where details from far back matter, keydiff with 50%." in found.short
    assert found.risks[0].startswith("R3: h2o at 20% keeps 30%")
    cells["keydiff"] = ((1, 1, 1), (0.9, 0, 0))  # a smaller budget than the winner's is no careful one
    found = advise(budgets(cells), "")
    assert "keep the full cache where they matter" in found.short
    assert "every budget" in found.risks[0]


def test_without_budgets_there_is_no_advice_but_there_are_risks():
    found = advise({"sparsity": {"sparsity_by_layer": [0.99, 0.5]}}, "")
    assert found.policy == ""
    assert "no advice" in found.short
    assert [risk[:3] for risk in found.risks] == ["R4:"]


QUIET = {
    "sparsity": {"sparsity_by_layer": [0.95, 0.91]},
    "removal": {"perplexity": {"full": 10.0, "heavy": 12.0, "random": 11.5}},
    "persistence": {"ratio": 0.95, "size": 0.3},
    "retained": {"policies": {"h2o": {"ks": 0.1}}},
    "recall_depth": {"policies": {"full": {"accuracy": 0.8}, "h2o": {"accuracy": 0.5}}},
    "value_prior": {"first_token_size": 0.9},
    "diversity": {"policies": {"full": {"repeated": {"3": 0.1}}, "local": {"repeated": {"3": 0.15}}}},
}
LOUD = {
    "R4": {"sparsity": {"sparsity_by_layer": [0.95, 0.89]}},
    "R5": {"removal": {"perplexity": {"full": 10.0, "heavy": 30.0, "random": 11.5}}},
    "R6": {"persistence": {"ratio": 0.45, "size": 0.3}},
    "R7": {"retained": {"policies": {"h2o": {"ks": 0.3}}}},
    "R8": {"recall_depth": {"policies": {"full": {"accuracy": 0.8}, "h2o": {"accuracy": 0.3}}}},
    "R9": {"value_prior": {"first_token_size": 0.2}},
    "R10": {"diversity": {"policies": {"full": {"repeated": {"3": 0.1}}, "local": {"repeated": {"3": 0.4}}}}},
}


def warnings(results):
    return [said for rule in WARNINGS if (said := rule(results)) is not None]


def test_a_quiet_model_gets_no_warning():
    assert warnings(QUIET) == []


@pytest.mark.parametrize("rule", LOUD)
def test_each_rule_warns_alone(rule):
    (said,) = warnings(QUIET | LOUD[rule])
    assert said.startswith(f"{rule}: ")


def test_what_was_not_measured_or_is_null_says_nothing():
    assert warnings({}) == []
    assert warnings({"persistence": {"ratio": 0.9, "size": 0.85}}) == []
    empty = {"persistence": {"ratio": None, "size": None}, "retained": {"policies": {}}, "value_prior": {}}
    assert warnings(empty) == []


def test_questions_that_the_full_cache_cannot_answer_say_nothing():
    weak = {"recall_depth": {"policies": {"full": {"accuracy": 0.2}, "h2o": {"accuracy": 0.0}}}}
    assert warnings(weak) == []
