"""The bytes of a described step, pass by pass, as a timeline of allocations.

NOTE [ A step replayed ]
`memory.step.actions` says what is there before each pass of all micro-batches, and how high each unit rises above
that. Here what units save and the gradients that they make are allocations of their own, and so is a unit's rise, which
lasts as long as its slice. What a schedule or a framework holds beside is one allocation that changes. So the highest
moment is the ledger's, to the byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from jettison.memory.schedule import PASSES, Work
from jettison.memory.step import StageAction, actions
from jettison.memory.timeline import Label, MemoryTimeline, TimelineWriter
from jettison.predict.clock import PassSlices, SliceKind
from jettison.predict.forecast import Forecast, Stage, played_load
from jettison.predict.stages import StageRegion, kept_by
from jettison.spec.precision import Gradients
from jettison.spec.run import Run

PARAMETERS, GRADIENTS, STATE, SENT, WORKING = "parameters", "gradients", "optimizer state", "stage output", "transient"
SAVED = "saved for backward"
STEPS = 2
"""The first, in which the optimizer makes its state, and one like all that follow."""
_WORDS = {Work.FORWARD: "forward", Work.BACKWARD: "backward", Work.WEIGHT: "weight half"}


def stage_memory(
    memory: Forecast, index: int, passes: Sequence[PassSlices], *, step_ns: int, by_tensor: bool = False
) -> MemoryTimeline:
    """Return a stage's allocations over the first two steps. See NOTE [ A step replayed ].

    Args:
        passes: of the stage, as `clock.step_slices` has them.
        by_tensor: what is saved for backward one tensor at a time, under the ledger's words.
    """
    player = _Player(memory.run, memory.stages[index], by_tensor)
    for number in range(STEPS):
        player.step(passes, number, number * step_ns, (number + 1) * step_ns)
    return player.writer.timeline()


class _Player:
    def __init__(self, run: Run, stage: Stage, by_tensor: bool) -> None:
        self.run, self.stage, self.by_tensor = run, stage, by_tensor
        self.load = played_load(run, stage)
        self.writer = TimelineWriter(f"stage {stage.index}")
        self.live = 0
        self.sizes: dict[int, int] = {}
        self.saved: dict[tuple[int, int], dict[str, list[int]]] = {}  # by micro-batch and chunk, by unit
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.gradients: dict[int, list[int]] = {}  # by chunk
        self.beside: list[int] = []  # what a schedule or a framework holds
        self.tensors: dict[tuple[int, str], tuple[tuple[Label, int], ...]] = {}
        parts = [part for chunk in stage.parts for part in chunk]
        self._spread(PARAMETERS, self.load.fixed, [(part.name, part.static.parameters) for part in parts])
        self._spread(STATE, self.load.master, [(part.name, part.static.master) for part in parts])
        self.upfront, self.added = (self.load.gradients is g for g in (Gradients.UPFRONT, Gradients.ADDED))
        for unit, name in ((u, n) for chunk in self.load.own for u in chunk for n in u.names if self.upfront):
            self._allocate(unit.gradient, Label(module=name, role=GRADIENTS), None)

    # allocations ------------------------------------------------------------------------------------------------------

    def _allocate(self, nbytes: int, label: Label, time_ns: int | None) -> list[int]:
        """One allocation, if there are any bytes; without a time it was there before."""
        if nbytes <= 0:
            return []
        writer = self.writer
        number = writer.already(nbytes, label) if time_ns is None else writer.allocate(nbytes, label, time_ns)
        self.sizes[number] = nbytes
        self.live += nbytes
        return [number]

    def _free(self, numbers: list[int], time_ns: int) -> None:
        for number in numbers:
            self.writer.free(number, time_ns)
            self.live -= self.sizes.pop(number)
        numbers.clear()

    def _resize(self, numbers: list[int], nbytes: int, label: Label, time_ns: int) -> None:
        """Make what some allocations hold so many bytes."""
        if sum(map(self.sizes.__getitem__, numbers)) != nbytes:
            self._free(numbers, time_ns)
            numbers += self._allocate(nbytes, label, time_ns)

    def _settle(self, level: int, time_ns: int) -> None:
        """Let everything together be so many bytes."""
        there = sum(map(self.sizes.__getitem__, self.beside))
        self._resize(self.beside, there + level - self.live, Label(module="", role=SENT, site="schedule"), time_ns)

    def _transient(self, level: int, label: Label, begin_ns: int, end_ns: int) -> None:
        """Rise to a level for a while."""
        self._free(self._allocate(level - self.live, label, begin_ns), end_ns)

    def _spread(self, role: str, total: int, parts: Sequence[tuple[str, int]], time_ns: int | None = None) -> None:
        rest = total - sum(nbytes for _, nbytes in parts)
        for name, nbytes in [("", total)] if rest < 0 else [*parts, ("", rest)]:
            self._allocate(nbytes, Label(module=name, role=role), time_ns)

    # a step -----------------------------------------------------------------------------------------------------------

    def step(self, passes: Sequence[PassSlices], number: int, begin_ns: int, end_ns: int) -> None:
        """One optimizer step."""
        self.writer.mark(f"step {number}")
        load, stage = self.load, self.stage
        found = actions(load, first_step=number == 0)
        slices = iter([played for played in passes if played.step is not None])
        at = begin_ns
        for one, behind in zip(found.actions, [*[a.level for a in found.actions[1:]], found.behind], strict=True):
            if one.kind.work in PASSES:
                played = next(slices)
                at = begin_ns + played.end_ns
                self._pass(one, played, begin_ns)
            elif one.kind.work is Work.REDUCE:
                held = self.gradients.get(one.kind.chunk, [])
                left = sum(map(self.sizes.__getitem__, held)) - load.freed[one.kind.chunk]
                label = Label(module="", role=GRADIENTS, site="reduction")
                self._transient(one.level + load.reducing[one.kind.chunk], label, at, at)
                self._resize(held, max(0, left), label, at)
            self._settle(behind, at)
        self.writer.mark("optimizer")
        optimizer = next(s for s in reversed(passes[-1].slices) if s.kind is SliceKind.OPTIMIZER)
        begin, end = begin_ns + optimizer.begin_ns, begin_ns + optimizer.end_ns
        if number == 0:
            parts = [(part.name, part.static.state - part.static.master) for chunk in stage.parts for part in chunk]
            self._spread(STATE, load.state - load.master, parts, begin)
        self._settle(found.optimizer, begin)
        label = Label(module="", role=WORKING, site="optimizer")
        self._transient(found.optimizer + load.optimizer_transient, label, begin, end)
        for made in self.gradients.values():
            self._free(made, end_ns)
        self.gradients.clear()
        self._settle(found.after, end_ns)

    def _pass(self, one: StageAction, played: PassSlices, offset_ns: int) -> None:
        kind, load = one.kind, self.load
        key, own = (one.micro_batch, kind.chunk), kind.chunk % load.order.own
        ends, forward = kind.work is load.order.ending, kind.work is Work.FORWARD
        site = f"{_WORDS[kind.work]} of micro-batch {one.micro_batch}"
        begin_ns, end_ns = offset_ns + played.begin_ns, offset_ns + played.end_ns
        times = {name: (offset_ns + a, offset_ns + b) for name, (a, b) in played.times(one.units).items()}
        pieces = [(name, piece) for piece in one.pieces for name in piece.names]
        several, turn = Counter(name for name, _ in pieces), Counter[str]()
        self._settle(one.level, begin_ns)
        saved, made, passing, level = self.saved.setdefault(key, {}), list[int](), list[int](), one.level
        for name, piece in pieces:
            begin, end = times[name]
            if several[name] > 1:  # steps of a second half
                begin, end = begin + (end - begin) * turn[name] // several[name], end
                turn[name] += 1
            held, label = saved.setdefault(name, []), Label(module=name, role=SAVED, site=site)
            if forward:
                for tensor, nbytes in self._tensors(name, kind.chunk, piece.kept):
                    held += self._allocate(nbytes, Label(module=tensor.module, role=tensor.role, site=site), begin)
            gradients = Label(module=name, role=GRADIENTS, site=site)
            early = piece.peak >= piece.gradients
            made += self._allocate(piece.gradients, gradients, begin) if early else []
            self._transient(level + piece.peak, Label(module=name, role=WORKING, site=site), begin, end)
            if not forward:
                self._resize(held, sum(map(self.sizes.__getitem__, held)) + piece.kept, label, end)
            made += [] if early else self._allocate(piece.gradients, gradients, end)
            passing += self._allocate(piece.passing, label if forward else gradients, end)
            level += piece.net
            self._settle(level, end)
        self._free(passing, end_ns)
        if ends and kind.fresh and not (self.added or self.upfront):
            self.gradients[own] = made
        else:
            self._free(made, end_ns)
        if forward:
            self.outputs[key] = self._allocate(load.sent, Label(module="", role=SENT, site=site), end_ns)
        elif ends:
            for held in (*self.saved.pop(key).values(), self.outputs.pop(key)):
                self._free(held, end_ns)
        else:  # a first half: what the second one needs
            for name, unit in ((name, each) for each in one.units for name in each.names):
                self._resize(saved[name], unit.half, Label(module=name, role=SAVED, site=site), end_ns)

    def _tensors(self, name: str, chunk: int, nbytes: int) -> tuple[tuple[Label, int], ...]:
        key = chunk, name
        if key not in self.tensors:
            own = len(self.stage.groups)
            part = next((g.part for g in self.stage.groups[chunk % own] if name in g.names), None)
            found = () if part is None or not self.by_tensor else tuple(_kept(part, name, self.run, whole=chunk >= own))
            whole = ((Label(module=name, role=SAVED), nbytes),)
            self.tensors[key] = found if sum(size for _, size in found) == nbytes else whole
        return self.tensors[key]


def _kept(part: StageRegion, name: str, run: Run, *, whole: bool) -> Iterator[tuple[Label, int]]:
    storages = set()
    for entry in part.region.entries(name, kept_by(part.region, "none") if whole else part.kept):
        if entry.storage not in storages:
            storages.add(entry.storage)
            module = ".".join(filter(None, (entry.layer, entry.path)))
            yield Label(module=module, role=entry.role), entry.local_storage_bytes(run.layout.mesh_sizes)
