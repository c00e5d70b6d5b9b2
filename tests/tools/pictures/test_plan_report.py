"""A plan in words and as a picture: every number that matters is there, and what does not fit is said."""

import json

import msgspec
import pytest

from jaxpaged.tools.pictures.plan_report import BAR, draw_memory, json_report, memory_bar, memory_parts, text_report
from jaxpaged.tools.planning.plan import DeviceFacts, Plan, PlannedProgram, Speed, StagePlan

GIB = 2**30


def plan(**changes):
    values = {
        "model": "some/model",
        "target": "v6e:2x4",
        "device": DeviceFacts("TPU v6e", 32 * GIB, 1e12, 1e15, 4e11),
        "num_devices": 8,
        "num_hosts": 1,
        "obstacles": [],
        "tensor_parallel_size": 8,
        "options": {"dtype": "bfloat16"},
        "usable_bytes": 28 * GIB,
        "weight_bytes": 4 * GIB,
        "state_bytes": 0,
        "temporary_bytes": GIB,
        "reserved_bytes": 2 * GIB,
        "code_bytes": 3 * 2**20,
        "block_bytes": 2**20,
        "num_blocks": 22 * 1024,
        "blocks_per_request": 64,
        "concurrency": {1024: 2815, 8192: 351},
        "programs": [PlannedProgram("forward", 8, 1.5, 2**20, 2**21, collectives={"all-reduce": 9})],
        "decode": [Speed(8, 1024, 8000.0, "memory", estimated=6400.0)],
        "prefill": [Speed(1, 1024, 123456.0, "matmul")],
        "assumptions": ["a bound"],
        "advice": [],
    }
    return Plan(**{**values, **changes})


def test_the_report_has_memory_programs_concurrency_speed_and_assumptions():
    text = text_report(plan())
    for words in (
        "some/model on v6e:2x4: 8 devices (TPU v6e), the model split over 8 of them",
        "4.00 GiB",
        "22.00 GiB: 22,528",
        "1,024 KiB",
        "forward[8]",
        "9 all-reduce",
        "2,815 requests",
        "6,400",
        "800",
        "8,000",
        "123,456",
        "matmul",
        "a bound",
        "it fits",
    ):
        assert words in text, words


def test_what_does_not_fit_is_said_and_what_to_do():
    text = text_report(plan(num_blocks=3, advice=["buy memory"], programs=[]))
    assert "IT DOES NOT FIT" in text and "buy memory" in text and "at most" not in text


def test_what_would_fit_but_cannot_run_is_said():
    text = text_report(plan(obstacles=["too many hosts"], advice=["too many hosts"]))
    assert "IT DOES NOT RUN\n  - too many hosts" in text and not plan(obstacles=["too many hosts"]).fits


def test_a_program_that_does_not_compile_stands_in_its_row():
    broken = plan(programs=[PlannedProgram("forward", 8, 1.5, error="out of vmem")])
    assert not broken.fits and "does not compile" in text_report(broken)


def test_stages_are_told_apart_and_what_they_send():
    first, last = (StagePlan(n, n * GIB, 0, GIB, GIB, GIB, 0, 2**20) for n in (3, 4))
    sending = PlannedProgram("forward", 8, 1.5, stage=1, sent_bytes=3 * 2**20)
    text = text_report(plan(stages=[first, last], tensor_parallel_size=4, programs=[sending]))
    assert "the model split over 8 of them, 2 stages of 4" in text and "the stage that needs most" in text
    assert "2      4       4.00 GiB  1.00 GiB" in text and "forward[8] of stage 1" in text
    assert "none, 3.0 MiB to another stage" in text
    assert json.loads(json_report(plan(stages=[first, last])))["stages"][1]["num_layers"] == 4


def test_json_is_the_whole_plan():
    found = json.loads(json_report(plan()))
    assert found["fits"] is True and found["kv_bytes"] == 22 * GIB
    assert found["concurrency"] == {"1024": 2815, "8192": 351}
    assert found.keys() >= {field.name for field in msgspec.structs.fields(Plan)}


@pytest.mark.parametrize("changes", [{}, {"weight_bytes": 60 * GIB, "num_blocks": 0}])
def test_the_bar_is_as_long_as_the_memory_and_ends_with_what_is_free(changes):
    bar = memory_bar(plan(**changes)).split("]")[0].split("[")[1]
    assert abs(len(bar) - BAR) <= 2
    assert ("." in bar) == (not changes)
    assert sum(size for _, size in memory_parts(plan())) == 32 * GIB


def test_the_picture_shows_every_part_and_the_verdict(tmp_path):
    figure = draw_memory(plan())
    (axes,) = figure.axes
    assert [text.get_text().split("  ")[0] for text in axes.get_legend().get_texts()] == [
        "weights",
        "KV blocks",
        "temporaries",
        "free",
    ]
    assert "does not fit" not in axes.get_title()
    assert "does not fit" in draw_memory(plan(num_blocks=3)).axes[0].get_title()
