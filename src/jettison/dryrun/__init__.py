"""Dry runs: a training step on fake tensors, with its peak of allocated bytes."""
