"""What waits to be copied off the device: in which order it goes, and what becomes of it when its blocks change."""

from jaxpaged.core.kv_cache.block_pool import BlockPool
from jaxpaged.core.kv_cache.groups import CacheGroup
from jaxpaged.core.kv_transfer.saves import Save, Saves
from jaxpaged.kv_cache_spec import AttentionSpec
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.pieces import Piece


def made(num_blocks=8):
    pool = BlockPool(num_blocks)
    return pool, Saves((CacheGroup(0, AttentionSpec(4, 1, 8, 4), pool, 4),))


def kept(pool, saves, step_id, number):
    """A piece in a block that is free and has its content."""
    (block,) = pool.get_new_blocks(1)
    pool.cache(block, bytes([number]))
    pool.free_blocks([block])
    page = PageContent(PageKey(bytes([number]) * 32, 0), None, (number,))
    save = Save(step_id, Piece((page,), (block.block_id,)))
    saves.add(save)
    return block, save


def test_pieces_go_in_their_order_once_their_steps_are_dispatched():
    pool, saves = made()
    all_of_them = [kept(pool, saves, step_id, step_id)[1] for step_id in (1, 2, 3)]
    assert saves.take(2, 9) == all_of_them[:1] and saves.take(None, 1) == all_of_them[1:2]
    saves.add_first(all_of_them[:2])
    assert saves.take(None, 9) == all_of_them and not saves


def test_what_is_given_out_is_urgent_and_what_is_in_doubt_is_nothing():
    pool, saves = made(4)
    (first, one), (second, _), (_, three) = (kept(pool, saves, 1, number) for number in (1, 2, 3))
    pool.uncache(second)
    assert pool.get_new_blocks(1) == [first]
    assert saves.take_urgent() == [one] and saves.take_urgent() == []
    assert saves.take(None, 9) == [three] and not saves, "nobody knows what the second block holds"


def test_what_waits_again_waits_for_the_newer_step_and_block():
    pool, saves = made()
    kept(pool, saves, 1, 1)
    saves.discard([PageKey(bytes([9]) * 32, 0)])
    page = saves.take(None, 9)[0].piece.pages[0]
    block, _ = kept(pool, saves, 1, 2)
    newer = Save(5, Piece((page,), (block.block_id,)))
    saves.add(newer)
    saves.discard([PageKey(bytes([2]) * 32, 0)])
    assert saves.take(5, 9) == [] and page.key in saves
    assert pool.get_new_blocks(7) and saves.take_urgent() == [newer]
