import subprocess
import sys

import numpy as np
import pytest

from jaxpaged.engine.input.generation_config import GenerationDefaults
from jaxpaged.entrypoints.llm import LLM
from jaxpaged.errors import EngineDeadError, RequestError
from jaxpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from tests.engine.fake_engine import make_engine
from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


def make(**options):
    engine, executor = make_engine(**options)
    return LLM.from_engine(engine), executor


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("the cat", 1),
        ([5, 6], 1),
        (np.array([5, 6]), 1),
        ({"prompt_token_ids": [5]}, 1),
        (["the cat", "sat"], 2),
        ([[5, 6], [7]], 2),
        ([{"prompt": "a"}, "b", [5]], 3),
        ([], 0),
        (iter(["a", "b"]), 2),
        (np.array([[5, 6], [7, 8]]), 2),
    ],
)
def test_one_prompt_or_many_in_any_form(prompts, count):
    outputs = make()[0].generate(prompts, GREEDY)
    assert len(outputs) == count
    assert all(output.finished and len(output.outputs[0].token_ids) == 3 for output in outputs)


def test_results_are_in_the_order_of_the_prompts():
    llm, _ = make()
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (9, 1, 5)]
    outputs = llm.generate([[10], [20], [30]], params)
    assert tokens(outputs) == [list(range(11, 20)), [21], list(range(31, 36))]
    assert params[0].output_kind == RequestOutputKind.CUMULATIVE


def test_more_prompts_than_run_at_a_time():
    llm, _ = make(max_num_seqs=2)
    outputs = llm.generate([[10 + i] for i in range(20)], GREEDY)
    assert tokens(outputs) == [[11 + i, 12 + i, 13 + i] for i in range(20)]


def test_without_parameters_the_models_defaults_hold():
    llm, _ = make(defaults=GenerationDefaults({"temperature": 0.0, "max_tokens": 2}))
    assert tokens(llm.generate([10])) == [[11, 12]]
    assert llm.get_default_sampling_params().max_tokens == 2


def test_a_bad_prompt_is_named_by_its_index_and_nothing_is_computed():
    llm, executor = make()
    with pytest.raises(RequestError, match="prompt 1: the prompt is empty") as caught:
        llm.generate(["the cat", "", "sat"], GREEDY)
    assert caught.value.parameter == "prompt"
    assert not llm.llm_engine.has_unfinished_requests()
    assert executor.executed == []
    assert tokens(llm.generate([10], GREEDY)) == [[11, 12, 13]]


@pytest.mark.parametrize(("prompts", "params"), [(None, GREEDY), (3, GREEDY), ("a", {"n": 1}), ([None], GREEDY)])
def test_what_is_no_prompt_or_no_parameters_is_a_request_error(prompts, params):
    with pytest.raises(RequestError, match="must be|token id None"):
        make()[0].generate(prompts, params)


def test_requests_of_others_do_not_disturb():
    llm, _ = make()
    llm.llm_engine.add_request("mine", [10], GREEDY)
    assert tokens(llm.generate([[20], [30]], GREEDY)) == [[21, 22, 23], [31, 32, 33]]


def test_a_dead_engine_says_why(monkeypatch):
    llm, executor = make()
    executor.fail_at[0] = "result"
    monkeypatch.setattr(executor, "recover", lambda: 1 / 0)
    with pytest.raises(EngineDeadError, match="broke down.*division by zero"):
        llm.generate("a", GREEDY)


def test_a_lone_bad_prompt_needs_no_index():
    with pytest.raises(RequestError, match="^the prompt is empty"):
        make()[0].generate("", GREEDY)


def test_lists_of_another_length_are_refused():
    with pytest.raises(RequestError, match="sampling_params has 1 entries for 2 prompts"):
        make()[0].generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="priority has 3 entries for 2 prompts"):
        make(scheduling_policy="priority")[0].generate(["a", "b"], GREEDY, priority=[1, 2, 3])


def test_a_request_that_fails_while_running_has_its_error_and_others_finish():
    llm, executor = make()
    executor.bad_requests["1"] = "logits are not numbers"
    outputs = llm.generate([[10], [20], [30]], GREEDY)
    assert [output.error for output in outputs] == [None, "logits are not numbers", None]
    assert tokens(outputs) == [[11, 12, 13], [], [31, 32, 33]]


def test_an_interrupt_leaves_no_requests_behind(monkeypatch):
    llm, executor = make()
    with monkeypatch.context() as patch:
        patch.setattr(executor, "execute_model", lambda scheduled: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate("the cat", GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()


def test_chats_are_rendered_with_the_models_template():
    llm, _ = make()
    outputs = llm.chat([{"role": "user", "content": "the cat"}], GREEDY)
    assert outputs[0].prompt == "<bos><turn>user\nthe cat<end>\n<turn>assistant\n"
    assert outputs[0].prompt_token_ids.count(TOKENIZER.bos_token_id) == 1


def test_many_chats_at_a_time_and_the_bad_one_is_named():
    llm, _ = make()
    good = [{"role": "user", "content": "the cat"}]
    assert len(llm.chat([good, good], GREEDY)) == 2
    with pytest.raises(RequestError, match="conversation 1: message 0"):
        llm.chat([good, [{"content": "x"}]], GREEDY)


def test_a_chat_can_continue_the_last_message():
    llm, _ = make()
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "once upon"}]
    output = llm.chat(messages, GREEDY, add_generation_prompt=False, continue_final_message=True)[0]
    assert output.prompt.endswith("<turn>assistant\nonce upon")


def test_a_model_without_template_cannot_chat():
    with pytest.raises(RequestError, match="no default chat template"):
        make(chat=None)[0].chat([{"role": "user", "content": "x"}], GREEDY)


def test_beam_search_takes_prompts_in_any_form():
    llm, _ = make()
    for prompts in ("the cat", ["the cat", [10, 11]], {"prompt_token_ids": [10], "cache_salt": "s"}):
        outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=3))
        assert all(len(output.sequences) == 2 for output in outputs)


@pytest.mark.parametrize("keep", [False, True])
def test_the_ending_token_of_a_beam_has_no_text_unless_asked_for(keep):
    llm, _ = make()
    params = BeamSearchParams(beam_width=8, max_tokens=2, length_penalty=0.0, include_stop_str_in_output=keep)
    tokenizer = llm.get_tokenizer()
    [output] = llm.beam_search({"prompt_token_ids": [5]}, params)
    ended = next(s for s in output.sequences if s.finish_reason == "stop")
    assert ended.tokens[-1] == tokenizer.eos_token_id
    assert ended.text == tokenizer.decode(ended.tokens if keep else ended.tokens[:-1], skip_special_tokens=True)


def test_beam_search_needs_enough_log_probabilities():
    with pytest.raises(RequestError, match="beam_width is 11.*at most 20"):
        make()[0].beam_search("a", BeamSearchParams(beam_width=11, max_tokens=3))


def test_a_progress_bar_is_shown_where_one_is_given():
    made = []

    class Bar:
        def __init__(self, **options):
            made.append(self)
            self.total, self.n, self.closed, self.text = options["total"], 0, False, ""

        def update(self, count):
            self.n += count

        def set_postfix_str(self, text, refresh):
            self.text = text

        def close(self):
            self.closed = True

    make()[0].generate(["a", "b"], GREEDY, use_tqdm=Bar)
    make()[0].beam_search("a", BeamSearchParams(beam_width=2, max_tokens=5), use_tqdm=Bar)
    assert [(bar.total, bar.n, bar.closed) for bar in made] == [(2, 2, True), (5, 5, True)]
    assert all("tok/s" in bar.text for bar in made)


def test_nothing_is_printed_away_from_a_terminal(capsys):
    make()[0].generate(["a", "b"], GREEDY)
    assert capsys.readouterr() == ("", "")


def test_the_rest_of_the_interface():
    llm, executor = make()
    with llm:
        llm.generate([10, 11, 12, 13, 14], GREEDY)
        assert llm.get_tokenizer().encode("a")
        assert llm.reset_prefix_cache() is True
        llm.wait_for_programs()
        assert executor.waited
        assert any(metric.name == "vllm:generation_tokens" for metric in llm.get_metrics())
    assert not executor.running


def test_importing_the_package_and_its_llm_imports_no_jax():
    heavy = ("jax", "flax", "orbax", "transformers", "torch")
    program = (
        "import sys, jaxpaged; from jaxpaged import LLM, SamplingParams, BeamSearchParams, EngineArgs, RequestOutput;"
        f"print([name for name in {heavy} if name in sys.modules], jaxpaged.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("]")[0] == "["
