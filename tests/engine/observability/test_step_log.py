import itertools
import time

import pytest
from msgspec.structs import astuple

from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.observability.step_log import StepLog
from jaxpaged.messages import ModelRunnerOutput, SchedulerOutput, StepBuckets
from tests.engine.fake_engine import FakeExecutor, counting_model, make_config
from tests.engine.test_core import VOCAB, request, run


def scheduled(step_id, num_tokens=3):
    return SchedulerOutput(step_id, [], [], ["r"], [num_tokens], [0], [True], [None], num_tokens)


def make_core(**options):
    executor = FakeExecutor(counting_model(VOCAB), VOCAB)
    return EngineCore(make_config(**options), executor), executor


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_step_leaves_a_record_of_what_it_held(asynchronous):
    core, executor = make_core(async_scheduling=asynchronous)
    begin = time.perf_counter()
    for name in "abc":
        core.add_request(request(name, prompt=[20] * 9, max_tokens=4))
    run(core)
    end = time.perf_counter()
    records, num_dropped = core.step_log.read()
    assert num_dropped == 0
    assert [(r.step_id, r.num_tokens, r.num_requests, r.num_sampled) for r in records] == [
        (s.step_id, s.total_num_scheduled_tokens, len(s.request_ids), sum(s.max_sampled_tokens))
        for s in executor.executed
    ]
    assert [r.num_unfinished for r in records][-1] == 0
    for record in records:
        times = [
            begin,
            record.schedule_begin,
            record.schedule_end,
            record.dispatch_end,
            record.wait_begin,
            record.result_ready,
            record.update_end,
            end,
        ]
        assert times == sorted(times)


def test_with_asynchronous_scheduling_a_step_is_dispatched_before_the_last_result_is_there():
    for asynchronous in (True, False):
        core, _ = make_core(async_scheduling=asynchronous)
        core.add_request(request("r", max_tokens=8))
        run(core)
        records, _ = core.step_log.read()
        ahead = [later.dispatch_end <= record.wait_begin for record, later in itertools.pairwise(records)]
        assert ahead and all(value is asynchronous for value in ahead)


def test_a_failed_step_leaves_no_record():
    core, executor = make_core()
    executor.fail_at = {1: "result"}
    core.add_request(request("r", max_tokens=8))
    run(core)
    assert [record.step_id for record in core.step_log.read()[0]] == [executor.executed[0].step_id]


def test_what_the_executor_padded_to_is_noted_and_without_padding_the_sizes_are():
    log = StepLog()
    log.add(scheduled(1), ModelRunnerOutput(1, ["r"], [[5]], buckets=StepBuckets(8, 16, True)), 1, (0.0,) * 5)
    log.add(scheduled(2), ModelRunnerOutput(2, ["r"], [[5]]), 1, (0.0,) * 5)
    padded, exact = log.read()[0]
    assert (padded.token_bucket, padded.sample_bucket, padded.full_sampler) == (8, 16, True)
    assert (exact.token_bucket, exact.sample_bucket, exact.full_sampler) == (3, 1, False)


def test_old_steps_are_forgotten_and_counted():
    log = StepLog(capacity=3)
    for step_id in range(1, 6):
        log.add(scheduled(step_id), ModelRunnerOutput(step_id, [], []), 0, (0.0,) * 5)
    records, num_dropped = log.read()
    assert [record.step_id for record in records] == [3, 4, 5]
    assert num_dropped == 2


@pytest.mark.parametrize(
    ("since", "most", "shown"),
    [(0, 9, [3, 4, 5]), (4, 9, [5]), (5, 9, []), (0, 2, [4, 5]), (3, 1, [5]), (6, 9, [3, 4, 5]), (0, 0, [])],
)
def test_who_watches_gets_the_newest_steps_and_the_number_of_those_before(since, most, shown):
    """`since` above what there was is of an earlier engine."""
    log = StepLog(capacity=3)
    for step_id in range(1, 6):
        log.add(scheduled(step_id), ModelRunnerOutput(step_id, [], []), 0, (0.0,) * 5)
    records, num_before = log.read(since, most)
    assert [record.step_id for record in records] == shown
    assert num_before == 5 - len(shown)


def test_records_come_back_as_they_were_with_what_was_written_to_them_after_they_were_added():
    log, times = StepLog(capacity=2), (1.0, 2.5, 3.25, 4.125, 1e6 / 3)
    added = []
    for step_id in (2**40, 7, 8):
        record = log.add(
            scheduled(step_id), ModelRunnerOutput(step_id, [], [], buckets=StepBuckets(8, 2, True)), 4, times
        )
        record.pages_saved, record.pages_loaded = step_id % 5, 3
        added.append(record)
    kept, _ = log.read()
    assert kept == added[1:]
    assert [type(value) for value in astuple(kept[0])] == [type(value) for value in astuple(added[1])]
