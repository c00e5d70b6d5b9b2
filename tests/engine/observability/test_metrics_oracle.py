"""Metrics equal what users were given, counted by themselves: tokens, sequences, reasons, over mixed traffic."""

from collections import Counter as Count

from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.engine.observability.metrics import Counter
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fake_engine import FakeExecutor, counting_model, make_engine
from tests.engine.small_tokenizer import make_tokenizer

requests = st.fixed_dictionaries(
    {
        "arrival": st.integers(0, 12),
        "num_prompt_tokens": st.integers(1, 30),
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 25),
        "kind": st.sampled_from(list(RequestOutputKind)),
        "stop": st.sampled_from([None, "a", "k", "th"]),
        "aborted": st.none() | st.integers(0, 10),  # so many steps after its arrival
        "is_bad": st.booleans(),
    }
)


class Received:
    """What the users of one engine got."""

    def __init__(self):
        self.asked = {}
        self.tokens = {}  # (request id, index) -> how many
        self.reasons = {}

    def take(self, output):
        for completion in output.outputs:
            key = (output.request_id, completion.index)
            before = self.tokens.get(key, 0) if self.asked[output.request_id]["kind"] is RequestOutputKind.DELTA else 0
            self.tokens[key] = before + len(completion.token_ids)
            if completion.finish_reason is not None:
                self.reasons[key] = completion.finish_reason

    def expected(self):
        """The same by the names of metrics: counters as numbers, histograms as (count, sum)."""
        ended = [(self.asked[name], self.tokens[name, index]) for name, index in self.reasons]
        begun = [(asked, num) for asked, num in ended if num]
        generated, prompts = sum(num for _, num in ended), [asked["num_prompt_tokens"] for asked, _ in ended]
        of_begun = sum(asked["num_prompt_tokens"] for asked, _ in begun)
        longest = [max(self.tokens[name, i] for i in range(asked["n"])) for name, asked in self.asked.items()]
        return {
            "vllm:generation_tokens": generated,
            "vllm:prompt_tokens": of_begun,
            "vllm:request_success": Count(self.reasons.values()),
            "vllm:time_to_first_token_seconds": len(begun),
            "vllm:inter_token_latency_seconds": generated - len(begun),
            "vllm:request_time_per_output_token_seconds": sum(num > 1 for _, num in ended),
            "vllm:e2e_request_latency_seconds": len(ended),
            "vllm:request_prefill_time_seconds": len(begun),
            "vllm:request_decode_time_seconds": len(begun),
            "vllm:request_inference_time_seconds": len(begun),
            "vllm:request_prompt_tokens": (len(ended), sum(prompts)),
            "vllm:request_generation_tokens": (len(ended), generated),
            "vllm:request_max_num_generation_tokens": (len(self.asked), sum(longest)),
            "vllm:request_params_n": (len(self.asked), sum(asked["n"] for asked in self.asked.values())),
            "vllm:request_params_max_tokens": (len(ended), sum(asked["max_tokens"] for asked, _ in ended)),
            "vllm:iteration_tokens_total": of_begun + generated,
        }


def exposed(engine, expected):
    """What the engine says, in the same form; times have no sum that could be known."""
    values = {}
    for metric in engine.get_metrics():
        if metric.name == "vllm:request_success":
            values.setdefault(metric.name, Count())[metric.labels["finished_reason"]] = metric.value
        elif metric.name == "vllm:iteration_tokens_total":
            values[metric.name] = metric.sum
        elif isinstance(metric, Counter):
            values[metric.name] = metric.value
        elif metric.name in expected:
            assert metric.buckets["+Inf"] == metric.count
            is_pair = isinstance(expected[metric.name], tuple)
            values[metric.name] = (metric.count, metric.sum) if is_pair else metric.count
    values["vllm:request_success"] = +values["vllm:request_success"]
    return {name: values[name] for name in expected}


def serve(traffic, engine, executor, failures, resets):
    """Let it all happen, step by step."""
    received = Received()
    for step in range(400):
        for number, asked in enumerate(traffic):
            name = str(number)
            if asked["arrival"] == step:
                received.asked[name] = asked
                params = SamplingParams(
                    temperature=1.0,
                    seed=number,
                    n=asked["n"],
                    max_tokens=asked["max_tokens"],
                    stop=asked["stop"],
                    output_kind=asked["kind"],
                )
                if asked["is_bad"]:
                    executor.bad_requests[name if asked["n"] == 1 else f"0_{name}"] = "its logits are no numbers"
                engine.add_request(name, [10 + number] * asked["num_prompt_tokens"], params)
            if asked["aborted"] is not None and asked["arrival"] + asked["aborted"] == step:
                for output in engine.abort_request(name):
                    received.take(output)
        if step in failures:
            executor.fail_at[len(executor.executed)] = failures[step]
        if step in resets:
            engine.reset_prefix_cache()
        for output in engine.step():
            received.take(output)
    assert not engine.has_unfinished_requests()
    return received


@given(
    traffic=st.lists(requests, min_size=1, max_size=8),
    num_steps=st.sampled_from([1, 4, None]),
    is_short=st.booleans(),
    failures=st.dictionaries(st.integers(0, 20), st.sampled_from(["dispatch", "result"]), max_size=2),
    resets=st.sets(st.integers(0, 30), max_size=2),
)
def test_every_count_equals_what_was_received(traffic, num_steps, is_short, failures, resets):
    """`is_short`: there are so few blocks that requests are preempted; then no step fails."""
    tokenizer = make_tokenizer()
    model = counting_model(tokenizer.vocab_size)
    executor = FakeExecutor(model, tokenizer.vocab_size, num_blocks=20 if is_short else 200)
    engine, _ = make_engine(executor, num_scheduler_steps=num_steps)
    received = serve(traffic, engine, executor, {} if is_short else failures, resets)
    expected = received.expected()
    assert exposed(engine, expected) == expected
    queued = engine.metrics.tallies["vllm:request_queue_time_seconds"].read("").count
    assert expected["vllm:time_to_first_token_seconds"] <= queued <= expected["vllm:e2e_request_latency_seconds"]
