"""``megatron-pp draw``: the timeline of a plan, in the terminal or as a picture."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console

from megatron_pp.cli.cost_options import MILLISECONDS, add_cost_options, add_model_options, cost_unit, model_shape
from megatron_pp.cli.draw_options import refuse_unused
from megatron_pp.cli.errors import OK, UsageError
from megatron_pp.cli.plan_options import (
    add_plan_options,
    listed_specs,
    named_plan,
    schedule_names,
    verified,
    verified_single_plan,
    whole,
)
from megatron_pp.cli.simulate import costs_of
from megatron_pp.cli.terminal import print_line, print_table, write_output
from megatron_pp.cli.trace_options import add_from_trace_option, traced_findings
from megatron_pp.draw.chrome import render_chrome_trace
from megatron_pp.draw.grid import GridFacts, grid_facts, render_grid
from megatron_pp.draw.html import render_html
from megatron_pp.draw.svg import render_svg
from megatron_pp.draw.text import legend, plain, render_text
from megatron_pp.draw.ticks import percent
from megatron_pp.draw.timeline import Timeline, simulated_timeline
from megatron_pp.plan.sim.simulate import simulate

SUMMARY = "draw a timeline: terminal, classic grid, SVG, HTML, PNG, Chrome trace"
EXAMPLES = """examples:
  megatron-pp draw -s 1f1b -P 4 -M 8
  megatron-pp draw --style grid -s naive,gpipe,1f1b -P 4 -M 4
  megatron-pp draw -s zb_v -P 4 -M 8 --p2p-ms 0.2 --forward-ms 4 --backward-ms 4 --weight-ms 4 -o zbv.html
  megatron-pp draw --from-trace traces/ --step 5 -o step5.svg
  megatron-pp draw -s interleaved_1f1b -P 8 -V 4 -M 32 -o plan.json      (open in https://ui.perfetto.dev)
"""
_BY_ENDING = {".svg": "svg", ".html": "html", ".htm": "html", ".png": "png", ".json": "chrome", ".txt": "text"}
_LEAST_WIDTH = {"text": 20, "grid": 20, "svg": 300, "html": 0, "png": 300, "chrome": 0}  # of every style


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_options(parser, several=True)
    add_cost_options(parser)
    add_model_options(parser)
    add_from_trace_option(parser, "draw what happened there, instead of a plan")
    parser.add_argument("--style", choices=_LEAST_WIDTH, help="default: what the name of -o ends in, else text")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write; text and grid may go to the terminal")
    parser.add_argument("--width", type=whole, metavar="N", help="columns of text, or pixels of a picture")
    parser.add_argument("--dark", action="store_true", help="PNG on dark paper (SVG and HTML follow the reader)")


def run(args: argparse.Namespace, console: Console) -> int:
    style = args.style or _style_of(args.output)
    refuse_unused(args, style)
    if args.width is not None and args.width < _LEAST_WIDTH[style]:
        raise UsageError(f"--width is {args.width}; {style} needs at least {_LEAST_WIDTH[style]}")
    if args.output is None and style not in ("text", "grid"):
        raise UsageError(f"--style {style} needs a file to write to: -o FILE")
    if style == "grid" and args.output is None:
        _draw_grids(args, console)
    elif style == "grid":
        text = io.StringIO()
        _draw_grids(args, Console(file=text, width=args.width or console.width, no_color=True))
        write_output(console, args.output, text.getvalue())
    elif style == "text" and args.output is None:
        _print_text(_timeline(args), args.width or console.width, console)
    else:
        write_output(console, args.output, rendered(_timeline(args), style, args.width, args.dark))
    return OK


def _style_of(output: str | None) -> str:
    """What the name of the file ends in; text where it ends in nothing."""
    ending = Path(output or "").suffix
    if ending and ending not in _BY_ENDING:
        raise UsageError(f"drawings are written as {', '.join(_BY_ENDING)}, not as {ending!r}; or say --style")
    return _BY_ENDING.get(ending, "text")


def rendered(timeline: Timeline, style: str, width: int | None, dark: bool) -> str | bytes:
    """The drawing as what a file of this style holds."""
    if style == "svg":
        return render_svg(timeline, width or 1400)
    if style == "html":
        return render_html([timeline], timeline.title)
    if style == "png":
        from megatron_pp.draw.png import render_png  # matplotlib takes long to load, and may be missing

        return render_png(timeline, width or 1600, dark)
    if style == "chrome":
        return render_chrome_trace(timeline)
    return f"{timeline.title}\n{plain(render_text(timeline, width or 80))}\n"


def _timeline(args: argparse.Namespace) -> Timeline:
    traced = traced_findings(args)
    if traced is not None:
        title = f"{traced.measured.plan.spec.describe()}, step {traced.step} as measured"
        return simulated_timeline(traced.measured, MILLISECONDS, title=title)
    plan, shape = verified_single_plan(args), model_shape(args)
    return simulated_timeline(simulate(plan, *costs_of(args, plan, None, shape), args.device), cost_unit(args), shape)


def _print_text(timeline: Timeline, width: int, console: Console) -> None:
    bubble = percent(timeline.bubble_share)
    print_line(console, f"{timeline.title}: {timeline.end:.6g} {timeline.unit}, bubble {bubble}")
    for line in [*render_text(timeline, width), legend(timeline)]:
        console.print(line, soft_wrap=True)


def _draw_grids(args: argparse.Namespace, console: Console) -> None:
    if args.source is not None:
        plans = [verified_single_plan(args)]
    else:
        plans = [verified(named_plan(spec)) for spec in listed_specs(args, schedule_names(args.schedule))]
    for plan in plans:
        console.print(plan.spec.describe(), markup=False, highlight=False, style="bold")
        for line in render_grid(plan, args.width or console.width):
            console.print(line, soft_wrap=True)
        console.print()
    print_table(
        console,
        "What it costs (every operation one step)",
        ["schedule", "steps", "idle steps a rank", "bubble", "in flight a rank", "messages a rank"],
        [_grid_row(grid_facts(plan)) for plan in plans],
    )


def _grid_row(facts: GridFacts) -> list[str]:
    lists = [" ".join(map(str, numbers)) for numbers in (facts.idle_steps, facts.in_flight, facts.sent)]
    return [facts.name, str(facts.steps), lists[0], percent(facts.bubble_share), lists[1], lists[2]]
