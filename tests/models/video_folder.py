"""Whole model folders that take videos, tiny and with random weights: tokenizer and chat template as Qwen-VL has them.

Their tokens are bytes, so that any text has some.
"""

import json
from pathlib import Path

from safetensors.numpy import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxpaged.engine.input.tokenizer import Tokenizer
from tests.models.qwen_vl_checkpoints import MERGE, PATCH, QWEN_VL
from tests.models.seeing_checkpoints import qwen_vl_tensors

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"]
PADS = ["<|image_pad|>", "<|video_pad|>"]
IMAGE_ID, VIDEO_ID = len(SPECIAL), len(SPECIAL) + 1
CONFIG = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
PROCESSOR = {"patch_size": PATCH, "merge_size": MERGE, "min_pixels": 64, "max_pixels": 4096}
OF_VIDEOS = {**PROCESSOR, "size": {"shortest_edge": 64, "longest_edge": 4096}}
WITH_VIDEOS = {**PROCESSOR, "video_processor": {**PROCESSOR, "size": {"shortest_edge": 64, "longest_edge": 40960}}}
"""Settings of both, with room for a video of ten times the pixels of a picture."""
CHAT = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}\
{% if item['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif item['type'] == 'video' %}\
<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL) + len(PADS) + 256,
        special_tokens=[*SPECIAL, *PADS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["what"], trainer)
    return backend


def make_tokenizer() -> Tokenizer:
    return Tokenizer(make_backend(), CONFIG)


def make_config(name: str) -> dict:
    """config.json, with the ids of the tokenizer's tokens."""
    config = json.loads(json.dumps(QWEN_VL[name]))
    config.get("text_config", config).update({"vocab_size": 270, "max_position_embeddings": 1024})
    config["vision_config"]["tokens_per_second"] = 2
    return config | {"image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID}


def write_video_folder(name: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    make_backend().save(str(folder / "tokenizer.json"))
    files = {
        "config.json": make_config(name),
        "preprocessor_config.json": PROCESSOR,
        "video_preprocessor_config.json": OF_VIDEOS,
        "tokenizer_config.json": CONFIG,
        "generation_config.json": {"eos_token_id": SPECIAL.index("<|im_end|>")},
    }
    for file, value in files.items():
        (folder / file).write_text(json.dumps(value), encoding="utf-8")
    save_file(qwen_vl_tensors(files["config.json"], 7), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    return folder
