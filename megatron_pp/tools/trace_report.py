"""Compares a run with its plan, in tables, sentences and a picture."""

from pathlib import Path

from megatron_pp.plan.costs.files import write_whole
from megatron_pp.plan.simulate.simulation import Simulation
from megatron_pp.planner.bound import bound_of
from megatron_pp.tools import draw
from megatron_pp.tools.draw.chrome import render_chrome_steps
from megatron_pp.tools.draw.facts import percent, short
from megatron_pp.tools.draw.html import Table, render_html
from megatron_pp.tools.draw.timeline import Timeline, short_title, simulated_timeline
from megatron_pp.tracing.analysis import Findings, analyse
from megatron_pp.tracing.run import TracedRun, load_run, run_names


def report_tables(found: Findings) -> list[Table]:
    """Tables of the step, its ranks and its links, measured and predicted."""
    return [_summary(found), _ranks(found), _links(found)]


def report_picture(found: Findings, traced: TracedRun, output: str) -> str | bytes:
    """The measured step above the predicted one, on one time axis.

    It is a PNG if ``output`` ends with .png, otherwise an HTML page with the tables. If ``output`` ends with .json, it
    is a Chrome trace of all recorded steps.
    """
    if Path(output).suffix == ".json":
        return render_chrome_steps(_title(traced, found), _steps(traced))
    timelines = [_measured(found.step, found.measured), _predicted(found)]
    if Path(output).suffix == ".png":
        return draw.png(timelines)
    return render_html(timelines, _title(traced, found), _page_tables(found))


def write_timeline(folder: Path, page: Path, chrome: Path) -> tuple[int, ...]:
    """Writes all recorded steps of the newest run in ``folder``, and returns their numbers.

    ``page`` is an HTML page with the steps below each other, then the prediction and the tables of the step with the
    median time. ``chrome`` is a Chrome trace. Raises FileFormatError if there are no traces or they cannot be read.
    """
    traced, found = _newest(folder)
    steps = _steps(traced)
    timelines = [*(timeline for _, _, timeline in steps), _predicted(found)]
    write_whole(page, render_html(timelines, _title(traced, found), _page_tables(found)))
    write_whole(chrome, render_chrome_steps(_title(traced, found), steps))
    return traced.steps


def _steps(traced: TracedRun) -> list[tuple[str, float, Timeline]]:
    """Each recorded step as (name, start time, timeline)."""
    return [(f"step {step}", traced.began(step), _measured(step, traced.measured(step))) for step in traced.steps]


def beside_prediction(folder: Path) -> tuple[list[Timeline], list[Table]]:
    """The step with the median time of the newest run in ``folder``, its prediction, and tables. Raises as
    ``write_timeline`` does."""
    _, found = _newest(folder)
    return [_measured(found.step, found.measured), _predicted(found)], _page_tables(found)


def _newest(folder: Path) -> tuple[TracedRun, Findings]:
    names = run_names(folder)
    traced = load_run(folder, names[-1] if names else None)
    return traced, analyse(traced)


def _page_tables(found: Findings) -> list[Table]:
    return [("In words", [], [[sentence] for sentence in report_sentences(found)]), *report_tables(found)]


def _title(traced: TracedRun, found: Findings) -> str:
    """``1f1b P=4 V=1 M=8, run 195a3f00c2b41 of 2026-11-22 06:12 UTC``."""
    started = traced.ranks[0].header.started
    date = "" if started is None else f" of {started:%Y-%m-%d %H:%M} UTC"
    return f"{short_title(found.measured.plan.spec)}, run {traced.name}{date}"


def _measured(step: int, measured: Simulation) -> Timeline:
    return simulated_timeline(measured, "ms", title=f"measured, step {step}: {short_title(measured.plan.spec)}")


def _predicted(found: Findings) -> Timeline:
    return simulated_timeline(found.predicted, "ms", title="predicted from the plan and the measured costs")


def _summary(found: Findings) -> Table:
    measured = found.measured
    predicted = found.predicted
    rows = [
        ["step ms", short(measured.makespan), short(predicted.makespan)],
        ["bubble", percent(measured.bubble_share), percent(predicted.bubble_share)],
    ]
    for name in ("peer_late", "queued", "transfer", "release"):
        sums = [sum(getattr(w, name) for w in side.waits) for side in (measured, predicted)]
        rows.append([f"exposed: {name.replace('_', ' ')} ms", *map(short, sums)])
    rows.append(["host ms", short(_host(found)), "0"])
    which = f"the median of {found.steps} steps" if found.steps > 1 else "alone"
    return f"Step {found.step}, {which}", ["all ranks", "measured", "predicted"], rows


def _host(found: Findings) -> float:
    return sum(map(found.host, range(len(found.measured.busy))))


def _beside_prediction(found: Findings) -> str:
    """A sentence that compares the measured step with the predicted one. If host time explains the difference, it says
    so."""
    measured = found.measured.makespan
    predicted = found.predicted.makespan
    excess = measured - predicted
    host = _host(found)
    far = f"{measured / predicted:.3g} times the" if excess > predicted > 0 else _percent_off(excess, predicted)
    said = f"the step took {short(measured)} ms, {far} predicted {short(predicted)} ms"
    if excess > 0.1 * predicted and host > excess / 2:
        said += f"; host time explains it, {short(host)} ms of all ranks in Python between compute and waits (column "
        said += "host): operations this short do not hide it, and the prediction has none"
    return said


def _percent_off(excess: float, predicted: float) -> str:
    share = excess / predicted if predicted else 0.0
    return f"{percent(abs(share))} {'less' if share < 0 else 'more'} than the"


def _ranks(found: Findings) -> Table:
    measured = found.measured
    predicted = found.predicted
    rows = []
    for rank, waits in enumerate(measured.waits):
        numbers = [measured.busy[rank], predicted.busy[rank], measured.idle[rank], predicted.idle[rank]]
        numbers += [waits.peer_late, waits.queued + waits.transfer, waits.release, found.host(rank)]
        rows.append([str(rank), *map(short, numbers)])
    names = ["rank", "busy", "(plan)", "idle", "(plan)", "peer late", "transfer", "release", "host"]
    return "Ranks, ms", names, rows


def _links(found: Findings) -> Table:
    rows = []
    for (source, target), (messages, size) in found.measured.volume().items():
        link = found.network.between(source, target)
        usual = link.wire_time(found.network.activation_bytes)
        rate = f"{size / messages / usual / 1e6:.3g}" if usual and size else "-"
        rows.append([f"{source} to {target}", str(messages), f"{size / 1e6:.4g}", short(usual), rate])
    return "Links", ["link", "messages", "MB a step", "ms a message", "GB/s"], rows


def report_sentences(found: Findings) -> list[str]:
    """Sentences about the step and its prediction, the slowest rank, the share of hidden transfers, and the distance of
    the plan from the best possible one."""
    rank = found.slowest_rank
    excess = found.slowest_excess
    busy = short(found.measured.busy[rank])
    bound = bound_of(found.measured.plan, found.costs, found.network)
    return [
        _beside_prediction(found),
        f"slowest rank: {rank} computes {busy} ms, {percent(excess)} more than the median rank",
        f"overlap: {percent(found.overlap)} of the transfer time was hidden behind compute or other waits",
        f"with these costs the predicted step is {bound.beside(found.predicted.makespan, 'ms')}",
    ]


def listed(steps: tuple[int, ...]) -> str:
    """The steps as text, with ranges: ``1-3, 7``."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], step]
        else:
            parts.append([step])
    return ", ".join("-".join(map(str, part)) for part in parts)
