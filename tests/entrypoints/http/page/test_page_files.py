"""The files of the page and the guides: these and no others, no key, headers that allow little."""

import re
from html.parser import HTMLParser

import pytest

from jaxpaged.entrypoints.http.page.files import FOLDER, GUIDE, guide_files, page_files

FILES = page_files()
PATHS = [file.path for file in FILES]
GUIDES = [file.path for file in guide_files()]
SCRIPTS = [file for file in FILES if file.name.endswith(".js")]


def test_there_is_a_page_with_styles_and_scripts():
    suffixes = {path.rpartition(".")[2] for path in PATHS}
    assert "/" in PATHS and {"css", "js"} <= suffixes


def test_the_guides_are_there_as_text_and_their_index_leads_to_them(ask):
    index = ask(f"{GUIDE}/")
    assert index.headers["content-type"] == "text/plain; charset=utf-8" and b"# Guides" in index.body
    named = set(re.findall(r"\]\((\w+\.md)\)", index.body.decode()))
    assert {f"{GUIDE}/{name}" for name in named} <= set(GUIDES) and len(named) > 10


@pytest.mark.parametrize("path", PATHS + GUIDES)
def test_a_file_is_served_without_a_key_and_may_do_little(ask, path):
    answer = ask(path, keys=["k"])
    assert answer.status == 200 and answer.body
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "set-cookie" not in answer.headers and "access-control-allow-origin" not in answer.headers
    assert answer.headers["content-type"].partition(";")[0] in (
        "text/html",
        "text/css",
        "text/javascript",
        "text/plain",
        "image/svg+xml",
        "image/png",
    )


def test_a_file_that_the_browser_has_is_not_sent_again(serving):
    async def scenario(server):
        first = await server.client.get("/")
        return await server.client.get("/", if_none_match=first.headers["etag"])

    answer = serving(scenario)
    assert answer.status == 304 and not answer.body


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page",
        "/page/index.html",
        "/page/../files.py",
        "/page/%2e%2e/files.py",
        "/page/..%2ffiles.py",
        "/page/static/main.js",
        "/page//etc/passwd",
        "/page/main.js/../../files.py",
        "/../etc/passwd",
        "/page/main.js%00",
        "/page/....//files.py",
        "/page/..\\files.py",
        "//etc/passwd",
        "/page/__init__.py",
    ],
)
def test_no_path_leads_to_any_other_file(ask, path):
    answer = ask(path)
    assert answer.status == 404 and b"import" not in answer.body and b"root:" not in answer.body
    assert ask(path, keys=["k"]).status == 401


def test_without_the_page_there_is_nothing_of_it(ask):
    for path in [*PATHS, *GUIDES, "/engine/state", "/engine/info"]:
        assert ask(path, options={"page": False}).status == 404
    assert "/engine/state" not in ask("/openapi.json", options={"page": False}).json["paths"]


def test_it_works_below_the_path_of_a_proxy(ask):
    options = {"root_path": "/llm"}
    assert ask("/llm/", options=options).status == 200
    assert ask(f"/llm{FOLDER}/main.js", options=options).status == 200
    answer = ask("/llm", options=options)
    assert answer.status == 307 and answer.headers["location"] == "/llm/"


class Links(HTMLParser):
    """Everything in a page that loads, runs or styles something."""

    def __init__(self, text):
        super().__init__()
        self.links, self.inline = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "action", "data", "poster")]
        self.inline += [name for name, _ in attributes if name.startswith("on") or name == "style"]


def test_the_page_asks_nobody_else_and_all_that_it_asks_for_is_there():
    index = next(file for file in FILES if file.path == "/").content.decode()
    links = Links(index)
    assert not links.inline and "<style" not in index
    wanted = {link for link in links.links if not link.startswith("#")} - {"openapi.json", f"{GUIDE[1:]}/"}
    for file in SCRIPTS:
        imported = re.findall(r"""from\s+["']([^"']+)["']""", file.content.decode())
        assert all(name.startswith("./") for name in imported), (file.name, imported)
        wanted |= {f"page/{name.removeprefix('./')}" for name in imported}
    assert {f"/{link}" for link in wanted} == set(PATHS) - {"/"}


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts_make_no_markup_of_text_and_know_no_other_address(file):
    text = file.content.decode()
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "document.cookie",
    ):
        assert forbidden not in text
    addresses = re.findall(r"https?://[^\s\"'`)]+", text)
    assert all(re.match(r"http://(localhost|127\.0\.0\.1)\b|http://www\.w3\.org/", each) for each in addresses), (
        addresses
    )
