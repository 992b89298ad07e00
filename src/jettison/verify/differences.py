"""Differences between two steps, bitwise: gradients by parameter name, and values that backward sees changed.

Two things are watched in a step. Each tensor under saved-tensor hooks is digested when it is packed and again when it
is unpacked. Each module that runs in backward is compared with its runs in forward: equal inputs have to give equal
outputs. The first covers non-reentrant checkpoints and all offloading; the second reentrant checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from jettison.capture.deep_copies import share_finalized, without_finalizers
from jettison.capture.isolation import without_gradients
from jettison.core.objects import swapped
from jettison.runtime.callers import trains_plainly

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class GradientDifference:
    """A parameter whose gradients differ: the number of elements, or which gradient is missing."""

    name: str
    reason: str
    differing_elements: int
    max_absolute_difference: float


@dataclass(frozen=True, kw_only=True)
class GradientReport:
    """Comparison of every parameter's gradient."""

    compared: int
    differences: tuple[GradientDifference, ...]

    @property
    def identical(self) -> bool:
        """Whether at least one gradient was compared and none differs in any bit."""
        return self.compared > 0 and not self.differences


def independent_copy(model: nn.Module) -> nn.Module:
    """A deep copy that shares no storage with `model`, gradients dropped; tied parameters stay tied.

    Hooks are copied with the module that carries them. A copy of a planned model trains plainly, without a warning. An
    object with a finalizer (`__del__`) is shared.
    """
    with without_gradients(model):
        memo: dict[int, Any] = {}
        quiet = without_finalizers(model, memo)
        share_finalized(model, memo)
        for module, empty in quiet:
            share_finalized(module.__getstate__(), memo)
            empty.__setstate__(copy.deepcopy(module.__getstate__(), memo))
        copied = copy.deepcopy(model, memo)
    _refuse_shared_storage(model, copied)
    for module in copied.modules():
        trains_plainly(module)
    return copied


def compare_gradients(model_a: nn.Module, model_b: nn.Module) -> GradientReport:
    """Compare gradients bit by bit, by parameter name (see `plain_name`).

    NaNs of equal bits are equal; 0.0 and -0.0 are not.

    Raises `ValueError` if the two share parameter or gradient storage, or have other parameter names.
    """
    _refuse_shared_storage(model_a, model_b)
    parameters_a, parameters_b = ({plain_name(n): p for n, p in m.named_parameters()} for m in (model_a, model_b))
    if parameters_a.keys() != parameters_b.keys():
        odd = sorted(parameters_a.keys() ^ parameters_b.keys())
        raise ValueError(f"models have different parameters, so their gradients cannot be compared: {odd[:5]}")
    compared, differences = 0, []
    for name, parameter in parameters_a.items():
        gradient_a, gradient_b = parameter.grad, parameters_b[name].grad
        if gradient_a is None and gradient_b is None:
            continue
        compared += 1
        difference = _difference(name, gradient_a, gradient_b)
        if difference is not None:
            differences.append(difference)
    return GradientReport(compared=compared, differences=tuple(differences))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(_bits(a), _bits(b)))


def rng_digest(generators: Mapping[str, torch.Generator] | None = None) -> str:
    """SHA-256 over the state of the CPU stream, every initialised CUDA stream, and named private generators."""
    digest = hashlib.sha256(tensor_bytes(torch.get_rng_state()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for state in torch.cuda.get_rng_state_all():
            digest.update(tensor_bytes(state))
    for name, generator in sorted((generators or {}).items()):
        digest.update(name.encode() + tensor_bytes(generator.get_state()))
    return digest.hexdigest()


def buffer_digest(model: nn.Module) -> str:
    """SHA-256 over every buffer's name, dtype, shape and bits: running statistics, step counters, load counters."""
    return _digest(model.named_buffers())


def parameter_digest(model: nn.Module) -> str:
    """SHA-256 over every parameter's name, dtype, shape and bits."""
    return _digest(model.named_parameters())


def _digest(named: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{plain_name(name)}:{tensor.dtype}:{tuple(tensor.shape)}".encode() + tensor_bytes(tensor))
    return digest.hexdigest()


def _difference(name: str, a: Tensor | None, b: Tensor | None) -> GradientDifference | None:
    if a is None or b is None:
        side = "first" if a is None else "second"
        return _named(name, f"the {side} model has no gradient", 0, float("inf"))
    if a.shape != b.shape or a.dtype != b.dtype:
        return _named(name, f"{a.dtype}{tuple(a.shape)} against {b.dtype}{tuple(b.shape)}", 0, float("inf"))
    differing, worst = differing_elements(a, b)
    if differing == 0:
        return None
    return _named(name, f"{differing} of {a.numel()} elements differ", differing, worst)


def differing_elements(a: Tensor, b: Tensor) -> tuple[int, float]:
    """Number of elements that differ in any bit, of two tensors of one shape and dtype, and the largest difference."""
    differing = int((_bits(a) != _bits(b)).sum())
    if differing == 0:
        return 0, 0.0
    return differing, float((a.detach().double() - b.detach().double()).abs().nan_to_num(nan=float("inf")).max())


def plain_name(name: str) -> str:
    """Name of a parameter or buffer without the prefixes of wrappers (checkpoint wrappers, torch.compile)."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _named(name: str, reason: str, differing: int, worst: float) -> GradientDifference:
    return GradientDifference(name=name, reason=reason, differing_elements=differing, max_absolute_difference=worst)


def _bits(tensor: Tensor) -> Tensor:
    dense = tensor.detach().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    return dense.view(_INTEGER_OF_SIZE[dense.element_size()])


def tensor_bytes(tensor: Tensor) -> bytes:
    """Bytes of the tensor's elements, in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy())


def _refuse_shared_storage(model_a: nn.Module, model_b: nn.Module) -> None:
    shared = _storages(model_a).keys() & _storages(model_b).keys()
    if shared:
        names = sorted(_storages(model_a)[key] for key in shared)
        raise ValueError(
            f"the two models share storage ({', '.join(names[:3])}): a comparison with itself proves nothing; "
            "pass an independent_copy made before the first step"
        )


def _storages(model: nn.Module) -> dict[int, str]:
    found = {}
    for name, parameter in model.named_parameters():
        for tensor in (parameter, parameter.grad):
            if tensor is not None and tensor.untyped_storage().nbytes():
                found[tensor.untyped_storage()._cdata] = name
    return found


MAX_DEPARTURES = 5
_RECOMPUTES = "_recomputation_hook."  # hooks by which torch's checkpoint collects recomputed tensors


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A tensor whose value in backward is not the one of the forward.

    Args:
        module: path of the innermost module that saved or returned it; empty for the model itself.
        op: the autograd node that unpacked it, such as ``MmBackward0``; empty for an output of a module.
        position: index among all tensors packed in the step, or among calls of modules.
        was, became: dtype and shape, such as ``float32[2, 8]``.
        differing_elements: None where it was not counted, or where shapes or types differ.
    """

    module: str
    op: str
    position: int
    was: str
    became: str
    differing_elements: int | None = None
    max_absolute_difference: float | None = None

    @classmethod
    def between(cls, before: Tensor | None, now: Tensor | None, became: str, *, was: str, **more: Any) -> Departure:
        """Build one, counting differing elements where both values are known and of one form."""
        counts: tuple[int | None, float | None] = (None, None)
        if before is not None and now is not None and was == became:
            counts = differing_elements(before, now)
        return cls(was=was, became=became, differing_elements=counts[0], max_absolute_difference=counts[1], **more)

    def sentence(self) -> str:
        where = self.module or "the model itself"
        what = f"a tensor saved in {where} for {self.op}" if self.op else f"what {where} returned"
        if self.was != self.became:
            return f"{what}: {self.was} in forward, {self.became} in backward"
        if self.differing_elements is None:
            return f"{what}: {self.was}, other values in backward than in forward"
        return (
            f"{what}: {self.was}, {self.differing_elements} elements differ in backward, by "
            f"{self.max_absolute_difference:.3g} at most"
        )


@dataclass(kw_only=True)
class _ForwardValue:
    module: str
    position: int
    form: str
    digest: bytes
    value: Any = None


@dataclass(kw_only=True)
class ValueWatch:
    """Values seen in one step; `departures` in the order in which the forward made those tensors. The value of ``keep``
    is kept, so that differing elements can be counted. ``failed_in``: the module whose tensors a checkpoint could not
    recompute; ``failed_at`` names the op and the difference.
    """

    keep: Departure | None = None
    found: list[Departure] = field(default_factory=list)
    packed: int = 0
    calls: int = 0
    compared: int = 0
    compared_bytes: int = 0
    failed_in: str = ""
    failed_at: str = ""
    calling: list[str] = field(default_factory=list)
    _again: list[tuple[str, str]] = field(default_factory=list)
    _path: list[str] = field(default_factory=list)
    _returned: dict[str, dict[bytes, list[_ForwardValue]]] = field(default_factory=lambda: defaultdict(dict))
    _given: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def departures(self) -> list[Departure]:
        """Departures of saved tensors; of module outputs where no saved tensor departs."""
        saved = [one for one in self.found if one.op]
        return sorted(saved or self.found, key=lambda one: one.position)

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the steps that run in this context."""
        names = {module: name for name, module in model.named_modules()}
        push: Any = torch._C._autograd._push_saved_tensors_default_hooks
        watched = {push.__name__: lambda pack, unpack: push(*self._watched(pack, unpack))}
        before = register_module_forward_pre_hook(lambda module, args: self._enters(names.get(module), args))
        after = register_module_forward_hook(lambda module, _, output: self._leaves(names.get(module), output))
        try:
            with swapped(torch._C._autograd, **watched), _RunningFunctions(self.calling):
                yield
        finally:
            before.remove()
            after.remove()

    def _watched(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> tuple[Any, Any]:
        if pack.__qualname__.startswith(_RECOMPUTES):
            return self._noted(pack), unpack
        region: list[tuple[str, str, str]] = []

        def packs(tensor: Tensor) -> Any:
            seen = self._seen(tensor, self._path[-1] if self._path else "", self.packed, saved=True)
            self.packed += 1
            region.append((seen.module, self._op(), seen.form))
            return pack(tensor), seen

        def unpacks(handle: Any) -> Tensor:
            packed, seen = handle
            try:
                with _RunningFunctions(self.calling):  # the one around the step sleeps while `backward` runs
                    tensor = unpack(packed)
            except CheckpointError as error:
                self._fails(str(error), region)
                raise
            node = torch._C._current_autograd_node()
            self.compared += 1
            self.compared_bytes += tensor.numel() * tensor.element_size()
            self._compare(seen, tensor, "?" if node is None else node.name())
            return tensor

        return packs, unpacks

    def _op(self) -> str:
        return self.calling[-1] if self.calling else ""

    def _noted(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        again: list[tuple[str, str]] = []
        self._again = again

        def packs(tensor: Tensor) -> Any:
            again.append((self._op(), form_of(tensor)))
            return pack(tensor)

        return packs

    def _fails(self, message: str, region: list[tuple[str, str, str]]) -> None:
        """Note the first op whose tensor a checkpoint could not recompute: another op, or another dtype or shape."""
        named = re.search(r"tensor at position (\d+)", message)
        first = int(named[1]) if named else 0
        pairs = zip(region, self._again, strict=False)
        first = next((at for at, (was, now) in enumerate(pairs) if was[1:] != now), first)
        if not named and first == 0 and len(self._again) < len(region):
            first = len(self._again)
        module, op, form = region[min(first, len(region) - 1)]
        self.failed_in = module or "the model itself"
        where = f"saved tensor {first} of {len(region)}, of {op or 'an op'}: {form} in forward"
        now = self._again[first] if first < len(self._again) else None
        if now is None:
            self.failed_at = f"{where}, not made in recompute"
        else:
            other = f" of {now[0]}" if now[0] != op else ""
            self.failed_at = f"{where}, {now[1]}{other} in recompute"

    def _enters(self, name: str | None, args: Any) -> None:
        if name is None:
            return
        while self._path and not name.startswith(f"{self._path[-1]}." if self._path[-1] else ""):
            self._path.pop()  # of a recompute that ended early
            self._given.pop()
        self._path.append(name)
        self._given.append((name, _digest_of_values(args)))

    def _leaves(self, name: str | None, output: Any) -> None:
        if name is None or not self._path:
            return
        while self._path and self._path[-1] != name:
            self._path.pop()
            self._given.pop()
        if not self._path:
            return
        self._path.pop()
        given = self._given.pop()[1]
        again = torch._C._current_graph_task_id() != -1
        if not again:
            self._returned[name].setdefault(given, []).append(self._seen(output, name, self.calls, saved=False))
            self.calls += 1
            return
        earlier = self._returned[name].get(given, [])
        if earlier and not any(seen.digest == _digest_of_values(output) for seen in earlier):
            self._compare(earlier[-1], output, "")

    def _seen(self, value: Any, module: str, position: int, *, saved: bool) -> _ForwardValue:
        wanted = self.keep is not None and bool(self.keep.op) == saved and self.keep.position == position
        kept = _first(value)
        return _ForwardValue(
            module=module,
            position=position,
            form=form_of(value),
            digest=_digest_of_values(value),
            value=kept.detach().clone() if wanted and kept is not None else None,
        )

    def _compare(self, seen: _ForwardValue, value: Any, op: str) -> None:
        if form_of(value) == seen.form and _digest_of_values(value) == seen.digest:
            return
        was, now = (None if one is None else one.detach() for one in (seen.value, _first(value)))
        self.found.append(
            Departure.between(
                was, now, form_of(value), module=seen.module, op=op, position=seen.position, was=seen.form
            )
        )


class _RunningFunctions(TorchFunctionMode):
    """Stack of the torch functions that are running, innermost last."""

    def __init__(self, calling: list[str]) -> None:
        super().__init__()
        self._calling = calling

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calling.append((resolve_name(func) or getattr(func, "__name__", "")).rpartition(".")[2])
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._calling.pop()


def _first(value: Any) -> Tensor | None:
    return next((leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), None)


def _digest_of_values(value: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode() + tensor_bytes(leaf))
        else:
            digest.update(type(leaf).__name__.encode())
    return digest.digest()


def form_of(value: Any) -> str:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
