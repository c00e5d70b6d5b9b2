"""`skip_tokenizer_init`: token ids in and out, no file of a tokenizer, and a sentence for whatever needs text."""

import json

import pytest

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.front_end import load_input_processor
from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.entrypoints.llm import LLM
from jaxpaged.errors import CheckpointError, ConfigError, RequestError
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from tests.engine.fake_engine import FakeExecutor, counting_model

FACTS = ModelFacts(max_position_embeddings=64, dtype="float32", num_heads=1, vocab_size=100)


def front_end(folder, **options):
    config = EngineConfig.from_options(block_size=4, **options).resolve(FACTS, "cpu")
    return config, load_input_processor(config, 100, folder, folder)


@pytest.fixture
def llm(tmp_path, monkeypatch):
    """Made as people make one, but for the model."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 20}))
    config, processor = front_end(tmp_path, skip_tokenizer_init=True)
    core = EngineCore(config, FakeExecutor(counting_model(100), 100))
    monkeypatch.setattr(LLMEngine, "from_config", lambda *_: LLMEngine(config, processor, core))
    return LLM("anything", skip_tokenizer_init=True)


def test_without_the_option_the_files_are_missed(tmp_path):
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        front_end(tmp_path)


def test_ids_go_in_and_come_out(llm):
    [output] = llm.generate([10, 11], SamplingParams(temperature=0.0, max_tokens=3, logprobs=1))
    [answer] = output.outputs
    assert (answer.token_ids, answer.text, output.prompt) == ([12, 13, 14], "", None)
    assert [line.decoded_token for each in answer.logprobs for line in each.values()] == [None] * 3
    assert [i for c in llm.stream([10], SamplingParams(temperature=0.0, max_tokens=2)) for i in c.token_ids] == [11, 12]


def test_the_models_own_end_still_ends(llm):
    [output] = llm.generate([17], SamplingParams(temperature=0.0, max_tokens=30))
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([18, 19, 20], "stop")


def test_beams_have_no_text(llm):
    [output] = llm.beam_search([[10]], BeamSearchParams(beam_width=2, max_tokens=2))
    assert [sequence.text for sequence in output.sequences] == [None, None]


@pytest.mark.parametrize(
    "fields",
    [{"stop": "a"}, {"bad_words": ["a"]}, {"structured_outputs": {"regex": "a"}}, {"thinking_token_budget": 3}],
)
def test_parameters_that_need_text_are_refused_by_name(llm, fields):
    with pytest.raises(RequestError, match=f"skip_tokenizer_init, so {next(iter(fields))} cannot be") as caught:
        llm.generate([10], SamplingParams(**fields))
    assert caught.value.parameter == next(iter(fields))


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.generate("text"),
        lambda llm: llm.generate({"prompt": "text"}),
        lambda llm: llm.generate("x" * 10**6),
        lambda llm: llm.chat([{"role": "user", "content": "text"}]),
        lambda llm: llm.get_tokenizer(),
        lambda llm: llm.llm_engine.input_processor.tokenizer.decode([1]),
        lambda llm: llm.llm_engine.input_processor.tokenizer.backend.to_str(),
    ],
)
def test_text_is_refused_with_what_to_do(llm, use):
    with pytest.raises(RequestError, match="skip_tokenizer_init.*token ids only. Use prompt_token_ids"):
        use(llm)


def test_a_chat_template_beside_it_is_a_contradiction(tmp_path):
    with pytest.raises(ConfigError, match="chats are text"):
        front_end(tmp_path, skip_tokenizer_init=True, chat_template="{{ messages }}")
