"""The report in a real headless Chromium, where there is one: no console message, no request, every section drawn.

Chromium is driven through its debugging pipe (JSON between zero bytes), which needs no library. Screenshots of the
whole page are judged by their colours, and kept where the page lies, in pytest's temporary folder (--basetemp=DIR).
"""

import base64
import json
import os
import shutil
import subprocess

import pytest

from specdial.simulator.report.theme import DARK, LIGHT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --hide-scrollbars --remote-debugging-pipe"
)


class Browser:
    """One tab. events: what the browser said unasked."""

    def __init__(self, profile):
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        def place():  # Chromium reads commands from 3 and answers on 4
            copies = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, preexec_fn=place, close_fds=False, **quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self.reader, self.writer = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self.events, self.number, self.session, self.rest = [], 0, None, b""
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        self.writer.write(json.dumps(message).encode() + b"\0")
        self.writer.flush()
        while (answer := self.read()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def read(self):
        while b"\0" not in self.rest:
            part = os.read(self.reader.fileno(), 1 << 20)
            assert part, "Chromium has gone"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def size(self, width, height, scale=1):
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False)

    def media(self, scheme="light", kind="screen"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self("Emulation.setEmulatedMedia", media=kind, features=features)

    def open(self, path):
        self.events.clear()
        self("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.read())
        drawn = "new Promise(ok => { const see = () => document.documentElement.dataset.drawn ? ok(true) : "
        self.value(drawn + "setTimeout(see, 20); see(); })")

    def value(self, expression):
        found = self("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def said(self, *methods):
        return [event for event in self.events if event.get("method") in methods]

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        self.reader.close()
        self.writer.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium, or put one on PATH")
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def path(page, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page, encoding="utf-8")
    return file


DRAWN = """
[...document.querySelectorAll("section")].map(section => ({
  name: section.id,
  height: section.getBoundingClientRect().height,
  charts: [...section.querySelectorAll(".chart")].map(chart => {
    const inner = chart.querySelector("svg.main-svg").getBoundingClientRect(), outer = chart.getBoundingClientRect();
    return {marks: chart.querySelectorAll(".cartesianlayer .trace path, .cartesianlayer image").length,
            fits: inner.width <= outer.width + 1 && outer.right <= innerWidth, width: inner.width};
  })
}))
"""
TICK = 'getComputedStyle(document.querySelector(".xtick text")).fill'
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


# Per chart, the share of its pixels in a screenshot that are within 24 of each colour in all three channels.
SHARES = """
async (png, colors) => {
  const image = new Image();
  image.src = "data:image/png;base64," + png;
  await image.decode();
  const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
  context.drawImage(image, 0, 0);
  const wanted = colors.map((color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)));
  return [...document.querySelectorAll(".chart")].map((chart) => {
    const at = chart.getBoundingClientRect(), found = wanted.map(() => 0);
    const {data} = context.getImageData(at.x + scrollX, at.y + scrollY, at.width, at.height);
    for (let i = 0; i < data.length; i += 4)
      for (let j = 0; j < wanted.length; j++) {
        const [r, g, b] = wanted[j];
        found[j] += Math.max(Math.abs(data[i] - r), Math.abs(data[i + 1] - g), Math.abs(data[i + 2] - b)) < 24;
      }
    return [chart.id, ...found.map((count) => (4 * count) / data.length)];
  });
}
"""


def look(browser, path, width, scheme):
    """Take a screenshot of the whole page; in every chart: paper, words in grey, data in the accent or its shades."""
    clip = {
        "x": 0,
        "y": 0,
        "width": width,
        "height": browser.value("document.documentElement.scrollHeight"),
        "scale": 1,
    }
    png = browser("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
    (path.parent / f"{scheme}-{width}.png").write_bytes(base64.b64decode(png))
    theme = {"light": LIGHT, "dark": DARK}[scheme]
    colors = [theme[name] for name in ("paper", "cell", "muted", "accent", "accent-soft", "hatch")]
    found = browser.value(f"({SHARES})({json.dumps(png)}, {colors})")
    assert len(found) == 11
    for name, paper, cell, words, *data in found:
        assert paper + cell > 0.3, name
        assert words > 0.0005, name
        assert max(data) > 0.0005, name


def test_a_chart_is_saved_as_an_image_that_stands_alone(browser, path):
    browser.media("dark")
    browser.size(1280, 900)
    browser.open(path)
    folder = path.parent / "saved"
    browser("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    for kind in ("svg", "png"):
        browser.value(f"""document.querySelector('[data-chart="chart-front"][data-format="{kind}"]').click()""")
        waiting = "new Promise(ok => setTimeout(ok, 50))"
        assert any((folder / f"chart-front.{kind}").exists() or browser.value(waiting) for _ in range(100))
    svg = (folder / "chart-front.svg").read_text()
    assert "Speedup against KV read per token" in svg  # the title, and a legend that tells kinds apart
    assert "lossless, front" in svg
    assert (folder / "chart-front.png").read_bytes().startswith(b"\x89PNG")
    assert browser.said("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded") == []


def test_a_point_of_the_front_tells_its_settings(browser, path):
    browser.media()
    browser.size(1280, 900)
    browser.open(path)
    found = browser.value("""(() => {
        const point = document.querySelector("#chart-front .scatterlayer .trace:last-child path.point");
        point.scrollIntoView({block: "center"});
        const at = point.getBoundingClientRect();
        return [at.x + at.width / 2, at.y + at.height / 2];
    })()""")
    for away in (40, 0):
        browser("Input.dispatchMouseEvent", type="mouseMoved", x=found[0] - away, y=found[1])
    text = """[...document.querySelectorAll("#chart-front .hoverlayer text")].map(e => e.textContent).join()"""
    waiting = "new Promise(ok => setTimeout(ok, 50))"
    assert any("lossless, exactcontroller" in browser.value(text) or browser.value(waiting) for _ in range(100))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_section_is_drawn_and_legible(browser, path, width, scheme):
    browser.media(scheme)
    browser.size(width, 900)
    browser.open(path)
    sections = browser.value(DRAWN)
    assert len(sections) == 9
    assert sum(len(section["charts"]) for section in sections) == 11
    for section in sections:
        assert section["height"] > 60
        for chart in section["charts"]:
            assert chart["fits"], section
            assert chart["marks"] > 0, section
            assert chart["width"] > 250
    assert browser.value("document.documentElement.scrollWidth") == width  # nothing sticks out
    assert browser.said("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded") == []
    requests = [event["params"]["request"]["url"] for event in browser.said("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
    look(browser, path, width, scheme)


def test_light_dark_and_paper(browser, path):
    browser.size(1280, 900)
    browser.media("dark")
    browser.open(path)
    dark = browser.value(TICK), browser.value(BACKGROUND)
    browser.media("dark", "print")
    browser.value("dispatchEvent(new Event('beforeprint')) && new Promise(ok => setTimeout(ok, 300))")
    paper = browser.value(TICK), browser.value(BACKGROUND)
    widths = browser.value("[...document.querySelectorAll('svg.main-svg')].map(e => e.getBoundingClientRect().width)")
    assert max(widths) <= 688
    browser.value("dispatchEvent(new Event('afterprint'))")
    browser.media("light")
    browser.value("new Promise(ok => setTimeout(ok, 300))")
    light = browser.value(TICK), browser.value(BACKGROUND)
    assert paper == light
    assert light[1] == "rgb(255, 255, 255)"
    assert dark[0] != light[0]
    assert dark[1] == "rgb(20, 23, 26)"
