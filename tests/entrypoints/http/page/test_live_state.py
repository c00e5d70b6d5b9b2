"""What the page is told of the engine: true, short, not asked for more often than it must be, and nobody's text."""

import asyncio
import re

import msgspec
import pytest

from jaxpaged.entrypoints.http.page import live
from jaxpaged.entrypoints.http.page.state import EngineInfo, EngineState, Labels, shown_steps
from jaxpaged.messages import StepRecord
from tests.engine.fake_engine import make_engine
from tests.entrypoints.http.test_pictures import chat, image_url, make_intake
from tests.models.seeing_folder import CHAT, make_tokenizer

PROMPT = "xylophone quartz"


def decoded(answer, kind=EngineState):
    assert answer.status == 200, answer.body
    assert answer.headers["cache-control"] == "no-store"
    return msgspec.json.decode(answer.body, type=kind)


async def busy(server, num_requests=1, max_tokens=8, **headers):
    """Requests that stay under way: tasks, once each has a block or waits for one."""
    server.engine.go_on.clear()
    body = {"prompt": PROMPT, "max_tokens": max_tokens}
    asked = [asyncio.ensure_future(server.client.post("/v1/completions", body, **headers)) for _ in range(num_requests)]
    while len(server.engine.seen) < num_requests:
        await asyncio.sleep(0)
    server.engine.engine.step()
    return asked


async def ended(server, asked):
    server.engine.go_on.set()
    for answer in await asyncio.gather(*asked):
        assert answer.status == 200


def test_an_idle_engine_is_told_whole(ask):
    state = decoded(ask("/engine/state"))
    assert state.obstacle is None and not state.requests and not state.steps
    assert state.blocks.count == 63 and state.blocks.runs == [(-1, 63)]


def test_requests_blocks_and_steps_are_those_of_the_engine(serving):
    async def scenario(server):
        asked = await busy(server, num_requests=10)
        state = decoded(await server.client.get("/engine/state"))
        await ended(server, asked)
        return state

    state = serving(scenario, max_num_seqs=8)
    assert (state.running + state.waiting, state.http) == (10, 10) and state.running > 1
    assert [each.is_running for each in state.requests] == [True] * state.running + [False] * state.waiting
    assert sum(length for _, length in state.blocks.runs) == 63
    kinds = [kind for kind, _ in state.blocks.runs]
    assert {state.blocks.owners[kind] for kind in kinds if kind >= 0} <= {each.label for each in state.requests}
    assert [step.number for step in state.steps] == list(range(len(state.steps))) and state.steps[0].tokens > 0
    assert len({each.label for each in state.requests}) == 10


def test_a_page_recognises_its_own_requests_and_learns_no_id(serving):
    async def scenario(server):
        asked = await busy(server, 1, x_request_id="secret-of-mine")
        asked += await busy(server, 1, x_request_id="secret-of-others")
        server.engine.engine.step()
        answer = await server.client.get("/engine/state?mine=cmpl-secret-of-mine")
        await ended(server, asked)
        return answer

    answer = serving(scenario)
    state = decoded(answer)
    assert len(answer.json["mine"]) == 1 and answer.json["mine"][0] == state.requests[0].label
    for text in ("secret", "cmpl", *PROMPT.split()):
        assert text not in answer.body.decode()
    assert all(re.fullmatch(r"[0-9a-f]{5}", each.label) for each in state.requests)


def test_labels_are_equal_for_the_sequences_of_a_request_and_tell_nothing():
    labels = Labels()
    ids = ["cmpl-a-0-12ab#3", "1_cmpl-a-0-12ab#3", "15_cmpl-a-0-12ab#3@2"]
    assert len({labels.of(each) for each in ids}) == 1
    assert labels.of("cmpl-a-1-12ab#4") != labels.of(ids[0]) != Labels().of(ids[0])


def test_however_many_watch_the_engine_is_asked_once(serving, monkeypatch):
    monkeypatch.setattr(live, "INTERVAL", 60.0)

    async def scenario(server):
        answers = await asyncio.gather(*(server.client.get("/engine/state") for _ in range(50)))
        answers.append(await server.client.get("/engine/state"))
        return answers, server.engine.num_snapshots

    answers, count = serving(scenario)
    assert {answer.status for answer in answers} == {200} and count == 1


def test_nobody_watches_so_nothing_is_asked(serving):
    async def scenario(server):
        await server.client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
        await server.client.get("/engine/info")
        return server.engine.num_snapshots

    assert serving(scenario) == 0


@pytest.mark.parametrize(("seconds", "share", "wait"), [(0.0001, 1e9, live.INTERVAL), (50.0, 0.005, 10_000.0)])
def test_the_more_it_costs_the_rarer_it_is_asked(serving, monkeypatch, seconds, share, wait):
    monkeypatch.setattr(live, "SHARE", share)

    async def scenario(server):
        take = server.engine.snapshot

        async def slow(since):
            seen = await take(since)
            seen.seconds = seconds
            return seen

        server.engine.snapshot = slow
        return decoded(await server.client.get("/engine/state"))

    assert serving(scenario).wait == pytest.approx(wait)


def test_an_engine_that_does_not_answer_holds_nobody(serving, monkeypatch):
    monkeypatch.setattr(live, "PATIENCE", 0.01)
    monkeypatch.setattr(live, "INTERVAL", 0.0)
    monkeypatch.setattr(live, "SHARE", 1e9)

    async def scenario(server):
        before = decoded(await server.client.get("/engine/state"))
        server.engine.answers.clear()
        meanwhile = [decoded(await server.client.get("/engine/state")) for _ in range(3)]
        asked = server.engine.num_snapshots
        server.engine.answers.set()
        await asyncio.sleep(0.01)
        return before, meanwhile, asked, decoded(await server.client.get("/engine/state"))

    before, meanwhile, asked, after = serving(scenario)
    assert before.silent == after.silent == 0.0
    assert all(state.silent > 0 for state in meanwhile) and meanwhile[-1].blocks == before.blocks
    assert asked == 2, "one question is enough"


def test_an_engine_that_is_gone_is_told_of(serving, caplog):
    async def scenario(server):
        server.engine.is_dead = True
        return decoded(await server.client.get("/engine/state"))

    state = serving(scenario)
    assert "died" in state.obstacle and state.blocks is None
    assert not caplog.records


def test_a_new_engine_begins_its_steps_anew(serving, monkeypatch):
    monkeypatch.setattr(live, "INTERVAL", 0.0)
    monkeypatch.setattr(live, "SHARE", 1e9)

    async def scenario(server):
        numbers = []
        for _ in range(2):
            await server.client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
            numbers.append([step.number for step in decoded(await server.client.get("/engine/state")).steps])
        server.engine.engine, _ = make_engine()
        await server.client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
        numbers.append([step.number for step in decoded(await server.client.get("/engine/state")).steps])
        return numbers

    first, second, third = serving(scenario)
    assert first == list(range(len(first))) and second == list(range(len(second))) and len(second) > len(first)
    assert third[0] == 0 and len(third) < len(first)


def test_what_watches_needs_the_key(ask):
    for path in ("/engine/state", "/engine/info"):
        assert ask(path, keys=["k"]).status == 401
        assert ask(path, keys=["k"], headers={"authorization": "Bearer k"}).status == 200


def test_the_page_learns_what_the_server_offers(ask):
    info = decoded(ask("/engine/info", options={"grpc_port": 50051}), EngineInfo)
    assert (info.tensor_parallel_size, info.data_parallel_size) == (1, 1)
    assert info.models == ["fake"] and info.chats and info.grpc_port == 50051 and info.task == "generate"
    assert (info.max_images, info.max_image_bytes) == (0, 0)


def test_of_pictures_the_page_learns_how_many_there_may_be_and_what_became_of_them(serving):
    made = make_intake(limit_mm_per_prompt={"image": 3})

    async def scenario(server):
        info = decoded(await server.client.get("/engine/info"), EngineInfo)
        server.engine.go_on.clear()
        path, body = chat(image_url())
        asked = asyncio.ensure_future(server.client.post(path, {**body, "max_tokens": 4}))
        while not server.engine.seen:
            await asyncio.sleep(0.001)
        server.engine.engine.step()
        during = decoded(await server.client.get("/engine/state"))
        await ended(server, [asked])
        return info, during, server.engine.seen[-1][0]["mm_features"]

    settings = {"tokenizer": make_tokenizer(), "chat": CHAT, "max_model_len": 192, "pictures": made}
    try:
        info, during, [feature] = serving(scenario, **settings)
    finally:
        made.close()
    assert (info.max_images, info.max_image_bytes, info.max_body_bytes) == (3, 64 << 20, 64 << 20)
    encoder, blocks = during.encoder, during.blocks
    assert (encoder.pages, encoder.held + encoder.kept, encoder.pictures) == (64, 1, 1)
    assert (encoder.queries, encoder.hits) == (1, 0)
    [label] = blocks.pictures
    assert during.requests[0].pictures == [label] and [each[:2] for each in encoder.shown] == [(label, 1)]
    assert label not in feature.key.hex(), "nobody can tell whether it is a picture that he has, too"
    picture_of = [number for number, length in blocks.picture_runs for _ in range(length)]
    first, last = (each // blocks.size for each in (feature.offset, feature.offset + feature.length - 1))
    assert picture_of == [0 if first <= place <= last else -1 for place in range(len(picture_of))]


def test_a_step_tells_how_long_the_encoder_took():
    """The device was free at 1 s, had the pictures' embeddings at 3 s, and all else at 4 s."""
    record = StepRecord(
        0, 20, 32, 1, 1, 1, False, 1,
        schedule_begin=0.5, schedule_end=1.0, dispatch_end=1.5, wait_begin=1.5, result_ready=4.0, update_end=4.5,
        num_encoded=16, encoded_at=3.0,
    )  # fmt: skip
    [step] = shown_steps(None, [record], 7)
    assert (step.number, step.encoded, step.encode, step.device) == (7, 16, 2000.0, 3000.0)


def test_watching_is_no_line_in_the_log_and_no_request_in_the_metrics(serving, caplog):
    async def scenario(server):
        with caplog.at_level("INFO"):
            await server.client.get("/engine/state")
        return (await server.client.get("/metrics")).body.decode()

    assert "/engine/state" not in serving(scenario) and "/engine/state" not in caplog.text
