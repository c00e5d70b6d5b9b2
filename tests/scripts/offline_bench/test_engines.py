"""The engines' own arithmetic, without the engines: batches, sequences, prefixes."""

import run_llama_cpp
import run_transformers
import session


def test_static_batches_keep_a_long_prompt_away_from_short_ones():
    requests = [{"prompt_token_ids": [0] * length} for length in (8192, *range(32, 512, 15))]
    found = run_transformers.batches(requests)
    assert sorted(index for batch in found for index in batch) == list(range(len(requests)))
    assert max(len(batch) for batch in found) <= run_transformers.MOST_ROWS
    padded = [len(batch) * max(len(requests[index]["prompt_token_ids"]) for index in batch) for batch in found]
    assert max(padded) <= run_transformers.MOST_PADDED_TOKENS
    assert sum(padded) < 2 * sum(len(request["prompt_token_ids"]) for request in requests)


class FakeLlama:
    """The calls of llama.cpp's interface that a run needs; the token of a row is its position."""

    def __init__(self):
        self.copied, self.removed, self.steps = [], [], []

    def llama_get_memory(self, context):
        return None

    def llama_decode(self, context, batch):
        self.positions = list(batch.pos[: batch.n_tokens])
        self.steps.append([batch.seq_id[row][0] for row in range(batch.n_tokens)])
        return 0

    def llama_sampler_sample(self, sampler, context, row):
        return self.positions[row]

    def llama_memory_seq_cp(self, memory, source, target, begin, end):
        self.copied.append((source, target, begin, end))

    def llama_memory_seq_rm(self, memory, slot, begin, end):
        self.removed.append(slot)


def run_llama(requests, shared_prefix, num_slots):
    size = run_llama_cpp.BATCH
    batch = type(
        "Batch",
        (),
        {
            "token": [0] * size,
            "pos": [0] * size,
            "n_seq_id": [0] * size,
            "seq_id": [[0] for _ in range(size)],
            "logits": [0] * size,
        },
    )()
    lib, watch = FakeLlama(), session.Watch(len(requests))
    engine = type("Engine", (), {"lib": lib, "sampler": None})()
    run_llama_cpp.Run(engine, None, batch, requests, watch, num_slots, shared_prefix).run()
    return lib, watch


def test_llama_cpp_runs_more_requests_than_sequences_and_fills_its_batches():
    requests = [{"prompt_token_ids": [1] * length, "max_tokens": 3} for length in (700, 20, 30, 40, 50)]
    lib, watch = run_llama(requests, 0, 2)
    assert watch.num_tokens == [3] * 5
    assert watch.first_token_ids == [699, 19, 29, 39, 49]
    assert len(lib.steps[0]) == run_llama_cpp.BATCH
    assert sum(map(len, lib.steps)) == sum(length + 2 for length in (700, 20, 30, 40, 50))


def test_llama_cpp_computes_a_common_beginning_once():
    requests = [{"prompt_token_ids": [1] * 110, "max_tokens": 2} for _ in range(4)]
    lib, watch = run_llama(requests, 100, 3)
    assert watch.num_tokens == [2] * 4
    assert watch.first_token_ids == [109] * 4
    assert len(lib.copied) == 3
    assert sum(map(len, lib.steps)) == 100 + 4 * (10 + 1)
