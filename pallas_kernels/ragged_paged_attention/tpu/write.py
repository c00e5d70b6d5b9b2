"""Writing into the cache: new keys and values by a kernel, scales of tokens, which are few, by XLA.

Whole tiles are read, changed and written back.

A slot is a row of a tile, and copies move whole tiles: so the slots around the new ones are read too, unless all of
a group is new. Several groups are on their way at once. This module knows nothing of attention.

Letters beside the package's: W lanes of a slot, E slots of a group.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu.operands import UNCHECKED
from pallas_kernels.ragged_paged_attention.tpu.plan import Writes
from pallas_kernels.token_places import NOWHERE

IN_FLIGHT = 8
"""Groups that are read ahead; as many again are being written back."""


def write_tokens(
    new_TKW: jax.Array, kv_BKSW: jax.Array, writes: Writes, group: int, *, vmem_limit_bytes: int, interpret: Any
) -> jax.Array:
    """The cache with the rows of `new_TKW`, float32, in their slots. Donate the cache and it is updated in place."""
    _, K, W = new_TKW.shape
    whole = pl.BlockSpec(memory_space=pltpu.HBM)
    scalars = [x.reshape(-1) for x in jax.tree.leaves(writes)]
    slots = 2 * IN_FLIGHT
    call = pl.pallas_call(
        functools.partial(_kernel, group),
        out_shape=jax.ShapeDtypeStruct(kv_BKSW.shape, kv_BKSW.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[whole, whole],
            out_specs=whole,
            scratch_shapes=[
                pltpu.VMEM((slots, K, group, W), kv_BKSW.dtype),
                pltpu.VMEM((slots, group, K, W), jnp.float32),
                pltpu.SemaphoreType.DMA((3, slots)),
            ],
        ),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes, **UNCHECKED),
        interpret=interpret,
        name="paged_attention_write",
    )
    return call(*scalars, new_TKW, kv_BKSW)


@dataclasses.dataclass(frozen=True)
class _Copies:
    """Everything that moves for group z, in buffer z mod `buffers`."""

    writes: Writes
    group: int
    new_hbm: Any
    kv_hbm: Any
    old_ref: Any  # [buffers, K, E, W]
    new_ref: Any  # [buffers, E, K, W]
    semaphores: Any  # [3, buffers]

    def buffer(self, z: jax.Array) -> jax.Array:
        return lax.rem(z, self.old_ref.shape[0])

    def is_partial(self, z: jax.Array) -> jax.Array:
        return self.num_tokens(z) < self.group

    def num_tokens(self, z: jax.Array) -> jax.Array:
        return self.writes.end_Z[z] - self.writes.first_Z[z]

    def slots(self, z: jax.Array) -> Any:
        start = pl.multiple_of(self.writes.slot_Z[z], self.group)
        return self.kv_hbm.at[self.writes.block_Z[z], :, pl.ds(start, self.group)]

    def read(self, z: jax.Array) -> Any:
        b = self.buffer(z)
        return pltpu.make_async_copy(self.slots(z), self.old_ref.at[b], self.semaphores.at[0, b])

    def write_back(self, z: jax.Array) -> Any:
        b = self.buffer(z)
        return pltpu.make_async_copy(self.old_ref.at[b], self.slots(z), self.semaphores.at[1, b])

    def token(self, z: jax.Array, i: jax.Array) -> Any:
        b = self.buffer(z)
        return pltpu.make_async_copy(
            self.new_hbm.at[self.writes.token_Z[z] + i], self.new_ref.at[b, i], self.semaphores.at[2, b]
        )

    def start(self, z: jax.Array) -> None:
        pl.when(self.is_partial(z))(lambda: self.read(z).start())
        pl.loop(0, self.num_tokens(z))(lambda i: self.token(z, i).start())

    def await_start(self, z: jax.Array) -> None:
        pl.when(self.is_partial(z))(lambda: self.read(z).wait())
        pl.loop(0, self.num_tokens(z))(lambda i: self.token(z, i).wait())


def write_scales(scale_TK2: jax.Array, scales_BK2L: jax.Array, writes: Writes) -> jax.Array:
    """`scales_BK2L` with those of the new tokens; `writes` are whole blocks, whose slots lie along lanes L.

    Blocks are replaced as a whole: a scatter of single slots would make XLA transpose all scales, there and back.
    """
    slot_L = jnp.arange(scales_BK2L.shape[-1])
    first_Z1, end_Z1 = writes.first_Z[:, None], writes.end_Z[:, None]
    token_ZL = writes.token_Z[:, None] + slot_L - first_Z1
    new_ZK2L = scale_TK2.at[token_ZL].get(mode="clip").transpose(0, 2, 3, 1)
    is_new_ZL = (slot_L >= first_Z1) & (slot_L < end_Z1)
    old_ZK2L = scales_BK2L.at[writes.block_Z].get(mode="clip")
    replaced_ZK2L = jnp.where(is_new_ZL[:, None, None], new_ZK2L, old_ZK2L)
    in_use_Z = jnp.arange(len(writes.block_Z)) < writes.count
    return scales_BK2L.at[jnp.where(in_use_Z, writes.block_Z, NOWHERE)].set(replaced_ZK2L, mode="drop")


def _kernel(group: int, *refs: Any) -> None:
    num = len(dataclasses.fields(Writes))
    count_ref, *lists = refs[:num]
    new_hbm, _, kv_hbm, old_ref, new_ref, semaphores = refs[num:]
    writes = Writes(count_ref[0], *lists)
    copies = _Copies(writes, group, new_hbm, kv_hbm, old_ref, new_ref, semaphores)
    count, buffers = writes.count, old_ref.shape[0]

    pl.loop(0, jnp.minimum(count, IN_FLIGHT))(copies.start)

    @pl.loop(0, count)
    def _(z):
        ahead = z + IN_FLIGHT

        @pl.when(ahead < count)
        def _():
            pl.when(ahead >= buffers)(lambda: copies.write_back(ahead - buffers).wait())
            copies.start(ahead)

        copies.await_start(z)
        _blend(copies, z)
        copies.write_back(z).start()

    pl.loop(jnp.maximum(count - buffers, 0), count)(lambda z: copies.write_back(z).wait())


def _blend(copies: _Copies, z: jax.Array) -> None:
    """Put the new tokens of group z over what was read."""
    b = copies.buffer(z)
    first = copies.writes.first_Z[z]

    def put(i, old_KEW):
        slot = lax.broadcasted_iota(jnp.int32, old_KEW.shape, 1)
        new_K1W = copies.new_ref[b, i][:, None, :]
        return jnp.where(slot == first + i, new_K1W, old_KEW)

    old_KEW = copies.old_ref[b].astype(jnp.float32)
    new_KEW = lax.fori_loop(0, copies.num_tokens(z), put, old_KEW)
    copies.old_ref[b] = new_KEW.astype(copies.old_ref.dtype)
