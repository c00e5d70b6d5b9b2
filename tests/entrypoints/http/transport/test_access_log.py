"""Every request leaves a line, and no line has anything of what was asked or answered."""

import asyncio
import logging

from jaxpaged.entrypoints.http.app import public_endpoints
from jaxpaged.entrypoints.http.openapi import members

SECRET = "xylophone"


def access(caplog):
    return [record for record in caplog.records if record.name.endswith("access_log")]


def test_a_request_leaves_its_path_status_id_and_duration(serving, caplog):
    caplog.set_level("INFO", "jaxpaged")

    async def scenario(server):
        body = {"prompt": "the cat", "max_tokens": 3}
        await server.client.post("/v1/completions?key=hidden", body, x_request_id="me")
        await server.client.post("/v1/completions", {**body, "stream": True})
        await server.client.post("/v1/completions", {**body, "max_tokens": -3})
        await server.client.get("/no where\n")
        for path in ("/health", "/ready", "/metrics"):
            await server.client.get(path)

    serving(scenario)
    lines = access(caplog)
    assert [(line.method, line.path, line.status) for line in lines] == [
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/completions", 400),
        ("GET", "/no%20where%0A", 404),
    ]
    assert lines[0].request_id == "cmpl-me" and lines[1].request_id.startswith("cmpl-")
    assert all(line.duration > 0 and line.levelname == "INFO" for line in lines)
    assert "POST /v1/completions 200 in 0." in lines[0].getMessage() and "cmpl-me" in lines[0].getMessage()
    assert "hidden" not in caplog.text


def test_probes_are_debug_messages_and_all_of_it_can_be_switched_off(serving, caplog):
    caplog.set_level("DEBUG", "jaxpaged")
    probe = lambda server: server.client.get("/health")
    serving(probe)
    assert [(line.path, line.levelname) for line in access(caplog)] == [("/health", "DEBUG")]
    caplog.clear()
    serving(probe, options={"access_log": False})
    assert not access(caplog)


def test_paths_that_are_named_leave_no_line(serving, caplog):
    caplog.set_level("DEBUG", "jaxpaged")

    async def scenario(server):
        for path in ("/health", "/v1/models", "/version"):
            await server.client.get(path)

    serving(scenario, options={"disable_access_log_for_endpoints": ("/health", "/v1/models")})
    assert [line.path for line in access(caplog)] == ["/version"]


def test_a_client_that_leaves_is_logged_too(serving, caplog):
    caplog.set_level("INFO", "jaxpaged")

    async def scenario(server):
        server.engine.go_on.clear()
        await server.client.post("/v1/completions", {"prompt": "the cat"}, leave_after=0)
        server.engine.go_on.set()
        await asyncio.sleep(0.05)

    serving(scenario)
    assert [line.status for line in access(caplog)] == [499]


def test_nothing_that_was_asked_is_logged_by_any_endpoint_whatever_comes_of_it(serving, caplog):
    """Good bodies, bodies with a wrong field, and those that an engine fails, at the finest level."""
    caplog.set_level(logging.DEBUG, "jaxpaged")
    message = [{"role": "user", "content": SECRET}]
    fields = {
        "prompt": SECRET,
        "messages": message,
        "input": SECRET,
        "max_tokens": 4,
        "query": SECRET,
        "text_1": SECRET,
        "documents": [SECRET],
        "queries": SECRET,
        "stop": SECRET,
        "user": SECRET,
    }

    async def scenario(server):
        bodies = {each.path: each.body for each in public_endpoints(server.service) if each.method == "POST"}
        paths = [path for path, kind in bodies.items() if kind]
        statuses = set()
        for path in paths:
            [kind, *_] = members(bodies[path])
            body = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
            if path.endswith("/batch"):
                body["messages"] = [message]
            for more in ({}, {"temperature": SECRET}, {"model": SECRET}, {"max_tokens": -1}, {"stream": True}):
                statuses.add((await server.client.post(path, body | more)).status)
            server.engine.executor.fail_at = {len(server.engine.executor.executed): "result"}
            statuses.add((await server.client.post(path, body)).status)
            server.engine.executor.fail_at = {}
        server.engine.is_dead = True
        statuses.add((await server.client.post("/v1/completions", {"prompt": SECRET})).status)
        return len(paths), statuses

    num_paths, statuses = serving(scenario)
    assert num_paths >= 10 and statuses >= {200, 400, 404, 500}
    assert len(access(caplog)) == 6 * num_paths + 1
    assert SECRET not in caplog.text
