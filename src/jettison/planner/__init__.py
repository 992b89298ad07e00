"""From a live model and a budget to an applied plan."""

from jettison.planner.apply import apply
from jettison.planner.auto_checkpoint import auto_checkpoint, plan, sweep, trace
from jettison.planner.handle import Applied

__all__ = ["Applied", "apply", "auto_checkpoint", "plan", "sweep", "trace"]
