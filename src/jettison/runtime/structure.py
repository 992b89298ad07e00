"""Detection of blocks that are replaced, wrapped, moved, removed or added after planning, at the start of a step.

A region belongs to a module, and a plan to a model. So a module that was moved or wrapped keeps its region, under its
new name; one that replaces another gets a region of its own, with the old one's policy; an added one runs as part of
the model around the blocks. All of it is recorded again. Gradients are right without this, too; but part of a plan
would silently have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import distributed, nn

from jettison.core.errors import UnsupportedModule, warn
from jettison.core.units import format_bytes
from jettison.runtime.planned import PlannedForward
from jettison.runtime.recordings import RegionPlan

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
            self.root.say_once(
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
            compiled.say_compiled()
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
        self._say(changes)

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

    def _say(self, changes: list[str]) -> None:
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
