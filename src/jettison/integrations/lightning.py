"""Lightning's Trainer under a budget."""

from jettison.frameworks.lightning.integration import AutoCheckpoint, TrainingStep

__all__ = ["AutoCheckpoint", "TrainingStep"]
