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
and purple, numbers below 100, words of three to five small letters, and bars. Ask it in the words that it was trained
with:

| picture | questions |
|---|---|
| one shape | What is in the picture? What colour is it? What shape is it? Where is it? |
| several shapes | How many shapes are there? How many stars are there? What colour is the star? Which shape is red? |
| a number | What number is this? What colour is it? |
| a word | What word is this? How do you spell it? What colour is it? |
| bars | Which bar is the tallest? Which bar is the smallest? |
| two pictures of one shape | What is in the first picture? Do they have the same colour? Do they have the same shape? |
| two pictures of several | Which picture has more shapes? How many shapes are in the first picture? |

## Accuracy

The pictures are drawn anew. Numbers were held out of training; of words, those in the colour in which they are asked
here; and the words to be spelled are invented and were never drawn before. An answer is right when greedy decoding
gives exactly the expected text and then stops: "No, red and blue." is wrong where one of the colours is. A blind model
is one that knows all about the questions and sees nothing: it gives to each question the answer that is right most
often. Weights rounded to bfloat16, activations in float32:

{found}

## Limits

It reads one typeface, that of Pillow, and of words the 40 that it was trained with; others it spells. Which of several
shapes has a colour it tells of four in five. Photographs mean nothing to it.

It was trained on an H200 that other programs used at the same time: for 46 seconds (1,162 steps of 128 rows through the
text model) after 100 in which programs were compiled, and in another two minutes from the checkpoint `steady` on,
compiling included (`--minutes 1.9 --resume`). How many steps the minutes have room for differs, so the command's
weights and table differ a little, too.
"""


def card_of_eyes(params: Params, found: dict[str, Sight]) -> str:
    of_eyes = (value for name, value in params.items() if not name.startswith("heads."))
    return _CARD.format(millions=sum(value.size for value in of_eyes) / 1e6, found=table(found))
