"""Functions under `functools.lru_cache`: their entries and counts, and how these are put back.

A full cache forgets an entry for each new one, and its table is C's: nothing can be written into it from outside. So a
cache that was called is filled again: it is cleared, and called once for each old entry while the function's code
returns what was remembered. Its hits and misses are counted up to where they were.
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Callable
from typing import Any

from jettison.core.errors import UnsupportedModule

MOST_COUNTED = 20_000  # hits or misses that are counted up again

Entry = tuple[Any, Any]
"""(key, result)."""


class CacheState:
    """A cached function, and what it remembers."""

    __slots__ = ("_held", "_table", "function", "info")

    def __init__(self, function: Any) -> None:
        self.function, self.info = function, function.cache_info()
        self._held = gc.get_referents(function)  # a bounded cache gives keys and results, the oldest first
        self._table = dict(_table_of(function, self._held))

    def results(self) -> list[Any]:
        """Every result that is remembered."""
        return [result for _, result in self._entries()]

    def put_back(self) -> None:
        """Remember that again, and nothing else.

        Raises:
            UnsupportedModule: the cache has forgotten an entry, and its function cannot be made to return it.
        """
        function, now = self.function, self.function.cache_info()
        if now == self.info:
            return
        code = _code_holder(function)
        if code is not None:
            self._fill(code)
        elif self.info.maxsize is None:  # keys and results are the table's own
            table = _table_of(function, gc.get_referents(function))
            table.clear()
            table.update(self._table)
        elif self._forgotten():
            raise UnsupportedModule(
                f"{function!r} is cached (lru_cache) and full, and the forward has made it forget an entry that cannot "
                "be put back. Give the cache a larger maxsize, or wrap a function of your own around what it caches"
            )

    def _forgotten(self) -> bool:
        table = _table_of(self.function, gc.get_referents(self.function))
        if any(key not in table for key in self._table):
            return True
        for key in set(table) - set(self._table):
            del table[key]
        return False

    def _fill(self, code: Any) -> None:
        function, info, entries = self.function, self.info, self._entries()
        function.cache_clear()
        mark = next((held for held in self._held if type(held) is object), None)  # between arguments and keywords
        own = code.__code__
        try:
            for key, result in entries:
                args, kwargs = _arguments(key, mark, typed=function.cache_parameters()["typed"])
                code.__code__ = _returning(result, own)
                function(*args, **kwargs)
            if max(info.hits, info.misses) > MOST_COUNTED:
                return
            code.__code__ = _refusing(own)
            for _ in range(info.misses - len(entries)):
                with contextlib.suppress(TypeError):
                    function(object())
            for _ in range(info.hits if entries else 0):
                function(*args, **kwargs)
        finally:
            code.__code__ = own

    def _entries(self) -> list[Entry]:
        if self.info.maxsize is None:
            return list(self._table.items())
        keys = set(map(id, self._table))
        held = iter(self._held)
        return [(one, next(held)) for one in held if id(one) in keys]


def _table_of(function: Any, held: list[Any]) -> dict[Any, Any]:
    return next((t for t in held if type(t) is dict and t is not vars(function)), {})


def _code_holder(function: Any) -> Any:
    """The Python function that is cached; None where C runs."""
    found = getattr(function, "__wrapped__", None)
    found = getattr(found, "__func__", found)
    return found if isinstance(found, types.FunctionType) else None


def _arguments(key: Any, mark: Any, *, typed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call that has this key: arguments, a mark, keywords in turn with their values, and types where typed."""
    if not isinstance(key, tuple):
        return (key,), {}
    at = next((i for i, part in enumerate(key) if part is mark), None)
    if at is None:
        return (key[: len(key) // 2] if typed else key), {}
    named = key[at + 1 : at + 1 + 2 * ((len(key) - 2 * at - 1) // 3)] if typed else key[at + 1 :]
    return key[:at], dict(zip(named[::2], named[1::2], strict=True))


_RESULT = "the result"
_TAKES_ANYTHING: Callable[..., Any] = lambda *_args, **_kwargs: "the result"  # noqa: E731
_TAKES_NOTHING: Callable[..., Any] = lambda: None  # noqa: E731


def _returning(result: Any, own: types.CodeType) -> types.CodeType:
    code = _TAKES_ANYTHING.__code__
    constants = tuple(result if constant == _RESULT else constant for constant in code.co_consts)
    return code.replace(co_consts=constants, co_freevars=own.co_freevars)


def _refusing(own: types.CodeType) -> types.CodeType:
    return _TAKES_NOTHING.__code__.replace(co_freevars=own.co_freevars)
