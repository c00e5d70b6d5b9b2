"""An engine core for processes of their own: no jax, a model that counts, and requests that do harm when asked to.

`extra_args={"fake": ...}` of a request says what its first step does: "die" (signal 9), "hang", "raise" (the step
fails), "break" (and the device does not recover), "slow" (20 ms in this and every later step until one fails), or
"stuck" (sleep never ends), "slow to wake" (which takes 2.4 s, and tells of it) or "never awake" (and tells nothing).
"""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.process.core_server import CoreServer
from jaxpaged.engine.process.heartbeat import Heartbeat
from jaxpaged.engine.process.wire import CoreFacts, Reports
from jaxpaged.errors import CapacityError, CheckpointError, ConflictError
from jaxpaged.kv_cache_spec import AttentionSpec, EncoderCacheConfig, KVCacheConfig, KVCacheGroup
from jaxpaged.messages import LoRAInfo, LoRARequest, ModelRunnerOutput, Progress, SchedulerOutput
from jaxpaged.sampling_params.features import Extra
from tests.engine.fake_weights import FakeWeights

DEMO = Path(__file__).parents[2] / "jaxpaged" / "assets" / "demo"
FACTORY = "tests.engine.fake_core:build"
VOCAB_SIZE = 4096
FACTS = ModelFacts(max_position_embeddings=32768, dtype="float32", num_heads=1, vocab_size=VOCAB_SIZE)


def token_at(position: int) -> int:
    """What the model says at a position, whatever was said before."""
    return 300 + position % 500


def answer(num_prompt_tokens: int, num_tokens: int) -> list[int]:
    """What a prompt of that many tokens is answered with."""
    return [token_at(num_prompt_tokens + i) for i in range(num_tokens)]


@dataclass
class Done:
    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


class CountingExecutor(FakeWeights):
    """Computes a step at once, in time that grows with nothing but its requests."""

    def __init__(self, num_blocks: int, block_size: int = 16):
        self.kv_cache_config = KVCacheConfig((num_blocks,), (KVCacheGroup(AttentionSpec(block_size, 1, 1, 2), (0,)),))
        self.encoder_cache_config = EncoderCacheConfig(num_pages=64, page_size=4, max_step_embeds=64)
        self.steps = 0
        self.slow = False
        self.broken = False
        self.stuck = False
        self.waking: str | None = None
        self.progress: Progress = lambda *told: None
        self.asleep: set[str] = set()
        self.profiling = False
        self.host: dict[int, int] = {}  # adapters by number: what each adds to tokens, which is the name of its folder
        self.slots: dict[int, int] = {0: 0}
        self.changes: dict[str, int] = {}  # of requests with adapters

    def execute_model(self, scheduled: SchedulerOutput) -> Done:
        assert not self.asleep
        self.steps += 1
        self.slots |= {slot: self.host[number] for slot, number in scheduled.lora_loads}
        for new in scheduled.new_requests:
            self.changes[new.request_id] = self.slots[new.lora_slot]
            self._obey((new.sampling_params.extra_args or {}).get("fake"))
        if self.slow:
            time.sleep(0.02)
        output = ModelRunnerOutput(scheduled.step_id, [], [])
        rows = zip(scheduled.request_ids, scheduled.num_computed_tokens, scheduled.num_scheduled_tokens)
        for (request_id, computed, count), most in zip(rows, scheduled.max_sampled_tokens):
            if most:
                output.request_ids.append(request_id)
                output.sampled_token_ids.append([token_at(computed + count) + self.changes[request_id]])
        return Done(output)

    def _obey(self, order: str | None) -> None:
        if order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif order == "hang":
            time.sleep(3600)
        elif order in ("raise", "break"):
            self.broken = order == "break"
            raise RuntimeError("the device is on fire")
        elif order == "slow":
            self.slow = True
        elif order == "stuck":
            self.stuck = True
        elif order in ("slow to wake", "never awake"):
            self.waking = order

    def max_step_tokens(self) -> int:
        return 1 << 30

    def max_decode_steps(self) -> int:
        return 1

    def can_run(self, extra: Extra) -> bool:
        return True

    @property
    def workers(self):
        return self

    def recover(self) -> None:
        assert not self.broken, "the device is gone"
        self.slow = False

    def sleep(self, discard: bool) -> None:
        if self.stuck:
            time.sleep(3600)
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, part: str) -> None:
        for done in range(8 if part == "weights" and self.waking else 0):
            time.sleep(0.3 if self.waking == "slow to wake" else 3600)
            self.progress("weights", done, 8)
        self.asleep.discard(part)

    def read_lora(self, request: LoRARequest) -> LoRAInfo:
        name = Path(request.lora_path).name
        if not name.isdigit():
            raise CheckpointError(f"{request.lora_path} has no adapter_config.json.")
        self.host[request.lora_int_id] = int(name)
        return LoRAInfo(request.lora_name, request.lora_int_id, request.lora_path, f"adds {name}")

    def drop_lora(self, lora_int_id: int) -> None:
        del self.host[lora_int_id]

    def start_profile(self, folder: str | None) -> None:
        if self.profiling:
            raise ConflictError("a profile is being recorded.")
        self.profiling = True

    def stop_profile(self) -> None:
        self.profiling = False

    def wait_for_programs(self) -> None:
        pass

    def stats(self) -> dict:
        return {"steps": self.steps, "pid": os.getpid(), "jax": "jax" in sys.modules}

    def shutdown(self) -> None:
        pass


def resolved(config: EngineConfig) -> tuple[EngineConfig, CoreFacts]:
    config = config.resolve(FACTS, "cpu")
    return config, CoreFacts(config.options(), VOCAB_SIZE, str(DEMO), str(DEMO))


def make_core(config: EngineConfig) -> EngineCore:
    return EngineCore(config, CountingExecutor(config.cache.num_gpu_blocks_override or 4096))


def build(config: EngineConfig, reports: Reports) -> EngineCore:
    """A `core_process.Factory`."""
    config, facts = resolved(config)
    reports.announce(facts)
    reports.progress("weights", 1, 2)
    reports.progress("weights", 2, 2)
    core = make_core(config)
    core.executor.progress = reports.progress
    return core


def build_nothing(config: EngineConfig, reports: Reports) -> EngineCore:
    """A factory that finds too little memory once the options are known."""
    reports.announce(resolved(config)[1])
    raise CapacityError("the weights need 3 GiB, but 2 GiB are free. Use a smaller model.")


def build_what_cannot_compute(config: EngineConfig, reports: Reports) -> EngineCore:
    """A factory of a core that serves, and finds later that a program cannot be compiled."""
    core, begin = build(config, reports), time.monotonic()
    failure = lambda: "the model cannot run: program forward of size 8 cannot be compiled: no."
    core.executor.stats = lambda: (
        {"programs": 2, "programs_ready": 1, "program_failure": failure() if time.monotonic() > begin + 0.2 else None}
    )
    return core


def build_and_die(config: EngineConfig, reports: Reports) -> EngineCore:
    """A factory that the system kills."""
    os.kill(os.getpid(), signal.SIGKILL)


def build_and_stop(config: EngineConfig, reports: Reports) -> EngineCore:
    """A factory in which nothing goes on, not even the interpreter."""
    os.kill(os.getpid(), signal.SIGSTOP)


@contextlib.contextmanager
def core_in_thread(**options) -> Iterator[str]:
    """The address of a fake core that a thread of this process serves: real messages, and nothing to start."""
    config, facts = resolved(EngineConfig.from_options(**options))
    with tempfile.TemporaryDirectory(prefix="jaxpaged-", dir="/tmp") as folder:
        heartbeat = Heartbeat(Path(folder) / "heartbeat")
        server = CoreServer(make_core(config), facts, f"ipc://{folder}/core.sock", heartbeat)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            yield f"ipc://{folder}/core.sock"
        finally:
            server.stop()
            thread.join()
            server.close()
            heartbeat.close()


@contextlib.contextmanager
def llm_in_thread(**options) -> Iterator[AsyncLLM]:
    """An `AsyncLLM` over such a core, with the embedded model's tokenizer: what tests of servers run on. With
    `data_parallel_size` it is over several, each in a thread of its own."""
    with contextlib.ExitStack() as stack:
        cores = [stack.enter_context(core_in_thread(**options)) for _ in range(options.get("data_parallel_size", 1))]
        llm = AsyncLLM.from_address(",".join(cores))
        try:
            yield llm
        finally:
            llm.shutdown()
