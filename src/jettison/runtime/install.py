"""Planned forwards in a model: installed, removed, and found again where modules were replaced, wrapped or moved.

A region belongs to a module, and a plan to a model. So a module that was moved or wrapped keeps its region, under its
new name; one that replaces another gets a region of its own, with the old one's policy; an added one runs as part of
the model around the blocks. All of it is recorded again. Gradients are right without this, too; but part of a plan
would silently have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final

from torch import distributed, nn

from jettison.capture.model_trace import ModelTrace
from jettison.capture.recorder import Place, TensorRef
from jettison.core.errors import JettisonError, UnsupportedModule, UsageError, warn
from jettison.core.units import format_bytes
from jettison.runtime.compiled_regions import RUNS_COMPILED, CompiledRegion
from jettison.runtime.device import rounding_of
from jettison.runtime.offload import engine_for, place_of, slabs_for
from jettison.runtime.planned_forward import PlannedForward
from jettison.runtime.recordings import RegionPlan, SegmentLink
from jettison.runtime.witness import Check
from jettison.solve.checkpoint_policy import CheckpointPolicy, KeepAll, Offload, OffloadPolicy, offloaded_by, packed_by


def install(
    model: nn.Module,
    traced: ModelTrace,
    policies: Mapping[str, CheckpointPolicy],
    root: CheckpointPolicy,
    segments: Iterable[list[str]] = (),
    *,
    checked: bool = False,
    how: Check = Check.ALWAYS,
    host_budget_bytes: int | None = None,
) -> list[PlannedForward]:
    """Wrap the blocks and the model, with the traced programs. Remove in reverse order.

    Args:
        policies: by block name.
        segments: runs of block names; within a run only the first block keeps its input.
        checked: the programs ran on these very tensors, so that the first run need not be compared with them.
        how: share of recomputed values that is compared with the forward's.
        host_budget_bytes: limit of pinned CPU memory; None: available memory.

    Raises:
        HostBudgetExceeded: offloaded tensors need more.
        UsageError: tensors of the model's device cannot be offloaded.
    """
    plans = _region_plans(traced, policies, root, segments)
    compiled = {} if checked else {call.name: traced.classes[call.class_key].compiled for call in traced.calls}

    for name, policy in policies.items():
        if (made := compiled.get(name)) is not None and packed_by(policy, made.program):
            raise UsageError(f"{name} runs compiled, and its policy packs what it keeps; expected one that does not")

    def region_of(name: str, policy: CheckpointPolicy) -> PlannedForward:
        made, module = compiled.get(name), model.get_submodule(name)
        if made is not None:
            return CompiledRegion(module, name, policy, compiled=made, model=model, how=how)
        return PlannedForward(module, name, policy, model=model, how=how)

    regions = {name: region_of(name, policy) for name, policy in policies.items()}
    outer = PlannedForward(model, "", root, blocks=tuple(policies), how=how)
    installed = [*regions.values(), outer]
    for region in installed:
        region.put_plan(plans[region.name])
    for region in regions.values():
        region.outer = outer
    for each in (traced, *traced.more):
        _adopt(regions, outer, each, checked)
    for region in installed:
        region.in_dry_run = checked
    outer.structure = Structure(outer, installed)
    if any(isinstance(policy, OffloadPolicy) for policy in (*policies.values(), root)):
        try:
            _have_engine(model, traced, installed, host_budget_bytes)
        except JettisonError:
            for region in reversed(installed):
                region.remove()
            raise
    return installed


def _have_engine(
    model: nn.Module, traced: ModelTrace, installed: Sequence[PlannedForward], host_budget_bytes: int | None
) -> None:
    """Give all regions one offload engine, with the slabs of a step, if anything is offloaded."""
    place = place_of(model)
    slabs = host_slabs(traced, {region.name: region for region in installed}, rounding_of(place))
    if not slabs and not any(region.recordings.moves_without_recipe() for region in installed):
        return
    first = installed[0]
    engine = first.offload or engine_for(place, host_budget_bytes, dry=first.in_dry_run)
    engine.pool.reserve(*slabs)
    for region in installed:
        region.offload = engine


def host_slabs(
    traced: ModelTrace, regions: Mapping[str, PlannedForward], rounded: Callable[[int], int]
) -> tuple[int, ...]:
    """Slabs for what one forward offloads. Regions by block name, with recordings; the model's own is ""."""
    sizes: list[int] = []
    for call in traced.calls[:-1]:
        region, made = regions[call.name], traced.classes[call.class_key].compiled
        if made is None:
            sizes += _moved_bytes(region, call.signature)
        elif not isinstance(region.plan.policy, Offload):  # whose sizes are known once its tensors are saved
            sizes += [made.program.buffers[b].nbytes for b in sorted(offloaded_by(region.plan.policy, made.program))]
    return slabs_for([*sizes, *_moved_bytes(regions[""], traced.root_signature)], rounded)


def _moved_bytes(region: PlannedForward, signature: Any) -> list[int]:
    prepared = region.recordings.prepared.get((region.recordings.number, signature))
    recipe = prepared.recipe if prepared is not None else None
    return [] if recipe is None else [move.host_bytes for move in recipe.moved.values()]


def install_more(
    regions: Sequence[PlannedForward],
    traced: ModelTrace,
    policies: Mapping[str, CheckpointPolicy],
    root: CheckpointPolicy,
    segments: Iterable[list[str]],
    *,
    host_budget_bytes: int | None,
) -> int:
    """Add a plan to installed regions and return its number (`follow`). Blocks added later keep everything."""
    plans = _region_plans(traced, policies, root, segments)
    numbers = {region.add_plan(plans.get(region.name, RegionPlan(policy=KeepAll()))) for region in regions}
    (number,) = numbers
    adopt_more(regions, traced, number, host_budget_bytes)
    return number


def adopt_more(regions: Sequence[PlannedForward], traced: ModelTrace, number: int, host_bytes: int | None) -> None:
    """Take the traced programs for calls under the plan of that number."""
    before = regions[-1].recordings.number
    follow(regions, number)
    for each in (traced, *traced.more):
        _adopt({region.name: region for region in regions[:-1]}, regions[-1], each, False)
    if any(isinstance(region.plan.policy, OffloadPolicy) for region in regions):
        _have_engine(regions[-1].module, traced, regions, host_bytes)
    follow(regions, before)


def follow(regions: Iterable[PlannedForward], number: int) -> None:
    """Use the plan of that number from the next call on."""
    for region in regions:
        region.take_plan(number)


def _adopt(regions: Mapping[str, PlannedForward], outer: PlannedForward, traced: ModelTrace, checked: bool) -> None:
    for call in traced.calls:
        cls = traced.classes[call.class_key]
        if call.name in regions and cls.compiled is not None:
            regions[call.name].recordings.give_up(call.signature, RUNS_COMPILED)
        elif call.name in regions and cls.problem:
            regions[call.name].recordings.late |= cls.trace.late
            regions[call.name].recordings.give_up(call.signature, cls.problem, cls.verdict)
        elif call.name in regions:
            regions[call.name].recordings.adopt(call.signature, cls.trace, checked=checked)
    outer.recordings.adopt(traced.root_signature, traced.root, checked=checked)


def _region_plans(
    traced: ModelTrace, policies: Mapping[str, CheckpointPolicy], root: CheckpointPolicy, segments: Iterable[list[str]]
) -> dict[str, RegionPlan]:
    """Policies by block, with their places in segments; the model's own has an empty name."""
    links = {call.name: call.links for call in traced.calls}
    plans = {name: RegionPlan(policy=policy) for name, policy in policies.items()}
    last = traced.calls[-1].name if traced.calls else ""
    for run in segments:
        before = None
        for name, following in zip_longest(run, run[1:]):
            inputs = links.get(name, ()) if before is not None else ()
            outputs = tuple(output for _, output in links.get(following, ()))
            before = SegmentLink(before=before if inputs else None, inputs=inputs, outputs=outputs)
            plans[name] = RegionPlan(policy=policies[name], link=before)
    if last in plans:
        plans[last] = replace(plans[last], stays=sum(call.name == last for call in traced.calls))
    for name, places in returned(traced).items():
        plans[name] = replace(plans[name], lives=frozenset(places))
    return plans | {"": RegionPlan(policy=root)}


def returned(traced: ModelTrace) -> dict[str, set[Place]]:
    """By block, those of its arguments and results that the model returns, so that the loop references them."""
    found: dict[str, set[Place]] = {}
    if not traced.loop.keep_output:
        return found
    root = traced.root
    held = {
        root.blocks[ref.buffer]
        for ref in root.output_leaves
        if isinstance(ref, TensorRef) and ref.buffer in root.blocks
    }
    for number, leaf in held:
        found.setdefault(traced.calls[number].name, set()).add((True, leaf))
        if number + 1 < len(traced.calls):
            after = traced.calls[number + 1]
            found.setdefault(after.name, set()).update((False, p) for p, output in after.links if output == leaf)
    return found


MOST_WORDS = 4
SWITCH: Final = "gradient_checkpointing"
"""Attribute of transformers and diffusers (`modeling_utils.py`: ``_set_gradient_checkpointing``)."""

_WRAPPERS: tuple[type, ...] = ()
if distributed.is_available():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

    _WRAPPERS = (ActivationWrapper,)  # of checkpoint_wrapper and offload_wrapper


def refuse_checkpointing(name: str, module: Any, when: str = "") -> None:
    """Raise `UnsupportedModule` if a module checkpoints, or offloads, by a switch or as a wrapper."""
    if getattr(module, SWITCH, False) is True:
        raise UnsupportedModule(
            f"{name} has gradient checkpointing switched on{when}; call gradient_checkpointing_disable() on the model "
            "first (of a trainer's arguments: gradient_checkpointing=False): Jettison would recompute inside what is "
            "recomputed"
        )
    if isinstance(module, _WRAPPERS):
        raise UnsupportedModule(
            f"{name} is a {type(module).__name__}{when}; leave apply_activation_checkpointing, checkpoint_wrapper or "
            "offload_wrapper out (of FSDP's settings: activation_checkpointing=False): what a plan keeps would go "
            "through their hooks"
        )


class Structure:
    """Watches a model's structure (see the module docstring). ``regions`` are the plan's, the root last."""

    def __init__(self, root: PlannedForward, regions: list[PlannedForward]) -> None:
        self.root = root
        self.regions = regions
        self._look()

    def check(self) -> None:
        """Move regions to where their modules are now. `UnsupportedModule` if blocks are checkpointed by now."""
        for module in self.switches:
            if module.gradient_checkpointing is True:
                self._refuse_checkpointing()
        for table, key, there in self.places:
            if table.get(key) is not there:
                break
        else:
            if all(len(table) == size for table, size in self.sizes):
                return
        self._follow()

    def parts_changed(self, names: str) -> None:
        """Warn that modules inside of blocks were replaced: blocks are recorded again, and the budget may not hold."""
        about = self._about_budget()
        if about:
            self.root.warn_once(
                "parts", f"modules of the model were added, replaced or removed after planning ({names}){about}"
            )

    def _look(self) -> None:
        """Remember every table entry on the path from the model to its blocks, and their forwards."""
        places: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        tables: dict[int, dict[str, Any]] = {}
        for region in self._at_work():
            module = self.root.module
            for part in region.name.split("."):
                table: Any = module._modules
                tables[id(table)] = table
                module = table[part]
                places[id(table), part] = table, part, module
            places[id(module), "forward"] = vars(module), "forward", region
            own = "_compiled_call_impl"
            places[id(module), own] = vars(module), own, vars(module).get(own)
        self.switches = [module for module in self.root.module.modules() if hasattr(module, SWITCH)]
        self.places = tuple(places.values())
        self.sizes = tuple((table, len(table)) for table in tables.values())

    def _at_work(self) -> list[PlannedForward]:
        return [region for region in self.regions[:-1] if not region.retired]

    def _refuse_checkpointing(self) -> None:
        for name, module in self.root.module.named_modules():
            refuse_checkpointing(name or "the model", module, ", which was done after planning (or remove() the plan)")

    def _follow(self) -> None:
        self._refuse_checkpointing()
        compiled = next((r for r in self._at_work() if vars(r.module).get("_compiled_call_impl") is not None), None)
        if compiled is not None:
            compiled.warn_compiled()
        changes = [*self._keep(), *self._replace()]
        sizes = [len(table) for table, _ in self.sizes]
        if not changes and sizes != [size for _, size in self.sizes]:
            changes.append("modules were added or removed around the blocks")
        self._look()
        if not changes:
            return
        names = {name: None for name, _ in self.root.module.named_modules()}
        there = {region.name for region in self._at_work()}
        self.root.recordings.blocks = tuple(name for name in names if name in there)
        self.root.start_over()
        self._warn(changes)

    def _keep(self) -> Iterator[str]:
        """Names of regions whose modules are still part of the model, under whatever name."""
        names = {id(module): name for name, module in self.root.module.named_modules()}
        self.lost: list[PlannedForward] = []
        for region in self._at_work():
            name, forward = names.get(id(region.module)), vars(region.module).get("forward")
            if name is None:
                region.remove()
                self.lost.append(region)
            elif forward is not region:
                region.remove()
                region.name = name
                self._add(region, region.module)
                yield f"{name} has another forward"
            elif name != region.name:
                yield f"{region.name} is now {name}"
                region.name = name

    def _replace(self) -> Iterator[str]:
        """Give regions to the modules that replace others."""
        modules = dict(self.root.module.named_modules())
        for region in self.lost:
            module = modules.get(region.name)
            taken = {id(other.module): f"{other.name}." for other in self._at_work()}
            inside = region.name.startswith(tuple(taken.values()))
            if module is None or inside or any(id(inner) in taken for inner in module.modules()):
                yield f"{region.name} is gone"
            elif isinstance(vars(module).get("forward"), PlannedForward):
                yield f"{region.name} runs under another plan"
            else:
                self._add(region, module)
                yield f"{region.name} is another {type(module).__name__}"

    def _add(self, old: PlannedForward, module: nn.Module) -> None:
        new = old.like(module)
        for plan in old.plans[1:]:
            new.add_plan(RegionPlan(policy=plan.policy))
        new.take_plan(old.recordings.number)
        new.outer = self.root
        self.regions.insert(len(self.regions) - 1, new)

    def _warn(self, changes: list[str]) -> None:
        more = f" and {len(changes) - MOST_WORDS} more" if len(changes) > MOST_WORDS else ""
        warn(
            f"the model is another one than when it was planned: {', '.join(changes[:MOST_WORDS])}{more}. What stands "
            "in the place of a planned block is treated as that one was, and what was added as plain autograd keeps "
            f"it{self._about_budget()}"
        )

    def _about_budget(self) -> str:
        known = self.root.assumptions
        if known is None:
            return ""
        known.follow()
        return (
            f"; the peak that was planned, at most {format_bytes(known.budget_bytes)}, was that of the model as it "
            "was. To have a budget held, remove() the plan and plan again"
        )
