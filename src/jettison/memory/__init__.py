"""Bytes over time: spans, pipeline schedules, and the step of one pipeline stage as the product of its spans."""
