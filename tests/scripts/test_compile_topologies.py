"""scripts/compile_topologies.py: its models fit their slices, and what it says of all layers follows from few."""

import importlib

import pytest

from jaxpaged.messages import ProgramKey
from jaxpaged.params.sharding import kv_heads_on_devices
from jaxpaged.tools.planning.plan import PlannedProgram
from jaxpaged.tools.planning.targets import parse_target
from jaxpaged.worker.memory import forward_bytes
from pallas_kernels import tpu_targets

AOT_TPU = [
    pytest.mark.aot_tpu,
    pytest.mark.skipif(tpu_targets.why_not() is not None, reason=str(tpu_targets.why_not())),
]
NAMES = [
    "llama-v5e",
    "llama-v6e",
    "qwen3-v6e",
    "gpt-oss-v6e",
    "deepseek-v6e",
    "deepseek-tpu7x",
    "llama-v6e-pp",
    "gpt-oss-v6e-ranks",
]
LONGEST = 256
"""Tokens of a step. 2048 take the same share of what is reserved for them, and a minute to compile."""
COUNTED = "qwen3-v6e-ranks"
"""A case that no engine can run: it is only counted what it would hold."""
SPLIT = {"llama-v5e": 2, "deepseek-v6e": 8}
"""Devices over which contexts are split in the case of that name and -dcp."""


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("compile_topologies")


@pytest.mark.parametrize("name", NAMES)
def test_every_model_fits_its_slice_with_requests_of_8192_tokens(script, name):
    case = script.CASES[name]
    target, num_layers = parse_target(case.target, compile=False), case.hf["num_hidden_layers"]
    planner = script.planner_of(case, target, num_layers, (64, 1024))
    assert planner.obstacles() == [] and planner.concurrency(script.CONTEXT) >= 1
    assert len(script.CASES) == len(NAMES) + len(SPLIT) + len([COUNTED])


def test_ranks_hold_more_requests_where_key_heads_are_fewer_than_devices(script):
    """Four key heads on 16 devices are there four times, on four ranks of four once each. One process has no 16."""

    def planner(name):
        case = script.CASES[name]
        return script.planner_of(case, parse_target(case.target, compile=False), case.hf["num_hidden_layers"], (64,))

    split, ranked = planner("qwen3-v6e"), planner(COUNTED)
    assert ranked.engine_spec.division.block_bytes == split.engine_spec.division.block_bytes
    assert 3 < ranked.concurrency(script.CONTEXT) / split.concurrency(script.CONTEXT) < 4, "dense weights take room"
    assert "4 hosts" in ranked.obstacles()[0]


def test_key_heads_that_are_fewer_than_the_devices_are_there_once_on_each(script):
    case = script.CASES["qwen3-v6e"]
    planner = script.planner_of(case, parse_target(case.target, compile=False), 2)
    assert planner.decoder.num_kv_heads == 4 and kv_heads_on_devices(4, 16) == 16
    one_head = planner.engine_spec.param_shapes.layers[0].self_attn.k_proj.weight.values
    assert one_head.sharding.shard_shape(one_head.shape)[0] == 1
    assert (
        planner.engine_spec.division.block_bytes == 2 * 2 * planner.config.cache.block_size * 128 * 2
    )  # of one head in two layers


def test_what_one_layer_adds_is_added_for_the_others(script):
    few = PlannedProgram("forward", 64, 5.0, 100, 30, collectives={"all-reduce": 3}, waited_bytes=300)
    more = PlannedProgram(
        "forward", 64, 7.0, 90, 40, collectives={"all-reduce": 5, "all-gather": 1}, waited_bytes=500, hidden_bytes=10
    )
    whole = script.grown(few, more, 79)
    assert whole["collectives"] == {"all-reduce": 3 + 79 * 2, "all-gather": 79}
    assert (whole["waited_bytes"], whole["hidden_bytes"]) == (300 + 79 * 200, 790)
    assert whole["code_bytes"] == 30 + 79 * 10 and whole["temporary_bytes"] == 100, "and never less than was seen"
    assert "161 all-reduce" in script.exchanged(whole) and "5% hidden" in script.exchanged(whole)
    sent = PlannedProgram("forward", 64, 1.0, waited_bytes=10, stage=1, sent_bytes=2_000_000)
    assert script.exchanged(script.grown(sent, sent, 0)).endswith("2.0 MB to another stage")
    assert "does not compile: no room" in script.exchanged(script.grown(few, replace_error(more), 79))


def replace_error(program):
    return PlannedProgram(program.kind, program.size, 1.0, error="no room")


@pytest.mark.parametrize("arguments", [["gpt-5"], ["--depths", "3", "2"], ["--depths", "1", "2", "--whole"]])
def test_what_cannot_be_compiled_is_wrong_usage(script, monkeypatch, arguments):
    monkeypatch.setattr("sys.argv", ["compile_topologies.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2


def planner_of(script, name):
    case = script.CASES[name]
    depth = case.depths[0] * script.num_stages(case)
    return script.planner_of(case, parse_target(case.target), depth, (64,), num_gpu_blocks_override=200)


def compiled(script, name):
    return list(script.programs_at(planner_of(script, name)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [pytest.param("llama-v5e", marks=AOT_TPU)])
def test_no_draw_sends_the_output_head_to_other_devices(script, name):
    """Llama 3.1 70B over all chips of four hosts, with two key heads for each head of its checkpoint; one layer."""
    forward, sample = compiled(script, name)
    assert forward.error is None and sample.error is None
    assert forward.collectives == {"all-reduce": 3}  # the embeddings, attention, and the feed-forward block
    logits, head = 64 * 128256 * 4, 128256 * 8192 * 2
    assert sample.waited_bytes + sample.hidden_bytes < logits < head / 50
    assert sample.temporary_bytes < logits


@pytest.mark.parametrize("name", SPLIT)
def test_split_contexts_take_less_room_by_the_number_of_devices(script, name):
    def tokens(name):
        case = script.CASES[name]
        target = parse_target(case.target, compile=False)
        planner = script.planner_of(case, target, case.hf["num_hidden_layers"], (64,))
        return (planner.num_blocks - 1) * planner.config.cache.block_size, planner.works()[0]

    (whole, work), (split, split_work) = tokens(name), tokens(f"{name}-dcp")
    assert 0.98 < split / whole / SPLIT[name] <= 1, "results that are merged take some room"
    assert split_work.merged_bytes > 0 == work.merged_bytes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama-v5e", marks=AOT_TPU),
        pytest.param("deepseek-v6e", marks=[*AOT_TPU, pytest.mark.exhaustive]),
    ],
)
def test_split_contexts_compile_for_their_slices_and_exchange_queries_and_results(script, name):
    (forward,) = planner_of(script, f"{name}-dcp").compiler.compile_program(ProgramKey("forward", 64))
    assert forward.error is None
    assert forward.collectives.keys() == {"all-reduce", "all-gather", "reduce-scatter"}
    assert forward.temporary_bytes < 16 * 2**20, "the cache was copied"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[*AOT_TPU, pytest.mark.exhaustive]) for name in NAMES[1:]])
def test_the_other_models_compile_for_their_slices(script, name):
    *forwards, sample = compiled(script, name)
    assert [each.error for each in (*forwards, sample) if each.error] == []
    exchanges = {"all-reduce"}
    if script.CASES[name].options.get("data_parallel_size"):  # attention ranks, whose tokens go to all experts and back
        exchanges |= {"all-gather", "reduce-scatter"}
    assert [each.collectives.keys() for each in forwards] == [exchanges] * len(forwards)
    assert sample.waited_bytes < 64 * 201088 * 4


@pytest.mark.parametrize(
    "name",
    ["qwen3-v6e", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gpt-oss-v6e", "deepseek-v6e"))],
)
@pytest.mark.aot_tpu
@pytest.mark.skipif(tpu_targets.why_not() is not None, reason=str(tpu_targets.why_not()))
def test_what_is_reserved_for_a_prompt_among_experts_is_what_the_compiler_takes_for_it(script, name):
    case = script.CASES[name]
    planner = script.planner_of(
        case, parse_target(case.target), case.depths[0], (64, LONGEST), num_gpu_blocks_override=200
    )
    (forward,) = planner.compiler.compile_program(ProgramKey("forward", LONGEST))
    assert forward.error is None
    assert 0.7 < forward.temporary_bytes / forward_bytes(planner.engine_spec) < 1
