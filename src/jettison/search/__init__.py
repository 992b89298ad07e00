"""Which layout, batch and plan is the fastest that fits."""
