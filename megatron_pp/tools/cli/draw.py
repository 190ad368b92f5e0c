"""``megatron-pp draw``: draws the timelines of plans, in the terminal or as a picture."""

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.simulate.simulation import Simulation
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.tools import draw
from megatron_pp.tools.cli.errors import OK, UsageError
from megatron_pp.tools.cli.options import cost_options, plan_options
from megatron_pp.tools.cli.options.parser import refuse
from megatron_pp.tools.cli.terminal import print_line, print_table, write_output
from megatron_pp.tools.draw.chrome import render_chrome_trace
from megatron_pp.tools.draw.facts import costs_line, name_in_words, percent, short
from megatron_pp.tools.draw.palette import NAMES
from megatron_pp.tools.draw.text import grid_cells, plain, render_grid, render_text
from megatron_pp.tools.draw.timeline import Timeline, simulated_timeline

SUMMARY = "draw timelines: terminal, classic grid, SVG, PNG, HTML, Chrome trace"
EXAMPLES = """examples:
  megatron-pp draw -s 1f1b -P 4 -M 8
  megatron-pp draw -s 1f1b,zb_h1,zb_v -P 8 -M 16 -o compared.svg
  megatron-pp draw --style grid -s naive,gpipe,1f1b -P 4 -M 4
  megatron-pp draw -s zb_v -P 4 -M 8 --p2p-ms 0.2 --forward-ms 4 --backward-ms 4 --weight-ms 4 -o zbv.html
  megatron-pp draw --from-trace traces/ --step 5 -o step5.svg
  megatron-pp draw -s interleaved_1f1b -P 8 -V 4 -M 32 -o plan.json      # open in https://ui.perfetto.dev
"""
_BY_ENDING = {".svg": "svg", ".html": "html", ".htm": "html", ".png": "png", ".json": "chrome", ".txt": "text"}
_LEAST_WIDTH = {"text": 20, "grid": 20, "svg": 300, "html": 0, "png": 300, "chrome": 0}  # for --width


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan_options.add_plan_options(parser, several=True)
    cost_options.add_cost_options(parser)
    cost_options.add_model_options(parser)
    cost_options.add_from_trace_option(parser, "draw a step of this traced run, instead of a plan")
    parser.add_argument("--style", choices=_LEAST_WIDTH, help="default by the ending of -o, otherwise text")
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write; text and grid may go to the terminal")
    wide = "columns of text, or pixels of a picture (a PNG has two dots per pixel); default by the labels"
    parser.add_argument("--width", type=plan_options.whole, metavar="N", help=wide)
    dark = "draw SVG and PNG on dark paper; HTML takes the reader's preference"
    parser.add_argument("--dark", action="store_true", help=dark)


def run(args: argparse.Namespace, console: Console) -> int:
    style = args.style or _style_of(args.output)
    _refuse_unused(args, style)
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
        for line in render_text(_timelines(args), args.width or console.width, few_colours=_has_few_colours(console)):
            console.print(line, soft_wrap=True)
    else:
        write_output(console, args.output, rendered(_timelines(args), style, args.width, args.dark))
    return OK


def _refuse_unused(args: argparse.Namespace, style: str) -> None:
    """Raises UsageError for an option that would have no effect."""
    if style == "grid":
        refuse(args, ("from_trace", "modules", *cost_options.RUN), "does not go with --style grid, which has no times")
    if args.from_trace is not None:
        of_plans = (*plan_options.PLAN_OPTIONS, *cost_options.COSTS, *cost_options.MODEL)
        refuse(args, of_plans, "does not go with --from-trace, which draws a traced step")
    if style not in ("svg", "png"):
        refuse(args, ["dark"], f"is for svg and png, not {style}")
    if style in ("html", "chrome"):
        refuse(args, ["width"], f"is not for {style}, which has the width of its window")


def _style_of(output: str | None) -> str:
    """The style for the file's ending; text if it has no ending."""
    ending = Path(output or "").suffix
    if ending and ending not in _BY_ENDING:
        raise UsageError(f"drawings are written as {', '.join(_BY_ENDING)}, not as {ending!r}; or give --style")
    return _BY_ENDING.get(ending, "text")


def _has_few_colours(console: Console) -> bool:
    return console.color_system in ("standard", "windows")


def rendered(timelines: Sequence[Timeline], style: str, width: int | None, dark: bool) -> str | bytes:
    """The content of a file of this style."""
    if style == "svg":
        return draw.svg(timelines, width, dark)
    if style == "png":
        return draw.png(timelines, width, dark)
    if style == "html":
        return draw.render_html(timelines, ", ".join(timeline.title for timeline in timelines))
    if style == "chrome":
        if len(timelines) > 1:
            raise UsageError("a Chrome trace has one schedule; name only one, or write HTML")
        return render_chrome_trace(timelines[0])
    return plain(render_text(timelines, width or 80)) + "\n"


def _timelines(args: argparse.Namespace) -> list[Timeline]:
    traced = cost_options.traced_findings(args)
    if traced is not None:
        title = f"{traced.measured.plan.spec.describe()}, step {traced.step} as measured"
        return [simulated_timeline(traced.measured, cost_options.MILLISECONDS, title=title)]
    shape = cost_options.model_shape(args)
    plans = _plans(args)
    if len(plans) == 1:
        cost_options.refuse_copies(
            args, plans[0].spec.schedule, plans[0].copies_to_host, bool(plans[0].spec.fsdp_collectives)
        )
    steps = _simulated(args, plans, of_one_model=len(plans) > 1)
    return [simulated_timeline(step, cost_options.cost_unit(args), shape) for step in steps]


def _plans(args: argparse.Namespace) -> list[Plan]:
    """The plans that the options name. All are verified."""
    if args.source is not None or args.modules is not None:
        return [plan_options.verified_single_plan(args)]
    specs = list(plan_options.listed_specs(args, plan_options.named_schedules(args)))
    return [plan_options.verified(plan_options.named_plan(spec)) for spec in specs]


def _simulated(args: argparse.Namespace, plans: Sequence[Plan], of_one_model: bool) -> list[Simulation]:
    """The simulated steps of the plans. If no costs are given, F, I and W take 1 slot on each stage; with
    ``of_one_model`` they take 1 slot for a rank's share of the model, for any V."""
    shape = cost_options.model_shape(args)
    costs = [cost_options.costs_of(args, plan.spec, None, shape, of_one_model) for plan in plans]
    return [
        simulate(plan, *each, cost_options.timed_rules(args, plan, each[1]))
        for plan, each in zip(plans, costs, strict=True)
    ]


def _draw_grids(args: argparse.Namespace, console: Console) -> None:
    plans = _plans(args)
    for plan in plans:
        console.print(plan.spec.describe(), markup=False, highlight=False, style="bold")
        if plan.remark:
            print_line(console, plan.remark)
        for line in render_grid(plan, args.width or console.width, _has_few_colours(console)):
            console.print(line, soft_wrap=True)
        console.print()
    sliced = any(plan.spec.num_parts > 1 for plan in plans)
    shown = {at.op for plan in plans for row in grid_cells(plan) for at in row if at is not None}
    names = [f"{op} {name}" for op, name in NAMES.items() if op in shown]
    names += [name_in_words(chunks, sliced) for chunks in sorted({min(plan.spec.num_chunks, 2) for plan in plans})]
    print_line(console, "  ".join(names))
    console.print()
    steps = _simulated(args, plans, of_one_model=True)
    unit = cost_options.cost_unit(args)
    title = f"What it costs: {costs_line([simulated_timeline(step, unit) for step in steps])}"
    names = ["schedule", unit, "idle a rank", "bubble", "in flight a rank", "messages a rank"]
    print_table(console, title, names, list(map(_cost_row, steps)))


def _cost_row(step: Simulation) -> list[str]:
    sent = [0] * len(step.busy)
    for (source, _), (messages, _) in step.volume().items():
        sent[source] += messages
    spec = step.plan.spec
    kept = (short(number / spec.num_chunks / spec.num_parts) for number in step.peak_in_flight())
    idle, in_flight, messages_sent = (" ".join(map(str, of_all)) for of_all in (map(short, step.idle), kept, sent))
    bubble = percent(step.bubble_share)
    return [step.plan.spec.schedule, short(step.makespan), idle, bubble, in_flight, messages_sent]
