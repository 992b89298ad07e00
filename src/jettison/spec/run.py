"""A training run: model, batch, layout, precision, kernels and recompute mode, and the checks of their combination."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from reprlib import repr as short
from typing import TYPE_CHECKING, Final

from jettison.core.errors import UsageError
from jettison.core.objects import summary
from jettison.spec.anchor import RunAnchor
from jettison.spec.fine_tuning import Base, FrozenModel, Tuning, Upcast
from jettison.spec.fp8 import Fp8Recipe, Library, Scales
from jettison.spec.kernels import (
    WORKSPACES,
    CpCommType,
    Device,
    Documents,
    Kernels,
    Loss,
    SsmKernels,
    Workspaces,
    sets_with,
)
from jettison.spec.layout import GradientSync, Layout, exchange_misfit, whole_flags
from jettison.spec.model import Attention, Biases, LatentAttention, Layer, Mlp, ModelSpec, Moe, Pooling, SelectiveScan
from jettison.spec.model_variants import with_starts
from jettison.spec.precision import (
    DIST_MUONS,
    NO_OFFLOAD,
    PRECISIONS,
    Accumulation,
    GradientRule,
    Gradients,
    Optimizer,
    OptimizerOffload,
    Precision,
    gradient_rule,
    under_autocast,
)
from jettison.spec.recompute import NOTHING_AGAIN, Mode, Recompute, check_parts

if TYPE_CHECKING:
    from jettison.spec.hardware import Hardware

UPDATE_BYTES: Final = 8
"""Transient bytes of an element while AdamW updates a parameter on CPU: two fp32 tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionSignature:
    """All that decides the tensors of a region: runs with equal signatures share their layers' ledgers.

    ``again``: recomputed modules, where they change the inputs that FP8 GEMMs save. ``fp32_copies``: of `Tuning.full`.
    """

    model: ModelSpec
    seq: int
    micro_batch: int
    layout: Layout  # of the axes that shard tensors
    precision: Precision
    kernels: Kernels
    dropout: float
    capacity_factor: float | None
    padding: bool
    imbalance: float
    tuning: Tuning | None = None
    source_seq: int = 0
    packed: int = 0
    again: tuple[str, ...] = ()
    fp32_copies: bool = False

    def __hash__(self) -> int:
        """Hash of the fields that differ within one search; cheap, since signatures are cache keys."""
        layout = self.layout
        return hash((self.model, self.seq, self.micro_batch, layout.tp, layout.sp, layout.cp, layout.ep))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training step of a model under a layout. b and s are of one micro-batch on one data-parallel rank.

    Args:
        micro_batches: gradient accumulation steps on one data-parallel rank.
        dropout: probability of every dropout of the architecture; 0: no dropout.
        capacity_factor: rows of an expert, as a multiple of an even share; None: no token is dropped.
        imbalance: rows of a rank's experts under expert parallelism, as a multiple of an even share.
        padding: the batch has an attention mask, as for encoders.
        tp_comm_overlap: communication of tensor parallelism overlaps with split GEMMs, which have their own workspaces.
        ep_comm_overlap: all-to-all overlaps with compute of another micro-batch. Bytes do not change.
        cuda_graphs: layers are CUDA graphs, without launches from the host. Bytes do not change.
        stack: software stack, where hardware files have figures for several; None: that of the kernels.
        accumulation: of weight gradients. ``workspaces``: of GEMM libraries.
        dataloader_attention_mask: the batch has an s × s mask for each sequence. ``keep_batches``: to the step's end.
        keep_logits: the training loop references the model's logits until their backward ends.
        source_seq: tokens that the encoder of an encoder-decoder reads; 0: no encoder.
        packed: tokens of a document in packed sequences; 0: sequences are not packed.
        pad_to_longest: micro-batches are as long as their longest sequence; ``seq`` is the longest of all.
        tuning: adapters of frozen weights; None: full training.
        frozen: reference and reward models, of which a step runs the forward.
        optimizer_offload: the framework's rule for optimizer offload.
        compiled: each layer is compiled separately; torch's partitioner decides what it saves.
        anchor: a measured run of the same stack; ledger and peak do not change.

    Raises:
        UsageError: a size below one, a sequence longer than the model's positions, a layout that does not divide, or
            flags that contradict each other, with an alternative.
    """

    model: ModelSpec
    seq: int
    micro_batch: int = 1
    micro_batches: int = 1
    layout: Layout = field(default_factory=Layout)
    precision: Precision = PRECISIONS["bf16"]
    optimizer: Optimizer = Optimizer.ADAMW
    kernels: Kernels = field(default_factory=Kernels)
    recompute: Recompute = NOTHING_AGAIN
    gradients: Gradients = Gradients.ONE_BY_ONE
    dropout: float = 0.0
    capacity_factor: float | None = None
    padding: bool = False
    imbalance: float = 1.0
    tp_comm_overlap: bool = False
    ep_comm_overlap: bool = False
    cuda_graphs: bool = False
    stack: str | None = None
    accumulation: Accumulation = Accumulation.AUTOGRAD
    workspaces: Workspaces = WORKSPACES["none"]
    dataloader_attention_mask: bool = False
    keep_batches: bool = False
    keep_logits: bool = False
    packed: int = 0
    pad_to_longest: bool = False
    tuning: Tuning | None = None
    source_seq: int = 0
    frozen: tuple[FrozenModel, ...] = ()
    optimizer_offload: OptimizerOffload = NO_OFFLOAD
    compiled: bool = False
    anchor: RunAnchor | None = None

    def __repr__(self) -> str:
        return summary(
            self,
            f"{self.model.name}, seq {self.seq}, {self.micro_batches} × {self.micro_batch} sequences, {self.layout!r}, "
            f"{self.precision.name}",
        )

    def __post_init__(self) -> None:
        for rule in _RULES:
            for why in rule(self):
                raise UsageError(why)
        self.layout.check(self.model, seq=self.seq, source_seq=self.source_seq)

    def recomputed(self, recompute: Recompute) -> Run:
        """Copy with another recomputation, and with or without gradients of adapters' first inputs as it needs them."""
        needs, tuning = recompute.mode is not Mode.NONE, self.tuning
        follows = tuning is not None and tuning.follows_recompute and tuning.inputs_need_gradients != needs
        found = self._with_other_start if follows else self
        return found if recompute == found.recompute else replace(found, recompute=recompute)

    @cached_property
    def _with_other_start(self) -> Run:
        assert self.tuning is not None
        needs = not self.tuning.inputs_need_gradients
        tuning = replace(self.tuning, inputs_need_gradients=needs)
        return replace(self, model=with_starts(self.model, detached=not needs), tuning=tuning)

    @cached_property
    def gradient_rule(self) -> GradientRule:
        """Dtypes of weight gradients during a backward."""
        updates = UPDATE_BYTES if self.gradients is Gradients.IN_BACKWARD and self.updates_on_cpu else 0
        whole = self.precision.gradient != self.precision.compute and self.gathers_parameters
        return gradient_rule(
            self.precision, self.accumulation, updates, whole=whole, reentrant=self.recompute.reentrant
        )

    @property
    def allocates_unsharded_gradients(self) -> bool:
        """Whether each backward allocates unsharded gradients in the compute dtype, in addition to kept ones.

        Kept ones are shards, or unsharded in another dtype or in a flat parameter's gradient.
        """
        if not self.gathers_parameters or not self.keeps_unsharded_gradients:
            return self.gathers_parameters
        return self.layout.flat_parameters or self.precision.reduce_dtype != self.precision.compute

    @property
    def syncs_last(self) -> bool:
        """Whether only the last micro-batch of a step reduces gradients, which are unsharded until then."""
        once = self.layout.gradient_sync is GradientSync.LAST and self.micro_batches > 1 and self.layout.pp == 1
        return once and self.layout.shards_parameters

    @cached_property
    def keeps_unsharded_gradients(self) -> bool:
        """Whether gradients are unsharded between backwards: NOTE [ Unsharded gradients ] in `predict.fsdp`."""
        return self.layout.reduces_chunks or self.syncs_last

    @property
    def gathers_parameters(self) -> bool:
        """Whether parameters are unsharded only while in use, by all-gather or from the host's memory."""
        return self.optimizer_offload.moves_parameters or self.layout.shards_parameters

    @property
    def gradients_coexist(self) -> bool:
        """Whether a region's unsharded gradients coexist until it is reduced, rather than pass through a bucket."""
        return self.allocates_unsharded_gradients and not self.layout.buckets_gradients

    @property
    def frees_gradients(self) -> bool:
        """Whether backward frees each gradient once it is computed."""
        freed = self.optimizer_offload.frees_gradients or self.layout.buckets_gradients
        return self.gradients is Gradients.IN_BACKWARD or freed

    @property
    def caches_casts(self) -> bool:
        """Whether autocast caches cast weights; it does not for `parallel.parameters.local_part`, which is no leaf."""
        return self.autocast and (self.layout.tp == 1 or self.layout.gathered_inputs)

    @property
    def sums_tied_gradients(self) -> bool:
        """Whether the two gradients of a tied embedding are summed into a third tensor.

        The engine accumulates in place if no other tensor shares the first one's storage
        (``torch/csrc/autograd/input_buffer.cpp``, ``can_accumulate_inplace``). The head's matmul returns a view of its
        gradient, whose base shares it; under autocast the cast makes a new tensor; for several heads, or chunks of one,
        the sum is the engine's own; and a fused loss returns a new tensor.
        """
        once = not self.kernels.loss.computes_head and not self.model.mtp_num_layers
        return once and self.model.tied_embeddings and not self.gradient_rule.fused and not self.autocast

    @property
    def outgrows_segments(self) -> bool:
        """Whether micro-batches outgrow cached segments: NOTE [ Cached segments ] in `device_allowance`."""
        return self.pad_to_longest and not self.kernels.expandable_segments

    @property
    def updates_on_cpu(self) -> bool:
        """Whether an update allocates tensors of a parameter's size: PyTorch's on CPU do, fused kernels do not."""
        return self.kernels.device is Device.CPU and self.optimizer in (Optimizer.ADAMW, Optimizer.MUON)

    @property
    def uses_autocast(self) -> bool:
        """Whether torch.autocast casts operands of the model's matmuls. FSDP casts without it; a frozen 16-bit base
        needs no cast, and `spec.fine_tuning` has the casts of its adapters.
        """
        wide = self.precision.parameter == "float32" and self.precision.compute != "float32"
        tuning = self.tuning
        held = tuning is None or tuning.base is Base.FP32 or tuning.upcast is not Upcast.NONE
        return wide and held and not self.gathers_parameters

    @property
    def autocast(self) -> bool:
        """Whether it casts in layers of a formula; recorded layers have their casts already."""
        return self.uses_autocast and self.model.recorder is None

    @property
    def _region_kernels(self) -> Kernels:
        """Kernels with the schedule's loss under pipelines, and encoder-decoder code for checkpoints (`attention`)."""
        found = self.kernels
        outside = self.layout.pp > 1 and found.loss is Loss.UPCAST
        asked = self.recompute.mode in (Mode.FULL, Mode.SELECTIVE_OP, Mode.SELECTIVE_OP_ALTERNATE)
        attentions = (layer.attention for layer in self.model.described)
        handed_on = asked and any(isinstance(one, Attention) and one.biases is Biases.FIRST for one in attentions)
        return _adjusted(found, outside, handed_on) if outside or handed_on else found

    @cached_property
    def signature(self) -> RegionSignature:
        """Signature of the regions."""
        layout, tuning = self.layout, self.tuning
        cast = tuning is not None and bool(tuning.full) and (layout.flat_parameters or not tuning.base.packed)
        return RegionSignature(
            model=self.model,
            seq=self.seq,
            micro_batch=self.micro_batch,
            layout=layout.within_stage,
            precision=under_autocast(self.precision) if self.autocast else self.precision,
            kernels=self._region_kernels if self.kernels.tensor_masks else self.kernels,  # of transformers' code
            dropout=self.dropout,
            capacity_factor=self.capacity_factor,
            padding=self.padding,
            imbalance=self.imbalance,
            tuning=tuning,
            fp32_copies=cast and self.gathers_parameters,
            source_seq=self.source_seq,
            packed=self.packed,
            again=() if self.precision.recipe is None else self.recompute.modules,
        )


@lru_cache(maxsize=256)
def _adjusted(kernels: Kernels, outside: bool, learned_zeros: bool) -> Kernels:
    """Cached copy: a search makes thousands of runs, and a copy of so many fields takes as long as all checks."""
    found = replace(kernels, loss=Loss.IN_LOOP) if outside else kernels
    return replace(found, learned_zeros=True) if learned_zeros else found


def expect_run(value: object) -> None:
    """Reject values other than runs, such as a model's name."""
    if not isinstance(value, Run):
        raise UsageError(f"got {short(value)}; expected a run, such as jettison.run_of('llama3-8b')")


# Checks of a run ------------------------------------------------------------------------------------------------------
#
# Each rule yields an error with an alternative for runs that are not supported or modelled; the first is raised.


def _syncs(run: Run) -> Iterator[str]:
    """Reject --reduce-dtype and --gradient-sync where FSDP does not reduce autograd's gradients."""
    if run.precision.reduced is not None and run.layout.zero != 3:
        yield f"got --reduce-dtype and --zero {run.layout.zero}; it needs --zero 3"
    if run.layout.fsdp_one_unit and run.tuning is not None:
        yield "got --fsdp-one-unit with --lora; gradients of one unit with frozen weights are not modelled: drop one"
    if run.layout.gradient_sync is GradientSync.LAST and run.gradients is not Gradients.ONE_BY_ONE:
        yield (
            f"got --gradient-sync {run.layout.gradient_sync} with gradients {run.gradients}; FSDP keeps "
            "autograd's own: give --gradients one-by-one"
        )


def _sizes(run: Run) -> Iterator[str]:
    whole_flags(run, "seq", "micro_batch", "micro_batches")
    if not 0 <= run.dropout < 1:
        yield f"got --dropout {run.dropout}; expected a probability of at least 0 and below 1"
    if run.capacity_factor is not None and run.capacity_factor <= 0:
        yield f"got a capacity factor of {run.capacity_factor}; expected more than 0"
    if not 1 <= run.imbalance <= max(1, run.layout.ep):
        yield (
            f"got --expert-imbalance {run.imbalance:g}; expected 1 (even) to {run.layout.ep}, the size of --ep "
            "(all rows on one rank)"
        )
    run.precision.check(run.optimizer, on_host=run.optimizer_offload.moves)


def _pairs(run: Run) -> Iterator[str]:
    """Reject DPO with an odd micro-batch, or with a sharded head."""
    if run.kernels.loss is not Loss.DPO:
        return
    if run.micro_batch % 2:
        yield (
            f"got --loss dpo with --micro-batch {run.micro_batch}; a pair is two sequences, the chosen and the "
            "rejected one: give an even number"
        )
    if run.layout.tp * run.layout.cp > 1:
        ways = f"--tp {run.layout.tp}" if run.layout.tp > 1 else f"--cp {run.layout.cp}"
        yield f"got --loss dpo with {ways}; its head is not sharded: give --tp 1 and --cp 1, or another --loss"


def _packed(run: Run) -> Iterator[str]:
    """Reject packed documents where no framework packs them."""
    if not run.packed:
        return
    if not 1 <= run.packed <= run.seq:
        yield f"got --packed {run.packed}; expected tokens of a document, 1 to --seq {run.seq}"
    scans = [layer.scan.words for layer in run.model.described if layer.scan is not None]
    if scans:
        yield (
            f"got --packed; layers of {run.model.name} have a {scans[0]}, whose state is carried from one document to "
            "the next: drop --packed"
        )
    if run.layout.cp > 1:
        yield f"got --packed with --cp {run.layout.cp}; documents across ranks are not modelled: give --cp 1"
    if run.kernels.model_code and run.kernels.documents is Documents.VARLEN and run.micro_batch > 1:
        yield (
            f"got --packed with --micro-batch {run.micro_batch}; with flash-attn the model's code packs one row only "
            "(modeling_flash_attention_utils.py, _is_packed_sequence): --micro-batch 1 and a longer --seq"
        )


def _source(run: Run) -> Iterator[str]:
    """Reject a source length without an encoder, and flags for decoders with other models."""
    source, name = run.model.source, run.model.name
    models = [run.model, *(one.model for one in run.frozen if one.model is not None)]
    kinds = [one.name for one in models if one.two_stacks or not one.words]
    for flag, given in (("--packed", run.packed), ("a frozen model", run.frozen), ("--mtp", run.model.mtp_num_layers)):
        if kinds and given:
            yield f"got {flag} with {kinds[0]}, which is not a text-only decoder: drop it"
    if run.model.audio is not None:
        run.model.audio.check(name, seq=run.seq, samples=run.source_seq)
    sound = run.model.audio is not None or (source is not None and source.sound > 0)
    if run.tuning is not None and (sound or run.model.pair is not None):
        what = "reads audio" if sound else f"is {run.model.two_stacks}"
        yield f"got --lora; {name} {what}, for which it is not modelled: drop --lora"
    if run.tuning is not None and run.tuning.full and source is not None:
        yield f"got --lora with modules_to_save; {name} is an encoder-decoder, for which they are not modelled"
    got = f"got --source-seq {run.source_seq}"
    if run.model.pair is not None:
        if run.source_seq != (tokens := run.model.pair.tokens):
            yield f"{got}; an image of {name} has {tokens} tokens: drop --source-seq"
    elif source is None:
        if run.source_seq and run.model.audio is None:
            yield f"{got}; {name} is not an encoder-decoder: drop --source-seq"
    else:
        least = source.max_positions if source.sound else 1
        most = source.max_positions if source.position_rows else run.source_seq
        if not least <= run.source_seq <= most:
            expected = f"{least} to {most}" if least < most else f"audio of {least}" if source.sound else "1 or more"
            yield f"{got}; {name} reads {expected} tokens"


def _sequence(run: Run) -> Iterator[str]:
    """Reject a sequence longer than positions, or other than an image's."""
    model = run.model
    if run.kernels.cp_comm_type is CpCommType.A2A and (why := exchange_misfit(run.layout, model)):
        yield why
    if model.patches is not None and run.seq != model.patches.tokens:
        yield f"got --seq {run.seq}; an image of {model.name} has {model.patches.tokens} tokens: drop --seq"
    if model.learned_positions and (run.packed or run.seq) > model.max_positions:
        yield f"got --seq {run.seq}; {model.name} has {model.max_positions} positions"
    if run.recompute.whole and run.layout.pp == 1:
        yield "got --micro-batches-without-recompute without a pipeline; give --pp 2 or more"


def _quantized_base(run: Run) -> Iterator[str]:
    """Reject LoRA with FP8 but for TransformerEngine, whose frozen matrices keep quantized copies and save no inputs;
    adapters are Megatron's layers (Megatron-Bridge, ``peft/utils.py``, ``ParallelLinearAdapter``) in 16 bits.
    """
    recipe, tuning = run.precision.recipe, run.tuning
    if tuning is None or run.precision.gemm_inputs is None:
        return
    if recipe is None or recipe.library is not Library.TE:
        yield (
            f"got --lora with --precision {run.precision.name}; both are modelled for TransformerEngine only: give "
            f"--kernels {sets_with('te_gemms')} and --fp8-recipe, or --precision bf16"
        )
    elif tuning.base is not Base.PLAIN or run.layout.zero == 3:
        what = "--zero 3" if tuning.base is Base.PLAIN else f"--base {tuning.base}"
        yield f"got {what} with --lora and --fp8-recipe {recipe.name}; they are not modelled together: drop one"


def _fp8_base(run: Run) -> Iterator[str]:
    """Reject a frozen FP8 base beyond NOTE [ Frozen FP8 ] in `spec.fine_tuning`."""
    if run.tuning is None or run.tuning.base is not Base.FP8:
        return
    if run.layout.zero == 3:
        yield "got --base fp8 with --zero 3; all-gathers of FP8 weights are not modelled: give --zero 2 or less"
    elif any(layer.experts for layer in run.model.kinds):
        yield f"got --base fp8 and {run.model.name}, whose FP8 experts are not modelled: give --base plain"
    elif run.kernels.fused_adapters:
        yield f"got --base fp8 with --kernels {run.kernels.name}, whose fused adapters dequantize; give others"


def _parts(run: Run) -> Iterator[str]:
    """Reject sharded scans and recomputed modules that the layers do not have, and names for other layers."""
    model = run.model
    if run.tuning is not None and "dense" in run.tuning.targets and not all(layer.causal for layer in model.kinds):
        yield "got --lora targets=dense, which names three layers of an encoder: give some of o_proj+fc1+fc2"
    scans = [layer.scan.words for layer in model.described if layer.scan is not None]
    if (
        scans
        and run.layout.tp > 1
        and not (run.kernels.shards_ssm_heads and run.kernels.ssm_kernels is SsmKernels.FUSED)
    ):
        yield (
            f"got --tp {run.layout.tp}; layers of {model.name} have a {scans[0]}, whose heads --kernels "
            f"{run.kernels.name} does not shard: give --kernels {sets_with('shards_ssm_heads')} with --ssm-kernels "
            "fused, or drop --tp"
        )
    if names := (*run.recompute.modules, *run.recompute.sent):
        check_parts(model, run.kernels, names, own_norms=bool(run.workspaces.library_bytes))
    lets_go = run.recompute.mode is Mode.NONE or (run.recompute.mode is Mode.FULL and run.recompute.reentrant)
    if run.tuning is not None and run.tuning.base is Base.INT8 and not lets_go:
        said = " (quantization_config of the model)" if run.model.base == Base.INT8 else ""
        modes = "" if run.recompute.mode is Mode.AUTO else "--recompute none, --reentrant, or "
        yield (
            f"got --base int8{said} with --recompute {run.recompute}; bitsandbytes keeps inputs of its matmuls, which "
            f"only reentrant checkpoints free: give {modes}--base nf4"
        )


def _output(run: Run) -> Iterator[str]:
    """Reject --keep-logits where the model returns no logits."""
    model, loss, why = run.model, run.kernels.loss, ""
    if not run.keep_logits:
        return
    if run.layout.pp > 1:
        why = f"--pp {run.layout.pp}, whose schedule calls the model; --stage-buffers sets what it keeps"
    elif model.recorder is not None or model.audio is not None or model.pair is not None:
        why = f"{model.name}, whose return values are not modelled"
    elif model.head.pooling is not Pooling.NONE:
        why = f"{model.name}, which returns one prediction a sequence"
    elif loss in (Loss.FUSED, Loss.CHUNKED, Loss.TILED, Loss.DPO):
        why = f"--loss {loss}, for which the model returns no logits"
    elif loss is Loss.CHUNKED_OUTPUT:
        why = f"--loss {loss}, which saves the logits anyway"
    elif loss is Loss.CHUNKED_CE:
        why = f"--loss {loss}, which overwrites logits without other references (--loss upcast does not)"
    if why:
        yield f"got --keep-logits with {why}; give --no-keep-logits"


COMPILED_MODES: Final = ("none", "full", "every", "block", "interval", "selective-op", "selective-op-alternate", "auto")
"""Recompute modes that compiled layers support: of layers, or passed to torch's partitioner."""


def _compiled(run: Run) -> Iterator[str]:
    """Reject --compile for layers outside of NOTE [ What torch's partitioner keeps ] in `solve.checkpoint_policy`."""
    model, mode, why = run.model, run.recompute.mode, ""
    if mode is Mode.PARTS and model.recorder is not None:
        yield f"got --recompute parts; {model.name}'s blocks are recorded without parts: give full"
    if not run.compiled:
        return
    if run.kernels.not_compiled:
        why = run.kernels.not_compiled
    elif model.recorder is not None:
        why = f"and {model.name}, whose blocks are recorded uncompiled"
    elif any(layer.scan is not None for layer in model.described):
        why = f"and {model.name}, whose state-space or linear-attention layers are not modelled compiled"
    elif any(layer.experts for layer in model.kinds):
        why = f"and {model.name}, whose MoE layers have graph breaks; without it they are counted as they run eagerly"
    elif mode not in COMPILED_MODES:
        modes = ", ".join(COMPILED_MODES)
        why = f"with --recompute {mode}, which chooses within a layer, as the compiler does; give one of {modes}"
    if why:
        yield f"got --compile {why}"


def _recipe(run: Run) -> Iterator[str]:
    """Reject an FP8 or FP4 recipe where it is not modelled."""
    recipe = run.precision.recipe
    if recipe is None:
        return
    lists = frozenset((*run.recompute.modules, *run.recompute.sent))
    names = lists & ({"layernorm"} if recipe.keeps_original else {"layernorm", "moe_act"})
    if run.compiled and recipe.inputs is Scales.MX:
        why = "with --compile; MX tensors are not modelled under torch's partitioner"
    elif recipe.library is Library.TE and run.layout.zero == 3:
        why = "with --zero 3; FSDP's all-gather of TransformerEngine's weights is not modelled: give --zero 1"
    elif recipe.library is Library.TORCHAO and any(layer.experts for layer in run.model.kinds):
        instead = f"give --kernels {sets_with('te_gemms')}"
        why = f"and {run.model.name}, whose experts are not torchao's linear layers; {instead}"
    elif names:
        why = f"with the module {min(names)}, under which layers save other inputs; drop the module"
    else:
        misfit = recipe_misfit(recipe, run.model, run.layout, seq=run.seq, micro_batch=run.micro_batch)
        why = f"where {misfit}" if misfit else ""
    if why:
        yield f"got --fp8-recipe {recipe.name} {why}"


def recipe_misfit(recipe: Fp8Recipe, model: ModelSpec, layout: Layout, *, seq: int, micro_batch: int) -> str:
    """Name the size that a library's FP8 or FP4 GEMMs do not support; empty: all are supported."""
    if recipe.library is not Library.TE:
        return ""
    rows = seq * micro_batch // layout.cp
    sizes = [("tokens of a rank", rows // layout.tp if layout.sp else rows), ("the hidden size", model.hidden)]
    for layer in model.described:
        sizes += _widths(layer, layout)
    odd = ((words, size) for words, size in sizes if size % recipe.multiple)
    return next((f"{words}, {size}, should be a multiple of {recipe.multiple}" for words, size in odd), "")


def _widths(layer: Layer, layout: Layout) -> Iterator[tuple[str, int]]:
    """Names and local sizes of a layer's GEMM dims."""
    tp = layout.tp
    match layer.attention:
        case Attention() as a:
            yield "a rank's width of attention's output", a.heads * a.head_dim // tp
            yield "a rank's width of queries, keys and values", (a.heads + 2 * max(a.kv_heads, tp)) * a.head_dim // tp
        case LatentAttention() as a:
            yield "the rank of keys and values", a.kv_rank
            yield "a rank's width of attention's output", a.heads * a.value_dim // tp
    match layer.mlp:
        case Mlp() as m:
            yield "a rank's width of the MLP", m.ffn // tp
        case Moe() as m:
            yield "an expert's width", m.ffn // (layout.expert_tp or tp)
            if m.shared_ffn:
                yield "the shared experts' width", m.shared_ffn // tp


def _in_backward(run: Run) -> Iterator[str]:
    """Reject an optimizer step in backward unless each gradient of one micro-batch is reduced separately."""
    layout, why = run.layout, ""
    if run.optimizer in DIST_MUONS and layout.zero != 1 and (layout.dp > 1 or layout.zero):
        yield f"got --optimizer {run.optimizer} with --zero {layout.zero}; expected --zero 1"
    if run.gradients is not Gradients.IN_BACKWARD:
        return
    if layout.pp > 1:
        why = f"--pp {layout.pp}, which needs several micro-batches"
    elif run.micro_batches > 1:
        why = f"--micro-batches {run.micro_batches}: each backward would be a separate optimizer step"
    elif layout.dp * layout.cp > 1 and layout.zero < 2:
        why = f"--zero {layout.zero}, which all-reduces buckets of gradients; --zero 2 or 3 reduces each"
    elif run.accumulation is not Accumulation.AUTOGRAD or run.precision.accumulator or run.precision.optimizer_gradient:
        why = "gradients that are accumulated in another buffer"
    elif run.optimizer in (Optimizer.ADAMW_FOREACH, Optimizer.ADAMW_ON_COPIES, Optimizer.MUON, *DIST_MUONS):
        why = f"--optimizer {run.optimizer}, which updates many parameters at once"
    if why:
        yield f"got --gradients in-backward with {why}"


def _host(run: Run) -> Iterator[str]:
    """Reject optimizer offload that the rule's framework does not support."""
    rule, why = run.optimizer_offload, ""
    if not rule.moves:
        return
    own = run.precision.master is None
    ours = (Optimizer.ADAMW, Optimizer.ADAMW_ON_COPIES)
    kinds = ours if rule.steps_on_cpu else (Optimizer.ADAMW, Optimizer.ADAM8BIT, Optimizer.ADAM8BIT_TRAINER)
    packed = run.tuning is not None and run.tuning.base.packed
    if rule.moves_parameters and (run.precision.recipe is not None or (packed and not rule.moves_packed)):
        why = "weights in fewer than 16 bits, whose offload is not modelled: give --offload-optimizer none"
    elif rule.moves_masters and own:
        why = f"--precision {run.precision.name}; {rule.framework} updates fp32 masters: --precision bf16"
    elif not rule.moves_masters and not own:
        why = f"--precision {run.precision.name}; no masters are updated: bf16-pure, bf16-autocast or fp32"
    elif run.optimizer not in kinds:
        why = f"--optimizer {run.optimizer}; expected {' or '.join(kinds)}"
    elif rule.one_micro_batch and run.micro_batches > 1:
        why = f"--micro-batches {run.micro_batches}; each gradient is freed in its backward: 1, or torchao"
    elif rule.steps_on_cpu and run.gradients is not Gradients.ONE_BY_ONE:
        why = f"gradients {run.gradients}; give --gradients one-by-one"
    if why:
        yield f"got --offload-optimizer {rule} with {why}"


def _frozen(run: Run) -> Iterator[str]:
    """Reject frozen models under pipelines, or with too few positions."""
    for frozen in run.frozen:
        if run.layout.pp > 1:
            yield (
                f"got --{frozen.role} with --pp {run.layout.pp}; frozen models are not modelled in pipeline schedules: "
                "give --pp 1, and --zero 3 or --tp instead"
            )
        if (model := frozen.model) is not None:
            if model.learned_positions and run.seq > model.max_positions:
                yield f"got --seq {run.seq}; the {frozen.role} {model.name} has {model.max_positions} positions"
            run.layout.check(model, seq=run.seq)


_RULES: Final = (
    *(_sizes, _syncs, _pairs, _packed, _source, _sequence, _quantized_base, _fp8_base, _parts, _output, _compiled),
    *(_recipe, _in_backward, _host, _frozen),
)


def check_scans(model: ModelSpec, kernels: Kernels) -> None:
    """Reject --ssm-kernels where no layer has one, or not of that kernel."""
    scans = [layer.scan for layer in model.described if layer.scan is not None]
    why = ""
    if not scans:
        why = f"{model.name} has no state-space or linear-attention layer"
    elif kernels.ssm_kernels is SsmKernels.FUSED and any(isinstance(scan, SelectiveScan) for scan in scans):
        why = f"the fused kernel of {model.name}'s SSM layers is not modelled: give eager"
    if why:
        raise UsageError(f"got --ssm-kernels {kernels.ssm_kernels}; {why}")


def placed(run: Run, hardware: Hardware) -> Run:
    """Adapt a run to its device: PyTorch's CPU kernels on a CPU."""
    return replace(run, kernels=run.kernels.on_cpu()) if hardware.synchronous else run


def anchored(run: Run, hardware: Hardware) -> tuple[Run, Hardware]:
    """Adapt a run and its device to the run's anchor, whose factors on time are then 1."""
    run = placed(run, hardware)
    if run.anchor is None:
        return run, hardware
    own = run.anchor.hardware(hardware)
    return replace(run, anchor=replace(run.anchor, compute=1.0, communication=1.0, host=1.0)), own
