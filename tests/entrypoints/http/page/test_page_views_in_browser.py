"""How the page shows answers, and what it explains to somebody new, in a real, headless Chromium."""

import json
import time

import pytest

from tests.entrypoints.http.browser import CHROMEDRIVER, CHROMIUM
from tests.entrypoints.http.page.conftest import answered, ask, held, own_server
from tests.entrypoints.http.saying_model import saying

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or CHROMEDRIVER is None,
        reason="needs chromium and chromedriver: apt-get install chromium chromium-driver",
    ),
]
TOKENS, CHANCES = 2, 3  # places of the views' buttons
RATE = """return import(document.baseURI + 'page/speed.js').then(({Speed}) => {
    const speed = new Speed();
    for (const [count, time] of arguments[0]) speed.took(count, time);
    return speed.rate;
})"""
OF_ANSWER = "[...document.querySelectorAll('.answer')][arguments[0]]"
SHOWN_CELLS = """
    const canvas = document.getElementById("blocks"), context = canvas.getContext("2d");
    const columns = Math.floor((canvas.clientWidth + 1) / 18), size = (canvas.clientWidth + 2) / columns;
    return arguments[0].map((place) => {
        const x = Math.round((place % columns) * size), y = Math.round(Math.floor(place / columns) * size);
        const pixels = context.getImageData(x, y, 16, 16).data;
        return Array.from({length: 256}, (_, each) => Number(pixels[4 * each + 3] > 127));
    })
"""


def at_most(window, tokens):
    window.run("document.getElementById('set-max_tokens').value = arguments[0]", tokens)


def show(window, place):
    window.click(f"#view label:nth-of-type({place})")


def strip(window, answer=0):
    """Texts of an answer's tokens, once they are shown."""
    window.wait_for(f"{OF_ANSWER}.querySelector('.body .token')", answer)
    tokens = f"[...{OF_ANSWER}.querySelectorAll('.body .token')]"
    shown = window.run(f"return {tokens}.map(each => each.textContent)", answer)
    return [each.replace("⏎", "").replace("⇥", "") for each in shown]


@pytest.mark.parametrize(
    ("arrivals", "rate"),
    [
        ([], None),
        ([(14, 100)], None),
        ([(1, 100), (13, 101)], None),
        ([(1, 100), (13, 5000)], None),
        ([(1, 100), (4, 100.5), (4, 101), (4, 101.5), (1, 102)], None),
        ([(1, 100), (0, 300), (0, 500), (0, 700), (0, 900)], None),
        ([(1, 100), (1, 200), (1, 300), (1, 400), (1, 500)], 10),
        ([(9, 100), (1, 350), (2, 600), (3, 850), (4, 1100)], 10),
    ],
)
def test_a_speed_is_told_only_of_tokens_that_came_one_after_the_other(page, arrivals, rate):
    window, _ = page
    assert window.run(RATE, arrivals) == rate


def test_a_short_answer_has_no_speed_and_a_longer_one_has(page):
    window, engine = page
    facts = "[...document.querySelectorAll('.answer:not(.busy) > .facts')].at(-1)?.textContent"
    at_most(window, 3)
    ask(window)
    assert "tokens/s" not in window.wait_for(facts)
    window.click("#clear")
    at_most(window, 12)
    with held(engine, steps=2):
        ask(window)
        for _ in range(12):
            engine.go_on.steps.release()
            time.sleep(0.02)
    assert "12 tokens in" in window.wait_for(facts) and "tokens/s" in window.run(f"return {facts}")


@pytest.mark.parametrize("mode", [1, 2])
def test_a_view_changes_answers_that_are_shown_already(page, mode):
    window, _ = page
    window.click(f"#mode label:nth-of-type({mode})")
    at_most(window, 6)
    for number in (1, 2):
        window.run("document.getElementById('prompt').value = 'hello'")
        window.click("#send")
        window.wait_for("document.querySelectorAll('.answer:not(.busy)').length === arguments[0]", number)
    texts = window.run("return [...document.querySelectorAll('.said')].map(each => each.textContent)")
    assert len(texts) == 2 and all(texts)
    show(window, TOKENS)
    for place, text in enumerate(texts):
        tokens = strip(window, place)
        assert len(tokens) > 1 and "".join(tokens).startswith(text.rstrip())
    show(window, CHANCES)
    for place in (0, 1):
        window.wait_for(f"{OF_ANSWER}.querySelector('.body .token')?.style.getPropertyValue('--doubt')", place)
    show(window, 1)
    assert window.run("return [...document.querySelectorAll('.said')].map(each => each.textContent)") == texts
    assert not window.run("return document.querySelector('.body .token')")


def test_probabilities_that_are_asked_for_later_are_those_that_came_along(page):
    window, _ = page
    at_most(window, 6)
    window.run("document.getElementById('set-temperature').value = 0")
    labels = "[...document.querySelectorAll('.body .token')].map(each => each.getAttribute('aria-label'))"
    show(window, CHANCES)
    ask(window)
    answered(window)
    along = window.run(f"return {labels}")
    show(window, 1)
    window.click("#clear")
    ask(window)
    answered(window)
    show(window, CHANCES)
    strip(window)
    assert window.run(f"return {labels}") == along and all("%" in each and "id " in each for each in along)


def test_an_answer_that_fills_the_context_shows_its_tokens_too(page):
    window, _ = page
    ask(window)
    text = answered(window)
    facts = window.run("return document.querySelector('.facts').textContent")
    assert "cut off" in facts
    show(window, CHANCES)
    tokens = strip(window)
    assert f"{len(tokens)} tokens in" in facts and tokens[-1] and text.endswith(tokens[-1])


def test_while_an_answer_comes_its_view_can_change(page):
    window, engine = page
    show(window, CHANCES)
    with held(engine, steps=4):
        ask(window)
        strip(window)
        show(window, 1)
        text = window.run("return document.querySelector('.said').textContent")
        assert text and not window.run("return document.querySelector('.body .token')")
        show(window, TOKENS)
        assert "".join(strip(window)).startswith(text.rstrip())
    window.wait_for("!document.querySelector('.busy')")


def test_an_answer_that_is_more_than_its_text_shows_all_its_tokens(window):
    call = '<think>hm</think>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    with own_server(window, options={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}, **saying()) as (
        url,
        service,
    ):
        service.engine.executor.say(call)
        window.open(url)
        window.wait_for("document.getElementById('model').textContent")
        window.click("#settings-open")
        window.click(".only-chat .line button")
        ask(window)
        window.wait_for("document.querySelector('.results')")
        show(window, TOKENS)
        assert "hm" in "".join(strip(window)) and "weather" in "".join(strip(window))
        assert window.complaints() == []


def test_tokens_that_cannot_be_had_are_told_of_and_the_text_stays(page):
    window, engine = page
    window.complaints()  # an earlier page may have asked a server that was ending
    at_most(window, 6)
    ask(window)
    text = answered(window)
    engine.is_dead = True
    try:
        show(window, CHANCES)
        window.wait_for("document.querySelector('.notice').textContent.includes('engine')")
    finally:
        engine.is_dead = False
    assert window.run("return document.querySelector('.said').textContent") == text
    told = window.complaints()
    assert told and all("status of 5" in each for each in told), told


@pytest.mark.parametrize("place", [TOKENS, CHANCES])
def test_a_view_says_what_its_colours_mean(page, place):
    window, _ = page
    seen = "[...document.querySelectorAll('#view-note > *')].filter(each => each.checkVisibility())"
    assert not window.run(f"return {seen}.length")
    show(window, place)
    [words] = window.run(f"return {seen}.map(each => each.innerText)")
    assert "Point at one" in words
    assert window.run(f"return {seen}[0].querySelector('.token, .scale i').getBoundingClientRect().width") > 10


@pytest.mark.parametrize(("width", "height"), [(390, 844), (360, 640), (820, 900), (1400, 900)])
def test_all_sections_of_the_settings_are_named_and_can_be_reached(page, width, height):
    window, _ = page
    window.resize(width, height)
    window.click("#settings-open")
    is_off = "document.querySelector('.more').classList.contains('off')"
    window.wait_for(f"!{is_off}")
    box = window.run("return document.getElementById('settings').getBoundingClientRect().toJSON()")
    names = window.run("return [...document.querySelectorAll('.sections button')].map(each => each.textContent)")
    assert names == ["Sampling", "Shape", "System", "Tools"]
    for number, name in enumerate(names, 1):
        button = f".sections button:nth-of-type({number})"
        window.click(button)
        window.wait_for(f"document.querySelector('{button}').getAttribute('aria-current') === 'true'")
        legend = f"return document.querySelectorAll('#settings legend')[{number - 1}]"
        assert window.run(f"{legend}.textContent").startswith(name)
        place = window.run(f"{legend}.getBoundingClientRect().toJSON()")
        assert box["top"] <= place["top"] and place["bottom"] <= box["bottom"]
        inside = window.run(f"return document.querySelector('{button}').getBoundingClientRect().toJSON()")
        assert box["left"] <= inside["left"] and inside["right"] <= box["right"], f"{name} is cut"
    window.run("document.getElementById('settings').scrollTop = 1e6")
    window.wait_for(is_off)


def test_settings_stand_side_by_side_where_there_is_room(page):
    window, _ = page
    window.click("#settings-open")
    columns = "return new Set([...document.querySelectorAll('#settings .row')].map(each => each.offsetLeft)).size"
    for width, count in ((390, 1), (1400, 2)):
        window.resize(width, 844)
        assert window.run(columns) == count


def test_raw_text_has_no_sections_of_chats(page):
    window, _ = page
    window.click("#mode label:nth-of-type(2)")
    window.click("#settings-open")
    seen = "[...document.querySelectorAll('.sections button')].filter(each => each.checkVisibility())"
    assert window.run(f"return {seen}.map(each => each.textContent)") == ["Sampling", "Shape"]


def test_somebody_new_learns_what_this_is(page):
    window, _ = page
    words = window.run("return document.querySelector('#log .about').innerText")
    assert "jaxpaged is an inference engine" in words
    for part in ("blocks", "steps", "programs", "memory"):
        explained = window.run(
            f"return document.getElementById('{part}-title').closest('section').querySelector('.what').innerText"
        )
        assert len(explained) > 60
    links = window.run("return [...document.querySelectorAll('#log .about a')].map(each => each.href)")
    assert len(links) == 2
    for link in links:
        window.open(link)
        assert window.run("return document.body.innerText.length") > 500
    assert all("favicon" in each for each in window.complaints())


def test_the_description_of_the_api_is_shown_with_the_key(window):
    with own_server(window, keys=["right"]) as (url, _):
        window.open(url)
        window.run("sessionStorage.setItem('jaxpaged-key', 'right')")
        window.open(url)
        window.wait_for("document.getElementById('model').textContent")
        window.run("window.open = (address) => location.assign(address)")
        window.click("#log .about a")
        shown = window.wait_for("location.protocol === 'blob:' && document.body.innerText")
        assert json.loads(shown)["openapi"]
        window.open(url)
        window.run("sessionStorage.clear()")
        window.complaints()


@pytest.mark.parametrize("dark", [False, True])
def test_blocks_can_be_told_apart_without_colours(page, dark):
    window, engine = page
    window.resize(1280, 900, dark=dark)
    with held(engine, steps=4):
        ask(window, "hello hello hello")
        window.wait_for("document.getElementById('blocks').getAttribute('aria-valuetext')?.includes('yours')")
        held_places = places(window, "held by your request")
        [held_cell] = window.run(SHOWN_CELLS, held_places[:1])
    answered(window)
    window.wait_for("!document.getElementById('blocks').getAttribute('aria-valuetext')?.includes('yours')")
    cached, free = places(window, "cached"), places(window, "free")
    cached_cell, free_cell = window.run(SHOWN_CELLS, [cached[0], free[-1]])
    assert sum(free_cell) * 2 < sum(cached_cell) < sum(held_cell) - 20
    middle = 7 * 16 + 7
    assert free_cell[middle] and held_cell[middle] and not cached_cell[middle]


def places(window, kind):
    """Blocks of the map that are called so."""
    window.run("document.getElementById('blocks').focus()")
    count = 1 + int(window.run("return document.getElementById('blocks').getAttribute('aria-valuemax')"))
    window.press("Home")
    found = []
    for place in range(count):
        if kind in window.run("return document.getElementById('blocks').getAttribute('aria-valuetext')"):
            found.append(place)
        window.press("Right")
    window.run("document.getElementById('blocks').blur()")
    return found
