"""Each rule that warns, on numbers for which its answer is plain."""

import math
import shlex

import pytest

from kvkeep_lab.analysis.recommend import WARNINGS, advise

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


@pytest.mark.parametrize("name", ["h2o; rm -rf ~", "$(touch x)", "a 'x'", "`id`", "two\nlines"])
def test_the_command_holds_nothing_that_a_shell_would_run(name):
    found = advise({}, f"./{name}")
    assert shlex.split(found.command) == ["kvkeep", "tune", f"./{name}", "--text", "FILE"]


def test_the_next_step_is_the_search_and_risks_stand_beside_it():
    found = advise({"sparsity": {"sparsity_by_layer": [0.99, 0.5]}}, "")
    assert found.command == "kvkeep tune --text FILE"
    assert [risk[:3] for risk in found.risks] == ["R4:"]


def test_r3_names_budgets_that_cost_no_perplexity_and_lose_the_past():
    cells = {"h2o": ((1, 0.0, 0.0), (0, 0.3, 0.6)), "local": ((None, 0.5, 0.0), (None, 0.1, 0.2))}
    (said,) = warnings(budgets(cells))
    assert said.startswith("R3: ")
    assert "h2o at 20% keeps 30%, local at 50% keeps 20%:" in said
    assert warnings(budgets(cells, gain=0.01)) == []


def test_r3_counts_the_standard_error():
    assert warnings(budgets({"h2o": ((1, math.log(1.02) - 0.0005, 1), (0, 0, 0))})) == []


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
