"""Colours, numbers and levels of detail that all drawings share."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from megatron_pp.tools.draw.facts import counted, size_label, tick_label, tick_step
from megatron_pp.tools.draw.palette import DARK, LIGHT, OPERATIONS, block_colour, ink_on
from megatron_pp.tools.draw.timeline import _steps, pieces, thinned
from tests.unit_tests.tools.draw.timelines import timeline_of


def test_thin_blocks_add_up_to_what_they_were():
    timeline = timeline_of("zb_h1", 2, 200, shape=None)
    scale = 100 / timeline.end
    for lane in timeline.lanes:
        drawn = 0.0
        for piece in pieces(lane.compute, scale):
            drawn += sum(s for _, s in piece.shares) if piece.event is None else piece.right - piece.left
        assert drawn == pytest.approx(lane.busy * scale)


def test_of_several_values_at_the_same_time_the_highest_and_the_last_are_drawn():
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
    """CIE L*a*b* of a colour, as seen with this kind of colour blindness."""
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
    strips = [(theme.activation, theme.gradient, theme.wait) for theme in (LIGHT, DARK)]
    for group in (OPERATIONS.values(), *strips):
        for one, other in combinations(group, 2):
            assert np.linalg.norm(seen(one, kind) - seen(other, kind)) > 20


def test_ticks_and_sizes_are_labelled_with_round_numbers():
    assert [tick_step(s, 10) for s in (1, 7, 43, 1000, 0.02)] == [0.1, 1, 5, 100, 0.002]
    assert [tick_label(v, s) for v, s in ((0.30000000000000004, 0.1), (20, 5), (1.0, 0.25))] == ["0.3", "20", "1.0"]
    assert [size_label(v) for v in (12, 2048, 3.5 * 2**20, 80 * 2**30)] == ["12 B", "2 KiB", "3.5 MiB", "80 GiB"]


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1 transfer"), (2.0, "2 transfers"), (7774, "7774 transfers"), (2.5, "2.5 transfers"), (0, "0 transfers")],
)
def test_whole_numbers_are_counted_as_such(number, text):
    assert counted(number, "transfer") == text
