"""Resolve a request to a `Run`: validate its text, and fill in defaults.

NOTE [ Defaults ]
Defaults are those of the model's published code. The GPTs of arXiv 2205.05198 are Megatron's: sequences of 2048, eager
attention, a loss over a sharded vocabulary, gradients in permanent buffers. All other models run on PyTorch's own
operators, with gradients allocated one by one. Sequence parallelism is on with tensor parallelism, and a pipeline has
as many micro-batches as stages, the fewest that fill it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Any, Final, TypeVar

from jettison.core.errors import UsageError
from jettison.families.config import read_config
from jettison.families.family import kernels_for, model_code
from jettison.families.presets import OWN_RUNS, PRESETS, hub_config, is_hub_id, preset, unknown_preset
from jettison.formula.region import refuse_idle
from jettison.request.options import OF_FSDP, RunRequest
from jettison.spec.anchor import read_anchor
from jettison.spec.fine_tuning import BASE, SAME, Base, FrozenModel, FrozenModelOptions, Role, Tuning, Upcast, When
from jettison.spec.fp8 import Fp8Recipe, fp8_recipe
from jettison.spec.frameworks import rule, software
from jettison.spec.kernels import FORMER_VALUES, Kernels, Loss, workspaces
from jettison.spec.kernels import kernels as kernel_set
from jettison.spec.layout import GradientSync, Layout, Reshard, Schedule, ZeroBuckets, cut_of, refuse_as_built
from jettison.spec.model import SECOND, Layer, ModelSpec, Pooling, RecordedLayer
from jettison.spec.model_variants import with_mtp, with_quant_recipe, with_starts
from jettison.spec.precision import (
    Accumulation,
    Gradients,
    OptimizerOffload,
    Precision,
    optimizer,
    optimizer_offload,
    precision,
)
from jettison.spec.recompute import MOST, Mode, Recompute, listed
from jettison.spec.run import Run, check_scans

LONGEST_DEFAULT: Final = 4096
"""Default sequence length, of models with at least as many positions."""

TRACED: Final = frozenset({"seq", "micro_batch", "precision", "attention", "optimizer", "recompute"})
"""Fields of a request that apply to a traced model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A run, and the names of its fields that have defaults.

    ``like``: framework preset and its defaults as flags.
    """

    run: Run
    assumed: frozenset[str]
    like: str = ""


_T = TypeVar("_T")
_Word = TypeVar("_Word", bound=StrEnum)


def given_or(value: _T | None, default: _T) -> _T:
    """Return a value, or its default for None."""
    return default if value is None else value


def word(default: _Word, text: str | None, name: str) -> _Word:
    """Return the value of a flag's word, with hyphens for spaces, or its default for None. `UsageError` for others."""
    if text is None:
        return default
    text, known = FORMER_VALUES.get(name, {}).get(text, text), {each.replace(" ", "-"): each for each in type(default)}
    if text not in known:
        raise UsageError(f"got --{name} {text!r}; expected one of {', '.join(known)}")
    return known[text]


def is_live(model: str) -> bool:
    """Whether a model is given as ``module:factory``."""
    if model in PRESETS or Path(model).exists():
        return False
    module, colon, factory = model.partition(":")
    return bool(colon) and factory.isidentifier() and all(part.isidentifier() for part in module.split("."))


def refuse_for_trace(model: str, request: RunRequest, *, asked: bool, also: tuple[str, ...]) -> None:
    """Reject requests that a trace cannot answer: it sees the module as built, with one rank, its kernels and dropout.
    Raise `UsageError` for a flag that does not apply to traces.

    Args:
        asked: the trace was requested by its flag, not by the kind of model.
        also: other given flags that need the closed form.
    """
    if asked and model in PRESETS:
        raise UsageError(f"--trace builds a model from its config.json, and {model} is a preset: drop --trace")
    extra = [flag_of(name) for name in request.given() if name not in TRACED] + list(also)
    if extra:
        why = "--trace" if asked and not is_live(model) else f"the live model {model}"
        raise UsageError(
            f"{extra[0]} does not apply to {why}: a trace sees one rank of the module as it is built. "
            "Give a preset or a config.json without --trace"
        )


def flag_of(field: str) -> str:
    """Name of a field's flag."""
    return f"--{field.replace('_', '-')}"


def model_spec(model: str, *, live: bool = False) -> ModelSpec:
    """Return the model of a preset's name, a config.json, its folder or a Hugging Face id. Raise `UsageError` if it is
    none of these, or an unreadable file.

    Args:
        live: the caller also accepts ``module:factory``, for the error message.
    """
    if model not in PRESETS:
        path = Path(model)
        if is_hub_id(model):
            return replace(read_config(hub_config(model)), name=model)
        if path.exists() or path.suffix == ".json":
            return read_config(path)
        if live or len(path.parts) > 1:
            raise unknown_preset(model, "A config.json, its folder or module:factory")
    return preset(model)


def resolve(model: ModelSpec, request: RunRequest) -> Resolved:
    """Fill in defaults of the framework preset, then general ones. Raise `UsageError` for an unknown value, or an
    invalid run.
    """
    refuse_as_built(model, request.given())
    if model.base and request.lora is not None and request.base is None:
        request = replace(request, base=model.base)
    if request.like is not None:
        return _resolve_like(model, request, request.like)
    if request.capacity_factor is not None and not isfinite(request.capacity_factor):
        raise UsageError(f"got --capacity-factor {request.capacity_factor}; expected a number above 0")
    if request.packed is not None and request.packed < 1:
        raise UsageError(f"got --packed {request.packed}; expected tokens of a document, 1 or more")
    if request.max_position_embeddings is not None:
        model = _with_positions(model, request.max_position_embeddings)
    kernels = _kernels(model, request)
    tuning, frozen = _tuning(request), tuple(_frozen(model, request))
    repeated = given_or(request.mtp_use_repeated_layer, False)
    model = with_mtp(model, given_or(request.mtp_num_layers, 0), kernels, repeated=repeated)
    if request.quant_recipe is not None:
        if (recipe := _recipe(request, kernels)) is None:
            raise UsageError(f"got --quant-recipe {request.quant_recipe!r} without a recipe; give --fp8-recipe as well")
        model = with_quant_recipe(model, request.quant_recipe, recipe)
    layout = _layout(request, model)
    if layout.wgrad_deferral_limit and kernels.loss.computes_head:
        raise UsageError(
            f"got --wgrad-deferral-limit with --loss {kernels.loss}, which has no gradients of logits that could wait"
        )
    if tuning is not None:
        assert isinstance(model.layers[0], Layer), "recorded models are refused adapters"
        low_precision = tuning.upcast is Upcast.NORMS and model.embedding_norm is None
        if low_precision or not tuning.inputs_need_gradients:
            model = with_starts(model, low_precision=low_precision, detached=not tuning.inputs_need_gradients)
        refuse_idle(model, tuning, kernels)
    usual = Gradients.UPFRONT if kernels.upfront_gradients else Gradients.ONE_BY_ONE
    gradients = word(usual, request.gradients, "gradients")
    longest = LONGEST_DEFAULT if model.patches is None else model.patches.tokens
    seq = OWN_RUNS.get(model.family, {}).get("seq", min(model.max_positions, longest))
    if model.audio is not None:
        seq = model.audio.tokens(model.name, given_or(request.source_seq, SECOND))
    run = Run(
        model=model,
        seq=given_or(request.seq, seq),
        micro_batch=given_or(request.micro_batch, 2 if kernels.loss is Loss.DPO else 1),
        micro_batches=given_or(request.micro_batches, layout.pp),
        layout=layout,
        precision=_precision(request, kernels, gradients, tuned=tuning is not None),
        optimizer=optimizer(given_or(request.optimizer, "adamw")),
        kernels=kernels,
        recompute=_recompute(request, model.depth),
        gradients=gradients,
        dropout=given_or(request.dropout, model.dropout),
        capacity_factor=request.capacity_factor,
        imbalance=given_or(request.expert_imbalance, 1.0),
        **_given(request, _OF_A_RUN),
        source_seq=_source_length(model, request, given_or(request.seq, seq)),
        stack=None if request.stack is None else software(request.stack),
        accumulation=word(Accumulation.AUTOGRAD, request.accumulation, "accumulation"),
        workspaces=workspaces(given_or(request.workspaces, "none")),
        tuning=tuning,
        frozen=frozen,
        optimizer_offload=_optimizer_offload(request),
        anchor=None if request.anchor is None else read_anchor(Path(request.anchor)),
    )
    _check_upcast(run)
    return Resolved(run=run, assumed=frozenset(f.name for f in fields(request)) - set(request.given()))


def run_of(model: str | ModelSpec, request: RunRequest | None = None) -> Run:
    """Return the run of a described model, for `forecast` and `estimate`.

    Args:
        model: a preset's name, a ``config.json`` or its folder, a Hugging Face id, or the result of `preset` or
            `read_config`.
        request: settings of the run, as on the command line; None: defaults.

    Raises:
        UsageError: an unknown model or value, an invalid run, or recompute "auto", which needs a planner.
    """
    if request is not None and request.recompute == Mode.AUTO:
        raise UsageError(
            "got recompute='auto', which needs a planner and a budget: give another mode, or use `jettison ledger "
            "--recompute auto --budget`, `jettison plan` or jettison.search"
        )
    spec = model_spec(model) if isinstance(model, str) else model
    return resolve(spec, RunRequest() if request is None else request).run


def _resolve_like(model: ModelSpec, request: RunRequest, name: str) -> Resolved:
    tuned, base = int(request.lora is not None), word(Base.PLAIN, request.base, "base")
    sizes = {name: given_or(getattr(request, name), 0 if name == "zero" else 1) for name in ("tp", "dp", "zero")}
    fields_of = rule(name, **sizes, lora=tuned, packed=0 if base is Base.GPTQ else tuned * base.bits)
    said = {field: value for field, value in fields_of.items() if getattr(request, field) is None}
    pipelined, reshard, modules = given_or(request.pp, 1) > 1, request.reshard_after_forward, ("zero_buckets",)
    other_groups = pipelined or given_or(request.ep, 1) > 1 or (reshard or "").isdecimal()
    other_precision = request.precision not in (None, said.get("precision", rule(name, **sizes).get("precision")))
    asked = fields_of["kernels"] if request.kernels is None else request.kernels
    own = asked != fields_of["kernels"] and kernel_set(asked).loss is not Loss.UPCAST
    own = own or model.head.pooling is not Pooling.NONE or model.audio is not None or model.pair is not None
    for unfit, names in (
        (given_or(request.zero, said.get("zero", 0)) != 3, ("reshard_after_forward", "reduce_dtype", "gradient_sync")),
        (pipelined, ("keep_logits",)),  # the schedule calls the model
        (pipelined or request.gradients not in (None, "one-by-one"), ("gradient_sync",)),
        (other_groups, ("fsdp_wrap_layers_only", "fsdp_version")),  # of pipelines and expert parallelism
        (reshard not in (None, Reshard.ALWAYS), ("fsdp_version",)),  # an option of FSDP2
        (_given(request, modules), OF_FSDP),  # DeepSpeed gathers by module
        (_given(request, OF_FSDP), modules),
        (other_precision, ("kbit_upcast",)),
        (own, ("loss",)),  # such kernels or such a head have their own loss
    ):
        for field in names if unfit else ():
            said.pop(field, None)
    if request.offload_optimizer is not None and request.gradients is None:
        said["gradients"] = "one-by-one"  # in addition to DeepSpeed's buffer of shards
    found = resolve(model, replace(request, like=None, **said))
    shown = ", ".join(flag_of(field) + ("" if value is True else f" {value}") for field, value in said.items())
    return replace(found, assumed=found.assumed | frozenset(said), like=f"{name}: {shown}")


def _source_length(model: ModelSpec, request: RunRequest, seq: int) -> int:
    """Source length of an encoder-decoder: the decoder's, unless the encoder has a fixed one."""
    if model.audio is not None:
        return given_or(request.source_seq, SECOND if request.seq is None else 0)
    if model.pair is not None:
        return given_or(request.source_seq, model.pair.tokens)
    if model.source is None:
        return given_or(request.source_seq, 0)
    return given_or(request.source_seq, model.source.longest(seq))


def _with_positions(model: ModelSpec, positions: int) -> ModelSpec:
    if not model.learned_positions or model.patches is not None:
        raise UsageError(f"got --max-position-embeddings {positions}; {model.name} has no learned positions")
    extra = model.position_rows - model.max_positions if model.position_rows else 0
    return replace(model, max_positions=positions, position_rows=positions + extra if extra else 0)


def _layout(request: RunRequest, model: ModelSpec) -> Layout:
    found = _given(request, _OF_A_LAYOUT)
    tp, pp, cut = found.get("tp", 1), found.get("pp", 1), request.stage_layers
    reshard = request.reshard_after_forward
    ranks = int(reshard) if reshard is not None and reshard.isdecimal() else None
    if request.fsdp_version not in (None, 1, 2):
        raise UsageError(f"got --fsdp-version {request.fsdp_version}; expected 1 or 2")
    return Layout(
        **found,
        flat_parameters=request.fsdp_version == 1,
        buckets=ZeroBuckets.parse(given_or(request.zero_buckets, "none"), hidden=model.hidden),
        sp=given_or(request.sp, tp > 1 and model.words and not model.two_stacks),
        stage_layers=() if cut is None else cut_of(cut, model, pp=pp, virtual=found.get("virtual_stages", 1)),
        mtp_num_layers=model.mtp_num_layers,
        schedule=word(Schedule.ONE_F_ONE_B, request.schedule, "schedule"),
        keeps_stage_outputs=given_or(request.keep_stage_outputs, False),
        keeps_received=given_or(request.keep_received, False),
        gradient_sync=word(GradientSync.EACH, request.gradient_sync, "gradient-sync"),
        reshard=word(Reshard.ALWAYS, reshard if ranks is None else None, "reshard-after-forward"),
        reshard_ranks=ranks or 0,
    )


_OF_A_RUN: Final = (
    *("tp_comm_overlap", "ep_comm_overlap", "cuda_graphs", "keep_batches", "keep_logits", "packed"),
    *("dataloader_attention_mask", "pad_to_longest"),
)
_OF_A_LAYOUT: Final = (
    *("tp", "pp", "cp", "ep", "dp", "expert_tp", "virtual_stages", "micro_batch_group", "wgrad_deferral_limit", "zero"),
    *("zero_replicas", "zero_redundancy_optimizer", "gathered_inputs", "stage_buffers", "fsdp_wrap_layers_only"),
    "fsdp_one_unit",
)


def _given(request: RunRequest, names: Sequence[str]) -> dict[str, Any]:
    """Given fields by name, for targets with equal names."""
    return {name: value for name in names if (value := getattr(request, name)) is not None}


def _kernels(model: ModelSpec, request: RunRequest) -> Kernels:
    if model.recorder is not None:
        fused = any(layer.fused for layer in model.kinds if isinstance(layer, RecordedLayer))
        kernels = replace(kernel_set(model_code()), declared=())  # recorded weights are in their modules' order
        return kernels.with_attention("flash" if fused else "eager")
    usual = OWN_RUNS.get(model.family, {})
    kernels = kernels_for(model, given_or(request.kernels, usual.get("kernels", "pytorch")))
    kernels = kernels.with_attention(given_or(request.attention, usual.get("attention")))
    kernels = replace(
        kernels,
        dispatcher=word(kernels.dispatcher, request.dispatcher, "dispatcher"),
        cp_comm_type=word(kernels.cp_comm_type, request.cp_comm_type, "cp-comm-type"),
        ssm_kernels=word(kernels.ssm_kernels, request.ssm_kernels, "ssm-kernels"),
        sequential_experts=given_or(request.sequential_experts, kernels.sequential_experts),
        deterministic=given_or(request.deterministic, kernels.deterministic),
    )
    if request.ssm_kernels is not None:
        check_scans(model, kernels)
    if request.loss is None:
        return kernels
    if model.audio is not None or model.pair is not None:
        own = "CTC loss" if model.audio else "a contrastive loss"
        raise UsageError(f"got --loss {request.loss}; {model.name} has {own}: drop --loss")
    if model.head.pooling is not Pooling.NONE:
        raise UsageError(f"got --loss {request.loss}; {model.name} has one prediction a sequence: drop --loss")
    return replace(kernels, loss=word(kernels.loss, request.loss, "loss"))


def _recompute(request: RunRequest, layers: int) -> Recompute:
    """Recompute mode, or Megatron's lists of modules, whose granularity is "selective"."""
    flag, mode = "--recompute-modules", request.recompute
    again = () if request.recompute_modules is None else listed(request.recompute_modules, flag)
    sent = () if request.offload_modules is None else listed(request.offload_modules, "--offload-modules")
    if again and mode not in (None, "selective"):
        raise UsageError(f"got --recompute {mode} and {flag}, which is a mode of its own; drop one of them")
    found = Recompute.parse(
        f"{Mode.MODULES}:{'+'.join(again)}" if again else given_or(mode, "none"),
        layers=layers,
        offload=given_or(request.offload, False),
        whole=_whole(given_or(request.micro_batches_without_recompute, "0")),
    )
    found = replace(found, reentrant=True) if request.reentrant else found
    return replace(found, sent=sent) if sent else found


def _whole(text: str) -> int:
    if text == "most":
        return MOST
    if not text.isdecimal():
        raise UsageError(f"got --micro-batches-without-recompute {text}; expected a whole number of 0 or more, or most")
    return int(text)


# adapters, frozen models, optimizer offload ---------------------------------------------------------------------------


def _tuning(request: RunRequest) -> Tuning | None:
    if request.lora is None:
        for name in ("base", "kbit_upcast", "input_gradients", "adapter_dtype"):
            if getattr(request, name) is not None:
                raise UsageError(
                    f"got {flag_of(name)} without adapters, where nothing is frozen; give --lora r=16 as well"
                )
        return None
    if request.adapter_dtype not in (None, "fp32"):
        raise UsageError(f"got --adapter-dtype {request.adapter_dtype}; expected fp32 [default: as --precision]")
    return Tuning.parse(
        request.lora,
        wide=request.adapter_dtype == "fp32",
        upcast=word(Upcast.NONE, request.kbit_upcast, "kbit-upcast"),
        base=word(Base.PLAIN, request.base, "base"),
        inputs_need_gradients=given_or(request.input_gradients, given_or(request.recompute, "none") != "none"),
        follows_recompute=request.input_gradients is None,
    )


def _check_upcast(run: Run) -> None:
    """Check the settings of a base prepared for k-bit training: NOTE [ What is not packed ] in `spec.fine_tuning`."""
    if run.tuning is None or run.tuning.upcast is Upcast.NONE:
        return
    if run.tuning.base not in (Base.NF4, Base.NF4_DOUBLE) or not run.autocast or run.layout.tp > 1:
        raise UsageError(
            f"got --kbit-upcast {run.tuning.upcast} without an unsharded 4-bit base under autocast; give --base "
            "nf4-double and --precision bf16-autocast, without --tp and --zero 3, or --kbit-upcast none"
        )


def _frozen(policy: ModelSpec, request: RunRequest) -> Iterator[FrozenModel]:
    for role in Role:
        text: str | None = getattr(request, role)
        if text in (None, "none"):
            continue
        words = FrozenModelOptions.parse(text, f"--{role}")
        if words.model == BASE and (request.lora is None or role is Role.REWARD or words.dtype or words.sharded):
            raise UsageError(
                f"got --{role} {text}; base is the policy with its adapters disabled: --reference base, with --lora"
            )
        model = policy if words.model == SAME else None if words.model == BASE else model_spec(words.model)
        if model is not None and model.recorder is not None:
            raise UsageError(f"got --{role} {text}; the blocks of {model.name} are recorded, not described")
        yield FrozenModel(
            role=role,
            model=model,
            dtype=words.dtype,
            sharded=given_or(words.sharded, True),
            when=given_or(words.when, When.AFTER if role is Role.REFERENCE else When.BEFORE),
        )


def _optimizer_offload(request: RunRequest) -> OptimizerOffload:
    """Rule for optimizer offload; a `UsageError` for layouts that its framework does not support."""
    rule = optimizer_offload(given_or(request.offload_optimizer, "none"))
    zero, why = given_or(request.zero, 0), ""
    if rule.keeps_buffer and zero < 2:
        why = f"--zero {zero}; ZeRO-Offload is modelled for --zero 2 and 3"
    elif rule.moves_parameters and zero < 3:
        why = f"--zero {zero}; offloaded parameters need --zero 3"
    elif rule.steps_on_cpu and zero in (1, 2) and not rule.keeps_buffer:
        why = f"--zero {zero}; give --zero 3, or one device"
    elif rule.frees_gradients and given_or(request.pp, 1) > 1:
        why = f"--pp {request.pp}; offloaded gradients are not modelled in pipelines"
    if why:
        raise UsageError(f"got --offload-optimizer {rule} with {why}")
    return rule


# precision ------------------------------------------------------------------------------------------------------------


def _precision(request: RunRequest, kernels: Kernels, gradients: Gradients, *, tuned: bool) -> Precision:
    found = precision(given_or(request.precision, "bf16-autocast" if tuned else "bf16"))
    if (recipe := _recipe(request, kernels)) is not None:
        found = found.with_recipe(recipe)
    elif request.fp8_param_gather:
        raise UsageError("got --fp8-param-gather without a recipe; give --fp8-recipe as well, such as mxfp8")
    if request.reduce_dtype is not None:
        found = found.reducing_in(request.reduce_dtype)
    if gradients is not Gradients.ACCUMULATOR:
        return found
    if found.accumulator is None:
        raise UsageError(
            f"got --gradients fp32-accumulator with --precision {found.name}, which has no second buffer to accumulate "
            "gradients in: give --precision bf16-grad32"
        )
    return replace(found, apart=True)


def _recipe(request: RunRequest, kernels: Kernels) -> Fp8Recipe | None:
    if request.fp8_recipe is None:
        return None
    return fp8_recipe(request.fp8_recipe, kernels.name, parameters=given_or(request.fp8_param_gather, False))
