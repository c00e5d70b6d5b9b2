"""Adapters of towers that PEFT wrote, against the logits of PEFT's own models, beside requests that have none."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.engine.core import EngineCore
from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import EngineCoreRequest, LoRARequest, MultiModalFeature
from jaxpaged.sampling_params import SamplingParams
from tests.end_to_end.test_pictures import serve
from tests.models.adapted import GOLDEN
from tests.models.paged import golden_of
from tests.models.seeing import features_in
from tests.models.seeing_checkpoints import pictures_of, pictures_of_prompts, prompts_of, write_seeing_checkpoint

OPTIONS = {
    "enable_lora": True,
    "enable_tower_connector_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "token_buckets": (128,),
    "max_model_len": 96,
    "block_size": 4,
    "num_gpu_blocks_override": 128,
    "dtype": "float32",
    "encoder_cache_size": 512,
    "num_scheduler_steps": 1,
}
ENGINES = [
    ("tower", {}),
    pytest.param("tower_dora", {}, marks=pytest.mark.exhaustive),
    pytest.param("tower_dora", {"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive),
]
SCORED = {"temperature": 0.0, "max_tokens": 1, "seed": 1, "prompt_logprobs": 8}


def features_of(checkpoint):
    """The pictures of the first prompt, with pixels."""
    pictures = [pictures_of(checkpoint)[number] for number in pictures_of_prompts()[0]]
    found = features_in(prompts_of(checkpoint)[0], [grid for _, grid in pictures])
    return [
        MultiModalFeature(
            bytes([number] * 32), "image", each.offset, sum(each.runs[-1]) - each.offset, each.runs, grid, pixels
        )
        for number, (each, (pixels, grid)) in enumerate(zip(found, pictures, strict=True))
    ]


def executor_of(folder, **options):
    config = EngineConfig.from_options(model=str(folder), **OPTIONS | options)
    folder, model, decoder, config = resolve_model(config)
    return config, UniProcExecutor(config, model, decoder, folder)


def check_scores(lines, expected):
    """Log probabilities of a prompt are the logits that were recorded, up to the shift of a softmax."""
    for position, (ids, logits) in expected.items():
        theirs, ours = dict(zip(ids, logits)), dict(zip(*map(np.ndarray.tolist, map(np.asarray, lines[position]))))
        shared = theirs.keys() & ours.keys()
        assert len(shared) >= 6
        shifts = [ours[each] - theirs[each] for each in shared]
        assert max(shifts) - min(shifts) < 5e-4, position


def without_tower(name, folder):
    """The path of an adapter with no parts of the tower."""
    config = json.loads((GOLDEN / name / "adapter_config.json").read_text())
    tensors = load_file(GOLDEN / name / "adapter_model.safetensors")
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {key: each for key, each in tensors.items() if ".language_model." in key}, folder / "adapter_model.safetensors"
    )
    return str(folder)


@pytest.mark.parametrize(("name", "options"), ENGINES)
def test_pictures_are_seen_by_each_requests_own_adapter(name, options, tmp_path):
    golden = json.loads((GOLDEN / name / "logits.json").read_text())
    checkpoint = golden["checkpoint"]
    base = golden_of(checkpoint)["prompts"][0]
    prompt = prompts_of(checkpoint)[0]
    expected = {
        "base": dict(enumerate(zip(base["ids"][:-1], base["logits"][:-1], strict=True))),
        "own": {int(position): (top["ids"], top["logits"]) for position, top in golden["top"].items()},
    }
    config, executor = executor_of(write_seeing_checkpoint(checkpoint, tmp_path / "model"), **options)
    core = EngineCore(config, executor)
    try:
        own = core.adapters.add_lora(LoRARequest("own", 1, str(GOLDEN / name)))
        text = core.adapters.add_lora(LoRARequest("text", 2, without_tower(name, tmp_path / "text")))
        assert own.changes_tower and not text.changes_tower
        loras, kinds = {"base": None, "own": own, "text": text}, ["base", "own", "base", "own", "text"]
        request = lambda i, kind: EngineCoreRequest(
            f"{i} {kind}",
            list(prompt),
            SamplingParams(**SCORED),
            arrival_time=float(i),
            mm_features=features_of(checkpoint),
            lora=loras[kind],
        )
        served = serve(core, [request(i, kind) for i, kind in enumerate(kinds[:2])])
        served |= serve(core, [request(i, kind) for i, kind in enumerate(kinds[2:], 2)])
        for each, (_, lines) in served.items():
            if (kind := each.partition(" ")[2]) in expected:
                check_scores([(ids[1:], logprobs[1:]) for ids, logprobs in lines], expected[kind])
        pictures = core._scheduler.ranks[0].pictures.cache.pictures
        assert len(pictures) == 2 * len(features_of(checkpoint)), "the base's, which is that of text, and its own"
        assert executor.worker.stats()["recompiles"] == 0
    finally:
        core.shutdown()


def test_towers_have_adapters_where_options_say_so(tmp_path):
    folder = write_seeing_checkpoint("qwen2_5_vl", tmp_path)
    with pytest.raises(ConfigError, match="mm_encoder_tp_mode is 'data'"):
        executor_of(folder, mm_encoder_tp_mode="data")
    with pytest.raises(ConfigError, match="no pictures are encoded here"):
        executor_of(folder, language_model_only=True)
    with pytest.raises(ConfigError, match="without enable_lora"):
        executor_of(folder, enable_lora=False)
    _, executor = executor_of(folder, enable_tower_connector_lora=False)
    try:
        with pytest.raises(CheckpointError, match="--enable-tower-connector-lora"):
            executor.worker.read_lora(LoRARequest("own", 1, str(GOLDEN / "tower")))
    finally:
        executor.shutdown()
