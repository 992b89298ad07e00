"""From what was typed to a `Run`: loose text becomes typed here, and what was not given gets its default.

NOTE [ Defaults ]
What is not given is as the model's published code trains it. The GPTs of arXiv 2205.05198 are Megatron's: sequences of
2048, eager attention, a loss over a sharded vocabulary, gradients in buffers from the start. Everything else runs on
PyTorch's own operators, with gradients that appear one by one. Sequence parallelism goes with tensor parallelism, and
a pipeline gets as many micro-batches as it has stages, the fewest that fill it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Final

from jettison.core.errors import UsageError
from jettison.families.config import read_config
from jettison.families.family import kernels_for
from jettison.families.presets import PRESETS, hub_config, is_hub_id, preset, unknown_preset
from jettison.formula.region import refuse_idle
from jettison.predict.fine_tuning_request import frozen_of, packed_of, states_of, tuning_of
from jettison.predict.precision_request import precision_of, with_own_products
from jettison.predict.request_words import given_or, word
from jettison.predict.run_fields import RunRequest
from jettison.spec.frameworks import rule, software
from jettison.spec.kernels import ContextExchange, Dispatcher, Kernels, Loss, Scans, workspaces
from jettison.spec.kernels import kernels as kernel_set
from jettison.spec.layout import Layout, Reshard, Schedule, cut_of, refuse_as_built
from jettison.spec.model import SECOND, Layer, ModelSpec, Pooling, RecordedLayer
from jettison.spec.model_variants import with_mtp
from jettison.spec.precision import Adding, Gradients, Precision, optimizer
from jettison.spec.recompute import MOST, Mode, Recompute, listed
from jettison.spec.run import Run, check_scans

PAPER: Final = "paper"
"""The family of arXiv 2205.05198's GPTs."""
PAPER_SEQUENCE: Final = 2048
LONGEST_DEFAULT: Final = 4096
"""Tokens of a sequence where nothing says how many, and the model could take more."""


TRACED: Final = frozenset({"seq", "micro_batch", "precision", "attention", "optimizer", "recompute"})
"""What can be asked of a model that is built and traced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A run, and which of its fields nobody asked for.

    ``like``: of these, what a framework's rule said: its name, and flags as they would be typed.
    """

    run: Run
    assumed: frozenset[str]
    like: str = ""


def is_live(model: str) -> bool:
    """Is this ``module:factory``, which only Python can look into?"""
    if model in PRESETS or Path(model).exists():
        return False
    module, colon, factory = model.partition(":")
    return bool(colon) and factory.isidentifier() and all(part.isidentifier() for part in module.split("."))


def refuse_for_trace(model: str, request: RunRequest, *, asked: bool, also: tuple[str, ...] = ()) -> None:
    """Can a trace answer this? It sees the module as it is built: one rank, its own kernels and dropout.

    Args:
        asked: a trace was asked for by its flag, and not by the kind of model.
        also: other flags that were given and need the closed form.

    Raises:
        UsageError: no.
    """
    if asked and model in PRESETS:
        raise UsageError(f"--trace builds a model from its config.json, and {model} is a preset: leave --trace away")
    extra = [flag_of(name) for name in request.given() if name not in TRACED] + list(also)
    if extra:
        why = "--trace" if asked and not is_live(model) else f"the live model {model}"
        raise UsageError(
            f"{extra[0]} does not apply to {why}: a trace sees one rank of the module as it is built. "
            "Give a preset or a config.json without --trace"
        )


def flag_of(field: str) -> str:
    """A field as it is typed."""
    return f"--{field.replace('_', '-')}"


def model_spec(model: str, *, live: bool = False) -> ModelSpec:
    """The model that a preset's name, a config.json, its folder or a Hugging Face id stands for.

    Args:
        live: whoever asks would also have taken ``module:factory``.

    Raises:
        UsageError: it is none of them, or it cannot be read.
    """
    if model not in PRESETS:
        path = Path(model)
        if is_hub_id(model):
            return replace(read_config(hub_config(model)), name=model)
        if path.exists() or path.suffix == ".json" or len(path.parts) > 1:
            return read_config(path)
        if live:
            raise unknown_preset(model, "A config.json, its folder or module:factory")
    return preset(model)


def resolve(model: ModelSpec, request: RunRequest) -> Resolved:
    """Fill in the defaults, and before them what a framework's rule says.

    Raises:
        UsageError: a word that is not known, or a run that is none.
    """
    refuse_as_built(model, request.given())
    if request.like is not None:
        return _resolve_like(model, request, request.like)
    if request.capacity_factor is not None and not isfinite(request.capacity_factor):
        raise UsageError(f"got --capacity-factor {request.capacity_factor}; expected a number above 0")
    if request.positions is not None:
        model = _with_positions(model, request.positions)
    kernels = _kernels(model, request)
    tuning, frozen = tuning_of(request), tuple(frozen_of(model, request, model_spec))
    repeated = given_or(request.mtp_use_repeated_layer, False)
    model = with_mtp(model, given_or(request.mtp_num_layers, 0), kernels, repeated=repeated)
    model = with_own_products(model, request, kernels)
    layout = _layout(request, model)
    if layout.deferred_head and kernels.loss in (Loss.FUSED, Loss.CHUNKED, Loss.LISTED, Loss.DPO):
        raise UsageError(
            f"got --deferred-head with --loss {kernels.loss}, which has no gradients of logits that could wait"
        )
    if tuning is not None and not tuning.inputs_need_gradients:
        first = model.layers[0]
        assert isinstance(first, Layer), "recorded models are refused adapters"
        model = replace(model, layers=(replace(first, detached=True), *model.layers[1:]))
    if tuning is not None:
        refuse_idle(model, tuning)
    upfront = Gradients.UPFRONT if kernels.upfront_gradients else Gradients.ONE_BY_ONE
    gradients = upfront if request.gradients is None else _gradients(request.gradients)
    longest = LONGEST_DEFAULT if model.patches is None else model.patches.tokens
    seq = PAPER_SEQUENCE if model.family == PAPER else min(model.max_positions, longest)
    if model.audio is not None:
        seq = model.audio.tokens(model.name, given_or(request.source_seq, SECOND))
    run = Run(
        model=model,
        seq=given_or(request.seq, seq),
        micro_batch=given_or(request.micro_batch, 2 if kernels.loss is Loss.DPO else 1),
        micro_batches=given_or(request.micro_batches, layout.pp),
        layout=layout,
        precision=_apart(precision_of(request, kernels, tuned=tuning is not None), gradients),
        optimizer=optimizer(given_or(request.optimizer, "adamw")),
        kernels=kernels,
        recompute=_recompute(request, model.depth),
        gradients=gradients,
        dropout=given_or(request.dropout, model.dropout),
        capacity_factor=request.capacity_factor,
        imbalance=given_or(request.expert_imbalance, 1.0),
        tp_comm_overlap=given_or(request.tp_comm_overlap, False),
        ep_comm_overlap=given_or(request.ep_comm_overlap, False),
        cuda_graphs=given_or(request.cuda_graphs, False),
        source_seq=_source_length(model, request, given_or(request.seq, seq)),
        stack=None if request.stack is None else software(request.stack),
        adding=Adding.WHOLE if request.accumulation is None else word(Adding, request.accumulation, "accumulation"),
        workspaces=workspaces(given_or(request.workspaces, "none")),
        loader_masks=given_or(request.loader_masks, False),
        keep_batches=given_or(request.keep_batches, False),
        holds_output=given_or(request.holds_output, False),
        packed=packed_of(request),
        tuning=tuning,
        frozen=frozen,
        states_on_host=states_of(request),
    )
    return Resolved(run=run, assumed=frozenset(f.name for f in fields(request)) - set(request.given()))


def run_of(model: str | ModelSpec, request: RunRequest | None = None) -> Run:
    """The run of a described model: what `forecast` and `estimate` work on.

    Args:
        model: a preset's name, a ``config.json`` or its folder, a Hugging Face id, or what `preset` or `read_config`
            gave.
        request: how it is to be trained, as on the command line; what is left out gets its default.

    Raises:
        UsageError: no such model, a word that is not known, a run that is none, or one whose recompute a planner would
            have to decide.
    """
    if request is not None and request.recompute == Mode.AUTO:
        raise UsageError(
            "got recompute='auto', which a planner decides for a budget: give another word, or ask `jettison ledger "
            "--recompute auto --budget`, `jettison plan` or jettison.search"
        )
    spec = model_spec(model) if isinstance(model, str) else model
    return resolve(spec, RunRequest() if request is None else request).run


def _resolve_like(model: ModelSpec, request: RunRequest, name: str) -> Resolved:
    zero = given_or(request.zero, 0)
    said = {
        field: value
        for field, value in rule(name, tp=given_or(request.tp, 1), dp=given_or(request.dp, 1), zero=zero).items()
        if getattr(request, field) is None
    }
    if given_or(request.zero, said.get("zero", 0)) != 3:
        said.pop("reshard_after_forward", None)  # nothing is gathered
    if request.states_on_host is not None and request.gradients is None:
        said["gradients"] = "one-by-one"  # DeepSpeed's buffer of shards is there, too
    if model.head.pooling is not Pooling.NONE or model.audio is not None or model.pair is not None:
        said.pop("loss", None)  # such a head has one loss
    found = resolve(model, replace(request, like=None, **said))
    shown = ", ".join(flag_of(field) + ("" if value is True else f" {value}") for field, value in said.items())
    return replace(found, assumed=found.assumed | frozenset(said), like=f"{name}: {shown}")


def _source_length(model: ModelSpec, request: RunRequest, seq: int) -> int:
    """What an encoder beside a decoder reads: as much as that writes, where its length is not its own."""
    if model.audio is not None:
        return given_or(request.source_seq, SECOND if request.seq is None else 0)
    if model.pair is not None:
        return given_or(request.source_seq, model.pair.tokens)
    if model.source is None:
        return given_or(request.source_seq, 0)
    return given_or(request.source_seq, model.source.longest(seq))


def _with_positions(model: ModelSpec, positions: int) -> ModelSpec:
    """The same model made for longer or shorter sequences."""
    if not model.learned_positions or model.patches is not None:
        raise UsageError(f"got --positions {positions}; {model.name} has no learned positions: leave it away")
    extra = model.position_rows - model.max_positions if model.position_rows else 0
    return replace(model, max_positions=positions, position_rows=positions + extra if extra else 0)


def _layout(request: RunRequest, model: ModelSpec) -> Layout:
    tp, pp, virtual = given_or(request.tp, 1), given_or(request.pp, 1), given_or(request.virtual_stages, 1)
    cut = request.stage_layers
    uneven = () if cut is None else cut_of(cut, model, pp=pp, virtual=virtual)
    reshard = given_or(request.reshard_after_forward, str(Reshard.ALWAYS))
    return Layout(
        tp=tp,
        sp=given_or(request.sp, tp > 1 and model.words and not model.two_stacks),
        cp=given_or(request.cp, 1),
        ep=given_or(request.ep, 1),
        expert_tp=given_or(request.expert_tp, 0),
        pp=pp,
        virtual_stages=virtual,
        micro_batch_group=given_or(request.micro_batch_group, 0),
        deferred_head=given_or(request.deferred_head, 0),
        stage_layers=uneven,
        further=model.further,
        schedule=Schedule.ONE_F_ONE_B if request.schedule is None else word(Schedule, request.schedule, "schedule"),
        dp=given_or(request.dp, 1),
        zero=given_or(request.zero, 0),
        zero_replicas=given_or(request.zero_replicas, 1),
        zero_whole=given_or(request.zero_whole, False),
        gathered_inputs=given_or(request.gathered_inputs, False),
        keeps_stage_outputs=given_or(request.keep_stage_outputs, False),
        keeps_received=given_or(request.keep_received, False),
        stage_buffers=given_or(request.stage_buffers, False),
        reshard=Reshard.ALWAYS if reshard.isdecimal() else word(Reshard, reshard, "reshard-after-forward"),
        reshard_ranks=int(reshard) if reshard.isdecimal() else 0,
        outer_ends=given_or(request.outer_ends, False),
    )


def _kernels(model: ModelSpec, request: RunRequest) -> Kernels:
    if model.recorder is not None:
        fused = any(layer.fused for layer in model.kinds if isinstance(layer, RecordedLayer))
        kernels = replace(kernel_set("huggingface"), declared=())  # recorded weights are in their modules' order
        return kernels.with_attention("flash" if fused else "eager")
    paper = model.family == PAPER
    kernels = kernels_for(model, given_or(request.kernels, "megatron" if paper else "pytorch"))
    kernels = kernels.with_attention(given_or(request.attention, "eager") if paper else request.attention)
    if request.dispatcher is not None:
        kernels = replace(kernels, dispatcher=word(Dispatcher, request.dispatcher, "dispatcher"))
    for name in ("sequential_experts", "deterministic"):
        if getattr(request, name) is not None:
            kernels = replace(kernels, **{name: getattr(request, name)})
    if request.context_exchange is not None:
        exchange = word(ContextExchange, request.context_exchange, "context-exchange")
        kernels = replace(kernels, context_exchange=exchange)
    if request.scans is not None:
        kernels = replace(kernels, scans=word(Scans, request.scans, "scans"))
        check_scans(model, kernels)
    if request.loss is None:
        return kernels
    if model.audio is not None or model.pair is not None:
        does = "aligns text with sound" if model.audio else "holds images against texts"
        raise UsageError(f"got --loss {request.loss}; {model.name} {does}: leave it away")
    if model.head.pooling is not Pooling.NONE:
        raise UsageError(f"got --loss {request.loss}; {model.name} has one prediction a sequence: leave it away")
    return replace(kernels, loss=word(Loss, request.loss, "loss"))


def _recompute(request: RunRequest, layers: int) -> Recompute:
    """A mode, or Megatron's lists of modules, for which its granularity is "selective"."""
    flag, mode = "--recompute-modules", request.recompute
    again = () if request.recompute_modules is None else listed(request.recompute_modules, flag)
    sent = () if request.offload_modules is None else listed(request.offload_modules, "--offload-modules")
    if again and mode not in (None, "selective"):
        raise UsageError(f"got --recompute {mode} and {flag}, which is a mode of its own; leave one of them away")
    found = Recompute.parse(
        f"{Mode.MODULES}:{'+'.join(again)}" if again else given_or(mode, "none"),
        layers=layers,
        offload=given_or(request.offload, False),
        whole=_whole(given_or(request.whole_micro_batches, "0")),
    )
    return replace(found, sent=sent) if sent else found


def _whole(text: str) -> int:
    if text == "most":
        return MOST
    if not text.isdecimal():
        raise UsageError(f"got --whole-micro-batches {text}; expected a whole number of 0 or more, or most")
    return int(text)


def _apart(held: Precision, gradients: Gradients) -> Precision:
    if gradients is not Gradients.ADDED:
        return held
    if held.accumulator is None:
        raise UsageError(
            f"got --gradients added with --precision {held.name}, which has no second buffer that gradients are added "
            "to: give --precision bf16-grad32"
        )
    return replace(held, apart=True)


def _gradients(text: str) -> Gradients:
    words = {"one-by-one": Gradients.ONE_BY_ONE, "upfront": Gradients.UPFRONT, "buckets": Gradients.BUCKETS}
    words |= {"added": Gradients.ADDED, "in-backward": Gradients.IN_BACKWARD}
    if text not in words:
        raise UsageError(f"got --gradients {text!r}; expected one of {', '.join(words)}")
    return words[text]
