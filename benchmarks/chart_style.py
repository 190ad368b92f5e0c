"""How the charts of docs/performance.md look: colours, rows of dots, lines named at their ends, SVG with text."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Values = Sequence[float | None]

# Distinguishable with any colour vision (Okabe and Ito), and by marker without colour.
_LOOKS = {
    "ours": ("#0072B2", "o"),
    "plug-in": ("#56B4E9", "X"),
    "megatron": ("#D55E00", "s"),
    "megatron-main": ("#A6568B", "D"),
    "torch": ("#008A64", "^"),
    "torch per-direction": ("#6B6B00", "v"),
    "predicted": ("#555555", "|"),
    "simulated": ("#555555", "|"),
    "measured": ("#0072B2", "o"),
    "free at once": ("#777777", "s"),
    "wait at once": ("#D55E00", "^"),
}
_SPARE = (("#0072B2", "o"), ("#7B4FB5", "s"), ("#8A5A00", "D"), ("#008A64", "^"))
_WIDTH = 9.0  # inches
_LABEL_GAP = 0.075  # of an axis, between the names at the ends of two lines
_SOFT = "#777777"
_RULE = "#DDDDDD"
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and is drawn in the reader's font
    "svg.hashsalt": "megatron_pp",  # the same identifiers on every run
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _SOFT,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "axes.grid": True,
    "grid.color": _RULE,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw and save charts within."""
    import matplotlib

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def new_chart(rows: int, columns: int, height: float, **options: Any) -> tuple[Any, list[Any]]:
    """A figure of that many inches, as wide as the page, and its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def save_svg(figure: Any, path: Path) -> None:
    """The same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))


def look(name: str, place: int) -> dict[str, Any]:
    """Colour and marker of a series, of an engine always the same."""
    color, marker = _LOOKS.get(name) or _SPARE[place % len(_SPARE)]
    return {"color": color, "marker": marker}


def dot_rows(
    axes: Any, rows: Sequence[str], series: Mapping[str, Values], label: str = "", shown: str = "{:.3g}"
) -> None:
    """A row for each of ``rows``, from the top, with a dot for each series; those of ``label`` with their values."""
    spread = min(0.16, 0.6 / len(series))
    for place, (name, values) in enumerate(series.items()):
        shift = (place - (len(series) - 1) / 2) * spread
        points = [(value, row + shift) for row, value in enumerate(values) if value is not None]
        size = 90 if name in ("predicted", "simulated") else 42
        looks = {**look(name, place), "s": size, "linewidths": 1.6, "zorder": 3, "clip_on": False}
        axes.scatter(*zip(*points, strict=True), label=name, **looks)
        for value, height in points if name == label else ():
            axes.annotate(
                shown.format(value), (value, height), (7, 0), textcoords="offset points", va="center", fontsize=9,
                color=look(name, place)["color"],
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color="#EEEEEE")


def key(figure: Any, axes: Any) -> None:
    """What the markers are, in one line above the chart."""
    handles, names = axes.get_legend_handles_labels()
    legend = figure.legend(
        handles, names, loc="outside upper left", ncols=len(names), frameon=False, handletextpad=0.3, columnspacing=1.4
    )
    for text, name, place in zip(legend.get_texts(), names, range(len(names)), strict=True):
        text.set_color(look(name, place)["color"])


def lines(axes: Any, series: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """A line for each series with its name at the right end. Scale and limits of y must be set before."""
    ends: list[tuple[float, float, str, str]] = []
    for place, (name, points) in enumerate(series.items()):
        ordered = sorted(points)
        looks = look(name, place)
        axes.plot(*zip(*ordered, strict=True), linewidth=2.6 if name == "ours" else 1.6, markersize=5, **looks)
        ends.append((*reversed(ordered[-1]), name, looks["color"]))
    axes.autoscale_view()  # now, as the names need the limits
    place_of = axes.transData + axes.transAxes.inverted()
    before = -1.0
    for y, x, name, color in sorted(ends):
        before = max(place_of.transform((x, y))[1], before + _LABEL_GAP)
        axes.annotate(
            name, (x, before), (8, 0), xycoords=("data", "axes fraction"), textcoords="offset points", va="center",
            color=color, fontsize=10,
        )  # fmt: skip


def target(axes: Any, value: float, text: str) -> None:
    """A dotted upright line at what values are wanted to stay below."""
    axes.axvline(value, linestyle=":", color="#333333", linewidth=1.4, zorder=2)
    places = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    axes.annotate(text, (value, 0), (3, 4), fontsize=9, color="#333333", **places)


def wanted(axes: Any, low: float, high: float, upright: bool) -> None:
    """Shade where values are wanted to be, between two values of y, or (``upright``) of x."""
    (axes.axvspan if upright else axes.axhspan)(low, high, color="#EAF3F8", zorder=0)
