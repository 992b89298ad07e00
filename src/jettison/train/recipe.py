"""A training run as it is asked for: frozen sections, each of which checks its own values. No torch.

What a run does is a function of its recipe: the order of the data and every random number follow from ``seed`` and the
step (NOTE [ Positions ] in train/data_order.py), so a recipe and a step are all that a checkpoint says beside tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar, Final, Literal

from pydantic import ConfigDict

from jettison.errors import UsageError
from jettison.parse_units import parse_bytes, parse_seconds
from jettison.spec.layout import Layout, Schedule

_STRICT: Final = ConfigDict(extra="forbid")
"""A key that no section has is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """What is trained: one of ``architecture`` (with its sizes), ``preset``, ``config``, ``pretrained``, ``factory``.

    Args:
        architecture: a GPT (learned positions, GELU) or a Llama of the sizes given here.
        preset: a published model by name, with random weights.
        config: a Hugging Face config.json, or its folder; random weights.
        pretrained: a folder with a Hugging Face config.json and weights as safetensors, from which training goes on.
        factory: ``module:function`` that returns a model, (model, batch) or (model, batch, loss_fn).
        kv_heads: of a Llama: as many as heads.
        ffn: width of the feed-forward block: 4 x hidden for a GPT, 8/3 of it, rounded up to 64, for a Llama.
        tied: one weight for the token embedding and the head: a GPT has one, a Llama two.
        positions: the longest sequence: that of the batch.
        code: "reference" (``parallel/reference.py``) or "huggingface" (transformers): whose code runs. Left out, the
            first for an architecture, the second for all others; the first also knows weights of Llamas.
        attention: eager or sdpa; as the model's code has it where left out.
        build: "sharded": without weights, which each rank makes once the model is cut, its own ones only, a tensor at a
            time; "whole": every rank makes all of them, and lets go of what it does not keep. The weights are the same,
            to the bit. Left out: sharded where that is possible; a factory's model whole.
        compile: "blocks": each block runs compiled by Inductor, which keeps for backward what the plan says. In one
            process, or with data parallelism (FSDP2 too); not with tp or pp.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    architecture: Literal["gpt", "llama"] | None = None
    preset: str | None = None
    config: str | None = None
    pretrained: str | None = None
    factory: str | None = None
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int = 256
    positions: int | None = None
    dropout: float = 0.0
    tied: bool | None = None
    code: Literal["reference", "huggingface"] | None = None
    attention: Literal["eager", "sdpa"] | None = None
    build: Literal["sharded", "whole"] | None = None
    compile: Literal["blocks"] | None = None

    def __post_init__(self) -> None:
        ways = ("architecture", "preset", "config", "pretrained", "factory")
        given = [way for way in ways if getattr(self, way) is not None]
        if len(given) != 1:
            raise UsageError(f"got {' and '.join(given) or 'none'} of {', '.join(ways)}; expected exactly one")
        _positive(self, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "positions")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"got dropout {self.dropout}; expected a probability of at least 0 and below 1")
        if self.hidden % self.heads:
            raise UsageError(f"got {self.heads} heads, which do not divide the hidden size {self.hidden}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """Where tokens come from.

    Args:
        kind: "bytes": text files, one token a byte; "tokens": files of unsigned integers, memory-mapped; "stdlib": the
            source text of Python's standard library, one token a byte; "huggingface": a data set of the hub.
        files: paths or globs, read in the order of their names.
        dtype: of a token file's integers, in this machine's byte order.
        name, subset, split, column: of the data set, and where its text is.
        tokenizer: of the hub; without one, a token is a byte.
        document_end: the token that ends a document: attention then stays within documents, and positions start again
            after it (train/documents.py). Left out, a sequence is one text.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kind: Literal["bytes", "tokens", "stdlib", "huggingface"] = "stdlib"
    files: tuple[str, ...] = ()
    dtype: Literal["uint16", "uint32"] = "uint16"
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    tokenizer: str | None = None
    document_end: int | None = None

    def __post_init__(self) -> None:
        if self.document_end is not None and self.document_end < 0:
            raise UsageError(f"got document_end {self.document_end}; expected the number of a token, 0 or more")
        if bool(self.files) != (self.kind in ("bytes", "tokens")):
            verb = "needs" if self.kind in ("bytes", "tokens") else "does not take"
            raise UsageError(f"kind {self.kind!r} {verb} files")
        if (self.name is not None) != (self.kind == "huggingface"):
            verb = "needs" if self.kind == "huggingface" else "does not take"
            raise UsageError(f"kind {self.kind!r} {verb} a name")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSection:
    """``global_batch`` sequences of ``seq`` tokens a step, ``micro_batch`` of them at a time on one data-parallel rank:
    global_batch = micro_batch x accumulation x dp.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    global_batch: int
    micro_batch: int
    seq: int

    def __post_init__(self) -> None:
        _positive(self, "global_batch", "micro_batch", "seq")

    def accumulation(self, dp: int) -> int:
        """Micro-batches in a step on one data-parallel rank.

        Raises:
            UsageError: the global batch is no multiple of what all ranks take at a time.
        """
        at_a_time = self.micro_batch * dp
        if self.global_batch % at_a_time:
            raise UsageError(
                f"batch: a global_batch of {self.global_batch} is no multiple of micro_batch x dp = "
                f"{self.micro_batch} x {dp} = {at_a_time}; expected global_batch = micro_batch x accumulation x dp"
            )
        return self.global_batch // at_a_time


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSection:
    """AdamW or SGD, with a linear warm-up and a cosine down to ``min_lr``.

    Args:
        betas, eps: AdamW's.
        momentum: SGD's.
        weight_decay: of weights with two dimensions or more; norms and biases have none.
        warmup_steps: steps over which the rate rises to ``lr``.
        decay_steps: the step at which it has come down to ``min_lr``: the last one.
        clip: the largest norm of the whole gradient; 0: any.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    min_lr: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.1
    warmup_steps: int = 0
    decay_steps: int | None = None
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("lr", "min_lr", "eps", "momentum", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise UsageError(f"got {name} {value}; expected a number of 0 or more")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"got betas {list(self.betas)}; expected two numbers of at least 0 and below 1")
        if self.min_lr > self.lr:
            raise UsageError(f"got min_lr {self.min_lr}; expected at most lr, {self.lr}")
        if self.warmup_steps < 0:
            raise UsageError(f"got warmup_steps {self.warmup_steps}; expected 0 or more")
        _positive(self, "decay_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutSection:
    """How the model is spread; the product of dp, tp and pp is the number of ranks.

    Args:
        dp: data-parallel ranks: what tp and pp leave.
        zero: 0: every data-parallel rank has all parameters; 2: FSDP2 that keeps them gathered between forward and
            backward; 3: FSDP2 that gathers them again.
        shards: with zero 2 or 3, ranks among which parameters are spread: all of dp. Fewer make HSDP: dp / shards
            replicas, each spread over so many ranks, such as those of one node.
        sp: sequence parallelism beside tensor parallelism: on where tp is above 1.
        schedule: gpipe, 1f1b (interleaved with virtual stages) or zero-bubble.
        stage_layers: layers of each stage of each device, in the order of the model; left out, evenly.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    dp: int | None = None
    zero: Literal[0, 2, 3] = 0
    shards: int | None = None
    tp: int = 1
    sp: bool | None = None
    pp: int = 1
    virtual_stages: int = 1
    schedule: Literal["gpipe", "1f1b", "zero-bubble"] = "1f1b"
    stage_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _positive(self, "dp", "shards", "tp", "pp", "virtual_stages")
        if self.shards is not None and self.zero == 0:
            raise UsageError(f"got shards {self.shards} with zero 0, which spreads nothing; expected zero 2 or 3")

    def over(self, ranks: int) -> Layout:
        """The layout on this many ranks.

        Raises:
            UsageError: they are not dp x tp x pp, or the choices contradict each other.
        """
        inner = self.tp * self.pp
        dp = max(1, ranks // inner) if self.dp is None else self.dp
        if dp * inner != ranks:
            raise UsageError(
                f"layout: dp x tp x pp = {dp} x {self.tp} x {self.pp} = {dp * inner}, but {_counted(ranks)}; "
                "start as many with torchrun --nproc-per-node, or change the layout"
            )
        return Layout(
            dp=dp,
            zero=self.zero,
            tp=self.tp,
            sp=self.tp > 1 if self.sp is None else self.sp,
            pp=self.pp,
            virtual_stages=self.virtual_stages,
            stage_layers=self.stage_layers,
            schedule=Schedule(self.schedule),
        )

    def spread(self, dp: int) -> tuple[int, int]:
        """Over so many data-parallel ranks: how many replicas there are, and over how many ranks each is spread.

        Raises:
            UsageError: the shards do not divide them.
        """
        if not self.zero:
            return dp, 1
        shards = dp if self.shards is None else self.shards
        if dp % shards:
            raise UsageError(f"layout.shards: got {shards}, which does not divide the {dp} data-parallel ranks")
        return dp // shards, shards


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSection:
    """At most one of: a ``budget`` for one rank's peak ("2GiB"), a plan ``file``, a ``policy`` word.

    Args:
        file: may be the log folder of a run that was planned; where there is a pipeline it has to be.
        offload: under a budget, tensors may also wait on the host.
        host_budget: what pinned memory of one rank may take there; left out, its part of what the host has.
        gpu: with ``offload``, a name or file that states the link to the host; on CUDA it is measured otherwise.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    budget: str | None = None
    file: str | None = None
    policy: str | None = None
    offload: bool = False
    host_budget: str | None = None
    gpu: str | None = None

    def __post_init__(self) -> None:
        if len(self.given) > 1:
            raise UsageError(f"got {' and '.join(self.given)}; expected at most one of budget, file and policy")
        for quantity in (self.budget, self.host_budget):
            if quantity is not None:
                parse_bytes(quantity)
        if self.offload and self.budget is None:
            raise UsageError("plan.offload: what moves to the host is chosen under a budget; give plan.budget as well")
        if self.gpu is not None and not self.offload:
            raise UsageError(f"plan.gpu: got {self.gpu!r}, which is for plan.offload = true; leave it away")
        if self.host_budget is not None and not (self.offload or self.file or self.policy):
            raise UsageError(f"plan.host_budget: got {self.host_budget!r}, and nothing goes to the host")

    @property
    def given(self) -> tuple[str, ...]:
        """Names of what is."""
        return tuple(name for name in ("budget", "file", "policy") if getattr(self, name) is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection:
    """Where and how often the run is saved; without a ``folder`` it is not.

    Args:
        every: steps between two saves; 0: only at the end.
        keep: how many of the last ones stay; and the newest one whose weights gave a finite loss, if it is older.
        asynchronous: write while training goes on.
        on_error: what a failed save does: "continue" training with a warning, or "stop" (exit code 1). The last good
            checkpoint stays in either case. If the last save fails, the run ends with an error.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    folder: str | None = None
    every: int = 0
    keep: int = 2
    asynchronous: bool = True
    on_error: Literal["continue", "stop"] = "continue"

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UsageError(f"got every {self.every}; expected 0 or more")
        _positive(self, "keep")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSection:
    """Where the weights go at the end of a run, as a folder that transformers' ``from_pretrained`` loads.

    Args:
        folder: without one, nowhere.
        max_file: files hold at most so many bytes ("5GB"), or one tensor that has more.
        dtype: "fp32", "bf16" or "fp16"; as they are trained where left out.
        overwrite: replace what is there, once the new one is whole.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    folder: str | None = None
    max_file: str = "5GB"
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if parse_bytes(self.max_file) < 1:
            raise UsageError(f"got max_file {self.max_file}; expected 1B or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSection:
    """The loss on another text, at the end of a run and in between.

    Args:
        data: that text, as ``[data]`` says it; without one nothing is evaluated.
        every: steps between two evaluations; 0: only at the end.
        batches: global batches of the text, from its start; all that it has where left out.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    data: DataSection | None = None
    every: int = 0
    batches: int | None = None

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UsageError(f"got every {self.every}; expected 0 or more")
        _positive(self, "batches")
        if self.data is None and (self.every or self.batches):
            raise UsageError("got no data; expected a section [eval.data] that names a text")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSection:
    """What is written down.

    Args:
        folder: of log.jsonl, and of TensorBoard's files.
        every: steps between two lines.
        tensorboard: write its files too, where the package is installed.
        gpu: an accelerator by name or TOML file: its peak FLOP/s make FLOPs into MFU and HFU.
        peak_tflops: that peak for one device, in 10^12 FLOP/s, where no file has it.
        memory_steps: steps whose memory is measured on a CPU, where that is slow; on a GPU all are.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    folder: str = "out/train"
    every: int = 1
    tensorboard: bool = False
    gpu: str | None = None
    peak_tflops: float | None = None
    memory_steps: int = 2

    def __post_init__(self) -> None:
        _positive(self, "every")
        if self.gpu is not None and self.peak_tflops is not None:
            raise UsageError("got gpu and peak_tflops; expected at most one of them")
        if self.peak_tflops is not None and not (isfinite(self.peak_tflops) and self.peak_tflops > 0):
            raise UsageError(f"got peak_tflops {self.peak_tflops}; expected a number above 0")
        if self.memory_steps < 0:
            raise UsageError(f"got memory_steps {self.memory_steps}; expected 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRecipe:
    """A whole run.

    Args:
        steps: optimizer steps altogether, those before a resume counted.
        seed: of the weights, the order of the data, and dropout.
        precision: "fp32": weights as they are built; "bf16-autocast": fp32 weights, products and activations in bf16;
            "bf16": fp32 weights that forward and backward read as bf16 copies (FSDP2's mixed precision).
        on_nan: what a loss or gradient that is not finite does: "stop" the run before its weights are changed, "skip"
            the step, on all ranks, or "continue" as if nothing had happened. Checkpoints stay finite in each case.
        timeout: how long ranks wait for one that does not move, from the first step on ("120s", "10min").
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    model: ModelSection
    batch: BatchSection
    steps: int
    seed: int = 0
    precision: Literal["fp32", "bf16-autocast", "bf16"] = "fp32"
    on_nan: Literal["stop", "skip", "continue"] = "stop"
    timeout: str = "10min"
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    layout: LayoutSection = field(default_factory=LayoutSection)
    plan: PlanSection = field(default_factory=PlanSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    export: ExportSection = field(default_factory=ExportSection)
    eval: EvalSection = field(default_factory=EvalSection)
    log: LogSection = field(default_factory=LogSection)

    def __post_init__(self) -> None:
        _positive(self, "steps")
        if parse_seconds(self.timeout) < 1:
            raise UsageError(f"got timeout {self.timeout}; expected 1s or more")
        if self.seed < 0:
            raise UsageError(f"got seed {self.seed}; expected 0 or more")
        if self.model.compile is not None and (self.layout.tp > 1 or self.layout.pp > 1):
            raise UsageError(
                f'model.compile: got "{self.model.compile}" with tp {self.layout.tp} and pp {self.layout.pp}; compiled '
                "blocks are measured on one rank alone: expected tp 1 and pp 1, or no compile"
            )
        positions = self.model.positions
        if positions is not None and self.batch.seq > positions:
            raise UsageError(f"batch.seq: got {self.batch.seq}; expected at most model.positions, {positions}")


def _counted(ranks: int) -> str:
    return "there is 1 rank" if ranks == 1 else f"there are {ranks} ranks"


def _positive(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and value < 1:
            raise UsageError(f"got {name} {value}; expected 1 or more")
