"""An engine with adapters without its core: steps by hand, of requests each with a slot."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import LoRARequest, NewRequestData, SchedulerOutput
from jaxpaged.params.adapters.adapter import Adapter, AdapterWeights
from jaxpaged.params.adapters.targets import EMBEDDING, targets_of
from jaxpaged.params.quantized import QuantizedArray, is_quantized
from jaxpaged.sampling_params import SamplingParams

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "max_model_len": 48,
    "block_size": 4,
    "num_gpu_blocks_override": 64,
    "dtype": "float32",
    "max_logprobs": 211,
    "num_scheduler_steps": 1,
}


def adapted_executor(
    model: Path, max_loras: int = 3, max_lora_rank: int = 8, modules: tuple[str, ...] = (), **options: Any
) -> UniProcExecutor:
    """An executor of an engine that takes adapters of some modules, or of all; `options` are others than `OPTIONS`."""
    config = EngineConfig.from_options(model=str(model), **{**OPTIONS, **options})
    folder, functions, decoder, config = resolve_model(with_lora(config, max_loras, max_lora_rank, modules))
    return UniProcExecutor(config, functions, decoder, folder)


def with_lora(config: EngineConfig, max_loras: int, max_lora_rank: int, modules: tuple[str, ...] = ()) -> EngineConfig:
    """The options of an engine that takes adapters."""
    sizes = {"max_loras": max_loras, "max_lora_rank": max_lora_rank, "lora_target_modules": modules}
    return replace(config, lora=replace(config.lora, enable_lora=True, **sizes))


class Adapters:
    """Adapters made of seeds, which a worker reads in place of files."""

    def __init__(self, executor: UniProcExecutor):
        spec = executor.worker.engine_spec
        assert spec.lora is not None and executor.worker.adapters is not None
        self._paths, self._sizes = spec.lora.paths, spec.whole.dim_sizes()
        self._targets = targets_of(spec.whole_specs)
        self.made: dict[int, Adapter] = {}
        executor.worker.adapters._read = self._read

    def make(self, number: int, rank: int = 4, dora: bool = False, scale: float = 0.5) -> dict[str, AdapterWeights]:
        """An adapter of all targets that have stacks."""
        draw, weights = np.random.default_rng(number), {}
        for path in sorted(self._paths):
            target = self._targets[path]
            inputs, outputs = ([self._sizes[x] for x in letters] for letters in (target.inputs, target.outputs))
            experts = [self._sizes["E"]] if target.is_experts else []
            a = draw.normal(size=(*experts, rank, *inputs)).astype(np.float32) / np.sqrt(np.prod(inputs))
            b = draw.normal(size=(*experts, *outputs, rank)).astype(np.float32) * scale / np.sqrt(rank)
            scaled = inputs if target.kind == EMBEDDING else outputs
            magnitude = 1 + draw.normal(size=(*experts, *scaled)).astype(np.float32) / 4 if dora else None
            weights[path] = AdapterWeights(a, b, magnitude)
        self.made[number] = Adapter(f"digest {number}", rank, 2 * len(weights), weights)
        return weights

    def _read(self, request: LoRARequest) -> Adapter:
        return self.made[request.lora_int_id]


def merged(params: Any, weights: Mapping[str, AdapterWeights]) -> Any:
    """The parameters of a model on one device, in float32, with an adapter in them, from sums in float64. No weights
    may lie side by side. A head that is the table of embeddings becomes one of its own."""
    left = set(weights)

    def of_leaf(path: Any, leaf: Any) -> jax.Array:
        return changed(jax.tree_util.keystr(path), leaf)

    def changed(path: str, leaf: Any) -> jax.Array:
        whole = np.asarray(leaf if isinstance(leaf, jax.Array) else leaf.values, np.float64)
        if isinstance(leaf, QuantizedArray):
            whole = whole * np.asarray(leaf.scales, np.float64)[..., None].reshape(
                *leaf.scales.shape, *[1] * (whole.ndim - leaf.scales.ndim)
            )
        if (own := weights.get(path.removesuffix(".weight"))) is not None and whole.ndim > 1:
            left.remove(path.removesuffix(".weight"))
            a, b = own.a.astype(np.float64), own.b.astype(np.float64)
            are_experts = a.ndim == b.ndim == whole.ndim == 3
            whole = whole + (np.einsum("eor,eri->eoi", b, a) if are_experts else np.tensordot(b, a, 1))
            if own.magnitude is not None and path == ".embed_tokens":
                whole = whole * own.magnitude
            elif own.magnitude is not None:
                whole = whole * own.magnitude.reshape(*own.magnitude.shape, *[1] * (whole.ndim - own.magnitude.ndim))
        return jax.device_put(whole.astype(np.float32), jax.devices()[0])

    found = jax.tree_util.tree_map_with_path(of_leaf, params, is_leaf=is_quantized)
    if ".lm_head" in left and params.lm_head is None:
        found = found.replace(lm_head=changed(".lm_head", params.embed_tokens))
    assert not left, f"weights of the adapter that are in no parameter: {left}"
    return found


class Steps:
    """Requests that were never heard of before, computed to the end, each with blocks of its own."""

    def __init__(self, executor: UniProcExecutor):
        self.executor, self._number = executor, 0
        self.last = ""  # the name of the newest request

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int],
        num_tokens: int = 3,
        loads: Sequence[tuple[int, int]] = (),
    ) -> list[tuple[list[int], np.ndarray]]:
        """Of each prompt with the adapter in its slot: the tokens drawn, and log probabilities [tokens, V] by token."""
        names = [f"r{self._number + i}" for i in range(len(prompts))]
        self._number, self.last = self._number + len(prompts), names[-1]
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=num_tokens, logprobs=OPTIONS["max_logprobs"])
        blocks = [([*range(1 + 12 * i, 13 + 12 * i)],) for i in range(len(prompts))]
        new = [
            NewRequestData(name, [*prompt], len(prompt), 0, own, params, lora_slot=slot)
            for name, prompt, own, slot in zip(names, prompts, blocks, slots, strict=True)
        ]
        lines: list[list[np.ndarray]] = [[] for _ in names]
        tokens: list[list[int]] = [[] for _ in names]
        ones = [1] * len(names)
        for step in range(num_tokens):
            counts = ones if step else [len(prompt) for prompt in prompts]
            computed = [len(prompt) + step - 1 if step else 0 for prompt in prompts]
            scheduled = SchedulerOutput(
                step,
                [] if step else new,
                [],
                names,
                counts,
                computed,
                [1] * len(names),
                [None] * len(names),
                sum(counts),
            )
            scheduled.lora_loads = [] if step else [*loads]
            output = self.executor.execute_model(scheduled).result()
            assert not output.failed, output.failed
            for i, (token_ids, logprobs) in enumerate(zip(output.logprobs.token_ids, output.logprobs.logprobs)):
                by_token = np.empty(len(token_ids) - 1)
                by_token[token_ids[1:]] = logprobs[1:]
                lines[i].append(by_token)
                tokens[i].append(output.sampled_token_ids[i][0])
        self.executor.execute_model(SchedulerOutput(0, [], names, [], [], [], [], []))
        return [(token, np.stack(line)) for token, line in zip(tokens, lines)]
