"""Replicas simulated: times follow from the costs that are given, nothing is lost, and the front end is a limit."""

import importlib
import json
import sys

import pytest

from jaxpaged.errors import UsageError


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("simulate_replicas")


def traced(folder, lines) -> str:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return str(path)


def line(milliseconds, hash_ids, num_in, num_out):
    return {"timestamp": milliseconds, "input_length": num_in, "output_length": num_out, "hash_ids": hash_ids}


def test_a_lone_request_takes_its_steps(script, tmp_path):
    trace = traced(tmp_path, [line(0, [1, 2], 600, 3)])
    costs = "--step-ms 10 --token-us 100 --context-ns 1000 --front-request-us 5000 --front-token-us 2000"
    result = script.simulate(script.parse_args([*costs.split(), "--trace", trace, "--requests", "1"]), 1)
    prompt, decodes = 10 + 600 * 0.1, [10 + 0.1 + context * 1e-3 for context in (600, 601)]
    assert result.first == pytest.approx((5e-3 + prompt * 1e-3 + 2e-3,) * 2)
    assert result.between == pytest.approx((sum(decodes) / 2 * 1e-3,) * 2)
    assert result.hits == 0
    assert result.evenness == 1


def test_a_trace_that_is_too_short_is_repeated_with_other_content(script, tmp_path):
    trace = traced(tmp_path, [line(0, [1], 500, 2), line(9000, [1, 7], 700, 2)])
    prompts = script.prompts_for(script.parse_args(["--trace", trace, "--requests", "2", "--rate", "4"]), 2)
    first, second, third, fourth = (prompt.token_ids for prompt in prompts)
    assert [len(first), len(second)] == [500, 700]
    assert second[:500] == first != third
    assert fourth[:500] == third
    assert [prompt.seconds for prompt in prompts] == pytest.approx([0, 0.25, 0.25, 0.5], abs=1e-3)


def test_replicas_that_know_a_conversation_get_its_next_turn(script):
    small = ["--requests", "30", "--rate", "8"]
    known = script.simulate(script.parse_args(small), 4)
    by_load = script.simulate(script.parse_args([*small, "--no-affinity"]), 4)
    assert known.hits > by_load.hits + 0.2
    assert known.first[0] < by_load.first[0]
    assert 0.5 < known.evenness <= 1


def test_throughput_grows_with_replicas_until_the_front_end_has_no_time_left(script):
    arguments = ["--requests", "20", "--rate", "50"]
    one, four = (script.simulate(script.parse_args(arguments), count) for count in (1, 4))
    assert 3 < four.tokens_a_second / one.tokens_a_second < 4.5
    slow = script.simulate(script.parse_args([*arguments, "--front-token-us", "1000"]), 4)
    assert 800 < slow.tokens_a_second < 1000
    assert slow.front > 0.9


def test_it_prints_a_table_and_draws_it(script, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    chart = tmp_path / "replicas.png"
    monkeypatch.setattr(
        sys, "argv", ["simulate_replicas.py", "--replicas", "2", "1", "--requests", "4", "--chart", str(chart)]
    )
    script.main()
    rows = [text.split("|")[1].strip() for text in capsys.readouterr().out.splitlines()[2:4]]
    assert rows == ["1", "2"]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_what_is_no_trace_is_refused(script, tmp_path):
    trace = traced(tmp_path, [{"input_length": 5, "hash_ids": [1]}])
    with pytest.raises(UsageError, match="line 1 is no request"):
        script.simulate(script.parse_args(["--trace", trace]), 1)
