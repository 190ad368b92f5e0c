"""Drawings: everything that a plan does is in them, labels fit, colours are distinct, pages open."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from array import array
from html import unescape
from itertools import combinations

import matplotlib.image
import numpy as np
import pytest

from megatron_pp.draw.chrome import render_chrome_trace
from megatron_pp.draw.columns import thinned
from megatron_pp.draw.grid import grid_cells, grid_facts, render_grid
from megatron_pp.draw.html import render_html
from megatron_pp.draw.merged import pieces
from megatron_pp.draw.palette import ACTIVATION, GRADIENT, OPERATIONS, WAIT, block_colour, ink_on
from megatron_pp.draw.png import render_png
from megatron_pp.draw.svg import render_svg
from megatron_pp.draw.text import legend, plain, render_text
from megatron_pp.draw.ticks import size_label, tick_label, tick_step
from megatron_pp.draw.timeline import _steps, simulated_timeline
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs import Link, Network, StageCosts
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.sim.memory import ModelShape, peak_bytes
from megatron_pp.plan.sim.naive import naive_plan
from megatron_pp.plan.sim.simulate import simulate
from megatron_pp.plan.spec import PlanSpec

SHAPE = ModelShape(num_layers=24, hidden_size=512, seq_length=256, vocab_size=1000)
NETWORK = Network(1.0, link=Link(bandwidth=4.0))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HEADLESS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]


def plan_of(schedule, p=4, m=8, v=None):
    return build_plan(PlanSpec(schedule, p, v or SCHEDULES[schedule].chunks or 2, m))


def timeline_of(schedule, p=4, m=8, v=None, network=NETWORK, shape=SHAPE):
    plan = plan_of(schedule, p, m, v)
    return simulated_timeline(simulate(plan, StageCosts.uniform(plan.placement.num_stages), network), "ms", shape)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_draws_in_every_style(schedule):
    timeline = timeline_of(schedule)
    assert plain(render_text(timeline)).count("rank 3") >= 1
    assert plain(render_grid(plan_of(schedule)))
    assert len(ElementTree.fromstring(render_svg(timeline)).findall(".//{*}rect")) > timeline.num_blocks
    assert matplotlib.image.imread(io.BytesIO(render_png(timeline))).shape[1] == 1600
    assert len(json.loads(render_chrome_trace(timeline))["traceEvents"]) > timeline.num_blocks
    assert "<canvas" in render_html([timeline], "title")


# --- terminal


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("m", [1, 8, 64, 700])
def test_text_keeps_to_the_width(width, m):
    for line in render_text(timeline_of("1f1b", 3, m, shape=None), width):
        assert len(line.plain) <= width


@pytest.mark.parametrize(("schedule", "m"), [("1f1b", 12), ("gpipe", 8), ("zb_h1", 8), ("interleaved_1f1b", 8)])
def test_text_names_every_operation_once(schedule, m):
    plan = plan_of(schedule, 4, m)
    timeline = simulated_timeline(simulate(plan, StageCosts.uniform(plan.placement.num_stages)))
    lines = plain(render_text(timeline)).splitlines()
    for rank, program in enumerate(plan.orders):
        row = "".join(line.removeprefix(f"rank {rank}").strip() for line in lines if line.startswith(f"rank {rank}"))
        expected = [str(at) if timeline.num_chunks > 1 else f"{at.op}{at.mb}" for at in program]
        assert re.findall(r"[FBIW]\d+(?:\.\d+)?", row) == expected


def test_text_of_1f1b_is_the_textbook_figure():
    plan = plan_of("1f1b", 4, 4)
    timeline = simulated_timeline(simulate(plan, StageCosts.uniform(4)))
    assert plain(render_text(timeline, 60)) == (
        "slots  |0                  |10\n"
        "rank 0 F0F1F2F3............B0==..B1==..B2==..B3==\n"
        "rank 1 ..F0F1F2........B0==F3B1==..B2==..B3==....\n"
        "rank 2 ....F0F1....B0==F2B1==F3B2==..B3==........\n"
        "rank 3 ......F0B0==F1B1==F2B2==F3B3==............"
    )


def test_text_shows_transfers_between_their_ranks():
    """F, 1 on the way, F, B (2), 1 on the way, B (2): 8 slots of 2 columns."""
    timeline = simulated_timeline(
        simulate(plan_of("gpipe", 2, 1), StageCosts.uniform(2), Network(1.0, link=Link(bandwidth=1.0)))
    )
    lines = plain(render_text(timeline, 30)).splitlines()
    assert lines[1:] == ["rank 0 F0..........B0==", "         vv      ^^", "rank 1 ....F0B0==......"]
    assert "transfers" in legend(timeline).plain


# --- grid


def test_grid_of_1f1b_has_every_forward_and_backward_in_its_place():
    assert plain(render_grid(plan_of("1f1b", 4, 4), 80)) == (
        "time step   1  2  3  4  5  6  7  8  9 10 11 12 13 14\n"
        "stage 0    F0 F1 F2 F3  .  .  . B0  . B1  . B2  . B3\n"
        "stage 1     . F0 F1 F2  .  . B0 F3 B1  . B2  . B3  .\n"
        "stage 2     .  . F0 F1  . B0 F2 B1 F3 B2  . B3  .  .\n"
        "stage 3     .  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .  ."
    )


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 9)])
def test_grid_loses_nothing(schedule, p, m):
    plan = plan_of(schedule, p, m)
    for row, order in zip(grid_cells(plan), plan.orders, strict=True):
        assert [at for at in row if at is not None] == list(order)


def test_grid_facts_of_the_lecture():
    """P=4, M=4, every operation one step: idle steps and microbatches in flight as every lecture gives them."""
    naive = grid_facts(naive_plan(PlanSpec("naive", 4, 1, 4)))
    gpipe, one = (grid_facts(plan_of(name, 4, 4)) for name in ("gpipe", "1f1b"))
    assert (naive.steps, gpipe.steps, one.steps) == (2 * 4 * 4, 2 * (4 + 3), 2 * (4 + 3))
    assert naive.bubble_share == 0.75
    assert gpipe.idle_steps == one.idle_steps == (6, 6, 6, 6)
    assert (naive.in_flight, gpipe.in_flight, one.in_flight) == ((1,) * 4, (4,) * 4, (4, 3, 2, 1))
    assert naive.sent == gpipe.sent == one.sent == (4, 8, 8, 4)


# --- pictures


def test_svg_titles_say_what_every_block_is():
    timeline = timeline_of("interleaved_1f1b")
    root = ElementTree.fromstring(render_svg(timeline, 4000))
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    blocks = [e for lane in timeline.lanes for e in lane.compute]
    assert sorted(t.split(":")[0] for t in titles) == sorted(str(e.instruction) for e in blocks)


@pytest.mark.parametrize(("width", "named"), [(1400, False), (6000, True)])
def test_labels_of_a_picture_name_the_chunk_all_or_none(width, named):
    root = ElementTree.fromstring(render_svg(timeline_of("interleaved_1f1b"), width))
    labels = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text") if t.get("class") == "label"]
    assert len(labels) == 4 * 2 * 8 * 2
    assert {"." in label for label in labels} == {named}


def test_svg_of_many_blocks_stays_small():
    assert len(render_svg(timeline_of("1f1b", 4, 2000))) < 1_500_000


def test_svg_escapes_titles():
    timeline = timeline_of("1f1b")
    timeline.title = 'a < b & "c"'
    assert 'a < b & "c"' in "".join(ElementTree.fromstring(render_svg(timeline)).itertext())


def test_png_shows_the_colours_on_light_and_dark_paper():
    for dark, paper in ((False, 1.0), (True, 0.0)):
        pixels = matplotlib.image.imread(io.BytesIO(render_png(timeline_of("dualpipe_v"), 1200, dark)))[..., :3]
        assert (pixels[0, 0] == paper).all()
        for colour in OPERATIONS.values():
            assert (np.abs(pixels - np.array(colour) / 255).max(axis=-1) < 0.02).sum() > 500


def test_chrome_trace_has_every_operation_at_its_time():
    timeline = timeline_of("zb_v")
    events = json.loads(render_chrome_trace(timeline))["traceEvents"]
    computed = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    expected = [
        (rank, str(e.instruction), e.start * 1e3, (e.end - e.start) * 1e3)
        for rank, lane in enumerate(timeline.lanes)
        for e in lane.compute
    ]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in computed] == expected
    starts, finishes = ([e["id"] for e in events if e["ph"] == ph] for ph in "sf")
    assert starts == finishes
    assert len(starts) == len(list(timeline.transfers))
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == max(peak_bytes(plan_of("zb_v"), SHAPE))


# --- HTML


def page_data(page):
    head = json.loads(re.search(r'id="head">(.*?)</script>', page, re.DOTALL).group(1))
    packed = re.search(r'id="columns">(.*?)</script>', page, re.DOTALL).group(1)
    return head, gzip.decompress(base64.b64decode(packed))


def column(data, at, typecode="I"):
    values = array(typecode)
    values.frombytes(data[at[0] : at[0] + 4 * at[1]])
    return values.tolist()


def test_html_holds_every_block_wait_transfer_and_peak():
    timeline = timeline_of("interleaved_1f1b")
    head, data = page_data(render_html([timeline], "title"))
    (shown,) = head["timelines"]
    for rank, lane in enumerate(timeline.lanes):
        columns = shown["lanes"][rank]
        codes = column(data, columns["compute"]["codes"])
        decoded = [("FBIW"[c >> 30], c >> 20 & 1023, c & 0xFFFFF) for c in codes]
        assert decoded == [(at.op, at.chunk, at.mb) for at in (e.instruction for e in lane.compute)]
        starts = column(data, columns["compute"]["starts"])
        assert starts == pytest.approx([e.start / shown["tick"] for e in lane.compute], abs=1)
        assert columns["waits"]["starts"][1] == len(lane.waits)
        assert columns["memory"]["peak"] == max(v for _, v in lane.memory)
        sent = [t for t in timeline.transfers if t.source == rank]
        assert columns["activations"]["starts"][1] + columns["gradients"]["starts"][1] == len(sent)


def test_html_is_one_file_without_network():
    page = render_html([timeline_of("1f1b")], "title")
    assert not re.search(r"(?:src|href)\s*=|@import|url\(|https?://", page)
    assert "default-src 'none'" in page


def test_html_escapes_what_comes_from_outside():
    timeline = timeline_of("1f1b")
    timeline.title = "</script><b>&"
    page = render_html([timeline], "<i>", [("<u>", ["<a>"], [["<td>"]])])
    assert not re.search(r"<i>|<b>|<u>|<a>|<td><td>", page)
    assert page.count("</script>") == 3
    assert "</script><b>&" in unescape(page) or "\\u003c/script>" in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("scheme", ["0", "1"])
def test_html_draws_itself_in_a_browser(tmp_path, scheme):
    """The script runs to its end, and the colours are on the canvas, in the dark (0) and in the light (1) scheme."""
    timeline = timeline_of("zb_h1")
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(render_html([timeline], "title"), encoding="utf-8")
    browser = [CHROMIUM, *HEADLESS, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"]
    browser += [f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1200,500"]
    dom = subprocess.run([*browser, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    assert f'data-ready="{timeline.num_blocks}"' in dom.stdout
    subprocess.run([*browser, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=120, check=True)
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert (pixels[0, 0].mean() < 0.2) == (scheme == "0")
    for colour in OPERATIONS.values():
        assert (np.abs(pixels - np.array(colour) / 255).max(axis=-1) < 0.02).sum() > 500


# --- details


def test_thin_blocks_add_up_to_what_they_were():
    timeline = timeline_of("zb_h1", 2, 200, shape=None)
    scale = 100 / timeline.end
    for lane in timeline.lanes:
        drawn = 0.0
        for piece in pieces(lane.compute, scale):
            drawn += sum(s for _, s in piece.shares) if piece.event is None else piece.right - piece.left
        assert drawn == pytest.approx(lane.busy * scale)


def test_of_several_values_at_one_time_the_highest_and_the_last_are_drawn():
    assert _steps([1, 1, 1, 2, 2, 2, 3], [5, 9, 4, 4, 6, 7, 7], 0.0) == [(0, 0), (1, 9), (1, 4), (2, 7)]


def test_thinning_keeps_the_peak_and_the_end():
    steps = [(float(i), float((i * 7919) % 1000)) for i in range(10_000)]
    steps[4321] = (4321.0, 5000.0)
    kept = thinned(steps, 200)
    assert len(kept) <= 404
    assert max(kept, key=lambda s: s[1]) == (4321.0, 5000.0)
    assert kept[-1] == steps[-1]
    assert [t for t, _ in kept] == sorted(t for t, _ in kept)


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_labels_can_be_read_on_every_block(chunks):
    for op in OPERATIONS:
        for chunk in range(chunks):
            colour = block_colour(op, chunk, chunks)
            assert colour.contrast(ink_on(colour)) >= 4.5


# How the three kinds of colour blindness see linear RGB (Machado, Oliveira and Fernandes, 2009, severity 1).
BLINDNESS = {
    "none": np.eye(3),
    "protan": np.array([[0.1522, 1.0529, -0.2051], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0519]]),
    "deutan": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6728, 0.0471], [-0.0118, 0.0430, 0.9688]]),
    "tritan": np.array([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
}


def seen(colour, kind):
    """CIE L*a*b* of a colour as that eye sees it."""
    part = np.array(colour) / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    linear = np.clip(BLINDNESS[kind] @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    ratio = xyz / np.array([0.9505, 1.0, 1.089])
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("kind", sorted(BLINDNESS))
def test_colour_blind_readers_tell_the_colours_apart(kind):
    """At least 20 units of L*a*b* between any two operations, and between any two thin bars."""
    for group in (OPERATIONS.values(), (ACTIVATION, GRADIENT, WAIT)):
        for one, other in combinations(group, 2):
            assert np.linalg.norm(seen(one, kind) - seen(other, kind)) > 20


def test_round_numbers():
    assert [tick_step(s, 10) for s in (1, 7, 43, 1000, 0.02)] == [0.1, 1, 5, 100, 0.002]
    assert [tick_label(v, s) for v, s in ((0.30000000000000004, 0.1), (20, 5), (1.0, 0.25))] == ["0.3", "20", "1.0"]
    assert [size_label(v) for v in (12, 2048, 3.5 * 2**20, 80 * 2**30)] == ["12 B", "2 KiB", "3.5 MiB", "80 GiB"]
