"""Traces of live modules: a forward runs on fake tensors, and every op and saved tensor is recorded.

Start at `tracer`, which traces a model, and `recorder`, which records one region of it.
"""
