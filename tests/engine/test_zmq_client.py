"""What a core says reaches its handlers in order, and steps that came together are handed over together."""

import asyncio

import zmq

from jaxpaged.engine.process import wire
from jaxpaged.engine.process.zmq_client import MESSAGES_AT_ONCE, ZmqClient
from jaxpaged.messages import EngineCoreOutputs, SchedulerStats


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
                core.send_multipart([identity, kind, *wire.FrameEncoder().encode(value)])
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
