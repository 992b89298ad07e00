"""Schedules of `torch.distributed.pipelining` over fake copies of a rank's stages: torch's own, and nothing is sent.

What a stage is called with is what the stage before returns. So when a step is first run, ranks tell each other shapes,
one stage after the other, in the words of their agreement: a rank that fails before it could is heard of there.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, UntypedStorage, distributed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, _utils, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import TensorWeakRef

from jettison.capture.fakes import fake_copy
from jettison.core.errors import UnsupportedModule
from jettison.dryrun.counter import AllocationCounter
from jettison.dryrun.user_step import Scheduled, stages_of
from jettison.parallel.agree import Agreement, Round, ranks_in
from jettison.parallel.imagined import ImaginedReplica, imagined_copy, imagined_group

_REPEATING = (Schedule1F1B, ScheduleInterleaved1F1B)


class ImaginedStage(PipelineStage):
    """A stage whose transfers send nothing (`imagined_transfers`). It watches the memory of one micro-batch's."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.watched = 0  # a micro-batch
        self.transferred: list[TensorWeakRef] = []  # not by storage: a recording may hold that of an input

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        return self._noted(fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        return self._noted(bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        return self._noted(fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        return self._noted(bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def backward_weight_one_chunk(self, *args: Any, **more: Any) -> Any:
        """torch 2.11 finds no ``autograd.Function`` of which only Python has a reference between the halves."""
        try:
            return super().backward_weight_one_chunk(*args, **more)
        except RuntimeError as error:
            if "_input_metadata" not in str(error):
                raise
            raise UnsupportedModule(
                f"stage {self.stage_index}: torch {torch.__version__} loses layers that are an autograd.Function "
                "between the halves of a split backward, without a plan, too; expected a schedule that does not split "
                "it, such as ScheduleInterleaved1F1B, or torch 2.13 or newer"
            ) from error

    def _output_slot_is_releasable(self, output: Any) -> tuple[bool, str]:
        """torch 2.15 lets go of an output once it is sent, if it is a plain tensor, for which a fake one stands."""
        if isinstance(self.submod, ImaginedReplica):
            return False, "DistributedDataParallel wants it"
        parent: Any = super()
        with unset_fake_temporarily():
            found: tuple[bool, str] = parent._output_slot_is_releasable(
                torch.empty(0) if isinstance(output, FakeTensor) else output
            )
        return found

    def _noted(self, micro_batch: int, ops: list[distributed.P2POp]) -> list[distributed.P2POp]:
        if micro_batch == self.watched:
            self.transferred += [TensorWeakRef(op.tensor) for op in ops]
        return ops

    def held(self) -> Iterator[UntypedStorage]:
        """Memory of the tensors that the watched micro-batch was transferred by and that are alive."""
        own = (of_stage.get(self.watched, ()) for of_stage in (self.args_recv_info, self.grad_recv_info))
        kept = (t for infos in own for buffer in _buffers(infos) for t in (buffer, buffer.grad))  # sent or not
        for tensor in itertools.chain(kept, (known() for known in self.transferred)):
            if tensor is not None:
                yield tensor.untyped_storage()


class _ImaginedTransfer:
    """Stands for a work of torch's. Until somebody lets go of it, it holds its tensor, as gloo's and NCCL's do."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        """Nothing is sent."""


class Transfers:
    """Transfers of a step that sends nothing.

    Args:
        stages: those of this rank, which watch the same micro-batch.
    """

    def __init__(self, stages: Sequence[ImaginedStage]) -> None:
        self._stages = stages
        self._last: dict[int, int] = {}
        self.watched = stages[0].watched
        for stage in stages:
            stage.transferred.clear()  # by a step before

    def begin(self, ops: Sequence[distributed.P2POp], desc: str | None = None) -> list[_ImaginedTransfer]:
        """In place of torch's ``_batch_p2p``."""
        works = [_ImaginedTransfer(op.tensor) for op in ops]
        if ops:
            self._last = self.held()
        return works

    def held(self) -> dict[int, int]:
        """Bytes of the storages that hold the watched micro-batch's transfers now, by address."""
        return {storage._cdata: storage.nbytes() for stage in self._stages for storage in stage.held()}

    def watch(self) -> list[tuple[ReferenceType[UntypedStorage], int]]:
        """These storages without holding them, and their bytes."""
        storages = {storage._cdata: storage for stage in self._stages for storage in stage.held()}
        return [(weakref.ref(storage), storage.nbytes()) for storage in storages.values()]

    def left_bytes(self) -> int:
        """Bytes that the watched micro-batch's transfers held when the step began its last one, or hold now."""
        return sum((self._last | self.held()).values())


@contextlib.contextmanager
def imagined_transfers(stages: Sequence[ImaginedStage]) -> Iterator[Transfers]:
    """Steps of torch's schedules in here send nothing. They keep works, and with them tensors, as they do for real."""
    found, before = Transfers(stages), schedules._batch_p2p
    schedules._batch_p2p = found.begin
    try:
        yield found
    finally:
        schedules._batch_p2p = before


def send_nothing(schedule: Any, stages: Sequence[ImaginedStage]) -> None:
    """What stages would ask each other before their first step, they know. They watch a micro-batch in the middle of
    the step, before and after which there are others.

    torch 2.11 asks nothing of stages that are made with shapes; 2.15 asks nothing over a group that sends nothing.
    """
    for stage in stages:
        stage.watched = (schedule._n_microbatches - 1) // 2
    if not hasattr(schedule, "_warmup_p2p"):
        return

    def agree_at_once(*_: Any) -> None:
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC

    schedule._warmup_p2p = agree_at_once


class ImaginedSchedule:
    """Stands for a schedule in a step on fake tensors. The pipeline's ranks make it together.

    Args:
        words: of the pipeline's ranks; None: this rank has all stages.
        number: of the schedule among the things that the step is given.

    Raises:
        UnsupportedModule: see `stages_of`.
    """

    def __init__(
        self, schedule: Scheduled, mode: FakeTensorMode, words: Agreement | None = None, *, number: int = 0
    ) -> None:
        self.real = schedule
        self.stages = stages_of(schedule)
        self.modules = [imagined_copy(stage.submod, mode) for stage in self.stages]
        self._probes = [fake_copy(stage.submod, mode) for stage in self.stages]  # nobody watches their calls
        group = self.stages[0].group or distributed.group.WORLD
        self._group = imagined_group(group)
        self._chain = _Chain(words.among(ranks_in(group)) if words is not None else None, number)
        self._made: Any = None
        self._count = 0  # of micro-batches that are run
        self._left: Tensor | None = None  # as much as the others are received into
        self._sending: list[ImaginedStage] = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """See torch's schedules."""
        if self._made is None:
            self._make(args, kwargs)
        if self._count < self.real._n_microbatches:
            args, kwargs = tree_map(self._first_rows, (args, kwargs))
        cut = self._count < self.real._n_microbatches
        notes = cut and self._left is None
        with imagined_transfers(self._sending) as transfers:
            with _held_by_losses(self._made, transfers) if notes else contextlib.nullcontext([0]) as held:
                result = self._made.step(*args, **kwargs)
            if notes:  # what the micro-batches that are not run hold until the step ends
                size = (self.real._n_microbatches - self._count) * (transfers.left_bytes() + held[0])
                self._left = torch.empty(size, dtype=torch.uint8, device=self.stages[0].device)
        return result

    def held(self) -> list[Tensor]:
        """What stages receive into, which stays from step to step."""
        both = [infos for stage in self._sending for infos in (stage.args_recv_info, stage.grad_recv_info)]
        buffers = [t for infos in both for of_micro_batch in infos.values() for t in _buffers(of_micro_batch)]
        return buffers if self._left is None else [*buffers, self._left]

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = {name: value for name, value in kwargs.items() if name not in _OF_THE_SCHEDULE}
        args_split, kwargs_split = self.real._split_inputs(args, own)
        for stage, module, probe in zip(self.stages, self.modules, self._probes, strict=True):
            given = args_split[0] if stage.is_first else self._chain.hear(stage.stage_index - 1)
            with torch.enable_grad():
                returned = probe(*tree_map(_on(stage.device), given), **kwargs_split[0])
            outputs = returned if isinstance(returned, tuple | list) else (returned,)
            self._chain.tell(stage.stage_index, outputs)
            made = ImaginedStage(
                module,
                stage.stage_index,
                stage.num_stages,
                stage.device,
                group=self._group,
                input_args=tuple(map(_without_memory, given)),
                output_args=tuple(map(_without_memory, outputs)),
                dw_builder=stage.dw_builder,
            )
            made.stage_index_to_group_rank = stage.stage_index_to_group_rank
            self._sending.append(made)
        self._probes.clear()
        single = isinstance(self.real, PipelineScheduleSingle)
        self._count = self._enough(args, kwargs)
        stages: Any = self._sending[0] if single else self._sending
        kind: Any = type(self.real)
        taken = inspect.signature(kind.__init__).parameters
        given = {name: getattr(self.real, attribute) for name, attribute in _AS_MADE.items() if name in taken}
        self._made = kind(stages, self._count, **given)
        send_nothing(self._made, self._sending)

    def _enough(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Micro-batches after which a schedule repeats itself. All of them where it does not, where the last stage puts
        its outputs together, or where rows are not what a batch is cut by.
        """
        count = self.real._n_microbatches
        together = kwargs.get("return_outputs", True) and any(stage.is_last for stage in self.stages)
        specs = (self.real._args_chunk_spec, self.real._kwargs_chunk_spec)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        alike = all(t.dim() > 0 and t.shape[0] % count == 0 for t in tensors)
        if together or any(specs) or not alike or not isinstance(self.real, _REPEATING):
            return int(count)
        return int(min(count, (2 if len(self.stages) == 1 else 3) * self.stages[0].group_size))

    def _first_rows(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.narrow(0, 0, leaf.shape[0] // self.real._n_microbatches * self._count)


@contextlib.contextmanager
def _held_by_losses(made: Any, transfers: Transfers) -> Iterator[list[int]]:
    """Bytes that the loss of a micro-batch, and its graph, hold until a step ends, beside those of its transfers. The
    one number that ``mse_loss`` returns lies in a storage as large as its input.
    """
    found = [0]
    update = made._update_losses

    def without_one(*args: Any) -> None:
        losses = made._internal_losses
        if losses:  # of the last stage
            number = transfers.watched
            before, transferred = counter.live_bytes, transfers.watch()
            losses[number] = losses[number].new_empty(losses[number].shape)
            gone = sum(size for known, size in transferred if known() is None)
            found[0] = before - counter.live_bytes + losses[number].nbytes - gone
        update(*args)

    made._update_losses = without_one
    try:
        with AllocationCounter() as counter:
            yield found
    finally:
        made._update_losses = update


def _buffers(infos: Iterable[Any]) -> list[Tensor]:
    """Tensors that a stage has received into, of what torch knows of those that it is sent."""
    return [buffer for info in infos if isinstance(buffer := getattr(info, "buffer", None), Tensor)]


_AS_MADE = {
    "loss_fn": "_loss_fn",
    "args_chunk_spec": "_args_chunk_spec",
    "kwargs_chunk_spec": "_kwargs_chunk_spec",
    "output_merge_spec": "_output_merge_spec",
    "scale_grads": "scale_grads",
}
"""What schedules are made with, by the names under which they keep it; `ScheduleLoopedBFS` takes no chunk specs."""
_OF_THE_SCHEDULE = frozenset({"target", "losses", "return_outputs", "loss_kwargs"})


class _Chain:
    """What stages return, told from rank to rank.

    Args:
        round_: of the pipeline's ranks; None: there is but this one.
        number: of the schedule.
    """

    def __init__(self, round_: Round | None, number: int) -> None:
        self._round, self._number = round_, number
        self._own: dict[int, list[tuple[tuple[int, ...], torch.dtype, bool]]] = {}

    def tell(self, index: int, outputs: Sequence[Tensor]) -> None:
        """What a stage returns."""
        self._own[index] = [(tuple(t.shape), t.dtype, t.requires_grad) for t in outputs]
        if self._round is not None:
            with unset_fake_temporarily():
                self._round.tell(self._topic(index), self._own[index])

    def hear(self, index: int) -> tuple[Tensor, ...]:
        """Tensors without memory, like those that a stage returns.

        Raises:
            PlanMismatch: a rank failed, or that of the stage said nothing in time.
        """
        with unset_fake_temporarily():
            said = self._own.get(index)
            if said is None:
                assert self._round is not None
                said = self._round.hear_of(self._topic(index), f"stage {index} of the pipeline")
            return tuple(
                torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad) for shape, dtype, grad in said
            )

    def _topic(self, index: int) -> str:
        return f"stage {index} of schedule {self._number}"


def _on(device: torch.device) -> Any:
    """Tensors without memory, as fake ones on a stage's device."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad)

    return moved


def _without_memory(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    with unset_fake_temporarily():
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
