"""Spans of prompts as a collector gets them: times are those of the metrics, parents those of the headers."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.engine.async_llm import CHILDREN_AT_ONCE
from jaxpaged.engine.merged_results import merged_stats
from jaxpaged.engine.observability import trace_export
from jaxpaged.engine.observability.metrics import Counter, Histogram
from jaxpaged.engine.observability.trace_export import check_endpoint
from jaxpaged.engine.observability.tracing import times_of
from jaxpaged.engine.output.prompt_state import PromptState
from jaxpaged.errors import ConfigError, RequestError
from jaxpaged.messages import EngineCoreRequest, SchedulerStats
from jaxpaged.pooling import PoolingParams
from jaxpaged.sampling_params import SamplingParams
from tests.engine.collector import (
    NOT_SAMPLED,
    PARENT_ID,
    TRACE_ID,
    TRACEPARENT,
    grpc_collector,
    http_collector,
)
from tests.engine.fake_core import llm_in_thread
from tests.engine.fake_engine import make_engine, run_to_end
from tests.engine.fake_pooling import make_pooling_engine

ROOT = Path(__file__).parents[3]
SERVER, ERROR = 2, 2  # of the protocol
ASKED = SamplingParams(max_tokens=6, temperature=0.5, top_p=0.9, seed=1, ignore_eos=True)


@pytest.fixture
def collector():
    with http_collector() as collector:
        yield collector


@pytest.fixture
def engine(collector):
    engine, _ = make_engine(otlp_traces_endpoint=collector.endpoint)
    yield engine
    engine.shutdown()


def run(engine, *prompts, params=ASKED, **options):
    """Serve prompts, called r0, r1, ..., and have their spans sent."""
    for number, prompt in enumerate(prompts):
        engine.add_request(f"r{number}", prompt, params, **options)
    results = run_to_end(engine)
    engine.shutdown()
    return results


# ---- what a trace says


@pytest.mark.parametrize("make_collector", [http_collector, grpc_collector])
def test_a_prompt_is_a_span_with_what_its_time_went_to_below_it(make_collector):
    with make_collector() as collector:
        engine, _ = make_engine(otlp_traces_endpoint=collector.endpoint)
        run(engine, [5, 6, 7])
        [span] = collector.wait_for(1)
        below = collector.below(span)
    assert (span.kind, span.parent_id, span.status) == (SERVER, "", 0)
    assert span.resource["service.name"] == "jaxpaged"
    assert list(below) == ["queue", "prefill", "decode"]
    assert {each.trace_id for each in below.values()} == {span.trace_id}
    queue, prefill, decode = below.values()
    assert (
        span.begin <= queue.begin <= queue.end == prefill.begin <= prefill.end == decode.begin <= decode.end <= span.end
    )
    assert {name: value for name, value in span.attributes.items() if "latency" not in name} == {
        "gen_ai.request.id": "r0",
        "gen_ai.response.model": "demo",
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 6,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "jaxpaged.num_preemptions": 0,
    }


def test_latencies_are_the_numbers_that_the_metrics_have(engine, collector):
    run(engine, [5, 6, 7])
    [span] = collector.wait_for(1)
    sums = {each.name: each.sum for each in engine.metrics.read({}) if isinstance(each, Histogram)}
    assert {name: value for name, value in span.attributes.items() if "latency" in name} == {
        "gen_ai.latency.e2e": sums["vllm:e2e_request_latency_seconds"],
        "gen_ai.latency.time_to_first_token": sums["vllm:time_to_first_token_seconds"],
        "gen_ai.latency.time_in_queue": sums["vllm:request_queue_time_seconds"],
        "gen_ai.latency.time_in_model_prefill": sums["vllm:request_prefill_time_seconds"],
        "gen_ai.latency.time_in_model_decode": sums["vllm:request_decode_time_seconds"],
        "gen_ai.latency.time_in_model_inference": pytest.approx(sums["vllm:request_inference_time_seconds"], abs=1e-6),
    }


def test_weights_that_drew_its_tokens_are_named_once_there_are_others(engine, collector):
    named = lambda: {metric.labels.get("weight_version", metric.value) for metric in told()}
    told = lambda: [metric for metric in engine.get_metrics() if metric.name.startswith("jaxpaged:weight_")]
    assert not named()
    for version in ("first", "second"):
        engine.start_weight_update()
        engine.finish_weight_update(version)
    run(engine, [5, 6, 7], params=SamplingParams(n=2, max_tokens=3, temperature=1.0, seed=1))
    [span] = collector.wait_for(1)
    assert span.attributes["jaxpaged.weight_versions"] == ["second"]
    assert named() == {"second", 2}
    mine = merged_stats([SchedulerStats(), engine.metrics.stats]).weights
    assert (mine.version, mine.num_updates) == ("", 0), "the core that is behind is told of"


def test_several_sequences_are_one_span_from_the_first_to_the_last(engine, collector):
    results = run(engine, [5, 6, 7], params=SamplingParams(n=3, max_tokens=9, temperature=1.0, seed=1))
    [span] = collector.wait_for(1)
    outputs = results["r0"][-1].outputs
    assert span.attributes["gen_ai.usage.completion_tokens"] == sum(len(each.token_ids) for each in outputs)
    assert (span.attributes["gen_ai.request.n"], span.attributes["gen_ai.usage.num_sequences"]) == (3, 3)
    assert len(collector.below(span)) == 3 and len(collector.spans) == 4


def test_a_vector_has_no_decoding(collector):
    engine, _ = make_pooling_engine(otlp_traces_endpoint=collector.endpoint)
    run(engine, [5, 6, 7], params=PoolingParams())
    [span] = collector.wait_for(1)
    assert list(collector.below(span)) == ["queue", "prefill"]
    assert span.attributes["gen_ai.usage.prompt_tokens"] == 3
    assert span.attributes["gen_ai.latency.time_in_model_inference"] >= 0
    assert not {"gen_ai.request.max_tokens", "gen_ai.latency.time_in_model_decode"} & set(span.attributes)


def test_a_prompt_that_was_aborted_in_the_queue_has_none_of_it(engine, collector):
    engine.add_request("r", [5, 6, 7], ASKED)
    engine.abort_request("r")
    engine.shutdown()
    [span] = collector.wait_for(1)
    assert collector.below(span) == {} and span.status == 0
    assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert span.attributes["gen_ai.usage.completion_tokens"] == 0
    assert [name for name in span.attributes if "latency" in name] == ["gen_ai.latency.e2e"]


def test_a_prompt_that_failed_is_an_error(collector):
    engine, executor = make_engine(otlp_traces_endpoint=collector.endpoint)
    executor.bad_requests["r0"] = "its logits are not numbers"
    run(engine, [5, 6, 7])
    [span] = collector.wait_for(1)
    assert span.status == ERROR and "its logits are not numbers" in span.message


def test_what_was_refused_leaves_no_span(engine, collector):
    with pytest.raises(RequestError):
        engine.add_request("r", [5] * 100, ASKED)
    run(engine, [5])
    collector.wait_for(1)
    assert [span.attributes["gen_ai.request.id"] for span in collector.wait_for(1)] == ["r0"]


def test_requests_are_traced_from_their_arrival_on_however_many_sequences_they_have():
    with http_collector() as collector:
        with llm_in_thread(otlp_traces_endpoint=collector.endpoint) as llm:

            async def scenario():
                for name, n in (("few", 1), ("many", CHILDREN_AT_ONCE + 1)):
                    params = SamplingParams(max_tokens=3, n=n, seed=1, ignore_eos=True)
                    async for _ in llm.generate([7, 8, 9], params, name, trace_headers={"traceparent": TRACEPARENT}):
                        pass

            asyncio.run(scenario())
        spans = {span.attributes["gen_ai.request.id"]: span for span in collector.wait_for(2)}
    assert {span.parent_id for span in spans.values()} == {PARENT_ID}
    assert [list(collector.below(span)) for span in spans.values()] == [["queue", "prefill", "decode"]] * 2
    assert spans["many"].attributes["gen_ai.usage.completion_tokens"] == 3 * (CHILDREN_AT_ONCE + 1)


# ---- whose trace it is


def test_a_parent_is_followed_with_its_state(engine, collector):
    run(engine, [5, 6], trace_headers={"Traceparent": TRACEPARENT, "tracestate": "vendor=1", "x-request-id": "mine"})
    [span] = collector.wait_for(1)
    assert (span.trace_id, span.parent_id, span.trace_state) == (TRACE_ID, PARENT_ID, "vendor=1")
    assert span.attributes["gen_ai.request.id"] == "mine"


def test_a_parent_that_is_not_recorded_has_no_children(engine, collector):
    engine.add_request("unseen", [5, 6], ASKED, trace_headers={"traceparent": NOT_SAMPLED})
    run(engine, [5, 6])
    assert [span.attributes["gen_ai.request.id"] for span in collector.wait_for(1)] == ["r0"]
    assert len(collector.spans) == 4


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "rubbish",
        TRACEPARENT.upper(),
        "00-" + "0" * 32 + f"-{PARENT_ID}-01",
        "ff" + TRACEPARENT[2:],
        "x" * 5000,
        "\ud800",
    ],
)
def test_a_parent_that_is_none_begins_a_trace(engine, collector, parent):
    run(engine, [5, 6], trace_headers={"traceparent": parent, "tracestate": "=,=;\x00"})
    [span] = collector.wait_for(1)
    assert span.parent_id == "" and span.trace_id != TRACE_ID


def test_an_operator_may_sample_what_has_no_parent(collector, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm-7")
    engine, _ = make_engine(otlp_traces_endpoint=collector.endpoint)
    engine.add_request("unseen", [5, 6], ASKED)
    run(engine, [5, 6], trace_headers={"traceparent": TRACEPARENT})
    [span] = collector.wait_for(1)
    assert span.attributes["gen_ai.request.id"] == "r0" and span.resource["service.name"] == "llm-7"


@pytest.mark.parametrize("headers", [{"traceparent": 1}, [("traceparent", TRACEPARENT)], "traceparent"])
def test_headers_of_another_form_are_refused(engine, headers):
    with pytest.raises(RequestError, match="trace_headers is"):
        engine.add_request("r", [5], ASKED, trace_headers=headers)
    assert not engine.has_unfinished_requests()


def test_headers_where_nothing_is_traced_are_refused():
    engine, _ = make_engine()
    with pytest.raises(RequestError, match="Set otlp_traces_endpoint"):
        engine.add_request("r", [5], ASKED, trace_headers={"traceparent": TRACEPARENT})


# ---- clocks


moments = st.floats(0, 100)


@given(st.tuples(moments, moments), st.none() | moments, moments, moments)
def test_no_time_is_before_the_one_that_it_follows(core_times, first_token, last_token, now):
    """Clocks may be set back between any two looks at them."""
    request = EngineCoreRequest("r", [1], ASKED, arrival_time=50.0)

    class Sequence:
        times, first_token_time, last_token_time = core_times, first_token, last_token

    times = times_of(PromptState(request, None, [Sequence()]), now)
    stages = list(times.stages())
    assert [name for name, _, _ in stages] == ["queue", "prefill", "decode"][: 1 if first_token is None else 3]
    moments = [times.arrival, *(moment for _, begin, end in stages for moment in (begin, end)), times.end]
    assert moments == sorted(moments)
    assert all(seconds >= 0 for _, seconds in times.latencies())


# ---- collectors that are away


def records(caplog):
    return [(each.levelname, each.getMessage()) for each in caplog.records if each.levelno >= logging.INFO]


@pytest.mark.parametrize("make_collector", [http_collector, grpc_collector])
def test_a_collector_that_refuses_is_spoken_of_once_and_once_when_it_is_back(make_collector, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # ms
    with make_collector() as collector:
        collector.refuses = True
        engine, _ = make_engine(otlp_traces_endpoint=collector.endpoint)
        for number in range(5):
            engine.add_request(f"lost{number}", [5, 6], ASKED)
            run_to_end(engine)
            wait_until(lambda: collector.num_requests > number)  # noqa: B023
        collector.refuses = False
        engine.add_request("seen", [5, 6], ASKED)
        run_to_end(engine)
        collector.wait_for(1)
        engine.shutdown()
    (level, lost), (level2, again) = records(caplog)
    assert (level, level2) == ("WARNING", "INFO")
    assert lost.startswith("traces do not get to http://127.0.0.1:") and ("it refuses" in lost or "400" in lost)
    assert "again; 2" in again, "20 spans, and perhaps the first of the last request"


def test_nobody_waits_for_a_collector_and_what_waits_for_it_is_bounded(collector, caplog, monkeypatch):
    """It takes a first request and says nothing; everything is served meanwhile."""
    monkeypatch.setattr(trace_export, "MAX_WAITING", 40)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    collector.answers.clear()
    engine, _ = make_engine(otlp_traces_endpoint=collector.endpoint)
    for number in range(30):
        engine.add_request(f"r{number}", [5, 6], ASKED)
    assert len(run_to_end(engine)) == 30
    num_lost = {each.name: each.value for each in engine.get_metrics() if isinstance(each, Counter)}[
        "jaxpaged:trace_spans_lost"
    ]
    assert 30 * 4 - 40 - 8 <= num_lost < 30 * 4
    collector.answers.set()
    wait_until(lambda: len(collector.spans) == 30 * 4 - num_lost)
    engine.add_request("after", [5, 6], ASKED)
    run_to_end(engine)
    engine.shutdown()
    assert collector.spans[-1].name == "llm_request" and len(collector.spans) % 4 == 0
    assert [level for level, _ in records(caplog)] == ["WARNING"]
    assert "more come than it takes" in caplog.text


def test_an_engine_ends_though_the_collector_says_nothing(collector, monkeypatch):
    monkeypatch.setattr(trace_export, "CLOSING_SECONDS", 0.05)
    collector.answers.clear()
    engine, _ = make_engine(otlp_traces_endpoint=collector.endpoint)
    run(engine, [5, 6])  # it shuts the engine down
    assert collector.spans == []


def test_what_is_left_is_sent_when_the_interpreter_ends(collector):
    program = f"""
from tests.engine.fake_engine import make_engine, run_to_end
engine, _ = make_engine(otlp_traces_endpoint={collector.endpoint!r})
engine.add_request("r", [5, 6])
run_to_end(engine)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and len(collector.spans) == 4


def test_a_library_that_fails_costs_the_trace_and_not_the_request(engine, collector, caplog, monkeypatch):
    tracer = engine._output_processor._tracer
    monkeypatch.setattr(tracer._propagator, "extract", lambda *_: 1 / 0)
    results = run(engine, [5, 6], [6, 7])
    assert len(results) == 2 and all(outputs[-1].finished for outputs in results.values())
    assert caplog.text.count("no spans could be made") == 1


def wait_until(condition):
    import time

    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ---- options


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [
        ("http://localhost:4317", "grpc"),
        ("https://a.example:4317", "grpc"),
        ("grpc://localhost:4317", "grpc"),
        ("localhost:4317", "grpc"),
        ("http://localhost:4317/", "grpc"),
        ("http://localhost:4318/v1/traces", "http/protobuf"),
        ("https://a.example/otlp/v1/traces", "http/protobuf"),
    ],
)
def test_the_protocol_follows_from_the_endpoint(endpoint, protocol):
    assert check_endpoint(endpoint) == protocol


def test_opentelemetrys_variables_choose_the_protocol(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert check_endpoint("http://localhost:4318") == "http/protobuf"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    assert check_endpoint("http://localhost:4318") == "grpc"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'http/json'"):
        check_endpoint("http://localhost:4318")


@pytest.mark.parametrize("endpoint", ["ftp://localhost:4317", "http://", "http:///v1/traces", "grpc://h/v1/traces"])
def test_what_is_no_endpoint_is_refused(endpoint):
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is '"):
        make_engine(otlp_traces_endpoint=endpoint)


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter"])
def test_without_the_libraries_the_extra_is_named(monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[otel\]'"):
        make_engine(otlp_traces_endpoint="http://localhost:4317")


def test_without_the_option_nothing_of_the_libraries_is_touched(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    engine, _ = make_engine()
    assert run(engine, [5, 6])["r0"][-1].finished
