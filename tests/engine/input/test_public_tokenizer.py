"""The tokenizer that users get: transformers' class, with the engine's ids, text and templates."""

from pathlib import Path

import pytest

import jaxpaged
from jaxpaged.engine.input.chat_template import load_chat_templates
from jaxpaged.engine.input.processor import InputProcessor
from jaxpaged.engine.input.public_tokenizer import public_tokenizer
from jaxpaged.engine.input.tokenizer import load_tokenizer
from jaxpaged.entrypoints.llm import LLM
from tests.engine.fake_engine import make_engine
from tests.engine.small_tokenizer import CHAT

MESSAGES = [{"role": "user", "content": "the cat"}]
TEXTS = ["the cat sat", "", "Grüße, 猫 🐈!", "  <bos> and <end>\n"]


@pytest.fixture(scope="module")
def llm():
    return LLM.from_engine(make_engine()[0])


@pytest.fixture(scope="module")
def tokenizer(llm):
    return llm.get_tokenizer()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_it_has_the_engines_ids_and_text(llm, tokenizer, text, special):
    own = llm.llm_engine.input_processor.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=special)
    assert ids == own.encode(text, special)
    assert tokenizer(text, add_special_tokens=special).input_ids == ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == own.decode(ids, skip)


def test_special_tokens_are_shown_unless_they_are_skipped(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a")) == "<bos>a"


def test_it_knows_its_vocabulary(llm, tokenizer):
    own = llm.llm_engine.input_processor.tokenizer
    assert len(tokenizer) == own.vocab_size
    assert tokenizer.get_vocab() == own.backend.get_vocab()
    assert (tokenizer.eos_token_id, tokenizer.bos_token) == (own.eos_token_id, "<bos>")
    assert tokenizer.convert_tokens_to_ids("<end>") == own.backend.token_to_id("<end>")


def test_a_chat_becomes_the_prompt_that_chat_computes(llm, tokenizer):
    prompt = llm.llm_engine.input_processor.chat_prompt(MESSAGES)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == prompt["prompt"]
    encoded = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert encoded["input_ids"] == prompt["prompt_token_ids"]
    assert tokenizer.chat_template == CHAT


def test_changing_it_leaves_the_engine_alone(llm, tokenizer):
    other = llm.get_tokenizer()
    other.add_special_tokens({"additional_special_tokens": ["<new>"]})
    assert len(llm.get_tokenizer()) == len(tokenizer) == len(other) - 1


def test_the_embedded_models_is_what_transformers_reads_from_its_folder():
    from transformers import AutoTokenizer

    folder = Path(jaxpaged.__file__).parent / "assets" / "demo"
    own = load_tokenizer(folder)
    processor = InputProcessor(
        own, vocab_size=own.vocab_size, max_model_len=64, chat_templates=load_chat_templates(folder, own.config)
    )
    ours, theirs = public_tokenizer(processor), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert len(ours) == len(theirs)
    for generation in (True, False):
        options = {"tokenize": False, "add_generation_prompt": generation}
        assert ours.apply_chat_template(MESSAGES, **options) == theirs.apply_chat_template(MESSAGES, **options)
    assert sorted(ours.all_special_tokens) == sorted(theirs.all_special_tokens)
    assert ours.padding_side == theirs.padding_side
