"""SIGTERM and SIGINT ask a run to stop after its step; asked again, they end it at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_SAME_SECONDS: Final = 2.0
"""torchrun hands on the SIGINT that a terminal has already sent to its ranks: so close together, they are one."""


class StopRequest:
    """While entered, the first signal is remembered and the second one does what it does elsewhere."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._asked = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self._asked = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._asked > _SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
