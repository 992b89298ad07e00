"""Checkpoints of parts of a layer, by Megatron's names for them, as policies of layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jettison.export.policy import Action, LayerPolicy, kept_whole
from jettison.export.subject import Decision
from jettison.solve.modules import computed_again, sent


def offloading(policy: LayerPolicy, modules: Iterable[str]) -> LayerPolicy:
    """Offload what these modules save."""
    chosen = tuple(modules)
    moved = sent(policy.program, policy.kept, chosen)
    if not moved:
        return policy
    words = f"{policy.words or policy.action} and {', '.join(chosen)} on the host"
    return replace(policy, moved=moved, words=words)


def by_modules(decision: Decision, modules: Iterable[str]) -> LayerPolicy:
    """A layer whose parts of these names are computed again."""
    found = computed_again(decision.program, tuple(modules))
    if not found.modules:
        return kept_whole(decision)
    return LayerPolicy(
        decision=decision,
        action=Action.SELECT,
        kept=found.kept,
        again=tuple(sorted(found.ops)),
        words=", ".join(found.modules),
    )
