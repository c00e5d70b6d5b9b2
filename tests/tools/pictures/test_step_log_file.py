import pytest

from jaxpaged.errors import UsageError
from jaxpaged.tools.pictures.step_log_file import read_step_log, write_step_log
from tests.tools.pictures.records import llm_after, record


def test_a_log_is_read_as_it_was_written(tmp_path):
    records = [record(1), record(2, begin=10.5)]
    path = write_step_log(tmp_path / "steps.jsonl", records, (8, 16))
    assert read_step_log(path) == (records, [8, 16])
    assert len(path.read_text().splitlines()) == 3


def test_an_engine_writes_all_its_steps(tmp_path):
    timeline = llm_after().timeline()
    records, _ = read_step_log(timeline.save_log(tmp_path / "steps.jsonl"))
    assert records == timeline.records


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no step log"),
        (b"hello\n", "is no step log"),
        (b"\xff\xfe\n", "is no step log"),
        (b'{"format": "something else", "version": 1, "token_buckets": []}\n', "is no step log"),
        (b'{"format": "jaxpaged step log", "version": 2, "token_buckets": []}\n', "of version 2"),
        (b'{"format": "jaxpaged step log", "version": 1, "token_buckets": []}\n{"step_id": 1}\n', "line 2 is no step"),
        (b'{"format": "jaxpaged step log", "version": 1, "token_buckets": []}\n{"step', "line 2 is no step"),
    ],
)
def test_what_is_no_step_log_is_named(tmp_path, content, said):
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        read_step_log(path)


def test_a_file_that_is_not_there_or_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_step_log(tmp_path / "nothing")
    with pytest.raises(UsageError, match="cannot write"):
        write_step_log(tmp_path, [], ())
