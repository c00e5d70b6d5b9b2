"""Options of XLA: where they are known, they reach the programs with layers, the cache and the fingerprint."""

import re
from dataclasses import replace

import jax
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.engine.build import facts_of, read_model
from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.messages import ProgramKey
from jaxpaged.tools.planning.targets import parse_target, shapes_mesh
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.programs import compiler_options
from jaxpaged.worker.programs.compiled import CompileCounter
from jaxpaged.worker.programs.compiler_options import APART, LAYER_OPTIONS, LAYERS, ONCE, OTHERS, UNTRIED, is_known
from jaxpaged.worker.programs.engine_programs import EnginePrograms
from pallas_kernels import gpu_targets, tpu_targets
from tests.models.checkpoints import write_checkpoint

OF_THIS_CPU = "xla_cpu_enable_fast_math"
OPTIONS = {"max_num_seqs": 4, "token_buckets": (8,), "max_model_len": 64, "block_size": 16, "num_scheduler_steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint("llama", tmp_path_factory.mktemp("model"))


def engine_spec(folder, mesh, platform="cpu", dtype="auto", **changes):
    model, decoder = read_model(folder)
    config = EngineConfig.from_options(model=str(folder), dtype=dtype, **OPTIONS).resolve(facts_of(decoder), platform)
    return EngineSpec(config, model, replace(decoder, **changes), mesh)


def programs(plan, num_blocks=64):
    return EnginePrograms(plan, KVCacheConfig((num_blocks,), plan.kv_groups)).builders()


def test_an_option_that_the_compiler_does_not_know_is_a_warning_and_left_out(monkeypatch, caplog):
    mesh, kind = make_mesh(1), jax.devices()[0].device_kind
    monkeypatch.setitem(LAYER_OPTIONS, kind, {OF_THIS_CPU: False, "xla_nobody_knows": True})
    assert compiler_options.compiler_options(mesh) == {LAYERS: {OF_THIS_CPU: False}}
    assert "xla_nobody_knows" in caplog.text and OF_THIS_CPU not in caplog.text
    monkeypatch.setitem(LAYER_OPTIONS, kind, {"xla_nobody_knows": True})
    assert compiler_options.compiler_options(mesh) == {}
    assert compiler_options.compiler_options(shapes_mesh(2)) == {}


def test_what_the_environment_says_of_an_option_goes_before_ours(monkeypatch):
    mesh, level = make_mesh(1), "xla_backend_optimization_level"
    monkeypatch.setenv("XLA_FLAGS", f"--{level}=0")
    with CompileCounter() as compilations:
        assert compiler_options.compiler_options(mesh) == {}
    assert not compilations.count, "there was nothing to ask the compiler"
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert compiler_options.compiler_options(mesh) == {LAYERS: {level: 2}}


def test_options_go_to_programs_with_layers_and_into_the_fingerprint(folder, monkeypatch):
    before = engine_spec(folder, make_mesh(1)).fingerprint()
    monkeypatch.setitem(LAYER_OPTIONS, jax.devices()[0].device_kind, {OF_THIS_CPU: False})
    plan = engine_spec(folder, make_mesh(1))
    now = plan.fingerprint()
    assert {name for name in now if now[name] != before[name]} == {"options.compiler_options"}
    given = {}

    def jit(function, *arguments, compiler_options=None, **options):
        if compiler_options is not None:
            given[function.__name__] = compiler_options
        return real(function, *arguments, **options)

    real = jax.jit
    monkeypatch.setattr(jax, "jit", jit)
    builders = programs(plan)
    for kind in ("forward", "decode", "decode_full", "sample", "zeros"):
        builders[next(key for key in builders if key.kind == kind)]()
    assert given == {kind: {OF_THIS_CPU: False} for kind in ("forward", "decode", "decode_full")}


@pytest.mark.aot_tpu
@pytest.mark.skipif(tpu_targets.why_not() is not None, reason=str(tpu_targets.why_not()))
def test_a_v6e_takes_the_option_and_fuses_no_two_products(folder):
    mesh = parse_target("v6e:1x1").mesh(1)
    assert all(is_known(mesh, name, value) for name, value in LAYER_OPTIONS[mesh.devices.flat[0].device_kind].items())
    # The compiler takes four times as long for products of float32.
    plan = engine_spec(folder, mesh, "tpu", "bfloat16", hidden_size=2048, intermediate_size=8192)
    assert plan.compiler_options[LAYERS] == {"xla_tpu_dot_dot_fusion": False}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = programs(plan)[ProgramKey("forward", 8)]().compile().as_text()
    assert max(products_of_fusions(text)) == 1


def test_weights_that_are_converted_on_a_gpu_leave_their_products_to_xla_and_the_head_to_cublas(monkeypatch):
    monkeypatch.setitem(LAYER_OPTIONS, jax.devices()[0].platform, LAYER_OPTIONS["gpu"])
    monkeypatch.setitem(compiler_options.OTHER_OPTIONS, "cpu", compiler_options.OTHER_OPTIONS["gpu"])
    monkeypatch.setattr(compiler_options, "GPU", "cpu")
    monkeypatch.setattr(compiler_options, "refusal", lambda mesh, options: None)
    plain, converted = (compiler_options.compiler_options(make_mesh(1), converts) for converts in (False, True))
    assert plain == {LAYERS: LAYER_OPTIONS["gpu"], OTHERS: {**ONCE, **UNTRIED}}
    assert converted == {kind: {**ONCE, **(UNTRIED if kind == OTHERS else APART)} for kind in (LAYERS, OTHERS)}
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=some_pass --xla_gpu_dot_merger_threshold_mb=1")
    said = compiler_options.compiler_options(make_mesh(1), True)
    assert said == {kind: {**ONCE, **(UNTRIED if kind == OTHERS else {})} for kind in (LAYERS, OTHERS)}


@pytest.mark.aot_gpu
@pytest.mark.skipif(gpu_targets.why_not() is not None, reason=str(gpu_targets.why_not()))
def test_an_h100_takes_all_options_has_cublas_multiply_and_writes_no_weights_side_by_side(folder):
    mesh = make_mesh(1, tuple(gpu_targets.mesh_of(gpu_targets.TARGETS["h100"]).devices.flat))
    plan = engine_spec(folder, mesh, "gpu", hidden_size=1024, intermediate_size=4096)
    assert plan.compiler_options == {
        LAYERS: LAYER_OPTIONS["gpu"],
        OTHERS: compiler_options.OTHER_OPTIONS["gpu"],
    }
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = programs(plan)[ProgramKey("forward", 8)]().compile().as_text()
    per_layer = 4  # queries, keys and values joined, and what is made of them; gate and up joined, and down
    assert text.count("__cublas$lt$matmul") == per_layer * plan.decoder.num_layers
    assert "__triton_gemm" not in text


@pytest.mark.aot_gpu
@pytest.mark.skipif(gpu_targets.why_not() is not None, reason=str(gpu_targets.why_not()))
def test_a_cache_that_fills_an_h100_has_xla_compute_nothing_again_from_arrays_that_are_overwritten(folder):
    mesh = make_mesh(1, tuple(gpu_targets.mesh_of(gpu_targets.TARGETS["h100"]).devices.flat))
    plan = engine_spec(folder, mesh, "gpu")
    block_bytes = 2 * 2 * plan.decoder.num_kv_heads * plan.decoder.head_dim * 16 * plan.decoder.num_layers
    builders = programs(plan, 60 * 2**30 // block_bytes)
    for kind in ("forward", "decode"):
        key = next(key for key in builders if key.kind == kind)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = builders[key]().compile()
        assert compiled.memory_analysis().argument_size_in_bytes > 30 * 2**30
        assert ".remat" not in compiled.as_text(), key


def products_of_fusions(text):
    """How many products each fusion of a program has, those of the fusions within it included."""
    found = re.findall(r"^(ENTRY )?%([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    bodies = {name: body for _, name, body in found}
    called = lambda body: re.findall(r"calls=%([\w.\-]+)", body)
    count = lambda body: body.count(" convolution(") + sum(count(bodies[name]) for name in called(body))
    [entry] = [body for is_entry, _, body in found if is_entry]
    return [count(bodies[name]) for name in called(entry)]
