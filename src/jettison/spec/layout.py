"""Parallel layout of a model: mesh axes, pipeline stages and schedule, ZeRO and FSDP.

Mesh axes: "tp" (t ranks), "cp", "ep", "dp"; pipeline stages are not an axis that shards a tensor. Sequence parallelism
shards activations that tensor parallelism replicates, along s over the axis "tp" (arXiv 2205.05198 §4.2.2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from itertools import product
from reprlib import repr as short
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.objects import non_defaults
from jettison.spec.frameworks import named
from jettison.spec.model import (
    Attention,
    LatentAttention,
    Layer,
    Mlp,
    ModelSpec,
    Moe,
    RecordedLayer,
    Scan,
    StateSpaceDual,
)


class Schedule(StrEnum):
    """Pipeline schedule."""

    GPIPE = "gpipe"  # all forwards, then all backwards (arXiv 1811.06965)
    ONE_F_ONE_B = "1f1b"  # PipeDream-flush (arXiv 2006.09503); interleaved with virtual stages (arXiv 2104.04473)
    ZERO_BUBBLE = "zero-bubble"  # backward split in two, ZB-H1 (arXiv 2401.10241)
    ZERO_BUBBLE_V = "zero-bubble-v"  # ZB-V: the same, the second virtual stages in reverse order of devices (§6 there)

    @property
    def splits(self) -> bool:
        """Whether backward is split into gradients of inputs and of weights."""
        return self in (Schedule.ZERO_BUBBLE, Schedule.ZERO_BUBBLE_V)

    def place(self, stage: int, chunk: int, stages: int) -> int:
        """Position in the model of a device's chunk."""
        back = self is Schedule.ZERO_BUBBLE_V and chunk % 2
        return chunk * stages + (stages - 1 - stage if back else stage)


class Reshard(StrEnum):
    """FSDP's ``reshard_after_forward``, with zero 3."""

    ALWAYS = "always"  # True
    BUT_FIRST = "torchtitan"  # True but for the last layers of the model; False in a pipeline: its default policy
    NEVER = "never"  # False


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroBuckets:
    """Sizes of DeepSpeed's ZeRO 3 and its buckets, in elements, with DeepSpeed's defaults.

    Args:
        live: ``stage3_max_live_parameters``: all-gathered parameters beyond which none is prefetched.
        reuse: ``stage3_max_reuse_distance``: parameters that are used again within it stay unsharded.
        prefetch: ``stage3_prefetch_bucket_size``: of one prefetch.
        persist: ``stage3_param_persistence_threshold``: parameters up to this size stay unsharded.
        reduce: ``reduce_bucket_size``: of a bucket of gradients; ``buckets``: number of them, 2 with overlap.
        sub_group: ``sub_group_size``: of a rank's parameters that are updated at once.
    """

    live: int = 10**9
    reuse: int = 10**9
    prefetch: int = 5 * 10**7
    persist: int = 10**5
    reduce: int = 5 * 10**8
    buckets: int = 1
    sub_group: int = 10**9

    @classmethod
    def parse(cls, text: str, *, hidden: int) -> ZeroBuckets | None:
        """Read ``--zero-buckets``: ``live=1e9,prefetch=auto``, ``default``, or ``none``. Raise `UsageError` for an
        unknown name, one given twice, or a value that is not a number of elements.

        Args:
            hidden: width of the model, from which transformers derives "auto" (``integrations/deepspeed.py``,
                ``trainer_config_finalize``).
        """
        if text == "none":
            return None
        found: dict[str, int] = {}
        auto = {"prefetch": 9 * hidden * hidden // 10, "persist": 10 * hidden, "reduce": hidden * hidden}
        for item in () if text == "default" else text.split(","):
            name, _, word = item.partition("=")
            name, value = name.replace("-", "_"), auto.get(name, -1) if word == "auto" else _elements(word)
            if name not in cls.__slots__ or name in found or value < 0 or (name == "reduce" and value == 0):
                raise UsageError(
                    f"got --zero-buckets {short(text)}; expected default, none, or each number of elements once, as in "
                    "live=1e9,reuse=1e9,prefetch=auto,persist=auto,reduce=5e8"
                )
            found[name] = value
        return cls(**found)


def _elements(word: str) -> int:
    """Read a number such as 5e8; -1 if it is not one."""
    return int(float(word)) if re.fullmatch(r"\d{1,18}(\.\d{1,9})?([eE]\+?\d{1,2})?", word) else -1


def whole_flags(owner: object, *names: str) -> None:
    """Reject fields that are not whole numbers of 1 or more, by the names of their flags."""
    for name in names:
        value = getattr(owner, name)
        if value is True or not isinstance(value, int) or value < 1:
            raise UsageError(f"got --{name.replace('_', '-')} {value!r}; expected a whole number of 1 or more")


class GradientSync(StrEnum):
    """With zero 3, micro-batches that reduce-scatter gradients, which are unsharded until then."""

    EACH = "each"  # all
    LAST = "last"  # the last one of a step: FSDP1's ``no_sync``, ``set_requires_gradient_sync(False)`` of FSDP2


OF_FULL_SHARDS: Final = (
    *("reshard", "reshard_ranks", "gradient_sync"),
    *("fsdp_wrap_layers_only", "fsdp_one_unit", "flat_parameters"),
)
"""Fields of a layout that need zero 3."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes, pipeline schedule and sharding.

    Args:
        expert_tp: tensor-parallel ranks of an expert; 0: as tp. Below tp, the other ranks of "tp" belong to "ep".
        zero: 0 replicates; 1 shards optimizer state over dp x cp, 2 gradients too, 3 parameters too (FSDP).
        zero_replicas: replicas of all that ZeRO shards: HSDP's, Megatron's ``--num-distributed-optimizer-instances``.
        zero_redundancy_optimizer: with zero 1, each parameter's state belongs to one rank, unsharded: torch's
            ``ZeroRedundancyOptimizer``.
        gathered_inputs: column-parallel layers save the all-gathered input under sequence parallelism, as stock DTensor
            does; otherwise they save its shard and repeat the all-gather in backward, as Megatron does.
        keeps_stage_outputs: a pipeline stage keeps the output that it has sent (arXiv 2205.05198 Appendix B).
        keeps_received: each virtual stage keeps its last received input and the gradient of it, between steps as well:
            Megatron's ``set_input_tensor``.
        stage_buffers: stages have receive buffers for all micro-batches of a step, and keep what they send:
            ``torch.distributed.pipelining``.
        micro_batch_group: micro-batches that run on one virtual stage before the next; 0: pp of them.
        wgrad_deferral_limit: micro-batches whose head gradient the last stage defers, and keeps its operands.
        stage_layers: layers of each virtual stage, in the order of the model; empty: even.
        mtp_num_layers: layers for multi-token prediction (MTP), all of them on the last stage in addition to its own.
        reshard: with zero 3, FSDP's ``reshard_after_forward``.
        reshard_ranks: with zero 3, ranks that parameters are sharded over between forward and backward; 0: all.
        gradient_sync: with zero 3, micro-batches that reduce gradients; stages with ``stage_buffers``: after the last.
        flat_parameters: with zero 3, FSDP1's flat parameters instead of FSDP2's groups.
        fsdp_wrap_layers_only: with zero 3, embedding, final norm and head belong to FSDP2's root group.
        fsdp_one_unit: with flat parameters, all layers belong to the root unit: no auto-wrap policy.
        buckets: DeepSpeed ZeRO 3 by module, with these sizes; None: by groups, as FSDP.

    Raises:
        UsageError: a size below one, or options that contradict each other.
    """

    tp: int = 1
    sp: bool = False
    cp: int = 1
    ep: int = 1
    expert_tp: int = 0
    pp: int = 1
    virtual_stages: int = 1
    micro_batch_group: int = 0
    wgrad_deferral_limit: int = 0
    schedule: Schedule = Schedule.ONE_F_ONE_B
    dp: int = 1
    zero: int = 0
    zero_replicas: int = 1
    zero_redundancy_optimizer: bool = False
    gathered_inputs: bool = False
    keeps_stage_outputs: bool = False
    keeps_received: bool = False
    stage_buffers: bool = False
    reshard: Reshard = Reshard.ALWAYS
    reshard_ranks: int = 0
    gradient_sync: GradientSync = GradientSync.EACH
    fsdp_wrap_layers_only: bool = False
    fsdp_one_unit: bool = False
    flat_parameters: bool = False
    buckets: ZeroBuckets | None = None
    stage_layers: tuple[int, ...] = ()
    mtp_num_layers: int = 0

    def __repr__(self) -> str:
        return non_defaults(self)

    def __post_init__(self) -> None:
        whole_flags(self, "tp", "cp", "ep", "pp", "virtual_stages", "dp", "zero_replicas")
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"got --zero {self.zero!r}; expected 0, 1, 2 or 3")
        if self.zero_redundancy_optimizer and self.zero != 1:
            raise UsageError(f"got --zero-redundancy-optimizer and --zero {self.zero}; it needs --zero 1")
        self._check_groups()
        if self.virtual_stages > 1 and self.pp == 1:
            raise UsageError(f"got --virtual-stages {self.virtual_stages} without a pipeline; give --pp 2 or more")
        if self.micro_batch_group and self.virtual_stages == 1:
            raise UsageError(f"got --micro-batch-group {self.micro_batch_group}; it needs --virtual-stages 2 or more")
        if (limit := self.wgrad_deferral_limit) < 0 or (limit and self.pp == 1):
            raise UsageError(f"got --wgrad-deferral-limit {limit}; expected 0, or 1 or more with --pp 2 or more")
        if self.stage_layers and self.pp == 1:
            raise UsageError("got --stage-layers without a pipeline; give --pp 2 or more")
        if self.virtual_stages > 1 and self.schedule is Schedule.GPIPE:
            raise UsageError(f"--virtual-stages needs the schedule 1f1b or zero-bubble, not {self.schedule}")
        if self.schedule is Schedule.ZERO_BUBBLE_V:
            self._check_v()
        if self.stage_buffers and self.keeps_received:
            raise UsageError(
                "got --stage-buffers, of torch.distributed.pipelining, and --keep-received, of schedules without "
                "these buffers; give one of them"
            )
        self._check_experts()
        if self.expert_shards * self.zero_replicas < 1 or (self.dp * self.cp // self.ep) % self.zero_replicas:
            raise UsageError(
                f"--zero-replicas {self.zero_replicas} does not divide the {self.dp * self.cp // self.ep} ranks with "
                "the same parameters (dp x cp, divided by ep for experts)"
            )

    def _check_v(self) -> None:
        """Reject ZB-V unless it has two virtual stages, as in torch."""
        if self.virtual_stages != 2 or self.micro_batch_group:
            raise UsageError(
                f"got the schedule {self.schedule} with --virtual-stages {self.virtual_stages}; it needs 2, and no "
                "--micro-batch-group"
            )
        if self.keeps_received or self.keeps_stage_outputs:
            raise UsageError(
                f"got the schedule {self.schedule} with --keep-received or --keep-stage-outputs, which "
                "torch.distributed.pipelining does not have; give --stage-buffers, or none of them"
            )

    def _check_groups(self) -> None:
        """Reject FSDP options without zero 3, or in combinations that are not supported."""
        flags = {
            f"--reshard-after-forward {self.reshard_after_forward}": self.resharding_differs,
            "--fsdp-wrap-layers-only": self.fsdp_wrap_layers_only,
            f"--gradient-sync {self.gradient_sync}": self.gradient_sync is GradientSync.LAST,
            "--fsdp-version 1": self.flat_parameters,
            "--fsdp-one-unit": self.fsdp_one_unit,
        }
        for flag, given in flags.items():
            if given and self.zero != 3:
                raise UsageError(f"got {flag} and --zero {self.zero}; it needs --zero 3")
        if self.schedule.splits and self.regathers:
            raise UsageError(
                f"got the schedule {self.schedule} with --stage-buffers and --zero 3; torch's split backward misses "
                "gradients of parameters that backward all-gathers: give --reshard-after-forward never, or --zero 2"
            )
        last = self.gradient_sync is GradientSync.LAST
        of_fsdp = self.fsdp_wrap_layers_only or self.flat_parameters or last
        if self.buckets is not None and (of_fsdp or self.resharding_differs):
            raise UsageError(
                "got --zero-buckets, which gather by module, with --fsdp-wrap-layers-only, --fsdp-version, "
                "--reshard-after-forward or --gradient-sync, which are FSDP's; drop one of the two"
            )
        if self.fsdp_wrap_layers_only and self.pp > 1:
            raise UsageError(
                f"got --fsdp-wrap-layers-only and --pp {self.pp}; in a pipeline embedding and head have FSDP groups"
            )
        if last and self.pp > 1 and not self.stage_buffers:
            raise UsageError(
                f"got --gradient-sync last with --pp {self.pp}; torch's pipeline stages always reduce gradients once: "
                "give --stage-buffers"
            )
        if self.flat_parameters and (self.pp > 1 or self.ep > 1 or self.resharding_differs):
            raise UsageError(
                "got --fsdp-version 1 with --pp, --ep or --reshard-after-forward, which are not modelled together: "
                "drop them, or give --fsdp-version 2"
            )
        if self.fsdp_one_unit and not self.flat_parameters:
            raise UsageError("got --fsdp-one-unit, an FSDP1 without an auto-wrap policy: give --fsdp-version 1")
        ranks = self.reshard_ranks
        conflict = self.pp > 1 or self.fsdp_wrap_layers_only
        if ranks and (ranks < 2 or ranks >= self.shards or self.shards % ranks or conflict):
            raise UsageError(
                f"got --reshard-after-forward {ranks}; expected a divisor of {self.shards}, the ranks that parameters "
                "are sharded over, above 1 and below that, without --pp and --fsdp-wrap-layers-only"
            )

    def at_zero(self, zero: int) -> Layout:
        """Return this layout at another ZeRO stage; below 3 no parameters are all-gathered."""
        usual: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name in OF_FULL_SHARDS and zero < 3}
        return replace(self, zero=zero, **usual)

    def places(self, index: int) -> tuple[int, ...]:
        """Positions in the model of a stage's chunks."""
        return tuple([self.schedule.place(index, chunk, self.pp) for chunk in range(self.virtual_stages)])

    def neighbours(self, index: int) -> tuple[tuple[bool, bool], ...]:
        """Whether the previous and the next chunk of the model are on the same device, for each chunk of a stage."""
        own = self.places(index)
        return tuple([(place - 1 in own, place + 1 in own) for place in own])

    @property
    def reshard_after_forward(self) -> str:
        """Value of ``--reshard-after-forward``."""
        return str(self.reshard_ranks or self.reshard)

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP, not DeepSpeed, shards parameters over several ranks."""
        return self.shards_parameters and self.buckets is None

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded, as under FSDP."""
        return self.zero == 3 and self.shards > 1

    @property
    def by_module(self) -> bool:
        """Whether parameters are all-gathered, or gradients reduced, by module; never with pipelines or experts."""
        return self.buckets is not None and self.zero > 0 and self.pp == 1 and self.ep == 1

    @property
    def buckets_gradients(self) -> bool:
        """Whether gradients are freed once copied to a bucket, and kept as shards."""
        return self.by_module and self.zero > 1

    @property
    def reduces_chunks(self) -> bool:
        """Whether gradients are unsharded until a stage's last backward: NOTE [ Unsharded gradients ], `fsdp2`."""
        return self.stage_buffers and self.pp > 1 and self.shards_parameters

    @property
    def regathers(self) -> bool:
        """Whether forwards of a pipeline stage reshard its weights, and backwards leave them unsharded.

        ``torch/distributed/pipelining/stage.py``, ``backward_maybe_with_nosync``:
        ``set_reshard_after_backward(False)``.
        """
        return self.reduces_chunks and self.resharded

    @property
    def resharding_differs(self) -> bool:
        """Whether any group's parameters stay unsharded, or sharded over fewer ranks, after a forward."""
        return self.reshard is not Reshard.ALWAYS or self.reshard_ranks > 0

    def _check_experts(self) -> None:
        """Reject sizes of --ep and --expert-tp that do not divide the ranks."""
        if not self.expert_tp or self.expert_tp == self.tp:
            ranks, more = self.dp * self.cp, "; --expert-tp 1 adds those of --tp" if self.tp > 1 else ""
            if ranks % self.ep:
                raise UsageError(
                    f"--ep {self.ep} does not divide dp x cp = {ranks}, the ranks of expert parallelism{more}"
                )
            return
        if self.expert_tp < 1 or self.tp % self.expert_tp or not self.sp:
            raise UsageError(
                f"got --expert-tp {self.expert_tp}; expected a divisor of --tp {self.tp}, with --sp: the other ranks "
                "of --tp route different tokens"
            )
        ranks = self.tp * self.dp * self.cp // self.expert_tp
        if ranks % self.ep:
            raise UsageError(f"--ep {self.ep} does not divide tp x dp x cp / expert tp = {ranks}")

    @property
    def resharded(self) -> bool:
        """Whether layers are resharded after a forward."""
        return self.reshard is Reshard.ALWAYS or (self.reshard is Reshard.BUT_FIRST and self.pp == 1)

    @property
    def world(self) -> int:
        """World size: all devices."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Sizes of the axes that shard tensors."""
        sizes = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "dp": self.dp}
        return sizes | {"etp": self.expert_tp, "tpx": self.tp // self.expert_tp} if self.splits_tp else sizes

    @property
    def splits_tp(self) -> bool:
        """Whether experts split "tp" into "etp", which shards their width, and "tpx", for more expert parallelism."""
        return 0 < self.expert_tp != self.tp

    @cached_property
    def within_stage(self) -> Layout:
        """Layout of the axes that shard activations, with defaults for the rest."""
        return Layout(
            tp=self.tp,
            sp=self.sp and self.tp > 1,
            cp=self.cp,
            ep=self.ep,
            expert_tp=self.expert_tp,
            dp=self.ep,
            gathered_inputs=self.gathered_inputs,
        )

    @cached_property
    def sharding(self) -> Layout:
        """Layout of the axes that decide over how many ranks ZeRO shards a weight."""
        return Layout(
            tp=self.tp if self.splits_tp else 1,
            sp=self.splits_tp,
            expert_tp=self.expert_tp if self.splits_tp else 0,
            cp=self.cp,
            ep=self.ep,
            dp=self.dp,
            zero=self.zero,
            zero_replicas=self.zero_replicas,
        )

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards all but experts."""
        return self.dp * self.cp // self.zero_replicas

    @property
    def expert_shards(self) -> int:
        """Ranks over which ZeRO shards experts."""
        wider = self.tp // self.expert_tp if self.splits_tp else 1
        return wider * self.dp * self.cp // self.ep // self.zero_replicas

    def check(self, model: ModelSpec, *, seq: int, source_seq: int = 0) -> None:
        """Check that the layout divides a model. Raise `UsageError` if heads, key-value heads, experts, layers or the
        sequence do not divide.

        Args:
            source_seq: sequence length of an encoder-decoder's encoder.
        """
        if model.recorder is not None:
            self._check_whole(model)
        for layer in model.described:
            if isinstance(layer.attention, Scan):
                self._check_scan(layer.attention, model.name)
            elif layer.attention is not None:
                heads, kv_heads = layer.attention.heads, layer.attention.kv_heads
                if heads % self.tp:
                    raise UsageError(f"--tp {self.tp} does not divide the {heads} attention heads")
                if kv_heads % self.tp and self.tp % kv_heads:
                    instead = f"the {kv_heads} key-value heads nor is a multiple of them"
                    raise UsageError(f"--tp {self.tp} neither divides {instead}")
            if layer.mlp is None:
                continue
            width, split = layer.mlp.ffn, self.splits_tp and isinstance(layer.mlp, Moe)
            if width % (self.expert_tp if split else self.tp):
                flag = f"--expert-tp {self.expert_tp}" if split else f"--tp {self.tp}"
                raise UsageError(f"{flag} does not divide the feed-forward width {width}")
            if isinstance(layer.mlp, Moe) and layer.mlp.experts % self.ep:
                raise UsageError(f"--ep {self.ep} does not divide the {layer.mlp.experts} experts")
        if self.ep > 1 and not any(layer.experts for layer in model.kinds):
            raise UsageError(f"--ep {self.ep}: {model.name} has no experts")
        if self.pp > 1 and self.mtp_num_layers != model.mtp_num_layers:
            raise UsageError(
                f"got a layout with {self.mtp_num_layers} MTP layers, and {model.name} has {model.mtp_num_layers}; "
                "expected as many"
            )
        self.layers_per_chunk(model.depth)
        ways = self.cp * (self.tp if self.sp else 1)
        if not model.words and ways > 1:
            flag, reads = f"--cp {self.cp}" if self.cp > 1 else "--sp", "audio" if model.audio else "images"
            raise UsageError(f"got {flag}, which shards sequences of text; {model.name} reads {reads}: drop {flag}")
        cut = f"--cp {self.cp}" if self.cp > 1 else f"--pp {self.pp}" if self.pp > 1 else "--sp" if ways > 1 else ""
        if model.two_stacks and cut and (cut != "--sp" or model.pair):
            raise UsageError(f"got {cut}; {model.name} is {model.two_stacks}, for which it is not modelled: drop {cut}")
        for length in (seq, source_seq):
            if length % ways:
                raise UsageError(f"a sequence of {length} does not divide over {ways} ranks (cp x tp with sp)")

    def layers_per_chunk(self, layers: int) -> tuple[int, ...]:
        """Layers of each virtual stage, in the order of the model: pp x virtual stages of them. Raise `UsageError` if
        they do not divide either way.

        They are `stage_layers`, or even; MTP layers belong to the last stage. If the layers do not divide, the
        embedding and the head count as a layer each, as for the 126 layers of Llama 3 405B on 16 stages
        (arXiv 2407.21783 §3.3.2).
        """
        *others, last = self._own_layers_per_chunk(layers - self.mtp_num_layers)
        return (*others, last + self.mtp_num_layers)

    def _own_layers_per_chunk(self, layers: int) -> tuple[int, ...]:
        """Layers of each virtual stage, without MTP layers."""
        chunks = self.pp * self.virtual_stages
        if self.stage_layers:
            check_stage_layers(self.stage_layers, layers=layers, chunks=chunks)
            return self.stage_layers
        if layers % chunks == 0:
            return (layers // chunks,) * chunks
        each, rest = divmod(layers + 2, chunks)
        if rest or each < 2:
            virtual = f" x {self.virtual_stages} virtual stages" if self.virtual_stages > 1 else ""
            counted = "with the embedding and the head counted as a layer each"
            way = f"nor do {layers + 2} {counted}; give --stage-layers"
            if not rest and each == 1:
                ends = ",".join(map(str, (0, *(1,) * (chunks - 2), 0)))
                way = f"and {counted} the first and last stage have none; for that, give --stage-layers {ends}"
            raise UsageError(f"{layers} layers do not divide over {self.pp} pipeline stages{virtual}, {way}")
        return (each - 1, *(each,) * (chunks - 2), each - 1)

    def _check_whole(self, model: ModelSpec) -> None:
        """Reject axes that shard a recorded model's blocks."""
        assert model.recorder is not None
        for name, ways in (("tp", self.tp), ("cp", self.cp), ("ep", self.ep)):
            if ways > 1:
                raise UsageError(
                    f"got --{name} {ways}, which shards blocks; the blocks of {model.recorder.words} are recorded as "
                    "they are built, and their sharding is unknown. --dp, --zero, --pp, --recompute, --offload and "
                    "--budget apply"
                )
        if self.pp > 1 and not all(layer.chained for layer in model.layers if isinstance(layer, RecordedLayer)):
            raise UsageError(
                f"got --pp {self.pp}; a block of {model.name} reads more than the previous block's output (an "
                "encoder's output, embeddings), so that a stage's inputs are unknown. Drop --pp"
            )

    def _check_scan(self, scan: Scan, name: str) -> None:
        shared = self.tp > 1 and not isinstance(scan, StateSpaceDual)  # by Megatron-Core: `Run` checks the kernels
        if isinstance(scan, StateSpaceDual) and (scan.heads % self.tp or scan.groups % self.tp):
            raise UsageError(f"--tp {self.tp} does not divide {scan.heads} heads in {scan.groups} groups of a scan")
        if shared or self.cp > 1:
            flag = f"--tp {self.tp}" if shared else f"--cp {self.cp}"
            raise UsageError(
                f"got {flag}; layers of {name} have a {scan.words}, whose sharding is not modelled. "
                "--dp, --zero, --pp, --ep, --recompute, --offload and budgets apply"
            )


def exchange_misfit(layout: Layout, model: ModelSpec) -> str:
    """Explain why all-to-all context parallelism does not divide the heads; empty: it does.

    ``transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py``,
    ``AttnFuncWithCPAndQKVOA2A.forward``: "The number of attention heads needs to be divisible by CP size!", of
    queries and of keys.
    """
    for layer in model.described:
        found = layer.attention
        if not isinstance(found, Attention | LatentAttention):
            continue
        fewest = found.kv_heads if isinstance(found, Attention) else found.heads
        for what, heads in (("attention", found.heads), ("key-value", fewest)):
            each = max(1, heads // layout.tp)
            if each % layout.cp:
                return (
                    f"got --cp-comm-type a2a with --cp {layout.cp}, which does not divide the {each} {what} "
                    "heads of a rank; give a smaller --cp, or --cp-comm-type p2p"
                )
    return ""


# Uneven layers of pipeline stages: values of --stage-layers -----------------------------------------------------------


_LETTERS = "EtmL"
_MOST_ITEMS = 1 << 16
"""Upper limit of a layout string's length with its repetitions expanded, far above any model's."""


def cut_of(text: str, model: ModelSpec, *, pp: int, virtual: int) -> tuple[int, ...]:
    """Layers of each virtual stage of a model, from ``--stage-layers`` or by nanotron's rule.

    Raises:
        UsageError: of `stage_layers` or `stages_by_cost`, or a model or pipeline that nanotron does not have.
    """
    layers = model.depth - model.mtp_num_layers
    if text not in named("stage_rules"):
        return stage_layers(text, layers=layers, chunks=pp * virtual, mtp=model.mtp_num_layers)
    first = model.layers[0]
    if not (isinstance(first, Layer) and isinstance(first.attention, Attention) and isinstance(first.mlp, Mlp)):
        raise UsageError(f"got --stage-layers {text}; its rule is for dense Llamas, and {model.name} is none")
    if virtual > 1:
        raise UsageError(f"got --stage-layers {text} with --virtual-stages {virtual}; {text} does not have them")
    h, heads = model.hidden, first.attention.heads
    layer_cost = 4 * heads * (h // heads) * h + 3 * first.mlp.ffn * h
    return stages_by_cost(layers=layers, layer_cost=layer_cost, head_cost=model.vocab * h, stages=pp)


def stage_layers(text: str, *, layers: int, chunks: int, mtp: int = 0) -> tuple[int, ...]:
    """Layers of each virtual stage, in the order of the model. Raise `UsageError` for another format, or a wrong number
    of layers or stages.

    Args:
        text: ``5,4,4,3``; ``first:3``, ``last:5`` or both, with the rest even (Megatron's
            ``--decoder-first-pipeline-num-layers``, ``--decoder-last-pipeline-num-layers``); or a string of Megatron's
            ``--pipeline-model-parallel-layout``: E is the embedding, t a layer, m an MTP layer, L the head, ``|`` ends
            a stage, ``(t|)*3`` repeats.
        layers: number of the model's layers.
        chunks: pp x virtual stages.
        mtp: number of MTP layers, m in a layout string; without m they belong to the last stage.
    """
    if re.fullmatch(r"\d+(,\d+)*", text):
        found = tuple(map(int, text.split(",")))
    elif re.fullmatch(r"(first:\d+)?,?(last:\d+)?", text) and ":" in text:
        found = _ends(text, layers, chunks)
    elif re.fullmatch(rf"[{_LETTERS}|()*\d,]+", text):
        found = _pattern(text, mtp)
    else:
        raise UsageError(
            f"got --stage-layers {text!r}; expected layers of each stage (5,4,4,3), of the first and the last "
            f"(first:3,last:5), a layout string such as Et*5|t*4|t*4|t*3L, or {', '.join(named('stage_rules'))}"
        )
    check_stage_layers(found, layers=layers, chunks=chunks)
    return found


def stages_by_cost(*, layers: int, layer_cost: int, head_cost: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage by nanotron's rule, balanced by compute. Raise `UsageError` if the head is not on the last
    stage, where nanotron has the loss.

    ``nanotron/models/base.py``, ``build_model``: a stage ends with the first block that brings the cumulative cost
    above the stages' share of the total. Only layers and the head have a cost (``models/llama.py``,
    ``get_block_compute_costs``).

    Args:
        layers: number of the model's layers.
        layer_cost: cost of one layer: 4 a d h + 3 f h, for any number of key-value heads.
        head_cost: V h.
        stages: number of pipeline stages.
    """
    whole = layers * layer_cost + head_cost
    counts, stage, done = [0] * stages, 0, 0
    for _ in range(layers):
        counts[stage] += 1
        done += layer_cost
        if done > whole * ((stage + 1) / stages):
            stage += 1
    if stage != stages - 1:
        raise UsageError(
            f"this rule of --stage-layers puts the head on stage {stage} of 0 to {stages - 1} and the loss on the "
            "next, which is not modelled: give the layers of each stage, or fewer stages"
        )
    return tuple(counts)


def check_stage_layers(counts: tuple[int, ...], *, layers: int, chunks: int) -> None:
    """Reject layers of stages that do not sum to the model's, or of another number of stages."""
    typed = ",".join(map(str, counts))
    if len(counts) != chunks:
        raise UsageError(
            f"--stage-layers {typed} has {len(counts)} stages; expected pp x virtual stages, {chunks}, in the order of "
            "the model"
        )
    if sum(counts) != layers:
        raise UsageError(f"--stage-layers {typed} makes {sum(counts)} layers; the model has {layers}")


def uneven_cuts(layers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Uneven partitions of a model: the first and last stage have up to two layers more or less than a share; the rest
    is as even as possible, larger stages in the middle. No two stages differ by more than two layers.
    """
    found: dict[tuple[int, ...], None] = {}
    share = layers / stages
    near = [n for n in range(max(0, int(share) - 1), int(share) + 3) if abs(n - share) < 2]
    for first, last in product(near, near):
        left, inner = layers - first - last, stages - 2
        if left < 0 or (inner == 0 and left):
            continue
        cut = (first, *_spread(left, inner), last)
        if 0 < max(cut) - min(cut) <= 2:
            found[cut] = None
    return tuple(found)


def _spread(layers: int, stages: int) -> tuple[int, ...]:
    """Distribute layers evenly, with the remainder in the middle."""
    if not stages:
        return ()
    each, rest = divmod(layers, stages)
    before = (stages - rest) // 2
    return tuple(each + (before <= i < before + rest) for i in range(stages))


def _ends(text: str, layers: int, chunks: int) -> tuple[int, ...]:
    ends = {name: int(count) for name, count in (part.split(":") for part in text.split(",") if part)}
    inner = chunks - len(ends)
    left = layers - sum(ends.values())
    if chunks == 1:
        raise UsageError("got --stage-layers without a pipeline; give --pp 2 or more")
    if inner < 1 or left < 0 or left % inner:
        raise UsageError(
            f"--stage-layers {text} leaves {left} layers for {inner} other stages; expected a number that divides"
        )
    first, last = ([ends[end]] if end in ends else [] for end in ("first", "last"))
    return (*first, *(left // inner,) * inner, *last)


def _pattern(text: str, mtp: int) -> tuple[int, ...]:
    """Layers of each stage of a layout string, whose repetitions are expanded innermost first."""
    flat, before = text.replace(",", ""), ""
    while flat != before:
        before = flat
        for one in re.finditer(rf"(\([{_LETTERS}|]*\)|[{_LETTERS}|])\*(\d+)", flat):
            if len(one[2]) > 6 or len(flat) + len(one[1]) * int(one[2]) > _MOST_ITEMS:
                raise UsageError(
                    f"--stage-layers {short(text)} has {short(one[0])}; expected at most {_MOST_ITEMS} items"
                )
        flat = re.sub(
            rf"(?:\(([{_LETTERS}|]*)\)|([{_LETTERS}|]))\*(\d+)",
            lambda found: (found[2] if found[1] is None else found[1]) * int(found[3]),
            flat,
        )
        flat = re.sub(rf"\(([{_LETTERS}|]*)\)(?!\*)", r"\1", flat)
    if not re.fullmatch(r"E?[t|]*m*L?", flat):
        raise UsageError(
            f"--stage-layers {text} expands to {flat}; expected the embedding E first, then layers t and stages |, "
            "then MTP layers m, with the head L on the last stage"
        )
    told = flat.count("m")
    if told and told != mtp:
        raise UsageError(
            f"--stage-layers {text} has {told} x m, MTP layers, and --mtp-num-layers is {mtp}; give the same number"
        )
    return tuple(stage.count("t") for stage in flat.split("|"))


# recorded -------------------------------------------------------------------------------------------------------------
#
# Flags that do not apply to models whose blocks were recorded


AS_BUILT: Final = frozenset(
    (
        *("dropout", "kernels", "loss", "capacity_factor", "expert_imbalance", "dispatcher"),
        *("sequential_experts", "deterministic", "gathered_inputs", "tp_comm_overlap", "cp_comm_type"),
        *("ssm_kernels", "expert_tp", "max_position_embeddings", "source_seq", "like", "lora", "base"),
        *("input_gradients", "packed", "reference", "reward", "mtp_num_layers", "recompute_modules", "offload_modules"),
    )
)
"""Options of described models that a recorded model was built with."""


def refuse_as_built(model: ModelSpec, given: tuple[str, ...]) -> None:
    """Reject options that a recorded model was built with."""
    for name in given:
        if model.recorder is not None and name in AS_BUILT:
            raise UsageError(
                f"--{name.replace('_', '-')} does not apply to {model.name}: the blocks of {model.recorder.words} are "
                "recorded as they are built. Drop the flag"
            )
