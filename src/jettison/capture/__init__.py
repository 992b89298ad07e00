"""Fills a ledger from a live module: its forward runs on fake tensors, and every op and saved tensor is written down.

Start at `tracer`, which traces a model, and `recorder`, which writes down one region of it.
"""
