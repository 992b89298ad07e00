"""One training run: what the batch is, in which precision, with which kernels, and what is computed again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from reprlib import repr as short
from typing import Final

from jettison.errors import UsageError
from jettison.spec.compiled import check_compiled
from jettison.spec.fp8 import Fp8Recipe, Library, Scales
from jettison.spec.frozen_models import FrozenModel
from jettison.spec.inputs import Patches
from jettison.spec.kernels import MEGATRON, PYTORCH, ContextExchange, Device, Documents, Kernels, Loss, Scans
from jettison.spec.layout import Layout, exchange_misfit
from jettison.spec.model import ModelSpec, Pooling
from jettison.spec.modules import check_parts
from jettison.spec.precision import (
    MUONS,
    PRECISIONS,
    Adding,
    GradientRule,
    Optimizer,
    Precision,
    gradient_rule,
    under_autocast,
)
from jettison.spec.recompute import NOTHING_AGAIN, Mode, Recompute
from jettison.spec.states_on_host import StatesOnHost
from jettison.spec.tuning import Base, Tuning
from jettison.spec.workspaces import WORKSPACES, Workspaces


class Gradients(StrEnum):
    """When weight gradients are allocated."""

    ONE_BY_ONE = "one by one"  # as backward reaches each weight; freed again after the optimizer step
    UPFRONT = "upfront"  # one buffer for all, for good: Megatron's, and DDP's buckets where gradients are views of them
    BUCKETS = "buckets"  # one by one, beside buckets that are there for good: DistributedDataParallel as it comes
    IN_BACKWARD = "in backward"  # the optimizer steps within backward, and each is freed as soon as it was applied


UPDATE_BYTES: Final = 8
"""Of an element, while AdamW updates a parameter on a CPU: two tensors in fp32."""


class Software(StrEnum):
    """Whose software runs a step, where hardware files tell several apart."""

    BASE = "base"  # the file's own figures
    MEGATRON = "megatron"  # Megatron-LM with TransformerEngine as they are installed
    NEMO = "nemo"  # NVIDIA's NeMo containers from 25.09 on, tuned for each device
    NEMO_26_06 = "nemo-26.06"  # from 26.06 on: experts' products, activations and quantising in few kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What decides the tensors of one region, and nothing else: runs that share it share their layers' ledgers.

    ``again``: modules that are computed again, where narrow products keep others of their inputs then.
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

    def __hash__(self) -> int:
        """Cheap: scenes are keys of caches, and those of one search differ in these."""
        layout = self.layout
        return hash((self.model, self.seq, self.micro_batch, layout.tp, layout.sp, layout.cp, layout.ep))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training step of one model under one layout. b and s are of one micro-batch on one data-parallel rank.

    Args:
        micro_batches: forwards and backwards between two optimizer steps, on one data-parallel rank.
        dropout: probability at every site that the architecture has; 0 switches all of them off.
        capacity_factor: rows that an expert takes, as a multiple of an even share; None: no token is dropped.
        imbalance: rows that arrive at a rank's experts, as a multiple of an even share, where ranks share experts.
        padding: the batch has an attention mask, as encoders' batches do.
        tp_comm_overlap: transfers of tensor parallelism run beside products in pieces, which have their own workspaces.
        ep_comm_overlap: rows travel to experts and back beside the work of another micro-batch. Bytes stay.
        cuda_graphs: the kernels of layers are replayed without the host. Bytes stay.
        stack: whose software runs it, where hardware files tell several apart; None: what goes with the kernels.
        adding: how a weight's gradient gets to the one that is there. ``workspaces``: set aside for matrix products.
        loader_masks: the batch has an s × s mask for each sequence. ``keep_batches``: those of a step stay to its end.
        holds_output: the loop has a name for the model's logits until their backward is over.
        source_seq: tokens that the encoder of an encoder with a decoder reads; 0: there is none.
        packed: tokens of a document, where sequences are several that do not see each other; 0: they are one.
        tuning: adapters are trained beside frozen weights; None: every weight is trained.
        frozen: models beside it of which a step runs the forward.
        states_on_host: whose way of keeping the optimizer's states in the host's memory.
        compiled: each layer is compiled by itself, and keeps what torch's partitioner leaves it.

    Raises:
        UsageError: a size below one, a sequence longer than the model's positions, a layout that does not divide.
    """

    model: ModelSpec
    seq: int
    micro_batch: int = 1
    micro_batches: int = 1
    layout: Layout = field(default_factory=Layout)
    precision: Precision = PRECISIONS["bf16"]
    optimizer: Optimizer = Optimizer.ADAMW
    kernels: Kernels = PYTORCH
    recompute: Recompute = NOTHING_AGAIN
    gradients: Gradients = Gradients.ONE_BY_ONE
    dropout: float = 0.0
    capacity_factor: float | None = None
    padding: bool = False
    imbalance: float = 1.0
    tp_comm_overlap: bool = False
    ep_comm_overlap: bool = False
    cuda_graphs: bool = False
    stack: Software | None = None
    adding: Adding = Adding.WHOLE
    workspaces: Workspaces = WORKSPACES["none"]
    loader_masks: bool = False
    keep_batches: bool = False
    holds_output: bool = False
    packed: int = 0
    tuning: Tuning | None = None
    source_seq: int = 0
    frozen: tuple[FrozenModel, ...] = ()
    states_on_host: StatesOnHost = StatesOnHost.NONE
    compiled: bool = False

    def __post_init__(self) -> None:
        for name in ("seq", "micro_batch", "micro_batches"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"got --{name.replace('_', '-')} {value!r}; expected a whole number of 1 or more")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"got --dropout {self.dropout}; expected a probability of at least 0 and below 1")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise UsageError(f"got a capacity factor of {self.capacity_factor}; expected more than 0")
        if not 1 <= self.imbalance <= max(1, self.layout.ep):
            raise UsageError(
                f"got --expert-imbalance {self.imbalance:g}; expected 1, which is even, to the {self.layout.ep} ranks "
                "of --ep, one of which may be sent everything"
            )
        self.precision.check(self.optimizer, on_host=self.states_on_host is not StatesOnHost.NONE)
        if self.kernels.loss is Loss.DPO:
            self._check_pairs()
        if self.packed:
            self._check_packed()
        self._check_source()
        if self.kernels.context_exchange is ContextExchange.A2A and (why := exchange_misfit(self.layout, self.model)):
            raise UsageError(why)
        if self.model.patches is not None:
            self._check_image(self.model.patches)
        if self.model.learned_positions and (self.packed or self.seq) > self.model.max_positions:
            raise UsageError(f"got --seq {self.seq}; {self.model.name} has {self.model.max_positions} positions")
        if self.recompute.whole and self.layout.pp == 1:
            raise UsageError(
                "got --whole-micro-batches without a pipeline, where no other micro-batch is in flight; give --pp 2 or "
                "more"
            )
        if self.tuning is not None and self.precision.product is not None:
            self._check_narrow_base(self.tuning)
        if self.layout.tp > 1 and not (self.kernels.name == MEGATRON.name and self.kernels.scans is Scans.FUSED):
            scans = [layer.scan.words for layer in self.model.described if layer.scan is not None]
            if scans:
                raise UsageError(
                    f"got --tp {self.layout.tp}; layers of {self.model.name} have a {scans[0]}, whose heads "
                    "Megatron-Core alone shares: give --kernels megatron with --scans fused, or leave it away"
                )
        names = (*self.recompute.modules, *self.recompute.sent)
        if names:
            check_parts(self.model, self.kernels, names, own_norms=bool(self.workspaces.library_bytes))
        if self.tuning is not None and self.tuning.base is Base.INT8 and self.recompute.mode is not Mode.NONE:
            raise UsageError(
                f"got --base int8 with --recompute {self.recompute}; bitsandbytes holds what its products read where "
                "no checkpoint lets go of them: give --recompute none, or --base nf4"
            )
        if self.holds_output:
            self._check_output()
        if self.recompute.mode is Mode.PARTS and self.model.recorder is not None:
            raise UsageError(f"got --recompute parts; {self.model.name}'s blocks are recorded as one: give full")
        if self.compiled:
            check_compiled(self.model, self.kernels, mode=str(self.recompute.mode), tuned=self.tuning is not None)
        if self.precision.recipe is not None:
            self._check_recipe(self.precision.recipe)
        if self.optimizer in MUONS[1:] and self.layout.zero != 1 and (self.layout.dp > 1 or self.layout.zero):
            raise UsageError(f"got --optimizer {self.optimizer} with --zero {self.layout.zero}; expected --zero 1")
        if self.gradients is Gradients.IN_BACKWARD:
            self._check_in_backward()
        if self.states_on_host is not StatesOnHost.NONE:
            self._check_states_on_host()
        self.layout.check(self.model, seq=self.seq, source_seq=self.source_seq)
        for beside in self.frozen:
            self._check_beside(beside)

    def _check_recipe(self, recipe: Fp8Recipe) -> None:
        """Is it known what this recipe keeps here?

        Raises:
            UsageError: no.
        """
        lists = frozenset((*self.recompute.modules, *self.recompute.sent))
        names = lists & ({"layernorm"} if recipe.keeps_original else {"layernorm", "moe_act"})
        if self.compiled and recipe.inputs is Scales.MX:
            why = "with --compile; what torch's partitioner keeps of MX tensors was not looked at"
        elif recipe.library is Library.TE and self.layout.zero == 3:
            why = "with --zero 3; what FSDP gathers of TransformerEngine's weights is not described: give --zero 1"
        elif recipe.library is Library.TORCHAO and any(layer.experts for layer in self.model.kinds):
            why = f"and {self.model.name}, whose experts torchao's linear layers are not; give --kernels megatron"
        elif names:
            why = f"with the module {min(names)}, under which Megatron keeps other inputs; leave it away"
        else:
            misfit = recipe.misfit(self.model, self.layout, seq=self.seq, micro_batch=self.micro_batch)
            why = f"where {misfit}" if misfit else ""
        if why:
            raise UsageError(f"got --fp8-recipe {recipe.name} {why}")

    def _check_output(self) -> None:
        """Are there logits that a loop could have a name for?

        Raises:
            UsageError: no.
        """
        model, loss, why = self.model, self.kernels.loss, ""
        if self.layout.pp > 1:
            why = f"--pp {self.layout.pp}, whose schedule calls the model; --stage-buffers says what it holds"
        elif model.recorder is not None or model.waves is not None or model.pair is not None:
            why = f"{model.name}, of which no description says what it returns"
        elif model.head.pooling is not Pooling.NONE:
            why = f"{model.name}, which returns one prediction a sequence"
        elif loss in (Loss.FUSED, Loss.CHUNKED, Loss.DPO):
            why = f"--loss {loss}, for which the model makes no logits"
        elif loss is Loss.LISTED:
            why = f"--loss {loss}, whose logits stay anyway"
        elif loss is Loss.ROWS:
            why = f"--loss {loss}, which writes over logits that nobody else has: give --loss upcast"
        if why:
            raise UsageError(f"got --holds-output with {why}; leave it away")

    def _check_pairs(self) -> None:
        """Is a micro-batch pairs of sequences, on ranks that do not share a head?

        Raises:
            UsageError: no.
        """
        if self.micro_batch % 2:
            raise UsageError(
                f"got --loss dpo with --micro-batch {self.micro_batch}; a pair is two sequences, the chosen and the "
                "rejected one: give an even number"
            )
        if self.layout.tp * self.layout.cp > 1:
            ways = f"--tp {self.layout.tp}" if self.layout.tp > 1 else f"--cp {self.layout.cp}"
            raise UsageError(f"got --loss dpo with {ways}; TRL's head is whole on each rank: give another --loss")

    def _check_narrow_base(self, tuning: Tuning) -> None:
        """Frozen matrices of TransformerEngine keep their copies, and its products no inputs; adapters are layers of
        Megatron's own (Megatron-Bridge, ``peft/utils.py``, ``ParallelLinearAdapter``), as wide as activations.

        Raises:
            UsageError: other libraries' narrow products, whose frozen ones nobody has described.
        """
        recipe = self.precision.recipe
        if recipe is None or recipe.library is not Library.TE:
            raise UsageError(
                f"got --lora with --precision {self.precision.name}; TransformerEngine's products alone are described "
                "with both: give --kernels megatron and --fp8-recipe, or --precision bf16"
            )
        if tuning.base is not Base.PLAIN or self.layout.zero == 3:
            what = f"--base {tuning.base}" if tuning.base is not Base.PLAIN else "--zero 3"
            raise UsageError(f"got {what} with --lora and --fp8-recipe {recipe.name}; no description has all of them")

    def _check_packed(self) -> None:
        """Are documents packed in a way that somebody's code has?

        Raises:
            UsageError: no.
        """
        if not 1 <= self.packed <= self.seq:
            raise UsageError(f"got --packed {self.packed}; expected tokens of a document, 1 to --seq {self.seq}")
        scans = [layer.scan.words for layer in self.model.described if layer.scan is not None]
        if scans:
            raise UsageError(
                f"got --packed; layers of {self.model.name} have a {scans[0]}, which as transformers writes it carries "
                "its state from one document to the next: leave it away"
            )
        if self.layout.cp > 1:
            raise UsageError(f"got --packed with --cp {self.layout.cp}; documents that ranks share are not described")
        rows = self.kernels.of_transformers and self.kernels.documents is Documents.VARLEN
        if rows and self.micro_batch > 1:
            raise UsageError(
                f"got --packed with --micro-batch {self.micro_batch}; with flash-attn transformers packs one row alone "
                "(modeling_flash_attention_utils.py, _is_packed_sequence): --micro-batch 1 and a longer --seq"
            )

    def _check_states_on_host(self) -> None:
        """Does the framework whose way it is do this?

        Raises:
            UsageError: no.
        """
        rule, why = self.states_on_host, ""
        own = self.precision.master is None
        kinds = (Optimizer.ADAMW,) if rule.steps_there else (Optimizer.ADAMW, Optimizer.ADAM8BIT)
        if rule.moves_masters and own:
            why = f"--precision {self.precision.name}; DeepSpeed updates fp32 copies: --precision bf16"
        elif not rule.moves_masters and not own:
            why = (
                f"--precision {self.precision.name}; it updates parameters themselves: bf16-pure, bf16-autocast or fp32"
            )
        elif self.optimizer not in kinds:
            why = f"--optimizer {self.optimizer}; expected {' or '.join(kinds)}"
        elif rule is StatesOnHost.TORCHAO_GRADIENTS and self.micro_batches > 1:
            why = f"--micro-batches {self.micro_batches}; each gradient goes as it is made: 1, or torchao"
        elif rule.steps_there and self.gradients is not Gradients.ONE_BY_ONE:
            why = f"gradients {self.gradients}; give --gradients one-by-one"
        if why:
            raise UsageError(f"got --states-on-host {rule} with {why}")

    def _check_beside(self, beside: FrozenModel) -> None:
        """Can this frozen model stand beside it?

        Raises:
            UsageError: no.
        """
        if self.layout.pp > 1:
            raise UsageError(
                f"got --{beside.role} with --pp {self.layout.pp}; no rule says which stage would run its forward when: "
                "give --pp 1, and --zero 3 or --tp instead"
            )
        if beside.model is None:
            return
        if beside.model.learned_positions and self.seq > beside.model.max_positions:
            raise UsageError(
                f"got --seq {self.seq}; the {beside.role} {beside.model.name} has {beside.model.max_positions} "
                "positions"
            )
        self.layout.check(beside.model, seq=self.seq)

    def _check_source(self) -> None:
        """Two lengths where there are two stacks, and one where there is one.

        Raises:
            UsageError: this run says otherwise, or trains adapters beside them.
        """
        source, name = self.model.source, self.model.name
        beside = [self.model, *(one.model for one in self.frozen if one.model is not None)]
        kinds = [one.name for one in beside if one.two_stacks or not one.words]
        for flag, given in (("--packed", self.packed), ("a frozen model", self.frozen), ("--mtp", self.model.further)):
            if kinds and given:
                raise UsageError(f"got {flag} with {kinds[0]}, which is no decoder of words alone: leave it away")
        if self.model.waves is not None:
            self.model.waves.check(name, seq=self.seq, samples=self.source_seq)
        if self.tuning is not None and (self.model.waves or self.model.two_stacks):
            what = "hears sound" if self.model.waves else f"is {self.model.two_stacks}"
            raise UsageError(f"got --lora; {name} {what}, for which no description has it: leave it away")
        if self.model.pair is not None:
            if self.source_seq != (tokens := self.model.pair.tokens):
                got = f"got --source-seq {self.source_seq}"
                raise UsageError(f"{got}; an image of {name} has {tokens} tokens: leave it away")
            return
        if source is None:
            if self.source_seq and self.model.waves is None:
                raise UsageError(f"got --source-seq {self.source_seq}; {name} has no encoder beside a decoder")
            return
        least = source.max_positions if source.sound else 1
        most = source.max_positions if source.position_rows else self.source_seq
        if not least <= self.source_seq <= most:
            expected = f"{least} to {most}" if least < most else f"sound of {least}" if source.sound else "1 or more"
            raise UsageError(f"got --source-seq {self.source_seq}; {name} reads {expected} tokens")

    def _check_image(self, patches: Patches) -> None:
        """An image is as long as it is.

        Raises:
            UsageError: this run says otherwise.
        """
        if self.seq != patches.tokens:
            raise UsageError(
                f"got --seq {self.seq}; an image of {self.model.name} has {patches.tokens} tokens: leave it away"
            )

    def _check_in_backward(self) -> None:
        """A step within backward sees one micro-batch's gradients, on ranks that reduce each by itself.

        Raises:
            UsageError: this run is none of those.
        """
        layout, why = self.layout, ""
        if self.micro_batches > 1:
            why = f"--micro-batches {self.micro_batches}: each backward would be a step of its own"
        elif layout.pp > 1:
            why = f"--pp {layout.pp}, which needs micro-batches to fill"
        elif layout.dp * layout.cp > 1 and layout.zero < 2:
            why = f"--zero {layout.zero}, whose replicas reduce buckets of gradients; --zero 2 or 3 reduces each"
        elif self.adding is not Adding.WHOLE or self.precision.accumulator or self.precision.optimizer_gradient:
            why = "gradients that are gathered up in another buffer"
        elif self.optimizer in (Optimizer.ADAMW_FOREACH, *MUONS):
            why = f"--optimizer {self.optimizer}, which steps for many parameters at once"
        if why:
            raise UsageError(f"got --gradients in-backward with {why}")

    @cached_property
    def gradient_rule(self) -> GradientRule:
        """What there is of weight gradients during a backward."""
        updates = UPDATE_BYTES if self.gradients is Gradients.IN_BACKWARD and self.updates_on_cpu else 0
        whole = self.precision.gradient != self.precision.compute and self.gradients_come_whole
        return gradient_rule(self.precision, self.adding, updates, whole=whole)

    @property
    def gradients_come_whole(self) -> bool:
        """Does each backward make them anew, whole and as its products have them, and shards of them stay?"""
        return self.layout.brings_whole_gradients(widened=self.precision.gradient != self.precision.compute)

    @property
    def frees_gradients(self) -> bool:
        """Do gradients go as backward makes them?"""
        return self.gradients is Gradients.IN_BACKWARD or self.states_on_host.frees_gradients

    @property
    def updates_on_cpu(self) -> bool:
        """Does an update make tensors of a parameter's size? PyTorch's do, on a CPU; fused kernels do not."""
        return self.kernels.device is Device.CPU and self.optimizer in (Optimizer.ADAMW, Optimizer.MUON)

    @property
    def uses_autocast(self) -> bool:
        """Does torch.autocast cast what products of the model read? FSDP casts itself; a frozen base in 16 bits needs
        no cast, and the casts of its adapters are those of `spec.tuning`.
        """
        wide = self.precision.parameter == "float32" and self.precision.compute != "float32"
        held = self.tuning is None or self.tuning.base is Base.FP32
        return wide and held and not self.layout.shards_parameters

    @property
    def autocast(self) -> bool:
        """Does it, in layers whose casts are described? Recorded ones are as they were recorded."""
        return self.uses_autocast and self.model.recorder is None

    @cached_property
    def scene(self) -> Scene:
        """What its regions depend on."""
        layout = self.layout
        return Scene(
            model=self.model,
            seq=self.seq,
            micro_batch=self.micro_batch,
            layout=layout.within_stage,
            precision=under_autocast(self.precision) if self.autocast else self.precision,
            kernels=self.kernels,
            dropout=self.dropout,
            capacity_factor=self.capacity_factor,
            padding=self.padding,
            imbalance=self.imbalance,
            tuning=self.tuning,
            source_seq=self.source_seq,
            packed=self.packed,
            again=() if self.precision.recipe is None else self.recompute.modules,
        )


def expect_run(value: object) -> None:
    """Public functions take runs, and people give names.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(value, Run):
        raise UsageError(f"got {short(value)}; expected a run, such as jettison.run_of('llama3-8b') makes of a name")
