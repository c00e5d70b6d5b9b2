"""The example of models/README.md: a model that the package does not have, from a file, against its oracle."""

import asyncio
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxpaged
from jaxpaged import LLM, AsyncLLM, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.engine.build import facts_of, read_wanted, with_plugins_named
from jaxpaged.errors import CheckpointError, ConfigError, UsageError
from jaxpaged.models.registry import MODELS
from jaxpaged.tools.planning.plan_engine import plan_engine
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.programs.fingerprint import difference, replaced_code
from pallas_kernels.ragged_paged_attention import reference
from tests.guides.guide_blocks import blocks_of
from tests.models.checkpoints import random_tensors

README = Path(jaxpaged.__file__).parent / "models/README.md"
NAME = "Starcoder2ForCausalLM"
HF = {
    "architectures": [NAME],
    "model_type": "starcoder2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "use_bias": True,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"},
}
PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46], [26, 43, 38], [32, 79, 50, 28, 84]]
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "token_buckets": (8,),
    "max_model_len": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 32,
    "compilation_cache_dir": "off",
}

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)


def shapes(width, columns, head_width):
    """Tensor name -> shape, as the checkpoint has them."""
    sizes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (2 * head_width, width)}
    sizes |= {"self_attn.v_proj": (2 * head_width, width), "self_attn.o_proj": (width, width)}
    sizes |= {"mlp.c_fc": (columns, width), "mlp.c_proj": (width, columns)}
    sizes |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    every = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in sizes.items()}
    every["model.norm"] = (width,)
    both = {f"{name}.{part}": shape[:n] for name, shape in every.items() for part, n in (("weight", 2), ("bias", 1))}
    return {"model.embed_tokens.weight": (97, width), **both}


@pytest.fixture(scope="module")
def example():
    """The blocks of the page: the plugin's file, and the oracle."""
    plugin, oracle = (
        block.text for block in blocks_of(README) if block.language == "python" and "import" in block.text
    )
    assert len((plugin + oracle).splitlines()) <= 120
    return plugin, oracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint that also brings code, which nobody asked for."""
    folder = tmp_path_factory.mktemp("starcoder2")
    (folder / "config.json").write_text(json.dumps(HF), encoding="utf-8")
    (folder / "modeling_evil.py").write_text("raise SystemExit('code of a checkpoint ran')", encoding="utf-8")
    save_file(random_tensors(shapes(32, 48, 8), HF, seed=3), folder / "model.safetensors")
    return folder


@pytest.fixture
def plugin(example, tmp_path):
    path = tmp_path / "starcoder2.py"
    path.write_text(example[0], encoding="utf-8")
    return path


def answers_here(options):
    llm = LLM(attention_backend=f"{__name__}:BACKEND", **options)
    assert BACKEND.num_traced > 0
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    return outputs, llm.llm_engine.executor_stats()


class Reference:
    """An attention backend of one's own, which counts how often it is traced."""

    LAYOUT, make_plan = reference.LAYOUT, staticmethod(reference.make_plan)

    def __init__(self):
        self.num_traced = 0

    def why_not(self, platform):
        return None if platform == "cpu" else "it is for tests"

    def cannot_take(self, block_size, **others):
        return None if block_size % 8 == 0 else f"blocks of {block_size}"

    def shared_work(self, num_tokens, block_size):
        return None

    def attention(self, *arrays, **settings):
        self.num_traced += 1
        return reference.attention(*arrays, **settings)


BACKEND = Reference()


class Extension:
    """Of the worker."""

    def layers_and(self, number):
        return self.engine_spec.decoder.num_layers, number


def answers_of_a_process(options):
    """Those of an engine core in a process of its own."""

    async def run(engine):
        async def answer(number, prompt):
            return [each async for each in engine.generate({"prompt_token_ids": prompt}, GREEDY, str(number))][-1]

        outputs = await asyncio.gather(*(answer(*each) for each in enumerate(PROMPTS)))
        assert await engine.collective_rpc("layers_and", args=[3]) == [[2, 3]]
        with pytest.raises(UsageError, match="declares no 'sleep'"):
            await engine.collective_rpc("sleep")
        with pytest.raises(UsageError, match="a function does not go to another process"):
            await engine.collective_rpc(lambda worker: 1)
        return outputs, await engine.executor_stats()

    options = {**options, "worker_extension_cls": f"{__name__}:Extension"}
    engine = AsyncLLM.from_config(EngineConfig.from_options(**options))
    try:
        return asyncio.run(run(engine))
    finally:
        engine.shutdown()


@pytest.mark.parametrize(("num_devices", "answers"), [(1, answers_here), (2, answers_of_a_process)])
def test_the_engine_says_what_the_oracle_says(num_devices, answers, example, folder, plugin):
    oracle = {}
    exec(compile(example[1], "oracle", "exec"), oracle)  # the page's own text
    tensors = random_tensors(shapes(32, 48, 8), HF, seed=3)
    options = {"model": str(folder), "plugin": [str(plugin)], "tensor_parallel_size": num_devices, **OPTIONS}
    outputs, stats = answers(options)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens, logprobs = [], []
        for _ in range(6):
            last = oracle["logits"](tensors, HF, [*prompt, *tokens])[-1]
            tokens.append(int(last.argmax()))
            logprobs.append(last.max() - np.logaddexp.reduce(last))
        found = output.outputs[0]
        assert list(found.token_ids) == tokens
        drawn = [each[token].logprob for each, token in zip(found.logprobs, tokens, strict=True)]
        np.testing.assert_allclose(drawn, logprobs, atol=1e-4)
    assert stats["recompiles"] == 0


def engine_spec(folder, plugin, **options):
    options = {"model": str(folder), "plugin": [str(plugin)], **OPTIONS, **options}
    config = with_plugins_named(EngineConfig.from_options(**options))
    model, decoder = read_wanted(config, folder)
    return EngineSpec(config.resolve(facts_of(decoder), "cpu"), model, decoder, make_mesh(1))


def test_programs_are_stale_when_the_file_changes_and_plans_are_made_with_it(folder, plugin):
    def fingerprint():
        spec = engine_spec(folder, plugin)
        assert not replaced_code(spec.model, plugins=[plugin]) and replaced_code(spec.model)
        return spec.fingerprint()

    before = fingerprint()
    plugin.write_text(f"{plugin.read_text(encoding='utf-8')}\n# changed", encoding="utf-8")
    assert re.fullmatch(rf"plugin\.{plugin} is \w+ there and \w+ here", difference(before, fingerprint()))
    config = EngineConfig.from_options(model=str(folder), plugin=[str(plugin)], max_model_len=32)
    assert plan_engine(config, "v6e-1", compile=False).fits


def test_attention_backends_that_cannot_be_are_named(folder, plugin):
    spec = lambda **options: engine_spec(folder, plugin, **options)
    assert spec(attention_backend=f"{__name__}:BACKEND").fingerprint()["options.attention_backend"] != "reference"
    for options, words in (
        ({"attention_backend": "no.such:BACKEND"}, "cannot be imported: ModuleNotFoundError"),
        ({"attention_backend": f"{__name__}:GREEDY"}, "has no LAYOUT, why_not"),
        ({"attention_backend": f"{__name__}:BACKEND", "block_size": 4}, "cannot take blocks of 4"),
    ):
        with pytest.raises(ConfigError, match=words):
            spec(**options).fingerprint()
    with pytest.raises(ConfigError, match="attention_backend is 'mine'; it must be one of auto"):
        EngineConfig.from_options(attention_backend="mine")


def test_without_the_plugin_the_model_is_not_known(folder):
    assert NAME not in MODELS
    with pytest.raises(CheckpointError, match=f"{NAME}"):
        LLM(model=str(folder), **OPTIONS)


def test_a_name_that_is_built_in_is_replaced_only_where_that_is_said(example, tmp_path, folder):
    text = example[0].replace(NAME, "LlamaForCausalLM")
    path = tmp_path / "taken.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"the plugin {path} adds the model LlamaForCausalLM, which is")):
        LLM(model=str(folder), plugin=[str(path)], **OPTIONS)
