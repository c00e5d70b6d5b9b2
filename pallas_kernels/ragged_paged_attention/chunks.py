"""Attention that does not look beyond the chunk of positions in which a query stands (Llama 4's local layers).

What a row has in a chunk is a row by itself, whose context begins with the chunk: its tokens attend causally to nothing
else, and their keys and values lie in blocks of the row's table that only this chunk uses. So a step of such rows is a
step like others, and no kernel knows of chunks. It has more rows: one more for every border that lies between two
tokens of a row. Knows no backend.

Letters: C chunks of rows in the step.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.token_places import token_places


def most_chunks(num_rows: int, num_tokens: int, chunk: int, decodes_only: bool) -> int:
    """Into how many chunks the tokens of all rows fall at most: a row with n of them crosses n / chunk + 1 borders, and
    none if it has but one."""
    if decodes_only:
        return num_rows
    return min(num_tokens, num_rows + min(num_rows, num_tokens // 2) + num_tokens // chunk)


def rows_of_chunks(
    query_start_loc_R1: jax.Array,
    seq_lens_R: jax.Array,
    block_tables_RM: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    chunk: int,
    decodes_only: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The same step with a row for each chunk of a row: (num_seqs, query_start_loc_C1, seq_lens_C, block_tables_CM).

    `chunk` is a multiple of `block_size`. The other arguments are those of `make_metadata`.
    """
    assert chunk % block_size == 0, (chunk, block_size)
    num_rows, width = block_tables_RM.shape
    num_chunks = most_chunks(num_rows, num_tokens, chunk, decodes_only)
    row_T, position_T, real_T = token_places(query_start_loc_R1, seq_lens_R, num_tokens)
    is_first_T = jnp.arange(num_tokens) == query_start_loc_R1[row_T]
    begins_T = real_T & (is_first_T | (position_T % chunk == 0))
    num_seqs = jnp.sum(begins_T, dtype=jnp.int32)
    (token_C,) = jnp.nonzero(begins_T, size=num_chunks, fill_value=0)
    is_used_C = jnp.arange(num_chunks) < num_seqs
    num_real = query_start_loc_R1[-1]
    start_C1 = jnp.append(jnp.where(is_used_C, token_C, num_real), num_real).astype(jnp.int32)
    row_C, position_C = row_T[token_C], position_T[token_C]
    length_C = jnp.where(is_used_C, position_C % chunk + start_C1[1:] - start_C1[:-1], 0)
    blocks_M = jnp.arange(min(chunk // block_size, width))
    block_CM = (position_C // chunk * (chunk // block_size))[:, None] + blocks_M
    return num_seqs, start_C1, length_C, block_tables_RM.at[row_C[:, None], block_CM].get(mode="clip")
