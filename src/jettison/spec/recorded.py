"""What cannot be asked of a model whose blocks were recorded, in words: in one place, for all who refuse it."""

from __future__ import annotations

from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.model import ModelSpec

AS_BUILT: Final = frozenset(
    {
        "dropout",
        "kernels",
        "loss",
        "capacity_factor",
        "expert_imbalance",
        "dispatcher",
        "sequential_experts",
        "deterministic",
        "gathered_inputs",
        "tp_comm_overlap",
        "context_exchange",
        "scans",
        "expert_tp",
        "positions",
        "source_seq",
        "like",
        "lora",
        "base",
        "input_gradients",
        "packed",
        "reference",
        "reward",
        "mtp_num_layers",
        "recompute_modules",
        "offload_modules",
    }
)
"""What a described model is told, and a recorded one has as it is built."""


def uncut(model: ModelSpec) -> str:
    """Why nothing may cut its blocks, and what may be asked instead."""
    recorder = model.recorder
    assert recorder is not None, "a described model is cut as its description says"
    return (
        f"the blocks of {recorder.words} are recorded as they are built, and nothing says how ranks would share one. "
        "--dp, --zero, --pp, --recompute, --offload and --budget apply"
    )


def refuse_as_built(model: ModelSpec, given: tuple[str, ...]) -> None:
    """Is something asked that the recording has already?

    Raises:
        UsageError: yes.
    """
    for name in given:
        if model.recorder is not None and name in AS_BUILT:
            raise UsageError(
                f"--{name.replace('_', '-')} does not apply to {model.name}: the blocks of {model.recorder.words} are "
                "recorded as they are built. Leave it away"
            )
