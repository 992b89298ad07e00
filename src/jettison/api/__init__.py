"""The verbs: trace, plan, apply, verify; and `auto_checkpoint`, which is the first three in one line."""

from jettison.api.verbs import Applied, apply, auto_checkpoint, plan, trace

__all__ = ["Applied", "apply", "auto_checkpoint", "plan", "trace"]
