"""A memory budget for the Trainer of transformers and for TRL's trainers."""

from jettison.frameworks.transformers.integration import TransformersPlan, auto_checkpoint_trainer

__all__ = ["TransformersPlan", "auto_checkpoint_trainer"]
