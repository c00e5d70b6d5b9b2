"""`jaxpaged buckets fit`: what it reads and what it proposes."""

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.entrypoints.cli import main
from jaxpaged.tools.pictures.step_log_file import write_step_log
from tests.tools.pictures.records import record


@pytest.fixture
def log(tmp_path):
    """Nine steps of 9 tokens, one of 40; the buckets are 16, 32, 64."""
    records = [record(i, tokens=9, bucket=16) for i in range(9)] + [record(9, tokens=40, bucket=64)]
    return str(write_step_log(tmp_path / "steps.jsonl", records, (16, 32, 64)))


def test_it_prints_the_waste_of_today_and_the_proposal_to_paste(log, capsys):
    assert main(["buckets", "fit", "--log", log, "--programs", "3", "--multiple-of", "1"]) == 0
    out = capsys.readouterr().out
    assert "10 steps of 9 to 40 tokens, 121 tokens in all" in out
    assert "as it ran  87 tokens of padding, 41.8%" in out
    assert "today      87 tokens of padding, 41.8% of what is computed, with [16, 32, 64]" in out
    assert "proposed   0 tokens of padding, 0.0% of what is computed, with [9, 40, 64]" in out
    assert "token_buckets: [9, 40, 64]" in out
    EngineConfig.from_options(token_buckets=(9, 40, 64))


def test_a_run_of_decode_steps_is_as_many_steps(tmp_path, capsys):
    records = [record(1, tokens=40, bucket=64), record(2, tokens=32, bucket=16, num_steps=4), record(3, 0, num_steps=0)]
    log = str(write_step_log(tmp_path / "steps.jsonl", records, (16, 64)))
    assert main(["buckets", "fit", "--log", log, "--programs", "2"]) == 0
    out = capsys.readouterr().out
    assert "5 steps of 8 to 40 tokens, 72 tokens in all" in out
    assert "as it ran  56 tokens of padding" in out
    assert "with [8, 64]" in out


def test_sizes_are_multiples_of_eight_unless_told_otherwise(log, capsys):
    assert main(["buckets", "fit", "--log", log, "--programs", "3"]) == 0
    assert "--token-buckets 16,40,64" in capsys.readouterr().out


def test_sizes_of_an_engine_without_tiles_are_any(tmp_path, capsys):
    log = str(write_step_log(tmp_path / "steps.jsonl", [record(1, tokens=9, bucket=12)], (1, 2, 4, 12)))
    assert main(["buckets", "fit", "--log", log, "--programs", "2"]) == 0
    assert "--token-buckets 9,12" in capsys.readouterr().out


def test_the_largest_size_can_be_given(log, capsys):
    assert main(["buckets", "fit", "--log", log, "--programs", "1", "--largest", "128"]) == 0
    assert "token_buckets: [128]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--programs", "0"], "--programs is 0; it must be at least 1"),
        (["--programs", "2", "--multiple-of", "0"], "--multiple-of is 0"),
        (["--programs", "2", "--largest", "32"], "a step of 40 tokens"),
    ],
)
def test_numbers_that_make_no_sense_are_wrong_usage(log, capsys, arguments, said):
    assert main(["buckets", "fit", "--log", log, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_empty_log_and_a_missing_one_are_wrong_usage(tmp_path, capsys):
    empty = write_step_log(tmp_path / "empty", [], (8,))
    assert main(["buckets", "fit", "--log", str(empty), "--programs", "2"]) == 2
    assert "has no steps" in capsys.readouterr().err
    assert main(["buckets", "fit", "--log", str(tmp_path / "gone"), "--programs", "2"]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_an_action_is_needed(capsys):
    assert main(["buckets"]) == 2
    assert "fit " in capsys.readouterr().err
