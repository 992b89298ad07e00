"""Training frameworks, a folder each: defaults, readers, export targets, live trainers, and their limits."""
