"""Known paths are answered past the router; what it does for all others stays."""

import pytest
from starlette.routing import Router


@pytest.mark.parametrize(
    ("method", "path", "status", "is_routed"),
    [
        ("POST", "/tokenize", 200, False),
        ("GET", "/v1/models", 200, False),
        ("GET", "/v1/models/fake", 200, True),
        ("HEAD", "/v1/models", 200, True),
        ("GET", "/tokenize", 405, True),
        ("POST", "/tokenize/", 307, True),
        ("POST", "/nowhere", 404, True),
    ],
)
def test_only_what_is_not_known_asks_the_router(serving, monkeypatch, method, path, status, is_routed):
    routed, app = [], Router.app

    def spy(self, scope, receive, send):
        routed.append(scope["path"])
        return app(self, scope, receive, send)

    async def scenario(server):
        server.client.app.build_middleware_stack()
        return await server.client.ask(method, path, b'{"prompt": "the cat"}', {"content_type": "application/json"})

    monkeypatch.setattr(Router, "app", spy)
    assert serving(scenario).status == status
    assert bool(routed) is is_routed
