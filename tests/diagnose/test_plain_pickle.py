"""A pickle is read only if all that it can do is hold plain data."""

import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from jettison.core.errors import UsageError
from jettison.diagnose.plain_pickle import load_plain, loads_plain
from support.patience import PATIENCE

PLAIN = {
    "a": [1, -1, 2**31, 2**62, 0.5, True, None, "text", "é" * 300],
    "b": {"c": [(0, 0), (1, 2, 3), ()]},
    7: [{}] * 3,
}


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch /tmp/jettison-bomb-went-off",)


def deep(levels: int) -> bytes:
    """Tuples within tuples, as a key: hashing them recurses."""
    return b"\x80\x04}" + b")" + b"\x85" * levels + b"K\x01s."


def nested(levels: int) -> list[object]:
    found: list[object] = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_come_back(protocol: int) -> None:
    assert loads_plain(pickle.dumps(PLAIN, protocol), "x") == PLAIN


HOSTILE = {
    "calls os.system": pickle.dumps(Bomb()),
    "calls os.system, protocol 2": pickle.dumps([Bomb()], 2),
    "protocol 0": pickle.dumps([1], 0),
    "a class": pickle.dumps(OrderedDict(a=1)),
    "a function": pickle.dumps(print),
    "bytes": pickle.dumps(b"abc"),
    "a set": pickle.dumps({1, 2}),
    "a byte array": pickle.dumps(bytearray(4), 5),
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x04K\x01Q.",
    "a buffer from elsewhere": b"\x80\x05\x97.",
    "a long integer": pickle.dumps(1 << 200),
    "a longer integer": pickle.dumps(1 << 5000),
    "a memo of four billion": b"\x80\x02]r\xff\xff\xff\xff.",
    "a text of exabytes": b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.",
    "a text that is cut off": b"\x80\x04X\xff\x00\x00\x00abc.",
    "deep keys": deep(1_000_000),
    "a tuple in a tuple": pickle.dumps(((1, 2), 3)),
    "a tuple of texts": pickle.dumps(("a", "b")),
    "a list as a key": b"\x80\x04}]K\x01s.",
    "no stack": b"\x80\x04a.",
    "an unset place of the memo": b"\x80\x04h\x07.",
    "no text": b"\x80\x04X\x02\x00\x00\x00\xff\xfe.",
    "cut off": pickle.dumps(PLAIN)[:-1],
    "something behind its end": pickle.dumps(PLAIN) + b"x",
    "nothing": b"",
    "no pickle": b"PK\x03\x04 a zip",
    "JSON": b'{"a": 1}',
    "a frame that is too long": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f]." + b"",
    "an unknown protocol": b"\x80\x09].",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_anything_else_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        loads_plain(HOSTILE[name], "it")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert not Path("/tmp/jettison-bomb-went-off").exists()


def test_deep_lists_are_only_data() -> None:
    """They load without recursion; readers look at what they know, and no deeper."""
    data = b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b"."
    code = """
import sys
from jettison.diagnose.plain_pickle import loads_plain
from jettison.diagnose.snapshot import snapshot_of
from jettison.core.errors import UsageError
data = b"\\x80\\x04" + b"]" * 200_000 + b"a" * 199_999 + b"."
try:
    snapshot_of(loads_plain(data, "deep"), "deep")
except UsageError as error:
    print(error)
"""
    assert len(data) == 400_002
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert run.stdout.startswith("deep is no CUDA memory snapshot")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_plain(tmp_path / "none.pickle")


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "huge.pickle"
    with path.open("wb") as file:
        file.truncate((2 << 30) + 1)  # sparse
    with pytest.raises(UsageError, match="at most"):
        load_plain(path)
