"""A whole model folder that sees, tiny and with random weights: tokenizer and chat template as Gemma 3 has them.

Load it with `load_format="dummy"`. Its tokens are bytes, so that any text has some.
"""

import json
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from jaxpaged.engine.input.tokenizer import Tokenizer
from tests.models.seeing_checkpoints import SEEING

SPECIAL = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"]
PLACEHOLDER = "<image_soft_token>"
NUM_EMBEDS = 16
TEXT = "what is in the picture and what is on the picture\n\n\n\nuser\nmodel\n"
CONFIG = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
PROCESSOR = {"size": {"height": 32, "width": 32}, "resample": 2, "image_seq_length": NUM_EMBEDS}
CHAT = """{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for item in message['content'] %}\
{% if item['type'] == 'image' %}<start_of_image>{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}\
{% endfor %}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


def make_backend() -> Backend:
    backend = Backend(models.BPE())
    lines = pre_tokenizers.Split(Regex("\\n+"), "isolated")  # as in Gemma, tokens of line breaks hold nothing else
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([lines, letters])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[*SPECIAL, PLACEHOLDER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    bos = SPECIAL.index("<bos>")
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    return backend


def make_tokenizer() -> Tokenizer:
    return Tokenizer(make_backend(), CONFIG)


def make_config() -> dict:
    """config.json, with the ids of the tokenizer's tokens."""
    config = json.loads(json.dumps(SEEING["gemma3_seeing"]))
    config["text_config"] |= {"vocab_size": 304, "max_position_embeddings": 1024}
    ids = {text: number for number, text in enumerate([*SPECIAL, PLACEHOLDER])}
    return config | {
        "image_token_index": ids[PLACEHOLDER],
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
    }


def write_seeing_folder(folder: Path) -> Path:
    """All files but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    make_backend().save(str(folder / "tokenizer.json"))
    files = {
        "config.json": make_config(),
        "preprocessor_config.json": PROCESSOR,
        "tokenizer_config.json": CONFIG,
        "generation_config.json": {"eos_token_id": [1, 4]},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    return folder
