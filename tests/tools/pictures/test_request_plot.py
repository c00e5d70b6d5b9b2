"""The picture of a benchmark's requests: every phase where it was, and how many were under way."""

import numpy as np
import pytest

from jaxpaged.tools.pictures.request_plot import counts_between, draw_requests

RESULT = {
    "model_id": "demo",
    "backend": "openai",
    "num_prompts": 3,
    "start_times": [10.0, 11.0, 12.0],
    "queue_times": [0.0, 0.5, 0.0],
    "ttfts": [1.0, 2.0, 0.0],
    "latencies": [3.0, 2.0, 0.5],
    "errors": ["", "", "cut"],
}


def test_every_request_has_its_phases_in_seconds_from_the_first():
    figure = draw_requests(RESULT)
    lines, under_way = figure.axes
    drawn = {each.get_label(): np.array(each.get_segments()).tolist() for each in lines.collections}
    assert drawn == {
        "held back by the client": [[[0.5, 2], [1.0, 2]]],
        "until the first token": [[[0.0, 1], [1.0, 1]], [[1.0, 2], [3.0, 2]], [[2.0, 3], [2.5, 3]]],
        "answer": [[[1.0, 1], [3.0, 1]]],
    }
    assert [(each.get_label(), each.get_xydata().tolist()) for each in lines.lines] == [("failed", [[2.5, 3.0]])]
    answered, waiting = (each.get_data() for each in under_way.patches)
    assert answered.edges.tolist() == [0.0, 1.0, 2.0, 2.5, 3.0] and answered.values.tolist() == [0, 1, 1, 1]
    assert (waiting.values - waiting.baseline).tolist() == [1, 1, 2, 1]


@pytest.mark.parametrize("count", [0, 1, 2000])
def test_no_and_many_requests_can_be_drawn(count, tmp_path):
    fields = {name: [0.1] * count for name in ("start_times", "queue_times", "ttfts", "latencies")}
    figure = draw_requests({**RESULT, **fields, "errors": [""] * count})
    figure.savefig(tmp_path / "x.png")
    drawn = {each.get_label(): len(each.get_segments()) for each in figure.axes[0].collections}
    assert drawn == (dict.fromkeys(["held back by the client", "until the first token"], count) if count else {})


def test_an_instant_counts_for_nothing():
    assert counts_between([0.0, 1.0, 2.0], [(0.0, 2.0), (1.0, 1.0), (1.0, 2.0)]) == [1, 2]
