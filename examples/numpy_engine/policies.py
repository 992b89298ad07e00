"""Plans: what is kept between forward and backward, which steps are recomputed, and what is offloaded to CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .network import Network


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Each unit is a run of steps that are recomputed together when the backward of the last of them begins.

    ``to_the_end`` runs all of a unit, as a wrapper does that knows nothing of what is inside. Backward asks only for
    what its ops read, so that the last matmul of a unit need not run: torch.utils.checkpoint stops there by default.
    """

    name: str
    keep: frozenset[str]
    units: tuple[range, ...] = ()
    to_the_end: bool = False
    host: frozenset[str] = frozenset()

    def again(self, network: Network, unit: range) -> tuple[int, ...]:
        """The recomputed steps of a unit: what makes values that its backward misses, and what those need."""
        if self.to_the_end:
            return tuple(unit)
        missing = {name for number in unit for name in network.steps[number].reads} - self.keep
        chosen: list[int] = []
        for number in reversed(unit):
            step = network.steps[number]
            if step.output in missing:
                chosen.append(number)
                missing |= set(step.inputs) - self.keep
        return tuple(reversed(chosen))


def reads_of(network: Network, numbers: range) -> frozenset[str]:
    """What the backward of these steps reads."""
    return frozenset(name for number in numbers for name in network.steps[number].reads)


def input_of(network: Network, layer: range) -> str:
    """What a layer is called with."""
    return network.steps[layer.start].inputs[0]


def keep_all(network: Network) -> Plan:
    """No recomputation."""
    return Plan(name="none", keep=reads_of(network, range(len(network.steps))))


def every(network: Network, k: int, *, to_the_end: bool = False) -> Plan:
    """Segments of k layers: the input of each is kept."""
    if not 1 <= k <= len(network.layers):
        raise ValueError(f"segments of {k} layers: choose k from 1 to {len(network.layers)}, the number of layers")
    firsts = network.layers[::k]
    stops = [*(layer.start for layer in firsts[1:]), len(network.steps)]
    units = tuple(range(layer.start, stop) for layer, stop in zip(firsts, stops, strict=True))
    keep = frozenset(input_of(network, layer) for layer in firsts)
    return Plan(name=f"every:{k}" if k > 1 else "full", keep=keep, units=units, to_the_end=to_the_end)


def block(network: Network, n: int, *, to_the_end: bool = False) -> Plan:
    """The first n layers are checkpointed one by one, the others keep everything: as many as memory asks for."""
    if not 0 <= n <= len(network.layers):
        raise ValueError(f"{n} checkpointed layers: choose n from 0 to {len(network.layers)}, the number of layers")
    units, rest = network.layers[:n], network.layers[n:]
    keep = frozenset(input_of(network, layer) for layer in units)
    keep = keep.union(*(reads_of(network, layer) for layer in rest))
    return Plan(name=f"block:{n}", keep=keep, units=units, to_the_end=to_the_end)


def selective(network: Network, *, to_the_end: bool = False) -> Plan:
    """The attention core is dropped: what is s x s. Its inputs q, k and v are kept, as is everything else."""
    if not network.core:
        raise ValueError("selective drops what is s x s, and this network shows none: choose every or block")
    core = frozenset(f"{layer}.{name}" for layer in range(len(network.layers)) for name in network.core)
    makes = network.names
    units = tuple(range(makes[f"{at}.scores"], makes[f"{at}.mixed"] + 1) for at in range(len(network.layers)))
    return Plan(name="selective", keep=keep_all(network).keep - core, units=units, to_the_end=to_the_end)


def homes(network: Network, plan: Plan) -> dict[str, int]:
    """For each kept value, the layer in whose backward it is wanted first; its copy leaves after that one's forward."""
    found: dict[str, int] = {}
    for number, layer in enumerate(network.layers):
        for name in (reads_of(network, layer) | {input_of(network, layer)}) & plan.keep:
            found[name] = number
        for unit in plan.units:  # recomputed from its first layer's input, when its last layer's backward begins
            if unit.stop - 1 in layer:
                found[input_of(network, unit)] = number
    return found


def offloaded(network: Network, plan: Plan) -> Plan:
    """All kept values offloaded but the last layer's, whose backward comes at once."""
    last = len(network.layers) - 1
    host = frozenset(name for name, layer in homes(network, plan).items() if layer < last)
    return replace(plan, name=f"{plan.name} + host", host=host)
