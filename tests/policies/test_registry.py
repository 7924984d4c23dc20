import dataclasses
import importlib
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.main import app
from kvkeep.evals.arms import split_policies
from kvkeep.policies import ENTRY_POINT_GROUP, builtin_names, builtin_summary, registry
from kvkeep.policies.base import Policy, option
from kvkeep.policies.h2o import H2O
from kvkeep.policies.random import Random
from kvkeep.policies.triattention import TriAttention


def test_the_files_name_is_the_policys_name():
    assert {"full", "local", "streaming_llm", "h2o", "h2o_avg", "tova", "random"} <= set(kvkeep.available_policies())
    for name, cls in kvkeep.available_policies().items():
        if cls.__module__.startswith("kvkeep."):
            assert cls.__module__ == f"kvkeep.policies.{name}"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("h2o", H2O()),
        (" h2o:recent=32 , sinks = 4 ", H2O(recent=32, sinks=4)),
        ("h2o:recent=none", H2O()),
        ("h2o:graduate=replace", H2O(graduate="replace")),
        ("random:mode=reservoir,seed=9", Random(mode="reservoir", seed=9)),
    ],
)
def test_parse(text, policy):
    assert kvkeep.parse(text) == policy
    assert kvkeep.parse(kvkeep.spec(policy)) == policy


def test_spec_leaves_defaults_out_and_keeps_the_order_of_declaration():
    assert kvkeep.spec(H2O()) == "h2o"
    assert kvkeep.spec(H2O(graduate="replace", sinks=4, recent=8)) == "h2o:recent=8,sinks=4,graduate=replace"


@pytest.mark.parametrize("name", kvkeep.available_policies())
def test_a_policy_in_a_message_is_its_string(name):
    cls = kvkeep.available_policies()[name]
    changed = {f.name: not f.default for f in dataclasses.fields(cls) if isinstance(f.default, bool)}
    policy = cls(**changed)
    assert str(policy) == f"{policy}" == kvkeep.spec(policy)
    assert str(cls()) == name


def test_a_policy_of_ones_own_in_a_message_is_named_by_its_class():
    assert str(Newest(sinks=2)) == "Newest:sinks=2"
    assert str(Newest()) == "Newest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Newest(Policy):
    sinks: int = option(0, "first tokens")

    def score(self, view, state):
        return view.positions.float()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h20", "Unknown policy 'h20'. Did you mean 'h2o'?"),
        ("H2O", "Unknown policy 'H2O'. Did you mean 'h2o'?"),
        ("StreamingLLM:sinks=2", "Did you mean 'streaming_llm'?"),
        ("", "Unknown policy ''"),
        ("h2o:recnt=3", "has no option 'recnt'. Did you mean 'recent'?"),
        ("h2o:objective=log", "has no option 'objective'. Known: recent, sinks, graduate, decay."),
        ("h2o:recent", "has no value; write h2o:recent=VALUE"),
        ("h2o:recent=", "has no value"),
        ("h2o:recent=3,recent=4", "given twice"),
        ("h2o:recent=x", "h2o:recent='x' is not a whole number"),
        ("h2o:recent=1.5", "not a whole number"),
        ("h2o:recent=-1", "recent=-1 is out of range"),
        ("h2o:graduate=replac", "not a choice. Did you mean 'replace'?"),
        ("ahakv:kernel=4", "kernel=4 has no middle; use an odd number."),
        ("tova:per_head=yes", "neither true nor false"),
        ("local:x=1", "has no option 'x'. Known: none."),
        ("snapkv:lat", "has no option or preset 'lat'. Did you mean 'late'?"),
        ("snapkv:recent=3,late", "Preset 'late' of policy 'snapkv' comes first, without a value: snapkv:late,..."),
        ("snapkv:late=1", "Preset 'late' of policy 'snapkv' comes first, without a value"),
        ("snapkv:late,late", "Preset 'late' of policy 'snapkv' comes first, without a value"),
        ("snapkv:late,window=2,window=3", "given twice"),
        ("snapkv:late,window", "has no value"),
    ],
)
def test_parse_says_what_is_wrong(text, message):
    with pytest.raises(kvkeep.PolicyError) as caught:
        kvkeep.parse(text)
    assert message in str(caught.value)


def test_a_preset_is_a_name_for_options_that_may_be_overridden():
    assert kvkeep.parse("snapkv:late") == kvkeep.parse("snapkv:window=8,kernel=13,recent=16")
    assert kvkeep.parse("snapkv:late,kernel=5") == kvkeep.parse("snapkv:window=8,kernel=5,recent=16")
    assert kvkeep.parse("snapkv: late , ") == kvkeep.parse("snapkv:late")
    assert kvkeep.spec(kvkeep.parse("snapkv:late")) == "snapkv:window=8,kernel=13,recent=16"


def test_every_preset_has_another_meaning_than_the_plain_name():
    named = {f"{name}:{preset}" for name, cls in kvkeep.available_policies().items() for preset in cls.presets}
    assert named >= {"snapkv:late", "adakv:late", "pyramidkv:late", "keydiff:document"}
    for text in named:
        assert kvkeep.parse(text) != kvkeep.parse(text.partition(":")[0])
        assert registry.label(kvkeep.parse(text)) == text


@pytest.mark.whole
@pytest.mark.parametrize(
    "text", ["h2o", "h2o:recent=32", "snapkv:window=8", "unknown:recent=3", "h2o:wrong=3", "no_such:Class"]
)
def test_other_policies_are_read_as_they_are_written(text):
    assert registry.label(text) == text


def test_a_policy_that_is_not_registered_has_no_name():
    class Mine(kvkeep.Policy):
        def score(self, view, state):
            return view.positions.float()

    with pytest.raises(kvkeep.PolicyError, match="not registered"):
        kvkeep.spec(Mine())


@pytest.mark.parametrize("name", kvkeep.available_policies())
def test_every_policy_is_documented(name):
    module = importlib.import_module(kvkeep.available_policies()[name].__module__)
    lines = module.__doc__.strip().splitlines()
    assert lines[0].endswith(".")
    assert registry.describe(name) == lines[0]
    starts = [line.split(":")[0] for line in lines[2:] if not line.startswith("  ")]
    assert starts == ["Source", "Differs", "Fails when"]


THIRD_PARTY = '''
from dataclasses import dataclass
from kvkeep import Policy, option

@dataclass(frozen=True, kw_only=True)
class EveryOther(Policy):
    """Prefers even positions."""
    sinks: int = option(1, "first tokens that are never evicted")

    def protected(self, budget):
        return self.sinks, 0

    def score(self, view, state):
        return (view.positions % 2 == 0).float()
'''

USE_IT = """
from kvkeep import available_policies, parse, spec
from kvkeep.testing import LAWS, Case
from typer.testing import CliRunner
assert list(available_policies())[-1] == "every_other", list(available_policies())
policy = parse("every_other:sinks=2")
assert spec(policy) == "every_other:sinks=2"
for law in LAWS.values():
    law(policy, Case())
from kvkeep.cli.main import app
shown = CliRunner().invoke(app, ["policies"])
assert shown.exit_code == 0 and "every_other" in shown.output, shown.output
print("found and lawful")
"""


@pytest.mark.slow  # tests/docs/test_contributing.py shows the same with a whole package
def test_a_third_party_package_is_found_through_its_entry_point(tmp_path):
    (tmp_path / "every_other.py").write_text(THIRD_PARTY)
    meta = tmp_path / "every_other-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: every-other\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text("[kvkeep.policies]\nevery_other = every_other:EveryOther\n")
    done = subprocess.run(
        [sys.executable, "-c", USE_IT],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "found and lawful", done.stderr


@pytest.mark.long
def test_a_broken_third_party_package_is_named_not_traced(tmp_path):
    (tmp_path / "broken_policy.py").write_text("import nowhere_to_be_found")
    meta = tmp_path / "broken-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text("[kvkeep.policies]\nbroken = broken_policy:Policy\n")
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep", "policies"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: Policy 'broken' cannot be loaded from 'broken_policy:Policy': No module named 'nowhere_to_be_found'"
    ]


@pytest.fixture
def installed(monkeypatch):
    """Sets the entry points of installed packages."""

    def install(**points):
        found = [EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in points.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: found)
        registry.available.cache_clear()

    yield install
    registry.available.cache_clear()


def test_third_party_policies_come_after_the_built_in_ones_in_alphabetical_order(installed):
    installed(zulu=f"{__name__}:Newest", alpha="kvkeep.policies.h2o:H2O")
    assert list(kvkeep.available_policies())[-2:] == ["alpha", "zulu"]
    assert kvkeep.parse("zulu:sinks=2") == Newest(sinks=2)
    assert kvkeep.spec(Newest(sinks=2)) == "zulu:sinks=2"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("points", "message"),
    [
        ({"h2o": "mine:H2O"}, "Entry point 'mine:H2O' wants the policy name 'h2o', which is taken."),
        (
            {"mine": "nowhere_to_be_found:Mine"},
            "Policy 'mine' cannot be loaded from 'nowhere_to_be_found:Mine': No module named 'nowhere_to_be_found'",
        ),
        ({"mine": "os:nothing"}, "Policy 'mine' cannot be loaded from 'os:nothing': "),
        ({"mine": "os.path:join"}, "Entry point 'os.path:join' is not a subclass of kvkeep.policies.base.Policy."),
        ({"mine": "pathlib:Path"}, "Entry point 'pathlib:Path' is not a subclass of kvkeep.policies.base.Policy."),
    ],
)
def test_an_entry_point_that_is_no_policy_of_its_own_is_named(installed, points, message):
    installed(**points)
    with pytest.raises(kvkeep.PolicyError) as caught:
        kvkeep.parse("h2o")
    assert message in str(caught.value)


# ------------------------------------------------------------------ module:Class

MODULES = {
    "mine": THIRD_PARTY + "thing = 3\nclass Plain: pass\n",
    "abstract": "from kvkeep import Policy\nclass Half(Policy): pass\n",
    "needs": THIRD_PARTY
    + """
@dataclass(frozen=True, kw_only=True)
class Needs(EveryOther):
    must: int
@dataclass(frozen=True, kw_only=True)
class Fails(EveryOther):
    def __post_init__(self):
        raise RuntimeError("not today\\nor tomorrow")
@dataclass(frozen=True, kw_only=True)
class Unknown(EveryOther):
    what: "Nowhere" = 3
@dataclass(frozen=True, kw_only=True)
class Named(EveryOther):
    label: str = "none"
@dataclass(frozen=True, kw_only=True)
class Titled(EveryOther):
    title: str = ""
""",
    "raises": "1 / 0",
    "exits": "import sys; sys.exit(3)",
    "lacks": "import nowhere_to_be_found",
    "lacks_its_beginning": "import lacks_its_begin",
    "syntax": "class (",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with modules, which nothing else makes importable."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}_for_kvkeep.py").write_text(text)
    (tmp_path / "package_for_kvkeep").mkdir()
    (tmp_path / "package_for_kvkeep" / "inner.py").write_text(THIRD_PARTY)
    monkeypatch.chdir(tmp_path)
    before = sys.path[:]
    yield tmp_path
    assert sys.path == before
    for name in [name for name in sys.modules if "_for_kvkeep" in name]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "sinks"),
    [
        ("mine_for_kvkeep:EveryOther", 1),
        (" mine_for_kvkeep:EveryOther:sinks=3 ", 3),
        ("package_for_kvkeep.inner:EveryOther:sinks=2", 2),
        ("mine_for_kvkeep:EveryOther:", 1),
    ],
)
def test_module_and_class_name_a_policy(here, text, sinks):
    policy = kvkeep.parse(text)
    assert policy.sinks == sinks
    shown = kvkeep.spec(policy)
    assert shown == text.strip().rstrip(":")
    assert kvkeep.parse(shown) == policy
    assert f"{policy}".startswith("EveryOther")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing_for_kvkeep:Policy", "There is no policy and no module 'nothing_for_kvkeep'."),
        ("nothing.for_kvkeep:Policy", "There is no policy and no module 'nothing.for_kvkeep'."),
        ("mine_for_kvkeep.py:EveryOther", "no module 'mine_for_kvkeep.py'. Leave out .py: mine_for_kvkeep."),
        ("folder/mine_for_kvkeep.py:EveryOther", "is MODULE:CLASS, with dots between folders and without .py"),
        ("package_for_kvkeep.inner", "Unknown policy 'package_for_kvkeep.inner'. A policy of your own is MODULE:CLASS"),
        ("mine_for_kvkeep:EveryOthr", "has no 'EveryOthr'. Did you mean 'EveryOther'? Known: EveryOther."),
        ("mine_for_kvkeep:EveryOther.inner", "Module 'mine_for_kvkeep' has no 'EveryOther.inner'."),
        ("mine_for_kvkeep:thing", "'mine_for_kvkeep:thing' is not a subclass of kvkeep.Policy."),
        ("mine_for_kvkeep:Plain", "is not a subclass of kvkeep.Policy."),
        ("mine_for_kvkeep:EveryOther:snks=3", "has no option 'snks'. Did you mean 'sinks'?"),
        ("mine_for_kvkeep:EveryOther:sinks", "write mine_for_kvkeep:EveryOther:sinks=VALUE."),
        ("mine_for_kvkeep:EveryOther:sinks=x", "mine_for_kvkeep:EveryOther:sinks='x' is not a whole number."),
        ("mine_for_kvkeep:EveryOther:sinks=2:3", "is not a whole number."),
        ("mine_for_kvkeep", "Unknown policy 'mine_for_kvkeep'."),
        ("abstract_for_kvkeep:Half", "cannot be made: TypeError: Can't instantiate abstract class Half"),
        ("kvkeep:Policy", "cannot be made: TypeError"),
        ("needs_for_kvkeep:Needs", "cannot be made: TypeError: "),
        ("needs_for_kvkeep:Fails", "cannot be made: RuntimeError: not today"),
        ("needs_for_kvkeep:Unknown", "cannot be made: NameError: name 'Nowhere' is not defined"),
        ("raises_for_kvkeep:Policy", "cannot be imported: ZeroDivisionError: division by zero"),
        ("exits_for_kvkeep:Policy", "cannot be imported: SystemExit: 3"),
        ("lacks_for_kvkeep:Policy", "cannot be imported: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        (
            "lacks_its_beginning_for_kvkeep:Policy",
            "cannot be imported: ModuleNotFoundError: No module named 'lacks_its_begin'",
        ),
        ("syntax_for_kvkeep:Policy", "cannot be imported: SyntaxError: "),
        ("h20:recent", "There is no policy and no module 'h20'. Did you mean 'h2o'?"),
        ("h20:recent=3", "Unknown policy 'h20'. Did you mean 'h2o'?"),
        ("os.path:join", "is not a subclass"),
        (":Policy", "Unknown policy ''"),
        ("../mine_for_kvkeep:Policy", "Unknown policy '../mine_for_kvkeep'."),
    ],
)
def test_a_wrong_module_or_class_ends_in_one_line(here, text, message):
    with pytest.raises(kvkeep.PolicyError) as caught:
        kvkeep.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_option_may_be_any_text(here):
    policy = kvkeep.parse("needs_for_kvkeep:Named:label= a b ,sinks=2")
    assert (policy.label, policy.sinks) == ("a b", 2)
    assert kvkeep.spec(policy) == "needs_for_kvkeep:Named:sinks=2,label=a b"


@pytest.mark.parametrize("text", ["a,b.pt", "a,sinks=3", " a", "a ", "", "none", "None"])
def test_a_text_that_a_string_could_not_hold_is_refused(text):
    """Files name a policy by its string, and would be read as another one."""
    with pytest.raises(kvkeep.PolicyError, match=r"cannot be written .* can be renamed"):
        TriAttention(calibration=text)


def test_a_text_may_be_none_where_nothing_else_is_meant_by_it(here):
    label = kvkeep.parse("needs_for_kvkeep:Titled:title=none")
    assert label.title == "none"
    assert kvkeep.parse(kvkeep.spec(label)) == label


def test_a_registered_name_goes_before_a_module(here):
    (here / "h2o.py").write_text(THIRD_PARTY)
    assert kvkeep.parse("h2o:recent=3") == H2O(recent=3)
    with pytest.raises(kvkeep.PolicyError, match="has no option 'EveryOther'"):
        kvkeep.parse("h2o:EveryOther")


def test_a_list_of_policies_has_modules_and_classes_in_it(here):
    found = split_policies("full,mine_for_kvkeep:EveryOther,sinks=2,mine_for_kvkeep:EveryOther:sinks=3,local")
    assert [getattr(policy, "sinks", None) for policy in found] == [None, 2, 3, None]


def test_the_command_line_takes_module_and_class(here):
    shown = CliRunner().invoke(app, ["policies", "show", "mine_for_kvkeep:EveryOther:sinks=2"])
    assert shown.exit_code == 0, shown.output
    assert "Prefers even positions." in shown.output
    assert "first tokens that are never evicted" in shown.output
    done = CliRunner().invoke(
        app,
        ["generate", "-p", "the dog", "--policy", "mine_for_kvkeep:EveryOther:sinks=2", "--budget", "8", "-n", "12"],
    )
    assert done.exit_code == 0, done.output
    assert "mine_for_kvkeep:EveryOther:sinks=2, budget 8" in " ".join(done.output.split())


@pytest.mark.whole
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graduate": "xx"}, "graduate='xx' is not 'compete' or 'replace'"),
        ({"recent": 2.5}, "recent=2.5 is not a whole number or none"),
        ({"sinks": True}, "sinks=True is not a whole number"),
        ({"sinks": None}, "sinks=None is not a whole number"),
        ({"recent": -1}, "recent=-1 is out of range"),
    ],
)
def test_options_are_checked_in_python_too(options, message):
    policy = object.__new__(H2O)  # past the type checks of the tests, which users do not have
    policy.__dict__.update({**vars(H2O()), **options})
    with pytest.raises(kvkeep.PolicyError) as caught:
        policy.__post_init__()
    assert message in str(caught.value)


def test_a_list_of_names_and_lines_imports_no_policy():
    """The lines that are read from the files as text are those of the modules."""
    assert {name: builtin_summary(name) for name in builtin_names()} == {
        name: registry.describe(name) for name in builtin_names()
    }
    assert list(registry.available())[: len(builtin_names())] == builtin_names()
