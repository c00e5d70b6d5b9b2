"""What the runner says of its padding is what the step log and the counters show."""

from jaxpaged import SamplingParams


def records_of(llm, prompts, params):
    """The steps of these prompts, and by how much the executor's counters grew."""
    llm.reset_prefix_cache()  # awaits the step in vain that other tests may have left in flight
    before, known = llm.llm_engine.executor_stats(), len(llm.timeline())
    llm.generate(prompts, params, use_tqdm=False)
    llm.reset_prefix_cache()
    after = llm.llm_engine.executor_stats()
    grown = {name: after[name] - before[name] for name in ("steps", "scheduled_tokens", "padded_tokens")}
    return llm.timeline().records[known:], grown


def test_the_step_log_and_the_counters_agree(llm):
    llm.wait_for_programs()
    records, grown = records_of(
        llm, [[5 + i] * 30 for i in range(9)], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    )
    assert sum(record.num_steps for record in records) == grown["steps"]
    assert sum(record.num_tokens for record in records) == grown["scheduled_tokens"] == 9 * (30 + 5)
    padded = sum(record.token_bucket * record.num_steps - record.num_tokens for record in records)
    assert padded == grown["padded_tokens"]
    buckets = llm.llm_engine.executor_stats()["token_buckets"]
    for record in records:
        assert record.token_bucket * record.num_steps >= record.num_tokens
        if record.num_steps == 1:  # runs of steps have fewer sizes
            assert record.token_bucket == min(bucket for bucket in buckets if bucket >= record.num_tokens)
        assert record.sample_bucket * record.num_steps >= record.num_sampled
        assert (record.sample_bucket > 0) == (record.num_sampled > 0)


def test_the_full_sampler_runs_where_it_is_asked_for_only(llm):
    plain, _ = records_of(llm, [[7, 8]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    full, _ = records_of(llm, [[7, 8]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1))
    assert not any(record.full_sampler for record in plain)
    assert all(record.full_sampler for record in full if record.num_sampled)
