"""The learning rate as a function of the step. No torch, no state."""

from __future__ import annotations

from math import cos, pi

from jettison.train.recipe import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, steps: int) -> float:
    """The rate of a step, counted from 0: a linear rise over the warm-up, then a cosine down to ``min_lr``.

    Step 0 of a warm-up of w has lr / (w + 1), so that no step is lost on a rate of 0; the last step has nearly
    ``min_lr``, which later ones have exactly.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / (section.warmup_steps + 1)
    end = section.decay_steps or steps
    if step >= end:
        return section.min_lr
    done = (step - section.warmup_steps) / (end - section.warmup_steps)
    return section.min_lr + (section.lr - section.min_lr) * (1 + cos(pi * done)) / 2
