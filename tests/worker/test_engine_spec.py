"""What an engine spec says of the KV cache and of the attention kernel, against the arrays that it would allocate."""

import json
import math
import re

import jax
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.engine.build import facts_of, read_model, with_draft_model
from jaxpaged.errors import ConfigError
from jaxpaged.layers.attention import kv_struct
from jaxpaged.messages import ProgramKey
from jaxpaged.worker.costs import work_of
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.kv_blocks import size_kv_cache
from jaxpaged.worker.programs.engine_programs import EnginePrograms
from jaxpaged.worker.programs.fingerprint import difference
from tests.models.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint("llama", tmp_path_factory.mktemp("model"))


def engine_spec(folder, **options):
    model, decoder = read_model(folder)
    config = EngineConfig.from_options(model=str(folder), dtype="float32", **options).resolve(facts_of(decoder), "cpu")
    return EngineSpec(config, with_draft_model(config, model, decoder, folder), decoder, make_mesh(1))


def programs(folder, **options):
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 32, "num_gpu_blocks_override": 9}
    of_model = engine_spec(folder, **sizes, **options)
    kv_cache = size_kv_cache(
        of_model.config.cache, of_model.division, of_model.demand, 0, of_model.mesh.devices.flat[0]
    )
    return EnginePrograms(of_model, kv_cache)


@pytest.mark.parametrize("backend", ["reference", "tpu-interpret"])
def test_blocks_are_counted_with_the_bytes_that_the_kernels_layout_takes(folder, backend):
    plan = engine_spec(folder, block_size=16, attention_backend=backend)
    spec = plan.kv_groups[0].spec
    kv = jax.tree.leaves(kv_struct(plan.attention, 10, 16, spec.num_kv_heads, spec.head_dim, plan.kv_dtype))
    assert sum(math.prod(x.shape) * x.dtype.itemsize for x in kv) == 10 * spec.block_bytes


def test_an_estimate_knows_how_many_bytes_a_cached_number_has(folder):
    sizes = {name: work_of(engine_spec(folder, kv_cache_dtype=name)).kv_itemsize for name in ("auto", "float16", "fp8")}
    assert sizes == {"auto": 4, "float16": 2, "fp8": 1}


def test_a_kernel_that_cannot_take_the_engines_blocks_is_refused_before_anything_is_compiled(folder):
    with pytest.raises(ConfigError, match=r"attention_backend: .*block_size = 12; accepted are multiples of 8"):
        _ = engine_spec(folder, block_size=12, attention_backend="tpu-interpret").attention


def test_a_kernel_for_another_device_is_refused_with_what_would_run(folder):
    with pytest.raises(ConfigError, match=r"'tpu' cannot run on 'cpu': it needs a TPU; 'tpu-interpret' runs the same"):
        _ = engine_spec(folder, block_size=16, attention_backend="tpu").attention


def test_programs_depend_on_the_model_that_drafts_and_not_on_where_it_lies(folder, tmp_path):
    def fingerprint_with(name, place):
        (tmp_path / place).mkdir()
        draft = str(write_checkpoint(name, tmp_path / place))
        given = {"method": "draft_model", "model": draft, "num_speculative_tokens": 2}
        return engine_spec(folder, speculative_config=given).fingerprint()

    first = fingerprint_with("llama", "a")
    assert difference(first, fingerprint_with("llama", "b")) is None
    assert difference(first, fingerprint_with("gemma3", "c")).startswith("options.draft_model is DecoderConfig(")
    assert difference(engine_spec(folder).fingerprint(), first).startswith("options.speculation is None there")


def test_a_second_model_of_the_same_shape_has_the_same_programs(folder, tmp_path_factory):
    """Neither weights nor names nor folders are part of what the compilation cache goes by."""
    other = write_checkpoint("llama", tmp_path_factory.mktemp("other"))
    described = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps(described | {"_name_or_path": "other"}), encoding="utf-8")
    texts = []
    for model in (folder, other):
        builders = programs(model).builders()
        texts.append([builders[ProgramKey(kind, 8)]().as_text() for kind in ("forward", "sample")])
    assert texts[0] == texts[1] and str(folder) not in texts[0][0]


def test_a_model_that_drafts_has_no_program_copy_the_cache(tmp_path):
    """Its layers write to arrays that layers of the other model read in the same program."""
    model = write_checkpoint("gemma3", tmp_path)
    given = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    made = programs(model, speculative_config=given)
    shape = ",".join(map(str, made.shapes.kv[0].arrays[0].shape))
    text = made.builders()[ProgramKey("forward", 8)]().compile().as_text()
    assert f"f32[{shape}]" in text, "the cache has another shape"
    assert re.findall(rf"= f32\[{shape}\]\S* copy\(.*", text) == []
