"""Execution of a plan: drop saved tensors, recompute or fetch them in backward, and check that the values are equal.

Start at `install`: it puts a plan on a model; `planned` is a region under a plan, `saved_tensor_hooks` a call of it.
"""
