"""Pictures through the engine as callers have it: LLM in one process, AsyncLLM with its core in another.

What a model makes of pictures is tested elsewhere: here the same request gives the same tokens by every road.
"""

import asyncio
import gc
import subprocess
import sys

import numpy as np
import pytest

from jaxpaged import LLM, AsyncLLM, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.entrypoints import notebook
from jaxpaged.errors import RequestError
from jaxpaged.worker.visual_rows import slots_of
from tests.models.seeing_folder import NUM_EMBEDS, write_seeing_folder
from tests.multimodal.drawn import drawn, encoded

OPTIONS = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "token_buckets": (16, 96),
    "block_size": 4,
    "num_gpu_blocks_override": 300,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
PICTURES = [encoded(drawn(40, 30, seed=number)) for number in range(3)]


def chat_of(*pictures):
    parts = [{"type": "image", "image": each} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is in the picture"}]}]


def prompt_of(picture, **fields):
    return {"prompt": "on <start_of_image> is", "multi_modal_data": {"image": picture}, **fields}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_seeing_folder(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **OPTIONS) as made:
        yield made


def tokens_of(output):
    """Tokens, and how likely they were together: other pictures change that more than other batches."""
    assert output.error is None
    return [*output.outputs[0].token_ids, output.outputs[0].cumulative_logprob]


@pytest.fixture(scope="module")
def alone(llm):
    """What each chat and prompt gives when nothing else runs."""
    chats = [tokens_of(llm.chat(chat_of(each), GREEDY)[0]) for each in PICTURES]
    prompts = [tokens_of(llm.generate(prompt_of(each), GREEDY)[0]) for each in PICTURES]
    return [[pytest.approx(each, abs=2e-4) for each in results] for results in (chats, prompts)]


def test_pictures_change_what_is_said_and_marks_typed_by_users_do_not(llm, alone):
    chats, _ = alone
    assert all(chats[0] != other.expected for other in chats[1:]), "the same text, other pictures"
    (output,) = llm.chat([{"role": "user", "content": "what is <start_of_image>?"}], GREEDY)
    assert output.prompt.count("<image_soft_token>") == 0 and tokens_of(output)


def test_a_batch_in_little_memory_gives_what_each_prompt_gives_alone(folder, llm, alone):
    """One picture fits at a time: the engine steps to make room for the next one."""
    budget = llm.llm_engine.input_processor.pictures.budget
    llm.llm_engine.input_processor.pictures.cache.clear()
    gc.collect()
    before, budget.num_bytes = budget.num_bytes, budget.used + 3 * 40 * 30 + len(PICTURES[0]) + 2 * 3 * 32 * 32 + 500
    try:
        outputs = llm.generate([prompt_of(PICTURES[number % 3]) for number in range(9)], GREEDY)
        assert [tokens_of(each) for each in outputs] == [alone[1][number % 3] for number in range(9)]
        outputs = llm.chat([chat_of(each) for each in PICTURES], GREEDY)
        assert [tokens_of(each) for each in outputs] == alone[0]
        assert budget.used <= budget.num_bytes
    finally:
        budget.num_bytes = before


def test_a_bad_picture_of_a_batch_is_named_and_nothing_of_it_runs_on(llm):
    with pytest.raises(RequestError, match="prompt 1: multi_modal_data.image is no picture"):
        llm.generate([prompt_of(PICTURES[0]), prompt_of(b"bad")], GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()


def test_results_and_blocks_show_pictures_in_notebooks(llm):
    (output,) = llm.chat([chat_of(PICTURES[0], PICTURES[1])], GREEDY)
    assert len(set(output.mm_hashes["image"])) == 2
    intake = llm.llm_engine.input_processor.pictures
    shown = notebook.output_html(output, intakes=[intake])
    assert shown.count('<img src="data:image/png;base64,') == 2 and 'title="picture 2"' in shown
    assert "[picture 1] [picture 2]" in notebook.output_html(output)
    (text,) = llm.generate("what", GREEDY)
    assert text.mm_hashes is None and "picture" not in notebook.output_html(text, intakes=[intake])
    stream = llm.stream(chat_of(PICTURES[0]), GREEDY)
    next(stream)
    blocks = llm.blocks()
    stream.close()
    key = output.mm_hashes["image"][0]
    assert f"({key[:8]}): KV blocks" in repr(blocks)
    assert "repeating-linear-gradient" in blocks._repr_html_() and "<img" in blocks._repr_html_()
    assert "repeating-linear-gradient" not in llm.blocks()._repr_html_(), "no request holds a block of it"


def test_a_model_without_eyes_imports_nothing_that_decodes():
    program = """
import sys
import jaxpaged.entrypoints.http.app
from jaxpaged import LLM, AsyncLLM, SamplingParams
options = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "token_buckets": (16,), "max_model_len": 32}
with LLM("demo", num_gpu_blocks_override=9, **options) as llm:
    llm.chat([{"role": "user", "content": [{"type": "text", "text": "a"}]}], SamplingParams(max_tokens=2))
    llm.blocks()._repr_html_()
print(sorted({"PIL", "jaxpaged.multimodal.decoding", "jaxpaged.engine.input.pictures"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_streams_beams_and_several_answers_see_too(llm, alone):
    streamed = [token for chunk in llm.stream(chat_of(PICTURES[0]), GREEDY) for token in chunk.token_ids]
    assert streamed == alone[0][0].expected[:-1]
    params = SamplingParams(n=2, seed=3, max_tokens=4)
    (output,) = llm.generate(prompt_of(PICTURES[1]), params)
    assert len(output.outputs) == 2


def embeds_of(llm, picture):
    """What the encoder of an engine makes of a picture."""
    (output,) = llm.generate(prompt_of(picture), GREEDY)
    core, key = llm.llm_engine._core, bytes.fromhex(output.mm_hashes["image"][0])
    known = core._scheduler.ranks[0].pictures.cache.find(key, NUM_EMBEDS)
    return np.asarray(core.executor.worker.device.state.encoded)[slots_of(known.page_ids, NUM_EMBEDS, NUM_EMBEDS)]


def test_async_llm_sends_each_picture_once_and_gives_the_same(folder, llm, alone):
    engine = AsyncLLM.from_config(EngineConfig.from_options(model=str(folder), enable_mm_embeds=True, **OPTIONS))
    embeds = embeds_of(llm, PICTURES[0])

    async def one(number, name):
        chat = await engine.chat_prompt(chat_of(PICTURES[number]))
        assert sum(length for feature in chat["mm_features"] for _, length in feature.runs) == NUM_EMBEDS
        results = [output async for output in engine.generate(chat, GREEDY, f"chat-{name}")]
        prompt = prompt_of(PICTURES[number])
        results += [output async for output in engine.generate(prompt, GREEDY, f"prompt-{name}") if output.finished]
        return [tokens_of(output) for output in results if output.finished]

    async def left():
        generator = engine.generate(prompt_of(PICTURES[0]), SamplingParams(max_tokens=100, ignore_eos=True), "left")
        await anext(generator)
        await generator.aclose()

    async def run():
        core = engine._cores.all[0]
        first = await asyncio.gather(*(one(number % 3, number) for number in range(9)))
        assert first == [[alone[0][number % 3], alone[1][number % 3]] for number in range(9)]
        assert len(core.pixels) == 0, "the core has said that it lacks nothing"
        sent = core.link._client.add_item
        core.link._client.add_item = lambda item: pytest.fail("it was sent already")
        assert await one(0, "again") == [alone[0][0], alone[1][0]]
        core.link._client.add_item = sent
        new = prompt_of(encoded(drawn(11, 12, seed=8)))
        core.pixels._sent.put(engine.input_processor.parse(new).mm_features[0].key, 1)  # a wrong guess: the core asks
        (asked,) = [each async for each in engine.generate(new, GREEDY, "new") if each.finished]
        assert tokens_of(asked) and len(core.pixels) == 0
        given = prompt_of(embeds)
        (seen,) = [each async for each in engine.generate(given, GREEDY, "embeds") if each.finished]
        assert tokens_of(seen) == alone[1][0] and len(core.pixels) == 0
        await left()
        with pytest.raises(RequestError, match="is no picture"):
            await engine.chat_prompt(chat_of(b"bad"))
        several = SamplingParams(n=3, seed=1, max_tokens=3, ignore_eos=True)
        (last,) = [
            each async for each in engine.generate(prompt_of(encoded(drawn(9, 9))), several, "n") if each.finished
        ]
        assert len(last.outputs) == 3 and len(core.pixels) == 0

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()
