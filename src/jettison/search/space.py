"""Search space: every layout, batch and recompute plan on a number of devices that the axes allow.

A setup is a layout and a division of the global batch; a plan is a recompute mode with or without offloading. A
candidate is one of each. Data-parallel ranks and accumulation steps follow from the other axes: N = t x p x cp x dp and
B = dp x b x n, all integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from math import isqrt
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.spec.device_allowance import FitBudget
from jettison.spec.fine_tuning import Upcast
from jettison.spec.kernels import CpCommType, Kernels, Loss
from jettison.spec.layout import OF_FULL_SHARDS, GradientSync, Layout, Schedule, exchange_misfit, uneven_cuts
from jettison.spec.precision import Gradients, Precision
from jettison.spec.recompute import MOST, Mode, Recompute
from jettison.spec.run import COMPILED_MODES, Run, recipe_misfit

MOST_DEVICES: Final = 1 << 24
"""Most devices, and most sequences in a step: more than any machine has."""
INTERLEAVED: Final = "interleaved"
"""The schedule 1f1b with virtual stages."""
SCHEDULES: Final = (str(Schedule.ONE_F_ONE_B), INTERLEAVED)
"""Default schedules of a search."""
PLANS: Final = tuple(map(str, (Mode.NONE, Mode.SELECTIVE, Mode.SELECTIVE_OP, Mode.FULL, Mode.EVERY, Mode.AUTO)))
"""Default recompute modes of a search; "every" is `every:K` for each K above 1 that divides a stage's layers."""

_FLAGS: Final = ("keeps_stage_outputs", "keeps_received", "stage_buffers", "buckets")
"""Fields of the template's layout that every candidate has; those of candidates under ZeRO 3 are `OF_FULL_SHARDS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """Values that each axis may take; None: all that divide. Raise `UsageError` for an unknown schedule.

    Args:
        tp: None: up to a node.
        sp: with and without sequence parallelism; always without at a tp of 1.
        schedules: gpipe, 1f1b, interleaved, zero-bubble; unused by a pipeline of one stage.
        plans: recompute modes; `every` and `auto` among them.
        lists: additional plans, by lists of modules.
        offload: False: kept activations stay on the device; True: they are offloaded to CPU.
        whole: True: pipelines run as many micro-batches of each window without checkpointing as fit.
        syncs: gradient reductions to try in each layout that has both: with ZeRO 3 and several micro-batches.
        uneven: include pipelines whose ends have a layer less, or more, than other stages.
    """

    tp: tuple[int, ...] | None = None
    sp: tuple[bool, ...] = (True, False)
    pp: tuple[int, ...] | None = None
    virtual_stages: tuple[int, ...] | None = None
    schedules: tuple[str, ...] = SCHEDULES
    cp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    zero: tuple[int, ...] = (0, 1, 2, 3)
    micro_batch: tuple[int, ...] | None = None
    plans: tuple[str, ...] = PLANS
    lists: tuple[Recompute, ...] = ()
    offload: tuple[bool, ...] = (False,)
    whole: tuple[bool, ...] = (False,)
    syncs: tuple[GradientSync, ...] = ()
    uneven: bool = False

    def __post_init__(self) -> None:
        known = (*(word for word in Schedule if word is not Schedule.ZERO_BUBBLE_V), INTERLEAVED)
        for word in self.schedules:
            if word not in known:
                raise UsageError(f"got --schedule {word!r}; expected some of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Layout, and the division of one data-parallel rank's batch.

    Args:
        loss, gradients, precision: of this layout; None: the template's.
        sync: gradient reduction other than the preset's.
    """

    layout: Layout
    micro_batch: int
    micro_batches: int
    loss: Loss | None = None
    gradients: Gradients | None = None
    precision: Precision | None = None
    sync: GradientSync | None = None

    @property
    def flags(self) -> str:
        """Command-line flags."""
        lay = self.layout
        words = [f"--tp {lay.tp}", "--no-sp" if lay.tp > 1 and not lay.sp else "", f"--pp {lay.pp}"]
        words += [f"--virtual-stages {lay.virtual_stages}"] if lay.virtual_stages > 1 else []
        words += [f"--stage-layers {','.join(map(str, lay.stage_layers))}"] if lay.stage_layers else []
        words += [f"--schedule {lay.schedule}"] if lay.schedule is not Schedule.ONE_F_ONE_B else []
        words += [f"--{name} {size}" for name, size in (("cp", lay.cp), ("ep", lay.ep)) if size > 1]
        words += [f"--dp {lay.dp}"] + ([f"--zero {lay.zero}"] if lay.zero else [])
        words += [f"--micro-batch {self.micro_batch}", f"--micro-batches {self.micro_batches}"]
        words += [f"--gradient-sync {self.sync}"] if self.sync else []
        return " ".join(word for word in words if word)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchCandidate:
    """Setup and recompute plan.

    Args:
        budgets: one for a planner, all of `fit_budgets` for micro-batches without checkpointing; none for other modes.
    """

    setup: Setup
    recompute: Recompute
    budgets: tuple[FitBudget, ...] = ()

    @property
    def flags(self) -> str:
        """Command-line flags for `ledger` and `estimate`."""
        plan = self.recompute
        more = " --offload" if plan.offload else " --micro-batches-without-recompute most" if plan.whole else ""
        more += f" --offload-modules {','.join(plan.sent)}" if plan.sent else ""
        return f"{self.setup.flags} --recompute {self.recompute}{more}"

    @property
    def text(self) -> str:
        """Text that identifies it among the candidates of a question."""
        gradients = f" {self.setup.gradients}" if self.setup.gradients else ""
        budgets = " ".join(str(budget.nbytes) for budget in self.budgets) or None
        return f"{self.flags} {self.setup.layout} {self.setup.loss}{gradients} {budgets}"

    @property
    def is_planned(self) -> bool:
        """Whether a planner chooses its recomputation."""
        return bool(self.budgets) and not self.recompute.whole

    def run(self, template: Run) -> Run:
        """Return its run."""
        return setup_run(self.setup, template, self.recompute)


def compiled(space: Space, *, given: bool) -> Space:
    """Return a space whose layers are compiled, without recompute modes that choose within a compiled layer. Raise
    `UsageError` if layers, or a mode that was asked for, are not modelled compiled.

    Args:
        given: the modes were asked for, and none may be dropped.
    """
    axes, template = space.axes, replace(space.template, compiled=True)
    dropped = [word for word in axes.plans if word.partition(":")[0] not in COMPILED_MODES]
    if (given and dropped) or axes.lists:
        got = f"--recompute {dropped[0]}" if dropped else "lists of modules"
        raise UsageError(f"got --compile with {got}; expected some of {', '.join(COMPILED_MODES)}")
    plans = tuple(word for word in axes.plans if word not in dropped)
    return replace(space, template=template, axes=replace(axes, plans=plans))


def setup_run(setup: Setup, template: Run, recompute: Recompute | None = None) -> Run:
    """Return a setup's run, with the template's other fields; without a mode, nothing is recomputed.

    A sharded base is not upcast: NOTE [ What is not packed ] in `spec.fine_tuning`. A pipeline's schedule calls the
    model, so that no loop references its logits.
    """
    recompute = recompute or Recompute()
    layout, template = setup.layout, template.recomputed(recompute)
    tuning = template.tuning
    if tuning is not None and (layout.tp > 1 or layout.zero == 3):
        tuning = replace(tuning, upcast=Upcast.NONE)
    return replace(
        template,
        tuning=tuning,
        kernels=template.kernels if setup.loss is None else _with_loss(template.kernels, setup.loss),
        layout=layout,
        gradients=setup.gradients or template.gradients,
        precision=setup.precision or template.precision,
        micro_batch=setup.micro_batch,
        micro_batches=setup.micro_batches,
        keep_logits=template.keep_logits and layout.pp == 1,
    )


@cache
def _with_loss(kernels: Kernels, loss: Loss) -> Kernels:
    """Cached: runs that share the object share their regions."""
    return replace(kernels, loss=loss)


@dataclass(frozen=True, kw_only=True)
class Space:
    """All candidates for a model, a number of devices and a global batch. Raise `UsageError` if ``gpus`` or
    ``global_batch`` is out of range.

    Args:
        template: model, sequence, precision, kernels and so on, and fields of the layout that are no axes.
        node: devices of a node.
        over_tensor_ranks: ``loss`` and ``gathered_inputs`` of layouts with tp above 1, where they differ.
        over_shards: fields of layouts without a pipeline that shard parameters, which replace the template's.
        sharded_precision: precision under ZeRO 3; None: the template's.
        over_replicas: gradient buffers that replace the template's, by (several replicas?, ZeRO stage).
    """

    template: Run
    gpus: int
    global_batch: int
    node: int
    axes: Axes = field(default_factory=Axes)
    over_tensor_ranks: Mapping[str, Any] = field(default_factory=dict)
    over_replicas: Mapping[tuple[bool, int], Gradients] = field(default_factory=dict)
    over_shards: Mapping[str, Any] = field(default_factory=dict)
    sharded_precision: Precision | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "global_batch"):
            if not 1 <= getattr(self, name) <= MOST_DEVICES:
                raise UsageError(
                    f"got --{name.replace('_', '-')} {getattr(self, name)}; expected a whole number of 1 to "
                    f"{MOST_DEVICES:,}"
                )

    @cached_property
    def setups(self) -> tuple[Setup, ...]:
        """All setups, in a fixed order. Raise `UsageError` if there are none; the message gives the reason."""
        refused: Counter[str] = Counter()
        found = tuple(self._setups(refused))
        if not found:
            why = refused.most_common(1)[0][0] if refused else "no combination of what was asked for divides them"
            raise UsageError(f"no layout of {self.gpus} GPUs takes a global batch of {self.global_batch}: {why}")
        return found

    def plans(self, setup: Setup) -> tuple[Recompute, ...]:
        """Recompute modes to try without the planner, in a fixed order."""
        found = self.all_plans(setup)
        return found[: len(found) - self.asks_planner]

    def all_plans(self, setup: Setup) -> tuple[Recompute, ...]:
        """Recompute modes to try, the planner last if the space has it."""
        return self._all_plans[self._kind(setup)]

    @cached_property
    def every_plan(self) -> tuple[Recompute, ...]:
        """Union of all setups' plans, the planner included."""
        return tuple(dict.fromkeys(plan for kind in self._all_plans.values() for plan in kind))

    def _kind(self, setup: Setup) -> tuple[int, bool]:
        """Key of a setup's plans: most layers of a chunk, and whether it is a pipeline."""
        return max(setup.layout.layers_per_chunk(self.template.model.depth)), setup.layout.pp > 1

    @property
    def asks_planner(self) -> bool:
        """Whether the planner is among the plans."""
        return str(Mode.AUTO) in self.axes.plans

    @property
    def planner(self) -> Recompute:
        """The planner's mode; it may offload if the space tries offloading."""
        return Recompute(mode=Mode.AUTO, offload=True in self.axes.offload)

    @cached_property
    def size(self) -> int:
        """Number of candidates."""
        return sum(len(self.plans(setup)) + self.asks_planner for setup in self.setups)

    # ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def _all_plans(self) -> dict[tuple[int, bool], tuple[Recompute, ...]]:
        found, planner = {}, (self.planner,) if self.asks_planner else ()
        for layers in range(1, self.template.model.depth + 1):
            modes = tuple(self._modes(layers))
            kept = [m for m in modes if m.mode is not Mode.NONE and not m.to_host] if True in self.axes.whole else []
            found[layers, False] = (*modes, *planner)
            found[layers, True] = (*modes, *(replace(m, whole=MOST) for m in kept), *planner)
        return found

    def _modes(self, layers: int) -> Iterator[Recompute]:
        known = set()
        for offload in self.axes.offload:
            for word in self.axes.plans:
                words = [f"every:{k}" for k in _divisors(layers)[1:]] if word == Mode.EVERY else [word]
                for each in words:
                    mode = Recompute.parse(each, layers=self.template.model.depth, offload=offload)
                    if mode.mode is not Mode.AUTO and mode not in known:
                        known.add(mode)
                        yield mode
        yield from (mode for mode in self.axes.lists if mode not in known)

    def _setups(self, refused: Counter[str]) -> Iterator[Setup]:
        for layout in self._layouts(refused):
            if self.global_batch % layout.dp:
                refused[f"{layout.dp} data-parallel ranks do not divide the batch"] += 1
                continue
            each = self.global_batch // layout.dp
            for micro_batch in _among(_divisors(each), self.axes.micro_batch):
                count = each // micro_batch
                if layout.virtual_stages > 1 and count % layout.pp:
                    refused[f"interleaving takes a multiple of {layout.pp} micro-batches, not {count}"] += 1
                    continue
                if misfit := self._misfit(layout, micro_batch):
                    refused[misfit] += 1
                    continue
                over = self.over_tensor_ranks if layout.tp > 1 else {}
                gradients = self.over_replicas.get((layout.dp > 1, layout.zero))
                precision = self.sharded_precision if layout.zero == 3 else None
                setup = Setup(
                    layout=layout,
                    micro_batch=micro_batch,
                    micro_batches=count,
                    loss=Loss(over["loss"]) if "loss" in over else None,
                    gradients=gradients,
                    precision=precision,
                )
                yield setup
                one_by_one = (gradients or self.template.gradients) is Gradients.ONE_BY_ONE
                if count > 1 and one_by_one and layout.zero == 3 and layout.pp == 1 and layout.shards > 1:
                    others = [sync for sync in self.axes.syncs if sync is not layout.gradient_sync]
                    yield from (replace(setup, layout=replace(layout, gradient_sync=s), sync=s) for s in others)
            if self.axes.micro_batch and not set(self.axes.micro_batch) & set(_divisors(each)):
                refused[f"--micro-batch {self.axes.micro_batch[0]} does not divide the {each} of one rank"] += 1

    def _misfit(self, layout: Layout, micro_batch: int) -> str:
        """Reason why FP8 GEMMs, a loss over pairs or an all-to-all of heads exclude a setup; empty if none does."""
        recipe, template = self.template.precision.recipe, self.template
        if template.kernels.loss is Loss.DPO and micro_batch % 2:
            return f"--loss dpo takes pairs of sequences, not --micro-batch {micro_batch}"
        if template.kernels.cp_comm_type is CpCommType.A2A and (why := exchange_misfit(layout, template.model)):
            return why
        if recipe is None:
            return ""
        return recipe_misfit(recipe, template.model, layout, seq=template.seq, micro_batch=micro_batch)

    def _layouts(self, refused: Counter[str]) -> Iterator[Layout]:
        axes, template = self.axes, self.template
        own = template.layout
        flags: dict[str, Any] = {name: getattr(own, name) for name in _FLAGS} | {
            "mtp_num_layers": template.model.mtp_num_layers
        }
        of_template = {name: getattr(own, name) for name in OF_FULL_SHARDS}
        for tp, pp, cp, dp in self._meshes(refused):
            for ep in self._expert_ranks(dp * cp):
                inputs = (
                    self.over_tensor_ranks.get("gathered_inputs", own.gathered_inputs)
                    if tp > 1
                    else own.gathered_inputs
                )
                for sp, (virtual, schedule, cut) in product(axes.sp if tp > 1 else (False,), self._orders(pp)):
                    grouped = {**of_template, **(self.over_shards if pp == ep == 1 else {})}
                    if "gradient_sync" in self.over_shards:  # the preset's; a flag's is refused with stages instead
                        grouped["gradient_sync"] = self.over_shards["gradient_sync"] if pp == 1 else GradientSync.EACH
                    for zero in axes.zero if dp * cp > 1 else (min(axes.zero),):  # one rank shards nothing
                        try:
                            layout = Layout(
                                tp=tp,
                                sp=sp,
                                cp=cp,
                                ep=ep,
                                pp=pp,
                                dp=dp,
                                zero=zero,
                                virtual_stages=virtual,
                                stage_layers=cut,
                                schedule=schedule,
                                gathered_inputs=inputs,
                                **flags,
                                **(grouped if zero == 3 else {}),
                            )
                            layout.check(template.model, seq=template.seq, source_seq=template.source_seq)
                        except UsageError as error:
                            refused[str(error)] += 1
                            break
                        yield layout

    def _meshes(self, refused: Counter[str]) -> Iterator[tuple[int, int, int, int]]:
        """Yield tp, pp, cp and dp whose product is the number of devices."""
        axes = self.axes
        for tp in _among(_divisors(self.gpus), axes.tp):
            if axes.tp is None and tp > self.node:
                break
            for pp in _among(_divisors(self.gpus // tp), axes.pp):
                for cp in _among(_divisors(self.gpus // tp // pp), axes.cp):
                    dp = self.gpus // tp // pp // cp
                    if axes.dp is None or dp in axes.dp:
                        yield tp, pp, cp, dp
        for name, asked in (("tp", axes.tp), ("pp", axes.pp), ("cp", axes.cp), ("dp", axes.dp)):
            refused.update(f"--{name} {v} does not divide {self.gpus}" for v in asked or () if self.gpus % v)

    def _expert_ranks(self, ranks: int) -> Iterable[int]:
        experts = [moe.experts for layer in self.template.model.kinds if (moe := layer.experts) is not None]
        if self.axes.ep is not None:
            return [ep for ep in self.axes.ep if ranks % ep == 0]
        return [ep for ep in _divisors(ranks) if not any(count % ep for count in experts)] if experts else (1,)

    def _orders(self, pp: int) -> Iterator[tuple[int, Schedule, tuple[int, ...]]]:
        """Yield virtual stages, their schedule, and layers of each stage if uneven."""
        model = self.template.model
        wanted, depth = self.axes.virtual_stages, model.depth - model.mtp_num_layers
        if pp == 1:
            if wanted is None or 1 in wanted:
                yield 1, Schedule.ONE_F_ONE_B, ()
            return
        cuts = uneven_cuts(depth, pp) if self.axes.uneven else ()
        for word in self.axes.schedules:
            if word == INTERLEAVED:
                most = (depth + 2) // pp  # the embedding and the head may count as a layer each
                counts = range(2, most + 1) if wanted is None else [v for v in wanted if v > 1]
                yield from ((v, Schedule.ONE_F_ONE_B, ()) for v in counts)
            elif wanted is None or 1 in wanted:
                yield from ((1, Schedule(word), cut) for cut in ((), *cuts))


@cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def _among(values: Iterable[int], wanted: tuple[int, ...] | None) -> list[int]:
    return [value for value in values if wanted is None or value in wanted]
