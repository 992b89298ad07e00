"""Tensor-parallel plans of known models; other models are refused.

Known are transformers' Llama, Mistral, Qwen2, Qwen3 and GPT-2, their layers, and the models of record in `reference`. A
model is recognised by its classes and their submodules, and not by the names of modules: equal names do not make equal
mathematics.

Between layers, activations are sharded along the sequence with sequence parallelism, and unsharded without it; so are
the inputs and outputs of a single layer. A model takes unsharded ids and returns unsharded logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from jettison.core.errors import JettisonError, UnsupportedModule, UsageError
from jettison.core.files import read_table
from jettison.families.family import BLOCKS, FAMILIES
from jettison.parallel.dropout import OwnDraws
from jettison.parallel.styles import (
    BlockInput,
    ColumnParallel,
    Replicated,
    RowParallel,
    SplitInput,
    Style,
    VocabularyParallel,
    is_linear,
)
from jettison.parallel.tp_collectives import Axis
from jettison.runtime.planned_forward import PlannedForward

Plan = dict[str, Style]
"""Module path -> what happens to it, for `parallelize_module`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerForm:
    """Names of the parts of one kind of layer; see known_models.toml."""

    dim: int
    norms: tuple[str, str]
    attention: str
    projections: tuple[str, ...]
    out: str
    mlp: str
    ups: tuple[str, ...]
    down: str
    dropout: str | None = None
    joined: bool = False
    groups: int = 1
    head_norms: tuple[str, ...] = ()
    divided: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StackForm:
    """Names of the parts before and after a model's layers; see known_models.toml."""

    tokens: str
    layers: str
    norm: str
    positions: str | None = None
    scatters: bool = False
    splits: str = ""
    head: str | None = None


class HeadForm(NamedTuple):
    body: str
    head: str


RECORD: Final = "jettison.models.reference"
_Form = TypeVar("_Form")
_OWN_PLAN: Final = "a plan of your own: apply_tensor_parallel(..., plan={path: style})"
_NORMS: Final = ("torch.nn.modules.normalization.LayerNorm", "torch.nn.modules.normalization.RMSNorm")


@cache
def _tables() -> dict[str, Mapping[str, Any]]:
    """Names of parts, by the common prefix of a model's class names."""
    own = read_table(Path(__file__).with_suffix(".toml"))
    found: dict[str, Mapping[str, Any]] = {f"{RECORD}.{table['name']}": table for table in own["model"]}
    for kind, family in FAMILIES.items():
        if (table := family.tensor_parallel) and "parts" in table:
            table = {**read_table(BLOCKS / f"{table['parts']}.toml"), **table}
        if table:
            found[f"{own['families'].format(kind)}.{table['name']}"] = table
    return found


def known(form: type[_Form]) -> Mapping[str, _Form]:
    """Forms of a part by the names of their classes."""
    made: Any = form
    return _forms(made)


@cache
def _forms(form: Any) -> Any:
    found, part = {}, form.__name__.removesuffix("Form").lower()
    for name, table in _tables().items():
        if part in table:
            values = {key: tuple(value) if isinstance(value, list) else value for key, value in table[part].items()}
            suffix = str(values.pop("class"))
            found[name + suffix] = form(**values)
    return found


def _norms() -> list[str]:
    return sorted([*_NORMS, *(name + table["norm"] for name, table in _tables().items() if "norm" in table)])


def tensor_parallel_plan(model: nn.Module, *, sequence_parallel: bool = True) -> Plan:
    """Style of each module of a known model, a known layer, or layers in a ModuleList or a Sequential. Parts may be
    missing (None), as in the stages of a pipeline. Raise `UnsupportedModule` for an unknown module, one that is not as
    its class builds it, or one with additional parameters.
    """
    planner = _StylePlanner(sequence_parallel=sequence_parallel)
    planner.visit(model, "")
    planner.refuse_rest(model)
    return planner.plan


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = True, plan: Mapping[str, Style] | None = None
) -> nn.Module:
    """Shard a model over an axis, in place. Every parameter becomes a DTensor with rank 0's values.

    Make the optimizer, apply FSDP and seed the ranks (`seed_ranks`) afterwards. The gradients of norms may be Partial:
    see `reduce_partial_gradients`.

    Args:
        mesh: the tensor-parallel axis alone, ``mesh["tp"]``.
        plan: instead of `tensor_parallel_plan`'s.

    Raises:
        UnsupportedModule: see `tensor_parallel_plan`.
        UsageError: something does not divide over the ranks, or the model, unchanged, is distributed or planned.
    """
    found = tensor_parallel_plan(model, sequence_parallel=sequence_parallel) if plan is None else plan
    ways = Axis.of(mesh).size
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UsageError(f"{name} is distributed already; apply tensor parallelism once, and before FSDP")
    refuse_planned(model, "tensor parallelism")
    for path, style in found.items():
        try:
            style.check(model.get_submodule(path), ways)
        except JettisonError as error:
            raise type(error)(f"{path or 'the model'}: {error}") from error
    ties: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        ties.setdefault(id(parameter), []).append(name)
    for path, style in found.items():
        parallelize_module(model.get_submodule(path), mesh, style)
    for first, *others in ties.values():
        for name in others:
            kept, other = model.get_parameter(first), model.get_parameter(name)
            if isinstance(kept, DTensor) and isinstance(other, DTensor) and kept.placements != other.placements:
                raise UsageError(f"{first} and {name} are one parameter, but the plan shards them in two ways")
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, kept)
    return model


def refuse_planned(model: nn.Module, what: str) -> None:
    """Raise `UsageError` for a model that runs under a plan."""
    for path, module in model.named_modules():
        if isinstance(module.forward, PlannedForward):
            raise UsageError(f"{path or 'the model'} runs under a plan; apply {what} before plans are made")


@dataclass(kw_only=True)
class _StylePlanner:
    sequence_parallel: bool
    plan: Plan = field(default_factory=dict)

    def visit(self, module: nn.Module, path: str) -> None:
        if (head := known(HeadForm).get(class_of(module))) is not None:
            body, inside = _child(module, head.body, path), _join(path, head.body)
            self._stack(body, inside, _known(body, StackForm, inside))
            self._head(module, path, head.head)
        elif (stack := known(StackForm).get(class_of(module))) is not None:
            self._stack(module, path, stack)
        elif (layer := known(LayerForm).get(class_of(module))) is not None:
            self._layer(module, path, layer)
        elif isinstance(module, nn.ModuleList | nn.Sequential):
            for name, child in module.named_children():
                self.visit(child, _join(path, name))
        elif next(module.parameters(), None) is not None:
            every = (name for form in (HeadForm, StackForm, LayerForm) for name in known(form))
            names = ", ".join(sorted(name.rpartition(".")[2] for name in every))
            raise UnsupportedModule(
                f"no tensor-parallel plan is known for {path or 'the model'}, a {class_of(module)}; known are {names}. "
                f"Give {_OWN_PLAN}"
            )

    def refuse_rest(self, model: nn.Module) -> None:
        for path, module in model.named_modules():
            for name in module._parameters:
                if path not in self.plan and module._parameters[name] is not None:
                    raise UnsupportedModule(
                        f"{_join(path, name)} is a parameter that a {class_of(module)} of this form is not known to "
                        f"have; give {_OWN_PLAN}"
                    )

    def _head(self, model: nn.Module, path: str, name: str) -> None:
        head = getattr(model, name, None)
        if head is None:
            return
        if not is_linear(head):
            raise _unexpected(head, _join(path, name), "a linear layer")
        self.plan[_join(path, name)] = ColumnParallel(enters=not self.sequence_parallel, collected=True)

    def _stack(self, stack: nn.Module, path: str, form: StackForm) -> None:
        layers = _child(stack, form.layers, path)
        within = _join(path, form.layers)
        dims = {_known(layer, LayerForm, _join(within, name)).dim for name, layer in layers.named_children()}
        dim = next(iter(dims), 1) if self.sequence_parallel else None
        scattered = dim if form.scatters else None
        if getattr(stack, form.tokens, None) is not None:
            self.plan[_join(path, form.tokens)] = VocabularyParallel(dim=scattered)
        if form.positions is not None and getattr(stack, form.positions, None) is not None:
            self.plan[_join(path, form.positions)] = Replicated(sharded=scattered is not None, split_ids=scattered)
        for name, layer in layers.named_children():
            self._layer(layer, _join(path, f"{form.layers}.{name}"), _known(layer, LayerForm, path))
        if dim is not None and not form.scatters and getattr(stack, form.tokens, None) is not None:
            first = form.splits or f"{form.layers}.{next(name for name, _ in layers.named_children())}"
            self.plan[_join(path, first)] = SplitInput(dim=dim)
        if getattr(stack, form.norm, None) is not None:
            self._norm(stack, path, form.norm, gathers=dim)
        if form.head is not None:
            self._head(stack, path, form.head)

    def _layer(self, layer: nn.Module, path: str, form: LayerForm) -> None:
        dim = form.dim if self.sequence_parallel else None
        for name in form.norms:
            self._norm(layer, path, name)
        attention = _child(layer, form.attention, path)
        inside = _join(path, form.attention)
        dropout = 0.0 if form.dropout is None else getattr(attention, form.dropout)
        draws = OwnDraws() if dim is None and float(getattr(dropout, "p", dropout)) else None
        self.plan[inside] = BlockInput(dim=dim, divided=form.divided, draws=draws)
        unit = int(attention.head_dim) * (3 if form.joined else 1)
        for name in form.projections:
            self._linear(attention, inside, name, ColumnParallel(unit=unit, groups=form.groups))
        for name in form.head_norms:
            if getattr(attention, name, None) is not None:
                self._norm(attention, inside, name, heads=int(attention.head_dim))
        self._linear(attention, inside, form.out, RowParallel(dim=dim, draws=draws))
        mlp, inside = _child(layer, form.mlp, path), _join(path, form.mlp)
        self.plan[inside] = BlockInput(dim=dim)
        for name in form.ups:
            self._linear(mlp, inside, name, ColumnParallel())
        self._linear(mlp, inside, form.down, RowParallel(dim=dim))

    def _norm(
        self, parent: nn.Module, path: str, name: str, *, heads: int | None = None, gathers: int | None = None
    ) -> None:
        norm = _child(parent, name, path)
        if class_of(norm) not in _norms():
            raise _unexpected(norm, _join(path, name), "one of " + ", ".join(_norms()))
        for parameter in norm.parameters():
            if heads is not None and parameter.numel() != heads:
                raise _unexpected(norm, _join(path, name), f"a norm of single heads, {heads} wide")
        sharded = heads is not None or self.sequence_parallel
        self.plan[_join(path, name)] = Replicated(sharded=sharded, gathers=gathers)

    def _linear(self, parent: nn.Module, path: str, name: str, style: Style) -> None:
        module = _child(parent, name, path)
        if not is_linear(module):
            raise _unexpected(module, _join(path, name), "a linear layer (nn.Linear, or Conv1D of GPT-2)")
        self.plan[_join(path, name)] = style


def class_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _known(module: nn.Module, form: type[_Form], path: str) -> _Form:
    found = known(form).get(class_of(module))
    if found is None:
        raise _unexpected(module, path, "one of " + ", ".join(sorted(known(form))))
    return found


def _child(parent: nn.Module, name: str, path: str) -> nn.Module:
    child = getattr(parent, name, None)
    if not isinstance(child, nn.Module):
        raise UnsupportedModule(
            f"{path or 'the model'}, a {class_of(parent)}, has no module {name!r}, which its class is known to have; "
            f"give {_OWN_PLAN}"
        )
    return child


def _unexpected(module: nn.Module, path: str, expected: str) -> UnsupportedModule:
    return UnsupportedModule(f"{path or 'the model'} is a {class_of(module)}; expected {expected}. Give {_OWN_PLAN}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
