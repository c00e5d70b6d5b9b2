"""Two engines share a folder: what one has encoded, the other one takes from there, and answers as if it were alone."""

import contextlib
import dataclasses
import os

import jax
import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import embeds_desk, resolve_model
from jaxpaged.engine.core import EngineCore
from jaxpaged.errors import ConfigError
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.multimodal.embeds_folder import FILE
from jaxpaged.worker import encoder_spec
from tests.end_to_end.test_pictures import Prompt, same, serve, text
from tests.models.seeing_checkpoints import write_seeing_checkpoint

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "token_buckets": (96,),
    "max_model_len": 96,
    "block_size": 8,
    "num_gpu_blocks_override": 60,
    "dtype": "float32",
    "max_logprobs": 4,
    "num_scheduler_steps": 1,
    "encoder_cache_size": 96,
}


def transfer(folder, role, **extra):
    extra = {"shared_storage_path": str(folder), **extra}
    return {"ec_connector": "ECExampleConnector", "ec_role": role, "ec_connector_extra_config": extra}


HOST = {"cpu_bytes_to_use": 1 << 20}


class Engine:
    """An engine with a role, and a folder that tests may change."""

    def __init__(self, model_folder, **options):
        config = EngineConfig.from_options(model=str(model_folder), **OPTIONS | options)
        folder, model, decoder, self.config = resolve_model(config)
        self.executor = UniProcExecutor(self.config, model, decoder, folder)

    def core(self, folder=None):
        """An empty one; with `folder` in place of the one that its options name."""
        self.executor.recover()
        if folder is not None:
            shared = self.executor.embeds_folder
            shared.transfer = dataclasses.replace(shared.transfer, folder=str(folder))
            shared._counts.clear()
        return EngineCore(self.config, self.executor, embeds=embeds_desk(self.executor))

    def counts(self):
        self.executor.embeds_folder._writer.submit(int).result(10)  # what was given is written
        return {name.removeprefix("ec_"): n for name, n in self.executor.embeds_folder.stats().items() if n}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_seeing_checkpoint("gemma3_seeing", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unused")
    patches = pytest.MonkeyPatch()
    patches.setattr(encoder_spec, "MOST_COPIED", 24)  # of 32 embeddings, so they are copied in two parts
    engines = [
        Engine(model_folder, ec_transfer_config=transfer(folder, role)) for role in ("ec_producer", "ec_consumer")
    ]
    yield engines
    for engine in engines:
        engine.executor.shutdown()
    patches.undo()


PROMPT = Prompt(text(1, 4), (1, 2), text(2, 3), (2, 1), text(3, 2))


def num_encoded(core):
    records, _ = core.step_records()
    return sum(record.num_encoded for record in records)


def files_in(folder):
    return sorted(folder.rglob(FILE))


@pytest.fixture
def shared(engines, tmp_path):
    """(Folder with what the producer has encoded, what that one answered, the consumer)."""
    producer, consumer = engines
    core = producer.core(tmp_path)
    expected = serve(core, [PROMPT.request("a")])["a"]
    assert num_encoded(core) == 48 and producer.counts() == {"saved": 2}
    return tmp_path, expected, consumer


def answers(consumer, folder, expected):
    core = consumer.core(folder)
    same(serve(core, [PROMPT.request("a")])["a"], expected, 0.0)
    assert consumer.executor.worker.counter.count == 0
    return num_encoded(core), consumer.counts()


def test_what_another_engine_has_encoded_is_not_encoded_again(shared):
    folder, expected, consumer = shared
    core = consumer.core(folder)
    served = serve(core, [PROMPT.request("a"), PROMPT.request("b")])
    for each in served.values():
        same(each, expected, 0.0)
    assert num_encoded(core) == 0 and consumer.counts() == {"loaded": 2}
    serve(core, [PROMPT.request("c")])
    assert consumer.counts() == {"loaded": 2}, "the device has them"
    assert len(files_in(folder)) == 2 and not list(folder.rglob("*.part"))


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "a bit":
        data[-5] ^= 4
    elif how == "cut":
        del data[-1:]
    elif how == "a directory":
        path.unlink()
        return path.mkdir()
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["a bit", "cut", "a directory"])
def test_a_damaged_file_is_not_used(shared, how):
    folder, expected, consumer = shared
    damaged = next(each for each in files_in(folder) if each.parent.name.startswith("0201"))
    damage(damaged, how)
    assert answers(consumer, folder, expected) == (16, {"loaded": 1, "damaged": 1})
    assert damaged.is_file() is False


def test_a_folder_that_is_gone_and_files_of_others_change_nothing(shared, tmp_path):
    folder, expected, consumer = shared
    (space,) = folder.iterdir()
    space.rename(folder / ("0" * 64))  # of other weights
    assert answers(consumer, folder, expected) == (48, {"missing": 2})
    assert answers(consumer, folder / "gone", expected) == (48, {"missing": 2})


def make_slow(folder):
    """Files that give nothing, and that who opens them waits for."""
    for each in files_in(folder):
        each.unlink()
        os.mkfifo(each)


def let_go(folder):
    """Threads that wait for files go on."""
    for each in files_in(folder):
        with contextlib.suppress(OSError):  # nobody waits
            os.close(os.open(each, os.O_WRONLY | os.O_NONBLOCK))


def test_a_slow_file_is_not_waited_for(shared):
    folder, expected, consumer = shared
    make_slow(folder)
    own = consumer.executor.embeds_folder
    whole, own.transfer = own.transfer, dataclasses.replace(own.transfer, load_seconds=0.05)
    encoded, counts = answers(consumer, folder, expected)
    own.transfer = whole
    assert encoded == 48 and counts["late"] == 2
    let_go(folder)


def test_a_request_that_waits_is_aborted_and_its_id_is_in_use(shared):
    folder, _, consumer = shared
    make_slow(folder)
    core = consumer.core(folder)
    core.add_request(PROMPT.request("a"))
    assert core.has_work() and core.unfinished() == {"a"}
    with pytest.raises(Exception, match="in use"):
        core.add_request(PROMPT.request("a"))
    core.abort_requests(["a"])
    assert not core.has_work() and not core.unfinished()
    let_go(folder)


def test_memory_keeps_what_the_device_has_lost(shared):
    folder, expected, consumer = shared
    own = consumer.executor.embeds_folder
    whole, size = own.transfer, expected_bytes(consumer)
    try:
        own.transfer, own._host.capacity = dataclasses.replace(whole, host_bytes=2 * size), 2 * size
        assert answers(consumer, folder, expected) == (0, {"loaded": 2})
        gone = folder / "gone"
        assert answers(consumer, gone, expected) == (0, {"from_host": 2})
        own.transfer, own._host.capacity = dataclasses.replace(whole, host_bytes=2 * size - 1), 2 * size - 1
        own._keep("another space", b"k" * 32, np.zeros(size // 2, np.uint8))  # what was used first makes room
        encoded, counts = answers(consumer, gone, expected)
        assert encoded == 32 and counts == {"from_host": 1, "missing": 1}
    finally:
        own.transfer, own._host.capacity = whole, whole.host_bytes
        own._host.clear()


def expected_bytes(engine):
    """Of 32 embeddings, which is most of what the pictures have."""
    return 32 * engine.executor.embeds_folder.form.numbers * 4


def test_embeddings_of_old_weights_are_not_taken(shared):
    folder, expected, consumer = shared
    space = consumer.executor.embeds_space()
    core, weights = consumer.core(folder), consumer.executor.worker.weights
    version = weights.version
    try:
        core.add_request(PROMPT.request("a"))
        while not core.stats().num_running_reqs:
            core.step()
        assert num_encoded(core) == 0 and consumer.counts() == {"loaded": 2}
        weights.rename()
        core.note_weight_update()  # the request begins anew, and its embeddings were those of others
        assert consumer.executor.embeds_space() != space
        while core.has_work():
            core.step()
        assert num_encoded(core) == 48
        same(serve(core, [PROMPT.request("b")])["b"], expected, 0.0)
        core = consumer.core(folder)
        same(serve(core, [PROMPT.request("a")])["a"], expected, 0.0)
        assert num_encoded(core) == 48 and consumer.counts() == {"missing": 2}
    finally:
        weights.version = version


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"ec_transfer_config": {"ec_connector": "ECMooncakeConnector", "ec_role": "ec_both"}},
            "There is the ECExample",
        ),
        (
            {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "kv_both"}},
            "must be one of ec_prod",
        ),
        ({"ec_transfer_config": transfer("", "ec_both")}, "must be a folder"),
        ({"ec_transfer_config": {**transfer("", "ec_both"), "ec_connector_extra_config": {}}}, "must name the folder"),
        ({"ec_transfer_config": {**transfer("", "ec_producer"), "ec_connector_extra_config": HOST}}, "role ec_both"),
        ({"ec_transfer_config": {**transfer("", "ec_both"), "ec_connector_extra_config": {"path": "x"}}}, "must name"),
        ({"ec_transfer_config": transfer("/x", "ec_both", path="y")}, "unknown key 'path'"),
        ({"ec_transfer_config": transfer("/x", "ec_both", load_timeout_s=0)}, "load_timeout_s 0"),
        ({"ec_transfer_config": {"ec_port": 1}}, "unknown key 'ec_port'"),
        ({"ec_transfer_config": transfer("/x", "ec_both"), "language_model_only": True}, "Give one of them"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_options(model="x", **options)


# ---- engines that only encode ----------------------------------------------------------------------


def test_an_engine_of_the_encoder_alone_feeds_others(shared, model_folder, tmp_path):
    _, expected, consumer = shared
    options = {
        **OPTIONS,
        "num_gpu_blocks_override": None,
        "ec_transfer_config": transfer(tmp_path / "b", "ec_producer"),
    }
    alone = Engine(model_folder, **options, mm_encoder_only=True)
    try:
        worker, whole = alone.executor.worker, consumer.executor.worker
        assert alone.executor.embeds_space() == consumer.executor.embeds_space()
        tower = sum(leaf.nbytes for leaf in jax.tree.leaves(whole.device.params.vision))
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(worker.device.params)) == tower
        kinds = {key.kind for key in worker.programs.builders}
        assert kinds == {"zeros", "forward", "tables", "pool", "encode", "embeds_gather"}
        core, told = alone.core(), []
        core.add_request(PROMPT.request("a", prompt_logprobs=1))
        while core.has_work():
            told += core.step().outputs
        (output,) = told
        assert (output.new_token_ids, output.finish_reason, output.error) == ([], "stop", None)
        assert num_encoded(core) == 48 and alone.counts() == {"saved": 2}
    finally:
        alone.executor.shutdown()
    assert answers(consumer, tmp_path / "b", expected) == (0, {"loaded": 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runner": "pooling", "convert": "embed"}, "runner is 'pooling'"),
        ({"num_scheduler_steps": 4}, "num_scheduler_steps is given"),
        ({"kv_offload": "host=1M"}, "kv_offload"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config"),
        ({"language_model_only": True}, "language_model_only"),
        ({"ec_transfer_config": {}}, "does not say where embeddings go"),
        ({"ec_transfer_config": transfer("/x", "ec_consumer")}, "does not say where embeddings go"),
    ],
)
def test_what_an_encoder_alone_cannot_do_is_refused(model_folder, options, words):
    given = {**OPTIONS, "mm_encoder_only": True, "ec_transfer_config": transfer("/x", "ec_producer"), **options}
    with pytest.raises(ConfigError, match=words):
        resolve_model(EngineConfig.from_options(model=str(model_folder), **given))
