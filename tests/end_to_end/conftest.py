"""One engine on the embedded model for the whole session: compiling is most of what an engine costs here."""

import pytest

from jaxpaged import LLM

# Small enough that ordinary prompts take several chunks and that a batch of 64 needs preemption or waiting.
OPTIONS = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 2560, "block_size": 16}


@pytest.fixture(scope="session")
def llm():
    with LLM("demo", **OPTIONS) as engine:
        yield engine
