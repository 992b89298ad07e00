"""Shared basics: units, errors, dtypes, progress, atomic files, processes."""
