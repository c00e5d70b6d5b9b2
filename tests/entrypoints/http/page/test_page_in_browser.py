"""The page in a real, headless Chromium, over an engine without a model: keyboard, streaming, stop, widths, code.

How answers are shown, and what the page explains, is in `test_page_views_in_browser.py`.
"""

import itertools
import json
import subprocess
import sys
import time

import pytest
from google.protobuf import json_format

from jaxpaged.client.messages import generate_request
from jaxpaged.proto import jaxpaged_pb2 as pb
from tests.entrypoints.http.browser import CHROMEDRIVER, CHROMIUM
from tests.entrypoints.http.live_server import live_server
from tests.entrypoints.http.page.conftest import answered, ask, held, own_server
from tests.entrypoints.http.saying_model import saying

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or CHROMEDRIVER is None,
        reason="needs chromium and chromedriver: apt-get install chromium chromium-driver",
    ),
]
WIDTHS = (360, 768, 1280, 1920)
SEEN = "[...document.querySelectorAll(arguments[0])].filter(each => each.checkVisibility())"


PAIRS = (
    ("--ink", "--paper"),
    ("--dim", "--paper"),
    ("--dim", "--sunk"),
    ("--dim", "--raised"),
    ("--accent", "--paper"),
    ("--on-accent", "--accent"),
    ("--bad", "--paper"),
    ("--ink", "--soft"),
)
CONTRAST = """
    const canvas = document.createElement("canvas").getContext("2d");
    const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    const light = (name) => {
        canvas.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
        canvas.fillRect(0, 0, 1, 1);
        const [red, green, blue] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) => linear(value / 255));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const [bright, dim] = [...arguments].map(light).sort((a, b) => b - a);
    return (bright + 0.05) / (dim + 0.05);
"""
SET = """
    const [id, value] = arguments, element = document.getElementById(id);
    element.value = value;
    for (const kind of ["input", "change"]) element.dispatchEvent(new Event(kind, {bubbles: true}));
"""
BOXES = f"""return {SEEN}.map((each) => {{
    const box = each.getBoundingClientRect();
    return [each.id || each.textContent, box.left, box.top, box.right, box.bottom];
}})"""


def test_by_keyboard_alone_a_question_is_asked_and_its_answer_announced(page):
    window, _ = page
    window.press("Tab")
    assert window.run("return document.activeElement.className") == "skip"
    window.press("Enter")
    window.wait_for("document.activeElement.id === 'prompt'")
    window.press("hello", "Enter")
    text = answered(window)
    assert text in window.wait_for(
        "document.querySelector('#said').textContent.includes('Answer') && document.querySelector('#said').textContent"
    )
    facts = window.run("return document.querySelector('.facts').textContent")
    assert "tokens in" in facts and "first after" in facts
    assert window.run("return document.querySelector('.question').textContent") == "hello"
    assert window.run("return document.getElementById('prompt').value") == ""


def test_text_streams_and_escape_stops_it_in_the_engine(page):
    window, engine = page
    aborted = len(engine.aborted)
    with held(engine, steps=4):
        ask(window)
        begun = window.wait_for("document.querySelector('.answer.busy .said')?.textContent")
        assert window.run("return document.getElementById('send').hidden")
        engine.go_on.steps.release(3)
        window.wait_for("document.querySelector('.answer.busy .said').textContent.length > arguments[0]", len(begun))
        window.press("Escape")
        window.wait_for("document.querySelector('.facts').textContent.includes('stopped')")
        while len(engine.aborted) == aborted:  # the server hears of it after the page has shown it
            time.sleep(0.01)
    assert not window.run("return document.getElementById('send').hidden")
    ask(window)  # and the conversation goes on
    window.wait_for("document.querySelectorAll('.answer:not(.busy)').length === 2")


def test_probabilities_are_shown_with_what_else_was_likely(page):
    window, _ = page
    window.click("#view label:nth-of-type(3)")
    ask(window)
    answered(window)
    window.run("document.querySelector('.token[tabindex=\"0\"]').focus()")
    window.press("Right")
    window.wait_for("document.activeElement.matches('.token:nth-child(2)')")
    shown = window.run("return document.getElementById('tip').innerText")
    assert window.run("return document.getElementById('tip').checkVisibility()") and shown.count("%") >= 3
    assert "others: " in window.run("return document.activeElement.getAttribute('aria-label')")
    assert window.run("return document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
    doubts = window.run(
        "return [...document.querySelectorAll('.token')].map(each => +each.style.getPropertyValue('--doubt'))"
    )
    assert doubts and all(0 <= each <= 1 for each in doubts) and max(doubts) > 0
    window.press("Escape")
    assert not window.run("return document.getElementById('tip').checkVisibility()")


def test_the_prompts_tokens_show_which_came_from_the_cache(page):
    window, _ = page
    window.run(SET, "set-max_tokens", 4)
    for number in (1, 2):
        ask(window, "hello hello hello hello")
        window.wait_for("document.querySelectorAll('.actions').length === arguments[0]", number)
    window.run("[...document.querySelectorAll('.answer details')].at(-1).open = true")
    window.wait_for("[...document.querySelectorAll('.answer details')].at(-1).querySelector('.token')")
    words = window.run("return [...document.querySelectorAll('.answer summary')].at(-1).textContent")
    cached = window.run("return document.querySelectorAll('.token.cached').length")
    assert cached > 0 and f"{cached} from the prefix cache" in words


def test_one_sees_ones_own_blocks_and_goes_through_them_by_keyboard(page):
    window, engine = page
    with held(engine, steps=4):
        ask(window)
        window.wait_for("document.getElementById('blocks').getAttribute('aria-valuetext')?.includes('yours')")
        window.wait_for("document.querySelector('#requests b')?.textContent === 'yours'")
        window.run("document.getElementById('blocks').focus()")
        window.press("Right")
        said = window.run("return document.getElementById('blocks').getAttribute('aria-valuetext')")
        assert said.startswith("Block 2: ")
        window.run("document.getElementById('steps').focus()")
        window.press("Left")
        assert "bucket" in window.run("return document.getElementById('steps').getAttribute('aria-valuetext')")
    answered(window)


def test_raw_text_is_continued_with_its_settings(page):
    window, engine = page
    window.click("#mode label:nth-of-type(2)")
    window.click("#settings-open")
    window.run(SET, "set-max_tokens", 3)
    assert window.run("return document.getElementById('changed').textContent") == "1"
    window.run("document.getElementById('prompt').focus(); document.getElementById('prompt').value = 'hello'")
    window.click("#send")
    answered(window)
    assert window.run("return document.querySelector('.given').textContent") == "hello"
    assert "cut off" in window.run("return document.querySelector('.facts').textContent")
    assert engine.seen[-1][1].max_tokens == 3


def test_wrong_settings_are_told_and_nothing_is_sent(page):
    window, engine = page
    before = len(engine.seen)
    window.click("#settings-open")
    window.run(SET, "set-shape", "schema")
    window.run(SET, "set-schema", "{")
    ask(window)
    assert "not JSON" in window.wait_for("document.querySelector('#hint.problem')?.textContent")
    assert len(engine.seen) == before and window.run("return document.getElementById('prompt').value") == "hello"


def test_an_error_of_the_server_is_told_where_the_answer_would_be(page):
    window, _ = page
    ask(window, "hello " * 200)
    assert "128" in window.wait_for("document.querySelector('.problem')?.textContent")
    assert "hello hello" in window.run("return document.getElementById('prompt').value"), "it can be sent again"
    assert all("400" in each for each in window.complaints())


@pytest.mark.parametrize("show", ["play", "engine"])
@pytest.mark.parametrize("width", WIDTHS)
def test_everything_fits_and_nothing_lies_on_anything_else(page, width, show):
    window, _ = page
    ask(window)
    answered(window)
    window.click("#settings-open")
    window.click(f"#view label:nth-of-type({1 + WIDTHS.index(width) % 3})")
    window.resize(width, 800, dark=width % 3 == 0)
    if window.run("return document.getElementById('show').checkVisibility()"):
        window.click(f"#show [data-show={show}]")
    for scroller in ("html", "#play", "#engine", "#settings", "#log"):
        over = window.run(
            "const e = document.querySelector(arguments[0]); return e.scrollWidth - e.clientWidth", scroller
        )
        assert over <= 0, f"{scroller} is {over} px too wide"
    boxes = window.run(BOXES, "#top > *, .bar > :not(.grow, .sr), #composer > :not(.sr), #figures > *")
    assert len(boxes) > 8
    for name, left, _, right, bottom in boxes:
        assert left >= 0 and right <= width and (bottom <= 800 or show == "engine"), f"{name} lies outside"
    for (name, left, top, right, bottom), (other, left2, top2, right2, bottom2) in itertools.combinations(boxes, 2):
        assert right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top, f"{name} lies on {other}"


def test_the_dialog_with_code_fits_a_phone(page):
    window, _ = page
    window.resize(360, 740)
    window.click("#code-open")
    for selector in ("#code", "#language"):
        assert window.run(
            "const e = document.querySelector(arguments[0]); return e.scrollWidth <= e.clientWidth", selector
        )
    window.press("Escape")


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_both_themes_and_the_theme_can_be_chosen(page, dark):
    window, _ = page
    window.resize(1280, 900, dark=dark)
    ratios = {f"{a} on {b}": window.run(CONTRAST, a, b) for a, b in PAIRS}
    assert all(ratio >= 4.5 for ratio in ratios.values()), ratios
    paper = "return getComputedStyle(document.body).backgroundColor"
    before = window.run(paper)
    window.click("#theme")
    assert window.run(paper) != before
    window.click("#theme")
    assert window.run(paper) == before
    window.run("localStorage.clear()")


def test_every_control_has_a_name(page):
    window, _ = page
    ask(window)
    answered(window)
    window.click("#settings-open")
    named = window.labels("button, input, select, textarea, canvas[tabindex], [role=log]")
    assert len(named) > 30 and all(name for _, name in named), [html for html, name in named if not name]


def code_in(window, language):
    window.run("document.querySelector(`input[name=language][value=${arguments[0]}]`).click()", language)
    return window.run("return document.getElementById('snippet').textContent")


def test_the_request_as_code_runs_and_means_the_same_everywhere(page, served, monkeypatch):
    window, engine = page
    settings = {"temperature": 0.5, "top_k": 7, "max_tokens": 4, "stop": "it's \\n", "system": 'A "quoted" system'}
    for name, value in settings.items():
        window.run(SET, f"set-{name}", value)
    window.click("#view label:nth-of-type(3)")
    window.run(SET, "prompt", "it's hello")
    window.click("#code-open")
    curl, python, grpcurl, client = (code_in(window, each) for each in ("curl", "python", "grpcurl", "client"))
    for program in (["bash", "-c", curl], [sys.executable, "-c", python]):
        before = len(engine.seen)
        done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 and done.stdout, done.stderr
        params = engine.seen[before][1]
        assert (params.temperature, params.top_k, params.max_tokens, params.stop) == (0.5, 7, 4, ["it's \n"])
        assert params.logprobs == 5
    wire = subprocess.run(
        ["bash", "-c", f'grpcurl() {{ printf "%s" "$3"; }}; {grpcurl}'], capture_output=True, text=True, check=True
    )
    request = json_format.Parse(wire.stdout, pb.GenerateRequest())
    assert request.chat.messages[0].content == 'A "quoted" system' and request.sampling_params.top_k == 7
    assert request == request_of(client, monkeypatch)
    window.press("Escape")


def request_of(code, monkeypatch):
    """The request that a program with `jaxpaged.client` sends."""
    sent = []

    class Recorder:
        def __init__(self, target):
            assert target == "127.0.0.1:50051"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def generate(self, prompt, **values):
            sent.append(generate_request(prompt, values))
            return []

    monkeypatch.setattr("jaxpaged.client.Client", Recorder)
    exec(compile(code, "snippet", "exec"), {})
    return sent[0]


def test_with_a_key_it_works_and_forgets_it_with_the_tab(window):
    with own_server(window, keys=["right"]) as (url, _):
        window.open(url)
        window.wait_for("document.getElementById('key').open")
        for given, then in (
            ("wrong", "document.getElementById('key-note').textContent.includes('does not know')"),
            ("right", "document.getElementById('model').textContent"),
        ):
            window.wait_for("document.getElementById('key').open")
            window.run("document.getElementById('key-value').focus()")
            window.press(given, "Enter")
            window.wait_for(then)
        ask(window)
        assert answered(window)
        window.wait_for("document.querySelector('#figures b').textContent !== '–'")
        kept = window.run(
            "return [document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage), location.href]"
        )
        assert "right" in kept[2] and "right" not in "".join(kept[:2] + kept[3:])
        window.open(url)
        window.wait_for("document.getElementById('model').textContent")
        assert not window.run("return document.getElementById('key').open")
        window.run("sessionStorage.clear()")
        assert all("401" in each for each in window.complaints())


def test_a_server_that_stops_is_told_and_one_that_comes_back_is_found(window):
    with live_server() as (url, _):
        window.open(url)
        window.wait_for("document.getElementById('health').className === 'good'")
    window.wait_for("document.getElementById('health').className === 'bad'")
    ask(window)
    assert "does not answer" in window.wait_for("document.querySelector('.problem')?.textContent")
    window.complaints()


def test_thinking_and_calls_of_tools_are_shown_and_results_given_back(window):
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
        shown = window.run("return document.querySelector('.call').textContent")
        assert shown.startswith("weather") and json.loads(shown.removeprefix("weather")) == {"city": "Rome"}
        assert window.run("return document.querySelector('.thought').textContent").strip() == "hm"
        service.engine.executor.say("<think></think>the cat")
        window.run("document.querySelector('.results textarea').focus()")
        window.press("sunny")
        window.click(".results button")
        window.wait_for("document.querySelectorAll('.answer:not(.busy)').length === 2")
        assert "the cat" in window.run("return document.querySelector('.answer:last-child .said').textContent")
        assert window.complaints() == []


def test_where_there_are_several_models_one_is_chosen_of_all(window):
    """Adapters are among them: whatever /v1/models has."""
    with own_server(window, names=("fake", "pirate")) as (url, _):
        window.open(url)
        window.wait_for("document.getElementById('models').checkVisibility()")
        assert window.run("return [...document.querySelectorAll('#models option')].map((each) => each.value)") == [
            "fake",
            "pirate",
        ]
        window.run(SET, "models", "pirate")
        ask(window)
        assert answered(window)
        window.run("document.getElementById('code-open').click()")
        assert '"pirate"' in window.run("return document.getElementById('snippet').textContent")
        window.resize(360, 800)
        assert window.run("return document.documentElement.scrollWidth") <= 360
        assert window.complaints() == []
