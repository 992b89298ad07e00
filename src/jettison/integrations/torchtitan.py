"""A memory budget for torchtitan's Trainer."""

from jettison.frameworks.torchtitan.integration import AutoCheckpoint, TorchtitanPlan, auto_checkpoint_trainer

__all__ = ["AutoCheckpoint", "TorchtitanPlan", "auto_checkpoint_trainer"]
