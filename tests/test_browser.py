"""The report in a real browser: hover, toggles, themes, the table, widths, print; no console error, no network."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time

import pytest
import report_runs
import test_training_report as trainings

from anisoscope.views.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
    "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe", "--disable-extensions",
)  # fmt: skip


class Browser:
    """Chromium over the DevTools protocol, through pipes: JSON, then a zero byte. No port, no websocket."""

    def __init__(self, profile):
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()

        def take_pipes():  # the browser reads from descriptor 3 and writes to 4
            spare = [os.dup(read_there), os.dup(write_there)]
            high = [os.dup2(spare[0], 103), os.dup2(spare[1], 104)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self.process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=take_pipes,  # noqa: PLW1509  no thread runs here
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self.reader, self.writer = read_here, write_here
        self.waiting, self.number, self.events = b"", 0, []
        target = self.call("Target.createTarget", url="about:blank", session=None)["targetId"]
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, timeout=30, **params):
        session = params.pop("session", getattr(self, "session", None))
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while True:
            answer = self._next(end)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self, end):
        while b"\0" not in self.waiting:
            left = end - time.monotonic()
            assert left > 0 and select.select([self.reader], [], [], left)[0], "the browser does not answer"
            self.waiting += os.read(self.reader, 1 << 20)
        message, self.waiting = self.waiting.split(b"\0", 1)
        return json.loads(message)

    def run(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression, seconds=20):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.run(expression)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {expression}")

    def size(self, width, height=900, mobile=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def open(self, path):
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        state = self.until("document.documentElement?.dataset.ready", 60)
        assert state == "yes", self.complaints()

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def shot(self, path, whole=True):
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, timeout=60)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self):
        """Console errors, exceptions and requests to anywhere but the page itself and data in it."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown" or (
                method == "Log.entryAdded" and params["entry"]["level"] == "error"
            ):
                found.append(params)
            if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(params)
            if method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "blob:")):
                    found.append(url)
        return found

    def close(self):
        with contextlib.suppress(Exception):
            self.call("Browser.close", timeout=5, session=None)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    measures = ("spectral_ratio", "two_nn", "turning_angle", "curvature")
    with report_runs.profile_run(folder / "profile", 6, measures=measures) as run:
        found["profile"] = write_report(run, folder / "profile.html")
    with report_runs.sweep_run(folder / "sweep", 4, (0, 10, 1000), measures=measures[:2]) as run:
        found["sweep"] = write_report(run, folder / "sweep.html", title="a" * 80 + " <b>long & bold</b>")
    with report_runs.hostile_run(folder / "hostile") as run:
        found["hostile"] = write_report(run, folder / "hostile.html", title=report_runs.HOSTILE)
    with trainings.seeds_run(folder / "training", (0, 1), (0, 10, 100), layers=1) as run:
        found["training"] = write_report(run, folder / "training.html")
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    one = Browser(tmp_path_factory.mktemp("browser"))
    yield one
    one.close()


PLOT = "document.querySelector('.plot')"


def test_hovering_a_point_tells_its_numbers(browser, pages):
    browser.size(1400)
    browser.open(pages["profile"])
    browser.run(f"{PLOT}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    where = (
        f"(() => {{ const box = {PLOT}.querySelectorAll('.scatterlayer .trace .points path')[3]"
        ".getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    end, said = time.monotonic() + 20, None
    while not said and time.monotonic() < end:  # a busy machine may still be laying out the page when the mouse comes
        point = browser.run(where)
        browser.move(point[0] - 3, point[1])
        browser.move(*point)
        time.sleep(0.1)
        said = browser.run("document.querySelector('.tip:not([hidden])')?.innerText")
    assert said, "no tip came"
    assert "resid.3 · all" in said
    assert "±" in said and "95 % interval" in said and "over batches" in said and "n = 8,192" in said
    assert browser.complaints() == []


def test_a_slice_is_toggled_in_every_panel(browser, pages):
    browser.size(1400)
    browser.open(pages["profile"])
    count = (
        "[...document.querySelectorAll('#layer-profiles .plot')]"
        ".map((plot) => plot.querySelectorAll('.scatterlayer .trace .lines path, .scatterlayer .trace .points').length)"
    )
    before = browser.run(count)
    chip = "document.querySelector('#layer-profiles .chip[data-value=\"no position 0\"]')"
    assert browser.run(f"{chip}.getAttribute('aria-pressed')") == "false"
    browser.run(f"{chip}.click()")
    assert browser.run(f"{chip}.getAttribute('aria-pressed')") == "true"
    after = browser.run(count)
    assert len(before) == 4 and all(later > earlier for later, earlier in zip(after, before))
    browser.run(f"{chip}.click()")
    assert browser.run(count) == before
    assert browser.complaints() == []


def test_heat_maps_follow_the_slice(browser, pages):
    browser.size(1400)
    browser.open(pages["sweep"])
    seen = "[...document.querySelectorAll('#layer-by-step .panel:not([hidden]) .heatmaplayer image')].length"
    assert browser.run(seen) == 2
    browser.run("document.querySelector('#layer-by-step .chip[data-value=\"no position 0\"]').click()")
    browser.until(f"{seen} === 4")
    assert browser.complaints() == []


def test_single_seeds_come_and_go_with_their_switch(browser, pages):
    browser.size(1400)
    browser.open(pages["training"])
    browser.run("document.querySelector('#loss .plot').scrollIntoView({block: 'center', behavior: 'instant'})")
    seen = "document.querySelectorAll('#loss .scatterlayer .trace .points').length"
    browser.until(f"{seen} > 0")
    means = browser.run(seen)
    each = "document.querySelector('#loss .chip[data-value=\"each seed\"]')"
    assert browser.run(f"{each}.getAttribute('aria-pressed')") == "false"
    browser.run(f"{each}.click()")
    browser.until(f"{seen} === {means + 4}")  # two kinds of loss for each of two seeds
    browser.run(f"{each}.click()")
    browser.until(f"{seen} === {means}")
    # One click on a switch of proxies or sites must not empty a panel that was drawn.
    plots = "[...document.querySelectorAll('#what-could-be-a-construction .plot')]"
    lines = f"{plots}.map((plot) => plot.querySelectorAll('.trace').length)"
    drawn = browser.run(lines)
    browser.run("document.querySelector('#what-could-be-a-construction .chip[data-value=\"mlp_in\"]').click()")
    assert all(later >= before for later, before in zip(browser.run(lines), drawn))
    assert browser.complaints() == []


def test_dark_and_light(browser, pages):
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = f"{PLOT}._fullLayout.font.color"
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.open(pages["profile"])
    light_ground, light_ink = browser.run(ground), browser.run(ink)
    browser.run("document.querySelector('#theme').click()")
    dark_ground, dark_ink = browser.run(ground), browser.run(ink)
    assert light_ground == "rgb(255, 255, 255)" != dark_ground
    assert light_ink != dark_ink
    browser.run("document.querySelector('#theme').click()")
    assert browser.run(ground) == light_ground
    browser.call("Emulation.setEmulatedMedia", features=[dark])
    browser.open(pages["profile"])
    assert browser.run(ground) == dark_ground  # as the system prefers, without a click
    browser.call("Emulation.setEmulatedMedia", features=[])
    assert browser.complaints() == []


def test_the_table_filters_sorts_and_turns_pages(browser, pages):
    browser.open(pages["profile"])
    rows = (
        "[...document.querySelectorAll('#table tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert len(browser.run(rows)) == 50
    first = browser.run(rows)[0]
    browser.run("document.querySelector('#next').click()")
    assert browser.run(rows)[0] != first
    browser.run(
        "(() => { const box = document.querySelector('#filter'); box.value = 'TWO_NN resid.3';"
        "box.dispatchEvent(new Event('input')); })()"
    )
    browser.until("document.querySelector('#found').textContent.startsWith('3 of ')")
    assert {tuple(row[:2]) for row in browser.run(rows)} == {("two_nn", "resid.3")}
    value = "[...document.querySelectorAll('#table .sort')].find((one) => one.textContent === 'value')"
    for order in (False, True):
        browser.run(f"{value}.click()")
        values = [float(row[3]) for row in browser.run(rows)]
        assert values == sorted(values, reverse=order)
    assert browser.complaints() == []


@pytest.mark.parametrize("width", [360, 800, 1400])
def test_nothing_is_wider_than_the_screen(browser, pages, width):
    for page in pages.values():
        browser.size(width, mobile=width < 500)
        browser.open(page)
        browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert browser.run("document.documentElement.scrollWidth") <= width
        outside = (
            "[...document.querySelectorAll('main *')].filter((one) => !one.closest('.scroll, pre, svg, [hidden]')"
            " && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.className || one.tagName)"
        )
        assert browser.run(outside) == []
        assert browser.complaints() == []
    browser.size(1400)


def test_hostile_names_do_nothing(browser, pages):
    browser.open(pages["hostile"])
    browser.run("document.querySelectorAll('.chip').forEach((one) => one.click())")
    # The only pictures are those that plotly makes of heat maps.
    assert browser.run("[...document.querySelectorAll('img, image')].every((one) => !one.src)") is True
    assert browser.run("document.querySelectorAll('[onerror]').length") == 0
    assert "onerror=alert(1)" in browser.run("document.querySelector('h1').textContent")
    assert not any(event.get("method") == "Page.javascriptDialogOpening" for event in browser.events)
    assert browser.complaints() == []


def test_it_prints(browser, pages):
    browser.open(pages["profile"])
    pdf = base64.b64decode(browser.call("Page.printToPDF", timeout=60)["data"])
    assert pdf.startswith(b"%PDF") and len(pdf) > 50_000
    assert browser.complaints() == []
