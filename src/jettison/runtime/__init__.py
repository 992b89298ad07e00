"""Acts on a plan: drops what autograd saves, computes it again in backward, and checks that it is the same.

Start at `install`, which puts a plan on a model; `planned` is a region under a plan, `frame` one call of it.
"""
