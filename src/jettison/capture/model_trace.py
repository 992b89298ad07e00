"""The trace of a model: its classes of blocks, their calls in order, and the program around them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from jettison.capture.dispatch import tracing
from jettison.capture.isolation import leaving_nothing
from jettison.capture.pytrees import tree_leaves
from jettison.capture.recorder import RegionTrace, TensorRef
from jettison.capture.signature import as_signed
from jettison.core.errors import TraceError, UnsupportedModule, UsageError
from jettison.core.objects import ABSENT, summary, swapped_entries
from jettison.core.units import format_seconds
from jettison.ledger.program import Program

LossFn = Callable[[Any], Tensor]


@dataclass(kw_only=True)
class BlockCall:
    """One call of a block in the forward, in call order. ``problem`` says why it could not be recorded."""

    name: str
    class_key: str
    shared: Set[int] = frozenset()  # leaf positions of arguments that other blocks get too, in any call of its class
    links: tuple[tuple[int, int], ...] = ()  # (leaf position, output leaf of the call before) that are one tensor
    problem: str = ""
    given: Mapping[int, int] = field(default_factory=dict)  # leaf position of a tensor argument -> the root's buffer
    signature: Any = None  # of this call; those of a class may differ in details that its forward ignores


@dataclass(kw_only=True)
class BlockClass:
    """Blocks that compute the same thing on tensors of the same shape."""

    key: str
    trace: RegionTrace
    example: str  # name of the recorded block
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tables: list[tuple[dict[str, Any], dict[str, Any]]]  # of its modules: children, texts and numbers at its call
    signature: Any = None
    problem: str = ""  # why it has no program, only inputs and outputs: it is kept or checkpointed as a whole
    verdict: Any = None  # whether its Python may be rerun, if that was tried
    compiled: CompiledProgram | None = None  # if its blocks run compiled

    def as_called(self) -> contextlib.AbstractContextManager[None]:
        """Give its modules the children and settings of the call: the model may have changed them before it."""
        found = ((t, k, v) for t, was in self.tables for k, v in was.items())
        return swapped_entries((t, k, v) for t, k, v in found if t.get(k, ABSENT) is not v)

    @property
    def stood_in(self) -> bool:
        """Whether a dry run has a stand-in for the block, with levels that were observed on real tensors."""
        return bool(self.problem) or self.compiled is not None

    @property
    def program(self) -> Program:
        """The program to plan; for a compiled block Inductor's."""
        return self.trace.program if self.compiled is None else self.compiled.program


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Properties of the training loop that memory depends on in addition to the model."""

    keep_output: bool = True  # it references the model's output until the end of the step
    gradients_preallocated: bool = False  # parameters have gradients already when the forward starts
    check: str = "always"  # share of recomputed values that the runtime will compare with the forward's
    elsewhere_bytes: int = 0  # on the device, outside of the step: other models, workspaces of libraries
    compile: CompileSettings | None = None  # of the blocks
    chunked_loss: bool = False  # its cross entropy runs in chunks of rows


@dataclass(kw_only=True)
class ModelTrace:
    """The record of one training forward of a model, and the fake copy that it was taken from."""

    calls: list[BlockCall]
    classes: dict[str, BlockClass]
    root: RegionTrace
    fake_model: nn.Module
    mode: FakeTensorMode
    batch: Any  # fake or real, as the fake copy takes it
    loss_fn: LossFn | None
    values_known: bool
    real: nn.Module | None  # the model itself, if its tensors have values
    seconds: float
    root_signature: Any = None
    loop: Loop = field(default_factory=Loop)
    outside: list[TensorRef] = field(default_factory=list)  # saved by a loss that is computed after the forward
    warnings: list[str] = field(default_factory=list)
    more: list[ModelTrace] = field(default_factory=list)  # of calls with other arguments in the same step

    def __repr__(self) -> str:
        return summary(
            self,
            f"{type(self.fake_model).__name__}, {len(self.calls)} block calls, {len(self.classes)} kinds, recorded in "
            f"{format_seconds(self.seconds)}",
        )

    @functools.cached_property
    def device_type(self) -> str | None:
        """Device type whose memory counts: the accelerator of any of the model's tensors; None if everything counts."""
        types = {t.device.type for t in (*self.fake_model.parameters(), *self.fake_model.buffers())}
        return min(types - {"cpu", "meta"}, default=None)

    def context(self) -> contextlib.AbstractContextManager[None]:
        """Context for runs of the fake copy, with autocast as it was when the trace was taken."""
        return context_of(self, self.fake_model)

    def program(self, call: BlockCall) -> Program:
        """The program of a block call; without ops if it could not be recorded."""
        return self.classes[call.class_key].program


@contextlib.contextmanager
def context_of(trace: ModelTrace, module: nn.Module) -> Iterator[None]:
    """See `ModelTrace.context`, for one module that is run alone: only state that it can reach is restored."""
    with (
        as_signed(trace.root_signature[1]),
        leaving_nothing([module], [trace.loss_fn, trace.batch, *tree_leaves(trace.batch)]),
        tracing(trace.mode, values_known=trace.values_known),
    ):
        yield


def call_model(model: nn.Module, batch: Any) -> Any:
    """``model(**batch)`` for a mapping, ``model(*batch)`` for a tuple or list, ``model(batch)`` otherwise."""
    args, kwargs = as_call(batch)
    return model(*args, **kwargs)


def loss_of(output: Any, loss_fn: LossFn | None = None) -> Tensor:
    """The scalar to differentiate: ``loss_fn(output)``, ``output.loss`` or the output. `TraceError` if none is one."""
    if loss_fn is not None:
        loss = loss_fn(output)
    elif isinstance(output, Tensor):
        loss = output
    else:
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
        parts = enumerate(output) if isinstance(output, tuple | list) else ()
        scalars = [at for at, one in parts if isinstance(one, Tensor) and one.numel() == 1]
        such = f"lambda output: output[{scalars[0]}]" if scalars else "..."
        raise TraceError(
            f"no scalar loss: got {got}; expected output.loss (are labels in the batch?), a scalar output, or loss_fn, "
            f"which makes one of the output: loss_fn={such}, or the third of (model, batch, loss_fn) of a factory"
        )
    return loss


class Arguments(NamedTuple):
    """A batch that is given by position and by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and keyword arguments of the model. Raise `UsageError` for None and a DataLoader."""
    if isinstance(batch, Arguments):
        return batch.args, dict(batch.kwargs)
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    if batch is None or hasattr(batch, "batch_sampler"):
        got = "None" if batch is None else f"a {type(batch).__name__}"
        raise UsageError(f"got {got} as a batch; expected the model's arguments, such as next(iter(loader))")
    return (batch,), {}


def as_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return Arguments(args, kwargs) if args and kwargs else kwargs or args


def expect_module(model: object) -> None:
    """Raise `UsageError` for a model that is no module: a name, a class, nothing."""
    if isinstance(model, nn.Module):
        return
    how = ""
    if isinstance(model, str):
        how = f": build it first, as in AutoModelForCausalLM.from_pretrained({model!r})"
    elif isinstance(model, type):
        how = f": make one of it, as in {model.__name__}(...)"
    got = f"the name {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
    raise UsageError(f"got {got} as a model; expected a torch.nn.Module{how}")


def expect_trace(traced: object) -> None:
    """Raise `UsageError` for something else than a trace, such as the model."""
    if not isinstance(traced, ModelTrace):
        raise UsageError(
            f"got a {type(traced).__name__} as a trace; expected what jettison.trace(model, batch) returns"
        )


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """Inductor's options for blocks, sorted by name."""

    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A block's forward as Inductor's graph before partitioning; ``default``: what its partitioner would save."""

    program: Program
    default: frozenset[int] = field(default_factory=frozenset)
    settings: CompileSettings


def settings_of(name: str, module: nn.Module) -> CompileSettings:
    """Settings of ``module.compile(...)``. Raises `UnsupportedModule` for those that no plan supports."""
    from torch._inductor import config  # imported only if something is compiled

    patched = getattr(module._compiled_call_impl, "get_compiler_config", lambda: None)()  # Inductor's, with the given
    if not isinstance(patched, dict):
        raise UnsupportedModule(
            f"{name} is compiled by another backend than Inductor, which alone asks somebody else what to save for "
            "backward; call block.compile() without backend=, or leave the blocks uncompiled"
        )
    usual = config.get_config_copy()
    told = {key: value for key, value in patched.items() if key not in usual or usual[key] != value}
    if patched.get("triton.cudagraphs"):
        raise UnsupportedModule(
            f"{name} is compiled with CUDA graphs, whose memory lies in pools of their own that no plan can count; "
            'use mode="max-autotune-no-cudagraphs", or no mode'
        )
    if patched.get("custom_partitioner_fn") is not None:
        raise UnsupportedModule(
            f"{name} is compiled with a custom_partitioner_fn of its own, which decides what a plan has to decide; "
            "drop it"
        )
    return CompileSettings(options=tuple(sorted(told.items())))
