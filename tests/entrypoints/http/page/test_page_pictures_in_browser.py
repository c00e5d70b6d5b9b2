"""Pictures in the page, in a real, headless Chromium: dropped, pasted and chosen, shown, sent, refused, as code."""

import subprocess
import sys

import msgspec
import pytest
from google.protobuf import json_format

from jaxpaged.proto import jaxpaged_pb2 as pb
from tests.entrypoints.http.browser import CHROMEDRIVER, CHROMIUM
from tests.entrypoints.http.live_server import live_server
from tests.entrypoints.http.page.conftest import Gate, ask, held, own_server
from tests.entrypoints.http.page.test_page_in_browser import BOXES, SET, code_in, request_of
from tests.entrypoints.http.page.test_page_views_in_browser import places
from tests.entrypoints.http.test_pictures import file_of, in_base64, make_intake
from tests.models.seeing_folder import CHAT, NUM_EMBEDS, make_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or CHROMEDRIVER is None,
        reason="needs chromium and chromedriver: apt-get install chromium chromium-driver",
    ),
]
MOST = 3
GIVE = """
    const [way, files] = arguments, transfer = new DataTransfer();
    for (const [name, type, text] of files) {
        transfer.items.add(new File([Uint8Array.from(atob(text), (each) => each.charCodeAt(0))], name, {type}));
    }
    const as = {bubbles: true, cancelable: true}, input = document.getElementById("picture-files");
    if (way === "chosen") {
        input.click = () => (input.files = transfer.files, input.dispatchEvent(new Event("change")));
        document.getElementById("add-picture").click();
        return;
    }
    const event = way === "dropped" ? new DragEvent("drop", {dataTransfer: transfer, ...as})
        : new ClipboardEvent("paste", {clipboardData: transfer, ...as});
    document.getElementById(way === "dropped" ? "log" : "prompt").dispatchEvent(event);
    return event.defaultPrevented;
"""
ADD = """
    const [most, ...texts] = arguments;
    return import(document.baseURI + "page/pictures.js").then(async ({Pictures}) => {
        const told = [], small = new Pictures(() => [], (words) => told.push(words));
        small.setInfo({max_images: 3, max_image_bytes: 2000, max_body_bytes: most});
        for (const [place, text] of texts.entries()) {
            const content = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
            await small.add([new File([content], `${place}.png`, {type: "image/png"})]);
            if (told.length === place) told.push(null);
        }
        return told;
    });
"""
INNER_CELLS = """
    const canvas = document.getElementById("blocks"), context = canvas.getContext("2d");
    const columns = Math.floor((canvas.clientWidth + 1) / 18), size = (canvas.clientWidth + 2) / columns;
    return arguments[0].map((place) => {
        const x = Math.round((place % columns) * size) + 4, y = Math.round(Math.floor(place / columns) * size) + 4;
        const {data} = context.getImageData(x, y, 8, 8);
        return Array.from({length: 64}, (_, each) => data.slice(4 * each, 4 * each + 3).join());
    })
"""
NAMES = "[...document.querySelectorAll(`${arguments[0]} canvas`)].map(each => each.getAttribute('aria-label'))"
NEWEST = """(document.getElementById("steps").dispatchEvent(new KeyboardEvent("keydown", {key: "End"})),
    document.getElementById("steps").getAttribute("aria-valuetext"))"""
PROBLEM = "document.querySelector('#hint.problem')?.textContent"


@pytest.fixture(scope="module")
def served():
    intake = make_intake(limit_mm_per_prompt={"image": MOST})
    settings = {"tokenizer": make_tokenizer(), "chat": CHAT, "max_model_len": 192, "pictures": intake}
    try:
        with live_server(options={"grpc_port": 50051}, **settings) as (url, service):
            service.engine.executor.longest_run = 1
            service.engine.go_on = Gate()
            yield url, service.engine
    finally:
        intake.close()


@pytest.fixture
def page(page):
    window, engine = page
    window.run(SET, "set-max_tokens", 4)
    return window, engine


def give(window, way, *names):
    """Pictures of these names come in this way; every name has its own picture."""
    files = [
        (name, f"image/{(kind := name.rpartition('.')[2])}", in_base64(file_of(kind, seed=len(name)))) for name in names
    ]
    return window.run(GIVE, way, files)


def shown(window, names, where="#pictures"):
    window.wait_for(f"JSON.stringify({NAMES}) === JSON.stringify(arguments[1])", where, names)


def answered(window, number=1):
    window.wait_for("document.querySelectorAll('.answer:not(.busy) .actions').length === arguments[0]", number)


def features_of(engine):
    """Those of the newest request."""
    return engine.seen[-1][0].get("mm_features", ())


def test_pictures_that_come_in_each_way_are_shown_and_sent_and_stay_in_the_conversation(page):
    window, engine = page
    give(window, "dropped", "cat.png")
    shown(window, ["cat.png"])
    give(window, "pasted", "dog.jpeg")
    shown(window, ["cat.png", "dog.jpeg"])
    give(window, "chosen", "bird.gif")
    shown(window, names := ["cat.png", "dog.jpeg", "bird.gif"])
    size = window.run("const {width, height} = document.querySelector('#pictures canvas'); return [width, height]")
    assert size == [60, 40]
    ask(window, "what")
    answered(window)
    shown(window, names, ".question")
    shown(window, [])
    first = [feature.key for feature in features_of(engine)]
    assert len(set(first)) == MOST
    summary = window.wait_for("document.querySelector('.answer summary')?.textContent")
    assert int(summary.split()[1]) > MOST * NUM_EMBEDS
    ask(window, "and")
    answered(window, 2)
    assert [feature.key for feature in features_of(engine)] == first
    give(window, "dropped", "more.png")
    assert f"at most {MOST} pictures" in window.wait_for(PROBLEM)
    window.click("#clear")
    give(window, "dropped", "more.png")
    shown(window, ["more.png"])
    window.click("#send")  # no text
    answered(window)
    assert len(features_of(engine)) == 1


def test_a_picture_can_be_removed_and_two_of_one_name_told_apart(page):
    window, engine = page
    give(window, "dropped", "a.png", "a.png")
    shown(window, ["a.png", "2-a.png"])
    removers = window.labels("#pictures button")
    assert [name for _, name in removers] == ["Remove a.png", "Remove 2-a.png"]
    window.click("#pictures li:first-child button")
    shown(window, ["2-a.png"])
    ask(window, "what")
    answered(window)
    assert len(features_of(engine)) == 1


@pytest.mark.parametrize(
    ("name", "kind", "text", "said"),
    [
        ("notes.pdf", "application/pdf", "AAAA", "PNG, JPEG, WebP or GIF"),
        ("drawing.svg", "image/svg+xml", "AAAA", "PNG, JPEG, WebP or GIF"),
        ("broken.png", "image/png", "AAAA", "no picture"),
    ],
)
def test_what_is_no_picture_is_refused_in_a_sentence(page, name, kind, text, said):
    window, _ = page
    window.run(GIVE, "dropped", [(name, kind, text)])
    problem = window.wait_for(PROBLEM)
    assert name in problem and said in problem
    shown(window, [])


def test_files_that_are_too_large_for_a_picture_or_a_request_are_refused(page):
    window, _ = page
    little, large = (in_base64(file_of("png", side, side)) for side in (16, 60))
    told = window.run(ADD, 2**18 + len(little) * 3 // 2, large, little, little)
    assert told[1] is None and "has" in told[0] and "a picture may have" in told[0]
    assert "this server takes" in told[2]


def test_raw_text_has_no_pictures_and_says_so(page):
    window, engine = page
    give(window, "dropped", "cat.png")
    shown(window, ["cat.png"])
    window.click("#mode label:nth-of-type(2)")
    for part in ("pictures", "add-picture"):
        assert not window.run("return document.getElementById(arguments[0]).checkVisibility()", part)
    give(window, "dropped", "dog.png")
    assert "Choose Chat" in window.wait_for(PROBLEM)
    window.run("document.getElementById('prompt').value = 'what'")
    window.click("#send")
    answered(window)
    assert not features_of(engine)


def test_a_question_that_was_refused_comes_back_with_its_picture(page):
    window, _ = page
    give(window, "dropped", "cat.png")
    shown(window, ["cat.png"])
    ask(window, "what " * 100)
    assert "192" in window.wait_for("document.querySelector('.answer .problem')?.textContent")
    shown(window, ["cat.png"])
    assert window.run("return document.getElementById('prompt').value").startswith("what")
    assert all("400" in each for each in window.complaints())


def test_probabilities_of_an_answer_about_a_picture_come_only_along(page):
    window, _ = page
    give(window, "dropped", "cat.png")
    shown(window, ["cat.png"])
    ask(window, "what")
    answered(window)
    window.click("#view label:nth-of-type(3)")
    window.wait_for("document.querySelector('.notice').textContent.includes('cannot be read again')")
    ask(window, "and")
    answered(window, 2)
    window.wait_for("document.querySelectorAll('.answer')[1].querySelector('.body .token')")


@pytest.mark.parametrize("width", [360, 1280])
def test_pictures_lie_beside_nothing_else_and_have_names(page, width):
    window, _ = page
    window.resize(width, 800)
    give(window, "dropped", "cat.png", "dog.png", "bird.png")
    shown(window, ["cat.png", "dog.png", "bird.png"])
    boxes = window.run(BOXES, "#composer > :not(.sr)")
    assert {"pictures", "add-picture", "prompt"} <= {name for name, *_ in boxes}
    for place, (name, left, top, right, bottom) in enumerate(boxes):
        assert left >= 0 and right <= width and bottom <= 800, f"{name} lies outside"
        for other, left2, top2, right2, bottom2 in boxes[:place]:
            apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
            assert apart, f"{name} lies on {other}"
    named = window.labels("#composer button, #composer canvas, #composer ul")
    assert len(named) > 7 and all(name for _, name in named)


def test_code_reads_the_picture_from_its_file_and_means_the_same(page, tmp_path, monkeypatch):
    window, engine = page
    name = "it's a $cat.png"
    (tmp_path / name).write_bytes(file_of("png", seed=len(name)))
    give(window, "dropped", name)
    shown(window, [name])
    window.run(SET, "prompt", 'what `is` "$HOME" \\n?')
    window.click("#code-open")
    curl, python, grpcurl, client = (code_in(window, each) for each in ("curl", "python", "grpcurl", "client"))
    assert name in window.run("return document.getElementById('code-note').textContent")
    assert max(map(len, (curl, python, grpcurl, client))) < 3000
    for program in (["bash", "-c", curl], [sys.executable, "-c", python]):
        before = len(engine.seen)
        done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
        assert done.returncode == 0 and len(engine.seen) == before + 1, done.stderr + done.stdout
    texts = [prompt["prompt"] for prompt, _, _ in engine.seen[-2:]]
    assert texts[0] == texts[1] and 'what `is` "$HOME" \\n?' in texts[0]
    assert len({feature.key for prompt, _, _ in engine.seen[-2:] for feature in prompt["mm_features"]}) == 1
    wire = subprocess.run(
        ["bash", "-c", f"grpcurl() {{ cat; }}; {grpcurl}"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    request = json_format.Parse(wire.stdout, pb.GenerateRequest())
    parts = request.chat.messages[0].parts
    assert parts[0].image.data == (tmp_path / name).read_bytes() and parts[1].text == 'what `is` "$HOME" \\n?'
    monkeypatch.chdir(tmp_path)
    assert request == request_of(client, monkeypatch)
    window.press("Escape")


def test_the_engine_shows_its_encoder_cache_and_the_steps_that_encoded(page, monkeypatch):
    window, engine = page
    take = engine.snapshot

    async def snapshot(since):
        found = await take(since)
        found.steps = [
            msgspec.structs.replace(each, num_encoded=16, encoded_at=each.result_ready) for each in found.steps
        ]
        return found

    monkeypatch.setattr(engine, "snapshot", snapshot)
    give(window, "dropped", "new one.png")
    shown(window, ["new one.png"])
    ask(window, "what")
    answered(window)
    caption = "document.getElementById('encoder-caption').textContent"
    window.wait_for(f"{caption}.includes('of 64 pages in use') && {caption}.includes('found here')")
    assert window.run("return document.getElementById('encoder').checkVisibility()")
    told = window.wait_for(f"({NEWEST}.includes('embeddings of pictures 16')) && {NEWEST}")
    assert "their encoding ≤ " in told
    assert window.run("return document.getElementById('encode-key').checkVisibility()")


def test_blocks_of_a_picture_are_hatched_and_only_the_page_that_sent_it_sees_which(page, served):
    window, engine = page
    give(window, "dropped", "my own.png")
    shown(window, ["my own.png"])
    with held(engine, steps=3):
        ask(window, "what what what what what what what what what what what what what what what what")
        window.wait_for("document.getElementById('blocks').getAttribute('aria-valuetext')?.includes('with a picture')")
        shown(window, ["my own.png"], "#encoder-pictures li:first-child")
        with_pictures = places(window, "held by your request, with tokens of my own.png")
        hatched = with_pictures[-1]
        plain = next(place for place in places(window, "held by your request") if place not in with_pictures)
        cells = window.run(INNER_CELLS, [hatched, plain])
        window.run("document.getElementById('blocks').focus()")
        window.press("Home", *["Right"] * hatched)
        shown(window, ["my own.png"], "#tip")
        window.open(served[0])  # which ends the request; its picture stays in the cache
        told = window.wait_for("document.getElementById('encoder-pictures').textContent")
        assert "1 page" in told and "my own" not in told
        assert window.run("return document.querySelectorAll('#encoder-pictures canvas').length") == 0
    assert len(set(cells[1])) == 1 and len(set(cells[0])) > 1


def test_a_model_of_text_only_is_offered_no_pictures(window):
    with own_server(window) as (url, _):
        window.open(url)
        window.wait_for("document.getElementById('model').textContent === 'fake'")
        for part in ("add-picture", "pictures", "encoder", "encode-key"):
            assert not window.run("return document.getElementById(arguments[0]).checkVisibility()", part)
        assert [give(window, way, "cat.png") for way in ("dropped", "pasted")] == [False, False]
        assert window.complaints() == []
