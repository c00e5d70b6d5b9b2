"""Plans: arithmetic against the engine's own, and the compile path with this machine's CPU as the target."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import jax
import msgspec
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import facts_of, read_model, with_draft_model
from jaxpaged.errors import ConfigError
from jaxpaged.messages import ProgramKey
from jaxpaged.models.pooling import pooling_model
from jaxpaged.tools.pictures.plan_report import text_report
from jaxpaged.tools.planning.compiling import Compiler
from jaxpaged.tools.planning.plan import DeviceFacts, PlannedProgram, worst_bytes
from jaxpaged.tools.planning.plan_engine import plan_engine, plan_on_target
from jaxpaged.tools.planning.planner import Planner, largest_split
from jaxpaged.tools.planning.targets import GPUS, Target, parse_target
from jaxpaged.worker.memory import SLACK_BYTES, TRIAL_MARGIN
from jaxpaged.worker.programs.bundles import Bundle
from jaxpaged.worker.programs.compiled import MOST_THREADS
from jaxpaged.worker.programs.engine_programs import EnginePrograms
from pallas_kernels import gpu_targets, tpu_targets
from pallas_kernels.ragged_paged_attention import choose_backend
from tests.models import pooling_checkpoints
from tests.models.checkpoints import write_checkpoint
from tests.models.draft_heads import EAGLE3, eagle3_tensors, write_eagle3

MIB = 2**20
OPTIONS = {
    "max_num_seqs": 4,
    "token_buckets": (8,),
    "max_model_len": 64,
    "block_size": 8,
    "dtype": "float32",
    "max_logprobs": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint("llama", tmp_path_factory.mktemp("model"))


def toy(memory, platform="gpu", devices=(), num_devices=1):
    """`memory` comes on top of what is left aside on a GPU."""
    memory += int(SLACK_BYTES / 0.9) if platform == "gpu" else 0
    facts, sizes = DeviceFacts("Toy", memory, 1e9, 1e12, 1e9), tuple(range(1, num_devices + 1))
    return Target("toy", platform, facts, num_devices, devices, sizes=sizes, host_sizes=tuple(range(1, 9)))


def planner(folder, target, **options):
    model, decoder = read_model(folder)
    config = EngineConfig.from_options(**{"model": str(folder), **OPTIONS, **options})
    return Planner(config.resolve(facts_of(decoder), target.platform), model, decoder, target)


def test_weights_temporaries_and_blocks_fill_what_may_be_used_and_no_more(folder):
    plan = planner(folder, toy(8 * MIB)).plan()
    assert plan.fits and not plan.advice
    used = plan.weight_bytes + plan.state_bytes + plan.reserved_bytes + plan.kv_bytes
    assert used <= plan.usable_bytes < used + plan.block_bytes
    assert plan.concurrency[64] == (plan.num_blocks - 1) // 8


@pytest.mark.parametrize("gpu", GPUS)
def test_a_gpu_promises_its_share_of_what_cuda_counts(folder, gpu):
    plan = planner(folder, parse_target(gpu, compile=False)).plan()
    assert plan.usable_bytes == int(plan.device.memory * 0.9)
    assert any("unless XLA_CLIENT_MEM_FRACTION there is less" in line for line in plan.assumptions)
    if sold := re.match(r".*?(\d+)gb", gpu):
        assert plan.device.memory < int(sold[1]) * 2**30


def test_where_weights_are_converted_a_gpu_keeps_room_for_the_trials_of_xla_and_a_tpu_does_not(folder):
    for platform, tries in (("gpu", True), ("tpu", False)):
        exact, rounded = (
            planner(folder, toy(8 * MIB, platform), quantization=quantization).reserves[0].temporaries
            for quantization in (None, "int8")
        )
        assert (rounded - exact >= MOST_THREADS * TRIAL_MARGIN) == tries
        assert (rounded > exact) == tries


@pytest.mark.aot_gpu
@pytest.mark.skipif(gpu_targets.why_not() is not None, reason=str(gpu_targets.why_not()))
def test_programs_of_one_and_of_two_gpus_compile_where_their_compilers_are(folder):
    for name, num_devices in (("h100", 1), ("h100:2", 2)):
        target = parse_target(name)
        plan = planner(folder, target, tensor_parallel_size=num_devices)
        keys = [next(key for key in plan.compiler.builders if key.kind == kind) for kind in ("forward", "sample")]
        keys.append(ProgramKey("decode", keys[0].size))
        forward, sample, decode = plan.compiler.compile(keys, lambda *_: None)
        assert target.compiles and forward.error is sample.error is decode.error is None, (forward, sample, decode)
        assert "collective-permute" not in decode.collectives, "arrays of rows are sent around one by one"
        assert bool(forward.collectives) == (num_devices > 1), forward
        assert 0 < forward.temporary_bytes <= plan.reserves[0].temporaries
    assert not parse_target("h100", compile=False).compiles
    assert not parse_target("l4").compiles


def test_an_override_of_the_number_of_blocks_is_taken_as_it_is(folder):
    assert planner(folder, toy(8 * MIB), num_gpu_blocks_override=17).plan().num_blocks == 17
    assert planner(folder, toy(8 * MIB), kv_cache_memory_bytes=MIB).plan().kv_bytes <= MIB


def test_a_model_that_drafts_is_part_of_the_plan(folder, tmp_path):
    model, decoder = read_model(folder)
    given = {"method": "draft_model", "model": str(write_checkpoint("gemma3", tmp_path)), "num_speculative_tokens": 2}
    options = EngineConfig.from_options(model=str(folder), speculative_config=given, **OPTIONS)
    drafted = with_draft_model(options, model, decoder, folder)
    plan = planner_of(options, drafted, decoder, facts_of(decoder), toy(8 * MIB)).plan()
    alone = planner(folder, toy(8 * MIB)).plan()
    draft = planner(Path(given["model"]), toy(8 * MIB)).plan()
    assert plan.weight_bytes == alone.weight_bytes + draft.weight_bytes
    assert plan.fits and plan.concurrency[64] < alone.concurrency[64]
    assert plan.decode[0].tokens_per_second < alone.decode[0].tokens_per_second


def test_a_head_that_drafts_is_part_of_the_plan(folder, tmp_path):
    model, decoder = read_model(folder)
    given = {"method": "eagle3", "model": str(write_eagle3(tmp_path)), "num_speculative_tokens": 2}
    options = EngineConfig.from_options(model=str(folder), speculative_config=given, **OPTIONS)
    headed = with_draft_model(options, model, decoder, folder)
    plan = planner_of(options, headed, decoder, facts_of(decoder), toy(8 * MIB)).plan()
    alone = planner(folder, toy(8 * MIB)).plan()
    tensors = eagle3_tensors(EAGLE3, decoder.hidden_size, has_embeddings=False)
    num_weights = sum(tensor.size for name, tensor in tensors.items() if name != "t2d")
    assert plan.weight_bytes == alone.weight_bytes + 4 * num_weights
    assert plan.fits and plan.concurrency[64] < alone.concurrency[64]


def test_a_model_that_does_not_fit_is_told_what_would(folder):
    small = planner(folder, toy(8 * MIB))
    need = small.reserves[0].total - int(SLACK_BYTES / 0.9) + 5 * small.engine_spec.division.block_bytes
    plan = planner(folder, toy(need), gpu_memory_utilization=1.0).plan()
    assert not plan.fits and not plan.programs
    text = " ".join(plan.advice)
    assert "--max-model-len 32 would fit" in text  # 4 of the 5 blocks; one is the null block
    assert "--tensor-parallel-size 2" in text
    assert planner(folder, toy(need), gpu_memory_utilization=1.0, max_model_len=32).plan().fits


def test_nothing_is_advised_that_does_not_fit_either(folder):
    plan = planner(folder, toy(1000)).plan()
    assert not plan.fits and plan.num_blocks == 0 and plan.decode == plan.programs == []
    assert len(plan.advice) == 1


def test_a_model_is_split_over_as_many_devices_as_divide_it(folder):
    model, decoder = read_model(folder)
    config = EngineConfig.from_options(model=str(folder), **OPTIONS).resolve(facts_of(decoder), "gpu")
    shards = largest_split(config, model, decoder, toy(MIB, num_devices=7))
    assert decoder.num_heads % shards == 0 and 1 < shards <= 7
    plan = plan_on_target(
        EngineConfig.from_options(model=str(folder), **OPTIONS),
        model,
        decoder,
        facts_of(decoder),
        "h100:7",
        compile=False,
        output=None,
        progress=lambda *_: None,
    )
    assert plan.tensor_parallel_size == shards


def phi4(folder):
    """A model whose heads divide by 5, as Phi-4's do."""
    model, decoder = read_model(folder)
    decoder = replace(decoder, num_heads=40, num_kv_heads=10, head_dim=64, hidden_size=2560, intermediate_size=5120)
    return EngineConfig.from_options(model=str(folder), **OPTIONS), model, decoder, facts_of(decoder)


def plan_of(parts, target, compile=False, **options):
    config, *rest = parts
    config = replace(config, parallel=replace(config.parallel, **options))
    return plan_on_target(config, *rest, target, compile=compile, output=None, progress=lambda *_: None)


def test_heads_that_divide_by_no_mesh_of_the_torus_are_split_over_fewer_devices(folder):
    assert plan_of(phi4(folder), "v6e:2x4").tensor_parallel_size == 2
    assert plan_of(phi4(folder), "h100:8").tensor_parallel_size == 5
    with pytest.raises(ConfigError, match="tensor_parallel_size is 5, .* Sizes that do: 1, 2, 4, 8"):
        plan_of(phi4(folder), "v6e:2x4", tensor_parallel_size=5)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 4, but there are only 2 devices of h100:2"):
        plan_of(phi4(folder), "h100:2", tensor_parallel_size=4)


def test_only_splits_that_a_host_can_have_are_advised(folder):
    config, model, decoder, facts = phi4(folder)
    target = parse_target("v6e:1x1", compile=False)
    need = planner_of(config, model, decoder, facts, target).engine_spec.weight_bytes
    small = replace(target, device=replace_memory(target.device, need))
    assert "(--tensor-parallel-size 2)" in " ".join(planner_of(config, model, decoder, facts, small).plan().advice)
    small = replace(target, device=replace_memory(target.device, need // 3))  # five would do, and there are no five
    assert "tensor-parallel-size" not in " ".join(planner_of(config, model, decoder, facts, small).plan().advice)


def planner_of(config, model, decoder, facts, target):
    return Planner(config.resolve(facts, target.platform), model, decoder, target)


def replace_memory(device, memory):
    return DeviceFacts(device.name, memory, device.bandwidth, device.matmul_bf16, device.links)


@pytest.mark.parametrize(("target", "host"), [("v6e:4x4", "v6e:2x4"), ("v5p:2x2x2", "v5p:2x2x1")])
def test_an_engine_on_some_devices_of_several_hosts_does_not_run_and_the_plan_says_so(folder, target, host):
    plan = plan_of(phi4(folder), target)
    assert plan.num_hosts > 1 and not plan.fits
    assert any("computes with all devices of each" in line and host in line for line in plan.advice)
    assert plan_of(phi4(folder), host).fits


def test_several_engines_share_the_devices_of_a_host(folder):
    plan = plan_of(phi4(folder), "h100:8", data_parallel_size=2)
    assert plan.fits and plan.tensor_parallel_size == 2 and plan.options["data_parallel_size"] == 2
    alone = plan_of(phi4(folder), "h100:8", tensor_parallel_size=2)
    assert "4 engines fit side by side" in alone.advice[0] and "--data-parallel-size 4" in alone.advice[0]
    with pytest.raises(ConfigError, match="takes 12 devices, but a host of h100:8 has 8"):
        plan_of(phi4(folder), "h100:8", data_parallel_size=3, tensor_parallel_size=4)


def test_gpus_of_two_hosts_have_an_engine_each(folder):
    plan = plan_of(phi4(folder), "h100:16")
    assert plan.fits and plan.tensor_parallel_size == 5 and "2 engines fit side by side" in plan.advice[0]
    across = plan_of(phi4(folder), "h100:16", tensor_parallel_size=10)
    assert not across.fits and "computes with all devices of each" in across.advice[0]


def test_an_engine_on_all_devices_of_several_hosts_runs(folder):
    plan = plan_of(phi4(folder), "h100:20", tensor_parallel_size=20)
    assert plan.num_hosts == 3 and plan.fits and "--nnodes 3" in plan.advice[0]


def test_stages_have_the_blocks_that_the_one_with_the_least_room_has_room_for(tmp_path):
    """The last one has the head: it has less room, though all have a layer."""
    tensors = {"vocab_size": 4096, "tie_word_embeddings": True}
    folder = write_checkpoint("llama", tmp_path)
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(hf | tensors), encoding="utf-8")
    own = planner(folder, toy(8 * MIB, num_devices=2), pipeline_parallel_size=2)
    plan = own.plan()
    assert plan.fits and plan.devices_per_engine == 2 and [each.num_layers for each in plan.stages] == [1, 1]
    first, last = plan.stages
    assert plan.num_blocks == own.plan().num_blocks == min(map(own._num_blocks_of, range(2)))
    used = last.weight_bytes + last.state_bytes + last.reserved_bytes + last.kv_bytes
    assert used <= plan.usable_bytes < used + last.block_bytes and plan.weight_bytes == last.weight_bytes
    assert first.kv_bytes == last.kv_bytes and first.reserved_bytes < last.reserved_bytes
    whole = planner(folder, toy(8 * MIB)).plan()
    table = 4096 * own.decoder.hidden_size * 4
    norm = own.decoder.hidden_size * 4
    assert first.weight_bytes + last.weight_bytes == whole.weight_bytes + table, "each has a copy of the tied table"
    assert last.weight_bytes - first.weight_bytes == norm
    assert plan.num_blocks > whole.num_blocks and plan.page_token_bytes == whole.page_token_bytes
    on_first, on_last = own.works()
    assert on_first.weight_bytes == first.weight_bytes - table and on_last.weight_bytes == last.weight_bytes
    assert (on_first.head_params, on_last.head_params) == (0, 4096 * own.decoder.hidden_size)
    assert (on_first.sent_bytes, on_last.sent_bytes) == (own.decoder.hidden_size * 4, 0)


def test_every_stage_is_compiled_for_its_own_devices_and_what_it_sends_is_counted(folder):
    cpu = toy(64 * MIB, "cpu", tuple(jax.devices()[:4]), num_devices=4)
    own = planner(folder, cpu, num_gpu_blocks_override=16, pipeline_parallel_size=2, tensor_parallel_size=2)
    assert [list(stage.mesh.devices.flat) for stage in own.stages] == [jax.devices()[:2], jax.devices()[2:4]]
    plan = own.plan(all_programs=True)
    assert plan.fits and [program.error for program in plan.programs if program.error] == []
    of_kind = lambda kind: [each for each in plan.programs if (each.kind, each.size) == (kind, 8)]
    first, last = of_kind("forward")
    assert (first.stage, last.stage) == (1, 2) and first.name == "forward[8] of stage 1"
    assert first.sent_bytes == 8 * own.decoder.hidden_size * 4 and last.sent_bytes == 0
    assert first.collectives["all-reduce"] == 3 and last.collectives["all-reduce"] == 2  # the embeddings, two a layer
    drawing = [each for each in plan.programs if each.kind == "sample"]
    assert {each.stage for each in drawing} == {2} and {each.sent_bytes for each in drawing} == {4 * (4 + 1)}
    temporaries = [max(each.temporary_bytes for each in plan.programs if each.stage == n) for n in (1, 2)]
    assert [each.temporary_bytes >= most for each, most in zip(plan.stages, temporaries)] == [True, True]
    assert {program.stage for program in plan.programs} == {1, 2} and plan.decode[0].tokens_per_second > 0


def test_stages_that_a_target_cannot_have_are_refused_or_do_not_run(folder):
    with pytest.raises(ConfigError, match="3 times tensor_parallel_size 4 is 12, but .* 8 devices of h100:8"):
        plan_of(phi4(folder), "h100:8", pipeline_parallel_size=3, tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="the model has 2 layers"):
        plan_of(phi4(folder), "h100:8", pipeline_parallel_size=3, tensor_parallel_size=2)
    plan = plan_of(phi4(folder), "h100:8", pipeline_parallel_size=2)
    assert plan.fits and plan.tensor_parallel_size == 2, "4 devices for each stage, of which 2 divide the heads"
    assert "2 engines fit side by side" in plan.advice[0] and "--data-parallel-size 2" in plan.advice[0]
    assert plan_of(phi4(folder), "h100:8", pipeline_parallel_size=2, tensor_parallel_size=2, data_parallel_size=2).fits
    with pytest.raises(ConfigError, match="pipeline_parallel_size 2, which takes 12 devices, but a host of h100:8"):
        plan_of(phi4(folder), "h100:8", pipeline_parallel_size=2, tensor_parallel_size=2, data_parallel_size=3)
    plan = plan_of(phi4(folder), "v6e:4x4", pipeline_parallel_size=2, tensor_parallel_size=2)
    assert not plan.fits and "one process computes all stages" in plan.advice[0]
    config, *rest = phi4(folder)
    config = replace(config, parallel=replace(config.parallel, pipeline_parallel_size=2))
    with pytest.raises(ConfigError, match="a bundle has programs of one stage only"):
        plan_on_target(config, *rest, "h100:8", compile=True, output=Path("bundle"), progress=lambda *_: None)


@pytest.fixture(scope="module")
def compiled(folder):
    cpu = toy(64 * MIB, "cpu", tuple(jax.devices()[:1]))
    own = planner(folder, cpu, num_gpu_blocks_override=16)
    seen = []
    return own, own.plan(all_programs=True, progress=lambda *step: seen.append(step)), seen


def test_a_plan_compiles_the_programs_that_the_engine_would(compiled):
    own, plan, seen = compiled
    builders = EnginePrograms(own.engine_spec, own.kv_cache).builders()
    assert [(p.kind, p.size) for p in plan.programs] == [tuple(key) for key in builders]
    assert plan.fits and not any(program.error for program in plan.programs)
    forward = next(program for program in plan.programs if program.kind == "forward")
    assert forward.flops > 0 and forward.temporary_bytes > 0 and forward.compile_seconds > 0
    speeds = [*plan.decode, *plan.prefill]
    assert speeds and all(0 < each.estimated < 1.001 * each.tokens_per_second for each in speeds)
    assert any(line.startswith("estimated: ") for line in plan.assumptions)
    assert own.works()[0].weight_bytes < forward.memory_bytes
    most = max(program.temporary_bytes for program in plan.programs)
    outputs = max(program.output_bytes for program in plan.programs if program.kind != "zeros")
    assert most < plan.temporary_bytes == most + 2 * outputs
    assert seen[-1] == ("programs", len(builders), len(builders))
    assert plan.options["attention_backend"] == choose_backend("auto", "cpu")


def test_the_programs_of_a_quick_plan_take_as_much_as_all_of_them(compiled):
    own, plan, _ = compiled
    builders = EnginePrograms(own.engine_spec, own.kv_cache).builders()
    quick = {tuple(key) for key in own.compiler.representative}
    assert {kind for kind, _ in quick} == {key.kind for key in builders} and len(quick) < len(builders)
    some = [program for program in plan.programs if (program.kind, program.size) in quick]
    assert worst_bytes(some) == worst_bytes(plan.programs)


def test_the_state_of_requests_is_counted_as_the_engine_allocates_it(compiled):
    own, plan, _ = compiled
    _, *state = EnginePrograms(own.engine_spec, own.kv_cache).lower(ProgramKey("zeros")).out_info
    assert plan.state_bytes == sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) > 0


def test_a_plan_whose_programs_need_more_than_there_is_does_not_fit(compiled):
    own, plan, _ = compiled
    assert plan.fits and plan.missing_bytes == 0
    device = replace_memory(plan.device, plan.needed_bytes - 1)
    tight = msgspec.structs.replace(plan, device=device)
    assert tight.missing_bytes == 1 and not tight.fits
    assert "Lower the number of KV blocks" in own.advice(tight)[0]


def test_blocks_beyond_the_memory_do_not_fit_whoever_asks_for_them(folder):
    plan = planner(folder, toy(8 * MIB), num_gpu_blocks_override=100_000).plan()
    assert not plan.fits and "are missing" in plan.advice[0]


def test_a_saved_plan_is_a_bundle_for_the_same_devices_and_no_others(compiled, folder, tmp_path):
    own, _, _ = compiled
    own.save(tmp_path, lambda *_: None)
    bundle = Bundle(tmp_path)
    bundle.check(own.engine_spec.fingerprint())
    assert bundle.num_blocks == 16
    other = planner(folder, toy(64 * MIB, "cpu", tuple(jax.devices()[:1])), max_model_len=32)
    with pytest.raises(Exception, match="max_model_len is 64 there and 32 here"):
        bundle.check(other.engine_spec.fingerprint())


def test_a_program_that_does_not_compile_is_a_finding(folder, monkeypatch):
    own = planner(folder, toy(64 * MIB, "cpu", tuple(jax.devices()[:1])), num_gpu_blocks_override=16)

    def explode(*_):
        raise RuntimeError("out of vmem\nand more")

    monkeypatch.setattr(
        EnginePrograms,
        "builders",
        lambda self: dict.fromkeys([("forward", 8), ("sample", 8), ("sample_full", 8)], explode),
    )
    monkeypatch.setattr(Compiler, "representative", property(lambda self: [next(iter(self.builders))]))
    plan = own.plan()
    assert not plan.fits and plan.programs[0].error == "out of vmem"
    assert plan.advice == ["forward[8] does not compile: out of vmem"]


def test_a_pooling_model_is_planned_with_the_programs_that_pool_and_without_a_decode_speed(tmp_path):
    folder = pooling_checkpoints.write("llama_embed", tmp_path)
    options = {name: value for name, value in OPTIONS.items() if name != "max_logprobs"}
    config = EngineConfig.from_options(model=str(folder), num_gpu_blocks_override=16, **options)
    plan = plan_engine(config, "h100", compile=False)
    assert plan.fits and plan.options["runner"] == "pooling" and plan.options["convert"] == "embed"
    assert not plan.decode and plan.prefill[0].tokens_per_second > 0
    config = replace(config, model=replace(config.model, pooler_config={"pooling_type": "MEAN"}))
    model, decoder = read_model(folder)
    cpu = toy(64 * MIB, "cpu", tuple(jax.devices()[:1]))
    own = Planner(config.resolve(facts_of(decoder, folder), "cpu"), pooling_model(model, "embed"), decoder, cpu)
    compiled = own.plan()
    assert {program.kind for program in compiled.programs} == {"zeros", "forward", "accumulate", "pool", "tables"}
    assert [program.error for program in compiled.programs if program.error] == []
    whole = own.engine_spec.weight_bytes
    table = own.decoder.vocab_size * own.decoder.hidden_size * 4
    assert (
        own.works()[0].weight_bytes == whole - table and own.works()[0].head_params == 0
    )  # the table is only looked up


def test_of_a_model_with_experts_all_are_in_memory_and_a_token_meets_few(tmp_path):
    parts = planner(write_checkpoint("mixtral", tmp_path), toy(64 * MIB))
    work, one_expert = parts.works()[0], 2 * 3 * 40 * 48  # in two layers
    assert work.expert_bytes == 5 * one_expert * 4 and work.expert_share == 2 / 5
    assert work.params == (work.weight_bytes - work.expert_bytes) // 4 + 2 * one_expert


def test_experts_that_are_spread_are_counted_where_they_are(tmp_path):
    """Five of them on two devices take three places on each."""
    folder, options = write_checkpoint("mixtral", tmp_path), {"tensor_parallel_size": 2}
    split, spread = (
        planner(folder, toy(64 * MIB, num_devices=2), enable_expert_parallel=each, **options).works()[0]
        for each in (False, True)
    )
    one_expert = 2 * 3 * 40 * 48 * 4
    assert split.expert_bytes == 5 * one_expert / 2 and spread.expert_bytes == 3 * one_expert
    assert spread.weight_bytes - split.weight_bytes == one_expert / 2


def test_ranks_have_a_cache_each_and_experts_once_between_them(tmp_path):
    folder, ranks = write_checkpoint("mixtral", tmp_path), {"data_parallel_size": 2, "enable_expert_parallel": True}
    options = {"tensor_parallel_size": 2, "num_gpu_blocks_override": 20}
    plan = planner(folder, toy(64 * MIB, num_devices=4), **options, **ranks).plan()
    alone = planner(folder, toy(64 * MIB, num_devices=4), **options).plan()
    assert (plan.num_ranks, plan.devices_per_engine, alone.devices_per_engine) == (2, 4, 2)
    assert plan.fits and plan.concurrency[64] == 2 * alone.concurrency[64] and plan.kv_bytes == alone.kv_bytes
    one_expert = 2 * 3 * 40 * 48 * 4
    assert alone.weight_bytes - plan.weight_bytes == (5 / 2 - 2) * one_expert, "five in two places on each of four"
    assert "2 attention ranks of 2" in text_report(plan) and "attention ranks" not in text_report(alone)


def test_ranks_are_planned_for_one_host_whose_devices_they_share(tmp_path):
    folder = write_checkpoint("mixtral", tmp_path)
    plan = plan_of(phi4(folder), "h100:8", data_parallel_size=4, enable_expert_parallel=True)
    assert plan.fits and plan.tensor_parallel_size == 2 and plan.num_ranks == 4
    assert all("data-parallel-size" not in line for line in plan.advice)
    part = plan_of(phi4(folder), "v6e:4x4", data_parallel_size=4, enable_expert_parallel=True)
    assert not part.fits and "one process computes for all attention ranks" in part.advice[0]
    with pytest.raises(ConfigError, match="takes 16 devices, but a host of v6e:4x4 has 8"):
        plan_of(phi4(folder), "v6e:4x4", data_parallel_size=8, tensor_parallel_size=2, enable_expert_parallel=True)


def test_a_lone_request_is_bound_by_host_and_kernels_where_the_model_is_small():
    """Of the embedded model on an H100 memory alone would allow hundreds of thousands of tokens per second."""
    plan = plan_engine(EngineConfig.from_options(model="demo"), "h100", compile=False)
    lone = plan.decode[0]
    assert lone.num_requests == 1 and lone.limit in ("host", "kernels") and lone.tokens_per_second < 30_000
    assert any("110 us for a program" in line and "3.2 us for each request" in line for line in plan.assumptions)
    single = plan_engine(EngineConfig.from_options(model="demo", num_scheduler_steps=1), "h100", compile=False)
    assert single.decode[0].tokens_per_second == pytest.approx(1 / (110e-6 + 3.2e-6))


def test_collectives_of_what_was_not_compiled_are_waited_for(folder):
    plan = plan_of(phi4(folder), "v6e:2x4")
    assert any("100% of what they exchange is waited for" in line for line in plan.assumptions)
    work = planner(folder, toy(8 * MIB, num_devices=2), tensor_parallel_size=2)
    forward = PlannedProgram("forward", 8, 1.0, waited_bytes=30, hidden_bytes=10)
    assert work.works()[0].waited_share == 1.0 and work.works([forward])[0].waited_share == 0.75


def test_targets_without_a_compiler_are_planned_from_shapes(folder):
    plan = planner(folder, parse_target("v6e:1x1", compile=False)).plan()
    assert plan.fits and not plan.programs
    assert any("nothing was compiled" in line for line in plan.assumptions)


@pytest.mark.aot_tpu
@pytest.mark.skipif(tpu_targets.why_not() is not None, reason=str(tpu_targets.why_not()))
@pytest.mark.parametrize("target", ["v5e:2x2", pytest.param("v6e:2x2", marks=pytest.mark.exhaustive)])
def test_on_a_tpu_heads_are_split_and_no_program_copies_the_cache(folder, target):
    options = {"block_size": 16, "dtype": "bfloat16", "tensor_parallel_size": 2, "num_gpu_blocks_override": 50_000}
    own = planner(folder, parse_target(target), **options)
    plan = own.plan()
    assert plan.options["attention_backend"] == "tpu"
    assert plan.programs and [program.error for program in plan.programs if program.error] == []
    assert plan.block_bytes == 2 * 16 * 64 * 2 * 2  # keys and values of 12 numbers in 64 lanes, one head, two layers
    assert max(program.temporary_bytes for program in plan.programs) < plan.kv_bytes / 10
    by_kind = {program.kind: program for program in plan.programs}
    assert {"sample", "sample_full", "sample_masked", "prompt_logprobs", "decode", "decode_full"} <= by_kind.keys()
    assert all(program.memory_bytes > 0 for kind, program in by_kind.items() if kind != "zeros")
    assert plan.temporary_bytes > max(program.temporary_bytes for program in plan.programs)
    drawing = [key for key in own.compiler.compiled if key.kind.startswith(("sample", "decode"))]
    assert all("top_k_top_p" in own.compiler.compiled[key].as_text() for key in drawing)  # the kernel, on both devices


@pytest.mark.aot_tpu
@pytest.mark.exhaustive
@pytest.mark.skipif(tpu_targets.why_not() is not None, reason=str(tpu_targets.why_not()))
def test_on_a_tpu_spread_experts_cost_one_sum_over_devices_as_split_ones_do(tmp_path):
    """And no more room: nothing copies weights, 12 MiB a device in each of two layers."""
    hf = json.loads((write_checkpoint("qwen3_moe", tmp_path) / "config.json").read_text(encoding="utf-8"))
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 128, "mlp_only_layers": []}
    (tmp_path / "config.json").write_text(json.dumps(hf | sizes), encoding="utf-8")
    options = {
        "tensor_parallel_size": 8,
        "dtype": "bfloat16",
        "block_size": 16,
        "num_scheduler_steps": 1,
        "max_num_batched_tokens": 512,
        "token_buckets": (512,),
    }
    split, spread = (
        planner(tmp_path, parse_target("v6e:2x4"), **options, enable_expert_parallel=each) for each in (False, True)
    )
    of_split, of_spread = (each.compiler.compile_program(ProgramKey("forward", 512))[0] for each in (split, spread))
    assert of_split.error is of_spread.error is None
    assert of_split.collectives == of_spread.collectives
    assert spread.stage_plans()[0].weight_bytes == split.stage_plans()[0].weight_bytes
    assert of_spread.temporary_bytes <= 1.02 * of_split.temporary_bytes


@pytest.mark.aot_tpu
@pytest.mark.skipif(tpu_targets.why_not() is not None, reason=str(tpu_targets.why_not()))
def test_on_a_tpu_layers_with_states_compile_and_no_program_copies_the_states(tmp_path):
    options = {"block_size": 16, "dtype": "bfloat16", "tensor_parallel_size": 2, "num_gpu_blocks_override": 50_000}
    options |= {"num_scheduler_steps": 2}
    folder = write_checkpoint("lfm2_moe", tmp_path)
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = {"hidden_size": 512, "conv_L_cache": 3}  # narrow states and such of three tokens are copied to pad them
    (folder / "config.json").write_text(json.dumps(hf | sizes), encoding="utf-8")
    own = planner(folder, parse_target("v6e:2x2"), **options)
    keys = [key for key in own.compiler.representative if key.kind in ("forward", "decode")]
    programs = own.compiler.compile(keys, lambda *_: None)
    assert [program.error for program in programs] == [None, None]
    assert max(program.temporary_bytes for program in programs) < own.stage_plans(programs)[0].kv_bytes / 10
