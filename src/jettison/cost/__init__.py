"""The cost room: what work takes, in seconds. A roofline for now; measured op times come from `jettison.measure`."""

from jettison.cost.roofline import CPU, CUDA, Rates, op_seconds

__all__ = ["CPU", "CUDA", "Rates", "op_seconds"]
