"""What a real forward of a tiny model leaves with autograd, and what the closed form says that it does."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from jettison.capture.blocks import find_blocks
from jettison.formula.region import layer_region
from support.formula_cases import VOCABULARY, FormulaCase, model_of, run_of


def observed_bytes(case: FormulaCase, change: Callable[[nn.Module], object] = lambda _: None) -> list[int]:
    """What autograd holds because of each layer once the real forward is over, parameters and the root's aside.

    Args:
        change: is called with the model before.
    """
    model = model_of(case)
    change(model)
    free = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    packed: list[list[weakref.ref[_Box]]] = []
    given: list[set[int]] = []
    with torch.enable_grad():
        for name in find_blocks(model):
            _listen(model.get_submodule(name), packed, given)
        ids = torch.randint(1, VOCABULARY, (case.batch, case.sequence))
        loss = model(input_ids=ids, labels=ids).loss
    gc.collect()
    shared = {key for key, uses in Counter(key for keys in given for key in keys).items() if uses > 1}
    totals = []
    for boxes in packed:
        alive = [box.tensor.untyped_storage() for ref in boxes if (box := ref()) is not None]
        sizes = {storage._cdata: storage.nbytes() for storage in alive}
        totals.append(sum(size for key, size in sizes.items() if key not in free | shared))
    del loss
    return totals


class _Box:
    """What autograd is handed in the place of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _listen(layer: torch.nn.Module, packed: list[list[weakref.ref[_Box]]], given: list[set[int]]) -> None:
    boxes: list[weakref.ref[_Box]] = []
    packed.append(boxes)
    forward = layer.forward

    def pack(tensor: Tensor) -> _Box:
        box = _Box(tensor.detach())  # a result that its own node saved would hold that node through the box
        boxes.append(weakref.ref(box))
        return box

    def listening(*args: object, **kwargs: object) -> object:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        given.append({leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)})
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            return forward(*args, **kwargs)

    layer.forward = listening  # type: ignore[method-assign]


def closed_form_bytes(case: FormulaCase) -> list[int]:
    """The same of the formula."""
    run = run_of(case)
    return [layer_region(run.signature, layer).saved_bytes for layer in run.model.layers]
