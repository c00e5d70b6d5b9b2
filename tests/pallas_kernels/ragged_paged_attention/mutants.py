"""Deliberate mistakes in attention's kernels for CPUs. `scripts/mutate.py` tries them."""

from tests.mutants import mutants_of

_of = mutants_of(lambda module: ("tests/pallas_kernels/ragged_paged_attention",))

MUTANTS = (
    *_of(
        "pallas_kernels/ragged_paged_attention/__init__.py",
        "both_ways or ends_of",
        ("tokens see beyond their rows", "position_T + 1, seq_lens_R[row_T])", "position_T + 1, 10**9)"),
        ("tokens do not see themselves", "jnp.int32), position_T + 1, seq", "jnp.int32), 0, seq"),
        ("ends are not handed on", "*where, plan, visible_end_T, decodes_only", "*where, plan, None, decodes_only"),
    ),
    *_of(
        "pallas_kernels/ragged_paged_attention/cpu/singles.py",
        "test_cpu",
        (
            "slots before the range are counted",
            'b.icmp_signed(">=", position, begin)',
            'b.icmp_signed(">=", end, begin)',
        ),
        ("the last slot is not seen", 'b.icmp_signed("<", position, end)', 'b.icmp_signed("<=", position, end)'),
        ("values outside of the range are read", "b.smaller(b.sub(self.end, slot), whole(L))", "whole(L)"),
        (
            "a lane's other slot is read outside of the range",
            "b.larger(b.smaller(b.add(j, whole(n)), final), first)",
            "b.add(j, whole(n))",
        ),
        ("all turned queries are the first", "self._q_at(g, b.add(d, whole(i)))", "self._q_at(0, b.add(d, whole(i)))"),
        (
            "sums keep their weight when the top rises",
            "b.read(self.kind, self.acc, at, align=4), fade)",
            "b.read(self.kind, self.acc, at, align=4), splat(self.kind, 1.0))",
        ),
        ("all queries of a group are the first", "self._q_at(g, d)", "self._q_at(0, d)"),
        (
            "slots of a tile are those of its beginning",
            "b.add(place, whole(first * heads.head_dim * heads.size))",
            "place",
        ),
        (
            "the last heads are left out",
            "b.add(frame.extent(KEYS, 1), whole(heads_of_chunk(heads) - 1))",
            "frame.extent(KEYS, 1)",
        ),
        ("tokens of tiles are read twice", 'with b.if_then(b.icmp_signed(">=", work.row, whole(0))):', "if True:"),
    ),
    *_of(
        "pallas_kernels/ragged_paged_attention/cpu/tiles.py",
        "test_cpu or test_sharing",
        ("queries see what comes after them", 'b.icmp_signed("<=", position, high)', 'b.icmp_signed(">=", high, high)'),
        (
            "queries see what is before the window",
            'b.icmp_signed(">=", position, low)',
            'b.icmp_signed(">=", low, low)',
        ),
        ("values that nobody sees are read", 'b.icmp_signed("<=", now, most)', 'b.icmp_signed("<=", now, now)'),
        ("both values of a pair are the first slot's", "[b.add(i, whole(n)) for n", "[i for n"),
        ("the values of a pair change places", "heads.joined(b, numbers)", "heads.joined(b, numbers[::-1])"),
        ("what spans have come to is forgotten", "self._continue(first, last)", "pass"),
        (
            "sums keep their weight when the top rises",
            "fade = spread(b, b.read(F32, self.fades, b.mul(row, whole(4)), align=4), L)",
            "fade = splat(self.kind, 1.0)",
        ),
        ("the last places of a prompt are left out", "b.add(now[0], b.sub(places, whole(1)))", "now[0]"),
        (
            "queries of other sources see this one's slots",
            "            self._see(x, ir.Constant(I32, 1), ir.Constant(I32, 0))\n\n    def _look",
            "            pass\n\n    def _look",
        ),
        ("keys are not turned", "enumerate(turned(b, rows))", "enumerate(rows)"),
        (
            "tiles are never capped",
            "self.heads.scores(b, score, self.scale, self.cap)",
            "b.fmul(score, self.scale)",
        ),
    ),
    *_of(
        "pallas_kernels/ragged_paged_attention/cpu/joining.py",
        "test_cpu or test_sharing",
        (
            "parts after the first are left out",
            "b.select(is_tiled, whole(0), self.num_parts)",
            "b.select(is_tiled, whole(0), whole(1))",
        ),
        ("what spans have come to is left out", "is_any(TILED | SHARES)", "is_any(TILED)"),
        ("tiles are taken for spans", "(TILES, SPANS)", "(SPANS, SPANS)"),
        (
            "all heads have the first sink",
            "b.select(is_one, whole(0), b.mul(n, whole(4)))",
            "whole(0)",
        ),
        ("sinks are not in the sum", "[self._of(self.weights, SINK_PLACE)]", "[ir.Constant(F32, 0.0)]"),
        (
            "padding is as it was",
            "            with otherwise, b.counting",
            "            with otherwise, b.counting(whole(0), whole(0), whole(1)) as _, b.counting",
        ),
        (
            "the weights of parts are those of the first",
            "spread(b, self._of(self.weights, p), self.lanes)",
            "spread(b, self._of(self.weights, 0), self.lanes)",
        ),
    ),
    *_of(
        "pallas_kernels/ragged_paged_attention/cpu/planning.py",
        "plans_a_step",
        (
            "windows are forgotten",
            "b.add(b.sub(position, self.window), whole(1))",
            "whole(0)",
        ),
        ("ends of what tokens see are forgotten", "self.ends is None", "True"),
        ("padding has a row", "b.and_(is_real, b.not_(is_tiled))", "b.not_(is_tiled)"),
        ("padding is written somewhere", "b.select(is_real, block_id, whole(NOWHERE))", "block_id"),
        ("what is shared is read again", "b.larger(first, own)", "first"),
        ("spans end with their first row", "b.integer(before, last)", "b.integer(before, b.add(first, whole(1)))"),
        ("all parts are the first", "b.mul(part, each)", "whole(0)"),
        ("tokens of spans are in the order of the step", "b.add(b.sub(start, now[0]), x)", "x"),
    ),
    *_of(
        "pallas_kernels/ragged_paged_attention/cpu/writing.py",
        "test_cpu",
        (
            "all heads get the first one's keys",
            "b.add(b.mul(token, num_heads), head), line)",
            "b.mul(token, num_heads), line)",
        ),
        ("padding is written", 'with b.if_then(b.icmp_unsigned("<", block, frame.extent(KEYS, 0))):', "if True:"),
        ("all tokens go to the first slot", "num_slots), offset)", "num_slots), whole(0))"),
    ),
    *_of(
        "pallas_kernels/ragged_paged_attention/cpu/heads.py",
        "test_cpu",
        ("scores are never capped", "if self.capped else scores", "if False else scores"),
        ("all blocks belong to the first head", "b.add(b.mul(block, num_heads), head)", "b.mul(block, num_heads)"),
    ),
)
