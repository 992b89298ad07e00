"""From what was typed to a model and its batch: a live model (``module:factory``), or a Hugging Face ``config.json``.

Loose text becomes typed here and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from jettison.capture.fake_copies import fake_mode
from jettison.capture.model_trace import LossFn, ModelTrace
from jettison.capture.tracer import trace_model
from jettison.core.errors import UsageError
from jettison.core.objects import module_of
from jettison.families.presets import PRESETS, hub_config, is_hub_id
from jettison.models.huggingface import ConfigRequest, batch_for, build, read_config
from jettison.spec.precision import Optimizer

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adamw-deepspeed": torch.optim.AdamW,
    "adamw-foreach": partial(torch.optim.AdamW, foreach=True),
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "none": None,
}
"""Torch's own, which step on the traced model."""
EXPECTED = (
    "module:factory (a function that returns a model, (model, batch) or (model, batch, loss_fn)), "
    "or a path to a Hugging Face config.json or its folder"
)


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A request for a live model. None: as the factory or config says. Raise `UsageError` for a senseless value."""

    model: str
    seq: int | None = None
    micro_batch: int | None = None
    precision: str | None = None
    attention: str | None = None
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for name in ("seq", "micro_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"got {name.replace('_', '-')} {value}; expected 1 or more")
        if self.optimizer not in OPTIMIZERS:
            described = self.optimizer in set(Optimizer)
            more = ", whose step is described and not run: a preset, or a config.json that is not traced, takes it"
            raise UsageError(
                f"got the optimizer {self.optimizer!r}{more if described else ''}; a traced model's step takes one of "
                f"{', '.join(OPTIMIZERS)}"
            )

    def document(self) -> dict[str, Any]:
        """Return the request as a plan's document has it: enough to plan again, from any folder if it is a file."""
        path = Path(self.model)
        return asdict(self) | {"model": str(path.resolve()) if path.exists() else self.model}

    @classmethod
    def from_document(cls, document: Any) -> ModelRequest:
        """Read `document` back. Raise `UsageError` if it is none."""
        names = {f.name for f in fields(cls)}
        if not isinstance(document, Mapping) or not isinstance(document.get("model"), str):
            raise UsageError("the plan does not say how its model was made (key made_by); give --model MODEL")
        try:
            return cls(**{name: value for name, value in document.items() if name in names})
        except TypeError as error:
            raise UsageError(f"the plan's made_by cannot be read: {error}") from error


@dataclass(kw_only=True)
class Loaded:
    """A model in training mode, one batch of its, and how to make the loss. Fake models come with their mode."""

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None = None
    mode: FakeTensorMode | None = None

    def trace(self) -> ModelTrace:
        return trace_model(self.model, self.batch, loss_fn=self.loss_fn, mode=self.mode)


def load(request: ModelRequest, *, fake: bool) -> Loaded:
    """Make the model and its batch. ``fake``: where the model comes from a config, build it of fake tensors: no weight
    is ever allocated; a factory is called as it is. Raise `UsageError` if there is none, or a flag does not apply.
    """
    path = Path(request.model)
    if path.exists() or is_hub_id(request.model):
        return _from_config(request, path if path.exists() else hub_config(request.model), fake=fake)
    if request.model in PRESETS:
        raise UsageError(f"{request.model} is a preset, a description that no module is made from; expected {EXPECTED}")
    module, colon, factory = request.model.partition(":")
    if not colon or not factory.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        kind = "no such file" if "/" in request.model or request.model.endswith(".json") else "not a model"
        raise UsageError(f"{request.model!r} is {kind}; expected {EXPECTED}")
    return _from_factory(request)


def optimizer_for(request: ModelRequest, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer that was asked for, with its own defaults and a learning rate that keeps random weights sane."""
    make = OPTIMIZERS[request.optimizer]
    trainable = [p for p in model.parameters() if p.requires_grad]
    return None if make is None else make(trainable, lr=1e-4)


def _from_config(request: ModelRequest, path: Path, *, fake: bool) -> Loaded:
    config = read_config(path)
    asked = ConfigRequest(
        seq=request.seq, micro_batch=request.micro_batch, precision=request.precision, attention=request.attention
    )
    mode = fake_mode(allow_non_fake_inputs=True) if fake else None
    model = build(config, asked, mode)
    return Loaded(model=model, batch=batch_for(model, config, asked), mode=mode)


def _from_factory(request: ModelRequest) -> Loaded:
    for name in ("precision", "attention"):
        if getattr(request, name) is not None:
            raise UsageError(f"--{name} does not apply to {request.model}: the factory decides it")
    model, batch, loss_fn = made_by(request.model)
    if batch is not None:
        for name in ("seq", "micro_batch"):
            if getattr(request, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} does not apply to {request.model}: it returned its own batch"
                )
        return Loaded(model=model.train(), batch=batch, loss_fn=loss_fn)
    config = getattr(model, "config", None)
    if config is None:
        raise UsageError(f"{request.model} returned a model without a batch; return (model, batch)")
    asked = ConfigRequest(seq=request.seq, micro_batch=request.micro_batch)
    return Loaded(model=model.train(), batch=batch_for(model, config, asked))


def made_by(factory: str) -> tuple[nn.Module, Any, LossFn | None]:
    """A model of ``module:factory``, its batch and loss, or None. `UsageError` if it returns something else."""
    made = named_function(factory)()
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        got = ", ".join(type(part).__name__ for part in parts)
        raise UsageError(f"{factory} returned ({got}); expected a model, (model, batch) or (model, batch, loss_fn)")
    return (*parts, None, None)[:3]


def named_function(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` names, also in the working directory. Raise `UsageError` if none is."""
    module, function = module_of(name, "expected module:function")
    made: Any = getattr(module, function, None)
    if not callable(made):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        has = f"has no function {function!r}; it has {', '.join(names[:8]) or 'none'}"
        raise UsageError(f"{name!r}: {module.__name__} {has}")
    return made
