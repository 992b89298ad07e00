"""One training step under a plan: forward, what is freed, what is recomputed, backward. A dry run does it on ghosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from .clock import Clock, Machine
from .meter import GRADIENTS, PARAMETERS, VALUES, Array, Ghost, Meter
from .network import Network, Step
from .policies import Plan, homes, input_of


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a step. Bytes are counted, not computed; seconds are the clock's."""

    plan: str
    loss: float
    gradients: Mapping[str, Array] = field(repr=False)
    input_gradient: Array = field(repr=False)
    held: Mapping[str, int] = field(repr=False)
    """Values on the device between forward and backward, and their bytes."""
    host_bytes: int
    peak_values_bytes: int
    """The most values of forward that were there at one moment, with those that ran again and those on their way."""
    peak_bytes: int
    """The same with parameters and gradients."""
    forward_flops: int
    again_flops: int
    backward_flops: int
    seconds: float
    waited_seconds: float
    history_bytes: tuple[int, ...] = field(repr=False)
    """Values of forward that are there after each step, and after the backward of each."""

    @property
    def held_bytes(self) -> int:
        return sum(self.held.values())

    @property
    def overhead(self) -> float:
        """FLOPs that ran again, as a share of the step's own."""
        return self.again_flops / (self.forward_flops + self.backward_flops)


def train_step(
    network: Network, plan: Plan, arrays: tuple[dict[str, Array], Array, Array], machine: Machine | None = None
) -> Outcome:
    """``arrays`` are a network's ``drawn`` or ``ghosts``. The loss is half the mean square of what is missed."""
    run = _Run(network, plan, arrays, machine or Machine())
    loss, grad = run.forward()
    input_gradient = run.backward(grad)
    meter = run.meter
    return Outcome(
        plan=plan.name,
        loss=loss,
        gradients=run.parameter_gradients,
        input_gradient=input_gradient,
        held=run.held,
        host_bytes=run.host_bytes,
        peak_values_bytes=meter.peak[VALUES],
        peak_bytes=meter.peak_bytes,
        forward_flops=meter.flops["forward"],
        again_flops=meter.flops["again"],
        backward_flops=meter.flops["backward"],
        seconds=run.clock.now,
        waited_seconds=run.clock.waited_seconds,
        history_bytes=tuple(run.history_bytes),
    )


def dry_run(network: Network, plan: Plan, machine: Machine | None = None) -> Outcome:
    """The same code on ghosts: bytes, FLOPs and seconds of networks of any size."""
    return train_step(network, plan, network.ghosts(), machine)


class _Run:
    def __init__(
        self, network: Network, plan: Plan, arrays: tuple[dict[str, Array], Array, Array], machine: Machine
    ) -> None:
        self.network, self.plan = network, plan
        self.parameters, x, self.target = arrays
        self.meter, self.clock = Meter(), Clock(machine)
        for parameter in self.parameters.values():
            self.meter.made(parameter, PARAMETERS)
        self.values: dict[str, Array] = {"x0": self.meter.made(x, VALUES)}
        self.shapes = {"x0": x.shape}
        self.grads: dict[str, Array] = {}
        self.parameter_gradients: dict[str, Array] = {}
        self.host: dict[str, Array] = {}
        self.held: dict[str, int] = {}
        self.host_bytes = 0
        self.history_bytes: list[int] = []
        self.by_home: dict[int, list[str]] = defaultdict(list)
        if plan.host:
            for name, layer in sorted(homes(network, plan).items()):
                if name in plan.host:
                    self.by_home[layer].append(name)
        self.let_go_after = _uses_of_backward(network, plan)

    def forward(self) -> tuple[float, Array]:
        """The loss, and the gradient of the last value."""
        last_use = {name: number for number, step in enumerate(self.network.steps) for name in step.inputs}
        ends = {layer.stop - 1: number for number, layer in enumerate(self.network.layers)}
        for number, step in enumerate(self.network.steps):
            self._compute(step, "forward")
            for name in {*step.inputs} - self.plan.keep:
                if last_use[name] == number:
                    del self.values[name]
            if number in ends:
                self._send(ends[number])
            self.history_bytes.append(self.meter.live[VALUES])
        found = self._loss(self.values.pop(self.network.steps[-1].output))
        self.held = {name: value.nbytes for name, value in self.values.items()}
        self.host_bytes = sum(value.nbytes for value in self.host.values())
        return found

    def backward(self, grad: Array) -> Array:
        """The gradient of the network's input; those of parameters are gathered on the way."""
        self.grads[self.network.steps[-1].output] = grad
        del grad
        units = {unit.stop - 1: unit for unit in self.plan.units}
        ends = {layer.stop - 1: number for number, layer in enumerate(self.network.layers)}
        for number in reversed(range(len(self.network.steps))):
            if number in ends:
                self._fetch(ends[number])
            if number in units:
                self._again(units[number])
            self._differentiate(self.network.steps[number])
            self.history_bytes.append(self.meter.live[VALUES])
            for name in self.let_go_after[number]:
                self.values.pop(name, None)
        return self.grads.pop("x0")

    def _compute(self, step: Step, phase: str) -> None:
        if missing := [name for name in step.inputs if name not in self.values]:
            raise ValueError(
                f"{step.output} is made of {missing}, which the plan {self.plan.name!r} neither keeps nor makes"
            )
        inputs = [*(self.values[name] for name in step.inputs), *(self.parameters[name] for name in step.parameters)]
        shapes = [value.shape for value in inputs]
        dtype = "bool" if not inputs else self.network.dtype
        is_ghost = isinstance(self.target, Ghost)
        output = Ghost(step.op.shape(*shapes), dtype) if is_ghost else step.op.forward(*inputs)
        self.meter.made(output, VALUES)
        self.shapes[step.output] = output.shape
        self.meter.flops[phase] += step.op.flops(*shapes)
        self.clock.work(step.op.flops(*shapes), sum(value.nbytes for value in inputs) + output.nbytes)
        self.values.setdefault(step.output, output)

    def _loss(self, y: Array) -> tuple[float, Array]:
        if isinstance(self.target, Ghost) or isinstance(y, Ghost):
            return float("nan"), self.meter.made(Ghost(y.shape, y.dtype), GRADIENTS)
        away = y - self.target
        return float(0.5 * np.mean(away**2)), self.meter.made(away / away.size, GRADIENTS)

    def _again(self, unit: range) -> None:
        """Makes what the backward of a unit reads and the plan did not keep. What only leads there goes at once."""
        numbers = self.plan.again(self.network, unit)
        reads = {name for number in unit for name in self.network.steps[number].reads} | self.plan.keep
        last_use = {name: number for number in numbers for name in self.network.steps[number].inputs}
        for number in numbers:
            step = self.network.steps[number]
            self._compute(step, "again")
            for name in {*step.inputs, step.output} - reads:
                if last_use.get(name, number) == number:
                    self.values.pop(name, None)

    def _differentiate(self, step: Step) -> None:
        if step.output not in self.grads:
            return  # a mask
        grad = self.grads.pop(step.output)
        read = [*(self.values[name] for name in step.reads), *(self.parameters[name] for name in step.parameters)]
        inputs = step.inputs[: step.op.gradients]
        names = [*inputs, *step.parameters]
        shapes = [*(self.shapes[name] for name in inputs), *(self.parameters[name].shape for name in step.parameters)]
        made: Iterable[Array]
        if isinstance(grad, Ghost):
            made = [grad] * len(names) if not step.reads else [Ghost(shape, grad.dtype) for shape in shapes]
        else:
            made = step.op.backward(grad, *read)
        operands = [*(self.shapes[n] for n in step.inputs), *(self.parameters[n].shape for n in step.parameters)]
        flops = step.op.backward_flops(*operands)
        self.meter.flops["backward"] += flops
        moved_bytes = grad.nbytes + sum(value.nbytes for value in read)
        del grad, read
        for name, part in zip(names, made, strict=True):
            moved_bytes += part.nbytes
            self._gather(name, part)
        self.clock.work(flops, moved_bytes)

    def _gather(self, name: str, part: Array) -> None:
        if name in self.parameters:
            self.parameter_gradients[name] = self.meter.made(part, PARAMETERS)
            return
        self.meter.made(part, GRADIENTS)
        before = self.grads.get(name)
        if before is not None:
            part = Ghost(part.shape, part.dtype) if isinstance(part, Ghost) else before + part
            self.meter.made(part, GRADIENTS)
        self.grads[name] = part

    def _send(self, layer: int) -> None:
        """Copies of this layer's values leave; those of the layer before must have arrived, and go from the device."""
        for name in self.by_home[layer]:
            self.clock.copy(name, self.values[name].nbytes)
        for name in self.by_home[layer - 1]:
            self.clock.wait(name)
            self.host[name] = _copy(self.values.pop(name))

    def _fetch(self, layer: int) -> None:
        """Copies for the layer before set out; this layer's must be there."""
        for name in self.by_home[layer - 1]:
            self.values[name] = self.meter.made(_copy(self.host.pop(name)), VALUES)
            self.clock.copy(name, self.values[name].nbytes)
        for name in self.by_home[layer]:
            self.clock.wait(name)


def _copy(value: Array) -> Array:
    return Ghost(value.shape, value.dtype) if isinstance(value, Ghost) else value.copy()


def _uses_of_backward(network: Network, plan: Plan) -> dict[int, list[str]]:
    """By the number of a step: values that nothing wants once its backward is done."""
    last: dict[str, int] = {}
    for number, step in enumerate(network.steps):
        for name in step.reads:
            last[name] = min(last.get(name, number), number)
    for unit in plan.units:
        name = input_of(network, unit)
        last[name] = min(last.get(name, unit.stop - 1), unit.stop - 1)
    found: dict[int, list[str]] = defaultdict(list)
    for name, number in last.items():
        found[number].append(name)
    return found
