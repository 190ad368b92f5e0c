"""The HTML pages in headless Chromium: they draw themselves, answer clicks and zooms, and can be read.

The tests are skipped without Chromium, its driver or selenium (scripts/get_browser.sh installs the first two).
Screenshots go to the folder that MEGATRON_PP_SCREENSHOTS names, otherwise to the test's own folder.
"""

from __future__ import annotations

import os
import shutil
from itertools import combinations
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from examples.gpt.curves import Chart, Curve, render_charts
from megatron_pp.tools.draw.facts import legend_entries
from megatron_pp.tools.draw.html import render_html
from megatron_pp.tools.draw.palette import OPERATIONS, block_colour
from megatron_pp.tools.trace_report import write_timeline
from tests.unit_tests.tools.draw.timelines import NETWORK, compared, num_blocks, timeline_of
from tests.unit_tests.tools.test_trace_report import simulated, write_traces

pytest.importorskip("selenium", reason="selenium is not installed (extra: test)")
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="no Chromium with chromedriver on PATH (scripts/get_browser.sh)"
    ),
]

LABELS = "return charts.map((chart) => chart.labels)"
VIEW = "return [view.from, view.to, view.end, view.picked]"
KEYS = """return [...document.querySelectorAll(".key")].map((key) =>
    [key.textContent.trim(), [...key.querySelectorAll("i")].map((i) => getComputedStyle(i).backgroundColor)])"""
BOXES = """return [...document.querySelectorAll("h1, h2, p, button, .key, canvas, table")].map((one) => {
    const box = one.getBoundingClientRect();
    return [one.textContent.trim().slice(0, 30) || one.id, box.left, box.top, box.right, box.bottom];
  }).filter((box) => box[3] > box[1] && box[4] > box[2])"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def screenshots(tmp_path):
    folder = Path(os.environ.get("MEGATRON_PP_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def opened(browser, tmp_path, timelines, width=1400, tables=(), scheme="light", charts=""):
    """The browser with a page of the timelines, once all blocks are drawn."""
    page = tmp_path / "page.html"
    page.write_text(render_html(timelines, "Compared", tables, charts), encoding="utf-8")
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    size = {"width": width, "height": 1200, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return shown(browser, page, num_blocks(*timelines))


def shown(browser, page, blocks):
    """The browser with ``page`` in it, once all its blocks are drawn."""
    browser.get(page.as_uri())
    state = "return document.body.dataset.ready || document.getElementById('problem').textContent"
    WebDriverWait(browser, 60).until(lambda b: b.execute_script(state) == str(blocks))
    return browser


def settled(browser):
    """Waits for the next frame, in which a change is drawn."""
    browser.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done));")


def press(browser, chart, x, y, kinds=("mouseMoved", "mousePressed", "mouseReleased")):
    """Clicks into a chart, or moves the pointer there, ``x`` and ``y`` pixels from the chart's top left corner."""
    left, top = browser.execute_script(
        "const box = charts[arguments[0]].canvas.getBoundingClientRect(); return [box.left, box.top]", chart
    )
    for kind in kinds:
        event = {"type": kind, "x": left + x, "y": top + y, "button": "left", "clickCount": 1}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)
    settled(browser)


def overlapping(boxes):
    """Pairs of boxes (name, left, top, right, bottom) that cover each other by more than a pixel."""
    return [
        (one[0], other[0])
        for one, other in combinations(boxes, 2)
        if min(one[3], other[3]) - max(one[1], other[1]) > 1 and min(one[4], other[4]) - max(one[2], other[2]) > 1
    ]


def label_boxes(labels):
    return [(at["name"], at["left"], at["y"], at["right"], at["y"] + 22) for at in labels]


@pytest.mark.parametrize("width", [1400, 500])
def test_a_page_of_three_schedules_can_be_read(browser, screenshots, tmp_path, width):
    """At P=8, M=16: every block has a label in a wide window. In a wide and in a narrow window nothing overlaps."""
    timelines = compared("1f1b", "zb_h1", "zb_v")
    opened(browser, tmp_path, timelines, width)
    browser.save_screenshot(str(screenshots / f"three_schedules_{width}.png"))
    for labels, timeline in zip(browser.execute_script(LABELS), timelines, strict=True):
        if width == 1400:
            assert len(labels) == num_blocks(timeline)
            assert {label["name"] for label in labels} >= {f"{op}15" for op in timeline.ops}
        assert not overlapping(label_boxes(labels))
        assert all(at["left"] > 52 and at["right"] <= width and at["size"] >= 6 for at in labels)
    boxes = browser.execute_script(BOXES)
    assert len(boxes) > 12
    assert not overlapping(boxes)
    assert all(box[3] <= width for box in boxes)
    assert not browser.get_log("browser")


def test_the_legend_has_every_colour_of_the_picture(browser, tmp_path):
    timelines = compared("1f1b", "zb_v", p=4, m=8, network=NETWORK)
    keys = dict(opened(browser, tmp_path, timelines).execute_script(KEYS))
    assert [*keys] == [key.label for key in legend_entries(timelines)]
    shown = {colour for colours in keys.values() for colour in colours}
    for timeline in timelines:
        for op in timeline.ops:
            for chunk in range(timeline.num_chunks):
                assert "rgb({}, {}, {})".format(*block_colour(op, chunk, timeline.num_chunks)) in shown
    assert {"waiting", "activation in transfer", "gradient in transfer"} <= set(keys)
    painted = {c for name, c in browser.execute_script("return Object.entries(colours)")}
    assert len(painted) == 12


def test_a_click_follows_a_microbatch_and_says_what_it_is(browser, screenshots, tmp_path):
    opened(browser, tmp_path, compared("1f1b", "zb_v", p=4, m=8))
    label = next(at for at in browser.execute_script(LABELS)[1] if at["name"] == "F1.3")
    press(browser, 1, (label["left"] + label["right"]) / 2, label["y"] + 11)
    assert browser.execute_script(VIEW)[3] == 3
    tip = browser.execute_script("return document.getElementById('tip').innerText")
    assert tip.startswith("F1.3")
    assert "forward of chunk 1, microbatch 3" in tip
    browser.save_screenshot(str(screenshots / "followed.png"))
    press(browser, 1, (label["left"] + label["right"]) / 2, label["y"] + 11)
    assert browser.execute_script(VIEW)[3] == -1
    assert not browser.get_log("browser")


def test_the_pointer_on_a_curve_says_whose_memory_it_is(browser, tmp_path):
    """1F1B at P=4: at slot 5, rank 0 keeps 4 microbatches and rank 1 keeps 3."""
    opened(browser, tmp_path, compared("1f1b", p=4, m=8))
    where = "const c = charts[0]; return [x(c, 5), lanesEnd(c) + CURVES - memoryHeight(arguments[0])]"
    for value, text in ((4, "rank 0: 4 microbatches kept, peak 4"), (3, "rank 1: 3 microbatches kept, peak 3")):
        press(browser, 0, *browser.execute_script(where, value), kinds=["mouseMoved"])
        assert browser.execute_script("return document.getElementById('tip').innerText") == text
    assert not browser.get_log("browser")


def test_zooming_shows_a_part_of_all_charts_and_fit_the_whole(browser, screenshots, tmp_path):
    opened(browser, tmp_path, compared("1f1b", "zb_v", p=4, m=8))
    whole = browser.execute_script(LABELS)
    for _ in range(2):
        browser.find_element("id", "in").click()
    settled(browser)
    start, stop, end, _ = browser.execute_script(VIEW)
    assert (stop - start) / end == pytest.approx(0.25)
    near = browser.execute_script(LABELS)
    for labels, before in zip(near, whole, strict=True):
        assert 0 < len(labels) < len(before)
        assert not overlapping(label_boxes(labels))
    browser.save_screenshot(str(screenshots / "zoomed.png"))
    browser.find_element("id", "fit").click()
    settled(browser)
    assert browser.execute_script(LABELS) == whole
    assert not browser.get_log("browser")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_are_on_the_canvas(browser, screenshots, tmp_path, scheme):
    picture = screenshots / f"colours_{scheme}.png"
    timelines = [timeline_of(schedule) for schedule in ("dualpipe_v", "vocab_1f1b")]  # they have every operation
    opened(browser, tmp_path, timelines, 1200, scheme=scheme).save_screenshot(str(picture))
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert (pixels[0, 0].mean() < 0.2) == (scheme == "dark")
    for colour in OPERATIONS.values():
        assert (np.abs(pixels - np.array(colour) / 255).max(axis=-1) < 0.02).sum() > 300


def test_the_page_names_a_substitute_order(browser, tmp_path):
    opened(browser, tmp_path, compared("dualpipe_v", p=4, m=7))
    assert "ZB-V's order" in browser.find_element("class name", "note").text


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("timelines", [compared("zb_v", p=4, m=8), []], ids=["steps", "no step"])
def test_charts_and_tables_fit_a_phone(browser, screenshots, tmp_path, width, timelines):
    """The page is no wider than the window. A wide table scrolls by itself."""
    curves = [Curve("training", [(1, 5.5), (400, 1.7)]), Curve("validation", [(0, 5.6), (400, 1.8)])]
    charts = [Chart(title, curves, "{:.3f}") for title in ("loss", "speed", "bubble", "memory")]
    tables = [("Ranks", [f"column {k}" for k in range(12)], [["123.45"] * 12]), ("In words", [], [["so " * 90]])]
    opened(browser, tmp_path, timelines, width, tables, "dark", charts=render_charts(charts))
    browser.save_screenshot(str(screenshots / f"charts_{width}.png"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    boxes = browser.execute_script(BOXES.replace("table", "figcaption b, .plot, .steps, .wide"))
    assert len(boxes) > 6
    assert not overlapping(boxes)
    assert all(0 <= box[1] <= box[3] <= width for box in boxes)
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('figure span')].map((one) => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert min(sizes) >= 11
    assert not browser.get_log("browser")


def test_the_page_of_a_run_opens_with_its_steps_and_tables(browser, screenshots, tmp_path):
    """The run's ``timeline.html``, made of traces that were written from simulated steps."""
    step = simulated("zb_v", 4, 2, 8)
    write_traces(tmp_path, [step, step])
    write_timeline(tmp_path, tmp_path / "timeline.html", tmp_path / "timeline.json")
    shown(browser, tmp_path / "timeline.html", 3 * 4 * 2 * 8 * 3)
    browser.save_screenshot(str(screenshots / "timeline.png"))
    assert browser.find_element("tag name", "h1").text == "zb_v P=4 V=2 M=8, run abc"
    assert [len(labels) > 0 for labels in browser.execute_script(LABELS)] == [True] * 3
    assert len(browser.find_elements("tag name", "table")) == 4
    assert not overlapping(browser.execute_script(BOXES))
    assert not browser.get_log("browser")
