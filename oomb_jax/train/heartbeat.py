"""A small file that tells from outside where a long step is, and that it moves."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEARTBEAT = "heartbeat.json"

EVERY = 5.0
"""Seconds between two writes, at least."""


class Heartbeat:
    """Writes `heartbeat.json`: one JSON object, replaced as a whole, so that a reader never sees half of one.

    Its `time` (seconds since 1970) is that of the last computed chunk, or of the run's begin or end; a run whose `time`
    stands still is compiling, saving, or stuck.
    """

    def __init__(
        self, directory: str | os.PathLike[str], warn: Callable[[str], None], *, clock: Callable[[], float] = time.time
    ):
        """Writes nothing before it is told something.

        Args:
          directory: the run's; it must exist.
          warn: told once where the file cannot be written, which ends no run.
          clock: seconds since 1970, for tests.
        """
        self._path = Path(directory) / HEARTBEAT
        self._warn: Callable[[str], None] | None = warn
        self._clock = clock
        self._last = -EVERY

    def beat(self, step: int, name: str, **where: int) -> None:
        """Pass `name` of step `step` has come to `where`; written unless the last beat was moments ago."""
        if abs(self._clock() - self._last) >= EVERY:  # the clock may be set back
            self._write({"step": step, "pass": name, **where})

    def begin(self, step: int) -> None:
        """The run, with its pools made, goes on after `step` steps; how it ended before no longer counts."""
        self._write({"step": step, "pass": "begun"})
        self._last -= EVERY  # and the first chunk is written

    def end(self, step: int, status: int) -> None:
        """The run has ended with this exit status, `step` steps done."""
        self._write({"step": step, "pass": "ended", "status": status})

    def _write(self, about: dict[str, Any]) -> None:
        self._last = self._clock()
        # Not forced onto the disk, unlike what a run needs to go on: after a crash of the machine nobody reads it.
        temporary = self._path.with_name(f"{HEARTBEAT}.tmp")
        try:
            temporary.write_text(json.dumps({"time": self._last} | about) + "\n", encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            if self._warn is not None:
                self._warn(f"warning: {self._path} cannot be written ({error.strerror}); the run does without it")
            self._warn = None
