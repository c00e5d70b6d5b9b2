"""The byte-level BPE tokenizer and the chat template of the demo model."""

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


def tokenizer_config(max_length: int) -> dict:
    """What ``tokenizer_config.json`` holds."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [START_OF_TURN, END_OF_TURN],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
