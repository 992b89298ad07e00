"""Warnings name the line of whoever called, not one of Jettison's or of a library."""

from __future__ import annotations

import contextlib
import threading

import pytest

from jettison.core.errors import warn


def test_a_warning_names_the_first_line_that_is_no_librarys() -> None:
    with pytest.warns(RuntimeWarning, match="here") as found, contextlib.ExitStack() as stack:
        stack.callback(warn, "here", RuntimeWarning)
    assert [one.filename for one in found] == [__file__]


def test_a_thread_without_a_line_of_the_user_names_its_outermost_one() -> None:
    with pytest.warns(UserWarning, match="there") as found:
        thread = threading.Thread(target=warn, args=("there",))
        thread.start()
        thread.join()
    assert [one.filename for one in found] == [threading.__file__]
