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
# Prompts in chunks of a page; layers with a window of two pages at most and without; 2 KV heads, which 4 devices share.
OPTIONS = {
    "max_model_len": 192, "token_buckets": (8, 32), "max_num_seqs": 2, "num_gpu_blocks_override": 60,
    "num_scheduler_steps": 1, "dtype": "float32", "skip_tokenizer_init": True, "compilation_cache_dir": "off",
}  # fmt: skip
KINDS = {
    "one": {"block_size": 16, "num_scheduler_steps": 4},
    "two": {"block_size": 32, "tensor_parallel_size": 2},
    "four": {"block_size": 16, "tensor_parallel_size": 4},
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
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256, "sliding_window": 60}))
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
    borrower = worker_of(llm).kv_transfer._peers._borrower
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
