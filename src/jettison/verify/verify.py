"""`verify`: a planned model compared with an independent copy that trains plainly."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from jettison.capture.block_stand_ins import forwards
from jettison.capture.ledger_entries import OUTSIDE_LAYER, ROOT_LAYER, ledger_of
from jettison.capture.model_trace import LossFn, call_model, expect_module, loss_of
from jettison.capture.recorder import RegionTrace
from jettison.capture.tensor_subclasses import plain
from jettison.capture.tracer import trace_model
from jettison.core.errors import UnsupportedModule, UsageError
from jettison.core.objects import swapped
from jettison.core.progress import Progress, on_terminal, shown
from jettison.ledger.program import Program
from jettison.planner import Applied, apply, auto_checkpoint
from jettison.planner.planner import plan_tensors
from jettison.report.proof import LayerProof, Proof
from jettison.runtime.callers import of_a_region
from jettison.runtime.chunked_loss import whole_losses
from jettison.runtime.compiled_regions import CompiledRegion, compiled
from jettison.runtime.recipe import compile_recipe
from jettison.runtime.saved_handles import HELD, Handle
from jettison.runtime.saved_tensor_hooks import Frame
from jettison.runtime.witness import Check
from jettison.solve.checkpoint_policy import CheckpointPolicy, KeepAll, offloaded_by, packed_by
from jettison.solve.plan import Plan, PlanTensor, policy_name
from jettison.spec.hardware import Hardware
from jettison.verify import differences
from jettison.verify.side_by_side import ROUNDS, STEPS, Side, compare_steps, leaving_untrained, mirrored, proof_of

Look = Callable[[Side, Side], None]


@on_terminal
def verify(
    model: nn.Module,
    batch: Any,
    *,
    budget: str | SupportsIndex | None = None,
    plan: Plan | None = None,
    handle: Applied | None = None,
    compile: str | None = None,
    offload: bool = False,
    host_budget: str | SupportsIndex | None = None,
    hardware: Hardware | str | None = None,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    keep_output: bool = True,
    values: bool = False,
    steps: int = STEPS,
    rounds: int = ROUNDS,
    look: Look | None = None,
    progress: Progress = shown,
) -> Proof:
    """Train ``model`` as planned, alongside an independent plain copy, and report the comparison.

    Both start from the same parameters, optimizer state and random numbers. In each of ``steps`` steps, losses, every
    gradient by parameter name, random streams and buffers are compared bit by bit, and parameters at the end. Further
    steps measure peak bytes of both, bytes held between forward and backward by each layer, and step times in
    ``rounds`` interleaved rounds. All state is restored: parameters, gradients, buffers, the optimizer's state, random
    streams and Python's state that the model's code reaches. Copies of tensors are kept on the CPU meanwhile.

    Args:
        batch: ``model(**batch)`` for a mapping, ``model(*batch)`` for a tuple.
        budget: make and apply a plan for this budget, and remove it at the end.
        plan: apply this plan, and remove it at the end.
        handle: the return value of `auto_checkpoint` or `apply`; its plan stays on.
        compile: as for `auto_checkpoint`. Where blocks run compiled, so do those of the copy: differences that
            compilation causes are not attributed to the plan, and bytes of layers are not observed.
        offload, hardware: with a budget, as for `auto_checkpoint`.
        host_budget: with a budget or a plan that offloads, the limit of pinned CPU memory.
        optimizer: over the model's parameters.
        keep_output: as for `auto_checkpoint`: whether the loop references the model's output until the step ends.
        look: called with the plain side and the planned one at the end, while the plan is on.
        values: in one more step compare every tensor that backward gets with the forward's, in all bits, and name the
            first that departs. That step takes the memory of plain autograd in addition to the plan's.

    Raises:
        UsageError: not exactly one of budget, plan and handle is given.
        Infeasible: no plan fits the budget.
        PlanMismatch: the plan was made for another model or another batch.
        UnsupportedModule: a forward changes, or would change, state that cannot be restored; or planning changed the
            model, so that a copy of it would prove nothing.
    """
    if sum(given is not None for given in (budget, plan, handle)) != 1:
        raise UsageError("verify() needs exactly one of budget=, plan= and handle=")
    expect_module(model)
    given = Side(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn, keep_output=keep_output)
    stay = handle.regions if handle is not None else ()
    with leaving_untrained(given, stay):
        before = _state_digests(model)
        applied = handle
        if budget is not None:
            applied = auto_checkpoint(
                model,
                batch,
                budget,
                optimizer=optimizer,
                loss_fn=loss_fn,
                keep_output=keep_output,
                gradients_preallocated=False,
                compile=compile,
                offload=offload,
                host_budget=host_budget,
                hardware=hardware,
                progress=progress,
            )
        elif plan is not None:
            progress("applying the plan")
            applied = apply(model, plan=plan, batch=batch, loss_fn=loss_fn, compile=compile, host_budget=host_budget)
        assert applied is not None
        try:
            if _state_digests(model) != before:
                raise UnsupportedModule(
                    f"planning changed parameters, buffers or random streams of {type(model).__name__}"
                )
            progress("copying the model")  # after planning, which counts what else is on the device
            copied = differences.independent_copy(model)
            plain = replace(given, model=copied, optimizer=mirrored(optimizer, model, copied), under=whole_losses)
            proof = _prove(plain, given, applied, steps, rounds, progress)
            if look is not None:
                look(plain, given)
            return _with_values(proof, given, progress) if values else proof
        finally:
            model.zero_grad(set_to_none=True)
            if handle is None:
                applied.remove()


def _state_digests(model: nn.Module) -> tuple[object, ...]:
    return differences.parameter_digest(model), differences.buffer_digest(model), differences.rng_digest()


def _with_values(proof: Proof, planned: Side, progress: Progress) -> Proof:
    progress("comparing every value")
    with torch.enable_grad(), every_value() as seen:
        planned.step()
    departures = tuple(one.sentence() for one in seen.departures[: differences.MAX_DEPARTURES])
    return replace(proof, values_compared=seen.compared, values_bytes=seen.nbytes, departures=departures)


def _prove(
    plain: Side, planned: Side, applied: Applied, steps: int, rounds: int, progress: Callable[[str], None]
) -> Proof:
    def alike() -> AbstractContextManager[None]:
        """Run blocks of the plain side compiled where the planned side's are, each as without a plan."""
        regions = (region for region in applied.regions if isinstance(region, CompiledRegion))
        modules = {plain.model.get_submodule(one.name): one.compiled.settings for one in regions}
        return forwards({one: compiled(one.forward, how, KeepAll()) for one, how in modules.items()})

    with torch.enable_grad():
        progress("training side by side")
        with alike():
            found = compare_steps(plain, planned, steps)
        proof = proof_of(plain, planned, found, "planned", steps, rounds, progress, under=alike)
    progress("counting what layers hold")
    planned.model.zero_grad(set_to_none=True)  # of the last timed step: a forward would warn of them
    layers, tensors = _layers(plain, planned, applied)
    proof, plan = replace(proof, layers=layers, tensors=tensors), applied.plan
    if plan is None:
        return proof
    return replace(
        proof,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.predicted.peak_bytes,
        plan_hash=plan.hash,
        predicted_levels=plan.levels,
    )


def _layers(plain: Side, planned: Side, applied: Applied) -> tuple[tuple[LayerProof, ...], tuple[PlanTensor, ...]]:
    """Bytes by layer: plain autograd's and the plan's by the ledger, observed ones; and the saved tensors described."""
    # the plain copy is traced: modules under a plan run stand-ins
    traced = trace_model(
        plain.model, plain.batch, loss_fn=plain.loss_fn, regions=[r.name for r in applied.regions if r.name]
    )
    regions = {region.name: region for region in applied.regions}
    inputs = {c.name: traced.classes[c.class_key].trace.inputs for c in traced.calls}

    def kept(name: str, program: Program) -> frozenset[int]:
        plan = regions[name].plan
        again = {position for position, _ in plan.link.inputs}
        chosen = plan.policy.kept(program) - moved(name, program)
        return chosen - {b for b, position in inputs.get(name, {}).items() if position in again}

    def moved(name: str, program: Program) -> frozenset[int]:
        return frozenset() if regions[name].plan.stays else offloaded_by(regions[name].plan.policy, program)

    programs = {"": traced.root.program} | {call.name: traced.program(call) for call in traced.calls}

    def treated(name: str) -> dict[str, Any]:
        program, policy = programs[name], regions[name].plan.policy
        stays, goes, packs = policy.kept(program), moved(name, program), packed_by(policy, program)
        word = policy_name(program, stays, goes, packs) if name else policy_name(program, kept("", program))
        buffers = {"kept": stays, "offloaded": goes, "packed": packs}
        return {"policy": str(word), "digest": program.digest()} | {key: tuple(sorted(b)) for key, b in buffers.items()}

    packed = {
        call.name: _saved_by_packing(traced.classes[call.class_key].trace, regions[call.name].plan.policy)
        for call in traced.calls
    }
    before, after = ledger_of(traced).by_layer(), ledger_of(traced, kept).by_layer()
    observed = observed_saved_bytes(planned.model, planned.batch, loss_fn=planned.loss_fn)
    planned.model.zero_grad(set_to_none=True)
    opaque = {call.name for call in traced.calls if call.problem}
    opaque |= {name for name, region in regions.items() if isinstance(region, CompiledRegion)}
    found = []
    for layer in before:
        name = "" if layer == ROOT_LAYER else layer
        found.append(
            LayerProof(
                layer=layer,
                baseline_bytes=before[layer],
                predicted_bytes=after.get(layer, 0) - packed.get(layer, 0),
                observed_bytes=observed.get(OUTSIDE if layer == OUTSIDE_LAYER else name, 0),
                counted=layer not in opaque,
                **(treated(name) if name in programs else {"policy": "none"}),
            )
        )
    return tuple(found), plan_tensors(traced)


def _saved_by_packing(region: RegionTrace, policy: CheckpointPolicy) -> int:
    packed = packed_by(policy, region.program)
    packs = compile_recipe(region, policy.kept(region.program), packed=packed).packed if packed else {}
    return region.program.kept_bytes(frozenset(packs)) - sum(pack.nbytes for pack in packs.values())


# Bytes that planned regions hold between forward and backward, observed on the real tensors ---------------------------
#
# This does not repeat the prediction: it records what each region hands to autograd in place of a saved tensor, drops
# its references, and counts the storages that are still alive, each once.


OUTSIDE = "loss"
"""Key of tensors saved by a loss that is computed after the model's forward."""


def observed_saved_bytes(model: nn.Module, batch: Any, *, loss_fn: LossFn | None = None) -> dict[str, int]:
    """Bytes alive between forward and backward because a region holds them, by region name ("" is the root).

    A storage that the root holds, or that several block calls were given, is the root's; else it belongs to the first
    block that holds it (NOTE [ Whose bytes ] in capture/ledger_entries.py). Parameters and registered buffers cost a
    step nothing and are left out. Runs one forward of ``model``, whose regions must be planned, and no backward.
    """
    enter: Callable[..., None] = Frame.enter
    pack: Callable[[Frame, Tensor], Any] = Frame.pack
    packed: list[tuple[str, Any]] = []
    outside: list[Tensor] = []
    given: list[set[torch.UntypedStorage]] = []

    def entering(frame: Frame, leaves: list[Any], *more: Any) -> None:
        if frame.name:
            given.append({leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)})
        enter(frame, leaves, *more)

    @of_a_region
    def packing(frame: Frame, tensor: Tensor) -> Any:
        found = pack(frame, tensor)
        packed.append((frame.name, found))
        return found

    def packing_outside(tensor: Tensor) -> Tensor:
        # a node that saves its own result, with its graph, would own itself: no backward comes to free it
        outside.append(tensor if tensor.is_leaf else tensor.detach())
        return outside[-1]

    def settled() -> Iterator[tuple[str, weakref.ref[torch.UntypedStorage], int]]:
        tensors = [pair for name, one in packed for pair in _tensors(name, one)]
        for name, tensor in [*tensors, *((OUTSIDE, tensor) for tensor in outside)]:
            storage = tensor.untyped_storage()
            yield name, weakref.ref(storage), storage.nbytes()

    with torch.enable_grad(), swapped(Frame, enter=entering, pack=packing):
        output = call_model(model, batch)
        with torch.autograd.graph.saved_tensors_hooks(packing_outside, lambda tensor: tensor):
            loss = loss_of(output, loss_fn)
    del output
    uses = Counter(storage._cdata for storages in given for storage in storages)
    held = list(settled())
    for references in (packed, outside, given):
        references.clear()
    free = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    owners: dict[int, tuple[list[str], int]] = {}
    for name, weak, nbytes in held:
        storage = weak()
        if storage is not None and storage._cdata not in free:
            owners.setdefault(storage._cdata, ([], nbytes))[0].append(name)
    del loss
    totals: Counter[str] = Counter()
    for key, (names, nbytes) in owners.items():
        totals["" if "" in names or uses[key] > 1 else names[0]] += nbytes
    return dict(totals)


def _tensors(name: str, packed: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors that a packed value holds, each with its region: in a checkpoint segment perhaps an earlier block."""
    if len(packed) == HELD:
        yield name, packed[1]
    else:
        for box in packed[2]:
            if isinstance(box, Handle):
                yield from _tensors(box[0].name, box)
            elif (held := box.on_device) is not None:
                yield name, held


# values ---------------------------------------------------------------------------------------------------------------
#
# Each tensor that a plan recomputes or fetches is compared with the forward's, in all bits. A witness is a sample of
# elements; here the complete tensor is kept for one step, which takes the memory of plain autograd, so that the first
# op that departs is named with the elements that do.


@dataclass(kw_only=True)
class UnpackedValues:
    """Unpacked tensors of one step: number, bytes, and those that differ from the forward's, in order."""

    compared: int = 0
    nbytes: int = 0
    departures: list[differences.Departure] = field(default_factory=list)


@dataclass(kw_only=True)
class _Kept:
    handle: tuple[Any, ...]  # as `Handle`
    tensor: Tensor
    position: int


@contextmanager
def every_value() -> Iterator[UnpackedValues]:
    """Compare every value in planned steps within this context. Witnesses are skipped: this covers them."""
    seen, kept = UnpackedValues(), dict[int, _Kept]()
    pack: Any = Frame.pack
    recompute: Any = Frame.recompute

    @of_a_region
    def packing(frame: Any, tensor: Tensor) -> Any:
        frame.how, frame.sees = Check.OFF, False
        packed = pack(frame, tensor)
        if len(packed) != HELD and not packed[1].unwritten:
            kept[id(packed)] = _Kept(handle=packed, tensor=plain(tensor).detach().clone(), position=len(kept))
        return packed

    def recomputing(frame: Any, handle: tuple[Any, ...]) -> Tensor:
        tensor: Tensor = recompute(frame, handle)
        had = kept.get(id(handle))
        if had is not None:
            _compare(seen, frame, had, plain(tensor).detach())
        return tensor

    try:
        with swapped(Frame, pack=packing, recompute=recomputing):
            yield seen
    finally:
        seen.departures.sort(key=lambda one: one.position)


def _compare(seen: UnpackedValues, frame: Frame, had: _Kept, now: Tensor) -> None:
    seen.compared += 1
    seen.nbytes += now.numel() * now.element_size()
    was, became = differences.form_of(had.tensor), differences.form_of(now)
    if was == became and differences.tensor_bytes(had.tensor) == differences.tensor_bytes(now):
        return
    slot = frame.recipe.trace.program.slots[had.handle[3]]
    where, op = ".".join(filter(None, (frame.name, slot.path))), slot.op or "the start"
    found = differences.Departure.between(had.tensor, now, became, was=was, module=where, op=op, position=had.position)
    seen.departures.append(found)
