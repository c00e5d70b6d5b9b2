"""llama.cpp through llama-cpp-python's low-level interface: continuous batching over sequences of one context.

Each workload gets a context of the size that it needs, with a unified KV cache: making one takes milliseconds. A step
holds one token of every sequence that generates and fills up to `BATCH` tokens with prompts. A common beginning of
prompts is computed once and copied between sequences, as llama.cpp's own examples do. Its greedy sampler picks tokens.
"""

import ctypes
from collections import deque
from pathlib import Path
from typing import Any

from session import Session, Watch

MOST_SEQUENCES = 32
BATCH = 512


class Sequence:
    """One request on its way: `position` tokens are in the cache, `pending` come next."""

    def __init__(self, index: int, request: dict, slot: int):
        self.index, self.slot = index, slot
        self.pending = deque(request["prompt_token_ids"])
        self.left = request["max_tokens"]
        self.position = 0


class LlamaCppEngine:
    def __init__(self, job: dict):
        import llama_cpp

        self.lib, self.threads = llama_cpp, job["threads"]
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = -1
        path = Path(job["model"]) / f"model-{job['gguf']}.gguf"
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}. Its reason is in the log.")
        self.sampler = llama_cpp.llama_sampler_init_greedy()
        self.versions = {"llama-cpp-python": llama_cpp.__version__}

    def settle(self) -> None:
        """Nothing runs in the background."""

    def complete(self, requests: list[dict], watch: Watch, shared_prefix: int) -> None:
        num_slots = min(len(requests), MOST_SEQUENCES)
        context = self._make_context(requests, num_slots)
        batch = self.lib.llama_batch_init(BATCH, 0, 1)
        try:
            Run(self, context, batch, requests, watch, num_slots, shared_prefix).run()
        finally:
            self.lib.llama_batch_free(batch)
            self.lib.llama_free(context)

    def _make_context(self, requests: list[dict], num_slots: int) -> Any:
        sizes = sorted((len(request["prompt_token_ids"]) + request["max_tokens"] for request in requests), reverse=True)
        params = self.lib.llama_context_default_params()
        params.n_ctx = 256 * (sum(sizes[:num_slots]) // 256 + 1)
        params.n_seq_max = num_slots
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = self.threads
        params.kv_unified = True
        context = self.lib.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens. Its reason is in the log.")
        return context


class Run:
    """The requests of one workload in one context."""

    def __init__(
        self,
        engine: LlamaCppEngine,
        context: Any,
        batch: Any,
        requests: list[dict],
        watch: Watch,
        num_slots: int,
        shared_prefix: int,
    ):
        self.lib, self.sampler, self.context, self.batch = engine.lib, engine.sampler, context, batch
        self.memory = self.lib.llama_get_memory(context)
        self.watch, self.shared_prefix = watch, shared_prefix
        self.waiting = deque(enumerate(requests))
        self.free_slots = list(range(num_slots))
        self.running: list[Sequence] = []
        self.prefix_slot: int | None = None  # a sequence whose cache begins with the common tokens

    def run(self) -> None:
        while self.waiting or self.running:
            self._admit()
            sampling = self._fill_batch()
            status = self.lib.llama_decode(self.context, self.batch)
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status} for a batch of {self.batch.n_tokens} tokens.")
            for row, sequence in sampling:
                self._take_token(row, sequence)

    def _admit(self) -> None:
        """Give waiting requests free slots. While the common beginning is not computed, only one of them runs."""
        while self.waiting and self.free_slots:
            if self.shared_prefix and self.prefix_slot is None and self.running:
                return
            sequence = Sequence(*self.waiting.popleft(), self.free_slots.pop())
            if self.prefix_slot is not None and self.prefix_slot != sequence.slot:
                self.lib.llama_memory_seq_cp(self.memory, self.prefix_slot, sequence.slot, 0, self.shared_prefix)
                sequence.position = self.shared_prefix
                for _ in range(self.shared_prefix):
                    sequence.pending.popleft()
            self.running.append(sequence)

    def _fill_batch(self) -> list[tuple[int, Sequence]]:
        """Put the next tokens into the batch, generating sequences first. Returns (row, sequence) to sample."""
        self.batch.n_tokens = 0
        sampling = []
        for sequence in sorted(self.running, key=lambda sequence: len(sequence.pending) > 1):
            room = BATCH - self.batch.n_tokens
            for _ in range(min(room, len(sequence.pending))):
                self._put(sequence, last=len(sequence.pending) == 1)
            if room and not sequence.pending:
                sampling.append((self.batch.n_tokens - 1, sequence))
        return sampling

    def _put(self, sequence: Sequence, last: bool) -> None:
        row = self.batch.n_tokens
        self.batch.token[row] = sequence.pending.popleft()
        self.batch.pos[row] = sequence.position
        self.batch.n_seq_id[row] = 1
        self.batch.seq_id[row][0] = sequence.slot
        self.batch.logits[row] = ctypes.c_int8(last)
        self.batch.n_tokens += 1
        sequence.position += 1

    def _take_token(self, row: int, sequence: Sequence) -> None:
        token = self.lib.llama_sampler_sample(self.sampler, self.context, row)
        self.watch.add(sequence.index, [token])
        sequence.left -= 1
        if self.shared_prefix and self.prefix_slot is None:
            self.prefix_slot = sequence.slot
        if sequence.left:
            sequence.pending.append(token)
            return
        self.running.remove(sequence)
        if sequence.slot != self.prefix_slot:
            self.lib.llama_memory_seq_rm(self.memory, sequence.slot, -1, -1)
            self.free_slots.append(sequence.slot)


def main() -> None:
    session = Session()
    session.run(LlamaCppEngine(session.job))


if __name__ == "__main__":
    main()
