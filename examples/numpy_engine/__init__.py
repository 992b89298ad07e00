"""Training a transformer in NumPy, to see what it remembers: every op by hand, every byte and FLOP counted.

The engine of docs/lesson. It is an example and no part of Jettison: it has no autograd and no torch, and does in little
code what Jettison does to real models, so that each step can be read, changed and counted.

    python -m examples.numpy_engine --help
"""
