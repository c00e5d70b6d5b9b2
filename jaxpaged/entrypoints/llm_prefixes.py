"""`LLM`'s methods for beginnings as files: computed once, loaded by every engine of the same model.

llm = LLM(kv_offload="host=1G")
llm.save_prefix(handbook, "handbook.safetensors")
...
llm.load_prefix("handbook.safetensors")    # in another process: prompts that begin so are not computed again
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpaged.engine.core_calls import CoreCall, LoadPrefix, SavePrefix
from jaxpaged.engine.input.chat_template import Message
from jaxpaged.engine.input.processor import Prompt
from jaxpaged.errors import EngineError
from jaxpaged.kv_store.prefix_file import PrefixInfo
from jaxpaged.messages import RequestOutput
from jaxpaged.sampling_params import SamplingParams


class PrefixMethods:
    """What `LLM` offers for them. They need the option `kv_offload`."""

    call: Callable[[CoreCall[PrefixInfo]], PrefixInfo]
    generate: Callable[..., list[RequestOutput]]
    one_prompt: Callable[..., Prompt]

    def save_prefix(self, prompt: Prompt | Sequence[Message], path: str | os.PathLike[str]) -> PrefixInfo:
        """Compute a prompt, or a conversation up to where the answer begins, and write its keys and values to a file.

        The file holds the full blocks of its tokens; what is left of the last block is computed again. Raises
        RequestError for a bad prompt, UsageError without `kv_offload`, or where not all of it is in the prefix cache.
        """
        chosen: Any = self.one_prompt(prompt, {})
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        (output,) = self.generate([chosen], params, use_tqdm=False)
        if output.error is not None:
            raise EngineError(output.error)
        salt = chosen.get("cache_salt") if isinstance(chosen, Mapping) else None
        assert output.prompt_token_ids is not None
        return self.call(SavePrefix(os.fspath(path), list(output.prompt_token_ids), salt))

    def load_prefix(self, path: str | os.PathLike[str]) -> PrefixInfo:
        """Put a file of `save_prefix` into the tiers of `kv_offload`: prompts that begin so load it.

        Every page is checked. Raises UsageError for a file that cannot be read, or that the tiers have no room for, and
        PageError for one that is damaged, or of another model, configuration, cache type or block size.
        """
        return self.call(LoadPrefix(os.fspath(path)))
