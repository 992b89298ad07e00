"""Bytes over time: spans, orders of a pipeline's passes, and the step of one stage as their product."""
