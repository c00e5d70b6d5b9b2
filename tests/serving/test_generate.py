"""Results of several prompts on their way to one client."""

import asyncio
from types import SimpleNamespace

from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serving import generate
from jaxpaged.serving.generate import EngineRequest, merged
from jaxpaged.serving.prompts import TokenPrompt


class Endless:
    """An engine whose results never end, and that counts how many were taken."""

    def __init__(self):
        self.num_taken = 0

    async def generate(self, prompt, params, request_id, **options):
        while True:
            self.num_taken += 1
            yield SimpleNamespace(error=None, outputs=[])
            await asyncio.sleep(0)


def test_a_client_that_does_not_read_holds_so_many_results_and_no_more():
    """Before, those of a request with several prompts piled up until memory was full: here, 10,000."""

    async def read_one():
        engine = Endless()
        prompts = [TokenPrompt([7]) for _ in range(10)]
        results = merged(engine, EngineRequest("r", prompts, SamplingParams()))
        await anext(results)
        for _ in range(1000):
            await asyncio.sleep(0)
        held = engine.num_taken
        for _ in range(500):  # goes on where it stood
            await anext(results)
        await results.aclose()
        return held, engine.num_taken

    held, later = asyncio.run(read_one())
    assert generate.MOST_ARRIVED <= held <= generate.MOST_ARRIVED + 20
    assert later > held
