import numpy as np
import pytest

from jaxpaged.errors import UsageError
from jaxpaged.messages import KVBlockMap
from jaxpaged.tools.pictures.block_map import NULL_BLOCK, BlockMap, character_of, draw_blocks
from tests.tools.pictures.records import llm_under_way, overprinted, without_matplotlib


def block_map(owner, num_owners=None, cached=(), request_ids=("a", "<b>")):
    """Blocks 1, 2, ... ; the null block is put in front."""
    owner = np.array([-1, *owner])
    num_owners = np.array([0, *num_owners]) if num_owners is not None else (owner >= 0).astype(int)
    return BlockMap(KVBlockMap(16, list(request_ids), owner, num_owners, np.isin(np.arange(len(owner)), cached)))


def test_a_block_is_shared_or_a_request_s_or_cached_or_free():
    blocks = block_map([0, 0, 1, -1, -1], num_owners=[2, 1, 1, 0, 0], cached=[1, 4])
    assert blocks.text().splitlines()[0] == "#ab+."
    assert blocks.counts == {"a": 1, "<b>": 1, "shared": 1, "cached": 1, "free": 1}


def test_lines_are_as_wide_as_asked_and_many_blocks_share_a_character():
    blocks = block_map([0] * 60 + [-1] * 40)
    assert blocks.text(width=25).splitlines()[:4] == ["a" * 25, "a" * 25, "a" * 10 + "." * 15, "." * 25]
    few = blocks.text(width=10, max_lines=2).splitlines()
    assert few[:2] == ["a" * 10, "a" * 2 + "." * 8]
    assert "one character is 5 blocks of 16 tokens" in few


def test_what_block_0_is_and_where_counting_begins_is_said():
    blocks = block_map([0, 1, -1])
    assert NULL_BLOCK in blocks.text().splitlines() and NULL_BLOCK in blocks._repr_html_()
    assert draw_blocks(blocks).axes[0].get_xlabel() == NULL_BLOCK


@pytest.mark.parametrize("num_blocks", [1, 40, 5000])
def test_no_text_of_a_picture_lies_over_another(num_blocks):
    names = [f"a-request-with-a-name-of-{i}" for i in range(12)]
    pairs, beyond = overprinted(draw_blocks(block_map([i % 14 - 2 for i in range(num_blocks)], request_ids=names)))
    assert not pairs and not beyond


def test_many_requests_are_named_only_in_part():
    blocks = block_map(range(100), request_ids=[f"r{i}" for i in range(100)])
    assert "request r10 and 89 more: 90 blocks" in blocks.text()
    assert len(blocks.text().splitlines()) < 20


def test_requests_under_way_share_their_beginning(tmp_path):
    blocks = llm_under_way().blocks()
    assert blocks.counts["shared"] == 2
    assert {"r0", "r1", "r2"} <= blocks.counts.keys()
    assert sum(blocks.counts.values()) == 63, "all blocks but the null block"
    assert "request r1" in repr(blocks)


def test_html_colours_every_block_and_escapes_names():
    shown = block_map([0, 1, -1])._repr_html_()
    assert shown.count('title="request a"') == 1
    assert "<b>" not in shown
    assert "&lt;b&gt;" in shown


def test_the_picture_labels_block_ids_and_explains_its_colours(tmp_path):
    blocks = llm_under_way().blocks()
    figure = draw_blocks(blocks)
    assert figure.axes[0].get_ylabel() == "block id"
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [f"{character_of(kind)}   {label}" for kind, label in blocks.legend()]
    assert {text.get_text() for text in figure.axes[0].texts} == {"a", "b", "c", "#"}, "free blocks need no letter"
    assert blocks.save(tmp_path / "blocks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("num_blocks", [1, 7, 5000])
def test_small_and_large_caches_can_be_drawn(num_blocks, tmp_path):
    blocks = block_map([0] * num_blocks)
    assert blocks.save(tmp_path / "blocks.svg").stat().st_size > 1000
    assert blocks._repr_html_().count("request a") <= 4100


def test_without_matplotlib_text_and_html_remain(tmp_path, monkeypatch):
    blocks = block_map([0])
    with without_matplotlib(monkeypatch):
        assert "request a" in blocks._repr_html_()
        with pytest.raises(UsageError, match="pip install"):
            blocks.save(tmp_path / "blocks.png")
