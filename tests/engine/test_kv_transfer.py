"""Loads that finish, fail, stall, or come too late: no block is lost, no request, and no text differs."""

import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged import SamplingParams
from jaxpaged.core.kv_cache.events import BlockRemoved, BlockStored, VersionedBlockStored
from jaxpaged.core.kv_transfer.rates import TRY_AGAIN, Rates
from jaxpaged.core.kv_transfer.transfers import shared_out
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.core_calls import KeepLease, LoadPrefix, SavePrefix
from jaxpaged.errors import RequestError, UsageError
from jaxpaged.kv_store.tier import Lookup
from jaxpaged.kv_store.transfer_params import check_request
from jaxpaged.messages import EngineCoreRequest, StepRecord
from jaxpaged.sampling_params import RequestOutputKind
from tests.engine.fake_engine import FakeExecutor, counting_model, make_config
from tests.engine.fake_kv import FakeTransfer, KVExecutor, core_of

VOCAB = 100


def make(policy="recompute", num_blocks=64, page_tokens=4, publishers=(), **options):
    executor, transfer = KVExecutor(counting_model(VOCAB), VOCAB, num_blocks), FakeTransfer(page_tokens)
    connector = {"kv_connector": "OffloadingConnector", "kv_load_failure_policy": policy}
    core = core_of(executor, transfer, publishers, **options, kv_transfer_config=connector)
    return core, transfer


def request(name, prompt, max_tokens=5, **more):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1)
    return EngineCoreRequest(name, list(prompt), params, arrival_time=0.0, **more)


def run(core, heard=None):
    heard = {} if heard is None else heard
    while core.has_work():
        step(core, heard)
    return heard


def step(core, heard):
    for output in core.step().outputs:
        heard.setdefault(output.request_id, []).append(output)
    core._scheduler.check_integrity()
    assert not core._kv_transfer.mistakes


def tokens(outputs):
    return [token for output in outputs for token in output.new_token_ids]


PROMPT = [7 + i % 50 for i in range(40)]


def test_a_known_beginning_is_loaded_once_the_device_has_forgotten_it():
    core, transfer = make()
    core.add_request(request("a", PROMPT))
    first = run(core)["a"]
    assert core.reset_prefix_cache()
    core.add_request(request("b", PROMPT))
    again = run(core)["b"]
    assert tokens(again) == tokens(first)
    assert again[0].num_cached_tokens > 20 and transfer.num_written
    stats = core.stats()
    assert stats.external_prefix_cache_hits == again[0].num_cached_tokens
    assert again[0].loaded == {"host": again[0].num_cached_tokens} and first[0].loaded is None
    assert all(output.loaded is None for output in again[1:]), "it is told once"
    core.add_request(request("again", PROMPT))
    found = run(core)["again"][0]
    assert found.num_cached_tokens and found.loaded is None, "it lay on the device"
    core.add_request(request("salted", PROMPT, cache_salt="s"))
    assert run(core)["salted"][0].num_cached_tokens == 0


def test_who_waits_for_a_stores_answer_is_passed_and_asks_again():
    core, transfer = make()
    core.add_request(request("a", PROMPT))
    first = tokens(run(core)["a"])
    core.reset_prefix_cache()
    transfer.num_unsure = 10
    core.add_request(request("b", PROMPT))
    heard = run(core)
    assert tokens(heard["b"]) == first and heard["b"][0].num_cached_tokens > 20
    core.reset_prefix_cache()
    transfer.stored.clear()
    transfer.num_unsure = 10**9
    core.add_request(request("gone", PROMPT))
    step(core, {})
    assert core.transfers.is_asking and core.stats().num_kv_fetches == [1, 0, 0]
    core.abort_requests(["gone"])
    assert not core.transfers.is_asking
    core.transfers.patience = 0.05
    core.add_request(request("c", PROMPT))
    heard = run(core)
    assert tokens(heard["c"]) == first and heard["c"][0].num_cached_tokens == 0


def test_what_else_a_request_waits_for_does_not_use_up_its_patience_with_a_store():
    core, transfer = make()
    transfer.num_unsure = 10**9
    core.add_request(request("a", PROMPT))
    step(core, {})
    half, (waiting,) = core.transfers, core._scheduler.waiting
    hit = core._scheduler.kv_cache_manager.get_computed_blocks(waiting)
    half.patience = 0.2
    assert not half.is_loading(waiting, hit, may_begin=False)
    assert not half.is_asking and core.stats().num_kv_fetches == [0, 0, 0]
    time.sleep(0.3)
    assert half.is_loading(waiting, hit, may_begin=True) and half.is_asking
    time.sleep(0.3)
    assert not half.is_loading(waiting, hit, may_begin=True) and not half.is_asking


def test_behind_one_for_which_there_is_no_room_nobody_uses_up_patience():
    core, transfer = make(num_blocks=24, scheduling_policy="priority")
    core.add_request(request("running", range(40), max_tokens=8))
    step(core, {})
    transfer.num_unsure = 10**9
    core.add_request(request("asks", PROMPT))
    step(core, {})
    assert core.stats().num_kv_fetches == [1, 0, 0]
    core.add_request(request("large", range(99, 44, -1), priority=-1))
    step(core, {})
    assert [each.request_id for each in core._scheduler.waiting] == ["large", "asks"]
    assert core.stats().num_kv_fetches == [0, 0, 0]
    transfer.num_unsure = 0
    assert len(tokens(run(core)["asks"])) == 5


def test_a_poll_looks_up_only_what_the_store_has_not_answered():
    core, transfer = make()
    half, looked_up, num_known = core.transfers, [], 3
    transfer.wait = lambda: None  # nothing comes

    def lookup(keys):
        looked_up.append(keys)
        return [Lookup.HIT if key in known else Lookup.PENDING for key in keys]

    known, half.connector.look_up = set(), lookup
    core.add_request(request("a", PROMPT))
    step(core, {})
    keys = looked_up[0]
    known |= set(keys[:num_known])
    for _ in range(3):
        step(core, {})
    assert [len(each) for each in looked_up[-3:]] == [len(keys), *[len(keys) - num_known] * 2]
    known |= set(keys)
    step(core, {})
    assert not half.is_asking and half.is_waited_for


def test_an_engine_without_tiers_has_no_files():
    core = EngineCore(make_config(), FakeExecutor(counting_model(VOCAB), VOCAB))
    for call in (LoadPrefix("x"), SavePrefix("x", PROMPT)):
        with pytest.raises(UsageError, match="Give kv_offload"):
            core.call(call)


def test_pages_that_do_not_come_fail_the_request_where_that_is_asked_for():
    core, transfer = make("fail")
    core.add_request(request("a", PROMPT))
    first = tokens(run(core)["a"])
    core.reset_prefix_cache()
    core.add_request(request("b", PROMPT))
    transfer.answer = [True, False]
    last = run(core)["b"][-1]
    assert last.finish_reason == "error" and "not loaded" in last.error
    transfer.answer = [True]
    core.add_request(request("c", PROMPT))
    assert tokens(run(core)["c"]) == first


def test_what_a_failed_step_computed_is_never_kept():
    core, transfer = make()
    core.add_request(request("a", PROMPT))

    def fail(scheduled):
        raise RuntimeError("out of order")

    core.executor.execute_model = fail
    assert run(core)["a"][-1].finish_reason == "error"
    assert not transfer.stored and not transfer.unconfirmed


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 3), st.integers(1, 60)),
    st.tuples(st.just("step"), st.integers(1, 4), st.none()),
    st.tuples(st.just("abort"), st.integers(0, 5), st.none()),
    st.tuples(st.just("finish"), st.lists(st.booleans(), min_size=1, max_size=4), st.none()),
    st.tuples(st.sampled_from(["reset", "evict", "sleep", "unsure"]), st.none(), st.none()),
)


@settings(max_examples=60)
@given(
    st.lists(ACTIONS, max_size=40),
    st.sampled_from([{}, {"num_blocks": 20}, {"page_tokens": 2}, {"num_blocks": 24, "page_tokens": 8}]),
)
def test_nothing_is_lost_whatever_becomes_of_loads(actions, options):
    core, transfer = make(**options)
    heard, prompts, gone = {}, {}, set()
    for kind, value, length in actions:
        if kind == "add":
            name = f"r{len(prompts)}"
            prompts[name] = [10 + value, *PROMPT, *PROMPT][:length]
            core.add_request(request(name, prompts[name]))
        elif kind == "step":
            for _ in range(value):
                step(core, heard)
        elif kind == "abort" and value < len(prompts):
            gone.add(f"r{value}")
            core.abort_requests([f"r{value}"])
        elif kind == "finish":
            transfer.finish(value)
        elif kind == "reset":
            core.reset_prefix_cache()
        elif kind == "evict":
            transfer.stored.clear()
        elif kind == "unsure":
            transfer.num_unsure = 3
        elif kind == "sleep":
            core.sleep(1, "keep")
            core.wake_up()
        core._scheduler.check_integrity()
    run(core, heard)
    for name in prompts.keys() - gone:
        start = prompts[name][-1]
        assert tokens(heard[name]) == [5 + (start + i + 1 - 5) % (VOCAB - 5) for i in range(5)]
    assert core.reset_prefix_cache(), "somebody holds a block"


def test_pages_are_sent_for_only_where_there_is_room_for_them_and_none_is_pushed_out():
    core, transfer = make(num_blocks=28)
    prompts = {f"r{i}": [60 + i, *PROMPT] for i in range(8)}  # whole, two at a time have blocks
    for name, prompt in prompts.items():
        core.add_request(request(name, prompt))
        run(core)
    core.reset_prefix_cache()
    for name, prompt in prompts.items():
        core.add_request(request(name + " again", prompt, max_tokens=2))
    core.step()
    assert 0 < len(transfer.loads) < 3
    heard = run(core)
    assert [each[0].num_cached_tokens for each in heard.values()] == [40] * 8
    assert transfer.num_written == 8 * 10 and core.reset_prefix_cache()


def test_who_begins_alike_waits_for_the_pages_that_another_waits_for():
    core, transfer = make()
    core.add_request(request("a", PROMPT))
    run(core)
    core.reset_prefix_cache()
    for name in "bcd":
        core.add_request(request(name, PROMPT))
    heard = run(core)
    assert [heard[name][0].num_cached_tokens for name in "bcd"] == [36] * 3
    assert transfer.num_written == 36 // 4, "the same pages came more than once"


def test_requests_that_wait_for_pages_are_counted_by_how_far_they_came():
    core, transfer = make()
    core.add_request(request("a", PROMPT))
    run(core)
    core.reset_prefix_cache()
    core.add_request(request("b", [60] * 8, 30))
    core.add_request(request("c", PROMPT))
    core.step()
    assert core.stats().num_kv_fetches == [0, 1, 0]
    assert [state.is_loading for state in core.snapshot().waiting] == [True]
    transfer.finish([True])
    core._exchange_kv()
    state = core.snapshot().waiting[0]
    assert core.stats().num_kv_fetches == [0, 0, 1] and state.loaded["host"] > 20 and not state.is_loading
    run(core)
    assert core.stats().num_kv_fetches == [0, 0, 0]


@pytest.mark.parametrize("page_tokens", [4, 8, 2])
def test_routers_hear_of_what_tiers_keep(page_tokens):
    batches = []
    publisher = SimpleNamespace(publish=batches.extend, close=lambda: None)
    core, transfer = make(page_tokens=page_tokens, publishers=[publisher])
    core.add_request(request("a", PROMPT))
    run(core)
    core.add_request(request("b", [9, 9]))
    run(core)
    kept = [event for event in batches if isinstance(event, BlockStored) and event.medium == "CPU"]
    on_device = [event for event in batches if isinstance(event, BlockStored) and event.medium == "GPU"]
    hashes = lambda events: {(each, event.group_idx) for event in events for each in event.block_hashes}
    assert hashes(kept) == {(key.block_hash, key.group) for key in transfer.stored}
    assert {event.block_size for event in kept} == {page_tokens} and {event.block_size for event in on_device} == {4}
    if page_tokens == 4:
        assert hashes(kept) == hashes(on_device) and all(event.token_ids == [] for event in kept)
    else:  # no event of the device has these hashes
        assert hashes(kept).isdisjoint(hashes(on_device))
        told = {event.block_hashes[0]: (event.parent_block_hash, tuple(event.token_ids)) for event in kept}
        assert told == {key.block_hash: page[1:] for key, page in transfer.stored.items()}
    assert not any(isinstance(event, VersionedBlockStored) for event in batches)
    core.executor.weights_version = core.executor.weights_label = "second"
    core.note_weight_update()
    core.add_request(request("a", PROMPT))
    run(core)
    versioned = [event for event in batches if isinstance(event, VersionedBlockStored)]
    assert {(event.medium, event.weight_version) for event in versioned} == {("GPU", "second"), ("CPU", "second")}
    kept += [event for event in versioned if event.medium == "CPU"]
    assert hashes(kept) == {(key.block_hash, key.group) for key in transfer.stored}
    transfer.stored.clear()
    core.add_request(request("c", [8, 8]))
    run(core)
    gone = [event for event in batches if isinstance(event, BlockRemoved) and event.medium == "CPU"]
    assert hashes(gone) == hashes(kept)


def test_tokens_are_shared_out_by_pages():
    assert shared_out(48, ["disk", "host", "host"]) == {"disk": 16, "host": 32}
    assert shared_out(10, ["a", "b", "c"]) == {"a": 3, "b": 3, "c": 4} and shared_out(0, ["a"]) == {}


def test_what_is_slower_is_tried_again_now_and_then():
    rates, tier = Rates(), ["disk"]
    assert rates.pays(tier)
    rates.observe_load(100, 1.0, tier)
    rates.observe_step(8, 8, 0.0, 9.0)  # a step that decodes tells nothing
    assert rates.pays(tier)
    rates.observe_step(100, 1, 10.0, 10.1)
    assert [rates.pays(tier) for _ in range(TRY_AGAIN)] == [False] * (TRY_AGAIN - 1) + [True]
    for _ in range(20):
        rates.observe_load(100, 0.001, tier)
    assert rates.pays(tier)


def test_pieces_of_a_prompt_count_when_its_first_token_is_there():
    rates = Rates()
    rates.observe_step(8, 8, 0.0, 4.0)
    for begin in (4.001, 4.003, 4.005):  # nobody waits for these
        rates.observe_step(512, 0, begin, begin + 0.001)
    rates.observe_step(1, 1, 4.007, 4.001 + 1537e-4)
    assert rates.prefill_seconds == pytest.approx(1e-4)
    rates.observe_step(512, 0, 5.0, 5.001)  # it is aborted
    rates.observe_step(100, 1, 900.0, 900.01)
    assert rates.prefill_seconds == pytest.approx(1e-4)


def test_a_step_that_computes_while_it_is_dispatched_takes_that_time_but_not_that_of_compiling():
    core, _ = make(num_blocks=24)
    times = {"schedule_begin": 1.0, "schedule_end": 1.5, "dispatch_end": 3.0, "wait_begin": 3.0, "result_ready": 3.0}
    sizes = {"num_tokens": 100, "token_bucket": 128, "num_requests": 1, "num_sampled": 1, "sample_bucket": 8}
    record = StepRecord(
        step_id=1, full_sampler=False, num_unfinished=1, update_end=3.0, program_wait=1.0, **times, **sizes
    )
    core.transfers.observe(record)
    assert core.transfers.rates.prefill_seconds == pytest.approx(0.5 / 100)


def test_each_tier_is_judged_by_its_own_loads():
    rates = Rates()
    rates.observe_step(100, 1, 0.0, 0.1)
    rates.observe_load(100, 1.0, ["s3"])
    assert not rates.pays(["s3"])
    assert rates.pays(["host"]), "nothing is known of it"
    rates.observe_load(100, 0.01, ["host", "host"])
    assert rates.pays(["host"]) and not rates.pays(["s3"])
    assert rates.pays(["host"] * 99 + ["s3"]) and not rates.pays(["host"] * 8 + ["s3"] * 2)
    for _ in range(50):  # of both at a time, twice as slow as they were
        rates.observe_load(100, 1.01, ["host", "s3"])
    assert rates.load_seconds == pytest.approx({"host": 2e-4, "s3": 2e-2}, rel=1e-3)
    for _ in range(50):
        rates.observe_load(100, 0.0, ["s3"])  # a clock may stand still
    assert rates.pays(["s3"])


def test_a_slow_tier_keeps_nobody_from_a_fast_one():
    core, transfer = make(num_blocks=24)
    del core.transfers.rates.pays
    transfer.tier, transfer.seconds = "s3", 1e3
    sources = []
    for i in range(6):
        core.reset_prefix_cache()
        core.add_request(request(f"r{i}", PROMPT))
        outputs = run(core)[f"r{i}"]
        sources.append(outputs[0].num_cached_tokens > 0)
        if i == 3:
            transfer.tier, transfer.seconds = "host", 0.0
    assert sources == [False, True, False, False, True, True]


PRODUCES = {"kv_transfer_params": {"do_remote_decode": True}}
CONSUMES = {
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_request_id": "lease",
        "remote_num_tokens": 32,
    }
}


def lease_of(output):
    return output.kv_transfer_params["remote_request_id"]


def handed_over(extra_args, max_tokens=3, prompt=PROMPT, name="a"):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1, extra_args=extra_args)
    return EngineCoreRequest(name, list(prompt), params, arrival_time=0.0)


def test_a_prompt_is_lent_from_its_first_step_on_and_not_once_it_is_aborted():
    core, transfer = make()
    core.add_request(handed_over(PRODUCES, 1))
    early, last = run(core)["a"]
    assert not early.new_token_ids and early.finish_reason is None and lease_of(early) == "1"
    lent = last.kv_transfer_params
    assert lease_of(last) == "1" and lent["remote_num_tokens"] == 40 // 4 * 4
    assert transfer.ended_leases["1"] == transfer.leases[0] and set(transfer.leases[0]) <= set(transfer.stored)
    core.add_request(handed_over(PRODUCES, 50, name="b"))
    heard = {}
    step(core, heard)
    assert lease_of(heard["b"][0]) == "2"
    core.abort_requests(["b"])
    assert transfer.taken_back == ["2"]
    run(core, heard)
    core.add_request(request("c", PROMPT))
    assert all(each.kv_transfer_params is None for each in run(core, heard)["c"])
    assert not core.transfers.connector._lent and transfer.taken_back == ["2"]


def test_who_wants_only_the_end_hears_of_the_lease_then():
    core, _ = make()
    asked = handed_over(PRODUCES, 1)
    asked.sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
    core.add_request(asked)
    (output,) = run(core)["a"]
    assert lease_of(output) == "1" and output.new_token_ids


def test_a_lease_outlives_preemption_and_ends_with_a_step_that_fails():
    core, transfer = make()
    core.add_request(handed_over(PRODUCES, 20))
    heard = {}
    step(core, heard)
    core.sleep(1, "keep")
    core.wake_up()
    outputs = run(core, heard)["a"]
    assert lease_of(outputs[-1]) == "1" and len(transfer.leases) == 1 and outputs[-1].num_preemptions
    core.add_request(handed_over(PRODUCES, 20, name="b"))
    step(core, heard)
    core.executor.execute_model = fail
    assert run(core, heard)["b"][-1].finish_reason == "error" and transfer.taken_back == ["2"]


def test_a_lease_ends_when_the_engine_falls_asleep():
    core, transfer = make()
    core.add_request(handed_over(PRODUCES, 20))
    step(core, {})
    core.sleep(1, "abort")
    assert transfer.taken_back == ["1"]


def fail(*args):
    raise RuntimeError("no device")


def lender_of(prompt=PROMPT):
    core, transfer = make()
    core.add_request(request("a", prompt))
    return tokens(run(core)["a"]), transfer.stored


def test_a_borrower_loads_what_is_lent_and_gives_it_back_once():
    expected, lent = lender_of()
    core, transfer = make()
    core.transfers.rates.pays = lambda sources: False  # somebody has computed it for this request
    transfer.lent = lent
    core.add_request(handed_over(CONSUMES, 5))
    outputs = run(core)["a"]
    assert tokens(outputs) == expected and outputs[0].num_cached_tokens == 32
    assert [source.lease for source in transfer.released] == ["lease"]


@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens", "kv_load_tiers"])
def test_what_a_request_may_not_say_of_tiers_is_refused_by_name(name):
    for role in ("kv_both", None):
        with pytest.raises(RequestError, match=f"{name}, which this engine does not heed"):
            check_request({"kv_transfer_params": {name: 5}}, role, "localhost")
    check_request({"kv_transfer_params": {"do_remote_decode": True, name: None, "another": 1}}, "kv_both", "localhost")


def test_a_core_that_refuses_a_request_gives_its_lease_back():
    core, transfer = make()
    core.add_request(handed_over(None, name="a"))
    for name, prompt in (("a", PROMPT), ("b", PROMPT * 3)):  # an id in use, and too long
        with pytest.raises(RequestError):
            core.add_request(handed_over(CONSUMES, prompt=prompt, name=name))
        assert [source.lease for source in transfer.released] == ["lease"]
        transfer.released.clear()
    run(core)
    assert not transfer.released


def test_what_is_not_lent_after_all_is_computed_or_the_request_fails():
    expected, lent = lender_of()
    for policy in ("recompute", "fail"):
        core, transfer = make(policy)
        transfer.lent, transfer.answer = lent, [True, False]
        core.add_request(handed_over(CONSUMES, 5))
        outputs = run(core)["a"]
        if policy == "recompute":
            assert tokens(outputs) == expected
        else:
            assert outputs[-1].finish_reason == "error" and "were not loaded" in outputs[-1].error
        core.add_request(request("b", PROMPT))
        run(core)
        assert len(transfer.released) == 1


def test_a_lease_is_kept_from_a_requests_arrival_and_given_back_when_it_is_aborted_in_the_queue():
    core, transfer = make()
    core.add_request(request("runs", PROMPT, 50))
    core.step()
    core.add_request(handed_over(CONSUMES, 5))
    core.abort_requests(["a"])
    assert [source.lease for source in transfer.released] == ["lease"]
    core.add_request(handed_over(CONSUMES, 5, name="b"))
    run(core)
    assert (
        [source.lease for source in transfer.kept_leases] == ["lease"] * 2 == [each.lease for each in transfer.released]
    )


def test_a_lease_is_kept_before_the_next_step_and_before_its_request_comes():
    core, transfer = make()
    core.add_request(handed_over(CONSUMES, 5))
    assert [source.lease for source in transfer.kept_leases] == ["lease"], "no step was run"
    other = {**CONSUMES["kv_transfer_params"], "remote_request_id": "other"}
    core.call(KeepLease(other))
    core.call(KeepLease({"do_remote_decode": True}))
    assert [source.lease for source in transfer.kept_leases] == ["lease", "other"] and not transfer.released
    core.call(KeepLease(other, is_needed=False))
    assert [source.lease for source in transfer.released] == ["other"]
    with pytest.raises(RequestError, match="remote_port"):
        core.call(KeepLease({**other, "remote_port": -1}))
    plain = EngineCore(make_config(), FakeExecutor(counting_model(VOCAB), VOCAB, 64))
    plain.call(KeepLease(other))
