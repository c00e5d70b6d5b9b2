"""A model without a device that pools: the vector of a prompt counts its tokens."""

import numpy as np

from jaxpaged.engine.pooling.pooler import Pooler
from tests.engine.fake_engine import FakeExecutor, counting_model, make_engine
from tests.engine.small_tokenizer import make_tokenizer

WIDTH = 8
EMBEDS = Pooler("embed", WIDTH, "normalize")
CLASSES = Pooler("classify", 3, "softmax", labels=("no", "yes", "perhaps"))


def vector_of(token_ids, width=WIDTH):
    """How many of the ids leave each remainder; with one label, half of the number of tokens below 0."""
    if width == 1:
        return np.array([-0.5 * len(token_ids)], np.float32)
    return np.bincount(np.asarray(token_ids) % width, minlength=width).astype(np.float32)


class FakePoolingExecutor(FakeExecutor):
    """Gives the vector of a prompt with its last chunk."""

    def __init__(self, width=WIDTH, **options):
        tokenizer = make_tokenizer()
        super().__init__(counting_model(tokenizer.vocab_size), tokenizer.vocab_size, **options)
        self.width = width

    def _compute(self, request_id, scheduled, i, output, lines):
        row = self.rows[request_id]
        end = scheduled.num_computed_tokens[i] + scheduled.num_scheduled_tokens[i]
        assert end <= len(row.token_ids), f"{request_id}: {end} tokens scheduled, {len(row.token_ids)} known"
        assert scheduled.max_sampled_tokens[i] == (end == len(row.token_ids))
        if not scheduled.max_sampled_tokens[i]:
            return
        line = vector_of(row.token_ids, self.width)[None]
        output.request_ids.append(request_id)
        output.pooled = line if output.pooled is None else np.concatenate([output.pooled, line])
        if request_id in self.bad_requests:
            output.failed[request_id] = self.bad_requests[request_id]


def make_pooling_engine(pooler=EMBEDS, **options):
    """An engine over a fake executor."""
    blocks = {name: options.pop(name) for name in ("num_blocks", "block_size") if name in options}
    executor = FakePoolingExecutor(pooler.width, **blocks)
    if "block_size" in blocks:
        options["block_size"] = blocks["block_size"]
    return make_engine(executor, pooler=pooler, runner="pooling", **options)


def normalized(vector):
    return vector / np.linalg.norm(vector)
