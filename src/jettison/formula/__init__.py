"""Closed form: programs and ledgers from a spec, tensor by tensor; one file an op family. Nothing here needs torch."""
