"""An engine that answers what a test wants it to answer: the text, token by token, then the end."""

import numpy as np

from tests.engine.fake_engine import FakeExecutor
from tests.engine.small_tokenizer import make_tokenizer

PROMPT_END = "<turn>assistant\n"


def executor_that_says(text, prompt_end=PROMPT_END):
    """Answers every prompt that ends with `prompt_end`."""
    tokenizer = make_tokenizer()
    answer = [*tokenizer.encode(text, False), tokenizer.eos_token_id]
    end = tokenizer.encode(prompt_end, False)

    def model(token_ids):
        ids = list(token_ids)
        begin = next(i for i in range(len(ids), -1, -1) if ids[i - len(end) : i] == end)
        logits = np.full(tokenizer.vocab_size, -1000.0)
        logits[answer[min(len(ids) - begin, len(answer) - 1)]] = 0.0
        return logits

    return FakeExecutor(model, tokenizer.vocab_size, num_blocks=512)


def says(text, **engine_options):
    """Settings of a server whose model says `text`."""
    return {"executor": executor_that_says(text), "max_model_len": 512, "max_num_batched_tokens": 64, **engine_options}
