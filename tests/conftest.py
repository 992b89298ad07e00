"""Settings that all tests share."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Examples are the same in every run, and a busy machine is no failure.
settings.register_profile("jettison", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("jettison")

# one thread a worker: two workers with two threads each would wait for one another on two cores
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def young() -> None:
    """Measurements and rehearsals collect garbage first: they need not walk what imports and other tests have made."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums over threads are not in a fixed order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
