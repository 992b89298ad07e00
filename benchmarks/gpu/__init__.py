"""Benchmarks that need a CUDA device; each says so and exits with 2 where there is none."""
