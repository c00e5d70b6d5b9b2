"""Compiles the programs of a plan, those of every stage, and says what the compiler says of them."""

import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from jaxpaged.messages import ProgramKey, Progress
from jaxpaged.params.sharding import bytes_on_device
from jaxpaged.tools.counting.estimate import Rates
from jaxpaged.tools.counting.program_text import ProgramText
from jaxpaged.tools.planning.plan import PlannedProgram
from jaxpaged.worker.programs.declare import SAMPLE_KINDS, ProgramKind
from jaxpaged.worker.programs.engine_programs import EnginePrograms
from jaxpaged.worker.programs.stages import builders_of, lowered_stages


class Compiler:
    """`stages`: the programs of each; of an engine without stages one. `compiled`: those of the last stage. `rates`:
    what a device reaches."""

    def __init__(self, stages: Sequence[EnginePrograms], rates: Rates):
        self.stages, self.rates = stages, rates
        self.builders = builders_of(stages)
        self.compiled: dict[ProgramKey, jax.stages.Compiled] = {}

    @property
    def representative(self) -> list[ProgramKey]:
        """All programs of prompts and pictures, and of every other kind the largest, which has the most temporaries."""
        largest: dict[str, int] = {}
        for key in self.builders:
            largest[key.kind] = max(key.size, largest.get(key.kind, 0))
        whole = (ProgramKind.FORWARD, ProgramKind.ENCODE)
        return [key for key in self.builders if key.kind in whole or key.size == largest[key.kind]]

    def compile(self, keys: Sequence[ProgramKey], progress: Progress) -> list[PlannedProgram]:
        """What the compiler says of all of these."""
        progress("programs", 0, len(keys))
        done = itertools.count(1)

        def compile_one(key: ProgramKey) -> list[PlannedProgram]:
            programs = self.compile_program(key)
            progress("programs", next(done), len(keys))
            return programs

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
            return [program for programs in threads.map(compile_one, keys) for program in programs]

    def compile_program(self, key: ProgramKey) -> list[PlannedProgram]:
        """What the compiler says of a program on each stage that has it, or why it cannot compile it."""
        found: list[PlannedProgram] = []
        begin, number = time.perf_counter(), 0
        try:
            with jax.sharding.use_abstract_mesh(self.stages[-1].engine_spec.mesh.abstract_mesh):
                lowered = self.builders[key]()
            for stage, part in lowered_stages(lowered, len(self.stages)):
                number = self._number(stage)
                found.append(self._compile(key, stage, part, begin))
                begin = time.perf_counter()
        except Exception as error:  # what a compiler refuses is a finding, whatever its type
            seconds = time.perf_counter() - begin
            found.append(PlannedProgram(*key, seconds, error=first_line(error), stage=number))
        return found

    def _number(self, stage: int) -> int:
        return stage + 1 if len(self.stages) > 1 else 0

    def _compile(self, key: ProgramKey, stage: int, lowered: jax.stages.Lowered, begin: float) -> PlannedProgram:
        with jax.sharding.use_abstract_mesh(self.stages[stage].engine_spec.mesh.abstract_mesh):
            compiled = lowered.compile()
        if stage == len(self.stages) - 1:
            self.compiled[key] = compiled
        seconds, memory, cost = time.perf_counter() - begin, compiled.memory_analysis(), compiled.cost_analysis() or {}
        text = ProgramText(compiled.as_text(), self.kv_tensor_bytes(stage))
        collectives = text.collectives()
        return PlannedProgram(
            *key,
            seconds,
            temporary_bytes=memory.temp_size_in_bytes,
            output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
            flops=cost.get("flops", 0.0),
            memory_bytes=text.memory_bytes(),
            seconds=self.rates.program_seconds(text.region),
            collectives=collectives.counts,
            waited_bytes=collectives.waited_bytes,
            hidden_bytes=collectives.hidden_bytes,
            stage=self._number(stage),
            sent_bytes=self._sent_bytes(key, stage),
        )

    def kv_tensor_bytes(self, stage: int) -> set[int]:
        """Bytes of the arrays that hold the KV cache, each as long as all blocks of a layer."""
        return {bytes_on_device(leaf) for leaf in jax.tree.leaves(self.stages[stage].shapes.kv)}

    def _sent_bytes(self, key: ProgramKey, stage: int) -> int:
        """What each device of the next stage gets: hidden states; of the first one after the last, drawn tokens."""
        shapes, is_last = self.stages[stage].shapes, stage == len(self.stages) - 1
        if key.kind == ProgramKind.FORWARD and not is_last:
            return bytes_on_device(shapes.hidden_states(key.size))
        if key.kind in SAMPLE_KINDS and len(self.stages) > 1:
            return bytes_on_device(shapes.rows.last_token_R)
        return 0


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
