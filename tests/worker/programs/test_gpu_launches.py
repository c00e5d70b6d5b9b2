"""What a GPU is given for a step: how many launches a layer has, and nothing for which the host has to be asked.

XLA launches a program as graphs of CUDA, except for loops, whose condition the host reads in each turn, and for
conditionals that have a loop in them: then the host waits for the device in every step.
"""

import re
from dataclasses import replace

import jax
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.engine.build import facts_of, read_model
from jaxpaged.kv_cache_spec import KVCacheConfig, pool_layouts
from jaxpaged.messages import ProgramKey
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.programs.engine_programs import EnginePrograms
from pallas_kernels import gpu_targets
from tests.models.checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.aot_gpu,
    pytest.mark.skipif(gpu_targets.why_not() is not None, reason=str(gpu_targets.why_not())),
]
OPTIONS = {"max_num_seqs": 64, "token_buckets": (8, 64), "max_model_len": 64, "block_size": 16, "dtype": "bfloat16"}
NOT_LAUNCHED = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
# Norms 2; queries, keys, values 1 product; their rotation and writing 1; attention 1 and the merging of its parts 1;
# its output 1 product; feed-forward 2 products and 1 between them. Steps with prompts have a second class of tiles, and
# those in which rows share spans two launches for these.
MOST_LAUNCHES = {
    ProgramKey("decode", 8): 10,
    ProgramKey("decode", 64): 10,
    ProgramKey("decode_full", 8): 10,
    ProgramKey("forward", 8): 10,
    ProgramKey("forward", 64): 12,
    ProgramKey("forward_shared", 64): 14,
}
# Norms, three products before the convolution, its window, its state read and written, one product behind it, and the
# feed-forward block.
MOST_OF_SHORT_CONV = {ProgramKey("decode", 8): 14, ProgramKey("forward", 64): 14}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder_of_states(tmp_path_factory):
    return write_checkpoint("lfm2", tmp_path_factory.mktemp("states"))


def builders_of(folder, num_layers):
    """The programs of a model on an H100, with so many layers like its first, and before them the first one that
    attends if that is of another kind."""
    mesh = make_mesh(1, tuple(gpu_targets.mesh_of(gpu_targets.TARGETS["h100"]).devices.flat))
    model, decoder = read_model(folder)
    first, *_ = decoder.layers
    attending = [each for each in decoder.layers if each.mixer != first.mixer][:1]
    layers = (*attending, *[first] * num_layers)
    decoder = replace(
        decoder,
        hidden_size=512,
        intermediate_size=1024,
        num_layers=len(layers),
        layers=layers,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        dtype="bfloat16",
    )
    config = EngineConfig.from_options(model=str(folder), **OPTIONS).resolve(facts_of(decoder), "gpu")
    plan = EngineSpec(config, model, decoder, mesh)
    num_blocks = (64,) * len(pool_layouts(plan.kv_groups))
    return mesh, EnginePrograms(plan, KVCacheConfig(num_blocks, plan.kv_groups)).builders()


def text_of(folder, num_layers, key):
    mesh, builders = builders_of(folder, num_layers)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return builders[key]().compile().as_text()


def launches(text):
    """Operations of the entry that are launched, whatever is in their conditionals."""
    [entry] = re.findall(r"^ENTRY [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^  (?:ROOT )?%\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", entry, re.MULTILINE)
    return [operation for operation in found if operation not in NOT_LAUNCHED]


@pytest.mark.parametrize("key", MOST_LAUNCHES, ids=lambda key: f"{key.kind}-{key.size}")
def test_a_layer_has_so_many_launches_and_a_step_waits_for_nobody(folder, key):
    few, more = (text_of(folder, num_layers, key) for num_layers in (2, 4))
    assert " while(" not in few and " while(" not in more
    assert (len(launches(more)) - len(launches(few))) / 2 <= MOST_LAUNCHES[key], launches(more)


@pytest.mark.parametrize("key", MOST_OF_SHORT_CONV, ids=lambda key: f"{key.kind}-{key.size}")
def test_a_layer_of_short_convolutions_has_so_many_launches_and_waits_for_nobody(folder_of_states, key):
    few, more = (text_of(folder_of_states, num_layers, key) for num_layers in (1, 3))
    assert " while(" not in more
    assert (len(launches(more)) - len(launches(few))) / 2 <= MOST_OF_SHORT_CONV[key], launches(more)


@pytest.mark.parametrize("kind", ["sample", "sample_full", "sample_masked"])
def test_no_sampler_waits_for_the_host(folder, kind):
    text = text_of(folder, 2, ProgramKey(kind, 64))
    assert " conditional(" in text, "work that no row wants is skipped"
    assert " while(" not in text
