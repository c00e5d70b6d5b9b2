"""Recordings of jax's profiler: where they go, and one at a time."""

import jax
import pytest

from jaxpaged.errors import ConflictError, UsageError
from jaxpaged.worker.profiler import Profiler


def files(folder):
    return [path.name for path in folder.rglob("*.xplane.pb")]


def test_a_recording_is_written_to_the_folder_of_the_options_or_to_the_one_that_is_named(tmp_path):
    profiler = Profiler(str(tmp_path / "usual"))
    for named, folder in ((None, "usual"), (str(tmp_path / "other"), "other")):
        profiler.start(named)
        jax.numpy.zeros(3).block_until_ready()
        profiler.stop()
        assert len(files(tmp_path / folder)) == 1


def test_a_second_recording_and_the_end_of_none_are_conflicts(tmp_path):
    profiler = Profiler(str(tmp_path))
    with pytest.raises(ConflictError, match="no profile is being recorded"):
        profiler.stop()
    profiler.start()
    with pytest.raises(ConflictError, match="is being recorded to"):
        profiler.start()
    with pytest.raises(ConflictError, match="cannot be recorded"):
        Profiler(str(tmp_path)).start()
    profiler.close()
    profiler.close()
    assert len(files(tmp_path)) == 1


def test_while_a_recording_is_written_there_is_none_to_stop_and_none_can_start(tmp_path, monkeypatch):
    profiler, refused = Profiler(str(tmp_path)), []

    def ask_again():
        for question in (profiler.stop, profiler.start):
            with pytest.raises(ConflictError) as error:
                question()
            refused.append(str(error.value))

    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, profiler_options: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", ask_again)
    profiler.start()
    profiler.stop()
    assert len(refused) == 2
    profiler.start()


def test_without_a_folder_that_can_be_written_nothing_is_recorded(tmp_path):
    (tmp_path / "file").touch()
    for profiler, message in (
        (Profiler(None), "profile_dir is not set"),
        (Profiler(str(tmp_path / "file" / "below")), "cannot write a profile to"),
    ):
        with pytest.raises(UsageError, match=message):
            profiler.start()
        with pytest.raises(ConflictError):
            profiler.stop()
