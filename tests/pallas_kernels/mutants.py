"""Deliberate mistakes in the kernels, which the tests of their op must notice. `scripts/mutate.py` tries them.

Mistakes in attention's reference and in its TPU kernels are listed with their tests, which try them themselves.
"""

from tests.mutants import mutants_of
from tests.pallas_kernels.ragged_paged_attention.mutants import MUTANTS as OF_ATTENTION

_of = mutants_of(lambda module: (f"tests/pallas_kernels/{module.split('/')[1]}",))
_of_products = mutants_of(lambda module: ("tests/pallas_kernels/few_rows_matmul", "tests/pallas_kernels/int4_matmul"))

MUTANTS = (
    *_of(
        "pallas_kernels/kv_copy/reference.py",
        "reference or gathered",
        (
            "padding as a source clears its target",
            "jnp.where(in_pool(source_P, num_blocks), target_P, NOWHERE)",
            "target_P + 0 * source_P",
        ),
        ("negative ids count from the end", "(id_P >= 0) & ", ""),
        ("padding gathers something", "fill_value=0", "fill_value=1"),
    ),
    *_of(
        "pallas_kernels/kv_copy/tpu.py",
        "tpu",
        ("sources and targets are exchanged", "x_B.at[source], x_B.at[target]", "x_B.at[target], x_B.at[source]"),
        ("only the first array is copied", "for x_B in pool:", "for x_B in pool[:1]:"),
        ("the last transfers are not waited for", "num_pairs + DEPTH,", "num_pairs,"),
        ("transfers are waited for once less", "pair >= DEPTH)", "pair > DEPTH)"),
        ("the id after the last block is one", "(target < num_blocks)", "(target <= num_blocks)"),
    ),
    *_of(
        "pallas_kernels/kv_copy/gpu.py",
        "gpu",
        (
            "the last element of a block stays",
            "jnp.arange(piece) < block_elements)",
            "jnp.arange(piece) < block_elements - 1)",
        ),
        ("padding as a target writes somewhere", " & (target >= 0) & (target < num_blocks)", ""),
        ("only the first piece is copied", "pl.ds(first, piece)", "pl.ds(0, piece)"),
    ),
    *_of(
        "pallas_kernels/grouped_matmul/cpu/tiles.py",
        "cpu",
        (
            "all experts have the weight of the first",
            "self._weight = b.address(super().operand(1), first)",
            "self._weight = super().operand(1)",
        ),
        (
            "all experts have the scales of the first",
            "scales_at = b.mul(b.mul(expert, frame.extent(1, 1)), whole(4))",
            "scales_at = whole(0)",
        ),
        ("nothing is scaled", "self.b.fmul(total, scale)", "total"),
        (
            "chunks are counted as if they were small",
            "chunks_of(b, frame.extent(1, 1), size)",
            "chunks_of(b, frame.extent(1, 1))",
        ),
        (
            "what is left of an expert's tokens is forgotten",
            "for count in range(1, TILE_ROWS):",
            "for count in range(2, TILE_ROWS):",
        ),
        ("padding keeps what was there", "    b.clear(", "    ("),
        ("a chunk is every expert's first", "b.srem(i, per_expert)", "whole(0)"),
        (
            "inputs beyond the last register are not weighed",
            "b.fmul(b.read(F32, weight, weight_at, align=4), b.read",
            "b.fadd(b.read(F32, weight, weight_at, align=4), b.read",
        ),
    ),
    *_of(
        "pallas_kernels/grouped_matmul/cpu/__init__.py",
        "cpu",
        ("groups of inputs have one scale", "if scale_ECF is not None and scale_ECF.shape[1] != 1:", "if False:"),
        (
            "the padding begins with the last expert",
            ".set(jnp.cumsum(group_sizes_E))",
            ".set(jnp.cumsum(group_sizes_E) - group_sizes_E)",
        ),
    ),
    *_of(
        "pallas_kernels/sort_by_group/cpu/counting.py",
        "order",
        ("counts are not cleared", "    b.clear(", "    ("),
        (
            "none is beyond the counts",
            "b.smaller(b.integer(groups, thing), b.sub(num_counts, whole(1)))",
            "b.integer(groups, thing)",
        ),
        (
            "all of a group stand in one place",
            "put(b.add(place, whole(1)), counts, group)",
            "put(place, counts, group)",
        ),
        ("groups begin where they end", "put(before[0], counts, group)", "put(b.add(before[0], count), counts, group)"),
    ),
    *_of(
        "pallas_kernels/top_k_top_p/search.py",
        "kth_largest",
        ("the search ends two bits early", "NUM_PASSES = 16", "NUM_PASSES = 15"),
        ("the search wants more than enough", "weight >= need", "weight > need"),
    ),
    *_of(
        "pallas_kernels/top_k_top_p/xla.py",
        "xla",
        ("top_p near 1 is ignored", "threshold_if(top_p_S < 1.0,", "threshold_if(top_p_S < 0.95,"),
        ("top_p counts what top_k cut", "jnp.where(logits_SV >= floor_S[:, None], weights_SV, 0.0)", "weights_SV"),
        ("min_p is forgotten", "top_S + jnp.log(min_p_S)", "jnp.log(0 * min_p_S)"),
    ),
    *_of(
        "pallas_kernels/top_k_top_p/tpu.py",
        "tpu",
        ("the rest of a vocabulary is not read", "if V % LANES:", "if not V:"),
        ("registers beyond the loop are not read", "* UNROLL, num_whole):", "* UNROLL, 0):"),
        ("the rest has no weights", "range(num_whole // UNROLL * UNROLL * LANES, V,", "range(V, V,"),
        ("top_p is searched where top_k is wanted", "wanted_2I[1, tile]", "wanted_2I[0, tile]"),
        ("the nucleus forgets the floor", "jnp.maximum(floor_S1, nucleus_S1)", "nucleus_S1"),
    ),
    *_of(
        "pallas_kernels/top_k_top_p/gpu.py",
        "gpu",
        ("columns beyond the vocabulary count", "other=-jnp.inf", "other=0.0"),
        ("top_p counts what top_k cut", "total([floor])", "total([floor - 1e30])"),
    ),
    *_of(
        "pallas_kernels/top_k_top_p/reference.py",
        "reference",
        ("the k-th stays out", "top_k_S - 1, 0,", "top_k_S - 2, 0,"),
        ("a token counts itself", "axis=1) - weight_SV", "axis=1)"),
    ),
    *_of(
        "pallas_kernels/quantized_matmul/reference.py",
        "reference",
        ("zeros are added", "values_FC - weight.zero_CF", "values_FC + weight.zero_CF"),
        ("tokens' own scales are forgotten", "out_TF * scale_T[:, None] * scale_CF", "out_TF * scale_CF"),
    ),
    *_of(
        "pallas_kernels/quantized_matmul/tpu.py",
        "tpu",
        ("every tile of inputs starts from nothing", "pl.when(tile == 0)", "pl.when(tile >= 0)"),
        ("scales are those of the first tile", "pl.ds(tile * groups_per_tile + i, 1)", "pl.ds(i, 1)"),
        ("zeros are added", "part_TF -= ", "part_TF += "),
    ),
    *_of(
        "pallas_kernels/quantized_matmul/gpu.py",
        "gpu",
        (
            "even and odd inputs are exchanged",
            "[(values_fd << 4) >> 4, values_fd >> 4]",
            "[values_fd >> 4, (values_fd << 4) >> 4]",
        ),
        ("even inputs lose their sign", "(values_fd << 4) >> 4,", "values_fd & 15,"),
        ("scales are those of the piece", "i * inputs // group", "0 * i"),
    ),
    *_of(
        "pallas_kernels/grouped_matmul/items.py",
        "item",
        ("an item begins one group late", "last_G <= item_I[:, None]", "last_G < item_I[:, None]"),
        ("what fills the list works too", "jnp.where(real_I, end_G[group_I], 0)", "end_G[group_I]"),
        ("tiles begin where groups do", "start_G // tile * tile if aligned else start_G", "start_G"),
    ),
    *_of(
        "pallas_kernels/grouped_matmul/reference.py",
        "reference",
        ("padding is multiplied by the last expert", "jnp.sum(items.expert_I < E)", "len(items.expert_I)"),
        ("scales are the first expert's", "out_tF * scale_1F", "out_tF * scale_1F[..., :1]"),
    ),
    *_of(
        "pallas_kernels/grouped_matmul/tpu.py",
        "tpu",
        (
            "a tile's other experts are overwritten",
            "jnp.where(begun, out_TF[...], jnp.zeros_like(out_TF))",
            "jnp.zeros_like(out_TF)",
        ),
        ("a token too many is taken", "token_T < end_I[item]", "token_T <= end_I[item]"),
        ("sums begin with the last item's", "pl.when(tile == 0)", "pl.when(item + tile == 0)"),
        ("scales are those of the first group", "pl.ds(which, 1)", "pl.ds(0, 1)"),
    ),
    *_of(
        "pallas_kernels/grouped_matmul/gpu.py",
        "gpu",
        ("a token too many is taken", "jnp.arange(tokens) < end_I", "jnp.arange(tokens) <= end_I"),
        ("scales are those of the first group", "i * inputs // group", "0 * i"),
        ("padding is multiplied by the last expert", "columns * real.astype(jnp.int32)", "columns"),
    ),
    *_of(
        "pallas_kernels/ragged_paged_attention/gpu/kernels.py",
        "gpu",
        (
            "queries see one position ahead",
            "position_C[None, :] <= tile.position",
            "position_C[None, :] <= tile.position + 1",
        ),
        ("older parts keep their weight", "out * fade_X1 + new * weight_X1", "out + new * weight_X1"),
        ("a sink is forgotten", "if not layer.has_sinks:", "if layer.queries:"),
    ),
    *_of(
        "pallas_kernels/mla_paged_attention/reference.py",
        "reference",
        ("tokens see one position ahead", "position_s <= metadata", "position_s - 1 <= metadata"),
        ("older chunks keep their weight", "out_NC * fade_N[:, None] + added_NC", "out_NC + added_NC"),
        ("unseen slots only get a weight of zero", "jnp.where(visible_s[:, None], x_sW, 0)", "x_sW"),
    ),
    *_of(
        "pallas_kernels/mla_paged_attention/__init__.py",
        "reference",
        ("padding tokens write to the last block", "jnp.where(held_T, block_T, _NOWHERE)", "block_T"),
    ),
    *_of(
        "pallas_kernels/mla_paged_attention/tpu.py",
        "tpu",
        (
            "heads of a decode are those of the tile's first",
            "pl.ds(begin * num_heads, num_heads)",
            "pl.ds(0, num_heads)",
        ),
        ("queries see others' contexts", "(token_X1 >= begin) & (token_X1 < end)", "(token_X1 >= 0)"),
        ("only what is visible is not cleared", "(chunk + 1) * slots > length", "(chunk + 1) * slots > length + slots"),
        ("both buffers are one", "chunks_2sW.at[chunk & 1, pl", "chunks_2sW.at[0, pl"),
        ("the last request of a tile is forgotten", "< start_J1 + tokens, axis=1)", "< start_J1 + tokens - 1, axis=1)"),
    ),
    *_of(
        "pallas_kernels/mla_paged_attention/gpu.py",
        "gpu",
        ("the last part is forgotten", "ceil_div(num_steps, parts)", "lax.div(num_steps, parts)"),
        ("rope keys are not looked at", " + plgpu.dot(q_xP, rope_sP, trans_b=True)", ""),
        ("parts weigh the same", "weight_TUN * (1 / LOG2_E)", "weight_TUN * 0"),
        (
            "tokens see one position ahead",
            "visible_s = position_s <= position",
            "visible_s = position_s <= position + 1",
        ),
    ),
    *_of(
        "pallas_kernels/int4_matmul/cpu/tiles.py",
        "every_machine",
        ("weights are written unscaled", "b.fmul(weight, scales[k * lanes // GROUP])", "weight"),
        ("all rows of x are the first", "b.at(row, self.num_inputs,", "b.at(whole(0), self.num_inputs,"),
        ("all groups have the first one's scale", "_LANE_SHORTS * group + group", "_LANE_SHORTS * group"),
        (
            "whole values keep their zero",
            "b.add(b.call(widen, [words, splat(self._words, 1)]), x[2])",
            "b.call(widen, [words, splat(self._words, 1)])",
        ),
        (
            "products by fours forget the first halves",
            "[correction, weights[0], first]",
            "[correction, weights[0], second]",
        ),
        ("converted values keep their zero", "b.sub(value, splat(whole_numbers, ZERO))", "value"),
    ),
    *_of(
        "pallas_kernels/int4_matmul/cpu/rows.py",
        "every_machine or rows_stay_apart",
        ("halves lie as their inputs do", "num_groups * half + group", "half + 2 * group"),
        ("what is not finite vanishes", "number(math.nan)", "number(0.0)"),
        ("all groups have the first one's step", "steps_at(num_groups) + 4 * LANES * group", "steps_at(num_groups)"),
    ),
    *_of(
        "pallas_kernels/few_rows_matmul/cpu/tiles.py",
        "kernels_of_every_machine",
        ("inputs beyond the last register are left out", "self._add_last_inputs(columns, totals)", "pass"),
        ("weights without a sign are not made good", "if offsets is not None:", "if False:"),
        (
            "32 bits hold no sum of lanes",
            "b.lane_sum(b.sitofp(sums, float32s(self.sums.count)))",
            "b.sitofp(b.lane_sum(sums), F32)",
        ),
        (
            "all rows of x are the first",
            "self._at(self.rows[t], d, self.step.x_size)",
            "self._at(whole(0), d, self.step.x_size)",
        ),
    ),
    *_of_products(
        "pallas_kernels/llvm/row_tiles.py",
        "every_machine",
        ("the rest's rows are the first ones", "rows_from(num_whole, rest)", "rows_from(whole(0), rest)"),
        (
            "a tile's rows go beyond the last output",
            "b.smaller(b.add(start, b.mul(whole(r), length)), final)",
            "b.add(start, b.mul(whole(r), length))",
        ),
        ("the last rows of streams are left out", "b.add(b.sub(last, first), whole(count - 1))", "b.sub(last, first)"),
    ),
    *_of(
        "pallas_kernels/top_k/cpu/selection.py",
        "kernels_of_every_machine",
        (
            "of equal ones the last stay",
            'b.icmp_signed("<", places, own_place)',
            'b.icmp_signed(">", places, own_place)',
        ),
        ("columns beyond the last register are left out", "self._keep_rest(bound)", "pass"),
        ("negative numbers are in reverse", "b.xor(bits, b.and_(b.ashr(bits, number(31)), number(2**31 - 1)))", "bits"),
        ("what equals the bound is not let in", "b.sub(bound_key, ir.Constant(I32, 1))", "bound_key"),
        ("all equal ones stay", 'b.icmp_signed(">", equal_left, zero)', 'b.icmp_signed(">", whole(1), zero)'),
    ),
    *_of(
        "pallas_kernels/rms_norm/cpu/rows.py",
        "kernels_of_every_machine or rounded_as",
        ("the mean stays", "b.fsub(x, mean)", "x"),
        ("all rows are the first", "b.at(row, self.width, whole(0), self.size)", "whole(0)"),
        ("offsets are factors", "if is_offset:", "if False:"),
        ("rows are rounded once only", "elif self.size == 2:", "elif False:"),
        ("the last rows are left out", "b.add(frame.extent(X, 0), b.sub(rows, whole(1)))", "frame.extent(X, 0)"),
        ("the mean square is nothing", "b.fadd(square, b.read(F32,", "b.fadd(b.fsub(square, square), b.read(F32,"),
    ),
    *OF_ATTENTION,
)
