"""The application, and parameters of several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from jettison import __version__
from jettison.parse_units import Tokens

Form = Literal["human", "json"]
Model = Annotated[str, Parameter(help="module:factory, or a Hugging Face config.json or its folder.")]
Budget = Annotated[str | None, Parameter(help="Peak bytes of a training step, with a unit: 20GiB, 500MB, 123456B.")]
Seq = Annotated[Tokens | None, Parameter(help="Tokens, such as 8k, for a config: 2048 or as many as it has.")]
MicroBatch = Annotated[int | None, Parameter(help="Sequences or images in a micro-batch, for a config: 1.")]
Precision = Annotated[Literal["fp32", "bf16"] | None, Parameter(help="Of weights and activations, for a config.")]
Attention = Annotated[Literal["eager", "sdpa", "flash"] | None, Parameter(help="Attention kernels, for a config.")]
Optimizer = Annotated[Literal["adamw", "sgd", "none"], Parameter(help="Its state and its step count too.")]
Out = Annotated[Path | None, Parameter(help="Write the JSON document to this file as well.")]
Force = Annotated[bool, Parameter(negative="", show_default=False, help="Replace the file of --out.")]
Format = Annotated[Form, Parameter(name="--format", help="A table for people, or one JSON document.")]

app = App(
    name="jettison",
    version=__version__,
    help="Train under a byte budget: decide tensor by tensor what to keep or recompute, and prove it.",
    suppress_keyboard_interrupt=False,
)
