"""``loss.png``: the losses of a run."""

from __future__ import annotations

from pathlib import Path

from examples.gpt.metrics import METRICS, read_metrics

PICTURE = "loss.png"


def plot_losses(folder: Path) -> str | None:
    """Draw the losses in a run's folder. Returns ``None``, or why there is no plot (matplotlib is an extra)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no {PICTURE}: {error}"
    records = read_metrics(folder / METRICS)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for key, label, marker in (("loss", "training", ""), ("validation_loss", "validation", "o")):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), linewidth=0.8, marker=marker, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(folder / PICTURE, dpi=120)
    return None
