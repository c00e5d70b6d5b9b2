"""Every kind of program that an engine can have, on one page: `PROGRAMS`.

A step is two programs, dispatched back to back without waiting: `forward` and `sample`. The sampled token stays on the
device and feeds the next step. `sample_full` does the same with penalties, biases and log probabilities, for steps in
which some request asks for them; `sample_masked` takes masks of grammars besides. In place of both, `decode` computes
several steps at once, and single steps in which all requests decode. An engine that pools has `pool` in place of
`sample`. With drafts a step begins with `draft`, and `verify` draws in place of `sample`.

An engine that sees has `encode`, which makes embeddings of pictures before a step whose `forward` takes them, and, if
it takes videos, `encode_video`, whose patches have several frames.

Each kind has one program for every bucket of its axis: the buckets of two axes add up instead of multiplying. A kind
behind whose name stands `_shared` reads once what rows share, where the ordinary one launches nothing for it.

`ProgramChoice` chooses the programs of a step, and the model runner, its output stage and its drafter call them. The
others have one caller each, which the table names. `EnginePrograms` finds out which of these an engine has.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxpaged.messages import ProgramKey
from jaxpaged.sampling.state import load_row, load_tokens, load_trace
from jaxpaged.sampling_params.features import Extra
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.programs.compiler_options import LAYERS, OTHERS
from jaxpaged.worker.step import decode_loop, encoding, lookup
from jaxpaged.worker.step.adapters import load_adapter
from jaxpaged.worker.step.expert_moves import move_experts
from jaxpaged.worker.step.functions import StepFunctions, write_table_chunk
from jaxpaged.worker.step.prompt_sums import accumulate
from jaxpaged.worker.step.verify import verify
from jaxpaged.worker.step.zero_pages import zeros_like


class ProgramKind(StrEnum):
    """The names of all kinds, as bundles, logs and statistics have them."""

    ZEROS = "zeros"
    FORWARD = "forward"
    FORWARD_SHARED = "forward_shared"
    TABLES = "tables"
    SAMPLE = "sample"
    SAMPLE_FULL = "sample_full"
    SAMPLE_MASKED = "sample_masked"
    DECODE = "decode"
    DECODE_SHARED = "decode_shared"
    DECODE_FULL = "decode_full"
    DECODE_FULL_SHARED = "decode_full_shared"
    DRAFT = "draft"
    LOAD_HISTORY = "load_history"
    REMEMBER = "remember"
    VERIFY = "verify"
    VERIFY_FULL = "verify_full"
    VERIFY_MASKED = "verify_masked"
    LOAD_ROW = "load_row"
    LOAD_TOKENS = "load_tokens"
    LOAD_TRACE = "load_trace"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ACCUMULATE = "accumulate"
    POOL = "pool"
    KV_GATHER = "kv_gather"
    KV_SCATTER = "kv_scatter"
    EXPERT_LOAD = "expert_load"
    MOVE_EXPERTS = "move_experts"
    ENCODE = "encode"
    ENCODE_VIDEO = "encode_video"
    EMBEDS_GATHER = "embeds_gather"
    EMBEDS_SCATTER = "embeds_scatter"
    LORA_ZEROS = "lora_zeros"
    LOAD_LORA = "load_lora"
    FORWARD_BASE = "forward_base"
    FORWARD_SMALL = "forward_small"
    DECODE_BASE = "decode_base"
    DECODE_SMALL = "decode_small"
    DECODE_FULL_BASE = "decode_full_base"
    DECODE_FULL_SMALL = "decode_full_small"
    SAMPLE_BASE = "sample_base"
    SAMPLE_FULL_BASE = "sample_full_base"
    SAMPLE_MASKED_BASE = "sample_masked_base"
    VERIFY_BASE = "verify_base"
    VERIFY_FULL_BASE = "verify_full_base"
    VERIFY_MASKED_BASE = "verify_masked_base"


Kind = ProgramKind

SAMPLE_KINDS = (Kind.SAMPLE, Kind.SAMPLE_FULL, Kind.SAMPLE_MASKED)
"""Kinds that draw one token a row."""
VERIFY_KINDS = {
    Kind.SAMPLE: Kind.VERIFY,
    Kind.SAMPLE_FULL: Kind.VERIFY_FULL,
    Kind.SAMPLE_MASKED: Kind.VERIFY_MASKED,
}
"""What draws in a step with drafts, in place of what draws one token a row."""
DECODE_KINDS = (Kind.DECODE, Kind.DECODE_FULL)
ENCODE_KINDS = {"image": Kind.ENCODE, "video": Kind.ENCODE_VIDEO}
"""What computes features, by their modality."""
PLAIN_KINDS = (
    Kind.SAMPLE,
    Kind.DECODE,
    Kind.DECODE_SHARED,
    Kind.DECODE_BASE,
    Kind.DECODE_SMALL,
    Kind.VERIFY,
)
"""Kinds that draw without the full sampler."""
SHARED_KINDS = {
    Kind.FORWARD: Kind.FORWARD_SHARED,
    Kind.DECODE: Kind.DECODE_SHARED,
    Kind.DECODE_FULL: Kind.DECODE_FULL_SHARED,
}
"""The kinds that read once what rows share, by those that do not."""


LORA_KINDS = {
    Kind.FORWARD: (Kind.FORWARD_BASE, Kind.FORWARD_SMALL),
    Kind.DECODE: (Kind.DECODE_BASE, Kind.DECODE_SMALL),
    Kind.DECODE_FULL: (Kind.DECODE_FULL_BASE, Kind.DECODE_FULL_SMALL),
}
"""In an engine with adapters, the kinds for steps without any, and with small ones alone, by those for all."""

DRAW_KINDS = {
    Kind.SAMPLE: Kind.SAMPLE_BASE,
    Kind.SAMPLE_FULL: Kind.SAMPLE_FULL_BASE,
    Kind.SAMPLE_MASKED: Kind.SAMPLE_MASKED_BASE,
    Kind.VERIFY: Kind.VERIFY_BASE,
    Kind.VERIFY_FULL: Kind.VERIFY_FULL_BASE,
    Kind.VERIFY_MASKED: Kind.VERIFY_MASKED_BASE,
}
"""Where adapters change the output head, the kinds that draw in steps without any, by those for all."""

BASE_KINDS = frozenset((*(base for base, _ in LORA_KINDS.values()), *DRAW_KINDS.values()))
"""Those for steps without adapters, which take the parameters without stacks."""


class Axis(Enum):
    """Along which sizes a kind has programs, and what its function is told of a size."""

    STATE = auto()  # one program; the shapes of the device state
    ONE = auto()  # one program; nothing
    TOKENS = auto()  # tokens of a step; its `StepLayout`
    SHARED_TOKENS = auto()  # of these, the sizes in which steps that share blocks have programs of their own
    ROWS = auto()  # rows that sample; how many
    MULTI_STEPS = auto()  # tokens of one of several decode steps; the `MultiStepLayout`
    FULL_MULTI_STEPS = auto()  # the same, unless all log probabilities are too many to be kept until the end
    SHARED_MULTI_STEPS = auto()  # of these, as `SHARED_TOKENS`
    SHARED_FULL_MULTI_STEPS = auto()
    DRAFT_MULTI_STEPS = auto()  # rows for which a model or a head drafts; the `MultiStepLayout`
    COPIES = auto()  # pieces of a copy, for each KV pool; the `BlockCopy`
    PICTURES = auto()  # items or patches of a batch of pictures; its `EncodeLayout`
    VIDEOS = auto()  # the same of moments of videos
    PARTS = auto()  # arrays of experts of another shape, counted from 1; the array's shape


class When(Enum):
    """When a program is compiled, unless that is when a request first asks for an `Extra`."""

    START = auto()  # at once
    ONCE_IT_PAYS = auto()  # when many steps would have been faster with it; at once where an option asks for it
    ON_DEMAND = auto()  # when a step could use it


def everywhere(engine: EngineSpec) -> bool:
    return True


def sees(engine: EngineSpec) -> bool:
    return engine.encoder is not None


def sees_videos(engine: EngineSpec) -> bool:
    return engine.encoder is not None and engine.encoder.takes_videos


def saves_embeds(engine: EngineSpec) -> bool:
    return engine.saves_embeds


def takes_embeds(engine: EngineSpec) -> bool:
    return engine.takes_embeds


def is_whole(engine: EngineSpec) -> bool:
    return engine.stage is None


def sees_nothing(engine: EngineSpec) -> bool:
    return is_whole(engine) and not sees(engine)


def is_last_stage(engine: EngineSpec) -> bool:
    return engine.is_last and not is_whole(engine)


def is_earlier_stage(engine: EngineSpec) -> bool:
    return not engine.is_last


def draws(engine: EngineSpec) -> bool:
    return engine.is_last and not engine.pools


def pools(engine: EngineSpec) -> bool:
    return engine.is_last and engine.pools


def sums(engine: EngineSpec) -> bool:
    return pools(engine) and engine.pooling_type != "LAST"


def drafts(engine: EngineSpec) -> bool:
    return draws(engine) and engine.speculation is not None


def drafts_by_model(engine: EngineSpec) -> bool:
    return drafts(engine) and engine.draft is not None


def adapts(engine: EngineSpec) -> bool:
    return engine.lora is not None


def has_base_steps(engine: EngineSpec) -> bool:
    """Whether steps without adapters have programs of their own. Processes that compute together could choose
    differently, so they have none, and stages have none either."""
    return adapts(engine) and is_whole(engine) and not engine.has_other_processes


def adapts_head(engine: EngineSpec) -> bool:
    return has_base_steps(engine) and engine.lora is not None and engine.lora.head is not None


def looks_up(engine: EngineSpec) -> bool:
    return drafts(engine) and engine.draft is None


def keeps_answers(engine: EngineSpec) -> bool:
    return looks_up(engine) and engine.speculation.num_answer_tokens > 0


def replays(engine: EngineSpec) -> bool:
    return draws(engine) and engine.config.model.enable_trace_replay


def moves_experts(engine: EngineSpec) -> bool:
    return engine.is_last and engine.config.parallel.expert_balance is not None


def keeps_experts(engine: EngineSpec) -> bool:
    return not moves_experts(engine)


def both(*conditions: Callable[[EngineSpec], bool]) -> Callable[[EngineSpec], bool]:
    return lambda engine: all(condition(engine) for condition in conditions)


@dataclass(frozen=True)
class Program:
    """A kind of program. Names of arguments and results are those of `step/shapes.py`, `_` is None.

    `function`: the function of the arguments, from what is static in the engine and what `axis` says of the size.
    `signature`: arguments -> results. A star marks arguments that are donated, whose memory the results take; a single
    result is no tuple. `where`: the engines that have such programs. `when`: an `Extra` if only requests that ask for
    it need the program. `options`: which ones of the compiler. `by_rank`: each attention rank computes it on its part
    of every argument.
    """

    kind: ProgramKind
    axis: Axis
    function: Callable[[StepFunctions, Any], Callable[..., Any]]
    signature: str
    where: Callable[[EngineSpec], bool] = draws
    when: When | Extra = When.START
    options: str | None = OTHERS
    by_rank: bool = True

    @property
    def arguments(self) -> list[str]:
        return [name.removeprefix("*") for name in self._names(0)]

    @property
    def donated(self) -> list[int]:
        """Which of the arguments are."""
        return [i for i, name in enumerate(self._names(0)) if name.startswith("*")]

    @property
    def results(self) -> list[str]:
        return self._names(1)

    def _names(self, side: int) -> list[str]:
        return self.signature.split("->")[side].split()

    def key(self, pool_idx: int, size: int) -> ProgramKey:
        return copy_key(self.kind, pool_idx, size) if self.axis is Axis.COPIES else ProgramKey(self.kind, size)


def copy_key(kind: ProgramKind, pool_idx: int, size: int) -> ProgramKey:
    """A program that copies `size` pieces of a KV pool. Each pool has a kind of its own."""
    return ProgramKey(f"{kind}_{pool_idx}" if pool_idx else kind, size)


zeros = lambda f, state: partial(zeros_like, f.attention.mesh, state)
forward = lambda f, layout: partial(f.forward, layout)
encode = lambda f, layout: partial(encoding.encode, f.encoder, f.lora, f.attention.mesh, layout)
forward_of_stage = lambda f, layout: partial(f.forward_of_stage, layout)
sample = lambda f, size: partial(f.sample, size)
check = lambda f, _: partial(verify, f)
decode = lambda f, layout: partial(decode_loop.decode, f, layout)
draft = lambda f, layout: partial(decode_loop.draft, f.drafting, layout)
look_up = lambda f, _: partial(lookup.look_up_drafts, f.speculation)
add_up = lambda f, layout: partial(accumulate, layout, f.num_sampled, f.pooling_type)
pool = lambda f, size: partial(f.pool, size)
score = lambda f, _: f.prompt_logprobs
at_level = lambda level, function: lambda f, layout: function(f, layout.at_level(level))
no_adapters = lambda f, _: partial(zeros_like, f.attention.mesh, f.lora.shapes)
put_adapter = lambda f, _: partial(load_adapter, f.lora)
move = lambda f, part: partial(move_experts, f.attention.mesh, part)
its = lambda function: lambda f, _: function

STEP = "params *kv *tables *rows *hidden step -> kv tables rows hidden sampled experts"
SEEING_STEP = "params *kv *tables *rows *hidden step _ encoded -> kv tables rows hidden sampled experts"
LAST_STAGE = "params *kv *tables *rows *hidden step given -> kv tables rows hidden sampled experts"
EARLIER_STAGE = "params *kv *tables *rows step given -> kv tables rows stream"
STEPS = "params head *kv *tables *rows _ first_step multi_step_lines -> kv tables rows _ tokens _ experts"
FULL_STEPS = (
    "params head *kv *tables *rows *row_state first_step multi_step_lines "
    "-> kv tables rows row_state tokens logprobs experts"
)
DRAFT_STEPS = "params *kv *tables *rows first_step multi_step_lines -> kv tables rows drafts"
SAMPLE_FULL = "head sampled *rows *row_state lines -> rows tokens row_state logprobs"
SAMPLE_MASKED = "head sampled *rows *row_state lines masks -> rows tokens row_state logprobs"
ENCODE = "tower table *encoded pictures -> encoded finite"
VERIFY = "head hidden *rows _ verify_lines -> rows tokens _ _ num_drafts"
VERIFY_FULL = "head hidden *rows *row_state verify_lines -> rows tokens row_state logprobs num_drafts"
VERIFY_MASKED = "head hidden *rows *row_state verify_lines verify_masks -> rows tokens row_state logprobs num_drafts"

PAYS, ON_DEMAND = When.ONCE_IT_PAYS, When.ON_DEMAND
FULL, MASKS, SCORES = Extra.FULL_SAMPLER, Extra.MASKS, Extra.PROMPT_LOGPROBS
PICTURES, VIDEOS = Extra.PICTURES, Extra.VIDEOS
with_layers, simple = partial(Program, options=LAYERS), partial(Program, options=None, by_rank=False)


def lighter(
    kind: Kind, axis: Axis, function: Callable[..., Any], signature: str, where: Callable[[EngineSpec], bool]
) -> tuple[Program, ...]:
    """A kind's programs for steps without adapters, and with small ones alone."""
    base, small = LORA_KINDS[kind]
    without_stacks = signature.replace("params", "base_params", 1).replace(" head ", " base_head ", 1)
    return (
        with_layers(base, axis, at_level(0, function), without_stacks, both(has_base_steps, where), ON_DEMAND),
        with_layers(small, axis, at_level(1, function), signature, both(has_base_steps, where), ON_DEMAND),
    )


def without_slots(programs: Iterable[Program]) -> tuple[Program, ...]:
    """Those of the programs that draw, for steps without adapters."""
    return tuple(
        replace(
            program,
            kind=DRAW_KINDS[program.kind],
            signature=program.signature.replace("head", "base_head", 1),
            where=both(adapts_head, program.where),
            when=ON_DEMAND,
        )
        for program in programs
        if program.kind in DRAW_KINDS
    )


PROGRAMS: tuple[Program, ...] = (
    # The device state of an engine that has computed nothing, for `Worker.new_state`.
    simple(Kind.ZEROS, Axis.STATE, zeros, "-> state", everywhere),
    # Forward passes, for the model runner. A stage takes the result of the one before.
    with_layers(Kind.FORWARD, Axis.TOKENS, forward, STEP, sees_nothing),
    with_layers(Kind.FORWARD, Axis.TOKENS, forward, SEEING_STEP, sees),
    with_layers(Kind.FORWARD, Axis.TOKENS, forward, LAST_STAGE, is_last_stage),
    with_layers(Kind.FORWARD, Axis.TOKENS, forward_of_stage, EARLIER_STAGE, is_earlier_stage),
    # Sums of prompts, for the output stage of an engine that pools.
    Program(Kind.ACCUMULATE, Axis.TOKENS, add_up, "hidden *row_state step -> row_state pooled", sums),
    # Block table entries that do not fit into a step, for the model runner.
    Program(Kind.TABLES, Axis.ONE, its(write_table_chunk), "*tables table_entries -> tables", everywhere),
    # Tokens or vectors of a step, for the output stage.
    Program(Kind.SAMPLE, Axis.ROWS, sample, "head sampled *rows _ lines -> rows tokens _ _"),
    Program(Kind.POOL, Axis.ROWS, pool, "head pooled -> vectors", pools),
    # Drafts, for the drafter: of another model, or found in a row's tokens, which are told when it gets and loses them.
    with_layers(Kind.DRAFT, Axis.DRAFT_MULTI_STEPS, draft, DRAFT_STEPS, drafts_by_model),
    simple(Kind.LOAD_HISTORY, Axis.ONE, its(lookup.load_history), "*rows history_upload -> rows", looks_up),
    simple(Kind.DRAFT, Axis.ROWS, look_up, "*rows row_places -> rows drafts", looks_up),
    simple(Kind.REMEMBER, Axis.ONE, its(lookup.remember), "*rows ended_row -> rows", keeps_answers),
    # Tokens of a step with drafts, for the output stage.
    Program(Kind.VERIFY, Axis.ROWS, check, VERIFY, drafts),
    Program(Kind.VERIFY_FULL, Axis.ROWS, check, VERIFY_FULL, drafts, FULL),
    Program(Kind.VERIFY_MASKED, Axis.ROWS, check, VERIFY_MASKED, drafts, MASKS),
    # What a request asks of the full sampler, when it gets a row, for the output stage.
    Program(Kind.LOAD_ROW, Axis.ONE, its(load_row), "*row_state row_upload -> row_state", when=FULL),
    Program(Kind.LOAD_TOKENS, Axis.ONE, its(load_tokens), "*row_state tokens_upload -> row_state", when=FULL),
    Program(Kind.LOAD_TRACE, Axis.ONE, its(load_trace), "*row_state tokens_upload -> row_state", replays, FULL),
    # Tokens of steps in which some request asks for more, for the output stage; and scores of prompts.
    Program(Kind.SAMPLE_FULL, Axis.ROWS, sample, SAMPLE_FULL, when=FULL),
    Program(Kind.SAMPLE_MASKED, Axis.ROWS, sample, SAMPLE_MASKED, when=MASKS),
    Program(Kind.PROMPT_LOGPROBS, Axis.ONE, score, "head hidden prompt_tile -> logprobs", when=SCORES),
    # Blocks off the devices and back, for `Copies`.
    simple(Kind.KV_GATHER, Axis.COPIES, lambda f, copy: copy.gather, "tensors block_ids -> pages"),
    simple(Kind.KV_SCATTER, Axis.COPIES, lambda f, copy: copy.scatter, "*tensors block_ids pages -> tensors"),
    # Several decode steps at once, or single steps in which all requests decode, for the output stage.
    with_layers(Kind.DECODE, Axis.MULTI_STEPS, decode, STEPS, when=PAYS),
    with_layers(Kind.DECODE_FULL, Axis.FULL_MULTI_STEPS, decode, FULL_STEPS, when=ON_DEMAND),
    # The same programs for steps in which rows share blocks: taken by the model runner in place of the ordinary ones.
    with_layers(Kind.FORWARD_SHARED, Axis.SHARED_TOKENS, forward, STEP, sees_nothing, ON_DEMAND),
    with_layers(Kind.FORWARD_SHARED, Axis.SHARED_TOKENS, forward, SEEING_STEP, sees, ON_DEMAND),
    with_layers(Kind.DECODE_SHARED, Axis.SHARED_MULTI_STEPS, decode, STEPS, when=ON_DEMAND),
    with_layers(Kind.DECODE_FULL_SHARED, Axis.SHARED_FULL_MULTI_STEPS, decode, FULL_STEPS, when=ON_DEMAND),
    # Embeddings of pictures, and of moments of videos, into the encoder cache, for the encoder.
    Program(Kind.ENCODE, Axis.PICTURES, encode, ENCODE, sees, PICTURES, LAYERS),
    Program(Kind.ENCODE_VIDEO, Axis.VIDEOS, encode, ENCODE, sees_videos, VIDEOS, LAYERS),
    # Embeddings off the devices, and those that were computed elsewhere, for the encoder.
    simple(Kind.EMBEDS_GATHER, Axis.ONE, its(encoding.gather), "encoded slots -> embeds", saves_embeds),
    simple(Kind.EMBEDS_SCATTER, Axis.ONE, its(encoding.scatter), "*encoded slots embeds -> encoded", takes_embeds),
    # Counts of the experts' tokens, and experts on their way to other devices, for the expert balancer.
    simple(Kind.EXPERT_LOAD, Axis.ONE, its(jnp.copy), "expert_counts -> counts", moves_experts),
    simple(Kind.MOVE_EXPERTS, Axis.PARTS, move, "part sources -> part", moves_experts),
    # The stacks of adapters without any, for the worker, and one on its way into a slot, for `AdapterSlots`.
    simple(Kind.LORA_ZEROS, Axis.ONE, no_adapters, "-> lora", adapts),
    simple(Kind.LOAD_LORA, Axis.ONE, put_adapter, "*lora lora_upload lora_slot -> lora", both(adapts, keeps_experts)),
    simple(
        Kind.LOAD_LORA,
        Axis.ONE,
        put_adapter,
        "*lora lora_upload lora_slot expert_places -> lora",
        both(adapts, moves_experts),
    ),
    # The same programs for steps without an adapter, and with none but small ones: taken by the model runner.
    *lighter(Kind.FORWARD, Axis.TOKENS, forward, STEP, sees_nothing),
    *lighter(Kind.FORWARD, Axis.TOKENS, forward, SEEING_STEP, sees),
    *lighter(Kind.DECODE, Axis.MULTI_STEPS, decode, STEPS, draws),
    *lighter(Kind.DECODE_FULL, Axis.FULL_MULTI_STEPS, decode, FULL_STEPS, draws),
)
# Those that draw in steps without an adapter, where adapters change the head: taken by the output stage.
PROGRAMS += without_slots(PROGRAMS)
