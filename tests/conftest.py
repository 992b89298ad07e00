"""Settings that all tests share."""

from hypothesis import settings

# Examples are the same in every run, and a busy machine is no failure.
settings.register_profile("jettison", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("jettison")
