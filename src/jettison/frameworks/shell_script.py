"""Arguments of a shell script or of plain text, without executing it.

Assignments, arrays, ``if``, ``case`` and the first iteration of ``for`` are evaluated as far as values are known.
Values that need execution (whether a file exists, output of a command, ``$1``) stay unknown: their tests count as
false, and ``$NAME`` stays in the text. A sourced file is read if it is in the script's folder.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.files import read_table
from jettison.frameworks.python_values import SUMS
from jettison.spec.frameworks import FOLDER, read_tables

NOTES: Final = "$ notes"
"""Key of notes on assumptions: unknown tests, one command of several, one iteration of a loop."""
SOURCED: Final = "$ sourced"
"""Key of sourced files that are not in the script's folder."""
PROGRAM: Final = "$ program"
"""Key of the program that takes the arguments."""
CONFIG: Final = "$ config"
"""Key of a file that the program takes without an option."""
_MOST: Final = 1 << 20
"""Most characters of an expanded text."""
_VARIABLE: Final = re.compile(
    r"\$\((?:\((?P<sum>[^$`]+?)\)|expr\s(?P<expr>[^$`()]+))\)|\$\{(?P<of>[!#]?)(?P<name>\w+|[@#*])(?:\[(?P<at>[@*]|\$?\w+)\])?(?:(?P<how>:?[-=+?])(?P<else>[^{}]*))?\}|\$(?P<plain>\w+)"
)
_NAME: Final = re.compile(r"(?:(?:export|local|readonly|declare|typeset)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=")
_SBATCH: Final = re.compile(
    r"^#SBATCH\s+(?:--([\w-]+)[= ]+|-([NnG])\s*)(?:gpu:)?(?:[\w-]+:)?(\d+)\b(?!-)", re.MULTILINE
)
_SBATCH_NAMES: Final = {"N": "nodes", "n": "ntasks", "G": "gpus", "gres": "gpus-per-node"}
LAUNCHERS: Final = read_table(FOLDER / "launchers.toml")
_SLURM: Final[Mapping[str, Sequence[str]]] = LAUNCHERS["job"]
"""Variables of a job by option of sbatch."""
_HERE: Final = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n.*?^\s*\2\s*$", re.MULTILINE | re.DOTALL)
_INSIDE: Final = re.compile(r"`#[^`\n]*`")
"""A comment within a command."""
_FUNCTION: Final = re.compile(r"(?:function\s+([\w-]+)\s*(?:\(\))?|([\w-]+)\s*\(\))\s*(?=\{|$)")
_DEEPEST: Final = 8
"""Deepest nesting of function calls."""
_MOST_CALLS: Final = 100
_OVERRIDE: Final = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)")
"""Hydra override: a configuration key with its value. Along with one, a key may be a single word."""
_ENDS: Final = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "2>&1", "&>", "<"})
_STARTS: Final = re.compile(rf"(?:\S*/)?(?:{'|'.join(LAUNCHERS['programs'])})")
_INTERPRETERS: Final = re.compile(r"python[\d.]*|torchrun|bash|sh")
_CONFIG_NAME: Final = re.compile(r"[^=]+\.(?:ya?ml|toml|json)")
_KNOWN_OF_LAUNCHERS: Final = ("nodes", "ntasks-per-node", "gpus-per-node", "gpus", "ntasks")
OF_LAUNCHERS: Final = "|".join(LAUNCHERS["arguments"])
"""Pattern of arguments that belong to a launcher, not to the program."""
_ENVIRONMENTS: Final = re.compile(
    r"(.*/)?(activate|conda\.sh|\.?bashrc|\.?bash_profile|\.?profile|\.zshrc|(init|etc)/(\S*/)?\S+|setvars\.sh|modules?\.sh|lmod\S*)"
)
"""Pattern of sourced files that set up the shell environment, without arguments of a run."""
_NAMED_SIGNS: Final = {"eq": "==", "ne": "!=", "ge": ">=", "le": "<=", "gt": ">", "lt": "<"}
_SIGNS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    sign: getattr(operator, name) for name, other in _NAMED_SIGNS.items() for sign in (other, f"-{name}")
}
_ECHOES: Final = ("echo", "printf")
_FILE_TESTS: Final = ("-f", "-d", "-e", "-x", "-s", "-r", "-w", "-L")


def arguments(text: str, folder: Path | None = None, name: str | None = None) -> Mapping[str, Any]:
    """Read arguments by name without dashes, those without a value as True, those with several as a list; variables are
    keyed as ``$NAME``.

    Args:
        folder: of the script and of sourced files; None: sourced files are not read.
        name: of one of several commands: its program's, or its number.

    Raises:
        ValueError: an expanded text is too long.
        UsageError: no command of that name.
    """
    script = _Script(folder=folder)
    asked = {_SBATCH_NAMES.get(long or short, long): number for long, short, number in _SBATCH.findall(text)}
    script.variables |= {name: asked[option] for option, names in _SLURM.items() for name in names if option in asked}
    script.read_text(text)
    for function in script.functions:  # for other scripts, if this one starts no program itself
        if not any(word.startswith("--") for words in script.commands for word in words):
            script.call(function, ())
    words = script.command(name)
    found = _named(words)
    lost = [*_lost(words)]
    for word in lost:
        script.notes[f"arguments in a variable that the script does not set are omitted: {word}"] = None
    found = {name: value for name, value in asked.items() if name in _KNOWN_OF_LAUNCHERS} | found
    found |= {f"${name}": value for name, value in script.variables.items()}
    needed = script.missing and (script.defaulted or any("SLURM" not in word for word in lost))
    for missing in () if needed else script.missing:
        script.notes[f"{missing}, which the script sources, is not here; no argument is left to it"] = None
    found |= {NOTES: list(script.notes)} if script.notes else {}
    return found | ({SOURCED: list(script.missing)} if needed else {})


@dataclass
class _Script:
    variables: dict[str, str] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    folder: Path | None = None
    missing: dict[str, None] = field(default_factory=dict)
    defaulted: bool = False
    _blocks: list[_ShellBlock] = field(default_factory=list)
    functions: dict[str, str] = field(default_factory=dict)
    _called: list[str] = field(default_factory=list)
    _depth: int = 0

    def command(self, name: str | None) -> list[str]:
        """Return the command of this name, or that with most arguments of those that start a program; else all."""
        started = [words for words in self.commands if _begin(words) >= 0]
        with_arguments = [
            words for words in started if any(word.startswith("--") or _CONFIG_NAME.fullmatch(word) for word in words)
        ]
        if with_arguments:
            chosen = max(with_arguments, key=lambda words: sum(word.startswith("--") for word in words))
            others = {tuple(words[_begin(words) :]): words for words in with_arguments if words[0] not in _ECHOES}
            programs = [next(filter(_is_program, words), words[0]).rpartition("/")[2] for words in others]
            names = [one if programs.count(one) == 1 else str(at) for at, one in enumerate(programs, 1)]
            if name is not None:
                numbered = {str(at): words for at, words in enumerate(others.values(), 1)}
                chosen = {**numbered, **dict(zip(names, others.values(), strict=True))}.get(name, [])
                if not chosen:
                    raise UsageError(f"it has no command {name!r}; expected one of {', '.join(names)}")
            elif len(others) > 1:
                read = next(filter(_is_program, chosen), chosen[_begin(chosen)])
                said = f"of {len(others)} commands with arguments only the first with most of them is read: {read}"
                self.notes[f"{said}; FILE.sh:NAME reads another of {', '.join(names)}"] = None
            return chosen
        words = [word for command in self.commands for word in command]
        if any(word.startswith("--") or _OVERRIDE.fullmatch(word) for word in words):
            return words
        return [word for value in self.variables.values() if "--" in value for word in split_words(value)]

    def read_text(self, text: str) -> None:
        """Follow all statements of a file."""
        self.read(_HERE.sub("\n", _INSIDE.sub(" ", text.replace("\r\n", "\n"))))

    def read(self, text: str) -> None:
        """Follow all statements of a text without here-documents."""
        pieces = list(_statements(text))
        at = 0
        while at < len(pieces):
            words, _ = pieces[at]
            first, _, rest = words.strip().partition(" ")
            sure = not self._blocks and not self._depth and (not at or pieces[at - 1][1] not in ("&&", "||"))
            if first == "exit" and sure:
                return
            if (function := _FUNCTION.match(words)) and self._runs():
                at = self._function(function, pieces, at)
            elif first in ("if", "elif", "while", "until"):
                tests: list[tuple[str, str]] = [(rest, pieces[at][1])]
                closing = "then" if first in ("if", "elif") else "do"
                while at + 1 < len(pieces) and pieces[at + 1][0].split(" ")[0] != closing:
                    at += 1
                    tests.append(pieces[at])
                self._branch(first, tests)
            else:
                self._statement(first, rest, words, pieces[at][1])
            at += 1

    def _function(self, match: re.Match[str], pieces: Sequence[tuple[str, str]], at: int) -> int:
        """Store a function's body for its calls; return the position of its last piece."""
        depth, body = 0, ""
        for end in range(at, len(pieces)):
            words, follows = pieces[end]
            words = words[match.end() :] if end == at else words
            if words.startswith("{"):
                depth, words = depth + 1, words[1:].strip()
            if words.startswith("}"):
                depth, words = depth - 1, ""
            body += f"{words} {follows} " if follows in ("&&", "||") and words else f"{words}\n"
            if not depth and end > at:
                break
        self.functions[match[1] or match[2]] = body
        return end

    def call(self, name: str, values: Sequence[str]) -> None:
        """Follow a function at a call."""
        self._called.append(name)
        if len(self._called) > _MOST_CALLS or self._depth >= _DEEPEST:
            return
        before, blocks = dict(self.variables), self._blocks
        places = {str(number): value for number, value in enumerate(values, 1)}
        self.variables |= places
        self._blocks, self._depth = [], self._depth + 1
        self.read(self.functions[name])
        self._blocks, self._depth = blocks, self._depth - 1
        for place in places:
            self.variables.pop(place, None)
            if place in before:
                self.variables[place] = before[place]

    def _branch(self, word: str, tests: Sequence[tuple[str, str]]) -> None:
        if word == "elif":
            block = self._blocks[-1] if self._blocks else _ShellBlock()
            block.runs = not block.done and self._outer() and self._all(tests)
            block.done |= block.runs
            return
        forever = word == "while" and tests[0][0].strip() in ("true", ":")  # restarts of a job
        runs = self._runs() and (forever or (word == "if" and self._all(tests)))
        self._blocks.append(_ShellBlock(runs=runs, done=runs))

    def _statement(self, first: str, rest: str, words: str, follows: str) -> None:
        """Follow one statement that is no test."""
        if first in ("then", "do", "else", "{"):
            if first == "else" and self._blocks:
                self._blocks[-1].runs = not self._blocks[-1].done and self._outer()
            if rest.strip():
                self.read(rest)
        elif first in ("fi", "done", "esac"):
            if self._blocks:
                self._blocks.pop()
        elif first == "case":
            value = self.expand(rest.rpartition(" in")[0] or rest).strip("\"' ")
            self._blocks.append(_ShellBlock(runs=False, value=value))
            if after := rest.rpartition(" in ")[2] if " in " in rest else "":
                self._case(after)
        elif self._blocks and self._blocks[-1].value is not None and re.match(r"\(?[^()=]*\)", words):
            self._case(words)
        elif first == "for":
            name, _, values = rest.partition(" in ")
            listed = split_words(self.expand(values))
            runs = self._runs()
            if runs and listed:
                self.variables[name.strip()] = listed[0]
            if runs and len(listed) > 1:
                self.notes[f"only the first iteration of a loop is read: {name.strip()} = {listed[0]}"] = None
            self._blocks.append(_ShellBlock(runs=runs, done=True))
        elif self._runs():
            if follows in ("&&", "||") and _is_test(words):
                holds = self._holds(words)
                self._blocks.append(_ShellBlock(runs=bool(holds) is (follows == "&&"), once=True))
                return
            self._run(words)
        if self._blocks and self._blocks[-1].once and follows not in ("&&", "||"):
            self._blocks.pop()

    def _case(self, words: str) -> None:
        """Follow a pattern of ``case``, and the statements after it."""
        block = self._blocks[-1]
        pattern, _, rest = words.partition(")")
        kinds = [kind.strip("\"' ") for kind in pattern.lstrip("(").split("|")]
        fits = any(fnmatchcase(block.value or "", kind) for kind in kinds)
        block.runs = fits and not block.done and self._outer()
        block.done |= block.runs
        if rest.strip():
            self.read(rest)

    def _runs(self) -> bool:
        return all(block.runs for block in self._blocks)

    def _outer(self) -> bool:
        return all(block.runs for block in self._blocks[:-1])

    def _run(self, words: str) -> None:
        """Follow assignments, and the command after them."""
        words = words.strip()
        while match := _NAME.match(words):
            value, words = _value(words[match.end() :])
            before = self.variables.get(match[1], "") if match[2] else ""
            array = value.startswith("(")
            text = self.expand(value[1:-1] if array else value, single=not array)
            if re.fullmatch(r"(\$\(.*\)|`.*`)", _unquoted(text), re.DOTALL):
                text = f"${match[1]}"  # output of a command
            self.variables[match[1]] = f"{before} {text.strip()}".strip() if array else before + _unquoted(text)
            words = words.strip()
        for part in _piped(words):
            self._run_one(split_words(self.expand(part)))

    def _run_one(self, words: list[str]) -> None:
        """Follow a command, a function call, ``source`` or ``unset``."""
        if words and words[0] in self.functions:
            self.call(words[0], words[1:])
        elif len(words) > 1 and words[0] in ("source", "."):
            self._source(" ".join(words[1:]))
        elif words and words[0] == "unset":
            for name in words[1:]:
                self.variables.pop(name, None)
        elif words:
            self.commands.append(words)

    def _source(self, words: str) -> None:
        """Follow a sourced file; a path that begins with a variable is looked up next to the script, without it."""
        if _ENVIRONMENTS.fullmatch(words.split()[0]) or words.startswith("<("):
            return
        name = (re.split(r"\$\w+|[)}`]", words)[-1].lstrip("/").split() or [words])[0]
        path = None if self.folder is None else self.folder / name
        if _ENVIRONMENTS.fullmatch(name):
            return
        if path is None or not path.is_file():
            self.missing[name] = None
        elif len(self._called) < _MOST_CALLS and self._depth < _DEEPEST:
            self._called.append(name)
            blocks, self._blocks, self._depth = self._blocks, [], self._depth + 1
            try:
                self.read_text(path.read_bytes()[:_MOST].decode("utf-8-sig"))
            except (OSError, UnicodeDecodeError):
                self.missing[name] = None
            self._blocks, self._depth = blocks, self._depth - 1
            self.notes[f"{name}, which the script sources, is read too"] = None

    # values -----------------------------------------------------------------------------------------------------------

    def expand(self, text: str, *, single: bool = False) -> str:
        """Expand known variables of a text."""
        if single and re.fullmatch(r"'[^']*'", text.strip()):
            return text
        text = re.sub(r'"(\$\{!?\w+\[@\]\})"', r"\1", text)  # each element of an array is a word
        for _ in range(8):
            text, before = _VARIABLE.sub(self._value, text), text
            if len(text) > _MOST:
                raise ValueError(f"its variables expand to more than {_MOST:,} characters")
            if text == before:
                break
        return text

    def _value(self, match: re.Match[str]) -> str:
        if (sum_ := match["sum"] or match["expr"]) is not None:
            names = re.sub(r"[A-Za-z_]\w*", lambda name: self.variables.get(name[0], name[0]), sum_)
            number = _calculated(names)
            return match[0] if number is None else str(number)
        name = match["name"] or match["plain"]
        value, how = self.variables.get(name), (match["how"] or "").lstrip(":")
        if match["of"] or (match["at"] or "@") not in "@*":
            return self._of_array(match)
        if how == "+":
            return match["else"] if value else ""
        if value is None or (value == "" and match["how"] and match["how"].startswith(":")):
            if how == "=":
                self.variables[name] = _unquoted(match["else"])
            self.defaulted |= how in ("-", "=") and value is None
            return _unquoted(match["else"]) if how in ("-", "=") else match[0]
        return value

    def _of_array(self, match: re.Match[str]) -> str:
        """Return one element of an array, the positions of all, or their number."""
        elements, at = split_words(self.variables.get(match["name"], "")), match["at"] or ""
        if match["of"]:
            places = " ".join(map(str, range(len(elements))))
            return match[0] if at not in ("@", "*") else places if match["of"] == "!" else str(len(elements))
        at = self.variables.get(at.lstrip("$"), at)
        return elements[int(at)] if at.isdecimal() and int(at) < len(elements) else match[0]

    def _all(self, tests: Sequence[tuple[str, str]]) -> bool:
        """Whether tests joined by && and || hold. Unknown ones count as false."""
        found, join = True, "&&"
        for words, follows in tests:
            holds = bool(self._holds(words)) if words.strip() else True
            found = (found and holds) if join == "&&" else (found or holds)
            join = follows
        return found

    def _holds(self, words: str) -> bool | None:
        """Whether a test holds; None if unknown."""
        words = words.strip()
        if words.startswith("! "):
            inner = self._holds(words[2:])
            return None if inner is None else not inner
        if not _is_test(words):
            said = _unquoted(self.expand(words))
            if said not in ("true", ":", "false"):
                self.notes[f"a test of the script has an unknown result, and counts as false: {words}"] = None
                return None
            return said != "false"
        if words.startswith("(("):
            number = _compared(self.expand(re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"${\1}", words[2:-2])))
        else:
            inside = words.removeprefix("test ").strip("[] ")
            number = self._joined(inside)
        if number is None and not any(f" {one} " in f" {words} " for one in _FILE_TESTS):
            self.notes[f"a test of the script has an unknown result, and counts as false: {words}"] = None
        return number

    def _joined(self, inside: str) -> bool | None:
        for join, settles in (("||", True), ("&&", False), (" -o ", True), (" -a ", False)):
            if join in inside:
                parts = [self._joined(part) for part in inside.split(join)]
                return settles if settles in parts else None if None in parts else not settles
        try:
            words = shlex.split(self.expand(_emptied(inside, self.variables)))
        except ValueError:
            return None
        if any("$" in word or "`" in word for word in words):
            return None
        match words:
            case ["!", *rest]:
                inner = self._joined(shlex.join(rest))
                return None if inner is None else not inner
            case ["-z"] | ["-n"]:
                return words[0] == "-z"
            case ["-z" | "-n", value]:
                return (not value) is (words[0] == "-z")
            case [left, "=" | "==" | "!=" as sign, right]:
                return fnmatchcase(left, right) is (sign != "!=")
            case [left, sign, right] if sign in _SIGNS:
                return _compared(f"{left} {sign} {right}")
            case ["=" | "==" | "!=" as sign, right]:
                return (right == "") is (sign != "!=")
            case [left, "=" | "==" | "!=" as sign]:
                return (left == "") is (sign != "!=")
            case [value]:
                return None if value in _FILE_TESTS else bool(value)
        return None


@dataclass
class _ShellBlock:
    """State of a branch. ``value``: of ``case``. ``once``: it is one command after && or ||."""

    runs: bool = False
    done: bool = False
    value: str | None = None
    once: bool = False


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """Yield statements, each with the operator after it; arrays and quotations may span lines, and comments do not."""
    found: list[str] = []
    quote, depth, at = "", 0, 0
    while at < len(text):
        char, two = text[at], text[at : at + 2]
        if two == "\\\n":
            found.append(" ")
            at += 2
            continue
        if quote:
            quote = "" if char == quote and text[at - 1] != "\\" else quote
        elif char in "\"'":
            quote = char if not at or text[at - 1] != "\\" else quote
        elif char == "#" and (not at or text[at - 1].isspace() or text[at - 1] == "("):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        elif two == "[[" or char == "(":
            depth += 1
        elif (two == "]]" or char == ")") and depth:
            depth -= 1
        elif not depth and (char in "\n;" or two in ("&&", "||")):
            if word := "".join(found).strip():
                yield word, two if two in ("&&", "||") else char
            found = []
            at += 2 if two in ("&&", "||", ";;") else 1
            continue
        found.append(" " if char == "\n" and depth and not quote else char)
        at += 1
    if word := "".join(found).strip():
        yield word, "\n"


def _outside(text: str) -> Iterator[tuple[int, str]]:
    """Yield the characters outside of quotations and brackets, with their positions."""
    quote, depth = "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[at - 1] != "\\" else quote
        elif char in "\"'`":
            quote = char
        elif char in "({":
            depth += 1
        elif char in ")}" and depth:
            depth -= 1
        elif not depth:
            yield at, char


def _piped(text: str) -> Iterator[str]:
    """Split commands at pipes with spaces around them; patterns of layers have pipes without spaces."""
    begin = 0
    for at, char in _outside(text):
        if char == "|" and text[at - 1 : at + 2].strip() != text[at - 1 : at + 2]:
            yield text[begin:at]
            begin = at + 1
    yield text[begin:]


def _value(text: str) -> tuple[str, str]:
    """Return the value of an assignment, and the text after it."""
    end = next((at for at, char in _outside(text) if char.isspace()), len(text))
    return text[:end], text[end:]


def split_words(line: str) -> list[str]:
    """Split a line into words; a quotation of several arguments is split, too."""
    try:
        words = shlex.split(line.removesuffix("\\"))
    except ValueError:  # unterminated quotation
        words = line.split()
    found: list[str] = []
    for word in words:
        several = " --" in word or (word.startswith("--") and " " in word.partition("=")[0])
        found += [one.strip("\"'") for one in word.split()] if several else [word]
    return found


def _named(words: Sequence[str]) -> dict[str, Any]:
    """Arguments and overrides by name, programs as ``$NAME``; of a launcher only the numbers of devices."""
    found: dict[str, Any] = {}
    name, launched, begun = "", False, False
    hydra = any(_OVERRIDE.fullmatch(word) or _programs().get(word) == "key=value" for word in words)
    for before, word in zip(["", *words], words, strict=False):
        word = "--config-name" if hydra and word == "-cn" else word
        launched |= not begun and _STARTS.fullmatch(word) is not None
        if launched and (_starts(word) or word.endswith((".sh", ".py"))):
            launched, begun, name = False, False, ""
            found[f"${word.rpartition('/')[2]}"] = True
            found |= {PROGRAM: word} if _is_program(word) else {}
        elif launched and (short := re.fullmatch(r"-([NnG])(\d*)", word)):
            begun, name = True, _SBATCH_NAMES[short[1]]
            found[name] = short[2] or True
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            begun = True
            if launched and name not in _KNOWN_OF_LAUNCHERS:
                name = ""
            else:
                found[name] = value if equals else True
                name = "" if equals else name
        elif override := _OVERRIDE.fullmatch(word) or (hydra and begun and re.fullmatch(r"\+{0,2}(\w+)=(.*)", word)):
            found[override[1]] = {"null": None, "true": True, "false": False}.get(override[2], override[2])
            name, begun = "", True
        elif _is_program(word) or not begun or (before == "-m" and word[0] != "-"):
            found[f"${word.rpartition('/')[2]}"] = True
            found |= {PROGRAM: word} if _is_program(word) or before == "-m" else {}
            found |= {CONFIG: word} if _CONFIG_NAME.fullmatch(word) else {}
            name = ""
        elif not name and _CONFIG_NAME.fullmatch(word):
            found[CONFIG] = word
        elif name and found[name] is not True and re.fullmatch(OF_LAUNCHERS, name):  # it has one value
            found[f"${word}"], name = True, ""
        elif word in _ENDS or re.fullmatch(r"-[A-Za-z]", word):
            name = ""
        elif name and not (found[name] is not True and word.startswith("$")):  # unset variables of options
            value = found[name]
            found[name] = word if value is True else [*(value if isinstance(value, list) else [value]), word]
    return found


def _lost(words: Sequence[str]) -> Iterator[str]:
    """Unknown variables in the place of arguments, after the program, except the script's own parameters."""
    before = ""
    for word in words[max(0, _begin(words)) :]:
        if (
            re.match(r"\$\{?[A-Za-z_]", word)
            and not _is_program(word)
            and not (before.startswith("--") and "=" not in before)
        ):
            yield word
        before = word


def _is_program(word: str) -> bool:
    return word.endswith(".py")


@cache
def _programs() -> Mapping[str, str]:
    """Return programs of all frameworks, with the form of their arguments."""
    return {name: form for table in read_tables().values() for name, form in table.get("programs", {}).items()}


def _starts(word: str) -> bool:
    name = word.rpartition("/")[2]
    return name in _programs() or _INTERPRETERS.fullmatch(name) is not None


def _begin(words: Sequence[str]) -> int:
    """Return the position of the first program of a command; -1 without one."""
    starts = (at for at, word in enumerate(words) if _is_program(word) or _starts(word))
    return next(starts, -1)


def _is_test(words: str) -> bool:
    return words.startswith(("[ ", "[[", "((", "test "))


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _emptied(text: str, variables: Mapping[str, str]) -> str:
    """Replace unset variables of a test by nothing."""

    def empty(match: re.Match[str]) -> str:
        name = match["name"] or match["plain"]
        return "" if name and match["how"] is None and name not in variables else match[0]

    return _VARIABLE.sub(empty, text)


def _compared(text: str) -> bool | None:
    match = re.fullmatch(rf"\s*(-?\d+)\s*({'|'.join(_SIGNS)})\s*(-?\d+)\s*", text)
    return None if match is None else _SIGNS[match[2]](int(match[1]), int(match[3]))


def _calculated(text: str) -> int | None:
    """Evaluate a shell's integer arithmetic of + - * / %; None if it is more than that."""
    sums = {**SUMS, ast.Div: operator.floordiv}

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as number) if abs(number) < 1 << 62:
                return int(number)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in sums:
                return int(sums[type(op)](value(left), value(right)))
        raise ValueError

    if "#" in text:  # numbers of another base
        return None
    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return None
