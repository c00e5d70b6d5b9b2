"""Shapes, types and shardings of all that programs take, under the names by which `programs/declare.py` knows them.

Some depend on the bucket of a program: the sizes of a step (`StepLayout`), of several steps (`MultiStepLayout`), or a
number of rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.layers.experts import placements_of
from jaxpaged.layers.lora import SlottedLines
from jaxpaged.models.seeing import tower_of, without_tower
from jaxpaged.params.sharding import num_ranks
from jaxpaged.sampling.rows import NUM_COLUMNS
from jaxpaged.sampling.state import CHUNK as TOKENS_CHUNK
from jaxpaged.sampling.state import TOKENS_HEADER, StateLayout
from jaxpaged.worker.kv_transfer.programs import BlockCopy
from jaxpaged.worker.request_rows import NUM_STOP_IDS
from jaxpaged.worker.step.adapters import AdaptedParams
from jaxpaged.worker.step.encoding import EncodeLayout
from jaxpaged.worker.step.functions import PROMPT_LOGPROB_TILE, TABLE_CHUNK, StepFunctions
from jaxpaged.worker.step.lookup import CHUNK, HEADER
from jaxpaged.worker.step.packed import MultiStepLayout, StepLayout
from jaxpaged.worker.step.prompt_sums import SumsLayout
from jaxpaged.worker.step.row_tokens import Answers, RowTokens
from jaxpaged.worker.step.verify import NUM_VERIFY_COLUMNS

CHANGED_IN_PLACE = frozenset({"kv", "state", "tensors", "part", "lora"})
"""Arguments that are split over devices, each in its own way, and are results too. Others are whole on every device of
an attention rank, and so are other results."""


class Shapes:
    """Shapes for the programs of one engine, or of a stage of it. `row_state`: what is kept of each row besides tokens,
    None where nothing is drawn."""

    def __init__(
        self,
        functions: StepFunctions,
        params: Any,
        kv: Any,
        row_state: StateLayout | SumsLayout | None,
        max_blocks: int,
        max_tokens: int,
        max_model_len: int,
    ):
        encoder = functions.encoder
        self.functions, self.kv, self._row_layout = functions, kv, row_state
        self.params = self.base_params = params if encoder is None else without_tower(params)
        if functions.lora is not None:
            self.params = AdaptedParams(self.base_params, functions.lora.shapes)
        self.num_ranks = num_ranks(functions.attention.mesh)
        rows = functions.max_num_seqs + 1
        self.tables = self._array((len(functions.kv_cache.groups), rows, max_blocks), jnp.int32)
        self.rows = self._row_tokens(rows, max_model_len)
        self.head = self.base_head = functions.model.head(params)
        if functions.marks_lines:
            of_lines = {path: functions.lora.shapes[path] for path in functions.lora.of_lines}
            self.head = AdaptedParams(self.base_head, of_lines)
        self.state: tuple[Any, ...] = (self.kv, self.tables, self.rows)
        """All that lives on the devices from step to step, in the order of `DeviceState`: the KV cache, then the rest,
        whose size does not depend on the number of blocks."""
        if row_state is not None:
            abstract = row_state.abstract()
            self.row_state = jax.tree.map(lambda leaf: self._array(leaf.shape, leaf.dtype), abstract)
            self.hidden = self.hidden_states(max_tokens)  # of all tokens of a step
            self.state += (self.row_state, self.hidden)
        if encoder is not None:
            self.tower = tower_of(params)
            if functions.lora is not None and functions.lora.tower:
                self.tower = AdaptedParams(self.tower, functions.lora.tower_stacks(functions.lora.shapes))
            self.encoded = self._array(encoder.cache_shape, jnp.dtype(functions.config.dtype))
            self.state += (self.encoded,)

    def _row_tokens(self, rows: int, max_model_len: int) -> RowTokens:
        tokens = RowTokens(self._array((rows,), jnp.int32), self._array((rows,), jnp.int32))
        if (speculation := self.functions.speculation) is None:
            return tokens
        tokens = tokens._replace(drafts_RK=self._array((rows, speculation.num_speculative_tokens), jnp.int32))
        if speculation.match_lengths is not None:
            tokens = tokens._replace(history_RL=self._array((rows, max_model_len), jnp.int32))
        if speculation.num_answer_tokens:
            kept = self._array((speculation.num_answer_tokens,), jnp.int32), self._array((), jnp.int32)
            tokens = tokens._replace(answers=Answers(*kept))
        return tokens

    def _array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """Of all attention ranks together, one after the other along the first axis."""
        if self.num_ranks > 1:
            shape = (self.num_ranks * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.functions.replicated)

    def _packed(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._array(shape, jnp.int32)

    def hidden_states(self, size: int) -> Any:
        """What logits are computed of."""
        return self._marked(self._lines(size))

    def _marked(self, lines: jax.ShapeDtypeStruct) -> Any:
        """Lines of hidden states, with the slots of their adapters where that matters."""
        if not self.functions.marks_lines:
            return lines
        return SlottedLines(lines, jax.ShapeDtypeStruct(lines.shape[:1], jnp.int32, sharding=lines.sharding))

    def _lines(self, size: int) -> jax.ShapeDtypeStruct:
        return self._array((size, self.functions.config.hidden_size), jnp.dtype(self.functions.config.dtype))

    def argument(self, name: str, bucket: Any) -> Any:
        """The argument of that name, in a program for `bucket`; `_` stands for None."""
        if name == "_":
            return None
        found = getattr(self, name)
        return found(bucket) if callable(found) else found

    def sharding(self, name: str, bucket: Any) -> Any:
        """Where the result of that name lies."""
        if name in CHANGED_IN_PLACE:
            return jax.tree.map(lambda leaf: leaf.sharding, self.argument(name, bucket))
        return self.functions.replicated

    # ---- of a step -----------------------------------------------------------------------------------

    def step(self, layout: StepLayout) -> jax.ShapeDtypeStruct:
        return self._packed(layout.size)

    def stream(self, layout: StepLayout) -> jax.ShapeDtypeStruct:
        """What a stage gives to the next one."""
        return self._lines(layout.num_tokens)

    def given(self, layout: StepLayout) -> jax.ShapeDtypeStruct:
        """What a stage that is not the last one is given: the first one gets the newest tokens of all rows."""
        return self.rows.last_token_R if self.functions.is_first else self.stream(layout)

    @property
    def sampled(self) -> Any:
        """Hidden states of the tokens that sample."""
        return self.hidden_states(self.functions.num_sampled)

    @property
    def pooled(self) -> Any:
        """Hidden states or sums of the prompts that are complete."""
        if self.row_state is None:
            return self.sampled
        return self._marked(self._array((self.functions.num_sampled, self.functions.config.hidden_size), jnp.float32))

    def lines(self, size: int) -> jax.ShapeDtypeStruct:
        """What `SamplingRows.pack` makes."""
        return self._array((size, NUM_COLUMNS), jnp.float32)

    def verify_lines(self, size: int) -> jax.ShapeDtypeStruct:
        return self._packed(size, NUM_VERIFY_COLUMNS)

    def masks(self, size: int) -> jax.ShapeDtypeStruct:
        """The tokens that grammars allow, for the token that each row gets."""
        return self._masks(1, size)

    def verify_masks(self, size: int) -> jax.ShapeDtypeStruct:
        """The same for every token that each row may get."""
        return self._masks(self.rows.drafts_RK.shape[1] + 1, size)

    def _masks(self, num_most: int, size: int) -> jax.ShapeDtypeStruct:
        num_words = -(-self.row_state.seen_RV.shape[1] // 32)
        return self._array((num_most, size, num_words), jnp.uint32)

    # ---- of several steps ----------------------------------------------------------------------------

    def first_step(self, layout: MultiStepLayout) -> jax.ShapeDtypeStruct:
        return self.step(layout.step)

    def multi_step_lines(self, layout: MultiStepLayout) -> jax.ShapeDtypeStruct:
        return self._packed(layout.num_lines, NUM_COLUMNS + 1 + NUM_STOP_IDS)

    # ---- of one size ---------------------------------------------------------------------------------

    @property
    def table_entries(self) -> jax.ShapeDtypeStruct:
        return self._packed(3, TABLE_CHUNK)

    @property
    def prompt_tile(self) -> jax.ShapeDtypeStruct:
        return self._packed(2, PROMPT_LOGPROB_TILE)

    @property
    def row_upload(self) -> jax.ShapeDtypeStruct:
        """What `sampling.state.pack_row` makes."""
        return self._packed(self._row_layout.packed_size)

    @property
    def tokens_upload(self) -> jax.ShapeDtypeStruct:
        """What `pack_tokens` and `pack_trace` of `sampling.state` make."""
        return self._packed(TOKENS_HEADER + TOKENS_CHUNK)

    # ---- of drafts that are looked up ----------------------------------------------------------------

    @property
    def history_upload(self) -> jax.ShapeDtypeStruct:
        """What `lookup.pack_history` makes."""
        return self._packed(HEADER + CHUNK)

    def row_places(self, size: int) -> jax.ShapeDtypeStruct:
        """The rows that draft."""
        return self._packed(size)

    @property
    def ended_row(self) -> jax.ShapeDtypeStruct:
        """A row, and the number of tokens of its prompt."""
        return self._packed(2)

    # ---- of adapters ---------------------------------------------------------------------------------

    @property
    def lora(self) -> Any:
        """The stacks."""
        return self.functions.lora.shapes

    @property
    def lora_upload(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What `LoraSpec.pack` makes of an adapter."""
        return self.functions.lora.upload

    @property
    def lora_slot(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (), jnp.int32, sharding=NamedSharding(self.functions.attention.mesh, PartitionSpec())
        )

    @property
    def expert_places(self) -> Any:
        """Where experts are that move."""
        return placements_of(self.base_params)

    # ---- of pictures ---------------------------------------------------------------------------------

    @property
    def table(self) -> jax.ShapeDtypeStruct:
        """The number that each value of each channel of a pixel becomes."""
        return self._array((3, 256), jnp.float32)

    def pictures(self, layout: EncodeLayout) -> jax.ShapeDtypeStruct:
        return self._packed(layout.num_words)

    @property
    def slots(self) -> jax.ShapeDtypeStruct:
        """Of embeddings that are copied."""
        return self._packed(self.functions.encoder.num_copied)

    @property
    def embeds(self) -> jax.ShapeDtypeStruct:
        """What is in these slots."""
        return self._array((self.functions.encoder.num_copied, self.encoded.shape[1]), self.encoded.dtype)

    # ---- of copies of blocks, and of experts that move -----------------------------------------------

    def tensors(self, copy: BlockCopy) -> Any:
        return copy.tensors

    def block_ids(self, copy: BlockCopy) -> jax.ShapeDtypeStruct:
        return copy.block_ids

    def pages(self, copy: BlockCopy) -> tuple[jax.ShapeDtypeStruct, ...]:
        return copy.pages

    @property
    def expert_counts(self) -> jax.ShapeDtypeStruct:
        """How many tokens went to each expert: behind the KV tensors, where experts have tables."""
        return self.kv[-1]

    def part(self, part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """An array of a block of experts."""
        return part

    def sources(self, part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """The place from which each place of such an array gets its expert."""
        whole = NamedSharding(self.functions.attention.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(part.shape[:1], jnp.int32, sharding=whole)
