"""A page of another site cannot make the server do anything, whichever way it tries; programs notice nothing of it."""

import pytest

EVIL = "https://evil.example"
HERE = {"host": "127.0.0.1:8000"}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


def status_of(serving, method, path, body=None, *, admin=False, options=None, keys=(), **headers):
    async def scenario(server):
        client = server.admin if admin else server.client
        if method == "GET":
            return await client.get(path, **headers)
        return await client.post(path, body, **headers)

    return serving(scenario, options=options, keys=keys).status


@pytest.mark.parametrize(
    "origin", [EVIL, "http://evil.example", "null", "http://127.0.0.1:9000", "https://127.0.0.1:8000.evil.example"]
)
def test_a_page_of_another_site_may_not_post(serving, origin):
    assert status_of(serving, "POST", "/v1/chat/completions", CHAT, origin=origin, **HERE) == 403


@pytest.mark.parametrize("path", ["/abort_all_requests", "/reset_prefix_cache", "/sleep?level=0", "/start_profile"])
def test_nor_reach_the_admin_listener_by_a_post_without_a_body(serving, path):
    assert status_of(serving, "POST", path, b"", admin=True, content_type="text/plain", origin=EVIL, **HERE) == 403
    assert status_of(serving, "POST", "/abort_all_requests", b"", admin=True, **HERE) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},  # a program
        {"origin": "http://127.0.0.1:8000"},
        {"origin": "http://127.0.0.1:8000", "sec_fetch_site": "same-origin"},
        {"origin": "http://localhost:8000", "host": "localhost:8000"},
        {"origin": "http://[::1]:8000", "host": "[::1]:8000"},
        {"origin": "https://llm.example", "x_forwarded_host": "llm.example"},  # a proxy in front
        {"origin": "https://llm.example", "sec_fetch_site": "same-origin"},  # one that says nothing
        {"origin": "chrome-extension://abcdef"},  # what a person installed
    ],
)
def test_programs_and_the_servers_own_pages_may(serving, headers):
    assert status_of(serving, "POST", "/v1/chat/completions", CHAT, **{**HERE, **headers}) == 200


def test_a_name_that_somebody_else_leads_to_this_machine_is_no_own_page(serving):
    rebound = {"origin": "http://evil.example:8000", "host": "evil.example:8000", "sec_fetch_site": "same-origin"}
    assert status_of(serving, "POST", "/v1/chat/completions", CHAT, **rebound) == 403
    for path in ("/engine/state", "/engine/info"):
        assert status_of(serving, "GET", path, host="evil.example:8000") == 403
    key = {"authorization": "Bearer k"}  # which such a page does not have
    assert status_of(serving, "POST", "/v1/chat/completions", CHAT, keys=["k"], **rebound, **key) == 200
    everywhere = {"host": "0.0.0.0"}  # whoever reaches the server may ask
    assert status_of(serving, "POST", "/v1/chat/completions", CHAT, options=everywhere, **rebound) == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_the_page_shows_is_not_for_other_sites(serving, site):
    for path in ("/engine/state", "/engine/info"):
        assert status_of(serving, "GET", path, sec_fetch_site=site, **HERE) == 403
        assert status_of(serving, "GET", path, origin=EVIL, **HERE) == 403
        assert status_of(serving, "GET", path, sec_fetch_site="same-origin", **HERE) == 200
    assert status_of(serving, "GET", "/", sec_fetch_site=site, **HERE) == 200  # a link leads to the page


def test_the_operator_may_let_pages_in(serving):
    asked = {"origin": "https://my.site", "host": "my.site"}
    assert status_of(serving, "POST", "/v1/chat/completions", CHAT, **asked) == 403
    for allowed in ("https://my.site", "*"):
        options = {"allowed_origins": (allowed,)}
        assert status_of(serving, "POST", "/v1/chat/completions", CHAT, options=options, **asked) == 200
        assert status_of(serving, "GET", "/engine/state", options=options, host="my.site") == 200
        expected = 200 if allowed == "*" else 403
        assert status_of(serving, "POST", "/v1/chat/completions", CHAT, options=options, origin=EVIL) == expected


def test_the_refusal_says_what_to_do(ask):
    answer = ask("/v1/chat/completions", CHAT, headers={"origin": EVIL, **HERE})
    assert EVIL in answer.error["message"] and "--allowed-origins" in answer.error["message"]
    assert answer.error["type"] == "PermissionDeniedError"


@pytest.mark.parametrize(
    "host", ["evil.example", "", "[::1", "127.0.0.1.evil.example:8000", "localhost.evil.example", "a b"]
)
def test_odd_hosts_are_no_reason_to_fail(serving, host):
    assert status_of(serving, "POST", "/v1/chat/completions", CHAT, origin=EVIL, host=host) == 403
