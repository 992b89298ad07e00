"""Python's collector while Jettison works, and after it."""

import gc

import pytest

from jettison.garbage import SELDOM, seldom_collected


def test_thresholds_are_put_back_after_an_error_too() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="in here"), seldom_collected():
        assert gc.get_threshold()[0] == SELDOM
        raise ValueError("in here")
    assert gc.get_threshold() == before
