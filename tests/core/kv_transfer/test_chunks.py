"""Chunks that are larger than a window are saved whole, piece by piece, however prompts are cut into steps."""

import pytest

from jaxpaged.kv_cache_spec import EncoderCacheConfig
from jaxpaged.kv_connector.base import KVConnectorBase
from tests.core.kv_transfer.test_pieces import ENDLESS, PAGE, Sharing
from tests.core.simulation import illustrated, prompt_of

SIZE = 32


class Tiers:
    """Takes pages of the chunks that it was told are computed, or are being, and lacks each until it came."""

    chunk_tokens = SIZE

    def __init__(self):
        self.wanted, self.came, self.introduced = {}, {}, False

    def introduce(self, token_ids, hashes, end):
        self.introduced = True

    def collect(self, token_ids, hashes, end):
        pages = set(hashes[(end - SIZE) // PAGE : end // PAGE])
        self.wanted.setdefault(end, pages)
        return True


class ChunkConnector(KVConnectorBase):
    """Its pages are in chunks."""

    chunk_tiers = None


class Chunked(Sharing):
    """An engine that saves chunks only."""

    def __init__(self, windows, **options):
        self.tiers, self.groups = Tiers(), len(windows)
        connector = ChunkConnector()
        connector.chunk_tiers = self.tiers
        super().__init__({}, 8, windows, connector, **options)

    def keep(self, piece):
        super().keep(piece)
        for page in piece.pages:
            if any(page.key.block_hash in pages for pages in self.tiers.wanted.values()):
                self.tiers.came.setdefault(page.key.block_hash, set()).add(page.key.group)

    def whole(self):
        """The ends of chunks of which all pages of all groups came while they were wanted."""
        came = self.tiers.came
        return {
            end
            for end, pages in self.tiers.wanted.items()
            if all(len(came.get(each, ())) == self.groups for each in pages)
        }


@pytest.mark.parametrize("windows", [(None,), (None, 9), (None, 17, 9), (20,), (None, 40)])
@pytest.mark.parametrize("step", [8, 24, 64])
def test_every_chunk_of_a_prompt_is_saved_whole(windows, step):
    engine = Chunked(windows, max_num_batched_tokens=step)
    engine.answers([prompt_of(100, 1)], max_tokens=3)
    assert engine.whole() >= {32, 64, 96}


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_a_chunk_that_an_answer_fills_is_saved_while_the_prefix_cache_has_it(windows):
    engine = Chunked(windows)
    engine.answers([prompt_of(40, 1)], max_tokens=30)
    assert engine.whole() >= {32, 64}


def test_a_chunk_that_shares_its_beginning_with_another_is_saved_whole():
    engine = Chunked((None, 9))
    first, second = prompt_of(48, 1), [*prompt_of(48, 1)[:40], *prompt_of(40, 2)]
    engine.answers([first, second], max_tokens=3, **ENDLESS)
    assert engine.whole() >= {32, 64}


def test_chunks_know_tokens_only_so_nobody_looks_for_those_of_pictures_nor_saves_them():
    engine = Chunked((None,), encoder=EncoderCacheConfig(20, 2, 40))
    prompt, features = illustrated(prompt_of(60), (40, "x", (20,)))
    engine.add("a", prompt, mm_features=features, **ENDLESS)
    engine.run()
    assert not engine.tiers.wanted and not engine.tiers.introduced
    engine.answers([prompt_of(70, 5)])
    assert engine.whole() >= {32, 64} and engine.tiers.introduced
