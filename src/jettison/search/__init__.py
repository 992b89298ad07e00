"""Search for the fastest layout, batch and recompute plan that fits."""
