"""The verbs: trace, plan, apply, verify; and `auto_checkpoint`, which is the first three in one line."""

from jettison.api.proof import verify
from jettison.api.verbs import Applied, apply, auto_checkpoint, plan, trace
from jettison.report.proof import Proof
from jettison.runtime.function import checkpoint, checkpointable

__all__ = ["Applied", "Proof", "apply", "auto_checkpoint", "checkpoint", "checkpointable", "plan", "trace", "verify"]
