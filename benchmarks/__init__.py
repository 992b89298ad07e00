"""Benchmarks: run with `python -m benchmarks.peers` from the repository's root."""
