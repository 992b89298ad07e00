"""Training frameworks, a folder each: defaults, export targets, live trainers, and what of it is not modelled."""
