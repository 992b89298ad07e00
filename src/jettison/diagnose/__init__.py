"""What went wrong in a run that was recorded: memory that ran out, steps that are slow, and what would mend each."""
