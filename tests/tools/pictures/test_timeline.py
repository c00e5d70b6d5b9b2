import itertools
import json

import pytest

from jaxpaged.errors import UsageError
from jaxpaged.tools.pictures.chrome_trace import trace_events
from jaxpaged.tools.pictures.timeline import Timeline, bars_of, close_up_range, draw_timeline, edges_of, readable_limit
from tests.tools.pictures.records import llm_after, overprinted, record, without_matplotlib

TIMES = ("schedule_begin", "schedule_end", "dispatch_end", "wait_begin", "result_ready", "update_end")


def test_the_parts_of_a_lone_step():
    times = Timeline([record(unfinished=0)]).times[0]
    assert (times.schedule, times.dispatch, times.wait, times.update) == (1, 2, 4, 2)
    assert times.host == 5
    assert times.device == 7, "from the end of scheduling to the result"
    assert (times.front_end, times.gap) == (0, 0)


def test_waiting_for_a_program_is_a_part_of_its_own():
    timeline = Timeline([record(unfinished=0, program_wait=1.5)])
    times = timeline.times[0]
    assert (times.compile, times.dispatch, times.host) == (1.5, 0.5, 3.5)
    assert times.device == 5.5, "the device has nothing to do before it has the program"
    assert ("compiling", "1.50 s of waiting for programs") in timeline.summary().lines()
    bars = {e["name"]: (e["ts"], e["dur"]) for e in trace_events(timeline.records) if e["ph"] == "X"}
    assert bars["compile 1"] == (1e6, 1.5e6) and bars["dispatch 1"] == (2.5e6, 0.5e6)
    assert bars["step 1"] == (2.5e6, 5.5e6)
    parts = draw_timeline(timeline).axes[1]
    assert "waiting for a program" in [text.get_text() for text in parts.get_legend().get_texts()]


def test_encoding_pictures_is_the_beginning_of_a_step():
    timeline = Timeline([record(unfinished=0, num_encoded=48, encoded_at=4.0)])
    assert timeline.times[0].encode == 3 and timeline.times[0].device == 7
    assert ("pictures", "48 embeddings in at most 3.00 s of the device") in timeline.summary().lines()
    assert timeline.rows[0]["encoded"] == 48 and timeline.rows[0]["encode_ms"] == 3000
    bars = {e["name"]: (e["ts"], e["dur"]) for e in trace_events(timeline.records) if e["ph"] == "X"}
    assert bars["encode 1"] == (1e6, 3e6) and bars["step 1"] == (1e6, 7e6)


@pytest.mark.parametrize("num_steps", [1, 2, 30, 1500, 20_000])
@pytest.mark.parametrize("slowest", [1.0, 1e6])
def test_no_text_of_a_picture_lies_over_another(num_steps, slowest):
    times = itertools.accumulate([0.0, 0.01 * slowest, *[0.01, 0.0001, 0.00131] * num_steps])
    records = []
    for i, begin in zip(range(num_steps), times):
        ends = dict(zip(TIMES, [begin + part * 1e-4 for part in range(6)]))
        records.append(record(10**6 + i, tokens=10 ** (i % 5), bucket=10**5, num_steps=1, program_wait=1e-5, **ends))
    pairs, beyond = overprinted(draw_timeline(Timeline(records)))
    assert not pairs and not beyond


def test_steps_one_after_the_other_leave_the_device_a_gap():
    first, second = record(1), record(2, begin=13.0)
    times = Timeline([first, second]).times
    assert times[0].front_end == 3, "from the update to the next scheduling"
    assert times[1].gap == 6, "from the first result to the second dispatch"
    assert times[1].device == 7


def test_a_step_that_was_dispatched_ahead_leaves_no_gap():
    first = record(1)
    second = record(
        2, schedule_begin=3.0, schedule_end=3.5, dispatch_end=4.0, wait_begin=11.0, result_ready=15.0, update_end=16.0
    )
    times = Timeline([first, second]).times
    assert times[1].gap == 0
    assert times[1].device == 7, "the device went on to it at the first result"
    assert times[0].front_end == 1, "until the core waits again"


def test_an_idle_engine_has_neither_gaps_nor_front_end_time():
    times = Timeline([record(1, unfinished=0), record(2, begin=1000.0)]).times
    assert times[0].front_end == 0
    assert times[1].gap == 0


def test_rows_have_a_step_each():
    rows = Timeline([record(7, tokens=5, bucket=8), record(8, tokens=8, bucket=8, begin=10.0)]).rows
    assert [(row["step"], row["tokens"], row["bucket"], row["padding"]) for row in rows] == [(7, 5, 8, 3), (8, 8, 8, 0)]
    assert rows[0]["wait_ms"] == 4000


def test_the_summary_adds_up():
    summary = Timeline([record(1), record(2, tokens=3, begin=10.0)], num_dropped=4).summary()
    assert (summary.num_steps, summary.num_tokens, summary.num_padding) == (2, 8, 8)
    assert summary.padding_share == 0.5
    assert (summary.elapsed, summary.wait.total, summary.host.total, summary.host.median) == (20, 8, 10, 5)
    assert ("forgotten", "4 earlier steps") in summary.lines()


def test_a_run_of_decode_steps_counts_padding_per_step():
    run, in_vain = record(2, tokens=9, begin=10.0, num_steps=4), record(3, 0, begin=20.0, num_steps=0)
    timeline = Timeline([record(1), run, in_vain])
    assert [(row["steps"], row["padding"]) for row in timeline.rows] == [(1, 3), (4, 4 * 8 - 9), (0, 0)]
    summary = timeline.summary()
    assert (summary.num_steps, summary.num_dispatches, summary.num_padding) == (5, 3, 3 + 23)
    assert ("steps", "5 in 30.00 s, several at a time: 3 dispatches") in summary.lines()
    counts = [event["args"] for event in trace_events(timeline.records) if event["ph"] == "C"]
    assert counts[1:] == [{"scheduled": 9 / 4, "padding": 23 / 4}, {"scheduled": 0, "padding": 0}]
    assert draw_timeline(timeline).axes[0].get_ylabel() == "tokens per step"


def test_the_steps_of_an_engine_account_for_its_tokens():
    timeline = llm_after(num_requests=5, max_tokens=4).timeline()
    assert timeline.summary().num_tokens == 5 * (9 + 3)
    assert len(timeline[2:4]) == 2
    assert [row["step"] for row in timeline[2:4].rows] == [3, 4]
    assert "steps" in repr(timeline)


def test_a_timeline_without_steps_can_be_looked_at(tmp_path):
    timeline = llm_after(num_requests=0).timeline()
    assert timeline.rows == []
    assert "0 in 0.00 s" in repr(timeline)
    assert "<table>" in timeline._repr_html_()
    assert timeline.save(tmp_path / "none.png").stat().st_size > 1000
    assert json.loads(timeline.save_trace(tmp_path / "none.json").read_text())["traceEvents"]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_is_written_in_the_form_that_its_name_asks_for(tmp_path, suffix):
    path = llm_after().timeline().save(tmp_path / f"steps{suffix}")
    magic = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(magic)


def test_the_picture_names_its_axes_and_colours():
    figure = draw_timeline(llm_after().timeline())
    tokens, parts, close_up = figure.axes
    assert tokens.get_ylabel() == "tokens per step"
    assert parts.get_ylabel() == "ms per step"
    assert close_up.get_xlabel() == "milliseconds"
    words = {text.get_text() for axes in (tokens, parts) for text in axes.get_legend().get_texts()}
    assert {"scheduled tokens", "padding", "schedule", "dispatch", "update", "waiting for the device"} <= words


def test_the_close_up_shows_steps_that_took_as_long_as_most_do():
    begins = itertools.accumulate([0.0, 10_000.0, *[10.0] * 28])
    records = [record(i, begin=begin) for i, begin in enumerate(begins, 1)]
    shown = close_up_range(records)
    assert len(shown) == 12
    assert shown.start > 0, "the first step took a thousand times as long as the others"
    assert close_up_range(records[:3]) == range(3)


def test_long_timelines_are_drawn_in_bars_of_several_steps():
    values = [float(i) for i in range(2500)]
    bars, edges = bars_of(values), edges_of(2500)
    assert len(bars) + 1 == len(edges) == 835
    assert bars[0] == 1.0 and bars[-1] == 2499.0, "means of three steps, and of the one that is left"
    assert (edges[0], edges[1], edges[-1]) == (0.5, 3.5, 2500.5)
    assert bars_of([4.0, 5.0]) == [4.0, 5.0] and edges_of(2) == [0.5, 1.5, 2.5]


def test_bars_of_a_few_slow_steps_are_cut_off():
    assert readable_limit([1.0] * 99 + [1000.0]) < 2
    assert readable_limit([1.0, 2.0, 3.0]) > 3
    assert readable_limit([0.0]) == 1


def test_a_notebook_gets_the_picture_and_the_numbers():
    shown = llm_after().timeline()._repr_html_()
    assert 'src="data:image/png;base64,' in shown
    assert "<table>" in shown


def test_without_matplotlib_there_are_the_numbers_and_what_to_install(tmp_path, monkeypatch):
    timeline = llm_after().timeline()
    with without_matplotlib(monkeypatch):
        assert "pip install" in timeline._repr_html_()
        with pytest.raises(UsageError, match="pip install matplotlib"):
            timeline.save(tmp_path / "steps.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "said"), [("steps.jpeg", "'.jpeg'"), ("nowhere/steps.png", "no folder")])
def test_a_path_that_cannot_be_is_an_error_before_anything_is_drawn(tmp_path, name, said):
    with pytest.raises(UsageError, match=said):
        llm_after().timeline().save(tmp_path / name)


def test_the_trace_holds_the_parts_of_every_step_in_microseconds(tmp_path):
    timeline = Timeline([record(1, begin=100.0), record(2, begin=110.0)])
    events = json.loads(timeline.save_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    bars = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert bars["schedule 1"] == (0, 1e6)
    assert bars["wait 1"] == (4e6, 4e6)
    assert bars["step 2"] == (11e6, 7e6)
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert counters == [{"scheduled": 5, "padding": 3}] * 2
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {tracks[event["tid"]] for event in events if event["ph"] == "X"} == {"engine core", "device"}
