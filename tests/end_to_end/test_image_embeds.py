"""Embeddings in place of pictures: a request gets what it gets with the pictures that they are of, whatever else is
computed, cached or preempted around it.
"""

import itertools
import random

import jax
import msgspec
import numpy as np
import pytest

from jaxpaged.worker import encoder_spec
from jaxpaged.worker.visual_rows import slots_of
from tests.end_to_end import test_pictures, test_pictures_of_any_size
from tests.end_to_end.test_pictures import Engine, Prompt, same, serve
from tests.models.seeing_checkpoints import IMAGE_TOKEN, write_seeing_checkpoint

FAMILIES = {
    "gemma3_seeing": (test_pictures, {"num_gpu_blocks_override": 100}),
    "qwen3_vl": (test_pictures_of_any_size, test_pictures_of_any_size.OPTIONS),
}
OPTIONS = {
    "max_num_batched_tokens": 96,
    "token_buckets": (96,),
    "num_scheduler_steps": 1,
    "enable_mm_embeds": True,
}


class GivingEngine(Engine):
    """An engine, and the embeddings of pictures as it computes them itself, by their keys."""

    def __init__(self, folder, **options):
        super().__init__(folder, **options)
        self.embeds = {}

    def _encoded(self, feature):
        core, size = self.core(), self.executor.worker.engine_spec.encoder.cache.page_size
        prompt = Prompt([5, *[IMAGE_TOKEN] * feature.length, 6])
        runs = [(first - feature.offset + 1, length) for first, length in feature.runs]
        prompt.features = [msgspec.structs.replace(feature, offset=1, runs=runs)]
        serve(core, [prompt.request("a", max_tokens=1)])
        (picture,) = core._scheduler.ranks[0].pictures.cache.pictures
        slots = slots_of(picture.page_ids, size, picture.num_embeds)
        return np.asarray(self.executor.worker.device.state.encoded)[slots]

    def given(self, request, chance=None):
        """The request with embeddings in place of pictures, of all or as chance wants it."""
        wanted = [chance is None or chance.random() < 0.6 for _ in request.mm_features]
        features = [self._given(each) if is_wanted else each for each, is_wanted in zip(request.mm_features, wanted)]
        return msgspec.structs.replace(request, mm_features=features)

    def _given(self, feature):
        if feature.key not in self.embeds:
            self.embeds[feature.key] = self._encoded(feature)
        pixels, key = self.embeds[feature.key].view(np.uint8), bytes(255 - each for each in feature.key)
        return msgspec.structs.replace(feature, key=key, pixels=pixels, is_embeds=True)


@pytest.fixture(scope="module", params=[pytest.param("gemma3_seeing", marks=pytest.mark.exhaustive), "qwen3_vl"])
def engine(request, tmp_path_factory):
    folder = write_seeing_checkpoint(request.param, tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(encoder_spec, "MOST_COPIED", 24)  # so that pictures are copied in parts, and two in one
        prompts, options = FAMILIES[request.param]
        engine = GivingEngine(folder, **OPTIONS, **options)
        engine.options = {**OPTIONS, **options}
        engine.long, engine.requests = prompts.LONG, prompts.REQUESTS
        yield engine
        engine.executor.shutdown()


def test_a_request_gets_what_its_pictures_give(engine):
    request = engine.long.request("a", prompt_logprobs=2)
    given, core = engine.given(request), engine.core()
    served = serve(core, [given], chunks=[23, 1, 40])
    same(served["a"], engine.alone(request), engine.tolerance)
    assert not sum(record.num_encoded for record in core.step_records()[0])
    kinds = [key.kind for key in engine.executor.worker.programs.builders]
    assert kinds.count("embeds_scatter") == 1 and "embeds_gather" not in kinds
    assert engine.executor.worker.counter.count == 0


def preempt_often(core):
    """All requests begin anew now and then, and what is cached is lost."""
    step, count = core.step, itertools.count(1)

    def preempting():
        if next(count) % 9 == 0:
            core.reset_prefix_cache(reset_running_requests=True)
        return step()

    core.step = preempting


def test_mixes_of_pictures_and_embeddings(engine):
    num_preemptions = num_hits = num_cached = 0
    for seed in range(2):
        chance, hits = random.Random(seed), {}
        requests = chance.sample(engine.requests, 20)
        given = [engine.given(each, chance) for each in requests]
        core = engine.core(async_scheduling=chance.random() < 0.7)
        if seed % 2:
            preempt_often(core)
        served = serve(core, given, chance, chance.choice([None, [7, 30], [96, 3, 18]]), hits)
        engine.check(served, requests)
        stats = core.stats()
        num_preemptions, num_hits = num_preemptions + stats.num_preemptions, num_hits + stats.mm_cache_hits
        num_cached += sum(hits.values())
    assert min(num_preemptions, num_hits, num_cached) > 0, (num_preemptions, num_hits, num_cached)


def test_an_engine_without_an_encoder_takes_embeddings(engine):
    """The weights of the tower are in the checkpoint, and are left out."""
    request = engine.long.request("a", prompt_logprobs=2)
    alone = Engine(engine.config.model.model, **{**engine.options, "language_model_only": True})
    try:
        same(serve(alone.core(), [engine.given(request)])["a"], engine.alone(request), engine.tolerance)
        params, theirs = alone.executor.worker.device.params, engine.executor.worker.device.params
        assert params.vision is None and jax.tree.structure(params.decoder) == jax.tree.structure(theirs.decoder)
        kinds = {key.kind for key in alone.executor.worker.programs.builders}
        assert "embeds_scatter" in kinds and "encode" not in kinds
    finally:
        alone.executor.shutdown()
