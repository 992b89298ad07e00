"""What ranks do for tests/predict/test_pipeline_peaks.py: steps of a real pipeline, and every byte of them counted.

Stages are cut out of a model of transformers: each has some of its layers, the first the embedding, the last the norm,
the head and the loss. `torch.distributed.pipelining` runs them, and AdamW steps at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import jettison
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.parallel.pipeline import received, stand_in_loss
from support.formula_cases import VOCABULARY, FormulaCase, model_of


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pipeline of one tiny model.

    Args:
        stage_layers: of each stage of each rank, in the order of the model.
        full: every layer is a checkpoint of torch's.
        planned: every layer is computed again by Jettison.
        events: every birth and death of a storage is told.
    """

    family: str
    stage_layers: tuple[int, ...]
    micro_batches: int = 4
    schedule: str = "1f1b"
    batch: int = 2
    sequence: int = 64
    full: bool = False
    planned: bool = False
    events: bool = False

    @property
    def formula(self) -> FormulaCase:
        """The model."""
        name = "n_layer" if self.family == "gpt2" else "num_hidden_layers"
        more = ((name, sum(self.stage_layers)), ("tie_word_embeddings", False))
        return FormulaCase(family=self.family, attention="sdpa", batch=self.batch, sequence=self.sequence, more=more)

    @classmethod
    def of(cls, words: dict[str, Any]) -> Case:
        """What a rank was told."""
        return cls(**{**words, "stage_layers": tuple(words["stage_layers"])})

    def told(self) -> dict[str, Any]:
        """As ranks are given it."""
        return asdict(self)


class Cut(nn.Module):
    """Some layers of a model."""

    def __init__(self, case: FormulaCase, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        whole: Any = model_of(case)
        self.gpt = case.family == "gpt2"
        inner = whole.transformer if self.gpt else whole.model
        stack, norm, ends = ("h", "ln_f", ("wte", "wpe")) if self.gpt else ("layers", "norm", ("embed_tokens",))
        setattr(inner, stack, nn.ModuleList(getattr(inner, stack)[i] for i in layers))
        inner.config.num_hidden_layers = len(layers)
        for name in () if first else ends:
            setattr(inner, name, None)
        if not last:
            setattr(inner, norm, nn.Identity())
        self.first, self.inner = first, inner
        self.head = whole.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """From ids or the stream to the stream or logits."""
        stream = self._gpt(x) if self.gpt else self._other(x)
        return stream if self.head is None else self.head(stream)  # type: ignore[no-any-return]

    def _other(self, x: Tensor) -> Tensor:
        found = self.inner(input_ids=x) if self.first else self.inner(inputs_embeds=x)
        return found.last_hidden_state  # type: ignore[no-any-return]

    def _gpt(self, x: Tensor) -> Tensor:
        """By hand: its own code would add positions on every stage."""
        if self.first:
            x = self.inner.wte(x) + self.inner.wpe(torch.arange(x.shape[1]).unsqueeze(0))
        for block in self.inner.h:
            x = block(x)
        return self.inner.ln_f(x)  # type: ignore[no-any-return]


C = TypeVar("C", bound=Cut)


class Stages(Protocol):
    """What of a case says which stages a rank has."""

    @property
    def formula(self) -> FormulaCase: ...
    @property
    def stage_layers(self) -> tuple[int, ...]: ...
    @property
    def schedule(self) -> str: ...
    @property
    def full(self) -> bool: ...


def chunks_of(case: Stages, rank: int, ranks: int, kind: type[C]) -> Iterator[tuple[int, C]]:
    """A rank's stages: their places in the model, and the modules."""
    starts = [0, *accumulate(case.stage_layers)]
    last = len(case.stage_layers) - 1
    own = [rank, last - rank] if case.schedule == "zero-bubble-v" else range(rank, last + 1, ranks)
    for place in own:
        made = kind(case.formula, range(starts[place], starts[place + 1]), first=place == 0, last=place == last)
        if case.full:
            made.inner.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        yield place, made


def loss_of(logits: Tensor, labels: Tensor, *, cast: bool = True) -> Tensor:
    """As transformers has it, or without its cast to fp32."""
    moved = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    wide = logits.float() if cast else logits
    return nn.functional.cross_entropy(wide.view(-1, wide.shape[-1]), moved.view(-1), ignore_index=-100)


class Counted:
    """A rank's stages and their optimizer, whose steps are counted."""

    def __init__(self, modules: Sequence[nn.Module], ids: Tensor) -> None:
        self.modules, self.ids = modules, ids
        self.optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], foreach=False)

    def step(self, passes: Callable[[], object]) -> None:
        """All passes, then the optimizer."""
        passes()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure(
        self, passes: Callable[[], object], *, beside: Iterable[Tensor], events: bool = False
    ) -> dict[str, Any]:
        """One step more. ``beside``: what is there already and is neither of the model nor of the optimizer."""
        numbers = [s["step"] for s in self.optimizer.state.values()]
        state = (t for s in self.optimizer.state.values() for t in s.values())
        static = (t for m in self.modules for t in static_tensors(m, self.ids))
        with AllocationCounter(chain(static, state, beside), record_events=events) as counter:
            before = counter.live_bytes
            self.step(passes)
        small = self.ids.nbytes + sum(t.nbytes for t in numbers)
        found = {"before": before - small, "peak": counter.peak_bytes - small, "after": counter.live_bytes - small}
        if events:
            found["events"] = [[e.operator, e.storage, e.delta_bytes, e.live_bytes - small] for e in counter.events]
        return found


TWO = (
    Case(family="gpt2", stage_layers=(3, 2), micro_batches=2),
    Case(family="llama", stage_layers=(3, 2), full=True),
    Case(family="llama", stage_layers=(2, 1, 2, 0), micro_batches=8),
)
FOUR = (
    Case(family="gpt2", stage_layers=(3, 2, 2, 1), micro_batches=8),
    Case(family="llama", stage_layers=(3, 2, 2, 1), micro_batches=8, full=True),
    Case(family="llama", stage_layers=(2, 1, 1, 1, 1, 1, 1, 0), micro_batches=12),
    Case(family="gpt2", stage_layers=(2, 1, 1, 1, 1, 1, 1, 1), micro_batches=12, full=True),
    # the fullest state comes once, before some chunks, or all, have gradients
    Case(family="gpt2", stage_layers=(3, 2, 2, 1), micro_batches=4),
    Case(family="llama", stage_layers=(2, 1, 1, 1, 1, 1, 1, 0), micro_batches=8),
    Case(family="gpt2", stage_layers=(2, 1, 1, 1, 1, 1, 1, 1), micro_batches=4),
)
ALL_FORWARDS_FIRST = (
    Case(family="gpt2", stage_layers=(3, 2), schedule="gpipe"),
    Case(family="llama", stage_layers=(3, 2), micro_batches=3, schedule="gpipe", full=True),
)

_SPLIT: dict[str, Any] = {"schedule": "zero-bubble"}
SPLIT = (
    Case(family="gpt2", stage_layers=(3, 2, 2, 1), micro_batches=4, **_SPLIT),
    Case(family="llama", stage_layers=(3, 2, 2, 1), micro_batches=8, **_SPLIT),
    Case(family="gpt2", stage_layers=(2, 1, 2, 2), micro_batches=3, **_SPLIT),
    Case(family="gpt2", stage_layers=(3, 2, 2, 1), micro_batches=8, full=True, **_SPLIT),
    Case(family="llama", stage_layers=(1, 3, 2, 1), micro_batches=4, full=True, **_SPLIT),
    Case(family="llama", stage_layers=(3, 2, 2, 1), micro_batches=4, planned=True, **_SPLIT),
    Case(family="gpt2", stage_layers=(1, 3, 2, 1), micro_batches=8, planned=True, **_SPLIT),
    Case(family="llama", stage_layers=(2, 1, 1, 1, 1, 1, 1, 0), micro_batches=8, **_SPLIT),
    Case(family="gpt2", stage_layers=(2, 1, 1, 2, 1, 1, 1, 1), micro_batches=12, **_SPLIT),
    Case(family="gpt2", stage_layers=(2, 1, 1, 2, 1, 1, 1, 1), micro_batches=4, full=True, **_SPLIT),
)

_IN_A_V: dict[str, Any] = {"schedule": "zero-bubble-v"}
IN_A_V = (
    Case(family="gpt2", stage_layers=(2, 1, 1, 2, 1, 1, 1, 1), micro_batches=8, **_IN_A_V),
    Case(family="llama", stage_layers=(2, 1, 1, 1, 1, 1, 1, 0), micro_batches=12, **_IN_A_V),
    Case(family="llama", stage_layers=(2, 1, 1, 1, 1, 2, 1, 1), micro_batches=4, **_IN_A_V),
    Case(family="gpt2", stage_layers=(2, 1, 1, 2, 1, 1, 1, 1), micro_batches=8, full=True, **_IN_A_V),
    Case(family="llama", stage_layers=(2, 1, 1, 2, 1, 1, 1, 1), micro_batches=7, planned=True, **_IN_A_V),
)


def two_ranks(_: Any) -> list[dict[str, Any]]:
    """The quick cases."""
    return [_peak(case) for case in TWO]


def peaks(args: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each case, this rank's peak and what is left between steps, without the batch and the optimizer's counters."""
    return [_peak(Case.of(words)) for words in args["cases"]]


def _peak(case: Case) -> dict[str, Any]:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    own = list(chunks_of(case, rank, ranks, Cut))
    modules = [module for _, module in own]
    for place, module in own if case.planned else ():
        _plan(case, module, place)
    stages = [PipelineStage(m, place, len(case.stage_layers), torch.device("cpu")) for place, m in own]
    schedule: Any
    split = {"zero-bubble": ScheduleInterleavedZeroBubble, "zero-bubble-v": ScheduleZBVZeroBubble}
    if case.schedule in split:
        schedule = split[case.schedule](stages, case.micro_batches, loss_fn=loss_of)
    elif len(stages) > 1:
        schedule = ScheduleInterleaved1F1B(stages, case.micro_batches, loss_fn=loss_of)
    else:
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[case.schedule]
        schedule = kind(stages[0], case.micro_batches, loss_fn=loss_of)
    ids = torch.randint(1, VOCABULARY, (case.batch * case.micro_batches, case.sequence))
    given = (ids,) if own[0][0] == 0 else ()
    wanted = {"target": ids} if own[-1][0] == len(case.stage_layers) - 1 else {}  # with a V on the first rank

    def passes() -> None:
        schedule.step(*given, **wanted, return_outputs=False)

    counted = Counted(modules, ids)
    counted.step(passes)
    infos = [
        info
        for stage in stages
        for m in range(case.micro_batches)
        for info in (*stage.args_recv_info[m], *stage.grad_recv_info[m])
    ]
    return counted.measure(passes, beside=_buffers(infos), events=case.events)


def _plan(case: Case, module: Cut, place: int) -> None:
    """Each layer holds its input, and is computed again."""
    ids = torch.ones(case.batch, case.sequence, dtype=torch.int64)
    batch = received(torch.zeros(case.batch, case.sequence, module.inner.config.hidden_size)) if place else (ids,)
    layers = [name for name, _ in module.named_modules() if name.rpartition(".")[2].isdigit()]
    jettison.apply(module, "full", batch=batch, loss_fn=stand_in_loss, regions=layers)


def _buffers(infos: Sequence[Any]) -> Iterator[Tensor]:
    """And their gradients, which a split backward leaves there until the next step begins."""
    for info in infos:
        if info.buffer is not None:
            yield info.buffer
            if info.buffer.grad is not None:
                yield info.buffer.grad
