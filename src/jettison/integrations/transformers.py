"""The Trainer of transformers, and TRL's under a budget."""

from jettison.frameworks.transformers.integration import TransformersPlan, auto_checkpoint_trainer

__all__ = ["TransformersPlan", "auto_checkpoint_trainer"]
