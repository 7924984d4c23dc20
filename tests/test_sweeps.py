"""Shares of the slow tests: together they are all of them, and no test is in two."""

import pytest
import sweeps

pytest_plugins = "pytester"
OF = 14
SUITE = """
import pytest

@pytest.mark.parametrize("n", range(60))
def test_long_list(n):
    pass

@pytest.mark.slow
@pytest.mark.parametrize("n", range(40))
def test_slow_list(n):
    pass

@pytest.mark.slow
def test_slow():
    pass

def test_fast():
    pass

@pytest.mark.whole
@pytest.mark.parametrize("n", range(30))
def test_fast_list(n):
    pass
"""
CONFTEST = """
import sweeps

def pytest_addoption(parser):
    sweeps.add_option(parser)

def pytest_collection_modifyitems(config, items):
    sweeps.choose(config, items)
"""


def shares():
    return [sweeps.Share(number, OF) for number in range(1, OF + 1)]


def names(items):
    return sorted(item.nodeid for item in items)


@pytest.mark.long
def test_the_shares_together_are_all_slow_tests_and_each_is_in_one(pytester):
    items = pytester.getitems(SUITE)
    sweeps.thin(items)
    slow = [item for item in items if item.get_closest_marker("slow")]
    assert (len(items), len(slow) > 80) == (132, True)
    assert not any(item.name.startswith("test_fast_list") for item in slow)  # a whole one
    others = [names(share.others(items)) for share in shares()]
    own = [sorted(set(names(slow)) - set(some)) for some in others]
    assert sorted(name for some in own for name in some) == names(slow)
    assert sum(bool(some) for some in own) > OF // 2


def test_each_test_of_this_run_is_in_one_share(request):
    found = names(request.session.items)
    assert all(sum(share.has(name) for share in shares()) == 1 for name in found)


def test_a_run_leaves_out_the_other_shares_and_no_fast_test(pytester):
    pytester.makeini("[pytest]\nmarkers = slow: takes long\n whole: stays as it is")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SUITE)
    (run,) = pytester.inline_run("--collect-only", "--share", f"2/{OF}").getcalls("pytest_collection_finish")
    items = run.session.items
    slow = [item for item in items if item.get_closest_marker("slow")]
    assert 0 < len(slow) < 30
    assert all(sweeps.Share(2, OF).has(name) for name in names(slow))
    assert {"test_fast", "test_long_list[0]"} <= {item.name for item in items} - {item.name for item in slow}


@pytest.mark.parametrize("text", ["0/14", "15/14", "3", "-1/3", "a/b", "1/0"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(ValueError, match="is no share"):
        sweeps.Share.parse(text)


def test_about_one_test_in_four_is_chosen_and_every_one_in_one():
    found = [f"tests/test_x.py::test_{number}" for number in range(400)]
    assert 70 < sum(sweeps.is_one_in(name, 4) for name in found) < 130
    assert all(sweeps.is_one_in(name, 1) for name in found)
