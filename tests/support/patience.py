"""How long tests wait for what must come: so long that only something that hangs is not there yet."""

PATIENCE = 3000
"""Seconds. A machine may be ten times as busy as ours, and `timeout` in pyproject.toml is longer still."""
