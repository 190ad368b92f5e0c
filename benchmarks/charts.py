"""Draws a chart for each benchmark of docs/performance.md, from its report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import Report, Row

Values = Sequence[float | None]

# Colours that differ for any colour vision (Okabe and Ito). Without colour the markers differ.
_LOOKS = {
    "ours": ("#0072B2", "o"),
    "plug-in": ("#56B4E9", "X"),
    "megatron": ("#D55E00", "s"),
    "megatron-main": ("#A6568B", "D"),
    "torch": ("#008A64", "^"),
    "torch per-edge": ("#6B6B00", "v"),
    "predicted": ("#555555", "|"),
    "simulated": ("#555555", "|"),
    "measured": ("#0072B2", "o"),
    "free at once": ("#777777", "s"),
    "wait at once": ("#D55E00", "^"),
}
_SPARE = (("#0072B2", "o"), ("#7B4FB5", "s"), ("#8A5A00", "D"), ("#008A64", "^"))
_WIDTH = 9.0  # inches
_LABEL_GAP = 0.075  # the least distance of the names at the ends of two lines, as a share of the axis
_SOFT = "#777777"
_RULE = "#DDDDDD"
_SETTINGS = {
    "svg.fonttype": "none",  # keeps text as text, which can be searched and has the reader's font
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
    """The context in which charts are drawn and saved."""
    import matplotlib

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def new_chart(rows: int, columns: int, height: float, **options: Any) -> tuple[Any, list[Any]]:
    """A figure of ``height`` inches, as wide as the page, and its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def save_svg(figure: Any, path: Path) -> None:
    """Save a figure as SVG. The same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))


def look(name: str, place: int) -> dict[str, Any]:
    """Colour and marker of a series. An engine has the same ones in all charts."""
    color, marker = _LOOKS.get(name) or _SPARE[place % len(_SPARE)]
    return {"color": color, "marker": marker}


def dot_rows(
    axes: Any, rows: Sequence[str], series: Mapping[str, Values], label: str = "", shown: str = "{:.3g}"
) -> None:
    """Draw a row for each of ``rows``, from the top, with a dot for each series. Dots of the series ``label`` show
    values."""
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
    """Draw the legend of the markers in one line above the chart."""
    handles, names = axes.get_legend_handles_labels()
    legend = figure.legend(
        handles, names, loc="outside upper left", ncols=len(names), frameon=False, handletextpad=0.3, columnspacing=1.4
    )
    for text, name, place in zip(legend.get_texts(), names, range(len(names)), strict=True):
        text.set_color(look(name, place)["color"])


def lines(axes: Any, series: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw a line for each series, with its name at the right end. Set the scale and limits of y before."""
    ends: list[tuple[float, float, str, str]] = []
    for place, (name, points) in enumerate(series.items()):
        ordered = sorted(points)
        looks = look(name, place)
        axes.plot(*zip(*ordered, strict=True), linewidth=2.6 if name == "ours" else 1.6, markersize=5, **looks)
        ends.append((*reversed(ordered[-1]), name, looks["color"]))
    axes.autoscale_view()  # scaled now, because the names need the limits
    place_of = axes.transData + axes.transAxes.inverted()
    before = -1.0
    for y, x, name, color in sorted(ends):
        before = max(place_of.transform((x, y))[1], before + _LABEL_GAP)
        axes.annotate(
            name, (x, before), (8, 0), xycoords=("data", "axes fraction"), textcoords="offset points", va="center",
            color=color, fontsize=10,
        )  # fmt: skip


def target(axes: Any, value: float, text: str) -> None:
    """Draw a dotted upright line at a target value."""
    axes.axvline(value, linestyle=":", color="#333333", linewidth=1.4, zorder=2)
    places = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    axes.annotate(text, (value, 0), (3, 4), fontsize=9, color="#333333", **places)


def wanted(axes: Any, low: float, high: float, upright: bool) -> None:
    """Shade the target range, between two values of y, or with ``upright`` of x."""
    (axes.axvspan if upright else axes.axhspan)(low, high, color="#EAF3F8", zorder=0)


def write_chart(report: Report, folder: Path) -> Path | None:
    """Draw the report as NAME.svg in ``folder``. Returns its path, None if this benchmark has no chart."""
    draw = CHARTS.get(report.name)
    if draw is None:
        return None
    path = folder / f"{report.name}.svg"
    with style():
        save_svg(draw(report), path)
    return path


def overhead(report: Report) -> Any:
    rows = _labels(report.rows, ("setting",))
    figure, (axes,) = new_chart(1, 1, 5.4)
    dot_rows(axes, rows, _series(report.rows, ("setting",), "engine", "outside us (median)"), label="ours")
    lowest = min(row["outside us (median)"] or 0.0 for row in report.rows)
    axes.set(xlabel="CPU time outside the model, microseconds per virtual microbatch (F + B)")
    axes.set_xlim(min(0.0, 1.2 * lowest), None)
    key(figure, axes)
    return figure


def exposed(report: Report) -> Any:
    several = [row for row in report.rows if row["schedule"] != "eager_1f1b"]
    return _over_bound(several, ("schedule", "P"), "transfer / F", "transfer / forward")


def sharded(report: Report) -> Any:
    return _over_bound(report.rows, ("schedule", "V", "P"), "gather / F", "gather of a stage / forward")


def _over_bound(several: Sequence[Row], columns: Sequence[str], ratio: str, label: str) -> Any:
    """A panel for each value of ``columns``, with a line for each engine over ``ratio``."""
    panels = _labels(several, columns)
    figure, all_axes = new_chart(-(-len(panels) // 2), min(2, len(panels)), 3.6 * -(-len(panels) // 2), sharey=True)
    top = max(100 * (row["over bound"] - 1) for row in several)
    for axes, panel in zip(all_axes, panels, strict=False):
        rows = [row for row in several if _label(row, columns) == panel]
        by_engine = {
            engine: [(row[ratio], 100 * (row["over bound"] - 1)) for row in rows if row["engine"] == engine]
            for engine in _labels(rows, ("engine",))
        }
        widest = max(row[ratio] for row in rows)
        axes.set(title=panel, xlim=(0, 1.65 * widest), ylim=(0, 1.15 * max(top, 5.0)))
        axes.set(xlabel=label, ylabel="over bound, % (shaded: target)")
        axes.set_xticks([tick for tick in (0, 0.5, 1.0, 1.5) if tick <= widest])
        lines(axes, by_engine)
        wanted(axes, 0, 5, upright=False)
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    return figure


def overlap(report: Report) -> Any:
    columns = ("schedule", "P", "MB")
    rows = _labels(report.rows, columns)
    figure, (time, memory) = new_chart(1, 2, 1.6 + 0.62 * len(rows), sharey=True)
    dot_rows(time, rows, _series(report.rows, columns, "variant", "of free at once"), label="ours", shown="{:.2f}")
    time.set(title="Step time", xlabel="of the step that frees without waiting")
    target(time, 1.03, "target: below 1.03")
    dot_rows(memory, rows, _series(report.rows, columns, "variant", "peak MB"), label="ours", shown="{:.0f}")
    memory.set(title="Memory", xlabel="peak of a step on the worst rank, MB", xlim=(0, None))
    key(figure, time)
    return figure


def memory(report: Report) -> Any:
    worst = [{**row, "worst": max(row.get(f"rank {r}") or 0 for r in range(4))} for row in report.rows]
    figure, (axes,) = new_chart(1, 1, 5.2)
    dot_rows(axes, _labels(worst, ("setting",)), _series(worst, ("setting",), "engine", "worst"), label="ours")
    axes.set_xscale("log", base=2)
    ticks = [2, 4, 8, 16, 32, 64, 128]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("peak of a step on the worst rank, activations (logarithmic)")
    key(figure, axes)
    return figure


def bubble(report: Report) -> Any:
    made = [row for row in report.rows if isinstance(row.get("measured"), float)]
    made.sort(key=lambda row: (row["simulated"], row["schedule"]))
    rows = [f"{row['schedule']}, V={row['V']}" for row in made]
    figure, (axes,) = new_chart(1, 1, 1.4 + 0.32 * len(rows))
    for place, row in enumerate(made):
        axes.plot([100 * row["simulated"], 100 * row["measured"]], [place, place], color="#B9D5E6", linewidth=4)
    shares = {name: [100 * row[column] for row in made] for name, column in _SIMULATED.items()}
    dot_rows(axes, rows, shares, label="measured", shown="{:.1f}%")
    axes.set(xlabel="bubble: share of all ranks' time that no compute fills, %", xlim=(0, None))
    key(figure, axes)
    return figure


_SIMULATED = {"simulated": "simulated", "measured": "measured"}


def megatron_steps(report: Report) -> Any:
    rows = _labels(report.rows, ("schedule", "P", "policy", "shapes"))
    figure, (axes,) = new_chart(1, 1, 1.4 + 0.3 * len(rows))
    shares = {
        "simulated": [row["simulated ms"] / row["megatron ms"] for row in report.rows],
        "ours": [row["ours / megatron"] for row in report.rows],
    }
    dot_rows(axes, rows, shares, label="ours", shown="{:.2f}")
    target(axes, 1.03, "target: below 1.03")
    axes.set(xlabel="step under install(), measured and simulated, over Megatron's own")
    key(figure, axes)
    return figure


def prediction(report: Report) -> Any:
    columns = ("schedule", "P", "policy")
    points = [
        {**row, "percent": 100 * row["off by"], "ratio": f"transfer {row['transfer / F']:g} of a forward"}
        for row in report.rows
    ]
    rows = _labels(points, columns)
    figure, (axes,) = new_chart(1, 1, 1.6 + 0.36 * len(rows))
    dot_rows(axes, rows, _series(points, columns, "ratio", "percent"))
    wanted(axes, -5, 5, upright=True)
    axes.axvline(0, color="#777777", linewidth=1)
    widest = max(6.0, *(1.1 * abs(row["percent"]) for row in points))
    axes.set(xlabel="predicted step time over the measured one, % (shaded: target)", xlim=(-widest, widest))
    key(figure, axes)
    return figure


def tracing(report: Report) -> Any:
    shares = [{**row, "added": "added by recording", "percent": 100 * row["share"]} for row in report.rows]
    rows = _labels(shares, ("setting",))
    figure, (axes,) = new_chart(1, 1, 1.2 + 0.36 * len(rows))
    series = _series(shares, ("setting",), "added", "percent")
    dot_rows(axes, rows, series, label="added by recording", shown="{:.2f}%")
    target(axes, 1.0, "target: below 1%")
    length = report.settings.get("compute ms", 10.0)
    axes.set(xlabel=f"CPU time that recording adds, % of {length:g} ms of compute", xlim=(0, None))
    return figure


def training(report: Report) -> Any:
    theirs = [row for row in report.rows if row["model"].startswith("GPTModel") and row.get("tokens/s (median)")]
    columns = ("model", "V", "policy")
    rows = _labels(theirs, columns)
    figure, (axes,) = new_chart(1, 1, 1.4 + 0.42 * len(rows))
    dot_rows(axes, rows, _series(theirs, columns, "engine", "tokens/s (median)"))
    axes.set(xlabel="tokens per second (median)", xlim=(0, None))
    key(figure, axes)
    return figure


def growth(report: Report) -> Any:
    figure, (once, each) = new_chart(1, 2, 4.0)
    points = {
        name: [(row["instructions"], row[column]) for row in report.rows]
        for name, column in (("build", "build s"), ("verify", "verify s"))
    }
    once.set(xscale="log", yscale="log", title="Once per run", xlabel="instructions of all ranks", ylabel="seconds")
    lines(once, points)
    once.set_xlim(None, 6 * max(row["instructions"] for row in report.rows))
    column = "outside us / virtual microbatch"
    top = 1.1 * max(row[column] for row in report.rows)
    each.set(xscale="log", title="Every step, outside the model", xlabel="instructions of all ranks", ylim=(0, top))
    each.set_ylabel("us per virtual microbatch")
    lines(each, {"ours": [(row["instructions"], row[column]) for row in report.rows]})
    each.set_xlim(None, 6 * max(row["instructions"] for row in report.rows))
    return figure


def _label(row: Row, columns: Sequence[str]) -> str:
    """The label of a row: ``("schedule", "P")`` gives "1f1b, P=2"."""
    named = {"P": "P={}", "V": "V={}", "MB": "{:g} MB"}
    return ", ".join(named.get(column, "{}").format(row[column]) for column in columns)


def _labels(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """The different labels, in the order of the table."""
    return list(dict.fromkeys(_label(row, columns) for row in rows))


def _series(rows: Sequence[Row], columns: Sequence[str], name: str, value: str) -> dict[str, list[float | None]]:
    """name -> a value for each label, None if the table has none. Rows of the bare model are left out."""
    at = {(row[name], _label(row, columns)): row.get(value) for row in rows}
    names = [series for series in _labels(rows, (name,)) if series != "the model alone"]
    series = {one: [at.get((one, label)) for label in _labels(rows, columns)] for one in names}
    return {one: values for one, values in series.items() if any(value is not None for value in values)}


def packing(report: Report) -> Any:
    rows = [
        f"{row['lengths']}, {row['schedule']}{', W put off' if row['W put off'] == 'yes' else ''}"
        for row in report.rows
    ]
    figure, (axes,) = new_chart(1, 1, 1.4 + 0.36 * len(rows))
    columns = {"simulated": "simulated planned / fixed", "measured": "planned / fixed"}
    series = {name: [row[column] for row in report.rows] for name, column in columns.items()}
    dot_rows(axes, rows, series, label="measured", shown="{:.2f}")
    axes.set(xlabel="a step planned one step ahead, over one in a fixed order")
    key(figure, axes)
    return figure


CHARTS: dict[str, Callable[[Report], Any]] = {
    draw.__name__: draw
    for draw in (
        overhead, exposed, sharded, overlap, memory, bubble, megatron_steps, prediction, tracing, training, packing,
        growth,
    )
}  # fmt: skip
