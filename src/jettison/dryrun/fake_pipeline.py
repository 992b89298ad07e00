"""Schedules of `torch.distributed.pipelining` over fake copies of a rank's stages: torch's own, without communication.

A stage's arguments are the results of the stage before. So at a step's first run, ranks tell each other shapes, one
stage after the other, as part of their agreement: it also reports a rank that fails before.
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

from jettison.capture.fake_copies import fake_copy
from jettison.core.errors import UnsupportedModule
from jettison.core.objects import swapped
from jettison.dryrun.counter import AllocationCounter
from jettison.dryrun.user_step import Scheduled, stages_of
from jettison.parallel.fake_ranks import FakeDDP, fake_group, sharded_fake_copy
from jettison.parallel.recompute_agreement import Agreement, Round, ranks_in

_REPEATING = (Schedule1F1B, ScheduleInterleaved1F1B)


class FakeStage(PipelineStage):
    """A stage whose transfers send nothing (`fake_transfers`). It watches the memory of one micro-batch's."""

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
        """torch 2.11 does not find an ``autograd.Function`` between the halves if only Python references it."""
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
        """torch 2.15 frees an output once it is sent, if it is a plain tensor, for which a fake one stands."""
        if isinstance(self.submod, FakeDDP):
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
        """Live memory of the tensors by which the watched micro-batch was transferred."""
        own = (of_stage.get(self.watched, ()) for of_stage in (self.args_recv_info, self.grad_recv_info))
        kept = (t for infos in own for buffer in _buffers(infos) for t in (buffer, buffer.grad))  # sent or not
        for tensor in itertools.chain(kept, (known() for known in self.transferred)):
            if tensor is not None:
                yield tensor.untyped_storage()


class _FakeTransfer:
    """Stands for torch's work handle. It references its tensor until it is freed, as gloo's and NCCL's do."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        """Do nothing: nothing is sent."""


class Transfers:
    """Transfers of a step that sends nothing, by the stages of this rank, which watch the same micro-batch."""

    def __init__(self, stages: Sequence[FakeStage]) -> None:
        self._stages = stages
        self._last: dict[int, int] = {}
        self.watched = stages[0].watched
        for stage in stages:
            stage.transferred.clear()  # by a step before

    def begin(self, ops: Sequence[distributed.P2POp], desc: str | None = None) -> list[_FakeTransfer]:
        """In place of torch's ``_batch_p2p``."""
        works = [_FakeTransfer(op.tensor) for op in ops]
        if ops:
            self._last = self.held()
        return works

    def held(self) -> dict[int, int]:
        """Bytes of the storages that hold the watched micro-batch's transfers now, by address."""
        return {storage._cdata: storage.nbytes() for stage in self._stages for storage in stage.held()}

    def watch(self) -> list[tuple[ReferenceType[UntypedStorage], int]]:
        """Weak references to these storages, and their bytes."""
        storages = {storage._cdata: storage for stage in self._stages for storage in stage.held()}
        return [(weakref.ref(storage), storage.nbytes()) for storage in storages.values()]

    def left_bytes(self) -> int:
        """Bytes of the watched micro-batch's transfers when the step began its last one, or now."""
        return sum((self._last | self.held()).values())


@contextlib.contextmanager
def fake_transfers(stages: Sequence[FakeStage]) -> Iterator[Transfers]:
    """Run steps of torch's schedules without communication. They keep works, and with them tensors, as in reality."""
    found = Transfers(stages)
    with swapped(schedules, _batch_p2p=found.begin):
        yield found


def send_nothing(schedule: Any, stages: Sequence[FakeStage]) -> None:
    """Give stages the shapes that they would exchange before their first step. They watch a micro-batch in the middle
    of the step, before and after which there are others. torch 2.11 exchanges nothing for stages that are made with
    shapes; 2.15 exchanges nothing over a fake group.
    """
    for stage in stages:
        stage.watched = (schedule._n_microbatches - 1) // 2
    if not hasattr(schedule, "_warmup_p2p"):
        return

    def agree_at_once(*_: Any) -> None:
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC

    schedule._warmup_p2p = agree_at_once


class FakeSchedule:
    """Stands for a schedule in a step on fake tensors. The pipeline's ranks create it together. ``words``: of the
    pipeline's ranks; None: this rank has all stages. ``number``: index of the schedule among the arguments of the step.
    Raise `UnsupportedModule` as `stages_of` does.
    """

    def __init__(
        self, schedule: Scheduled, mode: FakeTensorMode, words: Agreement | None = None, *, number: int = 0
    ) -> None:
        self.real = schedule
        self.stages = stages_of(schedule)
        self.modules = [sharded_fake_copy(stage.submod, mode) for stage in self.stages]
        self._probes = [fake_copy(stage.submod, mode) for stage in self.stages]  # whose calls are not watched
        group = self.stages[0].group or distributed.group.WORLD
        self._group = fake_group(group)
        self._chain = _Chain(words.among(ranks_in(group)) if words is not None else None, number)
        self._made: Any = None
        self._count = 0  # of micro-batches that are run
        self._left: Tensor | None = None  # as large as the receive buffers of the omitted micro-batches
        self._sending: list[FakeStage] = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if self._made is None:
            self._make(args, kwargs)
        cut = self._count < self.real._n_microbatches
        if cut:
            args, kwargs = tree_map(self._first_rows, (args, kwargs))
        notes = cut and self._left is None
        with fake_transfers(self._sending) as transfers:
            with _held_by_losses(self._made, transfers) if notes else contextlib.nullcontext([0]) as held:
                result = self._made.step(*args, **kwargs)
            if notes:  # tensors that the omitted micro-batches hold until the step ends
                size = (self.real._n_microbatches - self._count) * (transfers.left_bytes() + held[0])
                self._left = torch.empty(size, dtype=torch.uint8, device=self.stages[0].device)
        return result

    def held(self) -> list[Tensor]:
        """Receive buffers of the stages, which stay from step to step."""
        both = [infos for stage in self._sending for infos in (stage.args_recv_info, stage.grad_recv_info)]
        buffers = [t for infos in both for of_micro_batch in infos.values() for t in _buffers(of_micro_batch)]
        return buffers if self._left is None else [*buffers, self._left]

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = {name: value for name, value in kwargs.items() if name not in _OF_THE_SCHEDULE}
        args_split, kwargs_split = self.real._split_inputs(args, own)
        for stage, module, probe in zip(self.stages, self.modules, self._probes, strict=True):
            given = args_split[0] if stage.is_first else self._chain.receive(stage.stage_index - 1)
            on_device = tree_map(lambda t, to=stage.device: _like(t, to) if getattr(t, "is_meta", False) else t, given)
            with torch.enable_grad():
                returned = probe(*on_device, **kwargs_split[0])
            outputs = returned if isinstance(returned, tuple | list) else (returned,)
            self._chain.publish(stage.stage_index, outputs)
            made = FakeStage(
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
        self._count = self._enough(args, kwargs)
        stages: Any = self._sending[0] if isinstance(self.real, PipelineScheduleSingle) else self._sending
        kind: Any = type(self.real)
        taken = inspect.signature(kind.__init__).parameters
        given = {name: getattr(self.real, f"_{name}") for name in _AS_MADE if name in taken}
        given |= {"scale_grads": self.real.scale_grads} if "scale_grads" in taken else {}
        self._made = kind(stages, self._count, **given)
        send_nothing(self._made, self._sending)

    def _enough(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Micro-batches after which a schedule repeats: all if never, if outputs are joined, or no rows are split."""
        count = self.real._n_microbatches
        together = kwargs.get("return_outputs", True) and any(stage.is_last for stage in self.stages)
        specs = (self.real._args_chunk_spec, self.real._kwargs_chunk_spec)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        alike = all(t.dim() > 0 and t.shape[0] % count == 0 for t in tensors)
        if together or any(specs) or not alike or not isinstance(self.real, _REPEATING):
            return int(count)
        return int(min(count, (2 if len(self.stages) == 1 else 3) * self.stages[0].group_size))

    def _first_rows(self, leaf: Any) -> Any:
        count = self.real._n_microbatches
        return leaf.narrow(0, 0, leaf.shape[0] // count * self._count) if isinstance(leaf, Tensor) else leaf


@contextlib.contextmanager
def _held_by_losses(made: Any, transfers: Transfers) -> Iterator[list[int]]:
    """Bytes that a micro-batch's loss, and its graph, hold until a step ends, in addition to its transfers. The one
    number that ``mse_loss`` returns lies in a storage as large as its input.
    """
    found = [0]
    update = made._update_losses

    def without_one(*args: Any) -> None:
        losses = made._internal_losses
        if losses:  # only the last stage has some
            number = transfers.watched
            before, transferred = counter.live_bytes, transfers.watch()
            losses[number] = losses[number].new_empty(losses[number].shape)
            gone = sum(size for known, size in transferred if known() is None)
            found[0] = before - counter.live_bytes + losses[number].nbytes - gone
        update(*args)

    with swapped(made, _update_losses=without_one), AllocationCounter() as counter:
        yield found


def _buffers(infos: Iterable[Any]) -> list[Tensor]:
    """Receive buffers of a stage, from torch's infos on them."""
    return [buffer for info in infos if isinstance(buffer := getattr(info, "buffer", None), Tensor)]


_AS_MADE = ("loss_fn", "args_chunk_spec", "kwargs_chunk_spec", "output_merge_spec")
"""Constructor arguments of schedules, whose attributes have an underscore; `ScheduleLoopedBFS` takes no chunk specs."""
_OF_THE_SCHEDULE = frozenset({"target", "losses", "return_outputs", "loss_kwargs"})


class _Chain:
    """Results of a schedule's stages, told from rank to rank; without a round there is only this rank."""

    def __init__(self, round_: Round | None, number: int) -> None:
        self._round, self._topic = round_, f"stage {{}} of schedule {number}".format
        self._own: dict[int, list[tuple[tuple[int, ...], torch.dtype, bool]]] = {}

    def publish(self, index: int, outputs: Sequence[Tensor]) -> None:
        self._own[index] = [(tuple(t.shape), t.dtype, t.requires_grad) for t in outputs]
        if self._round is not None:
            with unset_fake_temporarily():
                self._round.publish(self._topic(index), self._own[index])

    def receive(self, index: int) -> tuple[Tensor, ...]:
        """Tensors without memory, like those that a stage returns; see `Round.read_published`."""
        with unset_fake_temporarily():
            said = self._own.get(index)
            if said is None:
                assert self._round is not None
                said = self._round.read_published(self._topic(index), f"stage {index} of the pipeline")
            return tuple(
                torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad) for shape, dtype, grad in said
            )


def _like(leaf: Any, device: torch.device | str) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad)


def _without_memory(leaf: Any) -> Any:
    with unset_fake_temporarily():
        return _like(leaf, "meta")
