"""Logits in a stack or a traceback: the head and the loss of a language model."""

from __future__ import annotations

import re
from typing import Final

_WORDS: Final = re.compile(
    r"cross_entropy|CrossEntropy|log_softmax|LogSoftmax|nll_loss|NllLoss|loss_utils\.py|ForCausalLMLoss|lm_head|convert_to_fp32"
    r"|(?<![a-z_])logits?(?:_[a-z]+)?\b|compute_loss_func|selective_log_softmax|_get_per_token_logps|entropy_from_logits"
)


def speaks_of_logits(*texts: str) -> bool:
    """Whether frames, or lines of code, are those of a head or of a loss over a vocabulary."""
    return any(_WORDS.search(text) for text in texts)
