"""Engines that see as a whole: what is loaded, kept and refused, and what the other processes of an engine hear."""

import jax
import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.encoding.frames import FrameDecoder, FrameEncoder
from jaxpaged.engine.build import compile_bundle, resolve_model
from jaxpaged.engine.core import EngineCore
from jaxpaged.errors import ConfigError
from jaxpaged.executor.group_messages import Command, Step
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import (
    EncoderInput,
    EngineCoreRequest,
    MultiModalFeature,
    ProgramKey,
    SchedulerOutput,
    StepPrograms,
)
from jaxpaged.params.sharding import bytes_on_device
from jaxpaged.pooling import PoolingParams
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.tools.planning.plan_engine import plan_engine
from jaxpaged.worker.encoder_spec import encoder_spec
from jaxpaged.worker.engine_spec import engine_specs
from jaxpaged.worker.memory import encode_bytes, reserve_of
from jaxpaged.worker.worker import meshes_of
from tests.models.seeing_checkpoints import IMAGE_TOKEN, SEEING, write_seeing_checkpoint

NAME = "gemma3_seeing"
OPTIONS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "token_buckets": (32,),
    "max_model_len": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 40,
    "dtype": "float32",
    "num_scheduler_steps": 1,
}
PICTURE = np.random.default_rng(5).integers(0, 256, (1, 32, 32, 3)).astype(np.uint8)
PROMPT = [3, 4, *[IMAGE_TOKEN] * 16, 5, 6]
FEATURE = MultiModalFeature(b"p" * 32, "image", 2, 16, [(2, 16)], (1, 4, 4), PICTURE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_seeing_checkpoint(NAME, tmp_path_factory.mktemp("model"))


def config_of(folder, **options):
    return EngineConfig.from_options(model=str(folder), **OPTIONS | options)


def spec_of(folder, **options):
    _, model, decoder, config = resolve_model(config_of(folder, **options))
    return engine_specs(config, model, decoder, meshes_of(config.parallel))[0]


def served(core, pooling=None):
    """What a picture and a text behind it give."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=1)
    request = EngineCoreRequest("a", PROMPT, params, 0.0, mm_features=[FEATURE], pooling_params=pooling)
    core.add_request(request)
    outputs = []
    while core.has_work():
        outputs += core.step().outputs
    assert not any(output.error for output in outputs), outputs
    return outputs


def tokens(core):
    return [token for output in served(core) for token in output.new_token_ids]


def test_bundles_sleep_and_other_weights(folder, tmp_path):
    compile_bundle(config_of(folder), tmp_path / "bundle")
    assert (tmp_path / "bundle" / "encode-1.xla").exists()
    _, model, decoder, config = resolve_model(config_of(folder, bundle=str(tmp_path / "bundle")))
    executor = UniProcExecutor(config, model, decoder, folder)
    core = EngineCore(config, executor)
    try:
        expected = tokens(core)
        assert not executor.worker.programs.seconds, "a program was compiled"
        assert core.stats().mm_cache_queries == 1
        core.sleep()
        assert executor.worker.device.params is None and executor.worker.device.state is None
        core.wake_up()
        assert tokens(core) == expected and core.stats().mm_cache_hits == 0, "what was cached is lost"
        version = executor.weights_version
        core.collective_rpc(turn_tower_off, (), {})
        assert executor.weights_version != version and tokens(core) != expected
    finally:
        core.shutdown()


def turn_tower_off(worker):
    params = worker.device.params
    worker.device.params = params.replace(vision=jax.tree.map(lambda array: array * 0, params.vision))


def test_a_pooling_engine_sees(folder):
    _, model, decoder, config = resolve_model(config_of(folder, runner="pooling", convert="embed", load_format="dummy"))
    core = EngineCore(config, UniProcExecutor(config, model, decoder, folder))
    try:
        (output,) = served(core, PoolingParams(task="embed"))
        assert output.pooled.shape == (48,) and np.isfinite(output.pooled).all()
    finally:
        core.shutdown()


def test_only_the_language_model_is_what_a_model_of_text_is(folder):
    whole, text = spec_of(folder), spec_of(folder, language_model_only=True)
    assert text.encoder is None and text.whole.vision is None and encode_bytes(text) == 0
    tower = sum(bytes_on_device(leaf) for leaf in jax.tree.leaves(whole.param_shapes.vision))
    assert whole.weight_bytes == text.weight_bytes + tower
    assert jax.tree.leaves(whole.token_params) == jax.tree.leaves(text.param_shapes)
    slots, numbers = whole.encoder.cache_shape
    assert reserve_of(whole).state == reserve_of(text).state + slots * numbers * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size is 3, .*--language-model-only"),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 4}, "decode_context_parallel_size is 2"),
        ({"max_num_batched_tokens": 15}, "max_num_batched_tokens is 15, but a picture has 16 tokens in a row"),
        ({"max_num_encoder_input_tokens": 15}, "is 15, and a picture has 16 embeddings"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(folder, options, words):
    with pytest.raises(ConfigError, match=words):
        assert spec_of(folder, **{"token_buckets": None, **options}).encoder is None


def test_the_encoder_cache_follows_from_options_and_the_largest_picture(folder):
    spec = spec_of(folder, mm_processor_kwargs={"do_pan_and_scan": True}, max_model_len=128)
    tower = lambda platform, **options: encoder_spec(
        spec_of(folder, **options).config, spec.model, spec.whole.vision, platform
    )
    assert tower("cpu").cache.num_pages == 2 and tower("cpu", max_model_len=128).cache.num_pages == 5
    assert tower("gpu", max_num_encoder_input_tokens=50).sizes == (1, 2, 3)
    assert tower("gpu", max_num_encoder_input_tokens=50, max_model_len=128).largest == (3, 4, 4)
    assert tower("gpu", max_model_len=128).sizes == (1, 2, 4, 5) and tower("cpu").sizes == (1,)
    assert tower("cpu", encoder_cache_size=100).cache.num_pages == 7


def test_a_plan_counts_tower_cache_and_pictures(folder):
    options = {**OPTIONS, "num_gpu_blocks_override": None}
    plan = plan_engine(EngineConfig.from_options(model=str(folder), **options), "v6e-1", compile=False)
    hf = SEEING[NAME]["vision_config"]
    width, layers = hf["hidden_size"], hf["num_hidden_layers"]
    products = 2 * 64 * layers * (4 * width**2 + 2 * width * hf["intermediate_size"])
    assert 1.0 < plan.encoder.picture_flops / (products + 4 * layers * 64**2 * width) < 1.2
    assert plan.encoder.cache_bytes == plan.encoder.cache_embeds * 48 * 4 == 32 * 48 * 4
    assert 0 < plan.encoder.weight_bytes < plan.weight_bytes


def test_pixels_reach_followers_in_frames_of_their_own():
    programs = StepPrograms(forward=ProgramKey("forward", 8), encode=(ProgramKey("encode", 1),))
    scheduled = SchedulerOutput(1, [], [], ["a"], [3], [0], [1], [None], 3, programs=programs)
    scheduled.encoder_inputs, scheduled.encoder_pages = [EncoderInput(FEATURE, [4, 2])], [("a", 0, [4, 2])]
    frames = [bytes(frame) for frame in FrameEncoder().encode(Step(scheduled))]
    assert len(frames) == 2 and len(frames[1]) == PICTURE.nbytes
    heard = FrameDecoder(Command).decode(frames).scheduled
    assert heard.programs.keys == [ProgramKey("encode", 1), ProgramKey("forward", 8)]
    (found,) = heard.encoder_inputs
    assert np.array_equal(found.feature.pixels, PICTURE) and found.feature.runs == [(2, 16)]
    assert heard.encoder_pages == scheduled.encoder_pages and found.page_ids == [4, 2]
