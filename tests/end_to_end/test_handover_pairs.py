"""What one engine lends any other goes on from, however different they are: the same text, and pages of equal bits."""

import json
import threading
import time
from contextlib import ExitStack
from itertools import product

import msgspec
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.kv_store.prefix_file import PrefixFile
from tests.end_to_end.test_kv_offload import worker_of
from tests.models.checkpoints import write_checkpoint

pytestmark = pytest.mark.slow
# Prompts in chunks of a page; layers without a window, and with one that begins inside a page where blocks are smaller;
# 2 KV heads, which 4 devices share.
OPTIONS = {
    "max_model_len": 192,
    "token_buckets": (32,),
    "max_num_seqs": 2,
    "num_gpu_blocks_override": 60,
    "num_scheduler_steps": 1,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "compilation_cache_dir": "off",
}
KINDS = {
    "one": {"block_size": 16, "num_scheduler_steps": 4},
    "two": {"block_size": 32, "tensor_parallel_size": 2},
    "four": {"block_size": 16, "tensor_parallel_size": 4},
    "small": {"block_size": 16, "num_gpu_blocks_override": 24},
    # The TPU's layout, in the simulator: each step of it takes long.
    "tpu": {"block_size": 16, "attention_backend": "tpu-interpret"},
}
PAIRS = [("one", "two"), ("two", "one"), ("two", "four"), ("four", "two"), ("one", "four"), ("four", "one")]
TRANSPORTS = {"tcp": False, "shared_memory": True}
CASES = [*product(PAIRS, TRANSPORTS)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LENGTH, NUM_LENT = 140, 128


def prompt_of(number):
    return {"prompt_token_ids": np.random.default_rng(number).integers(3, 200, LENGTH).tolist()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_checkpoint("gemma2", tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256, "sliding_window": 44}))
    return str(folder)


@pytest.fixture(scope="module")
def expected(model):
    """What an engine says that has nothing to do with others, by the number of the prompt."""
    with LLM(model, **OPTIONS, block_size=16) as alone:
        prompts = [prompt_of(number) for number in range(len(CASES) + 1)]
        return [result.outputs[0].token_ids for result in alone.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def engines(model):
    """A function that starts an engine of a kind, which is stopped at the end."""
    with ExitStack() as stack:
        made = {}

        def engine(kind):
            if kind not in made:
                made[kind] = stack.enter_context(LLM(model, **OPTIONS | KINDS[kind], kv_role="kv_both"))
            return made[kind]

        yield engine


def carried(llm):
    return worker_of(llm).stats()["kv_borrowed_pages"]


def use(llm, transport):
    """As `--kv-transport` says, from the next connection on."""
    borrower = worker_of(llm).kv_transfer.connector.connectors[1]._consumer
    borrower._shares = TRANSPORTS[transport]
    while borrower._idle:
        borrower._idle.pop()[1].close()


def params_of(**transfer):
    return msgspec.structs.replace(GREEDY, extra_args={"kv_transfer_params": transfer})


def begin(producer, prompt):
    """Start to compute a prompt: where it is lent, which is said with its first chunk."""
    producer.llm_engine.add_request("lent", prompt, params_of(do_remote_decode=True))
    said = [output.kv_transfer_params for output in producer.llm_engine.step()]
    assert len(said) == 1 and said[0]["remote_num_tokens"] == NUM_LENT
    return said[0]


def finish(producer, is_time):
    """Compute the rest of it, with one step before `is_time`."""
    steps, engine = 0, producer.llm_engine
    while engine.has_unfinished_requests():
        for _ in range(2000):
            if not steps or is_time():
                break
            time.sleep(0.01)
        else:
            pytest.fail("nothing came while the prompt was computed")
        outputs, steps = engine.step(), steps + 1
    return outputs[-1].outputs[0].token_ids


def pages_of(llm, prompt, path):
    """The bytes of all pages that an engine has of a prompt on its devices, by their keys."""
    llm.save_prefix(prompt, path)
    return {key: b"".join(map(bytes, buffers)) for key, buffers in PrefixFile(path).pages()}


@pytest.mark.parametrize(("pair", "transport"), CASES, ids=[f"{a} to {b} by {way}" for (a, b), way in CASES])
def test_a_prompt_goes_from_any_engine_to_any_other_while_it_is_computed(pair, transport, engines, expected, tmp_path):
    producer, consumer = map(engines, pair)
    number, heard = CASES.index((pair, transport)), []
    prompt = prompt_of(number)
    use(consumer, transport)
    before = carried(consumer)[transport]
    params = params_of(**begin(producer, prompt))
    follower = threading.Thread(target=lambda: heard.extend(consumer.generate([prompt], params, use_tqdm=False)))
    follower.start()
    first = finish(producer, lambda: carried(consumer)[transport] > before)
    follower.join(120)
    (result,) = heard
    assert first == result.outputs[0].token_ids == expected[number]
    assert result.num_cached_tokens == NUM_LENT and carried(consumer)[transport] > before
    lent, loaded = (pages_of(llm, prompt, tmp_path / str(i)) for i, llm in enumerate((producer, consumer)))
    common = lent.keys() & loaded.keys()
    assert len(common) >= 6 and all(lent[key] == loaded[key] for key in common)
    for llm in (producer, consumer):
        stats = worker_of(llm).stats()
        assert stats["recompiles"] == 0 and stats["kv_offload_pages_lost"] == 0


def test_engines_that_slept_lend_and_borrow(engines, expected):
    producer, consumer, prompt = engines("two"), engines("one"), prompt_of(len(CASES))
    for llm in (producer, consumer):
        llm.sleep(1)
        llm.wake_up()
    params = params_of(**begin(producer, prompt))
    finish(producer, lambda: True)
    (result,) = consumer.generate([prompt], params, use_tqdm=False)
    assert result.outputs[0].token_ids == expected[-1] and result.num_cached_tokens == NUM_LENT


def scheduler_of(llm):
    return llm.llm_engine._core._scheduler


@pytest.mark.parametrize("is_early", [False, True], ids=["behind it", "while its pages come"])
def test_a_request_is_preempted_behind_its_hand_over_and_while_its_pages_come(is_early, engines):
    """Another one, which is older, takes the blocks away that it has, and all fall asleep in the middle of its load."""
    producer, consumer = engines("two"), engines("small")
    prompt, beside = prompt_of(200 + is_early), {"prompt_token_ids": prompt_of(300)["prompt_token_ids"][:20]}
    long = msgspec.structs.replace(GREEDY, max_tokens=150)
    alone = engines("one").generate([beside, prompt], long, use_tqdm=False)
    expected = dict(zip(("beside", "lent"), (result.outputs[0].token_ids for result in alone)))
    params, engine, heard, most_preemptions = params_of(**begin(producer, prompt)), consumer.llm_engine, {}, 0

    def step():
        nonlocal most_preemptions
        heard.update({output.request_id: output for output in engine.step()})
        lent = scheduler_of(consumer).requests.get("lent")
        most_preemptions = max(most_preemptions, 0 if lent is None else lent.num_preemptions)

    engine.add_request("beside", beside, long)
    while "beside" not in heard:
        step()
    engine.add_request("lent", prompt, msgspec.structs.replace(params, max_tokens=40))
    step()
    half = engine._core.transfers
    assert half.is_waited_for and not scheduler_of(consumer).requests["lent"].blocks[0]
    if is_early:
        consumer.sleep(1, "keep")
        consumer.wake_up()
    finish(producer, lambda: True)
    while engine.has_unfinished_requests():
        step()
    for name, tokens in expected.items():
        found = heard[name].outputs[0].token_ids
        assert found == tokens[: len(found)] and len(found) == {"beside": 150, "lent": 40}[name]
    assert heard["lent"].num_cached_tokens == NUM_LENT and most_preemptions
    manager = scheduler_of(consumer).kv_cache_manager
    assert not any(pool.num_held_blocks for pool in manager.pools) and not manager.holds
    assert not half.loading and half.fetch_stages() == [0, 0, 0] and worker_of(consumer).stats()["recompiles"] == 0


# `worker/test_kv_copies.py` asks it of blocks, which takes no engine in the simulator.
@pytest.mark.exhaustive
@pytest.mark.parametrize("pair", [("tpu", "one"), ("one", "tpu")], ids=["tpu to one", "one to tpu"])
def test_pages_do_not_depend_on_the_layout_of_the_attention_backend(pair, engines, tmp_path):
    producer, consumer = map(engines, pair)
    prompt = {"prompt_token_ids": prompt_of(400 + (pair[0] == "tpu"))["prompt_token_ids"][:70]}
    three = msgspec.structs.replace(GREEDY, max_tokens=3)
    (alone,) = engines("two").generate([prompt], three, use_tqdm=False)
    lends = msgspec.structs.replace(params_of(do_remote_decode=True), max_tokens=1)
    (first,) = producer.generate([prompt], lends, use_tqdm=False)
    params = msgspec.structs.replace(params_of(**first.kv_transfer_params), max_tokens=3)
    (result,) = consumer.generate([prompt], params, use_tqdm=False)
    assert result.outputs[0].token_ids == alone.outputs[0].token_ids and result.num_cached_tokens == 64
    lent, loaded = (pages_of(llm, prompt, tmp_path / str(i)) for i, llm in enumerate((producer, consumer)))
    assert len(lent) >= 3 and lent == loaded
