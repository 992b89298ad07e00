"""Python's collector of reference cycles, seldom, where next to none are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SELDOM: Final = 100_000
"""Objects after which cycles are looked for. A look at all of torch's objects takes a fifth of a second: an eighth of a
search of layouts, a tenth of a small model's planning."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """In here cycles are looked for after `SELDOM` objects; afterwards as before, from a count of none."""
    before = gc.get_threshold()
    gc.set_threshold(SELDOM, before[1], SELDOM)
    try:
        yield
    finally:
        gc.collect(1)
        if not gc.get_freeze_count():  # or somebody's frozen objects would thaw
            gc.freeze()  # it sets the counts to 0: the next object would have all others looked at
            gc.unfreeze()
        gc.set_threshold(*before)
