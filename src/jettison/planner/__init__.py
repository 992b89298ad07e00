"""From a live model and a budget to an applied plan."""

from jettison.planner.apply import apply
from jettison.planner.handle import Applied
from jettison.planner.live import auto_checkpoint, plan, sweep, trace

__all__ = ["Applied", "apply", "auto_checkpoint", "plan", "sweep", "trace"]
