"""Names of adapters over an engine core: what they mean changes while requests run, and for each front end."""

import asyncio
import json

import pytest

from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.serving.adapters import ServedAdapters
from jaxpaged.serving.errors import ServingError
from tests.engine.fake_core import core_in_thread

PROMPT = [7, 8, 9, 10]


@pytest.fixture
def folders(tmp_path):
    """Adapters of the fake core, which add their number to each token."""
    for number in range(1, 5):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return tmp_path


def of_front_ends(scenario, folders, count=1):
    """What `await scenario(pairs)` returns, where a pair is a front end and its adapters, all over one core."""

    async def run(llms):
        pairs = [(llm, ServedAdapters(llm, "demo", {"demo"}, folders=[str(folders)])) for llm in llms]
        return await asyncio.wait_for(scenario(*pairs), 60)

    with core_in_thread(enable_lora=True, max_loras=2, max_cpu_loras=4, max_num_seqs=8) as address:
        llms = [AsyncLLM.from_address(address) for _ in range(count)]
        try:
            return asyncio.run(run(llms))
        finally:
            for llm in llms:
                llm.shutdown()


async def tokens(llm, lora, name, max_tokens=3, fake=None, begun=None):
    """What each token is above those of the model itself."""
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA, extra_args=fake and {"fake": fake}
    )
    made = []
    async for output in llm.generate(PROMPT, params, name, lora_request=lora):
        made += output.outputs[0].token_ids
        if begun is not None:
            begun.set()
    return made


def above(made, plain):
    return [a - b for a, b in zip(made, plain, strict=True)]


def test_requests_finish_with_the_version_with_which_they_began(folders):
    async def scenario(front_end):
        llm, adapters = front_end
        plain = await tokens(llm, None, "plain", 40)
        begun = asyncio.Event()
        first = await adapters.load("x", str(folders / "1"))
        running = asyncio.ensure_future(tokens(llm, first, "a", 40, "slow", begun))
        await begun.wait()
        second = await adapters.load("x", str(folders / "2"), in_place=True)
        newer = await tokens(llm, await adapters.find("x"), "b", 3)
        assert not running.done()
        await adapters.unload("x")
        with pytest.raises(RequestError, match="not loaded, or no more"):
            await tokens(llm, second, "c")
        assert not running.done() and await adapters.find("x") is None
        return above(await running, plain), above(newer, plain[:3]), first, second

    running, newer, first, second = of_front_ends(scenario, folders)
    assert running == [1] * 40 and newer == [2] * 3
    assert first.lora_int_id != second.lora_int_id


def test_front_ends_of_a_core_do_not_mix_up_their_names(folders):
    async def scenario(one, two):
        (llm, adapters), (other_llm, others) = one, two
        plain = await tokens(llm, None, "plain")
        await adapters.load("x", str(folders / "1"))
        await others.load("x", str(folders / "2"))
        both = await asyncio.gather(
            tokens(llm, await adapters.find("x"), "a"), tokens(other_llm, await others.find("x"), "b")
        )
        await others.unload("x")
        after = await tokens(llm, await adapters.find("x"), "c")
        with pytest.raises(ServingError, match="cannot be found"):
            await others.unload("x")
        return [above(made, plain) for made in [*both, after]]

    assert of_front_ends(scenario, folders, count=2) == [[1] * 3, [2] * 3, [1] * 3]
