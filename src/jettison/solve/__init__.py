"""Choices: each region's Pareto front, one option a region under a budget in bytes, and the plan as a document."""
