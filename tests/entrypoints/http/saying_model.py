"""A model that says what a test gives it, as far as the grammar of a request lets it."""

import numpy as np

from jaxpaged.core.grammar.matcher import Grammars
from jaxpaged.engine.input.grammar_checker import GrammarChecker
from tests.engine.fake_engine import FakeExecutor, counting_model
from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
CHECKER = GrammarChecker()
"""One for all tests: the process that it starts takes a second to come up."""


class SayingExecutor(FakeExecutor):
    """Writes `text` and ends. Where the grammar forbids the next token, it writes the first one that is allowed."""

    def __init__(self, text=""):
        super().__init__(counting_model(TOKENIZER.vocab_size), TOKENIZER.vocab_size, num_blocks=2048)
        self.longest_run = 1
        self.masks = {}
        self.mask = self.unsampled = None
        self.say(text)

    def say(self, text):
        """What it says from now on."""
        self.script = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]

    def execute_model(self, scheduled):
        self.unsampled = scheduled
        return None if scheduled.masked else super().execute_model(scheduled)

    def sample_tokens(self, masks_SW):
        """A masked step is computed once its masks are there."""
        scheduled = self.unsampled
        sampling = [name for name, most in zip(scheduled.request_ids, scheduled.max_sampled_tokens) if most]
        self.masks = dict(zip(sampling, masks_SW))
        done, self.masks = super().execute_model(scheduled), {}
        return done

    def _compute(self, request_id, *args):
        self.mask = self.masks.get(request_id)
        super()._compute(request_id, *args)

    def _sample(self, row):
        place = len(row.token_ids) - row.num_prompt_tokens
        token_id = self.script[min(place, len(self.script) - 1)]
        if self.mask is None:
            return token_id
        allowed = np.unpackbits(self.mask.view(np.uint8), bitorder="little")
        return token_id if allowed[token_id] else int(np.flatnonzero(allowed)[0])


def saying(text="", **options):
    """Options for `serving`, `ask` or `live_server`: a model that says `text`, and grammars that are real."""
    grammars = Grammars(TOKENIZER.backend.to_str(), TOKENIZER.vocab_size, [TOKENIZER.eos_token_id])
    return {
        "executor": SayingExecutor(text),
        "grammars": grammars,
        "grammar_checker": CHECKER,
        "max_model_len": 1024,
        **options,
    }
