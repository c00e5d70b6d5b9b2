"""Pictures in maps of KV blocks: hatched blocks, the encoder cache, and thumbnails of what a cache still has."""

import numpy as np
import pytest
from matplotlib.collections import PatchCollection

from jaxpaged.messages import KVBlockMap
from jaxpaged.tools.pictures.block_map import BlockMap, draw_blocks
from jaxpaged.tools.pictures.seen_pictures import MOST_SHOWN
from tests.multimodal.drawn import drawn
from tests.tools.pictures.records import overprinted


class Thumbnails:
    """Has pictures with an even first byte of their key."""

    def thumbnail(self, key):
        return None if key[0] % 2 else np.asarray(drawn(20, 10, seed=key[0]))


def block_map(num_pictures=2, pages=(0, 0, 1, -1), held=(0,), num_blocks=10, thumbnails=None):
    """Blocks 1 to 6 belong to request a; 2 and 3 have tokens of the first picture, 4 of the second."""
    owner = np.full(num_blocks + 1, -1)
    owner[1:7] = 0
    picture = np.full(num_blocks + 1, -1)
    picture[2:5] = [0, 0, 1]
    found = KVBlockMap(16, ["a"], owner, (owner >= 0).astype(int), np.zeros(num_blocks + 1, bool))
    found.picture_keys = [bytes([number]) * 32 for number in range(num_pictures)]
    found.picture, found.encoder_picture, found.encoder_held = picture, np.array(pages), np.isin(pages, held)
    return BlockMap(found, thumbnails)


def test_text_has_the_encoder_cache_and_where_each_picture_is():
    lines = block_map().text().splitlines()
    assert lines[0] == "aaaaaa...."
    begin = lines.index("encoder cache: 3 of 4 pages in use; one character is 1 of them")
    assert lines[begin + 1 :] == [
        "112.",
        "1 picture 1 (00000000): KV blocks 2, pages 2 held",
        "2 picture 2 (01010101): KV blocks 1, pages 1 cached, reusable",
    ]
    assert block_map(num_pictures=MOST_SHOWN + 3).text().splitlines()[-1] == "and 3 more pictures"


def test_html_stripes_blocks_with_pictures_and_shows_those_that_are_to_be_had():
    shown = block_map(thumbnails=Thumbnails())._repr_html_()
    assert shown.count("repeating-linear-gradient") == 3
    assert shown.count('<img src="data:image/png;base64,') == 1, "the second is gone"
    assert "picture 2 (01010101): KV blocks 1" in shown
    assert "<img" not in block_map()._repr_html_()


@pytest.mark.parametrize(("num_pictures", "num_pages", "num_blocks"), [(2, 4, 10), (14, 5000, 5000)])
def test_the_drawing_hatches_blocks_and_no_text_lies_over_another(num_pictures, num_pages, num_blocks, tmp_path):
    pages = [i % (num_pictures + 1) - 1 for i in range(num_pages)]
    blocks = block_map(num_pictures, pages, num_blocks=num_blocks, thumbnails=Thumbnails())
    figure = draw_blocks(blocks)
    (hatched,) = [each for each in figure.axes[0].collections if isinstance(each, PatchCollection)]
    assert hatched.get_hatch() and len(hatched.get_paths()) == (3 if num_blocks == 10 else 1), "of groups most blocks"
    pairs, beyond = overprinted(figure)
    assert not pairs and not beyond
    assert blocks.save(tmp_path / "blocks.png").read_bytes().startswith(b"\x89PNG")
