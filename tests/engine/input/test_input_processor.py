import numpy as np
import pytest

from jaxpaged.engine.input.chat_template import ChatTemplates
from jaxpaged.engine.input.generation_config import GenerationDefaults
from jaxpaged.engine.input.processor import InputProcessor
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params import SamplingParams
from tests.engine.small_tokenizer import CHAT, make_tokenizer

TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.vocab_size + 4
EOS = TOKENIZER.eos_token_id


def make(**options):
    options = {"vocab_size": VOCAB, "max_model_len": 32, **options}
    return InputProcessor(TOKENIZER, chat_templates=ChatTemplates({"default": CHAT}), **options)


def process(prompt="the cat", params=None, **options):
    return make().process("r", prompt, params or SamplingParams(), **options)


def test_text_ids_and_dicts_are_the_same_prompt():
    ids = TOKENIZER.encode("the cat")
    assert ids[0] == TOKENIZER.bos_token_id
    for prompt in (
        "the cat",
        ids,
        tuple(ids),
        np.array(ids),
        list(np.array(ids)),
        {"prompt": "the cat"},
        {"prompt_token_ids": ids},
        {"prompt": "shown only", "prompt_token_ids": ids},
    ):
        assert process(prompt)[0].prompt_token_ids == ids
    assert process("the cat")[1] == "the cat"
    assert process({"prompt": "shown only", "prompt_token_ids": ids})[1] == "shown only"
    assert process(ids)[1] is None


BIRD = TOKENIZER.encode(" bird", add_special_tokens=False)[0]


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"allowed_token_ids": [BIRD], "bad_words": ["bird"]}, "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids and min_tokens"),
        ({"allowed_token_ids": [BIRD], "min_tokens": 2, "stop_token_ids": [BIRD]}, "allowed_token_ids and min_tokens"),
        (
            {"allowed_token_ids": [BIRD, EOS], "bad_words": ["bird"], "min_tokens": 1},
            "allowed_token_ids, bad_words and min_tokens",
        ),
    ],
)
def test_fields_that_leave_no_token_are_named(values, fields):
    with pytest.raises(RequestError, match=f"^{fields} contradict each other") as caught:
        make(defaults=GenerationDefaults({}, (EOS,))).process("r", "the cat", SamplingParams(**values))
    assert caught.value.parameter == "allowed_token_ids"


@pytest.mark.parametrize(
    "values",
    [
        {"allowed_token_ids": [BIRD, 9], "bad_words": ["bird"]},
        {"allowed_token_ids": [EOS], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [EOS]},
        {"allowed_token_ids": [9], "bad_words": ["the the"]},  # two tokens: the first may come
        {"allowed_token_ids": [9], "logit_bias": {9: -100}},
    ],
)
def test_fields_that_leave_a_token_are_no_contradiction(values):
    request, _ = make(defaults=GenerationDefaults({}, (EOS,))).process("r", "the cat", SamplingParams(**values))
    assert request.sampling_params.allowed_token_ids == values["allowed_token_ids"]


def test_a_budget_of_thinking_needs_a_vocabulary_with_tokens_around_it():
    params = SamplingParams(thinking_token_budget=5)
    with pytest.raises(RequestError, match="thinking_token_budget is 5, but the vocabulary has no tokens") as caught:
        process(params=params)
    assert caught.value.parameter == "thinking_token_budget"
    tokenizer = make_tokenizer()
    tokenizer.added_tokens = {**tokenizer.added_tokens, 200: "</think>", 201: "<think>", 202: "[THINK]"}
    request, _ = InputProcessor(tokenizer, vocab_size=VOCAB, max_model_len=64).process("r", "the cat", params)
    assert request.sampling_params.thinking_token_ids == (201, 200) and params.thinking_token_ids is None
    assert process(params=SamplingParams(thinking_token_budget=-1))[0].sampling_params.thinking_token_ids is None


def test_text_can_go_without_special_tokens():
    assert process("the cat", add_special_tokens=False)[0].prompt_token_ids == TOKENIZER.encode("the cat", False)


def test_dicts_carry_salt_and_priority():
    processor = make(allow_priority=True)
    request, _ = processor.process("r", {"prompt": "a", "cache_salt": "s", "priority": -3})
    assert (request.cache_salt, request.priority) == ("s", -3)
    assert processor.process("r", "a", priority=2)[0].priority == 2


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "the prompt is empty"),
        ([], "no token ids"),
        ({"prompt": ""}, "the prompt is empty"),
        ({}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"promt": "x"}, "unknown key 'promt'. Did you mean 'prompt'"),
        ({"prompt": 3}, "holds 3; it must be a text"),
        ({"prompt_token_ids": "abc"}, "must be text, token ids"),
        (17, "a prompt is 17"),
        ([1, VOCAB], f"token id {VOCAB} at position 1, but the vocabulary has {VOCAB} ids"),
        ([-1], "token id -1 at position 0"),
        ([1.0], "token id 1.0"),
        ([True], "token id True"),
        ("\ud800", "not valid Unicode"),
        ([5] * 32, "has 32 tokens.*max_model_len = 32, so the prompt at most 31"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt is ''"),
        ({"prompt": "a", "priority": 1}, "priority is 1, but the engine serves in order of arrival"),
        ({"prompt": "a", "priority": "high"}, "priority is 'high'"),
    ],
)
def test_prompts_that_cannot_be_say_what_is_wrong(prompt, said):
    with pytest.raises(RequestError, match=said):
        process(prompt)


def test_parameters_of_another_kind_are_refused():
    with pytest.raises(RequestError, match="must be SamplingParams"):
        make().process("r", "a", {"temperature": 1})


def test_prompts_of_ids_beyond_the_tokenizer_but_within_the_model_pass():
    assert process([VOCAB - 1])[0].prompt_token_ids == [VOCAB - 1]


def test_long_prompts_can_be_truncated_to_their_end():
    ids = list(range(5, 105))
    assert process(ids, truncate_prompt_tokens=7)[0].prompt_token_ids == ids[-7:]
    assert process(ids, truncate_prompt_tokens=-1)[0].prompt_token_ids == ids[-31:]
    assert process(ids[:3], truncate_prompt_tokens=7)[0].prompt_token_ids == ids[:3]
    for bad in (0, -2, True, "7"):
        with pytest.raises(RequestError, match="truncate_prompt_tokens is"):
            process(ids, truncate_prompt_tokens=bad)


@pytest.mark.parametrize(("asked", "given"), [(None, 22), (5, 5), (22, 22), (1000, 22)])
def test_max_tokens_fills_what_the_context_leaves(asked, given):
    params = SamplingParams(max_tokens=asked, min_tokens=3)
    request, _ = process([5] * 10, params)
    assert request.sampling_params.max_tokens == given
    assert params.max_tokens == asked, "the caller's parameters are not touched"


def test_min_tokens_does_not_exceed_what_fits():
    assert process([5] * 30, SamplingParams(max_tokens=None, min_tokens=9))[0].sampling_params.min_tokens == 2


def test_without_a_seed_requests_get_one_each_and_runs_repeat():
    def seeds(seed):
        processor = make(seed=seed)
        return [processor.process(str(i), "a")[0].sampling_params.seed for i in range(4)]

    assert seeds(0) == seeds(0) != seeds(1)
    assert len(set(seeds(0))) == 4
    assert all(0 <= seed < 2**64 for seed in seeds(0))
    assert process(params=SamplingParams(seed=5))[0].sampling_params.seed == 5


def test_seed_minus_one_is_another_one_in_every_request_and_every_run():
    """Two processors with one seed are two runs of one program."""
    runs = [make(seed=0) for _ in range(2)]
    requests = [run.process(str(i), "a", SamplingParams(seed=-1))[0] for run in runs for i in range(4)]
    seeds = [request.sampling_params.seed for request in requests]
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_end_ids_of_the_model_become_stop_ids():
    processor = make(defaults=GenerationDefaults({}, (9, EOS)))
    request, _ = processor.process("r", "a", SamplingParams(stop_token_ids=[8, 9]))
    assert request.sampling_params.stop_token_ids == [8, 9, EOS]
    assert request.eos_token_id == EOS


def test_ignore_eos_keeps_only_the_callers_stop_ids():
    processor = make(defaults=GenerationDefaults({}, (9,)))
    request, _ = processor.process("r", "a", SamplingParams(stop_token_ids=[8], ignore_eos=True))
    assert (request.sampling_params.stop_token_ids, request.eos_token_id) == ([8], None)


def test_without_parameters_the_models_own_defaults_hold():
    processor = make(defaults=GenerationDefaults({"temperature": 0.5, "max_tokens": 7}))
    params = processor.process("r", "a")[0].sampling_params
    assert (params.temperature, params.max_tokens) == (0.5, 7)


def test_bad_words_become_tokens_with_and_without_a_space():
    params = process(params=SamplingParams(bad_words=["cat", " dog"]))[0].sampling_params
    texts = {TOKENIZER.decode(ids) for ids in params.bad_words_token_ids}
    assert texts == {"cat", " cat", "dog", " dog"}


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"stop_token_ids": [VOCAB]}, f"stop_token_ids contains token id {VOCAB}"),
        ({"logit_bias": {VOCAB: 1}}, "logit_bias contains"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids contains"),
        ({"logprobs": 21}, "logprobs is 21, but this engine gives at most 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"bad_words": ["é" * 70]}, "140 tokens; 1 to 128"),
        ({"bad_words": [f"{i}" for i in range(65)]}, "become 130 token sequences"),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused(params, said):
    with pytest.raises(RequestError, match=said):
        process(params=SamplingParams(**params))


def test_with_min_tokens_the_models_end_ids_need_places_too():
    processor = make(defaults=GenerationDefaults({}, (EOS, 7)))
    params = SamplingParams(stop_token_ids=list(range(10, 137)), min_tokens=1)
    with pytest.raises(RequestError, match="at most 128 stop ids.*there are 129"):
        processor.process("r", "a", params)


def test_a_chat_has_one_beginning_token():
    prompt = make().chat_prompt([{"role": "user", "content": "the cat"}])
    assert prompt["prompt"] == "<bos><turn>user\nthe cat<end>\n<turn>assistant\n"
    assert prompt["prompt_token_ids"].count(TOKENIZER.bos_token_id) == 1
    request, text = make().process("r", prompt)
    assert (request.prompt_token_ids, text) == (prompt["prompt_token_ids"], prompt["prompt"])


def test_template_variables_cannot_replace_the_conversation():
    with pytest.raises(RequestError, match="chat_template_kwargs sets 'tools'"):
        make().chat_prompt([{"role": "user", "content": "x"}], template_variables={"tools": []})


def test_a_chat_can_bring_its_own_template_and_variables():
    prompt = make().chat_prompt(
        [{"role": "user", "content": "x"}],
        chat_template="{{ mood }} {{ eos_token }}",
        template_variables={"mood": "calm"},
    )
    assert prompt["prompt"] == "calm <eos>"


@pytest.mark.parametrize(("own", "of_request", "used"), [(1, None, 1), (1, 4, 4), (3, None, 3), (3, 2, 3), (3, 5, 5)])
def test_a_request_may_only_ask_for_longer_intervals_than_the_engine_has(own, of_request, used):
    processor = make(stream_interval=own)
    request, _ = processor.process("r", "the cat", SamplingParams(stream_interval=of_request))
    assert request.sampling_params.stream_interval == used


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if think %}<end>{% endif %}"


@pytest.mark.parametrize(
    ("content", "think", "is_thinking"),
    [
        ("the <end> cat", False, False),
        ("the cat", True, True),
        ("<bos> the cat", True, True),
        ("the <end>", True, True),
    ],
)
def test_a_budget_counts_from_the_prompt_where_the_template_opened_the_thinking(content, think, is_thinking):
    """The tokens <end> and <bos> stand for those around thinking."""
    processor = make()
    processor.thinking_token_ids = tuple(TOKENIZER.backend.token_to_id(text) for text in ("<end>", "<bos>"))
    messages = [{"role": "user", "content": content}]
    prompt = processor.chat_prompt(messages, chat_template=THINKS, template_variables={"think": think})
    params = SamplingParams(thinking_token_budget=3)
    assert processor.process("r", prompt, params)[0].sampling_params.is_thinking is is_thinking
    # A prompt of the caller's own is what the caller means it to be.
    own = processor.process("r", prompt["prompt"], params)[0].sampling_params
    assert own.is_thinking is ("<end>" in prompt["prompt"])


def test_the_ending_of_a_prompt_is_a_text():
    with pytest.raises(RequestError, match="'ending' holds 3"):
        make().process("r", {"prompt_token_ids": [5], "ending": 3})
