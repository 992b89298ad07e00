"""Ledgers of the tensors that a forward saves for backward, and the programs they were recorded from."""
