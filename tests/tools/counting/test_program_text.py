"""Bytes and collectives of programs, counted by hand on texts, and on programs that XLA compiled here."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.tools.counting.program_text import ProgramText

TPU = """HloModule step, is_scheduled=true

%fused_lookup (param_0: bf16[1000,64], param_1: s32[8]) -> bf16[8,64] {
  %param_0 = bf16[1000,64]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = s32[8]{0:T(256)S(1)} parameter(1)
  ROOT %gather.1 = bf16[8,64]{1,0:T(8,128)(2,1)} gather(%param_0, %param_1), offset_dims={1}, slice_sizes={1,64}
}

%fused_write (param_0.1: f32[100,16], param_1.1: f32[1,16], param_2: s32[]) -> f32[100,16] {
  %param_0.1 = f32[100,16]{1,0} parameter(0)
  %param_1.1 = f32[1,16]{1,0} parameter(1)
  %param_2 = s32[]{:T(128)S(6)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %dus = f32[100,16]{1,0} dynamic-update-slice(%param_0.1, %param_1.1, %param_2, %zero)
}

ENTRY %main (table: bf16[1000,64], ids: s32[8], weight: bf16[64,64]) -> bf16[8,64] {
  %table = bf16[1000,64]{1,0:T(8,128)(2,1)} parameter(0)
  %ids = s32[8]{0:T(256)S(1)} parameter(1)
  %weight = bf16[64,64]{1,0:T(8,128)(2,1)} parameter(2)
  %cache = f32[100,16]{1,0} parameter(3)
  %row = f32[1,16]{1,0} parameter(4)
  %at = s32[]{:T(128)S(6)} parameter(5)
  %looked = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} fusion(%table, %ids), kind=kLoop, calls=%fused_lookup
  %copy-start = (bf16[64,64]{1,0:S(1)}, bf16[64,64]{1,0}, u32[]{:S(2)}) copy-start(%weight), cross_program_prefetch_index=0
  %written = f32[100,16]{1,0} fusion(%cache, %row, %at), kind=kLoop, calls=%fused_write
  %copy-done = bf16[64,64]{1,0:S(1)} copy-done(%copy-start)
  %kernel = f32[100,16]{1,0} custom-call(%written, %row), custom_call_target="tpu_custom_call", output_to_operand_aliasing={{}: (0, {})}
  %slice-start = ((s8[800]{0}), s8[100]{0:S(1)}, s32[]{:S(2)}) slice-start(%eights), slice={[0:100]}
  %copy-start.1 = (bf16[64,64]{1,0:S(1)}, bf16[64,64]{1,0}, u32[]{:S(2)}) copy-start(%weight)
  ROOT %product = bf16[8,64]{1,0} dot(%looked, %copy-done), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""  # noqa: E501


SLICE_TO_SCATTER = (
    "dynamic-update-slice(%param_0.1, %param_1.1, %param_2, %zero)",
    "scatter(%param_0.1, %param_2, %param_1.1), to_apply=%add",
)
"""The same write as new latents are put into their cache."""


def test_memory_is_counted_by_space_and_tables_by_their_rows():
    lookup = 8 * 64 * 2  # rows read; they are written on the chip
    prefetch = 64 * 64 * 2  # read from main memory once a run, written on the chip
    write = 2 * 16 * 4  # the row, and its place in the cache
    part = 100  # of 800
    kernel = 16 * 4  # the row alone: the cache is changed in place
    product = 8 * 64 * 2  # both factors are on the chip
    expected = lookup + prefetch + write + part + kernel + product
    scattered = TPU.replace(*SLICE_TO_SCATTER)
    assert scattered != TPU
    assert [ProgramText(text, [100 * 16 * 4]).memory_bytes() for text in (TPU, scattered)] == [expected, expected]


NAMED = """HloModule step, is_scheduled=true

%graph (g: bf16[512,64], h: bf16[8,64]) -> f32[8,512] {
  %g = bf16[512,64]{1,0} parameter(0)
  %h = bf16[8,64]{1,0} parameter(1)
  ROOT %logits = f32[8,512]{1,0} dot(%h, %g), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (w: bf16[64,512], x: bf16[8,64]) -> f32[8] {
  %w = bf16[64,512]{1,0} parameter(0), metadata={op_name="params.layers[0].mlp.weight"}
  %x = bf16[8,64]{1,0} parameter(1), metadata={op_name="rows"}
  %turned = bf16[512,64]{1,0} copy(%w)
  %call = f32[8,512]{1,0} call(%turned, %x), to_apply=%graph
  %sent = f32[8,512]{1,0:S(5)} copy(%call)
  ROOT %drawn = f32[8]{0} fusion(%call), kind=kInput, calls=%most
}
"""


def test_bytes_of_weights_of_copies_of_them_and_of_logits_are_told_apart():
    text, logits = ProgramText(NAMED, vocabulary=512), 8 * 512 * 4
    copy, product, sent, drawn = text.region
    assert copy.bytes == 2 * copy.weights == 2 * 64 * 512 * 2, "what is written is no weight"
    assert (product.weights, product.logits) == (64 * 512 * 2, logits)
    assert product.bytes == product.weights + logits + 8 * 64 * 2
    assert (drawn.weights, drawn.logits, drawn.bytes) == (0, logits, logits + 32)
    assert text.num_host_transfers == 1 and sent.bytes == logits


COLLECTIVES = """HloModule step, is_scheduled=true

%async_part (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  ROOT %inner = f32[8]{0} all-gather(%p), dimensions={0}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %waited = f32[8]{0} all-reduce(%x), to_apply=%add
  %idle = (f32[8]{0}, f32[8]{0}) all-reduce-start(%waited), to_apply=%add
  %idle-done = f32[8]{0} all-reduce-done(%idle)
  %busy = (f32[2]{0}, f32[16]{0}) all-gather-start(%idle-done), dimensions={0}
  %work = f32[8]{0} fusion(%x), kind=kLoop, calls=%add
  %busy-done = f32[16]{0} all-gather-done(%busy)
  %other = ((f32[4]{0}), f32[8]{0}, s32[]) async-start(%work), calls=%async_part
  ROOT %end = f32[8]{0} async-done(%other)
}
"""


def test_a_collective_is_hidden_only_behind_work_between_its_start_and_its_end():
    found = ProgramText(COLLECTIVES).collectives()
    assert found.counts == {"all-reduce": 2, "all-gather": 2}
    assert (found.waited_bytes, found.hidden_bytes) == (2 * 32, 64 + 32)


FUSED = """HloModule step, is_scheduled=true

%scatter (p: f32[32]) -> f32[8] {
  %p = f32[32]{0} parameter(0)
  %sum = f32[32]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %part = f32[8]{0} dynamic-slice(%sum)
}

%multiply (q: f32[32]) -> f32[8] {
  %q = f32[32]{0} parameter(0)
  %whole = f32[32]{0} all-gather(%q), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %product = f32[8]{0} convolution(%whole, %q)
}

ENTRY %main (x: f32[32]) -> f32[8] {
  %x = f32[32]{0} parameter(0)
  %lone = f32[8]{0} fusion(%x), kind=kCustom, calls=%scatter
  %mixed = f32[8]{0} fusion(%x), kind=kCustom, calls=%multiply
  %moved = f32[32]{0} collective-permute(%x), source_target_pairs={{0,1}}
  %some = f32[32]{0} all-reduce(%x), replica_groups={{0,1,2},{3,4,5}}, to_apply=%add
  ROOT %part = f32[8]{0} reduce-scatter(%x), replica_groups=mesh['expert'=2,'tensor'=4] {'expert','tensor'}
}
"""


def test_a_collective_in_a_fusion_is_hidden_only_behind_a_product():
    found = ProgramText(FUSED).collectives()
    assert (found.waited_bytes, found.hidden_bytes) == (3 * 128 + 32, 128)


def test_what_a_device_sends_around_a_ring_depends_on_the_kind_and_on_how_many_take_part():
    sent = [(each.sent, each.hops) for each in ProgramText(FUSED).region]
    assert sent == [(2 * 96, 6), (96, 3), (128, 1), (pytest.approx(4 / 3 * 128), 4), (7 * 32, 7)]


@pytest.mark.parametrize(("rows", "width"), [(4000, 64), (50_000, 32)])
def test_a_lookup_that_xla_compiled_here_is_counted_by_its_rows(rows, width):
    table, ids = jax.ShapeDtypeStruct((rows, width), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    compiled = jax.jit(lambda table, ids: table[ids] * 2.0).lower(table, ids).compile()
    assert 8 * width * 4 <= ProgramText(compiled.as_text()).memory_bytes() < 12 * 8 * width * 4 + 1000


def test_a_product_that_xla_compiled_here_reads_its_weights_once():
    a, b = jax.ShapeDtypeStruct((8, 512), jnp.float32), jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    moved = ProgramText(jax.jit(jnp.dot).lower(a, b).compile().as_text()).memory_bytes()
    assert moved == 4 * (8 * 512 + 512 * 1024 + 8 * 1024)


def test_a_split_product_that_xla_compiled_here_has_its_collective():
    mesh = make_mesh(4)
    a = jax.ShapeDtypeStruct((8, 512), jnp.float32, sharding=NamedSharding(mesh, P(None, "tensor")))
    b = jax.ShapeDtypeStruct((512, 64), jnp.float32, sharding=NamedSharding(mesh, P("tensor")))
    compiled = jax.jit(jnp.dot, out_shardings=NamedSharding(mesh, P())).lower(a, b).compile()
    found = ProgramText(compiled.as_text()).collectives()
    assert found.counts == {"all-reduce": 1} and found.waited_bytes + found.hidden_bytes == 8 * 64 * 4
