"""The very step on fake tensors: its peak of allocated bytes."""
