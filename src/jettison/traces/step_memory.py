"""The bytes of a described step, pass by pass, as a timeline of allocations.

NOTE [ A step replayed ]
`memory.step` says how high a step rises. Here the same units are played on the clock, each pass from what is
really there: residents of micro-batches in flight, gradients that earlier backwards made. A unit's peak above that is
one allocation that lasts as long as its slice. So the highest moment is the ledger's, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jettison.memory.schedule import ScheduledPass, Work, apart, window
from jettison.memory.step import Event
from jettison.memory.unit import Unit
from jettison.predict.forecast import Forecast, Stage
from jettison.predict.stages import Chunk, StageRegion, kept_by
from jettison.spec.precision import Gradients
from jettison.spec.run import Run
from jettison.traces.pipeline_seconds import Kind, PassSlices, Slice
from jettison.traces.timeline import Label, MemoryTimeline, TimelineWriter

PARAMETERS, GRADIENTS, STATE, SENT, WORKING = "parameters", "gradients", "optimizer state", "stage output", "transient"
SAVED = "saved for backward"
STEPS = 2
"""The first, in which the optimizer makes its state, and one like all that follow."""


def stage_memory(
    memory: Forecast, index: int, passes: Sequence[PassSlices], *, step_ns: int, by_tensor: bool = False
) -> MemoryTimeline:
    """A stage's allocations over the first two steps. See NOTE [ A step replayed ].

    Args:
        passes: of the stage, as `step_slices` has them.
        by_tensor: what is saved for backward one tensor at a time, under the ledger's words.
    """
    stage = memory.stages[index]
    player = _Player(run=memory.run, stage=stage, by_tensor=by_tensor, writer=TimelineWriter(f"stage {index}"))
    player.begin()
    for number in range(STEPS):
        player.step(passes, number, number * step_ns, (number + 1) * step_ns)
    return player.writer.timeline()


@dataclass(kw_only=True)
class _Player:
    run: Run
    stage: Stage
    by_tensor: bool
    writer: TimelineWriter
    held: dict[tuple[int, int], dict[str, list[int]]] = field(default_factory=dict)  # by micro-batch and chunk, by unit
    output: dict[tuple[int, int], int] = field(default_factory=dict)
    gradients: dict[int, list[int]] = field(default_factory=dict)  # by chunk
    made: bool = False  # the optimizer's state, by its first step
    pieces: dict[tuple[int, str], tuple[tuple[Label, int], ...]] = field(default_factory=dict)
    passed: list[int] = field(default_factory=list)  # what was sent and stays until the step ends
    left: int | None = None  # gradients of inputs from the step before

    @property
    def upfront(self) -> bool:
        return self.stage.load.gradients is Gradients.UPFRONT

    @property
    def added(self) -> bool:
        """None outlives its backward."""
        return self.stage.load.gradients is Gradients.ADDED

    def begin(self) -> None:
        """Allocate what exists before the first step."""
        load = self.stage.load
        parts = [part for chunk in self.stage.parts for part in chunk]
        for name, nbytes in _spread(load.fixed, [(part.name, part.static.parameters) for part in parts]):
            self.writer.already(nbytes, Label(module=name, role=PARAMETERS))
        for name, nbytes in _spread(load.master, [(part.name, part.static.master) for part in parts]):
            self.writer.already(nbytes, Label(module=name, role=STATE))
        if self.upfront:
            for unit, name in self._own_units():
                if unit.gradient:
                    self.writer.already(unit.gradient, Label(module=name, role=GRADIENTS))

    def _own_units(self) -> Iterator[tuple[Unit, str]]:
        for chunk in self.stage.load.chunks[: len(self.stage.groups)]:
            yield from ((unit, name) for unit in chunk for name in unit.names)

    def step(self, passes: Sequence[PassSlices], number: int, begin_ns: int, end_ns: int) -> None:
        """One optimizer step."""
        self.writer.mark(f"step {number}")
        load, end = self.stage.load, begin_ns + passes[-1].end_ns
        if self.left is not None:
            self.writer.free(self.left, begin_ns)
        around = [self._of_schedule(load.there(Event.FORWARD), begin_ns)]
        chunks = iter(_chunks(self.run, self.stage, [p.step for p in passes if p.step is not None]))
        for played in passes:
            if played.step is not None:
                chunk = next(chunks)
                self._pass(played, chunk, begin_ns)
                if load.transfers and self._ends(played.step.work):
                    sent = load.transfers[chunk % load.order.own]
                    self.passed += filter(None, [self._of_schedule(sent, begin_ns + played.end_ns)])
                if len(around) == 1 and played.step.work is not Work.FORWARD:
                    variables = load.there(Event.BACKWARD) - load.there(Event.FORWARD)
                    around.append(self._of_schedule(variables, begin_ns + played.end_ns))
        for held in (*around, *self.passed):
            if held is not None:
                self.writer.free(held, end)
        self.passed.clear()
        self.left = self._of_schedule(load.there(Event.STEP), end)
        optimizer = next(s for s in reversed(passes[-1].slices) if s.kind is Kind.OPTIMIZER)
        self._optimizer(begin_ns + optimizer.begin_ns, begin_ns + optimizer.end_ns)
        for made in self.gradients.values():
            self._free(made, end_ns)
        self.gradients.clear()

    def _of_schedule(self, nbytes: int, begin_ns: int) -> int | None:
        return self.writer.allocate(nbytes, Label(module="", role=SENT, site="schedule"), begin_ns) if nbytes else None

    def _optimizer(self, begin_ns: int, end_ns: int) -> None:
        self.writer.mark("optimizer")
        load = self.stage.load
        if not self.made:
            parts = [part for chunk in self.stage.parts for part in chunk]
            moments = [(part.name, part.static.state - part.static.master) for part in parts]
            for name, nbytes in _spread(load.state - load.master, moments):
                self.writer.allocate(nbytes, Label(module=name, role=STATE), begin_ns)
            self.made = True
        if load.optimizer_transient:
            label = Label(module="", role=WORKING, site="optimizer")
            self.writer.free(self.writer.allocate(load.optimizer_transient, label, begin_ns), end_ns)

    def _ends(self, work: Work) -> bool:
        """Is it a backward, or the second half of one?"""
        split = self.run.layout.schedule.splits and self.run.layout.pp > 1
        return work is (Work.WEIGHT if split else Work.BACKWARD)

    def _pass(self, played: PassSlices, chunk: int, offset_ns: int) -> None:
        step = played.step
        assert step is not None
        key, load = (step.micro_batch, chunk), self.stage.load
        units = [(unit, name) for unit in load.chunks[chunk] for name in unit.names]
        spans = _spans(units, played)
        times = {name: (offset_ns + begin, offset_ns + end) for name, (begin, end) in spans.items()}
        site = f"{_WORDS[step.work]} of micro-batch {step.micro_batch}"
        if step.work is Work.FORWARD:
            if load.sent:
                label = Label(module="", role=SENT, site=site)
                self.output[key] = self.writer.allocate(load.sent, label, offset_ns + played.begin_ns)
            self.held[key] = {name: self._forward(unit, name, chunk, site, times[name]) for unit, name in units}
            for unit, name in units:  # autocast's cache is emptied behind the loss
                self._transient(unit.cached, name, site, times[name][1], offset_ns + played.end_ns)
            return
        own = chunk % len(self.stage.groups)
        if any(unit.halves for unit, _ in units):
            self._half(step.work, key, units, site, times, offset_ns + played.end_ns, own)
            return
        fresh = not self.upfront and own not in self.gradients
        made: list[int] = []
        kept: dict[str, list[int]] = self.held.pop(key)
        last = self._ends(step.work)
        for unit, name in reversed(units):
            gradient = self._backward(unit, name, kept[name], fresh, site, times[name])
            if gradient is not None:
                made.append(gradient)
        end_ns = offset_ns + played.end_ns
        if fresh and last and not self.added:
            self.gradients[own] = made
        elif made:  # tied weights' shares have been added, or the other half makes them again
            self._free(made, end_ns)
        if last:
            if key in self.output:
                self.writer.free(self.output.pop(key), end_ns)
        else:  # a first half lets go of nothing for good
            self.held[key] = {n: self._again(u, n, chunk, site, end_ns) for u, n in units}

    def _half(
        self,
        work: Work,
        key: tuple[int, int],
        units: Sequence[tuple[Unit, str]],
        site: str,
        times: Mapping[str, tuple[int, int]],
        end_ns: int,
        own: int,
    ) -> None:
        """Either half of a backward whose halves are known; see `memory.unit`."""
        if work is Work.BACKWARD:
            held = self.held[key]
            for unit, name in reversed(units):
                assert unit.halves is not None
                self._transient(unit.halves.input_peak, name, site, *times[name])
                held[name] += self._waiting(unit.halves.waiting, name, site, times[name][1])
            for unit, name in units:
                if unit.halves is not None and unit.halves.detached:
                    self._free(held[name], end_ns)
                    held[name] = self._waiting(unit.half, name, site, end_ns)
            return
        fresh, held, made, named = not self.upfront and own not in self.gradients, self.held.pop(key), [], 0
        for unit, name in units:
            assert unit.halves is not None
            (begin, end), level = times[name], unit.half
            for number, step in enumerate(unit.halves.steps):
                at = begin + (end - begin) * number // len(unit.halves.steps)
                one = step.made if fresh else step.added
                self._transient(step.rise + one + named, name, site, at, at)
                self._free(held[name], at)
                level += step.change
                held[name] = self._waiting(level, name, site, at)
                made += self._waiting(one, name, site, at, GRADIENTS) if fresh else []
                named = 0 if fresh else one
        for kept in held.values():
            self._free(kept, end_ns)
        if fresh and not self.added:
            self.gradients[own] = made
        elif fresh:
            self._free(made, end_ns)

    def _waiting(self, nbytes: int, name: str, site: str, time_ns: int, role: str = SAVED) -> list[int]:
        label = Label(module=name, role=role, site=site)
        return [self.writer.allocate(nbytes, label, time_ns)] if nbytes else []

    def _free(self, numbers: Sequence[int], time_ns: int) -> None:
        for number in numbers:
            self.writer.free(number, time_ns)

    def _forward(self, unit: Unit, name: str, chunk: int, site: str, times: tuple[int, int]) -> list[int]:
        begin_ns, end_ns = times
        kept = self._again(unit, name, chunk, site, begin_ns)
        self._transient(unit.forward_peak - unit.resident, name, site, begin_ns, end_ns)
        return kept

    def _again(self, unit: Unit, name: str, chunk: int, site: str, time_ns: int) -> list[int]:
        """Allocate a unit's saved buffers, before anything else of its slice."""
        key = chunk, name
        if key not in self.pieces:
            self.pieces[key] = tuple(self._saved(unit, name, chunk))
        allocate = self.writer.allocate
        return [
            allocate(size, Label(module=label.module, role=label.role, site=site), time_ns)
            for label, size in self.pieces[key]
        ]

    def _saved(self, unit: Unit, name: str, chunk: int) -> Iterator[tuple[Label, int]]:
        if not unit.resident:
            return
        part = self._part(name, chunk) if self.by_tensor else None
        found = [] if part is None else _tensors(part, name, self.run, whole=chunk >= len(self.stage.groups))
        if sum(nbytes for _, nbytes in found) == unit.resident:
            yield from found
        else:
            yield Label(module=name, role=SAVED), unit.resident

    def _part(self, name: str, chunk: int) -> StageRegion | None:
        return _named(self.stage.groups[chunk % len(self.stage.groups)], name)

    def _backward(
        self, unit: Unit, name: str, kept: list[int], fresh: bool, site: str, times: tuple[int, int]
    ) -> int | None:
        """A unit's backward; its gradient, or what of it waits for a tied weight's other use."""
        begin_ns, end_ns = times
        rise, left = (unit.backward_peak, unit.gradient) if fresh else (unit.adding_peak, unit.pending)
        early = rise >= left > 0
        label = Label(module=name, role=GRADIENTS, site=site)
        made = self.writer.allocate(left, label, begin_ns) if early else None
        self._transient(rise - left if early else rise, name, site, begin_ns, end_ns)
        for number in kept:
            self.writer.free(number, end_ns)
        return self.writer.allocate(left, label, end_ns) if left and not early else made

    def _transient(self, nbytes: int, name: str, site: str, begin_ns: int, end_ns: int) -> None:
        if nbytes > 0:
            label = Label(module=name, role=WORKING, site=site)
            self.writer.free(self.writer.allocate(nbytes, label, begin_ns), end_ns)


_WORDS = {Work.FORWARD: "forward", Work.BACKWARD: "backward", Work.WEIGHT: "weight half"}


def _chunks(run: Run, stage: Stage, steps: Sequence[ScheduledPass]) -> list[int]:
    """The chunk of each pass, with those that keep everything apart."""
    layout, own = run.layout, len(stage.groups)
    if not run.recompute.whole:
        return [step.chunk for step in steps]
    size = window(
        layout.schedule,
        stage=stage.index,
        stages=layout.pp,
        micro_batches=run.micro_batches if layout.pp > 1 else 1,
        virtual_stages=layout.virtual_stages,
        group=layout.micro_batch_group,
    )
    return [step.chunk for step in apart(steps, own, size, min(run.recompute.whole, size))]


def _spread(total: int, parts: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """A total over the parts that make it up, and what none of them has."""
    found = [(name, nbytes) for name, nbytes in parts if nbytes]
    rest = total - sum(nbytes for _, nbytes in found)
    if rest < 0:
        return [("", total)]
    return [*found, ("", rest)] if rest else found


def _spans(units: Sequence[tuple[Unit, str]], played: PassSlices) -> dict[str, tuple[int, int]]:
    """When each unit of a pass is at work: from its first slice to its last. A unit may be several regions."""
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    halved = played.step is not None and played.step.work is Work.WEIGHT and any(unit.halves for unit, _ in units)
    owner = _owners(units, _names(played.slices, onwards=halved))
    for one in played.slices:
        if one.kind is not Kind.TRANSFER:
            unit = owner[one.name]
            begins.setdefault(unit, one.begin_ns)
            ends[unit] = one.end_ns
    return {name: (begins[name], ends[name]) for _, name in units}


def _names(slices: Sequence[Slice], *, onwards: bool) -> list[str]:
    """Names of regions, in the order of the forward; ``onwards``: no forwards, but in that order."""
    names = list(dict.fromkeys(one.name for one in slices if one.kind is not Kind.TRANSFER))
    return names if onwards or (slices and slices[0].kind is Kind.FORWARD) else names[::-1]


def _owners(units: Sequence[tuple[Unit, str]], regions: Sequence[str]) -> dict[str, str]:
    """The unit of each region: a segment is called "FIRST to LAST"."""
    found: dict[str, str] = {}
    at = 0
    for _, name in units:
        last = name.rpartition(" to ")[2]
        while True:
            found[regions[at]] = name
            at += 1
            if regions[at - 1] == last:
                break
    return found


def _named(chunk: Chunk, name: str) -> StageRegion | None:
    return next((group.part for group in chunk if name in group.names), None)


def _tensors(part: StageRegion, name: str, run: Run, *, whole: bool) -> list[tuple[Label, int]]:
    """Kept storages of a region."""
    kept = kept_by(part.region, "none") if whole else part.kept
    found: dict[str, tuple[Label, int]] = {}
    for entry in part.region.entries(name, kept):
        module = ".".join(filter(None, (entry.layer, entry.path)))
        nbytes = entry.local_storage_bytes(run.layout.mesh_sizes)
        found.setdefault(entry.storage, (Label(module=module, role=entry.role), nbytes))
    return list(found.values())
