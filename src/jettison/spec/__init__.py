"""Specification of a run: model, layout, kernels, precision and batch. Frozen, validated, without torch."""
