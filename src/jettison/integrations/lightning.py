"""A memory budget for Lightning's Trainer."""

from jettison.frameworks.lightning.integration import AutoCheckpoint, TrainingStep

__all__ = ["AutoCheckpoint", "TrainingStep"]
