"""Programs that an earlier start compiled: found without tracing, and compiled anew where something is wrong."""

import gzip
import subprocess
import sys
from functools import partial
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.layers import norm
from jaxpaged.messages import ProgramKey
from jaxpaged.worker.programs.compiled import CompileCounter, CompiledPrograms, enable_compilation_cache
from jaxpaged.worker.programs.engine_programs import EnginePrograms
from jaxpaged.worker.programs.fingerprint import replaced_code
from jaxpaged.worker.programs.program_index import ProgramIndex
from tests.models.checkpoints import write_checkpoint
from tests.worker.programs.test_bundles import answers, start

KEY = ProgramKey("double", 4)


@pytest.fixture
def folder(tmp_path):
    """jax's cache, for this test alone."""
    enable_compilation_cache(str(tmp_path))
    yield tmp_path
    enable_compilation_cache("off")


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:1]), ("model",))


@pytest.fixture
def lower(mesh):
    """Each `Lowered` remembers what it was compiled to, so tests make one for each time."""

    def lower():
        place = NamedSharding(mesh, PartitionSpec())
        double = jax.jit(lambda x: x + x, out_shardings=place)
        return double.lower(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=place))

    return lower


def index_of(folder, mesh, options="", num_blocks=(4,)):
    return ProgramIndex(folder, {"options": options}, num_blocks, mesh, ())


def twice(program, mesh):
    x = jax.device_put(np.arange(4, dtype=np.float32), NamedSharding(mesh, PartitionSpec()))
    return np.asarray(program(x)).tolist()


def test_a_program_is_found_by_the_next_index_and_counts_as_a_hit(folder, mesh, lower):
    assert index_of(folder, mesh).load(KEY) is None
    assert twice(index_of(folder, mesh).compile(KEY, lower()), mesh) == [0, 2, 4, 6]
    again, hits = index_of(folder, mesh), []
    jax.monitoring.register_event_listener(count := lambda event, **_: hits.append(event))
    with CompileCounter() as counter:
        program = again.load(KEY)
    jax.monitoring.unregister_event_listener(count)
    assert again.known([KEY, ProgramKey("double", 8)]) == {KEY}
    assert hits == ["/jax/compilation_cache/cache_hits"] and counter.count == 0
    assert twice(program, mesh) == [0, 2, 4, 6]
    assert "add" in program.as_text()


def test_what_came_from_jaxs_cache_is_remembered_too(folder, mesh, lower):
    index_of(folder, mesh, "a").compile(KEY, lower())
    jax.clear_caches()
    index_of(folder, mesh, "b").compile(KEY, lower())  # the same text, of other options
    assert len([path for path in folder.iterdir() if path.name.startswith("jit_") and "cache" in path.name]) == 1
    assert twice(index_of(folder, mesh, "b").load(KEY), mesh) == [0, 2, 4, 6]


def test_other_options_and_another_number_of_blocks_are_other_programs(folder, mesh, lower):
    index_of(folder, mesh).compile(KEY, lower())
    for other in (index_of(folder, mesh, "more"), index_of(folder, mesh, num_blocks=(5,))):
        assert other.load(KEY) is None and not other.known([KEY])


def test_what_jax_is_told_otherwise_makes_other_programs(folder, mesh, lower):
    index_of(folder, mesh).compile(KEY, lower())
    before = jax.config.jax_numpy_rank_promotion
    try:
        jax.config.update("jax_numpy_rank_promotion", "warn")
        assert index_of(folder, mesh).load(KEY) is None
    finally:
        jax.config.update("jax_numpy_rank_promotion", before)


def damage_text(folder):
    [path] = folder.glob("programs/*/double-4.json")
    path.write_text("{", encoding="utf-8")


def damage_code(folder):
    for path in folder.glob("jit_*-cache"):
        path.write_bytes(gzip.compress(b"nothing"))


def remove_code(folder):
    for path in folder.glob("jit_*"):
        path.unlink()


def name_a_kernel(folder):
    [path] = folder.glob("programs/*/double-4.json")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"kernels":[]', '"kernels":["pallas_kernels.nothing.0123456789ab"]'), encoding="utf-8")


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
@pytest.mark.parametrize("damage", [damage_text, damage_code, remove_code, name_a_kernel])
def test_what_is_damaged_is_compiled_again(folder, mesh, lower, damage, caplog):
    index_of(folder, mesh).compile(KEY, lower())
    damage(folder)
    programs = CompiledPrograms({KEY: lower}, num_threads=1, index=index_of(folder, mesh))
    programs.start()
    assert twice(programs[KEY], mesh) == [0, 2, 4, 6]
    assert ("compiled again" in caplog.text) == (damage is not remove_code)


def test_a_folder_that_cannot_be_written_costs_time_only(folder, mesh, lower):
    (folder / "programs").write_text("a file", encoding="utf-8")
    index = index_of(folder, mesh)
    assert not index.known([KEY]) and index.load(KEY) is None
    assert twice(index.compile(KEY, lower()), mesh) == [0, 2, 4, 6]


def test_without_jaxs_cache_nothing_is_kept(tmp_path, mesh, lower):
    enable_compilation_cache("off")
    index = index_of(tmp_path, mesh)
    assert twice(index.compile(KEY, lower()), mesh) == [0, 2, 4, 6]
    assert index.load(KEY) is None and not any(tmp_path.iterdir())


def test_the_second_start_of_an_engine_traces_nothing_and_gives_the_same_tokens(tmp_path, monkeypatch):
    model = write_checkpoint("llama", tmp_path / "model")
    options = {"compilation_cache_dir": str(tmp_path / "cache"), "num_scheduler_steps": 1}
    config, executor = start(model, **options)
    expected = answers(config, executor)
    executor.shutdown()

    def refuse(*_, **__):
        raise AssertionError("a program is traced")

    monkeypatch.setattr(EnginePrograms, "lower", refuse)
    monkeypatch.setattr("jaxpaged.worker.programs.program_index.replaced_code", lambda *_, **__: [])
    config, executor = start(model, **options)
    try:
        assert answers(config, executor) == expected
        stats = executor.worker.stats()
        assert stats["programs_from_cache"] == stats["programs"] and stats["recompiles"] == 0
    finally:
        executor.shutdown()


def test_functions_that_were_replaced_are_noticed_wherever_they_are(monkeypatch):
    class Model:
        def __init__(self, forward):
            self.forward = forward

    assert replaced_code(Model(norm.rms_norm)) == []
    for forward in (lambda x: x, partial(lambda x: x), jax.jit(lambda x: x), Model(None).__init__, MagicMock()):
        assert replaced_code(Model(forward)) == ["Model.forward"]
    monkeypatch.setattr(norm, "rms_norm", lambda *_: None)
    monkeypatch.setattr(norm.Norm, "__hash__", lambda self: 1)
    assert replaced_code() == ["Norm.__hash__", "jaxpaged.layers.norm.rms_norm"]


LOAD_AT_ONCE = """
import sys, threading, time
import msgspec._utils
from pathlib import Path
from unittest.mock import MagicMock
from jaxpaged.messages import ProgramKey
from jaxpaged.worker.programs.program_index import ProgramIndex

evaluate = msgspec._utils._eval_type

def slowly(*given, **named):
    time.sleep(0.002)
    return evaluate(*given, **named)

msgspec._utils._eval_type = slowly  # how msgspec learns the types of a struct
index, key = object.__new__(ProgramIndex), ProgramKey("step", 8)
index._folder, index._entries = Path(sys.argv[1]), MagicMock(payload=lambda key: None)
array = '[[[1, 2], "float32", [["x"]]]]'
record = '{"name": "n", "arguments": %s, "kept": [], "in_tree": "", "results": %s, "out_tree": 0}' % (array, array)
index._path(key).write_text('{"key": "k", "kernels": [], "record": %s}' % record)
threads = [threading.Timer(0.004 * i, index.load, [key]) for i in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_load_programs_at_once_do_not_end_the_process(tmp_path):
    ended = subprocess.run([sys.executable, "-c", LOAD_AT_ONCE, tmp_path], capture_output=True, text=True)
    assert ended.returncode == 0, f"it ended with {ended.returncode}: {ended.stderr[-2000:]}"
    assert not ended.stderr
