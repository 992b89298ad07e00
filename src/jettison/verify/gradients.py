"""Bitwise comparison of gradients by parameter name, between a model and an independent copy."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jettison.capture.copies import share_finalized, without_finalizers
from jettison.runtime.copies import trains_plainly

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
    without_gradient: tuple[str, ...]
    differences: tuple[GradientDifference, ...]

    @property
    def identical(self) -> bool:
        """Whether at least one gradient was compared and none differs in any bit."""
        return self.compared > 0 and not self.differences


def independent_copy(model: nn.Module) -> nn.Module:
    """A deep copy that shares no storage with `model`, gradients dropped; tied parameters stay tied.

    Take it before a plan is applied: hooks are copied with the module that carries them. A copy of a planned model
    trains plainly, without a warning. An object with a finalizer (`__del__`) is shared.
    """
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        for parameter in gradients:
            parameter.grad = None
        memo: dict[int, Any] = {}
        quiet = without_finalizers(model, memo)
        share_finalized(model, memo)
        for module, empty in quiet:
            share_finalized(module.__getstate__(), memo)
            empty.__setstate__(copy.deepcopy(module.__getstate__(), memo))
        copied = copy.deepcopy(model, memo)
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
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
    compared, without, differences = 0, [], []
    for name, parameter in parameters_a.items():
        gradient_a, gradient_b = parameter.grad, parameters_b[name].grad
        if gradient_a is None and gradient_b is None:
            without.append(name)
            continue
        compared += 1
        difference = _difference(name, gradient_a, gradient_b)
        if difference is not None:
            differences.append(difference)
    return GradientReport(compared=compared, without_gradient=tuple(without), differences=tuple(differences))


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
