"""Chooses: each region's frontier, one option a region under a budget in bytes, and the plan as a document."""
