"""The byte-level BPE tokenizer and the chat template of the demo model."""

import json
from collections.abc import Iterable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
START_OF_TURN, END_OF_TURN = "<start_of_turn>", "<end_of_turn>"
SPECIAL_TOKENS = [PAD, EOS, BOS, START_OF_TURN, END_OF_TURN]
START_OF_IMAGE, SOFT_TOKEN, END_OF_IMAGE = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
# Bytes that no text in UTF-8 has, as byte-level BPE writes them: their places are free for the marks of pictures.
PLACES_OF_MARKS = {START_OF_IMAGE: "\u00c0", END_OF_IMAGE: "\u00c1", SOFT_TOKEN: "\u00f5"}

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- set system = namespace(text='') -%}
{%- if messages and messages[0]['role'] == 'system' -%}
    {%- set system.text = messages[0]['content'] + '\\n\\n' -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] != 'system' -%}
        {{- '<start_of_turn>' -}}
        {{- 'model' if message['role'] == 'assistant' else message['role'] -}}
        {{- '\\n' -}}
        {%- if message['role'] == 'user' and system.text -%}
            {{- system.text -}}
            {%- set system.text = '' -%}
        {%- endif -%}
        {{- message['content'] | trim -}}
        {{- '<end_of_turn>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""

_CONTENT_LINE = """\
        {{- message['content'] | trim -}}
"""
_PARTS_LINES = """\
        {%- if message['content'] is string -%}
            {{- message['content'] | trim -}}
        {%- else -%}
            {%- for part in message['content'] -%}
                {%- if part['type'] == 'image' -%}
                    {{- '<start_of_image>' -}}
                {%- elif part['type'] == 'text' -%}
                    {{- part['text'] | trim -}}
                {%- endif -%}
            {%- endfor -%}
        {%- endif -%}
"""
_SYSTEM_LINE = "set system.text = messages[0]['content'] + '\\n\\n'"
_SYSTEM_PARTS = """\
set content = messages[0]['content'] -%}
    {%- set system.text = (content if content is string else content[0]['text']) + '\\n\\n'"""
SEEING_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(_CONTENT_LINE, _PARTS_LINES).replace(_SYSTEM_LINE, _SYSTEM_PARTS)
"""The same for a model that sees: what a message says may be a list of parts, texts and pictures."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE in which every digit stays a token of its own.

    A space before a capital letter is also one: a name then has the same
    tokens after a space and after a quotation mark, so it can be copied.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r" (?=\p{Lu})"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(t, special=True) for t in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def with_picture_marks(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the marks of pictures; every text has the tokens it had, and the vocabulary its size."""
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for mark, place in PLACES_OF_MARKS.items():
        if place in vocabulary:
            number = vocabulary.pop(place)
            vocabulary[mark] = number
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            state["added_tokens"].append({"id": number, "content": mark, **flags})
    state["added_tokens"].sort(key=lambda token: token["id"])
    return Tokenizer.from_str(json.dumps(state))


def tokenizer_config(max_length: int, chat_template: str = CHAT_TEMPLATE) -> dict:
    """What ``tokenizer_config.json`` holds."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [START_OF_TURN, END_OF_TURN],
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
