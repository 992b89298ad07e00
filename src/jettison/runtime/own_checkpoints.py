"""Checkpointing that a model has of its own: refused, since what is planned would be computed again inside of it.

What a model's forward does with `torch.utils.checkpoint` by itself is not seen here: it is composed, or recorded.
"""

from __future__ import annotations

from typing import Any, Final

from torch import distributed, nn

from jettison.errors import UnsupportedModule

SWITCH: Final = "gradient_checkpointing"
"""As transformers and diffusers name it (`modeling_utils.py`: ``_set_gradient_checkpointing``)."""

_WRAPPERS: tuple[type, ...] = ()
if distributed.is_available():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

    _WRAPPERS = (ActivationWrapper,)  # of checkpoint_wrapper and offload_wrapper


def refuse_checkpointing(name: str, module: Any, when: str = "") -> None:
    """Whether a module checkpoints, or offloads, by a switch or as a wrapper.

    Args:
        name: of the module, for the message.
        when: more words about it.

    Raises:
        UnsupportedModule: it does.
    """
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


def switches(model: nn.Module) -> tuple[Any, ...]:
    """Modules that could be switched."""
    return tuple(module for module in model.modules() if hasattr(module, SWITCH))
