"""Fills a ledger from a spec, tensor by tensor: one file an op family. Nothing here needs torch."""
