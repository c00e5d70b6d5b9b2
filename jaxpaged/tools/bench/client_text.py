"""The model's tokenizer and chat template, where prompts are made without its engine.

This module knows how a model's name becomes a tokenizer; nothing of datasets.
"""

from dataclasses import dataclass
from typing import Any

from jaxpaged.engine.input.chat_template import ChatTemplates, load_chat_templates
from jaxpaged.engine.input.tokenizer import Tokenizer, load_tokenizer
from jaxpaged.errors import CheckpointError, UsageError
from jaxpaged.params.hub import TOKENIZER_FILES, resolve_model_folder


@dataclass(frozen=True)
class ClientText:
    """How prompts are made. `chat`: they are chats, to which the server applies its template."""

    tokenizer: Tokenizer | None
    templates: ChatTemplates | None = None
    chat: bool = False

    @property
    def num_added(self) -> int:
        """Tokens that a server adds to a text, such as a beginning of text."""
        return self.count("")

    @property
    def has_template(self) -> bool:
        return self.templates is not None and "default" in self.templates.sources

    def count(self, text: str) -> int:
        """Tokens of a text as a server counts them; 0 without a tokenizer."""
        return len(self.tokenizer.encode(text)) if self.tokenizer else 0

    def count_answer(self, text: str) -> int:
        """Tokens of the text of an answer, of which a server did not say how many it has."""
        return len(self.tokenizer.encode(text, add_special_tokens=False)) if self.tokenizer else 1

    def needed(self, dataset: str) -> Tokenizer:
        """The tokenizer. Raises UsageError."""
        if self.tokenizer is None:
            raise UsageError(f"--dataset-name {dataset} needs a tokenizer. Leave out --skip-tokenizer-init.")
        return self.tokenizer

    def rendered(self, messages: Any) -> str:
        """A chat as text, without the beginning of text where the server adds one to every text."""
        tokenizer = self.needed("custom with a chat template")
        text = self.templates.choose().render(messages, **tokenizer.named_tokens)
        begin = tokenizer.named_tokens.get("bos_token")
        return text.removeprefix(begin) if begin and tokenizer.encode("")[:1] == [tokenizer.bos_token_id] else text


def load_client_text(name: str, chat: bool) -> ClientText:
    """The text of a model: "demo", a folder, or a hub id, whose weights are not fetched. Raises UsageError."""
    try:
        folder = resolve_model_folder(name, wanted=TOKENIZER_FILES)
        tokenizer = load_tokenizer(folder)
        return ClientText(tokenizer, load_chat_templates(folder, tokenizer.config), chat)
    except CheckpointError as error:
        raise UsageError(
            f"no tokenizer for {name}: {error} For prompts of the right length --tokenizer names a folder or a hub id."
        ) from None
