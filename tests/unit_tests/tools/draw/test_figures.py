"""SVG and PNG pictures of several schedules: blocks are in their places, labels fit their blocks, and the same drawing
gives the same bytes."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import lru_cache

import matplotlib.image
import numpy as np
import pytest

from megatron_pp import draw
from megatron_pp.errors import PlanError
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.tools.draw.facts import legend_entries, summary
from megatron_pp.tools.draw.figures import text_width
from megatron_pp.tools.draw.palette import DARK, LIGHT, OPERATIONS, block_colour, block_name
from tests.unit_tests.tools.draw.timelines import compared, num_blocks, timeline_of

BLOCK = re.compile(r"[FBIWST]\d+(\.\d+)?")
LETTER, NUMBER = re.compile("[FBIWST]"), re.compile(r"\d+(\.\d+)?")


parsed = lru_cache(maxsize=2)(ElementTree.fromstring)


def texts(svg):
    """(text, font size, x, y) of each text in a picture."""
    for at in parsed(svg).iter("{http://www.w3.org/2000/svg}text"):
        yield at.text, float(re.search(r"([\d.]+)px", at.get("style")).group(1)), float(at.get("x")), float(at.get("y"))


def labels_of(svg):
    """The labels of blocks as (name, its lines as ``texts`` gives them). A label is one line, or the letter above the
    number."""
    written, found = list(texts(svg)), []
    for one, below in zip(written, [*written[1:], ("",)], strict=True):
        if BLOCK.fullmatch(one[0]):
            found.append((one[0], [one]))
        elif LETTER.fullmatch(one[0]) and NUMBER.fullmatch(below[0]) and one[1:3] == below[1:3]:
            found.append((one[0] + below[0], [one, below]))
    return found


def boxes(svg, colour):
    """(left, top, right, bottom) of each rectangle that is filled with ``colour``."""
    found = []
    for path in parsed(svg).iter("{http://www.w3.org/2000/svg}path"):
        if f"fill: {colour.hex}" in path.get("style", ""):
            for part in path.get("d").split("z")[:-1]:
                numbers = [float(n) for n in re.findall(r"[\d.]+", part)]
                found.append((min(numbers[::2]), min(numbers[1::2]), max(numbers[::2]), max(numbers[1::2])))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_has_all_its_blocks_and_labels(schedule):
    timeline = timeline_of(schedule, 2, 6)
    svg = draw.svg([timeline])
    colours = {block_colour(op, c, timeline.num_chunks) for op in timeline.ops for c in range(timeline.num_chunks)}
    keys = sum(len(key.colours) for key in legend_entries([timeline]))
    assert sum(len(boxes(svg, colour)) for colour in colours) == num_blocks(timeline) + keys
    labels = [name for name, _ in labels_of(svg)]
    events = [e.instruction for lane in timeline.lanes for e in lane.compute]
    assert sorted(labels) in [sorted(block_name(at, chunks) for at in events) for chunks in (1, timeline.num_chunks)]


@pytest.mark.slow
def test_three_schedules_at_8_ranks_and_16_microbatches_are_labelled_inside_their_blocks():
    timelines = compared("1f1b", "zb_h1", "zb_v")
    svg = draw.svg(timelines)
    colours = {c for key in legend_entries(timelines) for c in key.colours}
    blocks = [box for colour in colours for box in boxes(svg, colour)]
    labels = labels_of(svg)
    assert len(labels) == num_blocks(*timelines) == 8 * 16 * (2 + 3 + 6)
    for _, lines in labels:
        ends = [text_width(text, size) / 2 for text, size, *_ in lines]
        left, right = (lines[0][2] - max(ends), lines[0][2] + max(ends))
        top, bottom = lines[0][3] - 0.75 * lines[0][1], lines[-1][3]
        assert lines[0][1] >= 7
        assert any(a <= left and right <= c and b <= top and bottom <= d for a, b, c, d in blocks), lines


@pytest.mark.slow
def test_schedules_share_one_time_axis():
    """On one scale, the last block of each schedule ends where its step ends."""
    timelines = compared("1f1b", "zb_h1", p=4, m=4)
    svg = draw.svg(timelines, 1000)
    ends = [max(box[2] for box in boxes(svg, OPERATIONS[op])) for op in "BW"]
    left = min(box[0] for box in boxes(svg, OPERATIONS["F"]) if box[2] - box[0] > 13)
    assert (ends[0] - left) / (ends[1] - left) == pytest.approx(21 / 15, rel=0.005)


def test_memory_curves_reach_each_ranks_peak():
    (timeline,) = compared("1f1b", p=4, m=8)
    assert [lane.peak for lane in timeline.lanes] == [4, 3, 2, 1]
    curves = re.findall(r'<path d="([^"]*)"[^>]*fill: none; stroke: #', draw.svg([timeline]))
    heights = [[float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", curve)] for curve in curves]
    rises = [max(ys) - min(ys) for ys in heights]
    assert [rise / rises[3] for rise in rises] == pytest.approx([4, 3, 2, 1], rel=0.02)


def test_heading_and_legend_say_what_is_drawn():
    timelines = [timeline_of("1f1b"), timeline_of("zb_v")]
    written = [text for text, *_ in texts(draw.svg(timelines))]
    assert {"1f1b P=4 V=1 M=8", "zb_v P=4 V=2 M=8"} <= set(written)
    assert written[0] == "a microbatch on a rank takes F 1 to 2, B 2, I 2, W 2 ms; transfers take 0.25 ms"
    assert {key.label for key in legend_entries(timelines)} <= set(written)
    for timeline in timelines:
        assert ",  ".join(summary(timeline)) in written


@pytest.mark.parametrize("width", [360, 500, 1400])
def test_no_text_leaves_the_picture(width):
    """At each width, also a phone's, headings, legends and titles continue in the next line."""
    timeline = timeline_of("interleaved_1f1b")
    timeline.title, timeline.note = "measured, step 5: zb_h1 P=4 V=1 M=8 group=4 overlap/one_way training", "so " * 40
    svg = draw.svg([timeline], width)
    left = [at for at in texts(svg) if at[2] < 60 and not at[0].isdigit()]
    assert max(x + text_width(text, size) for text, size, x, _ in left) < width
    assert len({y for *_, y in left}) > 8 or width == 1400
    assert " ".join(text for text, *_ in left).count("so") == 40


def test_a_picture_is_dark_where_its_reader_prefers_that():
    """Every drawn colour of the light theme has a CSS rule. White labels and pictures on dark paper have none."""
    svg = draw.svg([timeline_of("interleaved_1f1b")])
    rules = dict(re.findall(r'\[style\*="(\w+: #\w+)"\] \{(\w+: #\w+) !important\}', svg))
    drawn = set(re.findall(r"(?:fill|stroke): #\w{6}", svg.partition("</style>")[2]))
    for light, dark in zip(LIGHT, DARK, strict=True):
        for kind in ("fill", "stroke"):
            assert (rules.get(f"{kind}: {light.hex}") == f"{kind}: {dark.hex}") == (f"{kind}: {light.hex}" in drawn)
    curves = re.findall(r"fill: none; (stroke: #\w+)", svg)
    assert len(curves) == 4
    assert all(curve in rules for curve in curves)
    assert 'path[style*="fill: #ffffff"]' in svg
    assert "prefers-color-scheme" in svg
    assert "!important" not in draw.svg([timeline_of("interleaved_1f1b")], dark=True)


@pytest.mark.slow
def test_the_picture_names_a_substitute_order():
    notes = [
        any("ZB-V's order" in text for text, *_ in texts(draw.svg(compared("dualpipe_v", p=4, m=m)))) for m in (7, 8)
    ]
    assert notes == [True, False]


@pytest.mark.parametrize(("width", "named"), [(900, False), (1700, True), (6000, True)])
def test_labels_of_a_picture_name_the_chunk_all_or_none(width, named):
    labels = [name for name, _ in labels_of(draw.svg([timeline_of("interleaved_1f1b")], width))]
    assert len(labels) == 4 * 2 * 8 * 2
    assert {"." in label for label in labels} == {named}


@pytest.mark.slow
def test_svg_is_the_same_bytes_in_another_process():
    code = (
        "from tests.unit_tests.tools.draw.timelines import compared; from megatron_pp import draw;"
        "print(draw.svg(compared('1f1b', 'zb_v', p=2, m=4)), end='')"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other == draw.svg(compared("1f1b", "zb_v", p=2, m=4))
    assert not re.search(r"\d{4}-\d\d-\d\d|matplotlib", other)


@pytest.mark.slow
def test_svg_of_many_blocks_stays_small():
    assert len(draw.svg([timeline_of("1f1b", 4, 1000)])) < 1_100_000


def test_svg_escapes_titles():
    timeline = timeline_of("1f1b")
    timeline.title = 'a < b & "c" $x$'
    assert 'a < b & "c" $x$' in [text for text, *_ in texts(draw.svg([timeline]))]


@pytest.mark.slow
def test_png_has_two_dots_a_pixel_and_the_colours_on_light_and_dark_paper():
    timelines = [timeline_of("dualpipe_v", 2, 4), timeline_of("vocab_1f1b", 2, 4)]
    for dark in (False, True):
        pixels = matplotlib.image.imread(io.BytesIO(draw.png(timelines, 600, dark)))[..., :3]
        assert pixels.shape[1] == 1200
        assert (pixels[0, 0].mean() < 0.2) == dark
        for colour in OPERATIONS.values():
            assert (np.abs(pixels - np.array(colour) / 255).max(axis=-1) < 0.02).sum() > 100


def test_a_png_that_is_too_large_is_refused_with_its_size():
    with pytest.raises(PlanError, match=r"the PNG would have 80000 x \d+ dots; at most 65535 dots a side .* HTML"):
        draw.png([timeline_of("1f1b")], 40_000)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_v"])
def test_one_rank_and_one_microbatch_can_be_drawn(schedule):
    timeline = timeline_of(schedule, 1, 1, v=None if schedule == "zb_v" else 1)
    assert labels_of(draw.svg([timeline]))
    assert "0 transfers" in summary(timeline)
