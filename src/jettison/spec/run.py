"""One training run: what the batch is, in which precision, with which kernels, and what is computed again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from reprlib import repr as short
from typing import Final

from jettison.core.errors import UsageError
from jettison.core.objects import summary
from jettison.spec.frozen_models import FrozenModel
from jettison.spec.kernels import PYTORCH, Device, Kernels, Loss
from jettison.spec.layout import Layout
from jettison.spec.model import Attention, Biases, ModelSpec
from jettison.spec.precision import (
    PRECISIONS,
    Adding,
    GradientRule,
    Gradients,
    Optimizer,
    Precision,
    gradient_rule,
    under_autocast,
)
from jettison.spec.recompute import NOTHING_AGAIN, Mode, Recompute
from jettison.spec.run_checks import check_run
from jettison.spec.states_on_host import StatesOnHost
from jettison.spec.tuning import Base, Tuning
from jettison.spec.workspaces import WORKSPACES, Workspaces

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

    def __repr__(self) -> str:
        return summary(
            self,
            f"{self.model.name}, seq {self.seq}, {self.micro_batches} × {self.micro_batch} sequences, {self.layout!r}, "
            f"{self.precision.name}",
        )

    def __post_init__(self) -> None:
        check_run(self)

    @cached_property
    def gradient_rule(self) -> GradientRule:
        """What there is of weight gradients during a backward."""
        updates = UPDATE_BYTES if self.gradients is Gradients.IN_BACKWARD and self.updates_on_cpu else 0
        whole = self.precision.gradient != self.precision.compute and self.gradients_come_whole
        return gradient_rule(self.precision, self.adding, updates, whole=whole)

    @property
    def gradients_come_whole(self) -> bool:
        """Does each backward make them anew, whole and as its products have them, and shards of them stay?"""
        widened = self.precision.gradient != self.precision.compute
        if self.states_on_host is not StatesOnHost.NONE and self.states_on_host.moves_parameters:
            return True
        return self.layout.brings_whole_gradients(widened=widened)

    @property
    def gathers_parameters(self) -> bool:
        """Are they whole on a device only while they are needed? One rank alone gets them from its host."""
        if self.states_on_host is not StatesOnHost.NONE and self.states_on_host.moves_parameters:
            return True
        return self.layout.shards_parameters

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
        return wide and held and not self.gathers_parameters

    @property
    def autocast(self) -> bool:
        """Does it, in layers whose casts are described? Recorded ones are as they were recorded."""
        return self.uses_autocast and self.model.recorder is None

    @property
    def _scene_kernels(self) -> Kernels:
        """The loss of a pipeline is the schedule's, of what its last stage has returned. Code of an encoder beside a
        decoder knows of its checkpoints: `formula.attention_biases`.
        """
        found = self.kernels
        if self.layout.pp > 1 and found.loss is Loss.UPCAST:
            found = replace(found, loss=Loss.OUTSIDE)
        asked = self.recompute.mode in (Mode.FULL, Mode.SELECTIVE_OP, Mode.SELECTIVE_OP_ALTERNATE)
        attentions = (layer.attention for layer in self.model.described)
        handed_on = any(isinstance(one, Attention) and one.biases is Biases.FIRST for one in attentions)
        return replace(found, learned_zeros=True) if asked and handed_on else found

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
            kernels=self._scene_kernels if self.kernels.tensor_masks else self.kernels,  # of transformers' code
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
