"""Execution of a plan: drop saved tensors, recompute or fetch them in backward, and check that the values are equal.

Start at `install`, which puts a plan on a model; `planned` is a region under a plan, `frame` one call of it.
"""
