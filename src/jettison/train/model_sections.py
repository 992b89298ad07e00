"""What is trained and how it is spread and planned: sections of a recipe, each of which checks its own values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from pydantic import ConfigDict

from jettison.errors import UsageError
from jettison.parse_units import parse_bytes
from jettison.spec.layout import Layout, Schedule

STRICT: Final = ConfigDict(extra="forbid")
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

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

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
        positive(self, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "positions")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"got dropout {self.dropout}; expected a probability of at least 0 and below 1")
        if self.hidden % self.heads:
            raise UsageError(f"got {self.heads} heads, which do not divide the hidden size {self.hidden}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSection:
    """``global_batch`` sequences of ``seq`` tokens a step, ``micro_batch`` of them at a time on one data-parallel rank:
    global_batch = micro_batch x accumulation x dp.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    global_batch: int
    micro_batch: int
    seq: int

    def __post_init__(self) -> None:
        positive(self, "global_batch", "micro_batch", "seq")

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
class LayoutSection:
    """How the model is spread; the product of dp, cp, tp and pp is the number of ranks.

    Args:
        dp: data-parallel ranks: what cp, tp and pp leave.
        zero: 0: every data-parallel rank has all parameters; 2: FSDP2 that keeps them gathered between forward and
            backward; 3: FSDP2 that gathers them again.
        shards: with zero 2 or 3, ranks among which parameters are spread: all of dp x cp. Fewer make HSDP: dp x cp /
            shards replicas, each spread over so many ranks, such as those of one node.
        sp: sequence parallelism beside tensor parallelism: on where tp is above 1.
        cp: context parallelism: ranks among which every sequence is spread, attention included. Not with pp.
        schedule: gpipe, 1f1b or zero-bubble; the latter two interleave with virtual stages.
        stage_layers: layers of each stage of each device, in the order of the model; left out, evenly.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    dp: int | None = None
    zero: Literal[0, 2, 3] = 0
    shards: int | None = None
    tp: int = 1
    sp: bool | None = None
    cp: int = 1
    pp: int = 1
    virtual_stages: int = 1
    schedule: Literal["gpipe", "1f1b", "zero-bubble"] = "1f1b"
    stage_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        positive(self, "dp", "shards", "tp", "cp", "pp", "virtual_stages")
        if self.cp > 1 and self.pp > 1:
            raise UsageError(
                f"got cp {self.cp} with pp {self.pp}; context parallelism and pipelines do not go together"
            )
        if self.shards is not None and self.zero == 0:
            raise UsageError(f"got shards {self.shards} with zero 0, which spreads nothing; expected zero 2 or 3")

    def over(self, ranks: int) -> Layout:
        """The layout on this many ranks.

        Raises:
            UsageError: they are not dp x cp x tp x pp, or the choices contradict each other.
        """
        inner = self.cp * self.tp * self.pp
        dp = max(1, ranks // inner) if self.dp is None else self.dp
        if dp * inner != ranks:
            raise UsageError(
                f"layout: {self._product(dp)} = {dp * inner}, but {_counted(ranks)}; start as many "
                "with torchrun --nproc-per-node, or change the layout"
            )
        return Layout(
            dp=dp,
            zero=self.zero,
            tp=self.tp,
            sp=self.tp > 1 if self.sp is None else self.sp,
            cp=self.cp,
            pp=self.pp,
            virtual_stages=self.virtual_stages,
            stage_layers=self.stage_layers,
            schedule=Schedule(self.schedule),
        )

    def spread(self, dp: int) -> tuple[int, int]:
        """Over so many data-parallel ranks, each of which are cp ranks: how many replicas there are, and over how many
        ranks each is spread.

        Raises:
            UsageError: the shards do not divide them.
        """
        ranks = dp * self.cp
        if not self.zero:
            return ranks, 1
        shards = ranks if self.shards is None else self.shards
        if ranks % shards:
            kind = "data-parallel" if self.cp == 1 else "data-parallel times context-parallel"
            raise UsageError(f"layout.shards: got {shards}, which does not divide the {ranks} {kind} ranks")
        return ranks // shards, shards

    def _product(self, dp: int) -> str:
        """dp x tp x pp, with its numbers; with cp where there is some."""
        sizes = {"dp": dp, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        named = {name: size for name, size in sizes.items() if name != "cp" or size > 1}
        return f"{' x '.join(named)} = {' x '.join(map(str, named.values()))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSection:
    """At most one of: a ``budget`` for one rank's peak ("2GiB"), a plan ``file``, a ``policy`` word.

    Args:
        file: may be the log folder of a run that was planned; where there is a pipeline it has to be.
        offload: under a budget, tensors may also wait on the host.
        host_budget: what pinned memory of one rank may take there; left out, its part of what the host has.
        gpu: with ``offload``, a name or file that states the link to the host; on CUDA it is measured otherwise.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

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


def positive(section: object, *names: str) -> None:
    """These of a section's values are 1 or more, where they are given.

    Raises:
        UsageError: one is not.
    """
    for name in names:
        value = getattr(section, name)
        if value is not None and value < 1:
            raise UsageError(f"got {name} {value}; expected 1 or more")


def _counted(ranks: int) -> str:
    return "there is 1 rank" if ranks == 1 else f"there are {ranks} ranks"
