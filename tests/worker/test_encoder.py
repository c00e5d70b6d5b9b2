"""Encode programs, the encoder cache, and what takes from it give transformers' logits. Steps are made by hand."""

import jax
import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.kv_cache_spec import EncoderCacheConfig
from jaxpaged.messages import EncoderInput, MultiModalFeature, NewRequestData, PromptLogprobs, SchedulerOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.features import Extra
from jaxpaged.worker.costs import work_of
from tests.models.paged import golden_of
from tests.models.seeing_checkpoints import (
    IMAGE_TOKEN,
    pictures_of,
    pictures_of_prompts,
    prompts_of,
    write_seeing_checkpoint,
)

NAME = "gemma3_seeing"
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "token_buckets": (96,),
    "max_model_len": 96,
    "block_size": 8,
    "num_gpu_blocks_override": 160,
    "dtype": "float32",
    "num_scheduler_steps": 1,
    "encoder_cache_size": 96,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, seed=1, prompt_logprobs=8)


def start(tmp_path, **options):
    folder = write_seeing_checkpoint(NAME, tmp_path)
    folder, model, decoder, config = resolve_model(EngineConfig.from_options(model=str(folder), **OPTIONS, **options))
    executor = UniProcExecutor(config, model, decoder, folder)
    for extra in (Extra.PICTURES, Extra.PROMPT_LOGPROBS, Extra.FULL_SAMPLER):
        while not executor.can_run(extra):
            pass
    return executor


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    executor = start(tmp_path_factory.mktemp("model"))
    yield executor
    executor.shutdown()


def features_of_prompt(number):
    """The pictures of a prompt, with pixels."""
    prompt, pictures, features, place = prompts_of(NAME)[number], pictures_of(NAME), [], 0
    for picture in pictures_of_prompts()[number]:
        pixels, grid = pictures[picture]
        runs = []
        for _ in range(grid[0]):
            while prompt[place] != IMAGE_TOKEN:
                place += 1
            runs.append((place, 16))
            place += 16
        first = runs[0][0]
        features.append(MultiModalFeature(bytes([picture] * 32), "image", first, place - first, runs, grid, pixels))
    return features


class Steps:
    """Steps of an executor, with pages and blocks given out by hand."""

    def __init__(self, executor):
        self.executor, self.step_id, self.gone = executor, 0, []
        self.next_block, self.next_page = 1, 0

    def add(self, name, number, computed=0):
        """A request with a prompt."""
        prompt = prompts_of(NAME)[number]
        blocks = tuple(self.blocks(12) for _ in self.executor.kv_cache_config.groups)
        features = features_of_prompt(number)
        return NewRequestData(name, prompt, len(prompt), computed, blocks, PARAMS, mm_features=features)

    def blocks(self, count):
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def pages(self, count):
        pages = [(self.next_page + i) % 6 for i in range(count)]
        self.next_page = pages[-1] + 1
        return pages[::-1]

    def end(self):
        """Give all rows back."""
        gone = list(self.executor.worker.runner.ranks[0].row_of)
        self.executor.execute_model(SchedulerOutput(self.step_id, [], gone, [], [], [], [], []))

    def run(self, parts, new=(), inputs=(), pages=()):
        """`parts`: (name, tokens, computed before, whether it samples) -> the output."""
        self.step_id += 1
        names, counts, computed, samples = map(list, zip(*parts))
        gone, self.gone = self.gone, []
        scheduled = SchedulerOutput(
            self.step_id, list(new), gone, names, counts, computed, samples, [None] * len(names), sum(counts)
        )
        scheduled.encoder_inputs, scheduled.encoder_pages = list(inputs), list(pages)
        return self.executor.execute_model(scheduled).result()


@pytest.fixture
def steps(executor):
    steps = Steps(executor)
    yield steps
    steps.end()


def check_logits(scores, number, first=0):
    """Scores of a prompt from line `first` on are transformers', up to the shift of a softmax."""
    golden = golden_of(NAME)["prompts"][number]
    assert len(scores.logprobs) == len(golden["ids"]) - 1 - first
    for line, (ids, logprobs) in enumerate(zip(scores.token_ids[:, 1:], scores.logprobs[:, 1:]), start=first):
        found = dict(zip(ids.tolist(), logprobs.tolist()))
        theirs = dict(zip(golden["ids"][line], golden["logits"][line]))
        shared = sorted(found.keys() & theirs.keys())
        assert len(shared) >= 7
        shifts = [found[each] - theirs[each] for each in shared]
        assert max(shifts) - min(shifts) < 2e-4, line


def encoded(steps, name, number, pages=None):
    """(Request, encoder inputs, pages told)."""
    request = steps.add(name, number)
    pages = pages or [steps.pages(feature.grid[0]) for feature in request.mm_features]
    inputs = [EncoderInput(feature, own) for feature, own in zip(request.mm_features, pages)]
    return request, inputs, [(name, i, own) for i, own in enumerate(pages)]


def test_prompts_with_pictures_in_one_step(steps):
    first, inputs, pages = encoded(steps, "a", 0)
    second, more_inputs, more_pages = encoded(steps, "b", 1)
    lengths = [len(request.token_ids) for request in (first, second)]
    parts = [("a", lengths[0], 0, 1), ("b", lengths[1], 0, 1)]
    output = steps.run(parts, [first, second], inputs + more_inputs, pages + more_pages)
    check_logits(output.prompt_logprobs["a"], 0)
    check_logits(output.prompt_logprobs["b"], 1)
    assert output.buckets.num_encoded == 64 and not output.failed
    # Then one decodes, while a third one computes the same picture as the first, which is not encoded again.
    third = steps.add("c", 0)
    steps.gone = ["b"]
    length = len(third.token_ids)
    output = steps.run([("a", 1, length, 1), ("c", 39, 0, 0)], [third], pages=[("c", i, own) for _, i, own in pages])
    again = [output.prompt_logprobs["c"]]
    assert output.buckets.num_encoded == 0 and len(output.sampled_token_ids) == 1
    again.append(steps.run([("a", 1, length + 1, 1), ("c", length - 39, 39, 1)]).prompt_logprobs["c"])
    check_logits(joined(again), 0)


def joined(parts):
    arrays = [np.concatenate([getattr(part, name) for part in parts]) for name in ("token_ids", "logprobs", "ranks")]
    return PromptLogprobs(parts[0].start, *arrays)


@pytest.mark.parametrize("cuts", [(16, 22, 38, 39), (16, 17, 18, 19, 20, 21, 22, 55), (22,)])
def test_every_cut_between_runs_gives_the_same(steps, cuts):
    scores = []
    request, inputs, pages = encoded(steps, "a", 0)
    ends = [*cuts, len(request.token_ids)]
    for start, end in zip([0, *cuts], ends):
        now = [i for i, feature in enumerate(request.mm_features) if start <= feature.offset < end]
        step = [("a", end - start, start, int(end == ends[-1]))], [] if start else [request]
        output = steps.run(*step, [inputs[i] for i in now], [pages[i] for i in now])
        if "a" in output.prompt_logprobs:
            scores.append(output.prompt_logprobs["a"])
    check_logits(joined(scores), 0)


def test_embeddings_that_are_no_numbers_fail_the_requests_that_have_them(executor, steps):
    device = executor.worker.device
    first, inputs, pages = encoded(steps, "a", 0)
    second, more_inputs, more_pages = encoded(steps, "b", 1)
    table_CV, device.table_CV = device.table_CV, jax.device_put(np.full((3, 256), np.nan, np.float32))
    output = steps.run([("a", 20, 0, 0)], [first], inputs[:1], pages[:1])
    device.table_CV = table_CV
    assert "the picture at token 0 of the prompt are not finite numbers" in output.failed["a"]
    steps.gone = ["a"]
    hit, length = steps.add("c", 0), len(second.token_ids)
    output = steps.run(
        [("b", length, 0, 1), ("c", 20, 0, 0)], [second, hit], more_inputs, [*more_pages, ("c", 0, pages[0][2])]
    )
    assert list(output.failed) == ["c"], output.failed
    check_logits(output.prompt_logprobs["b"], 1)
    # The page is given to another picture, and so it is no longer what it was.
    steps.gone = ["b", "c"]
    third, inputs, pages = encoded(steps, "d", 1, [pages[0][2]])
    output = steps.run([("d", length, 0, 1)], [third], inputs, pages)
    check_logits(output.prompt_logprobs["d"], 1)
    assert not output.failed


def test_programs_and_memory_know_of_the_encoder(executor):
    worker = executor.worker
    assert executor.encoder_cache_config == EncoderCacheConfig(6, 16, 96, whole_spans=True)
    assert worker.device.state.encoded.shape == (96, 48)
    kinds = {kind for kind, _, state in worker.stats()["program_states"] if state == "ready"}
    assert "encode" in kinds and worker.stats()["recompiles"] == 0
    whole, (decoder, tower) = (
        worker.engine_spec.weight_bytes,
        (
            sum(leaf.nbytes for leaf in jax.tree.leaves(part))
            for part in (worker.device.params.decoder, worker.device.params.vision)
        ),
    )
    assert whole == decoder + tower and work_of(worker.engine_spec).weight_bytes <= decoder
