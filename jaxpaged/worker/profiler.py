"""jax's profiler as something that is on or off: one recording at a time in a process.

What it writes is for XProf (`plugins/profile/<time>/*.xplane.pb`) and for Perfetto. This module knows no engine.
"""

import contextlib
import os
import tempfile
import threading
from pathlib import Path

import jax

from jaxpaged.errors import ConflictError, UsageError


class Profiler:
    """Records to `folder`, unless `start` is told another one."""

    def __init__(self, folder: str | None):
        self._folder = folder
        self._recording_to: str | None = None
        self._writing = threading.Lock()

    def start(self, folder: str | None = None) -> None:
        """Begin to record. Raises ConflictError when a recording is under way, UsageError without a usable folder.

        Python's own calls are left out: there are more of them than of everything else, and writing takes three times
        as long.
        """
        if self._recording_to is not None:
            raise ConflictError(f"a profile is being recorded to {self._recording_to!r}. Stop it first.")
        folder = folder or self._folder
        if folder is None:
            raise UsageError("profile_dir is not set, so there is no folder for a profile. Start the engine with one.")
        check_folder(Path(folder))
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:  # somebody else in this process records
            raise ConflictError(f"the profile cannot be recorded: {error} Stop the other one first.") from None
        self._recording_to = os.fspath(folder)

    def stop(self) -> None:
        """End the recording and write it, which takes seconds; any thread may. Raises ConflictError when there is none,
        or when it is being written."""
        is_first = self._writing.acquire(blocking=False)
        try:
            if not is_first or self._recording_to is None:
                raise ConflictError("no profile is being recorded. Start one first.")
            jax.profiler.stop_trace()
        finally:
            if is_first:
                self._recording_to = None
                self._writing.release()

    def close(self) -> None:
        """End a recording, if one is under way."""
        with contextlib.suppress(ConflictError):
            self.stop()


def check_folder(folder: Path) -> None:
    """Make the folder, if it is not there. Raises UsageError when it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"cannot write a profile to {folder}: {error.strerror}. Choose another folder.") from None
