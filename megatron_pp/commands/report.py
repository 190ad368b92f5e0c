"""``megatron-pp report``: what a traced run did, against what its plan promised."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from megatron_pp.commands.errors import OK
from megatron_pp.commands.tables import percent, print_table, short
from megatron_pp.commands.trace_options import add_run_options
from megatron_pp.draw.html import Table, render_html
from megatron_pp.draw.timeline import Timeline, simulated_timeline
from megatron_pp.plan.files import write_whole
from megatron_pp.tracing.analysis import Findings, analyse
from megatron_pp.tracing.run import TracedRun, load_run

SUMMARY = "a traced run against its plan: bubble, exposed waits by cause, the slowest rank, overlap"
EXAMPLES = """examples:
  megatron-pp report traces/
  megatron-pp report traces/ --step 10 -o step10.html
  megatron-pp report traces/ --run 195a3f00c2b41 --rank 5

record a run with config.trace_dir, or MEGATRON_PP_TRACE_DIR=traces; see docs/cli.md
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="where the traces lie")
    add_run_options(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="the picture (default FOLDER/report.html); .png too")


def run(args: argparse.Namespace, console: Console) -> int:
    traced = load_run(args.folder, args.run_name, args.rank)
    found = analyse(traced, args.step)
    tables = [_summary(found), _ranks(found), _links(found)]
    head = f"run {traced.name}: {found.measured.plan.spec.describe()}; steps recorded: {_numbers(traced.steps)}"
    console.print(head, markup=False, highlight=False, soft_wrap=True)
    for heading, names, rows in tables:
        print_table(console, heading, names, rows)
    for line in _sentences(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    output = args.output or str(Path(args.folder) / "report.html")
    write_whole(output, picture(found, traced, output, tables))
    console.print(f"wrote {output}", markup=False, highlight=False, soft_wrap=True)
    return OK


def picture(found: Findings, traced: TracedRun, output: str, tables: list[Table]) -> str | bytes:
    """The measured step above the predicted one, on one time axis."""
    timelines = both_timelines(found)
    if Path(output).suffix == ".png":
        from megatron_pp.draw.png import figure_png

        return figure_png(timelines)
    return render_html(timelines, f"run {traced.name}", tables)


def both_timelines(found: Findings) -> list[Timeline]:
    name = found.measured.plan.spec.describe()
    return [
        simulated_timeline(found.measured, "ms", title=f"measured, step {found.step}: {name}"),
        simulated_timeline(found.predicted, "ms", title="predicted from the plan and the measured costs"),
    ]


def _summary(found: Findings) -> Table:
    measured, predicted = found.measured, found.predicted
    off = predicted.makespan / measured.makespan - 1.0 if measured.makespan else 0.0
    rows = [
        ["makespan ms", short(measured.makespan), short(predicted.makespan), f"{off:+.1%}"],
        ["bubble", percent(measured.bubble_share), percent(predicted.bubble_share), ""],
    ]
    for name in ("peer_late", "queued", "transfer", "release"):
        sums = [sum(getattr(w, name) for w in side.waits) for side in (measured, predicted)]
        rows.append([f"exposed: {name.replace('_', ' ')} ms", short(sums[0]), short(sums[1]), ""])
    title = f"Step {found.step} (costs: medians over {found.steps} step{'s' if found.steps > 1 else ''})"
    return title, ["all ranks", "measured", "predicted", "difference"], rows


def _ranks(found: Findings) -> Table:
    measured, predicted = found.measured, found.predicted
    rows = []
    for rank, waits in enumerate(measured.waits):
        numbers = [measured.busy[rank], predicted.busy[rank], measured.idle[rank], predicted.idle[rank]]
        numbers += [waits.peer_late, waits.queued + waits.transfer, waits.release, found.other(rank)]
        rows.append([str(rank), *map(short, numbers)])
    names = ["rank", "busy", "(plan)", "idle", "(plan)", "peer late", "transfer", "release", "other"]
    return "Ranks, ms", names, rows


def _links(found: Findings) -> Table:
    rows = []
    for (source, target), (messages, size) in found.measured.volume().items():
        link = found.network.between(source, target)
        usual = link.wire_time(found.network.activation_bytes)
        rate = f"{size / messages / usual / 1e6:.3g}" if usual and size else "-"
        rows.append([f"{source} to {target}", str(messages), f"{size / 1e6:.4g}", short(usual), rate])
    return "Links", ["link", "messages", "MB a step", "ms a message", "GB/s"], rows


def _sentences(found: Findings) -> list[str]:
    rank, excess = found.slowest_rank, found.slowest_excess
    busy = found.measured.busy[rank]
    lines = [f"slowest rank: {rank} computes {short(busy)} ms, {percent(excess)} more than the median rank"]
    lines.append(f"overlap: {percent(found.overlap)} of the transfer time was hidden behind compute or other waits")
    return lines


def _numbers(steps: tuple[int, ...]) -> str:
    """``1-3, 7``."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], step]
        else:
            parts.append([step])
    return ", ".join("-".join(map(str, part)) for part in parts)
