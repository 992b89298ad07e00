"""Diagnoses of a recorded run: memory that ran out, steps that are slow, and what would mend each."""
