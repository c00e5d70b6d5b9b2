"""The card of the demo model that sees."""

from demo_model.network import Params
from demo_model.seeing import Sight, table

_CARD = """\
---
license: apache-2.0
language: en
library_name: jaxpaged
pipeline_tag: image-text-to-text
---

# The jaxpaged demo model, with eyes

`demo-vision` is [demo](../demo/README.md) with a SigLIP tower of {millions:.2f} million parameters: Gemma 3 with
pictures (`Gemma3ForConditionalGeneration`), of 96x96 pixels in patches of 8, pooled to 36 tokens each. It exists to
show and to test the engine. Its index takes the text model's weights from that one's folder, so that they are there
once; they were frozen while tower and projector learned to answer through them, and text alone has the answers of
`demo`.

Pictures, weights and this table were made by one script, without outside data:

```
python scripts/train_demo_eyes.py
```

It knows drawings on a light ground: circles, squares, triangles, stars and crosses in red, blue, green, yellow, black
and purple, numbers below 100, and bars. It tells colour, shape and place of a lone shape, how many shapes there are,
and which bar is the tallest. Of numbers, of one among several shapes, and of one of two pictures it is right about as
often as not. Ask it in the words that it was trained with:

| picture | questions |
|---|---|
| one shape | What is in the picture? What colour is it? What shape is it? Where is it? |
| several shapes | How many shapes are there? How many stars are there? What colour is the star? Which shape is red? |
| a number | What number is this? |
| bars | Which bar is the tallest? |
| two pictures of one shape | What is in the first picture? What is in the second picture? |

## Accuracy

The pictures are drawn anew, and the numbers were held out of training. An answer is right when greedy decoding gives
exactly the expected text and then stops. A blind model is one that knows all about the questions and sees nothing: it
gives to each question the answer that is right most often. Weights rounded to bfloat16, activations in float32:

{found}

## Limits

It does not read words, it does not compare two pictures, and photographs mean nothing to it. Lessons on words, on the
smallest bar, and on whether two shapes are alike were tried for half an hour of training: the answers stayed those of
a blind model. Lessons on numbers stopped while their answers were still getting better.

Training took an hour on 2 CPU cores (float32) that other programs used at the same time, in several starts with
changes of tasks between them; the command trains with the final tasks from the start, so its weights and its table will
differ a little.
"""


def card_of_eyes(params: Params, found: dict[str, Sight]) -> str:
    of_eyes = (value for name, value in params.items() if not name.startswith("heads."))
    return _CARD.format(millions=sum(value.size for value in of_eyes) / 1e6, found=table(found))
