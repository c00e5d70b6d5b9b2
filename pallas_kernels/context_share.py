"""A context that lies with several holders: which of a block's slots each has, and where tokens stand among its own.

A block of tokens is cut into as many pieces as there are holders, and each holds the same piece of every block. So
block ids mean the same to all. Of a context's first tokens a holder has some, in their order, and it counts slots as if
there were no others: a query sees the first few of them. Knows no kernel, no device and no request.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp


class ContextShare(NamedTuple):
    """Piece `nth` of `count`, in blocks of which a holder has `slots` each."""

    nth: Any
    count: int
    slots: int

    def num_held(self, length: Any) -> Any:
        """How many of the first `length` tokens of a context the holder has."""
        block = self.count * self.slots
        return length // block * self.slots + jnp.clip(length % block - self.nth * self.slots, 0, self.slots)

    def place(self, position: Any) -> tuple[Any, Any, Any]:
        """(the block of the context in which a token lies, its slot in the holder's piece, whether it has it)."""
        piece = position // self.slots
        return piece // self.count, position % self.slots, piece % self.count == self.nth


def places_here(position: Any, slots: int, share: ContextShare | None) -> tuple[Any, Any, Any, Any]:
    """(block, slot and whether it is here, as `ContextShare.place` says, and the last slot here up to a position, -1
    for none). Blocks have `slots` slots here. `share` None: there is no other holder."""
    if share is None:
        return position // slots, position % slots, True, position
    assert share.slots == slots, (share, slots)
    return *share.place(position), share.num_held(position + 1) - 1
