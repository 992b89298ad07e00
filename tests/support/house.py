"""Counts that say whether the source tree is one clear house: ``python tests/support/house.py [--full]`` prints them.

Lines and files by room, circles of imports, modules with one importer, class names with several meanings, names of
frameworks and model families in code. Nothing of the package is imported.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "jettison"
NOT_FRAMEWORKS = frozenset({"plan_summary", "others", "torch"})
"""Folders under frameworks/ that are none: a page for a person, several tools, and the library everything runs on."""
OTHER_FRAMEWORKS = frozenset({"huggingface", "trl", "nemo", "peft"})


@dataclass(frozen=True, kw_only=True)
class Source:
    """A module of the package, parsed."""

    name: str
    file: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        first, slash, _ = self.file.partition("/")
        return first if slash else ""

    @property
    def is_package(self) -> bool:
        return self.file.endswith("__init__.py")


@dataclass(frozen=True, kw_only=True)
class Import:
    """One module of the package imports another.

    Attributes:
        deferred: inside a function, or by a name in a string.
        for_types: under ``if TYPE_CHECKING``.
    """

    importer: str
    imported: str
    deferred: bool = False
    for_types: bool = False


def sources(package: Path = PACKAGE) -> list[Source]:
    """Every module under the package's folder, in the order of their paths."""
    found = []
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        name = ".".join([package.name, *file.removesuffix(".py").split("/")]).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found.append(Source(name=name, file=file, text=text, tree=ast.parse(text)))
    return found


def _import_nodes(
    node: ast.AST, *, deferred: bool = False, for_types: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, deferred, for_types
        else:
            inside = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            guard = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _import_nodes(child, deferred=inside, for_types=for_types or guard)


def _named_in_texts(source: Source, names: frozenset[str]) -> set[str]:
    """Modules that are loaded by a name in a string, as lazy exports and verbs are."""
    texts = {
        node.value.partition(":")[0]
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    whole = texts | {source.name + text for text in texts if text.startswith(".")}
    return {name for name in whole & names if "." in name and name != source.name}


def imports(modules: Sequence[Source]) -> set[Import]:
    """Every import between modules of the package, but for the outermost ``__init__``: it is loaded before any of them,
    and loads none. A room stands for its ``__init__``.
    """
    names = frozenset(module.name for module in modules if "." in module.name)
    found = set()
    for module in modules:
        targets = [(name, True, False) for name in _named_in_texts(module, names)]
        for node, deferred, for_types in _import_nodes(module.tree):
            if isinstance(node, ast.Import):
                targets += [(alias.name, deferred, for_types) for alias in node.names]
            else:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    targets.append((inner if inner in names else node.module or "", deferred, for_types))
        for name, deferred, for_types in targets:
            if name in names and name != module.name:
                found.add(Import(importer=module.name, imported=name, deferred=deferred, for_types=for_types))
    return found


def circles(found: set[Import]) -> list[list[str]]:
    """Modules that reach each other over these imports, each group once."""
    wants: dict[str, set[str]] = defaultdict(set)
    for one in found:
        wants[one.importer].add(one.imported)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for name in wants[left.pop()] - seen:
                seen.add(name)
                left.append(name)
        return seen

    reach = {name: reached(name) for name in list(wants)}
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach.get(other, ())))
        for name in reach
        if name in reach[name]
    }
    return [list(group) for group in sorted(groups) if len(group) > 1]


def lone_importers(modules: Sequence[Source], found: set[Import]) -> dict[str, str]:
    """Modules that exactly one other imports, each with that one. A room's ``__init__`` is left out."""
    importers: dict[str, set[str]] = defaultdict(set)
    for one in found:
        importers[one.imported].add(one.importer)
    return {
        module.name: next(iter(importers[module.name]))
        for module in modules
        if not module.is_package and len(importers[module.name]) == 1
    }


def double_classes(modules: Sequence[Source]) -> dict[str, list[str]]:
    """Names of classes, without leading underscores, that several modules define; integrations of frameworks, which
    have one public name for one thing, apart.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not module.file.endswith("/integration.py"):
                places[node.name.lstrip("_")].append(module.file)
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def frameworks(package: Path = PACKAGE) -> frozenset[str]:
    folders = {file.parent.name for file in package.glob("frameworks/*/defaults.toml")}
    return (folders - NOT_FRAMEWORKS) | OTHER_FRAMEWORKS


def families(package: Path = PACKAGE) -> frozenset[str]:
    """Their model types, but for those that are words of the language: gradients are clipped too."""
    return frozenset(file.stem for kind in ("models", "pairs") for file in package.glob(f"families/{kind}/*.toml")) - {
        "clip"
    }


def _libraries(package: Path = PACKAGE) -> str:
    """Pattern of import names of the libraries that extras of pyproject.toml install."""
    project = tomllib.loads((package.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {re.split(r"[^\w-]", each)[0] for extra in project["optional-dependencies"].values() for each in extra}
    return "|".join(sorted(found))


OF_A_LIBRARY = re.compile(rf"(?:{_libraries()})(?:_\w+)?(?:\.\w+)*|[\w-]+, [A-Z]\w+")
"""A whole text: a library or a module of it by its import name, or a citation of a library's class."""


def _values(node: ast.AST) -> Iterator[ast.expr]:
    """Values of an option that a node declares, and their meanings: members of an enum, or of a ``Literal``."""
    if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
        for value in (line.value for line in node.body if isinstance(line, ast.Assign)):
            yield from value.elts if isinstance(value, ast.Tuple) else [value]
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
        yield from node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


@cache
def texts_in_code(source: Source) -> Counter[str]:
    """Identifiers and texts of one module in lower case: no docstrings, comments or imports, no names of libraries or
    citations (`OF_A_LIBRARY`), and no values of options where they are declared.
    """
    said = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}
    said |= {id(value) for node in ast.walk(source.tree) for value in _values(node)}
    count: Counter[str] = Counter()
    for node in ast.walk(source.tree):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            text = "" if OF_A_LIBRARY.fullmatch(node.value) else node.value
        elif isinstance(node, ast.Name | ast.Attribute):
            text = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            text = node.name
        elif isinstance(node, ast.keyword | ast.arg):
            text = node.arg or ""
        count[text.lower()] += 1
    return count


def names_in_code(source: Source, wanted: frozenset[str]) -> Counter[str]:
    """Occurrences of these names in `texts_in_code`."""
    count: Counter[str] = Counter()
    for text, times in texts_in_code(source).items():
        words = re.findall(r"[a-z][a-z0-9_-]*", text)
        hits = wanted & {*words, *(part for word in words for part in re.split(r"[_-]", word))}
        count.update({name: times for name in hits if not any(name != other and name in other for other in hits)})
    return count


def named(modules: Sequence[Source], wanted: frozenset[str], homes: tuple[str, ...]) -> dict[str, Counter[str]]:
    """`names_in_code` by file, for the files outside ``homes`` that have any."""
    found = {module.file: names_in_code(module, wanted) for module in modules if not module.file.startswith(homes)}
    return {file: count for file, count in found.items() if count}


HOMES = ("families/", "frameworks/", "integrations/", "models/")
"""Rooms where their names may stand. In models/ it is the library transformers, which makes modules, and our own
reference models, which are named like their families.
"""


def counts(package: Path = PACKAGE) -> dict[str, object]:
    """Everything above, as one JSON document."""
    modules = sources(package)
    found = imports(modules)
    rooms: dict[str, list[int]] = {}
    for module in modules:
        lines, files = rooms.get(module.room, [0, 0])
        rooms[module.room] = [lines + module.text.count("\n"), files + 1]
    return {
        "lines": sum(lines for lines, _ in rooms.values()),
        "files": len(modules),
        "rooms": dict(sorted(rooms.items())),
        "circles": circles({one for one in found if not one.for_types}),
        "circles_with_types": circles(found),
        "lone_importers": lone_importers(modules, found),
        "double_classes": double_classes(modules),
        "framework_names": named(modules, frameworks(package), HOMES),
        "family_names": named(modules, families(package), HOMES),
    }


def main() -> None:
    found = counts()
    if "--full" in sys.argv[1:]:
        print(json.dumps(found, indent=1))
        return
    for key, value in found.items():
        if key == "rooms":
            assert isinstance(value, dict)
            for room, (lines, files) in sorted(value.items(), key=lambda pair: -pair[1][0]):
                print(f"  {lines:7,} {files:4}  {room or '(package)'}")
        elif key.endswith("_names"):
            assert isinstance(value, dict)
            print(f"{key}: {sum(count.total() for count in value.values())} in {len(value)} files")
        else:
            print(f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {len(value)}")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
