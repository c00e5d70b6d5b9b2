"""A small tokenizer made in memory, and a chat template: text without a model's files."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxpaged.engine.input.tokenizer import Tokenizer

TEXT = "the cat sat on the mat and the dog sat on the log while a small bird sang to the sun"
CONFIG = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
CHAT = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def make_backend() -> Backend:
    """Byte-level BPE over a few words: 4 special tokens, 256 bytes, some merges."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<bos>", "<eos>", "<turn>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return backend


def make_tokenizer() -> Tokenizer:
    return Tokenizer(make_backend(), CONFIG)
