"""Request of a search: options become axes of a space; an omitted axis is searched.

Other omitted options take their default: NOTE [ Defaults ] in `request.resolve`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.parse_units import Tokens  # noqa: F401 - annotations of the base class are resolved in this module
from jettison.request.options import CommonRequest, RunRequest
from jettison.request.resolve import flag_of, resolve, word
from jettison.search.space import PLANS, SCHEDULES, Axes, Space
from jettison.spec.fp8 import Library
from jettison.spec.frameworks import named, rule
from jettison.spec.hardware import Hardware
from jettison.spec.kernels import Loss
from jettison.spec.layout import GradientSync
from jettison.spec.model import ModelSpec
from jettison.spec.precision import MUONS, NO_OFFLOAD, Gradients, optimizer_offload
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run, anchored
from jettison.spec.tuning import Base, Upcast

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
        if self.optimizer in MUONS[1:]:
            return (1,), "optimizer"
        of_shards = {
            "fsdp_wrap_layers_only": self.fsdp_wrap_layers_only,
            "reshard_after_forward": self.reshard_after_forward,
            "fsdp_version": self.fsdp_version == 1,
            "gradient_sync": self.gradient_sync == GradientSync.LAST,
            "reduce_dtype": self.reduce_dtype,
        }
        for name, given in of_shards.items():
            if given:
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
