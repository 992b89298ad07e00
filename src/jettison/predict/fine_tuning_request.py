"""Of a request, what people ask who fine-tune: adapters, frozen models, states on the host, packed documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from jettison.core.errors import UsageError
from jettison.predict.request_words import given_or, word
from jettison.spec.model import ModelSpec
from jettison.spec.states_on_host import StatesOnHost, states_on_host
from jettison.spec.tuning import BASE, SAME, Base, FrozenModel, FrozenWords, Role, Tuning, When

if TYPE_CHECKING:
    from jettison.predict.run_fields import RunRequest


def tuning_of(request: RunRequest) -> Tuning | None:
    """Adapters, where they are asked for."""
    if request.lora is None:
        for name in ("base", "input_gradients"):
            if getattr(request, name) is not None:
                raise UsageError(
                    f"got --{name.replace('_', '-')} without adapters, where nothing is frozen; give --lora r=16 as "
                    "well"
                )
        return None
    again = given_or(request.recompute, "none") != "none"
    return Tuning.parse(
        request.lora,
        base=Base.PLAIN if request.base is None else word(Base, request.base, "base"),
        inputs_need_gradients=given_or(request.input_gradients, again),
    )


def frozen_of(policy: ModelSpec, request: RunRequest, named: Callable[[str], ModelSpec]) -> Iterator[FrozenModel]:
    """Frozen models beside the policy.

    Args:
        named: the model that a name or a path stands for.

    Raises:
        UsageError: a word that is not known.
    """
    for role in Role:
        text: str | None = getattr(request, role)
        if text is None:
            continue
        words = FrozenWords.parse(text, f"--{role}")
        if words.model == BASE and (request.lora is None or role is Role.REWARD or words.dtype or words.sharded):
            raise UsageError(
                f"got --{role} {text}; base is the policy with its adapters switched off: --reference base, with --lora"
            )
        model = policy if words.model == SAME else None if words.model == BASE else named(words.model)
        if model is not None and model.recorder is not None:
            raise UsageError(f"got --{role} {text}; the blocks of {model.name} are recorded, not described")
        yield FrozenModel(
            role=role,
            model=model,
            dtype=words.dtype,
            sharded=given_or(words.sharded, True),
            when=given_or(words.when, When.AFTER if role is Role.REFERENCE else When.BEFORE),
        )


def packed_of(request: RunRequest) -> int:
    """Tokens of a document; 0: sequences are one.

    Raises:
        UsageError: fewer than one.
    """
    if request.packed is not None and request.packed < 1:
        raise UsageError(f"got --packed {request.packed}; expected tokens of a document, 1 or more")
    return given_or(request.packed, 0)


def states_of(request: RunRequest) -> StatesOnHost:
    """Whose way of keeping states on the host.

    Raises:
        UsageError: the framework does not do it under this layout.
    """
    rule = states_on_host(given_or(request.states_on_host, "none"))
    zero, why = given_or(request.zero, 0), ""
    if rule.keeps_buffer and zero < 2:
        why = f"--zero {zero}; ZeRO-Offload is described for --zero 2 and 3"
    elif rule.moves_parameters and zero < 3:
        why = f"--zero {zero}; shards of parameters are there under --zero 3"
    elif rule.steps_there and zero in (1, 2) and not rule.keeps_buffer:
        why = f"--zero {zero}; give --zero 3, or one device"
    elif rule.frees_gradients and given_or(request.pp, 1) > 1:
        why = f"--pp {request.pp}; no rule says when a stage's gradients go"
    if why:
        raise UsageError(f"got --states-on-host {rule} with {why}")
    return rule
