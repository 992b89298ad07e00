"""Schedules of `torch.distributed.pipelining` over fake copies of a rank's stages: torch's own, and nothing is sent.

What a stage is called with is what the stage before returns. So when a step is first run, ranks tell each other shapes,
one stage after the other, in the words of their agreement: a rank that fails before it could is heard of there.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, _utils
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils._pytree import tree_leaves, tree_map

from jettison.capture.fakes import fake_copy
from jettison.dryrun.schedules import Scheduled, stages_of
from jettison.measure.memory import AllocationCounter
from jettison.measure.tensors import unique_bytes
from jettison.parallel.agree import Agreement, Round, ranks_in
from jettison.parallel.imagined import imagined_copy, imagined_group

_REPEATING = (Schedule1F1B, ScheduleInterleaved1F1B)


class SendingStage(PipelineStage):
    """A stage that holds on to what it sends, since torch's schedules wait for sends at the end of a step.

    1F1B without virtual stages waits for each before the next, but keeps one of the first ones all along.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.sent: list[Tensor] = []
        self.waits = False

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        return self._noted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        return self._noted(super().get_bwd_send_ops(bwd_chunk_id))

    def _noted(self, ops: list[distributed.P2POp]) -> list[distributed.P2POp]:
        if not (self.waits and self.sent):
            self.sent += [op.tensor for op in ops]
        return ops


def send_nothing(schedule: Any, stages: Sequence[SendingStage]) -> None:
    """What stages would ask each other before their first step, they know.

    torch 2.11 asks nothing of stages that are made with shapes; 2.15 asks nothing over a group that sends nothing.
    """
    for stage in stages:
        stage.waits = isinstance(schedule, Schedule1F1B)
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
        self._sending: list[SendingStage] = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """See torch's schedules."""
        if self._made is None:
            self._make(args, kwargs)
        if self._count < self.real._n_microbatches:
            args, kwargs = tree_map(self._first_rows, (args, kwargs))
        cut = self._count < self.real._n_microbatches
        with _held_by_losses(self._made) if cut and self._left is None else contextlib.nullcontext([0]) as held:
            result = self._made.step(*args, **kwargs)
        if cut:
            self._note_left(held[0])
        for stage in self._sending:
            stage.sent.clear()
        return result

    def held(self) -> list[Tensor]:
        """What stages receive into, which stays from step to step."""
        buffers = [info.buffer for stage in self._sending for info in _received_by(stage)]
        return [t for t in (*buffers, self._left) if isinstance(t, Tensor)]

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = {name: value for name, value in kwargs.items() if name not in _OF_THE_SCHEDULE}
        args_split, kwargs_split = self.real._split_inputs(args, own)
        for stage, module, probe in zip(self.stages, self.modules, self._probes, strict=True):
            given = args_split[0] if stage.is_first else self._chain.hear(stage.stage_index - 1)
            with torch.enable_grad():
                returned = probe(*tree_map(_on(stage.device), given), **kwargs_split[0])
            outputs = returned if isinstance(returned, tuple | list) else (returned,)
            self._chain.tell(stage.stage_index, outputs)
            made = SendingStage(
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

    def _note_left(self, held: int) -> None:
        """Count what the micro-batches that are not run are received into, and what their losses hold."""
        if self._left is not None:
            return
        buffers = [b for stage in self._sending for i in _received_by(stage) if (b := i.buffer) is not None]
        own = unique_bytes([*buffers, *(b.grad for b in buffers if b.grad is not None)])
        sent = unique_bytes(t for stage in self._sending if not stage.waits for t in stage.sent)
        left = self.real._n_microbatches - self._count
        size = left * ((own + sent) // self._count + held)
        self._left = torch.empty(size, dtype=torch.uint8, device=self.stages[0].device)


@contextlib.contextmanager
def _held_by_losses(made: Any) -> Iterator[list[int]]:
    """Bytes that the loss of a micro-batch, and its graph, hold until a step ends. The one number that ``mse_loss``
    returns lies in a storage as large as its input.
    """
    found = [0]
    update = made._update_losses

    def without_the_first(*args: Any) -> None:
        losses = made._internal_losses
        if losses:  # of the last stage
            before = counter.live_bytes
            losses[0] = losses[0].new_empty(losses[0].shape)
            found[0] = before - counter.live_bytes + losses[0].nbytes
        update(*args)

    made._update_losses = without_the_first
    try:
        with AllocationCounter() as counter:
            yield found
    finally:
        made._update_losses = update


def _received_by(stage: PipelineStage) -> list[Any]:
    """What torch knows of the tensors that a stage receives."""
    infos: Any = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
    return [info for of_micro_batch in infos for info in of_micro_batch if hasattr(info, "buffer")]


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
        self._own: dict[int, bytes] = {}

    def tell(self, index: int, outputs: Sequence[Tensor]) -> None:
        """What a stage returns."""
        said = [[list(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad] for t in outputs]
        self._own[index] = json.dumps(said).encode()
        if self._round is not None:
            with unset_fake_temporarily():
                self._round.tell(f"{self._number}/{index}", self._own[index])

    def hear(self, index: int) -> tuple[Tensor, ...]:
        """Tensors without memory, like those that a stage returns.

        Raises:
            PlanMismatch: a rank failed, or that of the stage said nothing in time.
        """
        with unset_fake_temporarily():
            said = self._own.get(index)
            if said is None:
                assert self._round is not None
                said = self._round.hear_of(f"{self._number}/{index}", f"stage {index} of the pipeline")
            return tuple(
                torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=grad)
                for shape, dtype, grad in json.loads(said)
            )


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
