"""What every engine is asked for."""

import pytest
from offline_bench.workloads import WORKLOADS, make_requests

VOCABULARY = 512


def test_every_round_asks_for_the_same_sizes_and_for_other_tokens():
    first, again, second = (make_requests(WORKLOADS["mixed"], VOCABULARY, index) for index in (0, 0, 1))
    assert first == again
    sizes = [[(len(r.prompt_token_ids), r.max_tokens) for r in requests] for requests in (first, second)]
    assert sizes[0] == sizes[1]
    assert all(a.prompt_token_ids != b.prompt_token_ids for a, b in zip(first, second))


@pytest.mark.parametrize(
    ("name", "count", "tokens_in", "tokens_out"),
    [
        ("single", 1, (128, 128), (128, 128)),
        ("prefill-1k", 1, (1024, 1024), (1, 1)),
        ("prefill-8k", 1, (8192, 8192), (1, 1)),
        ("mixed", 32, (32, 512), (64, 128)),
        ("shared", 32, (544, 544), (32, 32)),
        ("short", 256, (16, 64), (16, 32)),
        ("long", 32, (32, 8192), (64, 128)),
    ],
)
def test_workloads_have_the_sizes_that_their_titles_promise(name, count, tokens_in, tokens_out):
    requests = make_requests(WORKLOADS[name], VOCABULARY, 0)
    lengths = [len(request.prompt_token_ids) for request in requests]
    assert len(requests) == count
    assert tokens_in[0] <= min(lengths) <= max(lengths) <= tokens_in[1]
    assert all(tokens_out[0] <= request.max_tokens <= tokens_out[1] for request in requests)
    assert all(258 <= token < VOCABULARY for request in requests for token in request.prompt_token_ids)


def test_shared_prompts_begin_alike_and_then_differ():
    requests = make_requests(WORKLOADS["shared"], VOCABULARY, 0)
    assert len({tuple(request.prompt_token_ids[:512]) for request in requests}) == 1
    assert len({tuple(request.prompt_token_ids[512:]) for request in requests}) == 32


def test_scale_shrinks_tokens_and_batches_and_keeps_single_requests():
    mixed = make_requests(WORKLOADS["mixed"], VOCABULARY, 0, 0.25)
    (single,) = make_requests(WORKLOADS["single"], VOCABULARY, 0, 0.25)
    assert len(mixed) == 8
    assert max(len(request.prompt_token_ids) for request in mixed) <= 128
    assert (len(single.prompt_token_ids), single.max_tokens) == (32, 32)
