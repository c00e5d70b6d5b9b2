"""What a core says reaches its handlers in order, and steps that came together are handed over together; so are
requests, the other way."""

import asyncio
import time

import pytest
import zmq

from jaxpaged.encoding.frames import FrameDecoder, FrameEncoder
from jaxpaged.engine.process import wire
from jaxpaged.engine.process.zmq_client import MESSAGES_AT_ONCE, MOST_GATHERED, MOST_GATHERED_BYTES, ZmqClient
from jaxpaged.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from jaxpaged.sampling_params import SamplingParams


def heard(tmp_path, said, until):
    """What the handlers of a client hear of a core that says all this at once, until there are `until` of them."""
    heard = []

    async def listen():
        client = ZmqClient(f"ipc://{tmp_path}/core", watch_connection=False)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as core:
            core.bind(client.address)
            enough = asyncio.Event()

            def handler(kind):
                def hear(value):
                    heard.append((kind, value))
                    if len(heard) >= until:
                        enough.set()

                return hear

            handlers = {kind: handler(kind) for kind in (wire.READY, wire.STEP, wire.REFUSED)}
            client.open(asyncio.get_running_loop(), handlers, lambda: None)
            while not core.poll(0):
                await asyncio.sleep(0.01)
            identity = core.recv_multipart()[0]
            for kind, value in said:
                core.send_multipart([identity, kind, *FrameEncoder().encode(value)])
            await asyncio.wait_for(enough.wait(), 10)
            client.close()

    asyncio.run(listen())
    return heard


def step(number):
    return EngineCoreOutputs([], SchedulerStats(number))


def test_steps_are_handed_over_together_and_in_order_with_all_else(tmp_path):
    refusal = wire.Refusal("r", "no")
    said = [*((wire.STEP, step(i)) for i in range(3)), (wire.REFUSED, refusal), (wire.STEP, step(3))]
    got = heard(tmp_path, said, 3)
    assert got[-2:] == [(wire.REFUSED, refusal), (wire.STEP, [step(3)])]
    assert [each for _, steps in got[:-2] for each in steps] == [step(i) for i in range(3)]


def test_however_many_steps_wait_none_is_lost_and_others_get_their_turn(tmp_path):
    number = 3 * MESSAGES_AT_ONCE
    got = heard(tmp_path, [(wire.STEP, step(i)) for i in range(number)] + [(wire.READY, None)] * 0, 3)
    assert max(len(steps) for _, steps in got) <= MESSAGES_AT_ONCE


class SlowHandler:
    """What deals with steps takes `seconds` each time, and so does a task that it wakes, by a clock that stands still
    otherwise."""

    def __init__(self, seconds):
        self.seconds, self.now, self.turns = seconds, 0.0, []

    def __call__(self, steps):
        self.turns.append(self.now)
        self._work()
        asyncio.get_running_loop().call_soon(self._work)

    def _work(self):
        self.now += self.seconds


def test_where_steps_take_all_time_others_get_half_of_it(tmp_path, monkeypatch):
    """A step comes every half a millisecond; others need many rounds of the loop, a tenth of a millisecond each."""
    handler = SlowHandler(0.002)

    async def serve():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: handler.now)
        client = ZmqClient(f"ipc://{tmp_path}/core", watch_connection=False, clock=lambda: handler.now)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as core:
            core.bind(client.address)
            client.open(loop, {wire.STEP: handler}, lambda: None)
            identity = core.recv_multipart()[0]
            num_rounds, num_steps = 0, 0
            while len(handler.turns) < 20:
                while num_steps * 0.0005 <= handler.now:
                    core.send_multipart([identity, wire.STEP, *FrameEncoder().encode(step(0))])
                    num_steps += 1
                    time.sleep(0.001)  # in which it arrives
                await asyncio.sleep(0)
                handler.now += 0.0001
                num_rounds += bool(handler.turns)
            client.close()
        return num_rounds * 0.0001

    of_others = asyncio.run(serve())
    assert of_others > 0.4 * handler.turns[-1]


def request(name, num_tokens=1):
    return EngineCoreRequest(name, [7] * num_tokens, SamplingParams(seed=0), 0.0)


def said(tmp_path, say, number):
    """The first `number` messages, but for greetings, of a client with which `say(client)` is done in one round of the
    loop."""

    async def speak():
        client = ZmqClient(f"ipc://{tmp_path}/core", watch_connection=False)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as core:
            core.bind(client.address)
            client.open(asyncio.get_running_loop(), {}, lambda: None)
            say(client)
            came = []
            while len(came) < number:
                await asyncio.sleep(0.01)
                while core.poll(0):
                    _, kind, frame = core.recv_multipart()
                    came += [] if kind == wire.HELLO else [(kind, frame)]
            client.close()
        decoders = {wire.ADD: FrameDecoder(list[EngineCoreRequest]), wire.ABORT: FrameDecoder(list[str])}
        return [(kind, decoders[kind].decode([frame])) for kind, frame in came]

    return asyncio.run(asyncio.wait_for(speak(), 10))


def test_requests_of_one_round_go_out_together_before_what_is_said_next_and_a_bad_one_fails_alone(tmp_path):
    def say(client):
        client.add_requests([request("a"), request("b")])
        bad = request("bad")
        bad.prompt_token_ids = [object()]
        with pytest.raises(TypeError):
            client.add_requests([bad])
        client.add_requests([request("c")])
        client.abort_requests(["a"])
        client.add_requests([request("d")])

    messages = said(tmp_path, say, 3)
    assert [kind for kind, _ in messages] == [wire.ADD, wire.ABORT, wire.ADD]
    assert [[each.request_id for each in value] for kind, value in messages if kind == wire.ADD] == [list("abc"), ["d"]]


def test_one_message_holds_only_so_many_requests_and_so_many_bytes(tmp_path):
    few = [request(str(number)) for number in range(MOST_GATHERED + 1)]
    long = [request(name, MOST_GATHERED_BYTES * 2 // 3) for name in ("x", "y")]
    messages = said(tmp_path, lambda client: client.add_requests([*few, *long]), 3)
    assert [len(value) for _, value in messages] == [MOST_GATHERED, 2, 1]
