"""Steps over time, predicted or recorded: timelines, CUDA memory snapshots and Chrome traces."""
