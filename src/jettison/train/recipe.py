"""Recipe of a training run: a TOML file, or ``module:name`` in Python, becomes frozen sections. No torch.

A run is a function of its recipe: the order of the data and every random number follow from ``seed`` and the step
(NOTE [ Positions ] in train/data.py), so a checkpoint holds a recipe, a step and tensors. A field declares its smallest
value; sections check combinations of fields.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from jettison.core.errors import UsageError
from jettison.core.files import parse_toml, read_text
from jettison.core.objects import module_of
from jettison.core.parse_units import parse_bytes, parse_seconds
from jettison.spec.layout import Layout, Schedule

Code = Literal["reference", "huggingface"]
REFERENCE_CODE, HUB_CODE = get_args(Code)
Corpora = Literal["bytes", "tokens", "stdlib", "huggingface"]
FILE_DATA, HUB_DATA = get_args(Corpora)[:2], get_args(Corpora)[-1]
_NUMBER: Final = "a number of 0 or more"
_EXPECTED: Final = "expected a TOML file, or module:name of a TrainRecipe or of a function that returns one"


def at_least(smallest: int, default: Any = MISSING, expected: str = "") -> Any:
    """Field with a smallest, finite value. ``expected``: for the error message; else "``smallest`` or more"."""
    metadata = {"smallest": smallest, "expected": expected or f"{smallest} or more"}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


class RecipeSection:
    """Section of a recipe; unknown keys are errors."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            value, smallest = getattr(self, one.name), one.metadata.get("smallest")
            if smallest is not None and value is not None and not (isfinite(value) and value >= smallest):
                raise UsageError(f"got {one.name} {value}; expected {one.metadata['expected']}")
        self.check()

    def check(self) -> None:
        """Raise `UsageError` if values exclude each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection(RecipeSection):
    """Model: one of ``architecture`` (with its sizes), ``preset``, ``config``, ``pretrained``, ``factory``.

    Args:
        architecture: a GPT (learned positions, GELU) or a Llama of the sizes given here.
        preset: a published model by name, with random weights.
        config: a Hugging Face config.json, or its folder; random weights.
        pretrained: a folder with a Hugging Face config.json and safetensors to continue training from.
        factory: ``module:function`` that returns a model, (model, batch) or (model, batch, loss_fn).
        kv_heads: of a Llama; by default as many as heads.
        ffn: width of the feed-forward block; by default 4 x hidden for a GPT, 8/3 x hidden, up to 64s, for a Llama.
        tied: one weight for the token embedding and the head; by default true for a GPT, false for a Llama.
        positions: the longest sequence; by default that of the batch.
        code: "reference" (``models/reference.py``) or "huggingface" (transformers). By default reference for an
            architecture, huggingface for all others; reference also loads weights of Llamas.
        attention: eager or sdpa; by default that of the model's code.
        build: "sharded": build on meta, then each rank initializes only its own shards, one tensor at a time; "whole":
            every rank initializes the full model, and frees the rest. The weights are bitwise identical. By default
            sharded if possible; a factory's model whole.
        compile: "blocks": compile each block with Inductor, which saves for backward what the plan keeps. In one
            process, or with data parallelism (FSDP2 too); not with tp or pp.
    """

    architecture: Literal["gpt", "llama"] | None = None
    preset: str | None = None
    config: str | None = None
    pretrained: str | None = None
    factory: str | None = None
    layers: int = at_least(1, 4)
    hidden: int = at_least(1, 128)
    heads: int = at_least(1, 4)
    kv_heads: int | None = at_least(1, None)
    ffn: int | None = at_least(1, None)
    vocab: int = at_least(1, 256)
    positions: int | None = at_least(1, None)
    dropout: float = 0.0
    tied: bool | None = None
    code: Code | None = None
    attention: Literal["eager", "sdpa"] | None = None
    build: Literal["sharded", "whole"] | None = None
    compile: Literal["blocks"] | None = None

    def check(self) -> None:
        ways = ("architecture", "preset", "config", "pretrained", "factory")
        given = [way for way in ways if getattr(self, way) is not None]
        if len(given) != 1:
            raise UsageError(f"got {' and '.join(given) or 'none'} of {', '.join(ways)}; expected exactly one")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"got dropout {self.dropout}; expected a probability of at least 0 and below 1")
        if self.hidden % self.heads:
            raise UsageError(f"got {self.heads} heads, which do not divide the hidden size {self.hidden}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSection(RecipeSection):
    """Batch: ``global_batch`` sequences of ``seq`` tokens per step, ``micro_batch`` per forward of one data-parallel
    rank: global_batch = micro_batch x accumulation x dp.
    """

    global_batch: int = at_least(1)
    micro_batch: int = at_least(1)
    seq: int = at_least(1)

    def accumulation(self, dp: int) -> int:
        """Micro-batches a step and data-parallel rank. Raise `UsageError` if the batch is no such multiple."""
        at_a_time = self.micro_batch * dp
        if self.global_batch % at_a_time:
            raise UsageError(
                f"batch: a global_batch of {self.global_batch} is no multiple of micro_batch x dp = "
                f"{self.micro_batch} x {dp} = {at_a_time}; expected global_batch = micro_batch x accumulation x dp"
            )
        return self.global_batch // at_a_time


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutSection(RecipeSection):
    """Parallel layout; the product of dp, cp, tp and pp is the number of ranks.

    Args:
        dp: data-parallel ranks; by default the remaining ones.
        zero: 0: every data-parallel rank has all parameters; 2: FSDP2 that keeps parameters unsharded between forward
            and backward; 3: FSDP2 that reshards them after forward.
        shards: with zero 2 or 3, ranks over which parameters are sharded; by default all dp x cp. Fewer make HSDP:
            dp x cp / shards replicas, each sharded over this many ranks, such as those of one node.
        sp: sequence parallelism with tensor parallelism; by default on if tp is above 1.
        cp: context parallelism: ranks over which every sequence is sharded, attention included. Not with pp.
        schedule: gpipe, 1f1b or zero-bubble; the latter two interleave with virtual stages.
        stage_layers: layers of each stage of each device, in the order of the model; by default even.
    """

    dp: int | None = at_least(1, None)
    zero: Literal[0, 2, 3] = 0
    shards: int | None = at_least(1, None)
    tp: int = at_least(1, 1)
    sp: bool | None = None
    cp: int = at_least(1, 1)
    pp: int = at_least(1, 1)
    virtual_stages: int = at_least(1, 1)
    schedule: Literal["gpipe", "1f1b", "zero-bubble"] = "1f1b"
    stage_layers: tuple[int, ...] = ()

    def check(self) -> None:
        if self.cp > 1 and self.pp > 1:
            raise UsageError(
                f"got cp {self.cp} with pp {self.pp}; context parallelism and pipelines exclude each other"
            )
        if self.shards is not None and self.zero == 0:
            raise UsageError(f"got shards {self.shards} with zero 0, which shards nothing; expected zero 2 or 3")

    def over(self, ranks: int) -> Layout:
        """Return the layout on this many ranks. `UsageError` if they are not dp x cp x tp x pp, or options clash."""
        inner = self.cp * self.tp * self.pp
        dp = max(1, ranks // inner) if self.dp is None else self.dp
        if dp * inner != ranks:
            found = "there is 1 rank" if ranks == 1 else f"there are {ranks} ranks"
            raise UsageError(
                f"layout: {self._product(dp)} = {dp * inner}, but {found}; start as many "
                "with torchrun --nproc-per-node, or change the layout"
            )
        alike = {name: getattr(self, name) for name in ("zero", "tp", "cp", "pp", "virtual_stages", "stage_layers")}
        sp = self.tp > 1 if self.sp is None else self.sp
        return Layout(dp=dp, sp=sp, schedule=Schedule(self.schedule), **alike)

    def spread(self, dp: int) -> tuple[int, int]:
        """Return the replicas, and the ranks that shard each, of dp x cp. `UsageError` if shards do not divide them."""
        ranks = dp * self.cp
        if not self.zero:
            return ranks, 1
        shards = ranks if self.shards is None else self.shards
        if ranks % shards:
            kind = "data-parallel" if self.cp == 1 else "data-parallel times context-parallel"
            raise UsageError(f"layout.shards: got {shards}, which does not divide the {ranks} {kind} ranks")
        return ranks // shards, shards

    def _product(self, dp: int) -> str:
        sizes = {"dp": dp, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        named = {name: size for name, size in sizes.items() if name != "cp" or size > 1}
        return f"{' x '.join(named)} = {' x '.join(map(str, named.values()))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSection(RecipeSection):
    """Plan: at most one of a ``budget`` for one rank's peak ("2GiB"), a plan ``file``, and a ``policy``.

    Args:
        file: a plan, or the log folder of a planned run; a pipeline needs the folder.
        offload: under a budget, tensors may also be offloaded to CPU.
        host_budget: pinned CPU memory of one rank; by default its share of the host's memory.
        gpu: with ``offload``, a name or file that states the link to the host; by default it is measured on CUDA.
    """

    budget: str | None = None
    file: str | None = None
    policy: str | None = None
    offload: bool = False
    host_budget: str | None = None
    gpu: str | None = None

    def check(self) -> None:
        if len(self.given) > 1:
            raise UsageError(f"got {' and '.join(self.given)}; expected at most one of budget, file and policy")
        for quantity in (self.budget, self.host_budget):
            if quantity is not None:
                parse_bytes(quantity)
        if self.offload and self.budget is None:
            raise UsageError("plan.offload: offloaded tensors are chosen under a budget; give plan.budget as well")
        if self.gpu is not None and not self.offload:
            raise UsageError(f"plan.gpu: got {self.gpu!r} without plan.offload = true; set that, or omit plan.gpu")
        if self.host_budget is not None and not (self.offload or self.file or self.policy):
            raise UsageError(f"plan.host_budget: got {self.host_budget!r}, and nothing is offloaded; omit it")

    @property
    def given(self) -> tuple[str, ...]:
        return tuple(name for name in ("budget", "file", "policy") if getattr(self, name) is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection(RecipeSection):
    """Source of tokens.

    Args:
        kind: "bytes": text files, one token per byte; "tokens": files of unsigned integers, memory-mapped; "stdlib":
            source text of Python's standard library, one token per byte; "huggingface": a data set of the Hub.
        files: paths or globs, read in the order of their names.
        dtype: of a token file's integers, in this machine's byte order.
        name, subset, split, column: of the data set; the column has the text.
        tokenizer: of the Hub; without one, a token is a byte.
        document_end: token that ends a document: attention is masked to documents, and positions restart after it
            (train/build_model.py). By default a sequence is one document.
    """

    kind: Corpora = "stdlib"
    files: tuple[str, ...] = ()
    dtype: Literal["uint16", "uint32"] = "uint16"
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    tokenizer: str | None = None
    document_end: int | None = at_least(0, None, "the number of a token, 0 or more")

    def check(self) -> None:
        if bool(self.files) != (self.kind in FILE_DATA):
            verb = "needs" if self.kind in FILE_DATA else "does not take"
            raise UsageError(f"kind {self.kind!r} {verb} files")
        if (self.name is not None) != (self.kind == HUB_DATA):
            verb = "needs" if self.kind == HUB_DATA else "does not take"
            raise UsageError(f"kind {self.kind!r} {verb} a name")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSection(RecipeSection):
    """Optimizer: AdamW or SGD, with linear warm-up and cosine decay to ``min_lr``.

    Args:
        betas, eps: AdamW's.
        momentum: SGD's.
        weight_decay: of weights with two dims or more; norms and biases have none.
        warmup_steps: steps of the rise to ``lr``.
        decay_steps: the step that reaches ``min_lr``; by default the last one.
        clip: largest norm of the full gradient; 0: no clipping.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = at_least(0, 3e-4, _NUMBER)
    min_lr: float = at_least(0, 0.0, _NUMBER)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = at_least(0, 1e-8, _NUMBER)
    momentum: float = at_least(0, 0.0, _NUMBER)
    weight_decay: float = at_least(0, 0.1, _NUMBER)
    warmup_steps: int = at_least(0, 0)
    decay_steps: int | None = at_least(1, None)
    clip: float = at_least(0, 1.0, _NUMBER)

    def check(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"got betas {list(self.betas)}; expected two numbers of at least 0 and below 1")
        if self.min_lr > self.lr:
            raise UsageError(f"got min_lr {self.min_lr}; expected at most lr, {self.lr}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection(RecipeSection):
    """Saved checkpoints; none without a ``folder``.

    Args:
        every: steps between two saves; 0: only at the end.
        keep: number of last checkpoints to keep; the newest one whose weights gave a finite loss is kept, too.
        asynchronous: write while training continues.
        on_error: after a failed save "continue" training with a warning, or "stop" (exit code 1). The last good
            checkpoint is kept in either case. If the last save fails, the run ends with an error.
    """

    folder: str | None = None
    every: int = at_least(0, 0)
    keep: int = at_least(1, 2)
    asynchronous: bool = True
    on_error: Literal["continue", "stop"] = "continue"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSection(RecipeSection):
    """Export of the weights at the end of a run, as a folder for transformers' ``from_pretrained``.

    Args:
        folder: without one, nothing is exported.
        max_file: most bytes of a file ("5GB"), unless one tensor has more.
        dtype: "fp32", "bf16" or "fp16"; by default that of training.
        overwrite: replace an existing folder, once the new one is complete.
    """

    folder: str | None = None
    max_file: str = "5GB"
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    overwrite: bool = False

    def check(self) -> None:
        parse_bytes(self.max_file)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSection(RecipeSection):
    """Evaluation of the loss on another text.

    Args:
        data: the text, with the keys of ``[data]``; without it nothing is evaluated.
        every: steps between two evaluations; 0: only at the end.
        batches: global batches from the start of the text; by default all.
    """

    data: DataSection | None = None
    every: int = at_least(0, 0)
    batches: int | None = at_least(1, None)

    def check(self) -> None:
        if self.data is None and (self.every or self.batches):
            raise UsageError("got no data; expected a section [eval.data] that names a text")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSection(RecipeSection):
    """Log of a run.

    Args:
        folder: of log.jsonl, and of TensorBoard's files.
        every: steps between two lines.
        tensorboard: write TensorBoard's files, too, if the package is installed.
        gpu: accelerator by name or TOML file, whose peak FLOP/s give MFU and HFU.
        peak_tflops: peak of one device, in 10^12 FLOP/s, instead of a file's.
        memory_steps: steps whose memory is measured on a CPU, where that is slow; on a GPU all are.
        report: write a page about the run, report.html, next to the log.
    """

    folder: str = "out/train"
    every: int = at_least(1, 1)
    tensorboard: bool = False
    gpu: str | None = None
    peak_tflops: float | None = None
    memory_steps: int = at_least(0, 2)
    report: bool = True

    def check(self) -> None:
        if self.gpu is not None and self.peak_tflops is not None:
            raise UsageError("got gpu and peak_tflops; expected at most one of them")
        if self.peak_tflops is not None and not (isfinite(self.peak_tflops) and self.peak_tflops > 0):
            raise UsageError(f"got peak_tflops {self.peak_tflops}; expected a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRecipe(RecipeSection):
    """Recipe of a training run.

    Args:
        steps: optimizer steps in total, those before a resume included.
        seed: of the weights, the order of the data, and dropout.
        precision: "fp32": weights as built; "bf16-autocast": fp32 weights, matmuls and activations in bf16; "bf16":
            fp32 weights that forward and backward read as bf16 copies (FSDP2's mixed precision).
        on_nan: after a loss or gradient that is not finite "stop" the run before its weights change, "skip" the step on
            all ranks, or "continue". Checkpoints stay finite in each case.
        timeout: how long ranks wait for one that hangs, from the first step on ("120s", "10min").
    """

    model: ModelSection
    batch: BatchSection
    steps: int = at_least(1)
    seed: int = at_least(0, 0)
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

    def check(self) -> None:
        if parse_seconds(self.timeout) < 1:
            raise UsageError(f"got timeout {self.timeout}; expected 1s or more")
        if self.model.compile is not None and max(self.layout.tp, self.layout.cp, self.layout.pp) > 1:
            raise UsageError(
                f'model.compile: got "{self.model.compile}" with tp {self.layout.tp}, cp {self.layout.cp} and pp '
                f"{self.layout.pp}; compiled blocks are measured on a single rank: expected 1 of each, or no compile"
            )
        if self.layout.cp > 1 and self.batch.seq % (2 * self.layout.cp):
            raise UsageError(
                f"batch.seq: got {self.batch.seq} with cp {self.layout.cp}; expected a multiple of 2 x cp = "
                f"{2 * self.layout.cp}: every rank has two pieces of a sequence"
            )
        positions = self.model.positions
        if positions is not None and self.batch.seq > positions:
            raise UsageError(f"batch.seq: got {self.batch.seq}; expected at most model.positions, {positions}")


# reading a recipe ---------------------------------------------------------------------------------------------------


def read_recipe(target: str) -> TrainRecipe:
    """Read a recipe by path or name. Raise `UsageError` if there is none, or about its first invalid key."""
    path = Path(target)
    if path.suffix == ".toml" or path.exists():
        return parse_recipe(read_text(path, f"recipe {path}"), name=str(path))
    module, name = module_of(target, _EXPECTED, "the recipe ")
    value = getattr(module, name, None)
    value = value() if callable(value) else value
    if not isinstance(value, TrainRecipe):
        raise UsageError(f"recipe {target!r} is a {type(value).__name__}; {_EXPECTED}")
    return value


def parse_recipe(text: str, *, name: str = "recipe") -> TrainRecipe:
    """Parse a recipe from TOML text. Raise `UsageError` as `read_recipe` does."""
    table = parse_toml(text, name)
    try:
        return _adapter().validate_json(json.dumps(table), strict=True)
    except ValidationError as error:
        raise UsageError(f"{name}: {_first(error)}") from None
    except (TypeError, ValueError) as error:  # a date, or a number that JSON has no form for
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{name}: expected numbers, texts, flags and lists only: {error}") from None


def _first(error: ValidationError) -> str:
    """Describe the first invalid key in one line."""
    # unknown keys first: one that is missing may be misspelt
    found = min(error.errors(include_url=False), key=lambda one: one["type"] != "unexpected_keyword_argument")
    where = ".".join(str(part) for part in found["loc"])
    got = f"got {json.dumps(found['input'])}; "
    match found["type"]:
        case "unexpected_keyword_argument":
            return f"{where} is not a key; {_closest(found['loc'])}"
        case "missing":
            return f"{where} is missing"
        case "value_error":
            return f"{where}{': ' if where else ''}{found['ctx']['error']}"
        case "dataclass_type":
            return f"{where}: {got}expected a section [{where}]"
        case "literal_error":
            return f"{where}: {got}expected {found['ctx']['expected']}"
    return f"{where}: {got}{found['msg'].replace('Input should be', 'expected', 1)}"


def _closest(location: tuple[Any, ...]) -> str:
    section: Any = TrainRecipe
    for part in location[:-1]:
        hint = get_type_hints(section)[part]
        section = next(kind for kind in (hint, *get_args(hint)) if is_dataclass(kind))
    keys = [f.name for f in fields(section)]
    close = get_close_matches(str(location[-1]), keys, n=3, cutoff=0.6)
    return f"the closest are {', '.join(close)}" if close else f"expected some of {', '.join(keys)}"


@cache
def _adapter() -> TypeAdapter[TrainRecipe]:
    return TypeAdapter(TrainRecipe)
