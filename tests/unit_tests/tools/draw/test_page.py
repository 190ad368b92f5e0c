"""The HTML page and Chrome's trace contain all data of a timeline."""

from __future__ import annotations

import base64
import gzip
import json
import re
from array import array
from html import unescape

import pytest

from examples.gpt.curves import Chart, Curve, render_charts
from megatron_pp.plan.simulate.memory import peak_bytes
from megatron_pp.tools.draw.chrome import render_chrome_trace
from megatron_pp.tools.draw.html import render_html
from tests.unit_tests.tools.draw.timelines import SHAPE, plan_of, timeline_of


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
    events = json.loads(render_chrome_trace(timeline_of("1f1b", shape=None)))["traceEvents"]
    assert max(e["args"]["microbatches"] for e in events if e["ph"] == "C") == 4


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
        decoded = [("FBIWST"[c >> 29], c >> 20 & 511, c & 0xFFFFF) for c in codes]
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


def test_charts_have_every_curve_inside_their_scale():
    """Missing values, such as a loss that was not finite, are left out. A chart that has only missing values is left
    out, too."""
    loss = Curve("training", [(step, 6.0 / step) for step in range(1, 5001)])
    checks = Curve("validation", [(0, 5.6), (2500, float("nan")), (5000, 1.8)])
    nothing = Chart("nothing", [Curve("", [(1, float("inf"))])], "{:g}")
    one = Chart("speed", [Curve("", [(7, 1234.5)])], "{:,.0f} tokens/s")
    charts = [Chart("<loss>", [loss, checks], "{:.3f}"), nothing, one]
    page = render_html([], "title", (), render_charts(charts))
    shown = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert len(shown) == 2
    assert "&lt;loss&gt;" in shown[0]
    for words in ("training 0.001", "validation 1.800", ">step 0<", ">5,000<", ">6<", ">0<"):
        assert words in shown[0]
    for words in ("> 1,234 tokens/s<", ">step 7<"):
        assert words in shown[1].replace("</i>", ">")
    for path in re.findall(r'd="M([^"]*)"', shown[0] + shown[1]):
        points = [tuple(map(float, point.split(","))) for point in re.split("[LH]", path) if "," in point]
        assert all(0 <= x <= 1000 and 0 <= y <= 100 for x, y in points)
        assert len(points) <= 2002
    assert "nan" not in page


def test_html_escapes_what_comes_from_outside():
    timeline = timeline_of("1f1b")
    timeline.title = "</script><b>&"
    page = render_html([timeline], "<i>", [("<u>", ["<a>"], [["<td>"]])])
    assert not re.search(r"<i>|<b>|<u>|<a>|<td><td>", page)
    assert page.count("</script>") == 3
    assert "</script><b>&" in unescape(page) or "\\u003c/script>" in page
