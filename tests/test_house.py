"""The source tree's counts, which only go down: how large, how tangled, how often one fact is told."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from support import house

MOST_LINES = 91_846
MOST_FILES = 330
MOST_LINES_OF = {("predict", "memory"): 5_464}
TESTS = Path(__file__).parent
ROOT = TESTS.parent
DECISION = ROOT / "docs" / "decisions" / "0104-one-house.md"


@pytest.fixture(scope="module")
def modules() -> list[house.Source]:
    return house.sources()


@pytest.fixture(scope="module")
def imports(modules: list[house.Source]) -> set[house.Import]:
    return house.imports(modules)


def test_lines_and_files(modules: list[house.Source]) -> None:
    assert sum(module.text.count("\n") for module in modules) <= MOST_LINES
    assert len(modules) <= MOST_FILES
    for rooms, most in MOST_LINES_OF.items():
        assert sum(module.text.count("\n") for module in modules if module.room in rooms) <= most


def test_circles_of_imports(imports: set[house.Import]) -> None:
    assert house.circles({one for one in imports if not one.for_types}) == []
    assert house.circles(imports) == [], "under TYPE_CHECKING"


def test_imports_name_modules_that_are_there(modules: list[house.Source]) -> None:
    """A type checker would find a module that is gone in another checkout that is installed."""
    names = {module.name for module in modules}
    folders = (ROOT / name for name in ("src", "tests", "benchmarks", "examples"))
    missing = {
        (file.name, name)
        for file in (file for folder in folders for file in folder.rglob("*.py"))
        for name in re.findall(
            r"^ *(?:from|import) (jettison[.a-z0-9_]*) ?(?:import|as|$)", file.read_text("utf-8"), re.M
        )
        if name not in names
    }
    assert missing == set()


def test_modules_that_one_other_imports_have_a_reason(modules: list[house.Source], imports: set[house.Import]) -> None:
    _, _, table = DECISION.read_text(encoding="utf-8").partition("## Modules with one importer")
    listed = set(re.findall(r"`([a-z_.]+)`", table.partition("## Consequences")[0]))
    lone = {name.removeprefix("jettison.") for name in house.lone_importers(modules, imports)}
    assert lone == listed


def test_a_class_name_has_one_meaning(modules: list[house.Source]) -> None:
    assert house.double_classes(modules) == {}


def test_names_of_frameworks_and_families(modules: list[house.Source]) -> None:
    for wanted in (house.frameworks(), house.families()):
        assert house.named(modules, wanted, house.HOMES) == {}


def test_what_is_generic_names_no_framework(modules: list[house.Source]) -> None:
    """What lists, loads, prices and suggests: a target, a preset or a flag is added by one folder."""
    files = {"spec/frameworks.py", "cli/list_names.py", "cli/export.py", "cli/suggestions.py", "report/tables.py"}
    generic = [module for module in modules if module.file in files]
    assert len(generic) == len(files)
    assert house.named(generic, house.frameworks(), ()) == {}
    assert all((file.parent / "README.md").exists() for file in house.PACKAGE.glob("frameworks/*/defaults.toml"))


def test_the_counts_see_what_they_count() -> None:
    """Two modules: a circle through a function, lone importers, one class name twice, a name in a text."""
    first = ["def go() -> None:", '    """Like megatron."""', "    from p import b", '    print("megatron-lm", b)']
    texts = {"p.a": "\n".join([*first, "class _One: ..."]), "p.b": "from p.a import go\nclass One:\n    here = go\n"}
    made = [
        house.Source(name=name, file=name.replace(".", "/") + ".py", text=text, tree=house.ast.parse(text))
        for name, text in texts.items()
    ]
    found = house.imports(made)
    assert house.circles(found) == [["p.a", "p.b"]]
    assert house.circles({one for one in found if not one.deferred}) == []
    assert house.lone_importers(made, found) == {"p.a": "p.b", "p.b": "p.a"}
    assert house.double_classes(made) == {"One": ["p/a.py", "p/b.py"]}
    assert house.named(made, frozenset({"megatron"}), ()) == {"p/a.py": {"megatron": 1}}


def test_each_kind_of_check_is_quick_somewhere() -> None:
    """Name the quick test of its kind in `slow.toml`, where no case of a test is quick."""
    rules = tomllib.loads((TESTS / "slow.toml").read_text(encoding="utf-8"))
    for name, rule in rules.items():
        assert len(rule) == 1 and {*rule} <= {"every", "quick", "instead"}, name
        for test in (name, rule.get("instead", name)):
            file, _, function = test.partition("::")
            assert f"def {function}(" in (TESTS / file).read_text(encoding="utf-8"), test
        if "instead" in rule:
            assert "instead" not in rules.get(rule["instead"], {}), f"{name}: {rule['instead']} is slow too"


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Two of one name in folders that are no packages are one module: collecting all tests would fail."""
    names = Counter(path.stem for path in TESTS.rglob("test_*.py") if not (path.parent / "__init__.py").exists())
    assert {name for name, count in names.items() if count > 1} == set()
