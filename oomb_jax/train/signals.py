"""A run that is asked to end does so at the next chunk."""

import os
import signal
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """A signal asked the run to end."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Makes the first SIGTERM or Ctrl-C an exception at the next `check`, and says so; a second one ends the program at
    once. A chunk that is being computed, and a save that was begun, come to their end first."""

    def __init__(self):
        """Nothing is caught before the context is entered."""
        self._received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises Interrupted once a signal has come."""
        if self._received is not None:
            raise Interrupted(self._received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        for name in self._before:
            signal.signal(name, signal.SIG_DFL)
        # Not by `print`, whose buffer the interrupted code may be writing to.
        os.write(2, f"\n{signal.Signals(number).name}: the run ends after this chunk; once more ends it now\n".encode())
