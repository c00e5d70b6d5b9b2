"""The tokenizer as people know it: transformers' class, made from the engine's own tokenizer and chat templates.

Same ids, same text: both are made from one `tokenizers.Tokenizer`. The engine itself never uses it.
"""

import logging
from typing import Any

import tokenizers

from jaxpaged.engine.input.no_tokenizer import refuse
from jaxpaged.engine.input.processor import InputProcessor


def public_tokenizer(processor: InputProcessor) -> Any:
    """A `transformers.PreTrainedTokenizerFast` of its own. Raises UsageError when the engine has no tokenizer."""
    if not processor.has_tokenizer:
        refuse("a tokenizer")
    own, templates = processor.tokenizer, processor.chat_templates.sources
    backend = tokenizers.Tokenizer.from_str(own.backend.to_str())
    padding = {"padding_side": own.config["padding_side"]} if "padding_side" in own.config else {}
    named = set(own.named_tokens.values())
    extra = [own.added_tokens[token_id] for token_id in sorted(own.special_ids)]
    return fast_tokenizer_class()(
        tokenizer_object=backend,
        chat_template=templates.get("default") if set(templates) <= {"default"} else templates,
        model_max_length=processor.max_model_len,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=[token for token in extra if token not in named],
        **padding,
        **own.named_tokens,
    )


def fast_tokenizer_class() -> type:
    """Imported here: it takes a second. What it says of missing libraries concerns models, and not tokenizers."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        logging.disable(disabled)
    return PreTrainedTokenizerFast
