"""Settings that all tests share."""

import os

from hypothesis import settings

# Examples are the same in every run, and a busy machine is no failure.
settings.register_profile("jettison", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("jettison")

# one thread a worker: two workers with two threads each would wait for one another on two cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
