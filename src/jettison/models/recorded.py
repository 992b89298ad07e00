"""A model that nobody has described, recorded: transformers builds it on fake tensors, and a trace fills the record.

One forward is traced for each batch, precision and attention that somebody asks about, and kept. What a trace cannot
know is refused where it is asked: how ranks would share a block, other kernels, another dropout. Recorded kernels are
those of the CPU: a fused attention keeps there what it keeps on a GPU, a dropout mask takes the dtype of what it masks
and not a byte.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from textwrap import shorten
from typing import Any, Final

import torch
from torch import nn

from jettison.capture.blocks import find_blocks, only_blocks
from jettison.capture.fakes import fake_mode
from jettison.capture.model_trace import ModelTrace
from jettison.capture.tracer import trace_model
from jettison.errors import JettisonError, UsageError
from jettison.formula.region import RecordedRegions, RegionRecorder
from jettison.models.batches import batch_for, longest_of, takes_tokens
from jettison.models.huggingface import ConfigRequest, build, class_for, config_of
from jettison.models.recorded_regions import is_chain, regions_of
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import LONGEST_DEFAULT
from jettison.spec.left_out import not_built
from jettison.spec.model import ModelSpec, RecordedLayer
from jettison.spec.precision import Precision, precision
from jettison.spec.run import Scene

MOST_POSITIONS: Final = 2**31
"""The limit where positions have none."""
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class RecordedConfig(RegionRecorder):
    """The blocks of a ``config.json``.

    Args:
        text: the configuration, as JSON with sorted keys.
        takes_tokens: its batch is of sequences, and not of images, whose size the configuration fixes.
        attention: as somebody asked for it; None: as transformers builds it.
    """

    kind: str
    text: str
    takes_tokens: bool = True
    attention: str | None = None

    @property
    def words(self) -> str:
        """Name what is recorded, for a message."""
        return f"the architecture {self.kind}"

    def regions(self, scene: Scene) -> RecordedRegions:
        """All regions of a scene; one trace for all scenes that it cannot tell apart."""
        return _recorded(self, self.case(scene.seq, scene.micro_batch, scene.precision))[0]

    def case(self, seq: int, micro_batch: int, precision: Precision) -> _Case:
        """Return the key of a region signature's trace.

        Raises:
            UsageError: a precision that no trace has.
        """
        if precision.product is not None:
            raise UsageError(
                f"got --precision {precision.name}; the blocks of {self.words} are recorded in 16 or 32 bits"
            )
        return _Case(
            seq=seq if self.takes_tokens else 0,
            micro_batch=micro_batch,
            parameter=precision.parameter,
            compute=precision.compute,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """Key of a trace."""

    seq: int
    micro_batch: int
    parameter: str
    compute: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """Facts of the model from its trace."""

    firsts: tuple[int, ...]  # by call, the first that is like it
    classes: tuple[str, ...]  # by call, of its module
    hidden: int
    seq: int
    attends: frozenset[int]
    fused: frozenset[int]
    chained: bool
    left_out: tuple[str, ...]


@lru_cache(maxsize=64)
def _recorded(source: RecordedConfig, case: _Case) -> tuple[RecordedRegions, _Facts]:
    trace = _trace(source, case)
    regions = regions_of(trace)
    firsts: dict[int, int] = {}
    for index, region in enumerate(regions.blocks):
        firsts.setdefault(id(region), index)
    classes = tuple(type(trace.fake_model.get_submodule(call.name)).__name__ for call in trace.calls)
    stream = regions.before.output.shape
    facts = _Facts(
        firsts=tuple(firsts[id(region)] for region in regions.blocks),
        classes=classes,
        hidden=stream[-1],
        seq=stream[-2] if len(stream) > 2 else 1,
        attends=_calls_with(trace, "softmax", "attention"),
        fused=_calls_with(trace, "_attention"),
        chained=is_chain(trace),
        left_out=tuple(_idle(trace)),
    )
    return regions, facts


def _calls_with(trace: ModelTrace, *words: str) -> frozenset[int]:
    """Calls of blocks that run an op with one of these in its name."""
    found = {
        key for key, cls in trace.classes.items() for op in cls.trace.program.ops for word in words if word in op.name
    }
    return frozenset(index for index, call in enumerate(trace.calls) if call.class_key in found)


def _idle(trace: ModelTrace) -> list[str]:
    """Parts of the model with weights that no op of the forward reads."""
    model = trace.fake_model
    run = {id(p) for call in trace.calls for p in model.get_submodule(call.name).parameters()}
    read = {trace.root.names[b] for op in trace.root.program.ops for b in op.inputs if b in trace.root.names}
    run |= {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in read}
    idle: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in run:
            part = _part(model, name, run)
            idle[part] = idle.get(part, 0) + parameter.numel()
    return [
        f"{part} ({count:,} parameters) does not take part in a batch of this kind: its weights, gradients and "
        "optimizer state are counted, what it would save and compute is not"
        for part, count in idle.items()
    ]


def _part(model: nn.Module, name: str, run: set[int]) -> str:
    """The outermost module of a parameter that has nothing in it that runs."""
    pieces = name.split(".")
    for length in range(1, len(pieces)):
        part = ".".join(pieces[:length])
        if not any(id(p) in run for p in model.get_submodule(part).parameters()):
            return part
    return name


def _trace(source: RecordedConfig, case: _Case) -> ModelTrace:
    config = config_of(json.loads(source.text), source.kind)
    asked = ConfigRequest(seq=case.seq or None, micro_batch=case.micro_batch, attention=source.attention)
    mode = fake_mode(allow_non_fake_inputs=True)
    model = build(config, asked, mode, dtype=DTYPES[case.parameter])
    batch = batch_for(model, config, asked)
    regions = None if find_blocks(model) else only_blocks(model)
    with torch.autocast("cpu", DTYPES[case.compute], enabled=case.compute != case.parameter):
        try:
            return trace_model(model, batch, mode=mode, regions=regions)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:  # transformers' own code
            if isinstance(error, JettisonError):
                raise
            why = shorten(" ".join(str(error).split()), 200, placeholder=" ...")
            raise UsageError(
                f"{type(model).__name__} cannot be recorded: its forward fails ({type(error).__name__}: {why})"
            ) from error


def recorded_model(values: Mapping[str, Any], request: RunRequest, *, name: str) -> ModelSpec:
    """The model that a decoded ``config.json`` stands for, with blocks as a trace has them.

    Args:
        request: decides the batch of the first trace, so that the answer needs no second one.

    Raises:
        UsageError: transformers does not know it, cannot build it, or it cannot be recorded.
    """
    kind = str(values.get("model_type"))
    config = config_of(values, name)
    cls = class_for(config)
    tokens = takes_tokens(cls)
    if not tokens and request.seq is not None:
        raise UsageError(f"--seq does not apply to {name}: its configuration says how long its input is")
    source = RecordedConfig(
        kind=kind, text=json.dumps(dict(values), sort_keys=True), takes_tokens=tokens, attention=request.attention
    )
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    longest = longest_of(text) or MOST_POSITIONS
    case = source.case(
        min(longest, LONGEST_DEFAULT) if request.seq is None else request.seq,
        request.micro_batch or 1,
        precision(request.precision or "bf16"),
    )
    _, facts = _recorded(source, case)
    heads = _number(text, "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
    width = heads * (_number(text, "head_dim", "d_kv") or facts.hidden // max(1, heads))
    causal = cls.__name__.endswith(("ForCausalLM", "LMHeadModel"))
    layers = tuple(
        RecordedLayer(
            recorder=source,
            call=first,
            kind=facts.classes[index],
            causal=causal,
            fused=index in facts.fused,
            chained=facts.chained,
            attended_width=width if index in facts.attends else 0,
        )
        for index, first in enumerate(facts.firsts)
    )
    return ModelSpec(
        name=name,
        family=kind,
        hidden=facts.hidden,
        vocab=_number(text, "vocab_size") or _number(config, "num_labels") or 1,
        layers=layers,
        final_norm=None,
        max_positions=longest if tokens else facts.seq,
        left_out=(
            f"{kind} is recorded by a trace of transformers' code on the CPU's kernels",
            *facts.left_out,
            *not_built(values, _inner(values)),
        ),
    )


def _inner(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration."""
    found = values.get("text_config")
    return found if isinstance(found, Mapping) else values


def _number(config: Any, *names: str) -> int:
    """The first of these that is a whole number; 0: none."""
    for name in names:
        with contextlib.suppress(Exception):  # a key that differs from layer to layer may not be asked for
            found = getattr(config, name, None)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    return 0
