"""Loads and stores of heads in Triton itself, in vectors of powers of two: what pieces.py does for Pallas.

This module knows nothing of attention. Letters beside the package's: X rows of a tile, P a piece of H.
"""

import triton
import triton.language as tl


@triton.jit
def load_pieces(start_X, mask_X, heads: tl.constexpr):
    """The heads that the pointers `start_X` point to, as pieces [X, P]; zero where masked. None masks nothing."""
    result = ()
    for i in tl.static_range(len(heads.pieces)):
        column_P = heads.pieces[i][0] + tl.arange(0, heads.pieces[i][1])
        pointer_XP = start_X[:, None] + column_P[None, :]
        if heads.pieces[i][0] + heads.pieces[i][1] > heads.head_dim:
            mask_XP = tl.broadcast_to((column_P < heads.head_dim)[None, :], pointer_XP.shape)
            if mask_X is not None:
                mask_XP = mask_XP & mask_X[:, None]
            result = result + (tl.load(pointer_XP, mask=mask_XP, other=0.0),)
        elif mask_X is not None:
            result = result + (tl.load(pointer_XP, mask=mask_X[:, None], other=0.0),)
        else:
            result = result + (tl.load(pointer_XP),)
    return result


@triton.jit
def store_pieces(start_X, values, mask_X, heads: tl.constexpr):
    """The reverse of `load_pieces`, in the type of what `start_X` points to."""
    for i in tl.static_range(len(heads.pieces)):
        column_P = heads.pieces[i][0] + tl.arange(0, heads.pieces[i][1])
        mask_XP = mask_X[:, None] & (column_P < heads.head_dim)[None, :]
        tl.store(start_X[:, None] + column_P[None, :], values[i].to(start_X.dtype.element_ty), mask=mask_XP)
