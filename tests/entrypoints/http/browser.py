"""A headless Chromium, driven over WebDriver with nothing but the standard library."""

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # how WebDriver calls the id of an element
KEYS = {
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Escape": "\ue00c",
    "Left": "\ue012",
    "Right": "\ue014",
    "Down": "\ue015",
    "Home": "\ue011",
}
LOOK = "return arguments[0].checkVisibility() && arguments[0].outerHTML.slice(0, 80)"
PATIENCE = 60.0


class Browser:
    """One window. Times out, with what it waited for, where nothing happens."""

    def __init__(self, url, profile):
        self._url = url
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        self._session = "/session/" + self._call("/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def _call(self, path, body=None, method=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + self._session + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, url):
        self._call("/url", {"url": url})

    def run(self, script, *arguments):
        """What a script returns."""
        return self._call("/execute/sync", {"script": script, "args": arguments})

    def wait_for(self, script, *arguments):
        """What a script returns once that is true."""
        end = time.monotonic() + PATIENCE
        while not (value := self.run(f"return {script}", *arguments)):
            assert time.monotonic() < end, f"this never came true: {script}"
            time.sleep(0.02)
        return value

    def press(self, *keys):
        """Keys one after the other, by name or as text."""
        strokes = [stroke for key in keys for stroke in (KEYS.get(key) or key)]
        actions = [{"type": kind, "value": stroke} for stroke in strokes for kind in ("keyDown", "keyUp")]
        self._call("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def click(self, selector):
        self._call(f"/element/{self._find(selector)[0]}/click", {})

    def labels(self, selector):
        """(what is there in HTML, what a screen reader calls it) of elements that can be seen."""
        found = [(each, self.run(LOOK, {ELEMENT: each})) for each in self._find(selector)]
        return [(html, self._call(f"/element/{each}/computedlabel")) for each, html in found if html]

    def _find(self, selector):
        found = self._call("/elements", {"using": "css selector", "value": selector})
        assert found, f"nothing is {selector}"
        return [each[ELEMENT] for each in found]

    def resize(self, width, height, dark=False):
        """Another screen. Whoever draws has drawn when this returns."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._call(
            "/execute/async", {"script": "requestAnimationFrame(() => setTimeout(arguments[0], 50))", "args": []}
        )

    def _devtools(self, command, parameters):
        return self._call("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def complaints(self):
        """What the console had to say since it was last asked: errors, refused scripts and styles."""
        return [each["message"] for each in self._call("/se/log", {"type": "browser"}) if each["level"] == "SEVERE"]

    def close(self):
        self._call("", method="DELETE")


@contextlib.contextmanager
def browser():
    """A browser of its own, with a new profile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(
            [CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            line = next(line for line in driver.stdout if "successfully on port" in line)
            window = Browser(f"http://127.0.0.1:{line.strip().rstrip('.').rpartition(' ')[2]}", profile)
            try:
                yield window
            finally:
                window.close()
        finally:
            driver.terminate()
            driver.wait(20)
            driver.stdout.close()
