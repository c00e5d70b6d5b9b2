"""Heads draft what their definitions say, whatever came before, and their drafts change no bit of an answer."""

import numpy as np
import pytest

from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams
from tests.core.simulation import ForcedLengths
from tests.end_to_end.test_multi_step import answers_of
from tests.end_to_end.test_speculation import (
    FOLLOWING,
    MOST,
    answers_beside_a_grammar,
    check_random_traffic,
    core_of,
    started,
)
from tests.models.checkpoints import write_checkpoint
from tests.models.draft_heads import EAGLE3, Decoder, Eagle3, Mimo, write_eagle3, write_mimo

pytestmark = pytest.mark.slow


HEADS = ("eagle3", "eagle3 on 4 devices", "mtp")


def asked_of(*heads):
    """What comes behind a draft is the same for every head: the others are asked by exhaustive tests."""
    marks = {name: () if name in heads else pytest.mark.exhaustive for name in HEADS}
    return pytest.mark.parametrize(
        "headed", [pytest.param(x, marks=marks[x]) for x in HEADS], indirect=True, scope="module"
    )


@pytest.fixture(scope="module", params=HEADS)
def headed(request, tmp_path_factory):
    """(Options, an executor, the reference). On several devices the head has embeddings of its own, and the files of
    `speculators`."""
    place, on_devices = tmp_path_factory.mktemp("model"), "devices" in request.param
    if request.param == "mtp":
        (config, executor), reference = started(write_mimo(place), 34, method="mtp"), Mimo()
    else:
        folder = write_checkpoint("llama", place)
        head = write_eagle3(place / "head", has_embeddings=on_devices, speculators=on_devices)
        config, executor = started(folder, 34, 4 if on_devices else 1, method="eagle3", model=str(head))
        # What `speculators` leaves out of config.json is that the layer adds to the normalised feature.
        reference = Eagle3(Decoder("llama"), {**EAGLE3, "norm_before_residual": on_devices}, on_devices)
    yield config, executor, reference
    executor.shutdown()


class Listener:
    """Passes drafts on, and keeps them with the text behind which they were made."""

    def __init__(self, drafter, core):
        self.drafter, self.core, self.layouts = drafter, core, drafter.layouts
        self.name_of_row, self.heard = {}, []

    def admit(self, device, rank, row, request):
        self.name_of_row[row] = request.request_id
        self.drafter.admit(device, rank, row, request)

    def release(self, device, row, num_prompt_tokens):
        self.drafter.release(device, row, num_prompt_tokens)

    def propose(self, device, key, draft, packed):
        drafts_SK = self.drafter.propose(device, key, draft, packed)
        for row, drafts_K, count in zip(draft.newest.rows, np.asarray(drafts_SK), draft.num_drafts):
            request = self.core._scheduler.requests[self.name_of_row[int(row)]]
            self.heard.append((list(request.all_token_ids), drafts_K[:count].tolist()))
        return drafts_SK


def greedy_requests(num_requests, num_tokens):
    """With beginnings in common, the first three alike as those of n = 3 are, and one of a single token."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=num_tokens, ignore_eos=True)
    own = [max(i, 3) for i in range(1, num_requests)]
    prompts = [*([*range(3, 12 + i % 3), *range(40 + i, 44 + i)] for i in own), [5]]
    return [EngineCoreRequest(f"r{i}", prompt, params, 0.0) for i, prompt in enumerate(prompts)]


@asked_of("eagle3", "mtp")
def test_a_head_drafts_what_its_definition_says_whatever_came_before(headed):
    """Alone and in company, in chunks, behind cached beginnings, after preemption and sleep."""
    *engine, reference = headed
    core = core_of(engine, ForcedLengths(lambda: MOST), async_scheduling=False)
    runner = core.executor.worker.runner
    listener = Listener(runner.drafter, core)
    runner.drafter, runner.admitting = listener, (listener, runner.output_stage)
    for level in (1, 2):
        answers_of(core, greedy_requests(10, 30))
        core.sleep(level, mode="wait")
        core.wake_up()
    answers_of(core, greedy_requests(4, 12))
    assert core._scheduler.make_stats().num_preemptions, "the test preempts nobody"
    assert len(listener.heard) > 100
    for text, drafts in listener.heard[::7]:
        assert drafts == reference.drafts(text, len(drafts))


@asked_of("eagle3")
def test_random_traffic_gets_the_bits_of_single_steps(headed):
    config, executor, _ = headed
    if config.compile.deterministic:
        check_random_traffic((config, executor), seed=1, asynchronous=True, num_steps=5)


@asked_of("eagle3")
def test_a_grammar_holds_for_drafts_beside_those_of_others(headed):
    """With two steps in flight; on several devices nobody promises the same text."""
    config, executor, _ = headed
    lengths = ForcedLengths(lambda: MOST)
    got, _ = answers_beside_a_grammar((config, executor), lengths)
    assert lengths.num_drafts > 0
    assert all(len(got[name][0]) == 21 and not any(token % 2 for token in got[name][0]) for name in FOLLOWING)
    if config.compile.deterministic:
        assert got == answers_beside_a_grammar((config, executor), None)[0]
