"""What is asked: model, layout, kernels, precision and batch. Frozen, validated, without torch."""
