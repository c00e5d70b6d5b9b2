"""With `deterministic`, a request's tokens and log probabilities are the same bits whatever happens around it."""

import dataclasses
import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.engine.core import EngineCore
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.worker import shared_blocks
from pallas_kernels.ragged_paged_attention import sharing
from tests.models.checkpoints import write_checkpoint

VOCAB = 211
LONGEST_RUN = 5
OPTIONS = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 96,
    "token_buckets": (2, 8, 96),
    "max_model_len": 112,
    "block_size": 4,
    "max_logprobs": 3,
    "num_scheduler_steps": LONGEST_RUN,
}
# So few blocks that requests are preempted. Float32 shows what bfloat16 would round away.
PER_MODEL = {
    "gemma3_new_spelling": {"dtype": "float32", "num_gpu_blocks_override": 86},  # two ropes, a window, a soft cap
    "gemma2": {"dtype": "float32", "num_gpu_blocks_override": 60},
    "qwen3": {"dtype": "bfloat16", "num_gpu_blocks_override": 32},
    "phi3_partial": {"dtype": "bfloat16", "num_gpu_blocks_override": 32, "quantization": "int8"},
    "llama_mqa_bias_tied": {"dtype": "float32", "num_gpu_blocks_override": 32},
    "lfm2": {"dtype": "float32", "num_gpu_blocks_override": 48},
}
EXHAUSTIVE = ("gemma2", "qwen3", "phi3_partial", "llama_mqa_bias_tied")
MARKS = {"gemma3_new_spelling": (), "lfm2": ()} | dict.fromkeys(EXHAUSTIVE, pytest.mark.exhaustive)
CHOICES = {
    "top_p": 0.8,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.3,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "logit_bias": {5: 4.0},
}


def random_request(index: int) -> EngineCoreRequest:
    """The request of this number; half of them begin alike."""
    draw, shared = random.Random(index), random.Random(0)
    beginning = [shared.randrange(3, VOCAB) for _ in range(70)][: draw.choice([0, 0, 0, 30, 44, 70])]
    prompt = beginning + [draw.randrange(3, VOCAB) for _ in range(draw.choice([1, 2, 9, 20]))]
    max_tokens = draw.randint(3, 20) if beginning else draw.choice([4, 12, 80])
    options = {"temperature": draw.choice([0.0, 1.0]), "max_tokens": max_tokens, "ignore_eos": True, "seed": index}
    for option in draw.sample(sorted(CHOICES), draw.choice([0, 1, 3])):
        options[option] = CHOICES[option]
    return EngineCoreRequest(f"r{index}", prompt, SamplingParams(**options), arrival_time=0.0)


REQUESTS = [random_request(index) for index in range(24)]


class Engine:
    """An executor all of whose programs are compiled, and what every request gets when nobody else is there."""

    def __init__(self, folder, **options):
        options = EngineConfig.from_options(model=str(folder), **OPTIONS | options)
        folder, functions, decoder, self.config = resolve_model(options)
        self.executor = UniProcExecutor(self.config, functions, decoder, folder)
        self.executor.worker.wait_for_programs()
        core = self.core(prefix_caching=False, num_scheduler_steps=1)
        self.alone = [serve(core, [index])[index] for index in range(len(REQUESTS))]

    def core(self, *, prefix_caching=True, **scheduler) -> EngineCore:
        self.executor.recover()
        config = dataclasses.replace(
            self.config,
            cache=dataclasses.replace(self.config.cache, enable_prefix_caching=prefix_caching),
            scheduler=dataclasses.replace(self.config.scheduler, **scheduler),
        )
        return EngineCore(config, self.executor)


def serve(core: EngineCore, indices, arrivals: random.Random | None = None):
    """Everything that the requests of these numbers get back. They come at once, or when chance wants it."""
    coming, answers, num_left = list(indices), {f"r{index}": [] for index in indices}, len(indices)
    while num_left:
        if coming and (arrivals is None or arrivals.random() < 0.3):
            core.add_request(REQUESTS[coming.pop(0)])
        for output in core.step().outputs:
            assert output.error is None
            answers[output.request_id].append(output)
            num_left -= output.finish_reason is not None
    return {index: joined(answers[f"r{index}"]) for index in indices}


def joined(outputs):
    """(tokens, lines of log probabilities), of the prompt too."""
    tokens = [token for output in outputs for token in output.new_token_ids]
    lines = [line for output in outputs for line in (*(output.prompt_logprobs or ()), *(output.new_logprobs or ()))]
    return tokens, [(line.token_ids, line.logprobs, line.rank) for line in lines]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in PER_MODEL]
)
def engine(request, tmp_path_factory):
    name = request.param
    engine = Engine(write_checkpoint(name, tmp_path_factory.mktemp(name)), deterministic=True, **PER_MODEL[name])
    engine.has_states = name == "lfm2"  # of which there are few, so that fewer beginnings are found and shared
    yield engine
    engine.executor.shutdown()


@settings(max_examples=5, phases=[Phase.generate])  # each serves 24 requests in a second or more
@given(
    company=st.permutations(range(len(REQUESTS))),
    seed=st.integers(0, 1000),
    limits=st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.sampled_from([8, 23, 96]),
            "long_prefill_token_threshold": st.sampled_from([0, 5]),
            "num_scheduler_steps": st.sampled_from([1, LONGEST_RUN]),
            "async_scheduling": st.booleans(),
        }
    ),
)
def test_any_company_any_chunks_and_any_cached_prefix_give_the_same_bits(engine, company, seed, limits):
    answers = serve(engine.core(**limits), company, random.Random(seed))
    assert answers == {index: engine.alone[index] for index in company}


def test_prefix_hits_and_runs_of_steps_give_the_same_bits(engine, monkeypatch):
    shared = []

    def fill_spans(shared_6R, *rows):
        sharing.fill_spans(shared_6R, *rows)
        shared.append(shared_6R.any())

    monkeypatch.setattr(shared_blocks, "fill_spans", fill_spans)
    core = engine.core(max_num_batched_tokens=23)
    assert serve(core, range(len(REQUESTS))) == dict(enumerate(engine.alone))
    records, _ = core.step_log.read()
    assert core._scheduler.make_stats().prefix_cache_hits > (60 if engine.has_states else 100), "the test is too easy"
    assert any(record.num_steps > 1 for record in records), "the test has no runs"
    assert any(shared) or engine.has_states, "no rows share a beginning that is long enough"
    assert engine.executor.worker.stats()["recompiles"] == 0


def test_preemption_gives_the_same_bits(engine):
    core = engine.core(prefix_caching=False)
    longest_first = sorted(range(len(REQUESTS)), key=lambda index: -REQUESTS[index].sampling_params.max_tokens)
    assert serve(core, longest_first) == {index: engine.alone[index] for index in longest_first}
    assert core._scheduler.make_stats().num_preemptions > 1, "the test is too easy"


@pytest.mark.exhaustive
def test_without_the_option_other_company_gives_other_bits(tmp_path):
    engine = Engine(write_checkpoint("gemma2", tmp_path), num_scheduler_steps=1, **PER_MODEL["gemma2"])
    answers = serve(engine.core(max_num_batched_tokens=23), range(len(REQUESTS)))
    assert answers != dict(enumerate(engine.alone))
    engine.executor.shutdown()
