"""Search for the fastest layout, batch and recompute plan on a number of devices, exact over the requested space.

Options of the request become axes of the space. An omitted axis is searched; other omitted options take their default:
NOTE [ Defaults ] in `request.resolve`.

Order of evaluation and meaning of exact: NOTE [ The order of a search ] in `branch_and_bound`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from itertools import product
from typing import Any, Final

from jettison.core.errors import JettisonError, UsageError
from jettison.core.parse_units import Tokens  # noqa: F401 - annotations of the base class are resolved in this module
from jettison.core.progress import Progress, silent
from jettison.core.units import format_bytes
from jettison.request.options import OF_FSDP, CommonRequest, RunRequest
from jettison.request.resolve import flag_of, resolve, word
from jettison.search.branch_and_bound import REACH, Hunt, MemoryLimit
from jettison.search.evaluate import Evaluated, Evaluator, Journal, SearchQuestion
from jettison.search.space import PLANS, SCHEDULES, Axes, Space
from jettison.spec.fine_tuning import Base, Upcast
from jettison.spec.fp8 import Library
from jettison.spec.frameworks import named, rule
from jettison.spec.hardware import Hardware
from jettison.spec.kernels import Loss
from jettison.spec.layout import GradientSync
from jettison.spec.model import ModelSpec
from jettison.spec.precision import DIST_MUONS, NO_OFFLOAD, Gradients, Optimizer, optimizer_offload
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run, anchored

MARGIN: Final = 0.25
"""Default of ``--margin``, a share of the way from expected to largest allowance: the median error of peaks."""
ANY: Final = "any"
"""Value of ``runs_on`` for layouts and recompute modes of any framework."""
_LISTS: Final = ("tp", "pp", "virtual_stages", "cp", "ep", "dp", "zero", "micro_batch")
"""Axes of numbers, which take lists: 1,2,4."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SearchRequest(CommonRequest):
    """Search space, and the settings of all candidates. An axis takes one value, or several: 1,2,4.

    Batch and sequence:
        micro_batch: Sequences in a micro-batch [default: all that divide a rank's batch].

    Parallelism:
        tp: Tensor-parallel ranks [default: all up to a node that divide the heads].
        pp: Pipeline stages [default: all that divide the layers].
        cp: Context-parallel ranks [default: all that divide the sequence].
        ep: Expert-parallel ranks [default: all that divide the experts].
        dp: Data-parallel replicas [default: the remaining devices].
        zero: ZeRO stages [default: 0,1,2,3].
        runs_on: Only what this framework can run, or any [default: as --from or --like].

    Recompute and offload:
        recompute: none, selective, selective-op, full, every, every:K, block:N, interval:K, auto [default: all but
            block:N and interval:K].
        offload: Try each with activations offloaded to CPU, too.

    Parallelism details:
        sp: Sequence parallelism [default: with and without].
        schedule: Pipeline schedules, of gpipe, 1f1b, interleaved and zero-bubble [default: 1f1b,interleaved].
        virtual_stages: Virtual stages on each pipeline rank [default: all].
        micro_batches_without_recompute: Try as many in-flight micro-batches without recomputation as fit, too.
        uneven: Try pipelines whose first and last stages have a layer less or more, too.
    """

    tp: str | None = None
    sp: bool | None = None
    pp: str | None = None
    virtual_stages: str | None = None
    schedule: str | None = None
    cp: str | None = None
    ep: str | None = None
    dp: str | None = None
    zero: str | None = None
    micro_batch: str | None = None
    recompute: str | None = None
    offload: bool | None = None
    micro_batches_without_recompute: bool | None = field(default=None, metadata={"former": "whole_micro_batches"})
    uneven: bool | None = None
    runs_on: str | None = None

    def _zero(self) -> tuple[tuple[int, ...], str]:
        """Return the ZeRO stages that are modelled, and the field that restricts them; empty without a restriction."""
        host = self.offload_optimizer
        moved = NO_OFFLOAD if host is None or host not in named("optimizer_offload") else optimizer_offload(host)
        if moved.one_micro_batch:
            raise UsageError(
                "got --offload-optimizer torchao-gradients, which takes one micro-batch; to search, give torchao"
            )
        if self.optimizer in DIST_MUONS:
            return (1,), "optimizer"
        for name in OF_FSDP:
            if getattr(self, name) not in (None, False, 2, GradientSync.EACH):  # the defaults need no shards
                return (3,), name
        return moved.zeros, "offload_optimizer" if host else ""

    def space(self, model: ModelSpec, hardware: Hardware, *, gpus: int, global_batch: int) -> Space:
        """Return the space to search. Raise `UsageError` for an unknown or impossible value, or conflicting options."""
        common = {f.name: getattr(self, f.name) for f in fields(CommonRequest)}
        kept, by = self._zero()
        template, _ = anchored(resolve(model, RunRequest(**common, zero=kept[0] if by else None)).run, hardware)
        recipe, base = template.precision.recipe, None if template.tuning is None else template.tuning.base
        for name, unsharded in (  # parameters whose all-gather is not modelled
            ("fp8_recipe", recipe is not None and recipe.library is Library.TE),
            ("base", base is Base.FP8),
            ("kbit_upcast", self.kbit_upcast not in (None, Upcast.NONE)),
        ):
            if unsharded:
                kept, by = tuple(z for z in kept if z < 3), by or name
        lists = (template.recompute,) if replace(template.recompute, reentrant=False) != Recompute() else ()
        own = named("kernels")[template.kernels.name]["folder"]
        if lists and self.runs_on not in (None, ANY, own):
            raise UsageError(
                f"got modules of {own} to recompute, which {self.runs_on} cannot run; give --recompute instead"
            )
        template = replace(template, recompute=Recompute())
        if template.gradients is Gradients.IN_BACKWARD:
            raise UsageError(
                "got --gradients in-backward, which takes one micro-batch and one replica; a search tries several"
            )
        if base is Base.INT8 and self.recompute != "none":
            raise UsageError("got --base int8, which cannot be recomputed; give --recompute none")
        numbers = {name: _numbers(name, getattr(self, name), least=int(name != "zero")) for name in _LISTS}
        able = runnable(self.runs_on)
        for name, why in self._of_one_rank(template, able):
            numbers[name] = numbers[name] or (1,)
            if numbers[name] != (1,):
                raise UsageError(f"got {flag_of(name)} {getattr(self, name)}{why}")
        if template.kernels.loss is Loss.DPO and all(count % 2 for count in numbers["micro_batch"] or (2,)):
            raise UsageError(f"got --loss dpo with --micro-batch {self.micro_batch}; a pair is two sequences")
        ruled = template.layout.zero if self.like else 0  # by the framework preset, if it sets one
        if able is not None:
            kept, by = tuple(stage for stage in kept if stage in able.zero), by or "runs_on"
        zero = numbers.pop("zero") or ((ruled,) if ruled else kept)
        if max(zero) > 3:
            raise UsageError(f"got --zero {self.zero}; expected some of 0, 1, 2 and 3")
        if not set(zero) <= set(kept):
            said = f"--zero {self.zero}" if self.zero else f"--like {self.like}, which is --zero {ruled}"
            raise UsageError(f"got {said}; {flag_of(by)} {getattr(self, by) or base} is modelled for {kept}")
        axes = Axes(
            **numbers,
            zero=zero,
            sp=self._sequence_parallelism(able),
            schedules=self._allowed("schedule", () if able is None else (able.schedules, able.schedules), SCHEDULES),
            plans=()
            if lists and self.recompute is None
            else self._allowed("recompute", () if able is None else (able.plans, able.also), PLANS),
            lists=lists,
            offload=(False, True) if self.offload else (False,),
            whole=(False, True) if self.micro_batches_without_recompute else (False,),
            syncs=able.syncs if able is not None and self.gradient_sync is self.zero_buckets is None else (),
            uneven=bool(self.uneven),
        )
        return Space(
            template=template,
            gpus=gpus,
            global_batch=global_batch,
            node=hardware.node,
            axes=axes,
            **self._of_preset(template),
        )

    def _of_one_rank(self, template: Run, able: Runnable | None) -> Iterator[tuple[str, str]]:
        """Yield axes that may not be above 1, each with the reason for a message."""
        if able is not None:
            free = ("zero", "micro_batch", *able.axes)
            yield from ((name, f", which {self.runs_on} cannot run") for name in _LISTS if name not in free)
        if self.kbit_upcast not in (None, Upcast.NONE):  # of an unsharded base
            yield "tp", f" with --kbit-upcast {self.kbit_upcast}, which takes --tp 1"
        alone = [f"--{frozen.role}" for frozen in template.frozen]
        if template.optimizer_offload.frees_gradients:
            alone.append(f"--offload-optimizer {self.offload_optimizer}")
        if alone:  # not modelled in a pipeline
            yield "pp", f" with {alone[0]}, which takes --pp 1"
        if template.packed:
            yield "cp", " with --packed; documents split over ranks are not modelled"
        if template.kernels.loss in (Loss.TILED, Loss.DPO):
            yield from ((name, f" with --loss {template.kernels.loss}; its head is unsharded") for name in ("tp", "cp"))
        if template.model.recorder is not None:
            yield from ((name, "; recorded blocks cannot be sharded") for name in ("tp", "cp", "ep"))

    def _sequence_parallelism(self, able: Runnable | None) -> tuple[bool, ...]:
        if able is None or "sp" in able.axes:
            return (True, False) if self.sp is None else (self.sp,)
        if self.sp:
            raise UsageError(f"got --sp, which {self.runs_on} cannot run")
        return (False,)

    def _allowed(
        self, name: str, able: tuple[()] | tuple[tuple[str, ...], tuple[str, ...]], usual: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Values of an axis: as given, otherwise the defaults.

        Args:
            able: values that the framework runs and a search tries, and others that it runs; empty: any.
        """
        asked = _words(getattr(self, name))
        if not able:
            return asked or usual
        tried, also = able
        known = [word.partition(":")[0] for word in (*tried, *also)]
        bad = [word for word in asked if word.partition(":")[0] not in known]
        if bad:
            words = ", ".join(dict.fromkeys(known))
            raise UsageError(f"got {flag_of(name)} {bad[0]}, which {self.runs_on} cannot run; expected some of {words}")
        return asked or tried

    def _of_preset(self, template: Run) -> dict[str, Any]:
        """Fields of `Space` by the framework preset, whose settings depend on the layout, unless a flag sets them."""
        if self.like is None:
            return {}
        alone, over, sharded = (rule(self.like, **sizes) for sizes in ({"tp": 1}, {"tp": 2}, {"tp": 1, "zero": 3}))
        differ = {name: over[name] for name in over if alone.get(name) != over[name] and getattr(self, name) is None}
        shards: dict[str, Any] = {}
        if self.zero_buckets is None:
            if self.gradient_sync is None and self.gradients in (None, "one-by-one"):
                shards["gradient_sync"] = GradientSync(sharded.get("gradient_sync", GradientSync.EACH))
            if self.fsdp_wrap_layers_only is None and self.fsdp_version is None:
                shards |= {"fsdp_wrap_layers_only": True} if "fsdp_wrap_layers_only" in sharded else {}
                shards |= {"flat_parameters": True} if sharded.get("fsdp_version") == 1 else {}
        replicas = {}
        for many, zero in product((False, True), range(4)) if self.gradients is None else ():
            rules = rule(self.like, tp=1, dp=1 + many, zero=zero)
            gradients = word(Gradients.ONE_BY_ONE, rules["gradients"], "gradients")
            if gradients is not template.gradients:
                replicas[many, zero] = gradients
        dtype = None if self.reduce_dtype else sharded.get("reduce_dtype")
        return {
            "over_tensor_ranks": differ,
            "over_shards": shards,
            "over_replicas": replicas,
            "sharded_precision": dtype and template.precision.reducing_in(dtype),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Runnable:
    """Layouts and recompute modes that a framework can run.

    Args:
        axes: that may be above 1. ``zero``: stages of ZeRO. ``schedules``: orders of a pipeline.
        plans: recompute modes that a search tries. ``also``: those that it takes where they are asked for.
        syncs: gradient reductions, where a setting chooses one.
    """

    axes: tuple[str, ...]
    zero: tuple[int, ...]
    schedules: tuple[str, ...]
    plans: tuple[str, ...]
    also: tuple[str, ...]
    syncs: tuple[GradientSync, ...]


def runnable(framework: str | None) -> Runnable | None:
    """Return the layouts and recompute modes that a framework can run; None for all. Raise `UsageError` if the
    framework is unknown.

    Frameworks that this package integrates with also run a planner's choice (auto), if it is given.
    """
    if framework in (None, ANY):
        return None
    known = named("runs")
    if framework not in known:
        raise UsageError(f"got --runs-on {framework!r}; expected one of {', '.join(sorted(known))} or {ANY}")
    found, plugged = known[framework], {entry["folder"] for entry in named("trainers").values()}
    return Runnable(
        axes=tuple(found["axes"]),
        zero=tuple(found["zero"]),
        schedules=tuple(found.get("schedules", ("1f1b",))),
        plans=tuple(found["recompute"]),
        also=(*found.get("also", ()), *([str(Mode.AUTO)] if found["folder"] in plugged else [])),
        syncs=tuple(map(GradientSync, found.get("gradient_sync", ()))),
    )


def on_own_framework(
    request: SearchRequest, model: ModelSpec, hardware: Hardware, *, gpus: int, global_batch: int
) -> SearchRequest:
    """Keep to what the framework of ``like`` can run, unless ``runs_on`` or another field says otherwise."""
    own = named("presets").get(request.like or "", {}).get("folder")
    if request.runs_on is not None or own not in named("runs"):
        return request
    found = replace(request, runs_on=own)
    try:
        found.space(model, hardware, gpus=gpus, global_batch=global_batch)
    except UsageError:  # a field asks for more
        return request
    return found


def _words(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list, without duplicates."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(","))) if text is not None else ()


def _numbers(name: str, text: str | None, *, least: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = _words(text)
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise UsageError(f"got {flag_of(name)} {text}; expected whole numbers of {least} or more, such as 1,2,4")
    return tuple(sorted(int(word) for word in words))


ALIKE: Final = 0.01
"""Steps within this share of each other count as equal: ranges are wider."""
MORE_MEMORY: Final = Fraction(11, 10)
MORE_GPUS: Final = (2, 3, 4)
"""Multiples of the devices to try, until a candidate fits."""


class NothingFits(JettisonError, ValueError):
    """No candidate fits."""

    exit_code = 3

    def __init__(
        self, closest: Evaluated, *, candidates: int, advice: str, template: Run, budget_bytes: int | None = None
    ) -> None:
        """Report how many bytes the closest candidate lacks.

        Args:
            template: run that all candidates share. ``budget_bytes``: of their tensors.
        """
        super().__init__(
            f"none of {candidates:,} candidates fits; the closest, {closest.candidate.flags}, lacks "
            f"{format_bytes(closest.over_bytes)} ({closest.over_bytes}B): it needs "
            f"{format_bytes(closest.needed_bytes)} of {format_bytes(closest.limit_bytes)}. {advice}"
        )
        self.closest, self.template, self.budget_bytes = closest, template, budget_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class WithMore:
    """Fastest candidate with more devices or memory."""

    gpus: int
    memory: Fraction
    best: Evaluated


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """Result of a search.

    Args:
        ranked: the fastest of each setup, in the order of `by_slack`.
        front: Pareto front of step time and memory.
        plain: the best candidate's setup without recomputation, fits or not.
        more_gpus: the fastest with more devices, or the reason why there is none.
        evaluated: number of candidates evaluated now; others were pruned, or known.
        margin: that all candidates leave. ``budget_bytes``: of tensors, if given.
        closest: set if no candidate leaves the margin: the one that lacks least. Listed ones may fit at their low ends.
    """

    space: Space
    ranked: tuple[Evaluated, ...]
    front: tuple[Evaluated, ...]
    plain: Evaluated
    more_memory: WithMore
    more_gpus: WithMore | str
    evaluated: int
    margin: float = 0.0
    budget_bytes: int | None = None
    closest: Evaluated | None = None

    def scaled(self, times: float) -> SearchAnswer:
        """The answer with every step ``times`` as long."""

        def longer(found: Evaluated) -> Evaluated:
            seconds = found.figures.seconds
            return replace(found, figures=replace(found.figures, seconds=seconds and seconds.scaled(times)))

        def more(found: WithMore) -> WithMore:
            return replace(found, best=longer(found.best))

        return replace(
            self,
            ranked=tuple(map(longer, self.ranked)),
            front=tuple(map(longer, self.front)),
            plain=longer(self.plain),
            more_memory=more(self.more_memory),
            more_gpus=self.more_gpus if isinstance(self.more_gpus, str) else more(self.more_gpus),
        )

    @property
    def best(self) -> Evaluated:
        """The first: the fastest, or as fast within `ALIKE` with more room left."""
        return self.ranked[0]

    @property
    def fastest(self) -> Evaluated:
        """Fastest candidate, however little memory it leaves."""
        return min(self.ranked, key=lambda found: found.rank)


def search(
    space: Space,
    hardware: Hardware,
    *,
    budget_bytes: int | None = None,
    margin: float = MARGIN,
    top: int = 10,
    jobs: int = 1,
    journal: Journal | None = None,
    progress: Progress = silent,
) -> SearchAnswer:
    """Find the fastest candidates that fit.

    Args:
        budget_bytes: of tensors on a device, if less than the hardware's usable memory.
        margin: memory kept free, as a share (0 to 1) of the way from the expected allowance to its upper bound.
        top: setups to list.
        jobs: processes; above 1, call it below ``if __name__ == "__main__"``.
        journal: state to resume from, and to append to.
        progress: called with messages.

    If no candidate leaves the margin, the answer lists candidates that may fit.

    Raises:
        NothingFits: no candidate may fit.
        UsageError: the space is empty, or the hardware lacks a figure that an estimate needs.
    """
    if top < 1 or jobs < 1:
        raise UsageError(f"got --top {top} and --jobs {jobs}; expected whole numbers of 1 or more")
    if not 0 <= margin <= 1:
        raise UsageError(f"got --margin {margin:g}; expected 0 (expected allowance) to 1 (upper bound)")
    room = MemoryLimit(hardware=hardware, budget_bytes=budget_bytes, margin=margin)
    question = SearchQuestion(template=space.template, hardware=hardware)
    with ThreadPoolExecutor(1) as background, Evaluator(question, jobs=jobs, journal=journal) as evaluator:
        hunt = Hunt(space=space, room=room, evaluator=evaluator, top=top, reach=REACH, say=progress)
        hunt.find_named()
        # planners' candidates often wait for one another: meanwhile workers evaluate more devices
        begun = background.submit(_more_gpus, space, room, evaluator, silent) if hunt.ranked and jobs > 1 else None
        hunt.ask_planner()
        closest, strict = None, room
        if not hunt.ranked:
            closest, room = hunt.closest(), replace(room, may=True)
            hunt = Hunt(
                space=space, room=room, evaluator=evaluator, top=top, reach=REACH, say=progress, least=hunt.least
            )
            hunt.run()
        if closest is not None and not hunt.ranked:
            raise NothingFits(
                closest,
                candidates=space.size,
                advice=_advice(space, margin, closest),
                template=space.template,
                budget_bytes=budget_bytes,
            )
        ranked, fastest = by_slack(hunt.ranked[:top]), hunt.ranked[0]
        progress("with more memory")
        roomier = replace(room, scale=MORE_MEMORY)
        larger = Hunt(space=space, room=roomier, evaluator=evaluator, say=progress, known=fastest, least=hunt.least)
        larger.run()
        progress("with more GPUs")
        more_gpus = _more_gpus(space, strict, evaluator, progress) if begun is None else begun.result()
        return SearchAnswer(
            space=space,
            ranked=_against(strict, space, ranked),
            front=_against(strict, space, hunt.front),
            plain=_against(strict, space, [hunt.plain(ranked[0].number[0])])[0],
            more_memory=WithMore(gpus=space.gpus, memory=MORE_MEMORY, best=larger.ranked[0]),
            more_gpus=more_gpus,
            evaluated=evaluator.evaluated,
            margin=margin,
            budget_bytes=budget_bytes,
            closest=closest,
        )


def _against(room: MemoryLimit, space: Space, found: Sequence[Evaluated]) -> tuple[Evaluated, ...]:
    """Return the candidates with limits of this room."""
    return tuple(replace(one, limit_bytes=room.limit_bytes(one.candidate.setup, space)) for one in found)


def by_slack(ranked: Sequence[Evaluated]) -> tuple[Evaluated, ...]:
    """Sort candidates by time; among those within `ALIKE` of the first, the one with most free bytes comes first."""
    found: list[Evaluated] = []
    for one in ranked:
        first = found[0] if found else one
        if one.seconds.step > (1 + ALIKE) * first.seconds.step:
            break
        found.append(one)
    rest = ranked[len(found) :]
    alike = sorted(found, key=lambda one: (one.needed_bytes - one.limit_bytes) // max(1, int(ALIKE * one.limit_bytes)))
    return (*alike, *(by_slack(rest) if rest else ()))


def _more_gpus(space: Space, room: MemoryLimit, evaluator: Evaluator, progress: Progress) -> WithMore | str:
    """Return the fastest candidate of the first multiple of devices that fits, or the reason why there is none."""
    why = "nothing fits"
    for times in MORE_GPUS:
        hunt = Hunt(space=replace(space, gpus=times * space.gpus), room=room, evaluator=evaluator, say=progress)
        try:
            hunt.run()
        except UsageError as error:  # nothing divides, or the hardware file has no network
            why = str(error)
            continue
        if hunt.ranked:
            return WithMore(gpus=hunt.space.gpus, memory=Fraction(1), best=hunt.ranked[0])
    return why


def _advice(space: Space, margin: float, closest: Evaluated) -> str:
    states, tuning = closest.figures.static_bytes, space.template.tuning
    fewer = [] if space.template.optimizer is Optimizer.ADAM8BIT else ["--optimizer adam8bit"]
    fewer += ["--lora r=16"] if tuning is None else ["--base nf4"] * (not tuning.base.packed)
    if states > closest.limit_bytes:
        said = f"Parameters, gradients and optimizer state alone take {format_bytes(states)}. What makes room: "
        return said + ", ".join(["more GPUs", *fewer])
    ways = ["more GPUs", "a shorter --seq", *fewer] + ([] if True in space.axes.offload else ["--offload"])
    ways += ["a smaller --margin"] if margin else []
    return f"What makes room: {', '.join(ways)}, and fewer fixed axes"
