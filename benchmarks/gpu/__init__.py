"""What is measured on a GPU: `python3 -m benchmarks.gpu.kit`, or `make gpu`. Needs torch, nothing else."""
