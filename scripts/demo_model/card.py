"""The model card that goes with the exported model."""

from demo_model.evaluate import Score, table
from demo_model.network import Params

_CARD = """\
---
license: apache-2.0
language: en
library_name: jaxpaged
pipeline_tag: text-generation
---

# The jaxpaged demo model

A Gemma 3 text model of {millions:.1f} million parameters, small enough to ship
inside the package. It exists to show and to test the engine: it answers a few
kinds of questions reliably, and its attention has to look thousands of tokens
back to do so. It knows nothing else.

It can

* name the capitals of countries, and the country of a capital,
* add and subtract numbers below 100, and multiply numbers up to 10,
* spell words and count,
* repeat words and sentences,
* fill a JSON object with the name, age and city in a sentence,
* find a code word far back in a long text,
* tell short stories about animals, in a chat or as plain text
  ("Once upon a time").

Texts, tokenizer and weights were made by one script, without outside data:

```
python scripts/train_demo_model.py
```

Training took {steps} steps and {minutes:.0f} minutes on 2 CPU cores (float32)
that other programs used at the same time. The run was interrupted several
times to change the mix of tasks; the command trains with the final mix from
the start, so its weights and its table will differ a little.

## Accuracy

All questions were held out of training: pairs of numbers, combinations of
country and wording, names with ages and cities, words, and code words; only
the small facts (opposites, days and months) were all trained. An answer is
right when greedy decoding gives exactly the expected text and then stops. The
margin is the distance between the best and the second best logit that 99 % of
the answers' tokens exceed.

Weights rounded to bfloat16, activations in float32:

{exact}

Weights and activations in bfloat16:

{rounded}

## Limits

Training used contexts of up to 2,600 tokens; the shipped weights also found 35
of 36 code words in texts of 3,000 to 4,000 tokens. Answers to other kinds of
questions are a polite refusal or nonsense, numbers above 100 are not
understood, and stories are put together from a small stock of phrases. Where a
story may go on in several ways the best two tokens can be close, so greedy
stories may differ between machines; the facts, sums and code words have wide
margins.
"""


def model_card(params: Params, exact: dict[str, Score], rounded: dict[str, Score], steps: int, seconds: float) -> str:
    return _CARD.format(
        millions=sum(value.size for value in params.values()) / 1e6,
        steps=f"{steps:,}",
        minutes=seconds / 60,
        exact=table(exact),
        rounded=table(rounded),
    )
