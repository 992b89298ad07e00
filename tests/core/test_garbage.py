"""Python's collector while Jettison works, and after it."""

import gc

import pytest

from jettison.core.process import SELDOM, seldom_collected


def test_thresholds_are_put_back_after_an_error_too() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="in here"), seldom_collected():
        assert gc.get_threshold()[0] == SELDOM
        raise ValueError("in here")
    assert gc.get_threshold() == before


def test_all_objects_are_not_looked_at_as_soon_as_it_ends() -> None:
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.unfreeze()  # what conftest has frozen
    gc.callbacks.append(note)
    try:
        with seldom_collected():
            held = [[[n] for n in range(30_000)] for _ in range(20) if gc.collect(1) >= 0]
        held.append([[n] for n in range(5_000)])
    finally:
        gc.callbacks.remove(note)
        gc.freeze()
    assert seen.count(1) >= 20
    assert 2 not in seen


def test_what_somebody_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with seldom_collected():
        pass
    assert gc.get_freeze_count()  # some of them may have ended
