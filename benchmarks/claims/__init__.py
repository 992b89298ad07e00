"""What the sources of this project claim, and what is so: writes docs/claims.md.

    python -m benchmarks.claims

Each claim names commands and what to read of the documents that they print. Numbers on the page are these commands'
answers, and a verdict that does not follow from them fails a test (tests/lesson/test_claims.py).
"""
