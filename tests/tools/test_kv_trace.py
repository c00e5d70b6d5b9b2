"""Tiers under a trace, simulated: what is found where, and what is refused."""

import json

import pytest

from jaxpaged.errors import UsageError
from jaxpaged.tools.kv_trace import BLOCK_TOKENS, Costs, TracedRequest, read_trace, simulate

COSTS = Costs(bytes_per_token=2.0, bandwidth=1000.0, compute=lambda start, end: (end - start) * 0.01)


def request(*ids, length=None):
    return TracedRequest(length or len(ids) * BLOCK_TOKENS, list(ids))


def test_what_the_device_forgot_is_loaded_from_a_tier_that_is_large_enough():
    trace = [request(1, 2, 3), request(6, 7, 8), request(1, 2, 9), request(1, 2, 9, length=1030)]
    room = 3 * BLOCK_TOKENS  # so 6, 7 and 8 send the others away
    none = simulate(trace, room, 0, COSTS)
    assert (none.device_tokens, none.loaded_tokens, none.prompt_tokens) == (1029, 0, 9 * 512 + 1030)
    some = simulate(trace, room, 100 * 1024, COSTS)
    assert (some.device_tokens, some.loaded_tokens) == (1029, 1024)
    assert some.saved_seconds == pytest.approx(1024 * (0.01 - 0.002)) and some.hit_rate > none.hit_rate
    assert simulate(trace, room, 2 * 2 * BLOCK_TOKENS, COSTS).loaded_tokens == 0, "it holds two blocks"


def test_a_device_forgets_a_prompt_from_its_end():
    trace = [request(1, 2, 3), request(7, 8), request(1, 2, 3)]
    assert simulate(trace, 3 * BLOCK_TOKENS, 0, COSTS).device_tokens == BLOCK_TOKENS


def test_what_takes_longer_to_load_is_computed():
    trace = [request(1, 2), request(3, 4), request(1, 2)]
    slow = simulate(trace, 2 * BLOCK_TOKENS, 1 << 20, COSTS._replace(bandwidth=100.0))
    assert slow.loaded_tokens == 0 and slow.saved_seconds == 0


def test_traces_are_read_and_what_is_none_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 3, "input_length": 700, "output_length": 5, "hash_ids": [46, 47]}
    path.write_text(f"{json.dumps(line)}\n\n{json.dumps(line)}\n", encoding="utf-8")
    assert read_trace(path, TracedRequest) == [TracedRequest(700, [46, 47])] * 2
    for content, words in (
        ("{}", "line 1 is no request"),
        ("x", "line 1 is no request"),
        ('{"input_length": 5000, "hash_ids": [1]}', "512 tokens"),
        ('{"input_length": 0, "hash_ids": [1]}', "512 tokens"),
        ("", "no request"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UsageError, match=words):
            read_trace(path, TracedRequest)
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(tmp_path / "none", TracedRequest)
