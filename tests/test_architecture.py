"""Imports go one way, and the rooms that must not need torch do not import it."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from support.patience import PATIENCE

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SOURCE / "jettison"
NOTED = {".py", ".toml", ".js", ".txt"}

RANKS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("spec",),
    ("memory", "families"),
    ("ledger",),
    ("formula", "capture"),
    ("cost",),
    ("solve",),
    ("predict", "runtime"),
    ("request",),
    ("diagnose",),
    ("search", "parallel"),
    ("dryrun", "models"),
    ("planner",),
    ("frameworks",),
    ("report", "integrations"),
    ("verify",),
    ("train",),
    ("cli",),
    ("__main__",),
)
RANK_OF = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
FREE = frozenset({"cli"})  # may import anything, since it does so when a verb is called

WITHOUT_TORCH = (
    "core",
    "spec",
    "families",
    "ledger",
    "memory",
    "formula",
    "cost",
    "request",
    "solve",
    "predict",
    "search",
    "frameworks",
    "diagnose",
    "report",
    "cli",
)
"""Rooms that can be imported where torch is not installed."""
TRAINERS = {f"frameworks/{file.parent.name}/{file.name}" for file in PACKAGE.glob("frameworks/*/integration.py")}
WITH_TORCH = frozenset(f"diagnose/{name}.py" for name in ("machine_calibration", "probes")) | TRAINERS
"""Files of these rooms that need torch: they are imported when they are called."""


class Import(NamedTuple):
    """One imported module, as written in one line of one file."""

    file: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def room_of(file: Path) -> str:
    """The room that a file belongs to; "" is the package's own ``__init__``."""
    first = file.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports_of(file: Path) -> Iterator[Import]:
    """All imports of a file, those inside functions too, with relative ones made absolute."""
    name = str(file.relative_to(SOURCE))
    package = file.relative_to(SOURCE).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), filename=name)):
        if isinstance(node, ast.Import):
            yield from (Import(name, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "jettison":  # `from jettison import units` names a room, or a public object
                yield from (Import(name, node.lineno, f"jettison.{alias.name}") for alias in node.names)
            else:
                yield Import(name, node.lineno, module)


def complaint(room: str, found: Import) -> str | None:
    """Why ``room`` may not have this import, or None where it may."""
    parts = found.target.split(".")
    if parts[0] != "jettison" or room in FREE:
        return None
    target = parts[1] if len(parts) > 1 else ""
    if target in {room, "", "__version__"}:
        return None
    if target not in RANK_OF:
        return f"{found}: {target!r} is no room; expected one of {', '.join(RANK_OF)}"
    if RANK_OF[target] >= RANK_OF[room]:
        return f"{found}: {room!r} (rank {RANK_OF[room]}) may import lower ranks only, {target!r} has {RANK_OF[target]}"
    return None


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_imports_go_one_way() -> None:
    complaints = [
        reason
        for file in source_files()
        if (room := room_of(file))
        for found in imports_of(file)
        if (reason := complaint(room, found)) is not None
    ]
    assert not complaints, "\n".join(complaints)


def test_every_file_belongs_to_a_room() -> None:
    strays = [str(file.relative_to(SOURCE)) for file in source_files() if room_of(file) not in {"", *RANK_OF}]
    assert not strays, f"{strays} belong to no room; add the room to RANKS"


def test_classes_that_data_names_are_there() -> None:
    """`schemas.toml` has modules by name, which nothing that moves a class follows."""
    told = tomllib.loads((PACKAGE / "core" / "schemas.toml").read_text(encoding="utf-8"))
    classes = {(module, name) for module, names in told["_imports"].items() for name in names}
    classes |= {
        (found[0], found[2]) for table in told.values() if (found := table.get("_fields", "").rpartition("."))[0]
    }
    assert len(classes) > 10
    for module, name in sorted(classes):
        file = SOURCE.joinpath(*module.split(".")).with_suffix(".py")
        assert file.is_file(), f"schemas.toml has {name} of {module}, which is not there"
        assert re.search(rf"^class {name}\b", file.read_text(encoding="utf-8"), re.MULTILINE), f"{module} has no {name}"


def test_notes_that_are_referred_to_are_there() -> None:
    texts = [file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.*")) if file.suffix in NOTED]
    heads, mentions = re.compile(r'^[ #/*"]*NOTE \[ (.+?) \]$', re.MULTILINE), re.compile(r"NOTE \[ (.+?) \]")
    missing = {name for text in texts for name in mentions.findall(text)}
    missing -= {name for text in texts for name in heads.findall(text)}
    assert not missing, f"{sorted(missing)} stand nowhere"


def test_the_package_itself_loads_no_room() -> None:
    code = "import jettison, sys; print(*(name for name in sys.modules if name.startswith('jettison.')))"
    assert run_python(code).split() == []


def test_integrations_are_there_at_once_and_load_nothing_heavy() -> None:
    heavy = "('torch', 'transformers', 'lightning', 'torchtitan', 'pydantic', 'rich')"
    code = f"import jettison, sys; jettison.integrations; print(*[name for name in {heavy} if name in sys.modules])"
    assert run_python(code).split() == []
    loaded = run_python("import jettison; print(jettison.integrations.transformers.auto_checkpoint_trainer.__module__)")
    assert loaded.split() == ["jettison.frameworks.transformers.integration"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trl", "AttributeError module 'jettison.integrations' has no attribute 'trl'; it has lightning, torchtitan,"),
        ("lightning", "ImportError jettison.integrations.lightning needs lightning: pip install '.[integrations]' in"),
    ],
)
def test_what_no_integration_is_for_is_named(name: str, text: str) -> None:
    code = "import sys; sys.modules['lightning'] = None; import jettison.integrations as i\n"
    code += f"try: i.{name}\nexcept Exception as error: print(type(error).__name__, error)"
    assert run_python(code).startswith(text)


def test_rooms_without_torch_never_name_it() -> None:
    rooms = frozenset(WITHOUT_TORCH) - FREE
    found = [
        str(found)
        for file in source_files()
        if room_of(file) in rooms and str(file.relative_to(PACKAGE)) not in WITH_TORCH
        for found in imports_of(file)
        if found.target.split(".")[0] in {"torch", "transformers"}
        or found.target.removeprefix("jettison.").replace(".", "/") + ".py" in WITH_TORCH
    ]
    assert not found, "\n".join(found)


def imported_when_loaded(file: Path) -> Iterator[str]:
    """Modules of ours that a file imports as it is loaded: not inside functions, and not for type checkers alone."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jettison."):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_file_is_in_a_circle_of_imports() -> None:
    names = {
        ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): file
        for file in source_files()
    }
    left = {name: set(imported_when_loaded(file)) & set(names) - {name} for name, file in names.items()}
    while done := {name for name, wants in left.items() if not wants & left.keys()}:
        left = {name: wants for name, wants in left.items() if name not in done}
    assert not left, f"in a circle, or importing one: {sorted(left)}"


def test_each_way_through_the_house_goes_down_once() -> None:
    """Of the files that CONTRIBUTING lists: they are there, each room is entered once, from a higher one."""
    text = (SOURCE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ways = [re.findall(r"`([a-z_]+/[a-z_]+\.py)`", line) for line in text.splitlines() if "` → `" in line]
    assert len(ways) == 6
    for way in ways:
        assert all((PACKAGE / file).exists() for file in way), way
        rooms = [room for room, _ in groupby(file.partition("/")[0] for file in way)]
        ranks = [RANK_OF[room] for room in rooms]
        assert ranks == sorted(set(ranks), reverse=True), rooms


def test_a_room_does_not_take_the_place_of_a_public_function() -> None:
    """Importing a room binds its name in the package; only two have a public function's, which keeps it."""
    import jettison

    assert set(jettison._HOME_OF) & set(RANK_OF) == {"search", "verify"}
    code = """
import jettison.search.space, jettison.verify.own_checkpointing, jettison, sys
from jettison.search import search as room
print(jettison.search.__module__, jettison.search.__name__, room.__name__, "jettison.search" in sys.modules)
print(jettison.verify.__module__, "jettison.verify" in sys.modules)
"""
    found = run_python(code).split()
    assert found[:4] == ["jettison.cli.search", "search", "jettison.search.search", "True"]
    assert found[4:] == ["jettison.verify.verify", "True"]


@pytest.mark.parametrize(
    ("room", "target", "allowed"),
    [
        ("ledger", "jettison.core.units", True),
        ("ledger", "jettison.ledger.program", True),
        ("core", "jettison.core.errors", True),
        ("solve", "jettison.ledger.program", True),
        ("ledger", "jettison.solve.problem", False),
        ("formula", "jettison.capture.recorder", False),
        ("capture", "jettison.formula", False),
        ("core", "jettison.ledger", False),
        ("solve", "jettison.Plan", False),
        ("cli", "jettison.verify", True),
        ("solve", "numpy", True),
    ],
)
def test_the_rule_itself(room: str, target: str, allowed: bool) -> None:
    assert (complaint(room, Import("x.py", 1, target)) is None) == allowed


PROBE = """
import importlib, json, sys
leaks = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    for heavy in ("torch", "transformers"):
        if heavy in sys.modules:
            leaks.setdefault(heavy, name)
print(json.dumps(leaks))
"""


def run_python(code: str, *args: str) -> str:
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rooms_without_torch_do_not_import_it() -> None:
    rooms = [r for r in WITHOUT_TORCH if (PACKAGE / f"{r}.py").exists() or (PACKAGE / r / "__init__.py").exists()]
    leaks = json.loads(run_python(PROBE, json.dumps(["jettison", *(f"jettison.{room}" for room in rooms)])))
    assert not leaks, f"imported by: {leaks}"


LEDGER = """
import contextlib, io, json, re, sys
from pathlib import Path
from jettison.cli.main import run
with contextlib.redirect_stdout(io.StringIO()) as out:
    code = run(["ledger", *sys.argv[1:]])
status = Path("/proc/self/status")
peak = re.search(r"VmHWM:\\s*(\\d+) kB", status.read_text()) if status.exists() else None
heavy = [name for name in ("torch", "transformers", "numpy", "highspy") if name in sys.modules]
print(json.dumps([code, len(out.getvalue()), heavy, int(peak[1]) * 1024 if peak else 0]))
"""


@pytest.mark.parametrize("form", ["human", "json", "csv"])
def test_a_ledger_from_numbers_alone_is_light(form: str) -> None:
    """Neither what trains nor what solves is loaded, and a ledger of a 405B model takes less than 100 MB."""
    flags = ("llama3-405b", "--tp", "8", "--pp", "16", "--dp", "8", "--gpu", "h200-141gb", "--format", form)
    code, written, heavy, peak_bytes = json.loads(run_python(LEDGER, *flags))
    assert (code, heavy) == (0, [])
    assert written > 1000
    assert peak_bytes < 100 * 10**6
    assert peak_bytes or not Path("/proc/self/status").exists()


def test_public_names() -> None:
    import jettison

    with pytest.raises(AttributeError, match="no attribute 'autocheckpoint'; it offers auto_checkpoint"):
        _ = jettison.autocheckpoint
    assert {"auto_checkpoint", "Ledger", "__version__"} <= set(dir(jettison))
    for name in set(dir(jettison)) - {"__version__"}:
        assert (
            name.startswith("_") or isinstance(getattr(jettison, name), ModuleType) or callable(getattr(jettison, name))
        )
    run = jettison.Run(model=jettison.preset("llama3-8b"), seq=2048, layout=jettison.Layout(tp=8, sp=True))
    assert jettison.forecast(run).parameters == 8_030_261_248
    assert jettison.Ledger.__module__ == "jettison.ledger.ledger"
