"""The table of programs, with builders that need no model."""

import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError as XlaError

from jaxpaged.errors import ProgramError
from jaxpaged.messages import ProgramKey
from jaxpaged.worker.engine_spec import default_token_buckets, doubling_buckets
from jaxpaged.worker.programs.compiled import (
    DEVICE_TURN_SECONDS,
    TURN_SECONDS,
    CompileCounter,
    CompiledPrograms,
    ShortTurns,
    enable_compilation_cache,
)


class FakeLowered:
    """Compiles to its own name, once `allowed`."""

    def __init__(self, name, allowed=None):
        self.name, self.allowed = name, allowed

    def compile(self):
        if self.allowed is not None:
            assert self.allowed.wait(10)
        return self.name


def builder(name, allowed=None):
    return lambda: FakeLowered(name, allowed)


def test_asking_for_a_program_moves_it_to_the_front():
    gate, begun, built = threading.Event(), threading.Event(), []
    keys = [ProgramKey("forward", size) for size in (8, 16, 32)]

    def build(key):
        built.append(key)
        begun.set()
        return FakeLowered(key, gate if key == keys[0] else None)

    programs = CompiledPrograms({key: lambda key=key: build(key) for key in keys}, num_threads=1)
    programs.start()
    assert begun.wait(10)
    waiter = threading.Thread(target=lambda: programs[keys[2]])
    waiter.start()
    while keys[2] not in programs._queue._hurried:
        pass
    gate.set()
    waiter.join(10)
    programs.wait_all()
    assert built == [keys[0], keys[2], keys[1]]
    assert programs.num_ready == 3


def test_the_smallest_ready_bucket_that_fits_is_used_and_otherwise_the_smallest_that_fits():
    gate = threading.Event()
    builders = {ProgramKey("forward", 8): builder("small", gate), ProgramKey("forward", 32): builder("large")}
    programs = CompiledPrograms(builders, num_threads=2)
    programs.start()
    assert programs[ProgramKey("forward", 32)] == "large"
    assert programs.smallest_ready("forward", 4, (8, 32)) == 32
    gate.set()
    programs.wait_all()
    assert programs.smallest_ready("forward", 4, (8, 32)) == 8
    assert programs.smallest_ready("sample", 4, (8, 32)) == 8


def test_while_none_is_ready_the_bucket_that_was_begun_first_is_waited_for():
    gate = threading.Event()
    keys = [ProgramKey("forward", size) for size in (32, 16, 8)]
    programs = CompiledPrograms({key: builder(key.size, gate) for key in keys}, num_threads=1)
    assert programs.smallest_ready("forward", 4, (8, 16, 32)) == 8
    programs.start()
    while not programs._begun:
        pass
    assert programs.smallest_ready("forward", 4, (8, 16, 32)) == 32
    gate.set()
    programs.wait_all()
    assert programs.smallest_ready("forward", 4, (8, 16, 32)) == 8


def test_the_largest_usable_bucket_is_compiled_or_was_begun_first_or_nobody_has_begun_with_any():
    gate, buckets = threading.Event(), (8, 16, 32)
    keys = [ProgramKey("forward", size) for size in (16, 8, 32)]
    programs = CompiledPrograms({key: builder(key.size, gate) for key in keys}, num_threads=1)
    assert programs.largest_usable("forward", buckets) == 32
    programs.start()
    while not programs._begun:
        pass
    assert programs.largest_usable("forward", buckets) == 16
    gate.set()
    programs.wait_all()
    assert programs.largest_usable("forward", buckets) == 32


def test_a_failed_compilation_is_raised_where_the_program_is_needed():
    def fail():
        raise ValueError("no such operation")

    programs = CompiledPrograms({ProgramKey("full", 8): fail}, num_threads=1, rare=[ProgramKey("full", 8)])
    programs.start()
    with pytest.raises(ValueError, match="no such operation"):
        programs[ProgramKey("full", 8)]
    programs.trace_first()


LASTING = [
    ValueError("float13 is no type\nand more"),
    TypeError("float13 is no type"),
    XlaError("INVALID_ARGUMENT: float13 is no type"),
]
PASSING = [
    MemoryError("no room"),
    OSError("no space"),
    XlaError("RESOURCE_EXHAUSTED: no room"),
    XlaError("INTERNAL: lost"),
]


class Broken:
    """A program that fails with `error` when it is compiled."""

    def __init__(self, error):
        self.error = error

    def compile(self):
        raise self.error


@pytest.mark.parametrize("error", LASTING, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("traced", [True, False])
def test_what_ordinary_requests_need_and_can_never_be_compiled_is_the_end_in_one_sentence(error, traced, caplog):
    def fail():
        if traced:
            return Broken(error)
        raise error

    keys = [ProgramKey("forward", 8), ProgramKey("forward", 16)]
    programs = CompiledPrograms({keys[0]: builder("small"), keys[1]: fail}, num_threads=1, first=2)
    programs.start()
    with pytest.raises(ProgramError, match="forward of size 16 cannot be compiled: .*float13 is no type. Another"):
        programs.wait_all()
    with pytest.raises(ProgramError) as caught:
        programs.trace_first()
    assert str(programs.failure) == str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.__cause__ is None and not caplog.records


@pytest.mark.parametrize("traced", [True, False])
def test_what_cannot_be_traced_is_found_before_anything_is_compiled(traced):
    """Whoever comes first, a thread or the one that starts the engine."""
    gate, tried = threading.Event(), []
    keys = [ProgramKey("zeros"), ProgramKey("forward", 8), ProgramKey("forward", 16)]

    def fail():
        tried.append(1)
        raise ValueError("float13 is no type")

    builders = {keys[0]: builder("zeros", gate), keys[1]: fail, keys[2]: builder("large", gate)}
    programs = CompiledPrograms(builders, num_threads=1, first=2)
    if traced:
        programs.start()
    with pytest.raises(ProgramError, match="float13"):
        programs.trace_first()
    assert len(tried) == 1
    gate.set()
    programs.stop()


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_what_failed_for_want_of_room_is_no_verdict_on_the_program(error):
    programs = CompiledPrograms({ProgramKey("forward", 8): lambda: Broken(error)}, num_threads=1, first=1)
    programs.start()
    with pytest.raises(type(error)):
        programs.wait_all()
    programs.trace_first()
    assert programs.failure is None


def test_a_program_is_traced_once_and_not_kept_when_it_is_compiled():
    built, gate, keys = [], threading.Event(), [ProgramKey("forward", 8), ProgramKey("forward", 16)]

    def build(key):
        built.append(key)
        return FakeLowered(key, gate)

    programs = CompiledPrograms({key: lambda key=key: build(key) for key in keys}, num_threads=1, first=2)
    programs.trace_first()
    programs.start()
    programs.trace_first()
    gate.set()
    assert built == keys and list(programs.wait_all().values()) == keys
    assert not programs._traced


def test_the_states_of_programs_say_what_there_is_and_what_is_missing():
    gate = threading.Event()
    broken = lambda: (_ for _ in ()).throw(ValueError("no"))
    keys = [ProgramKey("forward", size) for size in (8, 16, 32, 64)]
    builders = dict(zip(keys, [builder("a"), broken, builder("c", gate), builder("d")]))
    programs = CompiledPrograms(builders | {ProgramKey("rare"): builder("e")}, 1, on_demand=[ProgramKey("rare")])
    assert [state for *_, state in programs.states] == ["queued"] * 4
    programs.start()
    with pytest.raises(ProgramError):
        programs[keys[1]]
    while len(programs._begun) < 3:
        pass
    assert programs.states == [
        ("forward", 8, "ready"),
        ("forward", 16, "failed"),
        ("forward", 32, "compiling"),
        ("forward", 64, "queued"),
    ]
    gate.set()
    assert programs[keys[3]] == "d"


def test_after_stop_nothing_more_is_compiled():
    programs = CompiledPrograms({ProgramKey("forward", 8): builder("small")}, num_threads=1)
    programs.stop()
    programs.start()
    with pytest.raises(RuntimeError, match="shut down"):
        programs[ProgramKey("forward", 8)]


def test_a_program_on_demand_is_compiled_once_it_is_wanted_before_what_nobody_asked_for():
    gate, built = threading.Event(), []
    keys = [ProgramKey("forward", 8), ProgramKey("forward", 16), ProgramKey("decode", 8), ProgramKey("decode", 16)]
    begun = threading.Event()

    def build(key):
        built.append(key)
        begun.set()
        return FakeLowered(key, gate)

    builders = {key: lambda key=key: build(key) for key in keys}
    programs = CompiledPrograms(builders, num_threads=1, on_demand=keys[2:])
    assert programs.num_wanted == 2
    programs.start()
    assert begun.wait(10)
    assert not programs.is_ready(keys[2])
    assert programs.num_wanted == 3
    gate.set()
    while programs.num_ready < 3:
        pass
    assert built == [keys[0], keys[2], keys[1]]
    assert programs.is_ready(keys[2])
    assert list(programs.wait_all(on_demand=True)) == keys, "also when all threads have ended before"


def test_programs_of_ordinary_requests_come_first_and_are_counted_apart():
    kinds = {"full": False, "forward": True, "sample": True, "decode": False}
    keys, gates, order = [ProgramKey(kind, 8) for kind in kinds], {}, []
    builders = {}
    for key in keys:
        gates[key] = threading.Event()
        made = builder(key.kind, gates[key])
        builders[key] = lambda key=key, made=made: (order.append(key.kind), made())[1]
    programs = CompiledPrograms(builders, num_threads=1, on_demand=keys[3:], rare=keys[:1])
    assert [key.kind for key in programs.ordinary] == ["forward", "sample"]
    programs.start()
    assert programs.num_ordinary_ready == 0
    gates[keys[1]].set()
    programs[keys[1]]
    assert programs.num_ordinary_ready == 1
    for gate in gates.values():
        gate.set()
    programs.wait_all()
    assert order == ["forward", "sample", "full"] and programs.num_ordinary_ready == 2
    programs.stop()


def test_an_ordinary_program_that_cannot_be_compiled_is_never_counted_as_ready():
    def fail():
        raise ValueError("no")

    programs = CompiledPrograms({ProgramKey("forward", 8): fail}, num_threads=1)
    programs.start()
    with pytest.raises(ProgramError):
        programs.wait_all()
    assert (programs.num_ready, programs.num_ordinary_ready, len(programs.ordinary)) == (1, 0, 1)


def test_a_program_on_demand_that_cannot_be_compiled_is_never_ready():
    def fail():
        raise ValueError("no such operation")

    programs = CompiledPrograms({ProgramKey("decode", 8): fail}, num_threads=1, on_demand=[ProgramKey("decode", 8)])
    programs.start()
    assert not programs.is_ready(ProgramKey("decode", 8))
    while not programs.num_ready:
        pass
    assert not programs.is_ready(ProgramKey("decode", 8))


def test_a_program_that_somebody_waits_for_goes_to_the_front_and_its_failure_is_raised():
    gate, built = threading.Event(), []
    keys = [ProgramKey("forward", 8), ProgramKey("forward", 16), ProgramKey("masked", 8), ProgramKey("masked", 16)]

    def build(key):
        built.append(key)
        if key == keys[2]:
            raise ValueError("no such operation")
        return FakeLowered(key, gate)

    builders = {key: lambda key=key: build(key) for key in keys}
    programs = CompiledPrograms(builders, num_threads=1, on_demand=keys[2:])
    programs.start()
    while not built:
        pass
    assert not programs.prepare(keys[2])
    assert not programs.prepare(keys[3]), "the one that was asked for last comes first"
    gate.set()
    while programs.num_ready < len(keys):
        pass
    assert built == [keys[0], keys[3], keys[2], keys[1]]
    assert programs.prepare(keys[3])
    with pytest.raises(ValueError, match="no such operation"):
        programs.prepare(keys[2])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_programs_are_lowered_one_at_a_time_and_compiled_side_by_side():
    lowering, most, compiling = [0], [0], threading.Barrier(3, timeout=10)

    class Lowered:
        def compile(self):
            compiling.wait()  # until all three do
            return "compiled"

    def lower():
        lowering[0] += 1
        time.sleep(0.02)
        most[0] = max(most[0], lowering[0])
        lowering[0] -= 1
        return Lowered()

    programs = CompiledPrograms({ProgramKey("forward", size): lower for size in (8, 16, 32)}, num_threads=3)
    programs.start()
    assert set(programs.wait_all().values()) == {"compiled"}
    assert most == [1]


def test_threads_take_short_turns_until_the_last_program_of_all_engines_is_there():
    before, gates = sys.getswitchinterval(), (threading.Event(), threading.Event())
    tables = [CompiledPrograms({ProgramKey("forward", 8): builder("program", gate)}, num_threads=2) for gate in gates]
    for table in tables:
        table.start()
    for table, gate in zip(tables, gates):
        assert sys.getswitchinterval() == pytest.approx(DEVICE_TURN_SECONDS, abs=2e-6)
        gate.set()
        table.wait_all()
    deadline = time.monotonic() + 10
    while sys.getswitchinterval() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sys.getswitchinterval() == before


def test_the_shortest_turns_that_anybody_wants_hold_until_the_last_one_ends():
    sys.setswitchinterval(0.005)
    turns = ShortTurns()
    for seconds in (TURN_SECONDS, DEVICE_TURN_SECONDS) * 2:
        turns.begin(seconds)
        assert sys.getswitchinterval() <= seconds
    for _ in range(3):
        turns.end()
        assert sys.getswitchinterval() == pytest.approx(DEVICE_TURN_SECONDS, abs=2e-6)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_what_compiling_has_freed_goes_back_to_the_system():
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    key, kept, seen = ProgramKey("forward", 8), [], []

    class Dear:
        def compile(self):
            pieces = [bytes(2000) for _ in range(40_000)]
            kept.append(pieces[-1])  # behind all that is freed, so that glibc cannot shorten its heap by itself
            seen.append(resident())
            return "program"

    programs = CompiledPrograms({key: Dear}, num_threads=1)
    programs.start()
    programs.wait_all()
    deadline = time.monotonic() + 30
    while (least := resident()) > seen[0] - 40e6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert least < seen[0] - 40e6, "80 MB were freed"


def test_the_counter_sees_a_compilation_by_anyone():
    with CompileCounter() as counter:
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
        assert counter.count >= 1
        before = counter.count
        jax.jit(lambda x: x * 3 + 1).lower(jax.ShapeDtypeStruct((9,), jnp.int32)).compile()
        assert counter.count == before + 1


def test_buckets_double_up_to_the_largest():
    assert doubling_buckets(512, "tpu") == (8, 16, 32, 64, 128, 256, 512)
    assert doubling_buckets(100, "gpu") == (8, 16, 32, 64, 100)
    assert doubling_buckets(1, "gpu") == (8,)


def test_steps_of_many_tokens_have_sizes_between_the_doubling_ones():
    assert default_token_buckets(512, "tpu") == (8, 16, 32, 64, 128, 192, 256, 384, 512)
    assert default_token_buckets(300, "gpu") == (8, 16, 32, 64, 128, 192, 256, 300)
    assert default_token_buckets(128, "cpu") == (2, 8, 16, 32, 64, 128)


def test_a_cpu_has_a_bucket_for_a_single_request():
    assert doubling_buckets(100, "cpu") == (2, 8, 16, 32, 64, 100)
    assert doubling_buckets(1, "cpu") == (2, 8)


def test_a_cpu_with_kernels_for_few_rows_has_buckets_for_a_few_requests():
    assert doubling_buckets(20, "cpu", kernels=True) == (1, 2, 4, 8, 16, 20)
    assert default_token_buckets(16, "cpu", kernels=True) == (1, 2, 4, 8, 16)
    assert doubling_buckets(20, "tpu", kernels=True) == (8, 16, 20)


def test_a_cache_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "file").write_text("")
    try:
        enable_compilation_cache(str(tmp_path / "file" / "cache"))
        assert "cannot write" in caplog.text
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def compile_small(factor):
    return jax.jit(lambda x: x * factor - 2).lower(jax.ShapeDtypeStruct((11,), jnp.int32)).compile()


def answer_of(program):
    return np.asarray(program(np.arange(11, dtype=np.int32)))[1]


@pytest.fixture
def cache_folder(tmp_path):
    """A compilation cache of its own; the suite's is back afterwards."""
    before = jax.config.jax_compilation_cache_dir
    enable_compilation_cache(str(tmp_path))
    yield tmp_path
    enable_compilation_cache("off" if before is None else before)


def test_a_disk_that_fills_while_the_cache_is_written_is_a_warning(cache_folder, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    monkeypatch.setattr("etils.epath.gpath._GPath.write_bytes", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        program = compile_small(5)
    assert answer_of(program) == 3
    assert not list(cache_folder.glob("*-cache"))


def test_an_entry_that_was_cut_off_is_a_warning_and_compiled_again(cache_folder):
    assert answer_of(compile_small(7)) == 5
    (entry,) = cache_folder.glob("*-cache")
    entry.write_bytes(entry.read_bytes()[:200])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        program = compile_small(7)
    assert answer_of(program) == 5


def test_where_the_cache_is_off_nothing_that_came_from_it_is_taken_for_compiled(cache_folder):
    """It could not be stored in a bundle."""
    lowered = lambda: jax.jit(jnp.add).lower(*[jax.ShapeDtypeStruct((11,), jnp.int32)] * 2)
    with CompileCounter() as counter:
        lowered().compile()
        lowered().compile()
        assert counter.count == 1
        enable_compilation_cache("off")
        lowered().compile()
        assert counter.count == 2


def test_stored_programs_are_loaded_and_not_compiled():
    keys = [ProgramKey("forward", 8), ProgramKey("forward", 32)]
    programs = CompiledPrograms({key: builder("compiled") for key in keys}, stored={keys[0]: lambda: "loaded"})
    programs.start()
    assert programs.wait_all() == {keys[0]: "loaded", keys[1]: "compiled"}
    assert list(programs.seconds) == [keys[1]]
