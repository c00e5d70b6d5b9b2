"""Requests of every dataset: lengths, what they share, and what is wrong with a file."""

import json

import pytest

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.errors import UsageError
from jaxpaged.tools.bench.client_text import ClientText, load_client_text
from jaxpaged.tools.bench.datasets import sample_requests
from jaxpaged.tools.bench.flags import add_dataset_flags


@pytest.fixture(scope="module")
def text():
    return load_client_text("demo", chat=False)


def flags(*words):
    parser = Parser()
    add_dataset_flags(parser)
    return parser.parse_args([str(word) for word in words])


def lines(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


# ---- random, prefix_repetition


def test_random_prompts_have_the_wanted_number_of_tokens_and_share_nothing(text):
    requests = sample_requests(flags("--num-prompts", 20, "--input-len", 40, "--output-len", 7), text)
    assert [request.prompt_len for request in requests] == [text.count(request.prompt) for request in requests]
    assert sum(request.prompt_len == 40 for request in requests) >= 18  # some texts cannot be made to fit
    assert all(abs(request.prompt_len - 40) <= 3 and request.output_len == 7 for request in requests)
    assert len({request.prompt[:20] for request in requests}) == 20


def test_lengths_vary_by_the_ratio_and_a_seed_gives_the_same_requests(text):
    words = ("--num-prompts", 40, "--random-input-len", 50, "--random-output-len", 10, "--random-range-ratio", 0.5)
    requests = sample_requests(flags(*words, "--seed", 3), text)
    assert requests == sample_requests(flags(*words, "--seed", 3), text)
    assert requests != sample_requests(flags(*words, "--seed", 4), text)
    outputs = {request.output_len for request in requests}
    assert outputs <= set(range(5, 16)) and len(outputs) > 5
    assert min(request.prompt_len for request in requests) < 40 < 60 < max(request.prompt_len for request in requests)


def test_a_common_beginning_is_common(text):
    words = ("--num-prompts", 5, "--random-prefix-len", 30, "--random-input-len", 20)
    prompts = [text.tokenizer.encode(request.prompt) for request in sample_requests(flags(*words), text)]
    assert len({tuple(prompt[:25]) for prompt in prompts}) == 1 and len({tuple(prompt) for prompt in prompts}) == 5


def test_prefixes_are_repeated_equally_often(text):
    words = (
        "--dataset-name",
        "prefix_repetition",
        "--num-prompts",
        11,
        "--prefix-repetition-num-prefixes",
        3,
        "--prefix-repetition-prefix-len",
        32,
        "--prefix-repetition-suffix-len",
        8,
    )
    requests = sample_requests(flags(*words, "--disable-shuffle"), text)
    beginnings = [tuple(text.tokenizer.encode(request.prompt)[:24]) for request in requests]
    assert [beginnings.count(each) for each in dict.fromkeys(beginnings)] == [3, 3, 3]
    assert len({request.prompt for request in requests}) == 9 and {request.output_len for request in requests} == {128}
    shuffled = sample_requests(flags(*words), text)
    assert shuffled != requests and sorted(shuffled, key=str) == sorted(requests, key=str)


# ---- sharegpt


def talk(prompt, answer, *more):
    return {"conversations": [{"from": "x", "value": value} for value in (prompt, answer, *more)]}


def sharegpt(tmp_path, *conversations):
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(conversations), encoding="utf-8")
    return ("--dataset-name", "sharegpt", "--dataset-path", path)


def test_first_turns_of_conversations_are_asked_and_odd_lengths_left_out(text, tmp_path):
    long = "the fox ran home " * 600
    words = sharegpt(
        tmp_path,
        talk("Where does the fox live?", "It lives in the wood near the river.", "And the owl?"),
        talk("a", "A very short prompt is not asked."),
        talk("Tell me everything.", "b"),
        talk(long, "Too long a prompt."),
        talk("Tell me a story of a fox.", long),
        {"conversations": [{"value": "alone"}]},
        {"other": 1},
    )
    requests = sample_requests(flags(*words, "--num-prompts", 3, "--no-oversample"), text)
    assert [request.prompt for request in requests] == ["Where does the fox live?"]
    assert requests[0].output_len == text.count("It lives in the wood near the river.")
    assert requests[0].prompt_len == text.count("Where does the fox live?")
    again = sample_requests(flags(*words, "--num-prompts", 3), text)
    assert [request.prompt for request in again] == ["Where does the fox live?"] * 3
    longer = sample_requests(flags(*words, "--sharegpt-output-len", 9, "--disable-shuffle", "--no-oversample"), text)
    assert [(request.prompt, request.output_len) for request in longer] == [
        ("Where does the fox live?", 9),
        ("Tell me everything.", 9),
        ("Tell me a story of a fox.", 9),
    ]


def test_without_a_tokenizer_only_lengths_that_are_given_are_taken(tmp_path):
    words = sharegpt(tmp_path, talk("a", "b"))
    assert len(sample_requests(flags(*words, "--output-len", 5, "--num-prompts", 2), ClientText(None))) == 2
    with pytest.raises(UsageError, match="--sharegpt-output-len needs a tokenizer"):
        sample_requests(flags(*words), ClientText(None))


# ---- custom


def test_prompts_of_a_file_get_the_chat_template_where_the_server_applies_none(text, tmp_path):
    path = lines(
        tmp_path / "p.jsonl", {"prompt": "What is 2 + 2?"}, "", {"messages": [{"role": "user", "content": "Hi"}]}
    )
    words = ("--dataset-name", "custom", "--dataset-path", path, "--num-prompts", 2, "--disable-shuffle")
    first, second = sample_requests(flags(*words), text)
    assert first.prompt != "What is 2 + 2?" and "What is 2 + 2?" in first.prompt and first.output_len == 256
    assert "Hi" in second.prompt and first.prompt_len == text.count(first.prompt)
    begin = text.tokenizer.bos_token_id
    assert text.tokenizer.encode(first.prompt).count(begin) == 1
    chats = sample_requests(flags(*words), ClientText(text.tokenizer, text.templates, chat=True))
    assert chats[0].prompt == [{"role": "user", "content": "What is 2 + 2?"}]
    plain = sample_requests(flags(*words, "--skip-chat-template", "--num-prompts", 1), text)
    assert plain[0].prompt == "What is 2 + 2?"


def test_every_line_may_have_its_own_length(text, tmp_path):
    with_separator = '{"prompt": "a\u2028", "output_tokens": 5}'  # it ends a line of text, and none of such a file
    path = lines(tmp_path / "p.jsonl", with_separator, {"prompt": "b", "output_tokens": 6})
    words = ("--dataset-name", "custom", "--dataset-path", path, "--custom-output-len", -1)
    requests = sample_requests(flags(*words, "--num-prompts", 5), text)
    assert {request.output_len for request in requests} == {5, 6} and len(requests) == 5


# ---- timed_trace

TRACE = [
    {"timestamp": 3000, "input_length": 12, "output_length": 3, "hash_ids": [7, -11]},
    {"timestamp": 1000, "input_length": 16, "output_length": 2, "hash_ids": [7, -11]},
    {"timestamp": 1500, "input_length": 16, "output_length": 1, "hash_ids": [7, 19]},
]


def trace(tmp_path, *rows):
    return (
        "--dataset-name",
        "timed_trace",
        "--dataset-path",
        lines(tmp_path / "t.jsonl", *rows),
        "--timed-trace-chunk-hash-size",
        8,
        "--timed-trace-sec-multiplier",
        0.001,
    )


def test_a_trace_is_sent_at_its_times_and_equal_blocks_are_equal_tokens(text, tmp_path):
    first, second, third = sample_requests(flags(*trace(tmp_path, *TRACE)), text)
    assert [each.timestamp for each in (first, second, third)] == pytest.approx([0.0, 0.5, 2.0])
    assert [len(each.prompt) for each in (first, second, third)] == [16, 16, 12]
    assert [each.output_len for each in (first, second, third)] == [2, 1, 3]
    assert first.prompt[:8] == second.prompt[:8] and first.prompt[8:] != second.prompt[8:]
    assert third.prompt == first.prompt[:12]
    assert not text.tokenizer.special_ids & set(first.prompt + second.prompt)
    assert len(sample_requests(flags(*trace(tmp_path, *TRACE), "--num-prompts", 1), text)) == 1


def test_a_trace_may_use_other_names(text, tmp_path):
    rows = [{"t": 5, "i": 8, "o": 1, "h": [1]}]
    labels = (
        "--timed-trace-label-timestamp",
        "t",
        "--timed-trace-label-input-length",
        "i",
        "--timed-trace-label-output-length",
        "o",
        "--timed-trace-label-hash-ids",
        "h",
    )
    [request] = sample_requests(flags(*trace(tmp_path, *rows), *labels), text)
    assert request.prompt_len == 8 and request.timestamp == 0.0


# ---- burstgpt

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
9,GPT-4,30,4,34,API log
5,GPT-4,20,3,23,Conversation log
6,ChatGPT,10,3,13,Conversation log
7,GPT-4,10,0,10,Conversation log
7.5,GPT-4,25,2,27,API log
"""


def burstgpt(tmp_path, content=BURSTGPT):
    (tmp_path / "b.csv").write_text(content, encoding="utf-8")
    return ("--dataset-name", "burstgpt", "--dataset-path", tmp_path / "b.csv")


def test_burstgpt_has_the_lengths_and_times_of_gpt_4_rows_that_were_answered(text, tmp_path):
    requests = sample_requests(flags(*burstgpt(tmp_path)), text)
    assert [(each.prompt_len, each.output_len, each.timestamp) for each in requests] == [
        (20, 3, 0.0),
        (25, 2, 2.5),
        (30, 4, 4.0),
    ]
    assert [text.count(each.prompt) for each in requests] == [20, 25, 30]
    first = sample_requests(flags(*burstgpt(tmp_path), "--disable-shuffle", "--num-prompts", 2), text)
    assert [each.prompt_len for each in first] == [20, 30]
    drawn = sample_requests(flags(*burstgpt(tmp_path), "--num-prompts", 1, "--output-len", 9), text)
    assert [(each.output_len, each.timestamp) for each in drawn] == [(9, 0.0)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,b\n1,2\n", "no column 'Timestamp'"),
        (BURSTGPT + "x,GPT-4,1,1,2,API log\n", "line 7 of .* needs the numbers Timestamp, Request tokens"),
        (BURSTGPT + "1,GPT-4\n", "line 7 of"),
        (BURSTGPT.splitlines()[0], "gives no request"),
        ("", "no column"),
    ],
)
def test_a_wrong_row_of_burstgpt_is_named(content, words, text, tmp_path):
    with pytest.raises(UsageError, match=words):
        sample_requests(flags(*burstgpt(tmp_path, content)), text)


# ---- what is wrong


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"timestamp": 1, "input_length": 8, "output_length": 1, "hash_ids": [1, 2]}, "2 hash ids for 8 tokens"),
        ({"timestamp": 1, "input_length": 8, "output_length": 1}, "needs hash_ids"),
        ({"timestamp": "x", "input_length": 8, "output_length": 1, "hash_ids": [1]}, "needs the numbers"),
        ({"timestamp": 1, "input_length": 8, "output_length": 0, "hash_ids": [1]}, "must be at least 1"),
        ("{", "line 1 of .* is not JSON"),
        ("[]", "line 1 of .* is no JSON object"),
        ("", "gives no request"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(row, words, text, tmp_path):
    with pytest.raises(UsageError, match=words):
        sample_requests(flags(*trace(tmp_path, row)), text)


@pytest.mark.parametrize(
    ("dataset", "content", "words"),
    [
        ("custom", '{"text": "a"}', 'no "prompt"'),
        ("custom", '{"prompt": ["a"]}', 'no "prompt"'),
        ("sharegpt", "{}", "no JSON list"),
        ("sharegpt", "nonsense", "cannot be read"),
        ("sharegpt", '[{"conversations": [1, 2]}]', "entry 1 of .* is no conversation"),
        ("sharegpt", "[]", "gives no request"),
        ("custom", b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_wrong_file_is_named(dataset, content, words, text, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=words):
        sample_requests(flags("--dataset-name", dataset, "--dataset-path", path), text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dataset-name", "custom"), "needs its file"),
        (("--dataset-name", "custom", "--dataset-path", "/nowhere"), "cannot read --dataset-path /nowhere"),
        (("--dataset-path", "x"), "reads no file"),
        (("--random-range-ratio", 1), "below 1"),
        (("--random-input-len", 0), "--random-input-len is 0"),
        (("--input-len", 1, "--random-range-ratio", 0.9), "too small"),
        (("--seed", -1), "--seed is -1"),
        (("--custom-output-len", 0), "--custom-output-len is 0"),
        (("--timed-trace-sec-multiplier", 0), "above 0"),
        (("--dataset-name", "prefix_repetition", "--num-prompts", 2), "--prefix-repetition-num-prefixes 10"),
    ],
)
def test_flags_that_make_no_sense_are_refused(words, said, text):
    with pytest.raises(UsageError, match=said):
        sample_requests(flags(*words), text)


def test_a_tokenizer_that_is_not_there_is_named():
    with pytest.raises(UsageError, match="no tokenizer for /nowhere: .*--tokenizer"):
        load_client_text("/nowhere", chat=False)
