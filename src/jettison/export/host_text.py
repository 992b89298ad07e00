"""What files for plain torch, torchtitan, torch_remat and Lightning have where something waits on the host, and what
stands in for it when such a file is priced.

NOTE [ What hooks move ]
Around a layer that is left alone, hooks see each tensor that autograd saves, in the order in which the layer's program
lists them: the file has the numbers of those that the plan moves. Around a checkpoint they see what it is given, and
nothing else: what runs again is saved inside of it, and what selective contexts keep does not pass through hooks. Of
what it is given floating-point tensors move; a buffer's type is not known here, so that bytes on the host count all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jettison.export.policy import Action, LayerPolicy

ALL: Final = "ALL"


def moves_table(policies: Sequence[tuple[object, LayerPolicy]]) -> str:
    """By layer, which of the tensors that hooks see wait on the host; empty where nothing does."""
    rows = "".join(f"    {name!r}: {_numbers(policy)},\n" for name, policy in policies if policy.moved)
    if not rows:
        return ""
    what = "# by layer: which tensors that autograd saves around it wait on the host, by number; ALL: what it is given"
    return f"{ALL} = None\n{what}\nON_HOST = {{\n{rows}}}\n"


def _numbers(policy: LayerPolicy) -> str:
    if policy.action is not Action.KEEP:
        return ALL
    found = tuple(slot.index for slot in policy.program.slots if slot.buffer in policy.moved)
    return f"frozenset({found!r})"


IMPORTS: Final = """
import weakref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
"""
WRAP: Final = """    for name, numbers in ON_HOST.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _Waiting(model.get_submodule(name), numbers))
"""
"""Last in a function that has ``model``."""
CODE: Final = '''

class _Waiting(ActivationWrapper):
    """A module of whose saved tensors some wait on the host until backward asks for them."""

    def __init__(self, module, numbers):
        super().__init__(module)
        self.numbers = numbers

    def forward(self, *args, **kwargs):
        count, made = 0, {}

        def pack(tensor):
            nonlocal count
            count += 1
            chosen = tensor.is_floating_point() if self.numbers is ALL else count - 1 in self.numbers
            if not chosen:  # of what a layer is given, positions and masks stay: Python may read them
                return tensor
            spread = any(step == 0 and size > 1 for size, step in zip(tensor.size(), tensor.stride()))
            if spread or not tensor.numel() or isinstance(tensor, torch.nn.Parameter):
                return tensor
            storage, version = tensor.untyped_storage(), tensor._version
            where = storage._cdata, version, tensor.storage_offset(), tensor.size(), tensor.stride()
            held, alive = made.get(where, (None, None))
            if held is None or alive() is not storage:  # saved once, whoever saves it
                held = _OnHost(tensor)
                made[where] = held, weakref.ref(storage)
            return held

        with saved_tensors_hooks(pack, lambda held: held.fetched() if isinstance(held, _OnHost) else held):
            return self._checkpoint_wrapped_module(*args, **kwargs)


class _Away:
    """A tensor that is elsewhere, and its copy here while somebody needs it."""

    def __init__(self, tensor):
        size, strides = tensor.size(), tensor.stride()
        dense = 1 + sum((n - 1) * step for n, step in zip(size, strides)) == tensor.numel()
        self.size, self.strides = size, strides if dense else _packed(size)
        self.dtype, self.device, self.here = tensor.dtype, tensor.device, None
        self.send(tensor)

    def room(self, **where):
        return torch.empty_strided(self.size, self.strides, dtype=self.dtype, **where)

    def fetched(self):
        found = None if self.here is None else self.here()
        if found is None:
            found = self.room(device=self.device)
            self.fetch(found)
            self.here = weakref.ref(found)
        return found


def _packed(size):
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


class _OnHost(_Away):
    """In memory that is pinned where the device is a GPU."""

    def send(self, tensor):
        self.there = self.room(pin_memory=self.device.type == "cuda")
        self.there.copy_(tensor)

    def fetch(self, here):
        here.copy_(self.there)
'''
STAND_IN: Final = '''

class _OnHost(_Away):
    """Has no values, and holds no bytes where they are counted."""

    def send(self, tensor):
        pass

    def fetch(self, here):
        pass
'''
"""Follows a file that is run on fake tensors for its price."""
