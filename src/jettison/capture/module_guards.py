"""Guards: the settings of a module at recording time, to notice changes.

The promise does not depend on guards; witnesses keep it (NOTE [ The promise ] in runtime/witness.py). A guard notices a
change early, and at the cost of a comparison, before a wrong recomputed tensor does.
"""

from __future__ import annotations

import enum
import functools
import itertools
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from jettison.capture import state_kinds
from jettison.capture.bytecode_names import function_reach, globals_of
from jettison.capture.reachable_state import HOOK_TABLES
from jettison.capture.state_kinds import (
    CONTAINERS,
    attributes_of,
    entries_of,
    is_a,
    is_ours,
    items_of,
    size_of,
    worth_a_look,
)
from jettison.core.objects import Same

DEEPEST = 4
MOST_SETTINGS = 20_000
MOST_ITEMS = 2048
"""Most entries of a container that are compared in each step; of a longer one its length; witnesses cover the rest."""

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, slice)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_LENGTH = "number of entries"
_LOOK_ON = ("transformers.utils.output_capturing", "torch.distributed.fsdp._fully_shard._fsdp_state")
"""Modules whose hooks do not change results: they collect outputs or all-gather; casts: see `precision_of`."""
_MISSING = object()
_FORWARDS = itertools.repeat("forward")
_wants, _content = attrgetter("requires_grad"), attrgetter("cell_contents")
_PRIVATE = frozenset(("_parameters", "_buffers", "_modules", "forward", *HOOK_TABLES))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

Setting = tuple[Same[Any], Any]
"""(the table, or the class that it is of; key)."""


class ModuleGuard:
    """Notices that a module would run differently than when it was recorded.

    Watches train/eval, requires_grad of parameters, replaced submodules and parameters, hooks, every plain setting
    (numbers, strings, functions) on the modules, in containers and in objects that they hold, and the plain globals
    that their methods name, directly or in a function of the same file.

    Args:
        ignored: settings that were seen to change without changing results.
    """

    def __init__(self, module: nn.Module, ignored: frozenset[Setting] = frozenset()) -> None:
        self.settings: list[tuple[dict[str, Any], str, Any]] = []
        self.sequences: list[tuple[Any, tuple[Any, ...]]] = []
        self.sizes: list[tuple[Any, int]] = []
        self.cells: list[tuple[Any, Any]] = []
        self.parameters: list[tuple[dict[str, Any], str, bool]] = []
        self.hooks: list[tuple[dict[int, Any], tuple[int, ...]]] = []
        self.forwards: list[tuple[dict[str, Any], Any]] = []
        self.children: set[Same[Any]] = set()  # tables of submodules
        self._seen: set[int] = set()
        self._watched: _Watched | None = None
        self._classes: dict[Same[Any], Same[Any]] = {}  # a view of a class's table, each a new one -> the class
        for sub in module.modules():
            self._attributes(vars(sub), 0)
            self._class_settings(sub)
            if sub is not module:
                self.forwards.append((vars(sub), own_forward(vars(sub))))
            self.children.add(Same(sub._modules))
            self.settings += [(sub._modules, name, child) for name, child in sub._modules.items()]
            self.sizes.append((sub._modules, len(sub._modules)))
            held = [(name, parameter) for name, parameter in sub._parameters.items() if parameter is not None]
            self.parameters += [(sub._parameters, name, parameter.requires_grad) for name, parameter in held]
            self.hooks += [(table := vars(sub)[kind], foreign(table)) for kind in _HOOKS]
        for cls in {cls for sub in module.modules() for cls in own_classes(sub)}:
            for function in vars(cls).values():
                if isinstance(function, types.FunctionType):
                    self._globals(function)
        self._hook_tables = [hooks for hooks, _ in self.hooks]
        self._hook_counts: list[int] = []  # by table, at the last check
        self._hooks_known: list[Any] = []
        self._parameter_tables = [table.get for table, _, _ in self.parameters]
        self._parameter_names = [name for _, name, _ in self.parameters]
        self._wanted = [wants for _, _, wants in self.parameters]
        if ignored:
            self.settings = [s for s in self.settings if (self._key(s[0]), s[1]) not in ignored]
            self.sequences = [s for s in self.sequences if (Same(s[0]), _LENGTH) not in ignored]
            self.sizes = [s for s in self.sizes if (Same(s[0]), _LENGTH) not in ignored]
            self.cells = [c for c in self.cells if (Same(c[0]), _LENGTH) not in ignored]
            self.forwards = [f for f in self.forwards if (Same(f[0]), "forward") not in ignored]

    # watched settings ------------------------------------------------------------------------------------------------

    def _attributes(self, table: dict[Any, Any], depth: int) -> None:
        if id(table) in self._seen:
            return
        self._seen.add(id(table))
        for key, value in entries_of(table):
            if key not in _PRIVATE:
                self.settings += [(table, key, value)] if _is_setting(value) else []
                self._each((value,), depth)

    def _each(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            if not is_a(value, (*_SCALARS, Tensor, nn.Module)):
                self._within(value, depth)

    def _within(self, value: Any, depth: int) -> None:
        if depth > DEEPEST or id(value) in self._seen or len(self.settings) > MOST_SETTINGS or is_ours(value):
            return
        if is_a(value, types.FunctionType):
            self._seen.add(id(value))
            for cell in value.__closure__ or ():
                if (content := state_kinds.attribute_of(cell, "cell_contents")) is not state_kinds.MISSING:
                    self.cells.append((cell, _weakly(content)))
                    self._each((content,), depth + 1)
        elif is_a(value, CONTAINERS) and size_of(value) > MOST_ITEMS:
            self._seen.add(id(value))
            self.sizes.append((value, size_of(value)))
        elif is_a(value, dict):
            self.sizes.append((value, size_of(value)))
            self._attributes(value, depth + 1)
        elif is_a(value, CONTAINERS):
            self._seen.add(id(value))
            if not is_a(value, tuple | frozenset):
                self.sequences.append((value, tuple(map(_weakly, items_of(value)))))
            self._each(worth_a_look(items_of(value)), depth + 1)
        elif is_a(value, functools.partial):
            self._seen.add(id(value))
            self._each((value.func, *value.args, *value.keywords.values()), depth + 2)
        elif is_a(value, types.MethodType):
            self._each((value.__func__, value.__self__), depth + 2)
        elif not is_a(value, type | types.ModuleType | nn.Module | Tensor) and attributes_of(value) is not None:
            self._attributes(attributes_of(value), depth + 1)

    def _globals(self, function: types.FunctionType, *, nested: bool = False) -> None:
        code = function.__code__
        if id(code) in self._seen:
            return
        self._seen.add(id(code))
        for table, name, value in globals_of(function, everywhere=True):
            if _is_setting(value):
                self.settings.append((table, name, value))
            if isinstance(value, types.FunctionType) and not nested and value.__globals__ is function.__globals__:
                self._globals(value, nested=True)
            elif not callable(value) and not isinstance(value, (types.ModuleType, nn.Module, Tensor, *_SCALARS)):
                self._within(value, DEEPEST - 1)
        for value in function_reach(function):
            if isinstance(value, dict | list | set | deque):
                self._within(value, DEEPEST - 1)

    def _class_settings(self, module: nn.Module) -> None:
        """Watch settings of the class, which may change there or be shadowed by the instance."""
        for cls in own_classes(module):
            table: Any = vars(cls)
            self._classes[Same(table)] = Same(cls)
            for key, value in table.items():
                if (isinstance(value, _SCALARS) or _is_plain(value)) and key[:2] != "__":
                    self.settings.append((table, key, value))
                    if key not in vars(module):
                        self.settings.append((vars(module), key, _MISSING))
                elif key == "forward" and id(value) not in self._seen:
                    self._seen.add(id(value))
                    self.settings.append((table, key, value))

    def _key(self, table: Any) -> Same[Any]:
        return self._classes.get(Same(table), Same(table))

    # comparing -------------------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether every watched setting is unchanged."""
        if self._watched is None:
            self._watched = _Watched(self)
        # a quick check in C that every object is the same: nearly always the answer that `_changes` would give
        if not self._watched.is_as_it_was() and next(self._changes(), None) is not None:
            return False
        if not self._same_hooks():
            return False
        try:
            return list(map(_wants, map(call, self._parameter_tables, self._parameter_names))) == self._wanted
        except AttributeError:  # one is None now
            return False

    def _same_hooks(self) -> bool:
        """Whether modules have the same hooks, except those that do not change results."""
        if self._hook_counts and not self._hooks_known and not any(self._hook_tables):
            return True
        counts = list(map(len, self._hook_tables))  # a hook that moved from one module to the next changes both
        now = list(itertools.chain.from_iterable(map(dict.values, self._hook_tables)))
        if counts == self._hook_counts and all(map(is_, now, self._hooks_known)):
            return True
        if any(foreign(hooks) != before for hooks, before in self.hooks):
            return False
        self._hook_counts, self._hooks_known = counts, now
        return True

    def changed(self) -> frozenset[Setting]:
        return frozenset(setting for setting, _ in self._changes())

    def structure_words(self) -> str:
        """Names of submodules that have changed."""
        return ", ".join(sorted({str(name) for (table, _), name in self._changes() if table in self.children}))

    def may_be_kept(self) -> bool:
        """Whether it holds no object that the model no longer has; numbers, strings and functions aside."""
        if self.structure_words():
            return False
        lists = [items for sequence, items in self.sequences if not _same_items(sequence, items)]
        cells = [content for cell, content in self.cells if not _same_cell(cell, content)]
        return all(isinstance(one, (*_SCALARS, *_FUNCTIONS)) for one in (*itertools.chain(*lists), *cells))

    def values(self, settings: frozenset[Setting]) -> list[Any]:
        keys = {key for _, key in settings}
        found: list[Any] = [
            _in(table, key) for table, key, _ in self.settings if key in keys and (self._key(table), key) in settings
        ]
        found += [tuple(map(_weakly, items_of(s))) for s, _ in self.sequences if (Same(s), _LENGTH) in settings]
        found += [size_of(s) for s, _ in self.sizes if (Same(s), _LENGTH) in settings]
        found += [own_forward(a) for a, _ in self.forwards if (Same(a), "forward") in settings]
        return found + [repr(cell) for cell, _ in self.cells if (Same(cell), _LENGTH) in settings]

    def words(self) -> str:
        """Names of changed settings, for people."""
        return ", ".join(sorted({str(name) for _, name in self._changes()}))

    def _changes(self) -> Iterator[tuple[Setting, Any]]:
        for table, key, value in self.settings:
            now = _in(table, key)
            if now is not value and not _alike(now, value):
                yield (self._key(table), key), key
        for size, count in self.sizes:
            if size_of(size) != count:
                yield (Same(size), _LENGTH), f"the entries of a {type(size).__name__}"
        for sequence, before in self.sequences:
            if not _same_items(sequence, before):
                yield (Same(sequence), _LENGTH), f"the items of a {type(sequence).__name__}"
        for cell, content in self.cells:
            if not _same_cell(cell, content):
                yield (Same(cell), _LENGTH), "a variable that a function closes over"
        for attributes, forward in self.forwards:
            if ("forward" in attributes or forward is not None) and own_forward(attributes) is not forward:
                yield (Same(attributes), "forward"), "the forward of a module"


class _Watched:
    """Watched state, laid out so that C compares it by identity; of other objects `ModuleGuard._changes` decides."""

    def __init__(self, guard: ModuleGuard) -> None:
        self.values: list[Any] = []
        self.getters: list[Any] = []  # each reads several keys of a table at once
        self.tables: list[Any] = []
        self.absent: list[tuple[Any, Any]] = []
        self._lay_out(guard.settings)
        self.sizes = [_plainly(size) for size, _ in guard.sizes]
        self.counts = [count for _, count in guard.sizes]
        self.sequences = [_plainly(sequence) for sequence, _ in guard.sequences]
        self.lengths = [len(before) for _, before in guard.sequences]
        self.items = [_given(one) for _, before in guard.sequences for one in before]
        self.cells = [cell for cell, _ in guard.cells]
        self.contents = [_given(content) for _, content in guard.cells]
        self.instances = [attributes for attributes, _ in guard.forwards]
        self.forwards = guard.forwards
        self.known: list[Any] = []  # the instances' forwards when the guard held

    def _lay_out(self, settings: Iterable[tuple[Any, Any, Any]]) -> None:
        by_table: dict[int, tuple[Any, list[Any], list[Any]]] = {}
        for table, key, value in settings:
            if value is _MISSING:
                self.absent.append((table, key))
                continue
            _, keys, values = by_table.setdefault(id(table), (table, [], []))
            keys.append(key)
            values.append(value)
        for table, keys, values in by_table.values():
            if len(keys) == 1:  # a getter of one key returns no tuple
                keys, values = keys * 2, values * 2
            self.getters.append(itemgetter(*keys) if type(table) in _TABLES else functools.partial(_items, keys))
            self.tables.append(table)
            self.values += values

    def is_as_it_was(self) -> bool:
        """Whether nothing differs at a quick check."""
        try:
            found = itertools.chain.from_iterable(map(call, self.getters, self.tables))
            if not all(map(is_, found, self.values)):
                return False
        except KeyError:
            return False
        if any(dict.__contains__(table, key) for table, key in self.absent):
            return False
        if list(map(len, self.sizes)) != self.counts or list(map(len, self.sequences)) != self.lengths:
            return False
        if not all(map(is_, itertools.chain.from_iterable(self.sequences), map(call, self.items))):
            return False
        try:
            if not all(map(is_, map(_content, self.cells), map(call, self.contents))):
                return False
        except ValueError:  # an empty cell
            return False
        now = list(map(dict.get, self.instances, _FORWARDS))
        if not (self.known and all(map(is_, now, self.known))):  # they are other objects
            if not all(
                f is forward or own_forward(a) is forward for f, (a, forward) in zip(now, self.forwards, strict=True)
            ):
                return False
            self.known = now
        return True


def _items(keys: Sequence[Any], table: Any) -> tuple[Any, ...]:
    """Items of a subclass of dict, whose own lookup may run any code."""
    return tuple([dict.__getitem__(table, key) for key in keys])


def own_forward(attributes: dict[str, Any]) -> Any:
    """A forward set on the instance in place of its class's, unless it is a plan's or a recording's."""
    forward = attributes.get("forward")
    return None if is_ours(forward) else forward


def foreign(hooks: dict[int, Any]) -> tuple[int, ...]:
    """Numbers of the hooks that may change results: not a planned region's own, and not those that only observe,
    which transformers adds in a model's first forward, and FSDP when it shards.
    """
    if not hooks:
        return ()
    looks_on = [getattr(h, "of_a_region", False) or getattr(h, "__module__", "") in _LOOK_ON for h in hooks.values()]
    return tuple([number for number, looks in zip(hooks, looks_on, strict=True) if not looks])


def own_classes(module: nn.Module) -> tuple[type, ...]:
    """The classes of a module below `nn.Module`."""
    return type(module).__mro__[: type(module).__mro__.index(nn.Module)]


def same_values(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether two reads of some settings gave the same; of tensors and other objects, the very same ones."""
    return len(now) == len(before) and all(
        a is b or (isinstance(b, _SCALARS) and _alike(a, b)) for a, b in zip(now, before, strict=True)
    )


def _alike(now: Any, value: Any) -> bool:
    if now.__class__ is not value.__class__ or isinstance(value, nn.Module):
        return False
    return bool(now.tobytes() == value.tobytes() if _is_array(value) else now == value)


def _weakly(value: Any) -> Any:
    """A weak reference if possible: a guard keeps no object (or tensor, with its graph) alive."""
    if is_a(value, (*_SCALARS, *_FUNCTIONS, type, types.ModuleType, nn.Module)):
        return value
    try:
        return weakref.ref(value)
    except TypeError:  # containers of C do not support it
        return value


def _given(value: Any) -> Any:
    """A callable in C that returns a value, held weakly or strongly."""
    return value if type(value) is weakref.ref else itertools.repeat(value).__next__


class _Through:
    """A container of the user's class, read without running that class's code."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def __len__(self) -> int:
        return size_of(self._container)

    def __iter__(self) -> Iterator[Any]:
        return items_of(self._container)


def _plainly(container: Any) -> Any:
    return container if type(container) in CONTAINERS else _Through(container)


def _is_that(now: Any, before: Any) -> bool:
    return now is before or (type(before) is weakref.ref and before() is now)


def _same_items(sequence: Any, before: tuple[Any, ...]) -> bool:
    if size_of(sequence) == len(before) and all(map(_is_that, items_of(sequence), before)):
        return True
    return same_values(list(items_of(sequence)), before)


def _same_cell(cell: Any, content: Any) -> bool:
    now = state_kinds.attribute_of(cell, "cell_contents")
    return _is_that(now, content) or (isinstance(content, _SCALARS) and _alike(now, content))


def _is_setting(value: Any) -> bool:
    return is_a(value, (*_SCALARS, *_FUNCTIONS)) or _is_array(value) or _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Whether a value is a tuple of plain values, which can be compared."""
    return is_a(value, tuple | frozenset) and all(is_a(v, _SCALARS) or _is_plain(v) for v in value)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and is_a(value, numpy.generic | numpy.ndarray) and value.nbytes <= 4096


def _in(table: Any, key: Any) -> Any:
    """Value of a table under a key; for a subclass of dict without its own lookup."""
    return table.get(key, _MISSING) if type(table) in _TABLES else dict.get(table, key, _MISSING)


_TABLES = (dict, types.MappingProxyType)
