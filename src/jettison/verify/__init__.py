"""Proofs that a step is right: a plan, or the model's own checkpointing, compared with the plain model."""
