"""Pickles of plain data from people who are not trusted.

NOTE [ Reading a pickle that may be hostile ]
A pickle is a program. Before it runs, all of it is walked through: only operations that make dictionaries, lists,
texts, numbers, booleans and None are admitted, so that nothing is imported, called or built. Three of these could
still hurt. An integer may be of any length: at most nine bytes are, which an unsigned one of 64 bits takes. Places of
the memo are allocated up to the highest: none may be above the number of operations so far. A key is hashed by
recursion: tuples, the only containers that can be keys, hold numbers alone. Lengths are held against what is left of
the file. Python's own C reader then loads it; its `find_class` refuses all names, too. What is shared may be small in
the file and huge to walk through: readers count before they walk.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.files import MOST_FILE_BYTES, read_bytes

_TRUE_FALSE_NONE = "NEWTRUE NEWFALSE NONE"
_NUMBERS = f"BININT BININT1 BININT2 LONG1 BINFLOAT {_TRUE_FALSE_NONE}".split()
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_FIXED = ["BININT", "BININT1", "BININT2", "BINFLOAT", "BINGET", "LONG_BINGET", "BINPUT", "FRAME"]
_PLAIN = ["EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "MARK", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "MEMOIZE"]
_LENGTHS = {"SHORT_BINUNICODE": 1, "BINUNICODE": 4, "BINUNICODE8": 8}
_NAME = {ord(op.code): op.name for op in pickletools.opcodes}
_SPECIAL, _REFUSED = -1, -2


def _steps() -> list[int]:
    """By operation, how many bytes follow it; `_SPECIAL` where that is not all, `_REFUSED` where it may not be."""
    steps, special = [_REFUSED] * 256, (*_LENGTHS, *_TUPLES, "TUPLE", "LONG1", "LONG_BINPUT", "PROTO", "STOP")
    for op in pickletools.opcodes:
        if op.name in (*_PLAIN, *_TRUE_FALSE_NONE.split(), *_FIXED):
            steps[ord(op.code)] = 0 if op.arg is None else op.arg.n
        elif op.name in special:
            steps[ord(op.code)] = _SPECIAL
    return steps


_STEPS: Final = _steps()
_IS_NUMBER: Final = [_NAME.get(code, "") in _NUMBERS for code in range(256)]
_KEEPS_COUNT: Final = [_NAME.get(code, "") in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "FRAME") for code in range(256)]


def load_plain(path: Path) -> Any:
    """Read a pickle of plain data. Raise `UsageError` if there is none, it is damaged, or holds anything else."""
    return loads_plain(read_bytes(path, most=MOST_FILE_BYTES), str(path))


def loads_plain(data: bytes, name: str) -> Any:
    """Read a pickle's bytes, called ``name``. `UsageError` if they are cut off, or no plain data. NOTE [ Reading a
    pickle that may be hostile ].
    """
    reason = _objection(data)
    if reason:
        raise UsageError(f"{name} is no plain pickle: {reason}; expected what torch.cuda.memory._dump_snapshot writes")
    try:
        return _Plain(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, ValueError, TypeError, EOFError, IndexError, KeyError, AttributeError) as error:
        text = " ".join(str(error).split())[:120]
        raise UsageError(f"{name} is a broken pickle ({text}); expected what _dump_snapshot writes") from error


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _objection(data: bytes) -> str:
    """Reason why it may not be loaded; "" if it may."""
    steps, is_number, keeps = _STEPS, _IS_NUMBER, _KEEPS_COUNT
    at, end, count, numbers = 0, len(data), 0, 0
    while at < end:
        code = data[at]
        step = steps[code]
        count += 1
        if step == _SPECIAL:
            name = _NAME[code]
            if name == "STOP":
                return "" if at == end - 1 else f"{end - 1 - at} bytes follow its end"
            size = _special(name, data, at + 1, numbers, count)
            if isinstance(size, str):
                return size
            at += 1 + size
        elif step == _REFUSED:
            return f"{_NAME.get(code, f'byte {code}')} at byte {at} would do more than hold data"
        else:
            at += 1 + step
        if is_number[code]:
            numbers += 1
        elif not keeps[code]:
            numbers = 0
    return "it is cut off" if end else "it is empty"


def _special(name: str, data: bytes, at: int, numbers: int, count: int) -> int | str:
    """Bytes that follow an operation, or what is wrong with it.

    Args:
        numbers: that were pushed right before it.
        count: operations so far.
    """
    left = len(data) - at
    if name in _LENGTHS:
        width = _LENGTHS[name]
        size = width + int.from_bytes(data[at : at + width], "little")
        return size if size <= left else "it is cut off in a text"
    if name == "PROTO":
        return 1 if left and 2 <= data[at] <= 5 else "its protocol is none from 2 to 5"
    if name == "LONG1":
        size = data[at] if left else 0
        return 1 + size if size <= 9 else f"it has an integer of {size} bytes"
    if name == "LONG_BINPUT":
        place = int.from_bytes(data[at : at + 4], "little")
        return 4 if place <= count else f"it remembers {place} things in {count} operations"
    needed = _TUPLES.get(name, 1)
    return 0 if numbers >= needed else "it has a tuple of other things than numbers"
