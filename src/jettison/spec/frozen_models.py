"""Models beside the one that is trained: they are never trained, and a step runs their forward alone.

NOTE [ When a frozen model runs ]
A reference's log-probabilities are asked for while the policy's saved tensors live. TRL's ``trl/trainer/
dpo_trainer.py``, ``DPOTrainer._compute_loss``: ``outputs = model(...)`` first, then ``self.ref_model(...)`` under
``torch.no_grad()``, then the loss, whose backward follows. torchtune's ``recipes/full_dpo_distributed.py`` and
LLaMA-Factory's ``train/dpo/trainer.py`` do so as well. So its largest transient stands on everything that the policy
keeps. Where rewards and references are made with the answers, before any training forward (``trl/trainer/
grpo_trainer.py``, ``_generate_and_score_completions``), it stands on weights and state alone: ``when=before``, as
reward models do.

Its weights lie as the framework puts them: in shards where the policy's are (ZeRO 3, FSDP), else whole on each rank;
``trl/models/utils.py``, ``prepare_deepspeed``: "If ZeRO-3 is used, we shard both ... Otherwise ... ZeRO disabled".
Their dtype is the policy's (``setdefault("dtype", self.model.dtype)``) unless it is said. With adapters there need be
no second model: they are switched off for a forward (``use_adapter``): ``base``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.model import ModelSpec

SAME: Final = "same"
BASE: Final = "base"
_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_WORDS: Final = {"yes": True, "no": False}


class Role(StrEnum):
    """What a frozen model is there for."""

    REFERENCE = "reference"  # log-probabilities of the batch's tokens
    REWARD = "reward"  # one number for each token's state: a head of one column


class When(StrEnum):
    """Where its forward stands in a micro-batch. See NOTE [ When a frozen model runs ]."""

    AFTER = "after"  # between the policy's forward and its backward
    BEFORE = "before"  # before the policy's forward


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModel:
    """One of them.

    Args:
        model: what it is; None: the policy's own frozen weights, whose adapters are switched off.
        dtype: of its weights; "": as the policy's.
        sharded: over the ranks that the policy is sharded over.
    """

    role: Role
    model: ModelSpec | None
    dtype: str = ""
    sharded: bool = True
    when: When = When.AFTER

    def __str__(self) -> str:
        name = "the policy with its adapters off" if self.model is None else self.model.name
        dtype = f", {self.dtype}" if self.dtype else ""
        whole = "" if self.sharded or self.model is None else ", whole on each rank"
        return f"{self.role}: {name}{dtype}{whole}, {self.when} the policy's forward"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenWords:
    """``--reference`` and ``--reward`` as they are typed: a model, and perhaps ``dtype``, ``sharded`` and ``when``."""

    model: str
    dtype: str = ""
    sharded: bool | None = None
    when: When | None = None

    @classmethod
    def parse(cls, text: str, flag: str) -> FrozenWords:
        """Read ``same``, or ``same,dtype=bf16,sharded=no,when=before``.

        Raises:
            UsageError: another key or word.
        """
        model, *parts = text.split(",")
        given = dict(part.partition("=")[::2] for part in parts)
        example = f"expected {flag} same or a model, and perhaps ,dtype=bf16,sharded=no,when=before"
        if not model or "=" in model or len(given) < len(parts) or set(given) - {"dtype", "sharded", "when"}:
            raise UsageError(f"got {flag} {text!r}; {example}")
        for key, words in (("dtype", _DTYPES), ("sharded", _WORDS), ("when", set(When))):
            if key in given and given[key] not in words:
                raise UsageError(f"got {flag} {text!r}: {key}={given[key]}; expected one of {', '.join(sorted(words))}")
        return cls(
            model=model,
            dtype=_DTYPES[given["dtype"]] if "dtype" in given else "",
            sharded=_WORDS[given["sharded"]] if "sharded" in given else None,
            when=When(given["when"]) if "when" in given else None,
        )
