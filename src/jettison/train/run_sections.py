"""What a run reads, how it steps, and what it leaves behind: sections of a recipe that check their own values."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Literal

from pydantic import ConfigDict

from jettison.errors import UsageError
from jettison.parse_units import parse_bytes
from jettison.train.model_sections import STRICT, positive


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

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

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

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

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
        positive(self, "decay_steps")


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

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    folder: str | None = None
    every: int = 0
    keep: int = 2
    asynchronous: bool = True
    on_error: Literal["continue", "stop"] = "continue"

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UsageError(f"got every {self.every}; expected 0 or more")
        positive(self, "keep")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSection:
    """Where the weights go at the end of a run, as a folder that transformers' ``from_pretrained`` loads.

    Args:
        folder: without one, nowhere.
        max_file: files hold at most so many bytes ("5GB"), or one tensor that has more.
        dtype: "fp32", "bf16" or "fp16"; as they are trained where left out.
        overwrite: replace what is there, once the new one is whole.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

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

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    data: DataSection | None = None
    every: int = 0
    batches: int | None = None

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UsageError(f"got every {self.every}; expected 0 or more")
        positive(self, "batches")
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
        report: leave a page about the run beside the log, report.html.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    folder: str = "out/train"
    every: int = 1
    tensorboard: bool = False
    gpu: str | None = None
    peak_tflops: float | None = None
    memory_steps: int = 2
    report: bool = True

    def __post_init__(self) -> None:
        positive(self, "every")
        if self.gpu is not None and self.peak_tflops is not None:
            raise UsageError("got gpu and peak_tflops; expected at most one of them")
        if self.peak_tflops is not None and not (isfinite(self.peak_tflops) and self.peak_tflops > 0):
            raise UsageError(f"got peak_tflops {self.peak_tflops}; expected a number above 0")
        if self.memory_steps < 0:
            raise UsageError(f"got memory_steps {self.memory_steps}; expected 0 or more")
