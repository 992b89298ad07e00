"""Files of frameworks in a folder: how many ``--from`` reads, how many it refuses, and by which keys.

    python benchmarks/read_examples.py FOLDER [--gpus 8] [--keys] [--list]

FOLDER holds what was fetched, such as axolotl's ``examples``. A file that needs a model or a number of GPUs gets them,
and one that says another number keeps its own. Of a Python file every configuration counts.
Files that are none of a framework are counted apart. Nothing of the files is kept.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from jettison.core.errors import UsageError
from jettison.frameworks.python_values import configurations
from jettison.frameworks.run_file import RunFile, read_run
from jettison.request.resolve import resolve

SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".sh", ".args", ".py")


def files(folder: Path) -> Iterator[Path]:
    """Files of these names, and every configuration of a Python file."""
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        if path.suffix == ".py":
            try:
                names = configurations(path.read_text(encoding="utf-8"))
            except SyntaxError:
                names = []
            yield from [path.with_name(f"{path.name}:{name}") for name in names] or [path]
        else:
            yield path


def understood(path: Path, gpus: int) -> RunFile:
    """What a file says, resolved; with a model and a number of GPUs where it names none, or needs more."""
    why: UsageError | None = None
    numbers = (gpus, None, *(gpus * times for times in (2, 4, 8, 16, 32, 64, 128)))
    for model, number in product((None, "llama3-8b", "qwen3-30b-a3b"), numbers):
        try:
            found = read_run(path, model=model, gpus=number, allow_unread=True)
            resolve(found.spec(), found.request)
            return found
        except UsageError as error:
            why = why or error
    assert why is not None
    raise why


def outcomes(folder: Path, gpus: int) -> Iterator[tuple[Path, RunFile | str]]:
    """Each file with what was read, or why it was not."""
    for path in files(folder):
        try:
            yield path, understood(path, gpus)
        except UsageError as error:
            yield path, " ".join(str(error).replace(f"{path}: ", "").split())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--keys", action="store_true", help="every key that was not read, with its count")
    parser.add_argument("--list", action="store_true", help="every file")
    asked = parser.parse_args()
    read: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    keys: defaultdict[str, Counter[str]] = defaultdict(Counter)
    none = 0
    for path, found in outcomes(asked.folder, asked.gpus):
        if isinstance(found, str) and "no key of a framework" in found:
            none += 1
            continue
        name = "(an error)" if isinstance(found, str) else found.framework
        why = [found] if isinstance(found, str) else [f"{key.name}: {key.why}" for key in found.unread]
        if why:
            refused[name] += 1
            keys[name].update(set(why))
        else:
            read[name] += 1
        if asked.list:
            print(f"{path}: {'read' if not why else '; '.join(why)}")
    print("| framework | files | read | refused | most often by |\n| --- | --- | --- | --- | --- |")
    for name in sorted({*read, *refused}):
        often = ", ".join(f"{key.partition(':')[0]} {count}" for key, count in keys[name].most_common(6))
        print(f"| {name} | {read[name] + refused[name]} | {read[name]} | {refused[name]} | {often} |")
        for key, count in keys[name].most_common() if asked.keys else ():
            print(f"    {count} {key}")
    print(f"{none} files are of no framework that is known")


if __name__ == "__main__":
    main()
