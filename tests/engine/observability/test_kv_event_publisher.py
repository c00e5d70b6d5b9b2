"""KV events over ZeroMQ, read as vLLM's own followers read them."""

import contextlib
import random
import socket

import msgspec
import pytest
import zmq

from jaxpaged.config import EngineConfig
from jaxpaged.core.kv_cache.events import AllBlocksCleared
from jaxpaged.engine.build import event_publishers
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.observability.kv_event_publisher import END, KVEventPublisher, KVEventsConfig
from jaxpaged.errors import ConfigError, UsageError
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams
from tests.engine.fake_engine import FakeExecutor, counting_model, make_config

WAIT_MS = 10_000
EVENT = AllBlocksCleared()


class Batch(msgspec.Struct, array_like=True):
    """What a follower decodes: the fields that routers use, in their order."""

    ts: float
    events: list[dict]
    data_parallel_rank: int | None = None


class Follower:
    """A SUB socket, and the book that a router keeps of it."""

    def __init__(self, publisher, topic=""):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.set(zmq.SUBSCRIBE, topic.encode())
        self.socket.connect(publisher.endpoints[0])
        self.numbers = []
        self.stored = {}  # hash -> its tokens
        self.cleared = 0

    def read(self):
        assert self.socket.poll(WAIT_MS), "nothing came"
        self.topic, number, payload = self.socket.recv_multipart()
        self.numbers.append(int.from_bytes(number, "big"))
        return self.take(payload)

    def take(self, payload):
        batch = msgspec.msgpack.decode(payload, type=Batch)
        for event in batch.events:
            match event["type"]:
                case "BlockStored":
                    size, tokens = event["block_size"], event["token_ids"]
                    for i, block_hash in enumerate(event["block_hashes"]):
                        self.stored[block_hash] = tokens[i * size : (i + 1) * size]
                case "BlockRemoved":
                    for block_hash in event["block_hashes"]:
                        del self.stored[block_hash]
                case "AllBlocksCleared":
                    self.cleared += 1
                    self.stored.clear()
        return batch

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def publishing():
    """`publishing(...)`: (publisher, a follower that is connected). Keywords are those of the option."""
    made = []

    def start(**options):
        anywhere = "tcp://127.0.0.1:*"
        publisher = KVEventPublisher(KVEventsConfig(endpoint=anywhere, replay_endpoint=anywhere, **options))
        follower = Follower(publisher, options.get("topic", ""))
        made.extend([publisher, follower])
        for _ in range(1000):  # a follower hears nothing until the sockets have met
            publisher.publish([EVENT])
            if follower.socket.poll(10):
                break
        while follower.socket.poll(200):
            follower.read()
        return publisher, follower

    yield start
    for each in made:
        each.close()


def core_with(publisher, **options):
    executor = FakeExecutor(counting_model(100), 100, num_blocks=24)
    return EngineCore(make_config(**options), executor, publishers=[publisher])


def ask(core, name, prompt, max_tokens=5):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    core.add_request(EngineCoreRequest(name, prompt, params, arrival_time=0.0))
    while core.has_work():
        core.step()


def test_a_follower_knows_what_is_cached(publishing):
    publisher, follower = publishing(topic="kv@pod")
    core = core_with(publisher)
    for number in range(12):
        ask(core, f"r{number}", [5 + number % 4, *range(20, 30 + number)])
    cached = {key[:-4] for key in core._scheduler.kv_cache_manager.pools[0]._cached}
    while follower.stored.keys() != cached:
        follower.read()
    assert cached and follower.topic == b"kv@pod"
    assert [20, 21, 22, 23] not in follower.stored.values()  # blocks begin with the prompts' first token
    assert any(tokens[1:] == [20, 21, 22] for tokens in follower.stored.values())
    assert follower.numbers == list(range(follower.numbers[0], follower.numbers[-1] + 1)), "a number is missing"
    before = follower.cleared
    assert core.reset_prefix_cache()
    follower.read()
    assert follower.cleared == before + 1 and not follower.stored


@pytest.mark.parametrize(
    ("endpoint", "of_second"),
    [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5559"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("ipc:///run/kv", "ipc:///run/kv_dp2"),
    ],
)
def test_every_core_has_an_address_of_its_own(endpoint, of_second):
    assert KVEventsConfig().endpoint_of_rank(endpoint) == endpoint
    assert KVEventsConfig(data_parallel_rank=2).endpoint_of_rank(endpoint) == of_second


def test_batches_say_whose_they_are(publishing):
    publisher, follower = publishing(data_parallel_rank=3)
    publisher.publish([EVENT])
    assert follower.read().data_parallel_rank == 3


def test_what_was_missed_can_be_asked_for(publishing):
    publisher, follower = publishing()
    context = zmq.Context()
    try:
        for kind in (zmq.DEALER, zmq.REQ):
            question = context.socket(kind)
            question.connect(publisher.endpoints[1])
            first = follower.numbers[-1] - 1
            question.send((first).to_bytes(8, "big"))
            numbers, last = [], None
            if kind == zmq.REQ:  # the first answer is all that this kind of socket may read
                assert question.poll(WAIT_MS)
                assert int.from_bytes(question.recv_multipart()[0], "big") == first
                question.close(linger=0)
                continue
            while last != END:
                assert question.poll(WAIT_MS)
                last, payload = question.recv_multipart()
                if last != END:
                    numbers.append(int.from_bytes(last, "big"))
                    follower.take(payload)
            assert numbers == [first, first + 1]
            question.send(b"nonsense that is no number")  # is passed over
            question.send((2**63).to_bytes(8, "big"))
            assert question.poll(WAIT_MS)
            assert question.recv_multipart() == [END, b""]
            question.close(linger=0)
    finally:
        context.destroy(linger=0)


ZMTP = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 48
GARBAGE = {
    "noise": random.Random(3).randbytes(5000),
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "half a greeting": ZMTP[:20],
    "a frame of 2**62 bytes": ZMTP + b"\4\x0e\5READY\0\0\0\0\0\0\0\0" + b"\2\x40\0\0\0\0\0\0\0" + b"a" * 3000,
    "commands": ZMTP + b"\4\4\3ABC" * 3000,
    "silence": b"",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_on_both_ports_is_survived_and_not_logged(publishing, kind, caplog, capfd):
    publisher, follower = publishing()
    with contextlib.ExitStack() as stack:
        for endpoint in publisher.endpoints * 20:
            host, _, port = endpoint.removeprefix("tcp://").partition(":")
            made = stack.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):
                made.sendall(GARBAGE[kind])
        before = follower.numbers[-1]
        publisher.publish([EVENT])
        follower.read()
        assert follower.numbers[-1] == before + 1
    assert not caplog.records and not capfd.readouterr().err


def test_who_asks_a_thousand_times_and_reads_nothing_delays_no_batch(publishing):
    publisher, follower = publishing()
    for _ in range(50):
        publisher.publish([EVENT])
        follower.read()
    with zmq.Context() as context, context.socket(zmq.DEALER) as asks:
        asks.set(zmq.LINGER, 0)
        asks.connect(publisher.endpoints[1])
        for _ in range(1000):
            asks.send((0).to_bytes(8, "big"))
            asks.send_multipart([b"a"] * 50)  # is no question
            with contextlib.suppress(zmq.Again):
                asks.send(b"a" * 5000, zmq.NOBLOCK)  # ends the connection
        for _ in range(20):
            publisher.publish([EVENT])
            follower.read()
    assert publisher.num_dropped == 0


def test_a_full_queue_drops_batches_leaves_a_gap_and_never_waits(publishing):
    publisher = publishing(max_queue_size=4)[0]
    publisher._closing.set()  # the thread ends, so nothing is taken any more
    publisher._thread.join(10)
    for _ in range(10):
        publisher.publish([EVENT])
    assert publisher.num_dropped == 6
    first = publisher._next_number - 10
    assert [number for number, _ in publisher._waiting.queue] == [first, first + 1, first + 2, first + 3]


def test_the_first_batch_says_that_the_cache_is_empty():
    publisher = KVEventPublisher(KVEventsConfig(endpoint="tcp://127.0.0.1:*"))
    try:
        while not publisher._remembered:
            pass
        number, payload = publisher._remembered[0]
        assert int.from_bytes(number, "big") == 0
        assert msgspec.msgpack.decode(payload, type=Batch).events == [{"type": "AllBlocksCleared"}]
    finally:
        publisher.close()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"enable_kv_cache_event": True}, "Did you mean 'enable_kv_cache_events'"),
        ({"publisher": "kafka"}, "zmq, null"),
        ({"hwm": 0}, "at least 1"),
        ({"buffer_steps": "many"}, "buffer_steps"),
    ],
)
def test_a_wrong_option_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        KVEventsConfig.from_option(values)


@pytest.mark.parametrize("values", [{}, {"enable_kv_cache_events": False}, {"publisher": "null"}])
def test_nothing_is_published_unless_asked_for(values):
    assert KVEventsConfig.from_option(values) is None


def publisher_behind_free_ports(num_free):
    """A publisher, and its port, before which so many are free: others may listen on any."""
    while True:
        publisher = KVEventPublisher(KVEventsConfig(endpoint="tcp://127.0.0.1:*"))
        port = int(publisher.endpoints[0].rpartition(":")[2])
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for before in range(1, num_free + 1):
                probes.enter_context(socket.create_server(("127.0.0.1", port - before)))
            return publisher, port
        publisher.close()


def test_building_an_engine_reserves_the_address_first_and_gives_it_back():
    enabled = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"}
    config = EngineConfig.from_options(kv_events_config=enabled)
    with event_publishers(config) as [publisher]:
        taken = publisher.endpoints[0]
        again = EngineConfig.from_options(kv_events_config={**enabled, "endpoint": taken})
        with pytest.raises(UsageError, match="Choose another endpoint"), event_publishers(again):
            pass
        publisher.close()
    with pytest.raises(KeyError), event_publishers(again):
        raise KeyError("building failed")
    with event_publishers(again) as [publisher]:
        publisher.close()
    ranks = {"data_parallel_size": 3, "enable_expert_parallel": True}
    third, port = publisher_behind_free_ports(2)
    of_ranks = {**enabled, "endpoint": f"tcp://127.0.0.1:{port - 2}"}
    config = EngineConfig.from_options(kv_events_config=of_ranks, **ranks)
    with pytest.raises(UsageError, match=f":{port}: .*Choose another endpoint"), event_publishers(config):
        pass
    third.close()
    with event_publishers(config) as publishers:
        assert [each.endpoints[0][-5:] for each in publishers] == [str(port - 2), str(port - 1), str(port)]
        for each in publishers:
            each.close()
    off = EngineConfig.from_options(kv_events_config=enabled, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"), event_publishers(off):
        pass
