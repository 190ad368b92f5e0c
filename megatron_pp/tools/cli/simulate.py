"""``megatron-pp simulate``: predicts times and memory of a schedule, or ranks several schedules."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_pp.features.offload.offload_lowering import offloaded_chunks
from megatron_pp.plan.costs.activations import WEIGHT_SHARE, Shares, peak_activations
from megatron_pp.plan.costs.stage_costs import Network, StageCosts
from megatron_pp.plan.ir.instruction import COPIES_FROM_HOST, COPIES_TO_HOST, GATHERS, SCATTERS, WEIGHT_GRAD
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.simulate.device_memory import device_memory
from megatron_pp.plan.simulate.memory import ModelShape, RankMemory, rank_memory
from megatron_pp.plan.simulate.simulation import Simulation
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.simulate.steady import SteadyStep, counts_on_bypass, longest_span, steady_step
from megatron_pp.planner.bound import Bound, bound_of
from megatron_pp.planner.compare import ComparedSchedule, compare, fitted, searched_memory
from megatron_pp.tools.cli.errors import OK, REFUSED, UsageError
from megatron_pp.tools.cli.options import cost_options, megatron_input, plan_options
from megatron_pp.tools.cli.options.megatron_input import OfMegatron
from megatron_pp.tools.cli.options.memory_table import (
    OPTIONS,
    add_outside_options,
    memory_facts,
    outside_of,
    show_memory,
)
from megatron_pp.tools.cli.options.parser import given, refuse
from megatron_pp.tools.cli.terminal import print_json, print_line, print_table
from megatron_pp.tools.draw.facts import percent, short, size_label
from megatron_pp.tracing.analysis import Findings

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "predict makespan, bubble, waits, memory and communication; compare schedules"
EXAMPLES = """examples:
  megatron-pp simulate -s 1f1b -P 4 -M 16 --forward-ms 10 --backward-ms 20 --p2p-ms 0.5
  megatron-pp simulate -s zb_v -P 8 -M 32 --forward-ms 10 --backward-ms 10 --weight-ms 10 \\
      --bandwidth 25 --layers 32 --hidden-size 4096 --seq-length 4096 --vocab-size 32000 --tensor-parallel 8
  megatron-pp simulate -s interleaved_1f1b -P 4 -V 2 -M 16 --p2p-ms 0.1 --device one_queue
  megatron-pp simulate -s 1f1b -P 4 -M 16 --memory --layers 32 --hidden-size 4096 --seq-length 4096
  megatron-pp simulate --compare all -P 4 -V 1,2 -M 8,16 --forward-ms 10 --backward-ms 20 \\
      --layers 32 --hidden-size 4096 --seq-length 4096 --memory-limit 40
  megatron-pp simulate -s zb_h2 -P 8 -M 32 --optimizer-bypass
  megatron-pp simulate --modules 'vision=0/1; llm=2,3; vision>llm' -M 8 --p2p-ms 0.1
  megatron-pp simulate --megatron-args job.sh --gpu h100              # Megatron's flags, or a file that check reads
  megatron-pp simulate -s mine.csv --p2p-ms 0.1                       # P, V and M are the file's

exit codes: 0 done, 1 the plan is refused or nothing fits, 2 wrong arguments
"""
_NEEDS_SHAPE = "needs the shape of the model: --layers, --hidden-size, --seq-length"
_WAITS = ("peer late", "queued", "transfer", "release")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan_options.add_plan_options(parser, several=True)
    cost_options.add_cost_options(parser)
    cost_options.add_model_options(parser)
    megatron_input.add_options(parser)
    measured = "take compute times, transfers and, unless you name another, the plan from this trace"
    cost_options.add_from_trace_option(parser, measured)
    parser.add_argument("--compare", metavar="A,B,C", help="rank these schedules, or all, by time per microbatch")
    too_large = "leave out schedules that need more memory on a rank"
    parser.add_argument("--memory-limit", type=cost_options.number, metavar="GIB", help=too_large)
    table = "print all memory of each rank's GPU, with communicators and CUDA context; needs the shape of the model"
    parser.add_argument("--memory", action="store_true", help=table)
    add_outside_options(parser)
    share = "memory kept until a weight gradient, as a share of its forward's activations; default that of a "
    share += "transformer layer, calculated from the model options if they are given"
    parser.add_argument("--weight-share", type=cost_options.number, metavar="SHARE", help=share)
    bypass = "simulate steps in a row without a barrier between them, as if the optimizer did not synchronise ranks "
    bypass += "(arXiv 2401.10241, section 4)"
    parser.add_argument("--optimizer-bypass", action="store_true", help=bypass)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace, console: Console) -> int:
    megatron = megatron_input.fill(args)
    if args.compare is not None:
        return _compare(args, megatron, console)
    refuse(args, ["memory_limit"], "is for --compare")
    traced = cost_options.traced_findings(args)
    shape = _shape(args, megatron)
    if shape is None:
        refuse(args, ["memory", "keep_outputs"], _NEEDS_SHAPE)
    if not args.memory:
        refuse(args, OPTIONS, "is for --memory, or --memory-limit")
    if traced is not None and not given(args, ("source", *plan_options.NAMING)):
        refuse(args, plan_options.LOWERING, "has no effect on the traced plan; name a plan with -s")
        plan = traced.measured.plan
    else:
        plan = plan_options.verified_single_plan(
            args,
            lambda spec: fitted(spec, *_costs(args, spec, traced, megatron, shape)),
            cost_options.is_on_gloo(traced),
        )
    cost_options.refuse_copies(args, plan.spec.schedule, plan.copies_to_host, bool(plan.spec.fsdp_collectives))
    costs, network = _costs(args, plan.spec, traced, megatron, shape)
    device = cost_options.timed_rules(args, plan, network)
    result = simulate(plan, costs, network, device)
    used = result.volume() if args.link else {}
    for pair, _ in args.link or ():
        if pair not in used:
            raise UsageError(f"--link {pair[0]}-{pair[1]} has no effect: the plan sends nothing on this link")
    steady = steady_step(plan, costs, network, device) if args.optimizer_bypass else None
    unit = _unit(args, traced, megatron)
    ranks = range(plan.spec.pipeline_size)
    memory = [rank_memory(plan, rank, shape, not args.keep_outputs) for rank in ranks] if shape else None
    peaks = _peaks(result, memory, _weight_shares(args, plan, shape))
    outside = outside_of(args, network.gloo) if args.memory else None
    held = [device_memory(plan, rank, memory[rank], outside) for rank in ranks] if memory and args.memory else None
    # Bounds are only known for a line of stages.
    bound = bound_of(plan, costs, network, searched_memory(plan)) if args.modules is None else None
    if args.json:
        facts = _facts(result, steady, peaks, unit) | {"bound": _bound_facts(bound, result.makespan)}
        print_json(console, facts | ({"memory": [memory_facts(one) for one in held]} if held else {}))
    else:
        print_line(console, plan.spec.describe())
        for sentence in _sentences(result, steady, unit):
            print_line(console, sentence)
        if bound is not None:
            print_line(console, bound.beside(result.makespan, unit))
        _show(result, peaks, unit, console)
        if held:
            show_memory(held, console)
    return OK


def _shape(args: argparse.Namespace, megatron: OfMegatron | None) -> ModelShape | None:
    return cost_options.model_shape(args) if megatron is None else megatron.shape


def _costs(
    args: argparse.Namespace,
    spec: PlanSpec,
    traced: Findings | None,
    megatron: OfMegatron | None,
    shape: ModelShape | None,
) -> tuple[StageCosts, Network]:
    """The costs from a trace, a card's data sheet or the options."""
    if megatron is not None and megatron.costs is not None and megatron.network is not None:
        return megatron.costs.regrouped(spec.pipeline_size * spec.num_chunks), megatron.network
    return cost_options.costs_of(args, spec, traced, shape)


def _unit(args: argparse.Namespace, traced: Findings | None, megatron: OfMegatron | None) -> str:
    known = traced is not None or (megatron is not None and megatron.costs is not None)
    return cost_options.MILLISECONDS if known else cost_options.cost_unit(args)


def _peaks(result: Simulation, memory: Sequence[RankMemory] | None, weight_shares: Shares) -> dict[str, Any]:
    """The peaks of each rank: activations in units of one chunk's forward, bytes (None without a model), and both again
    for offloaded activations."""
    return {
        "peak_activations": list(peak_activations(result.plan, weight_shares)),
        "peak_bytes": [one.peak for one in memory] if memory else None,
        "peak_host_activations": list(result.peak_on_host()),
        "peak_host_bytes": [one.host_peak for one in memory] if memory else None,
    }


def _weight_shares(args: argparse.Namespace, plan: Plan, shape: ModelShape | None) -> Shares:
    """The share of the option; otherwise that of the model's stages, or of a transformer layer without a model."""
    if all(at.op != WEIGHT_GRAD for program in plan.programs for at in program):
        refuse(args, ["weight_share"], f"is for separate weight gradients, but {plan.spec.schedule} has none")
    if args.weight_share is not None:
        return float(args.weight_share)
    stages = plan.placement.num_stages
    return WEIGHT_SHARE if shape is None else [shape.weight_share(stage, stages) for stage in range(stages)]


def _sentences(result: Simulation, steady: SteadyStep | None, unit: str) -> list[str]:
    """Sentences about the time of a step. If steps are faster without a barrier between them, also about such steps."""
    lines = [f"makespan {short(result.makespan)} {unit}, bubble {percent(result.bubble_share)}"]
    if steady is not None:
        numbers = f"{short(steady.period)} {unit} a step, bubble {percent(steady.bubble_share)}"
        lines.append(f"with the optimizer bypass, steps in a row: {numbers}")
    elif counts_on_bypass(result):
        span = longest_span(result)
        within = percent(1 - max(result.busy) / span)
        lines.append(
            f"within the longest span of a rank, {short(span)} {unit}, the bubble is {within}: "
            f"{result.plan.spec.schedule} is meant for the optimizer bypass, which --optimizer-bypass simulates"
        )
    return lines + plan_options.skip_sentences(result.plan)


def _show(result: Simulation, peaks: dict[str, Any], unit: str, console: Console) -> None:
    columns: dict[str, Iterable[str]] = {"rank": map(str, range(len(result.busy)))}
    columns |= {f"busy {unit}": map(short, result.busy), "idle": map(short, result.idle)}
    columns |= {why: [short(getattr(w, why.replace(" ", "_"))) for w in result.waits] for why in _WAITS}
    chunks = result.plan.spec.num_chunks
    slices = result.plan.spec.num_parts
    columns["in flight"] = (short(n / chunks / slices) for n in result.peak_in_flight())
    columns["kept"] = (short(kept / chunks) for kept in peaks["peak_activations"])
    if peaks["peak_bytes"]:
        columns["peak memory"] = map(size_label, peaks["peak_bytes"])
    if any(peaks["peak_host_activations"]):
        columns["copies"] = (short(w.copy) for w in result.waits)
        columns["on host"] = (short(kept / chunks) for kept in peaks["peak_host_activations"])
        if peaks["peak_host_bytes"]:
            columns["host memory"] = map(size_label, peaks["peak_host_bytes"])
    rows = list(zip(*columns.values(), strict=True))
    print_table(console, "Ranks; activations in microbatches of a rank", list(columns), rows)
    links = [
        [f"{a} to {b}", str(messages), size_label(size) if size else "-"]
        for (a, b), (messages, size) in result.volume().items()
    ]
    print_table(console, "Links", ["link", "messages", "bytes"], links)


def _facts(result: Simulation, steady: SteadyStep | None, peaks: dict[str, Any], unit: str) -> dict[str, Any]:
    bypass = {} if steady is None else {"period": steady.period, "bubble_share": steady.bubble_share}
    return {
        "plan": result.plan.spec.describe(),
        "unit": unit,
        "makespan": result.makespan,
        "bubble_share": result.bubble_share,
        "optimizer_bypass": bypass or None,
        "busy": list(result.busy),
        "idle": list(result.idle),
        "waits": [vars(w) for w in result.waits],
        "peak_in_flight": [chunks / result.plan.spec.num_parts for chunks in result.peak_in_flight()],
        **peaks,
        "copies": _copies(result),
        "links": [
            {"source": a, "target": b, "messages": messages, "bytes": size}
            for (a, b), (messages, size) in result.volume().items()
        ],
        **plan_options.skip_facts(result.plan),
    }


def _copies(result: Simulation) -> list[dict[str, float]]:
    """For each rank: the times of its copies to the host and back, its waits for them, and the times of the all-gathers
    and reduce-scatters of its data-parallel replicas."""
    return [
        {
            "offload": sum(copy.end - copy.start for copy in made if copy.instruction.op in COPIES_TO_HOST),
            "load": sum(copy.end - copy.start for copy in made if copy.instruction.op in COPIES_FROM_HOST),
            "waited": waits.copy,
            "unshard": sum(copy.end - copy.start for copy in made if copy.instruction.op in GATHERS),
            "reduce": sum(copy.end - copy.start for copy in made if copy.instruction.op in SCATTERS),
        }
        for made, waits in zip(result.copies, result.waits, strict=True)
    ]


def _bound_facts(bound: Bound | None, step: float) -> dict[str, Any] | None:
    if bound is None:
        return None
    return {"step": bound.step, "reason": bound.reason, "excess": bound.excess(step), "terms": dict(bound.terms)}


def _compare(args: argparse.Namespace, megatron: OfMegatron | None, console: Console) -> int:
    refuse(args, ["source", "schedule", "modules"], "does not go with --compare, which names the schedules itself")
    single = ["weight_share", "memory", "keep_outputs"]
    refuse(args, single, "is for a single plan; --compare shows no activations")
    traced = cost_options.traced_findings(args)
    names = plan_options.schedule_names(args.compare)
    specs = list(plan_options.listed_specs(args, names, cost_options.is_on_gloo(traced)))
    size = plan_options.pipeline_size(args, names)
    shards = any(spec.fsdp_collectives for spec in specs)
    cost_options.refuse_copies(args, names[0], any(map(offloaded_chunks, specs)), shards)
    shape = _shape(args, megatron)
    if args.memory_limit is not None and shape is None:
        raise UsageError(f"--memory-limit {_NEEDS_SHAPE}")
    if args.memory_limit is None:
        refuse(args, OPTIONS, "is for --memory, or --memory-limit")
    limit = None if args.memory_limit is None else args.memory_limit * 2**30
    if traced is not None:
        costs = traced.costs
        network = traced.network
    elif megatron is not None and megatron.costs is not None and megatron.network is not None:
        costs = megatron.costs
        network = megatron.network
    else:  # without costs, the whole model takes P slots for each of F, B and W, for any V
        costs = cost_options.cost_profile(args, shape, size, 1, max(spec.num_parts for spec in specs))
        network = cost_options.network(args, shape, size)
    outside = None if limit is None else outside_of(args, network.gloo)
    found = compare(specs, costs, network, shape, limit, args.optimizer_bypass, outside)
    if args.json:
        print_json(console, [_schedule_facts(c) for c in found])
    else:
        _show_ranking(found, shape, _unit(args, traced, megatron), console)
    return OK if any(not c.refused for c in found) else REFUSED


def _show_ranking(found: list[ComparedSchedule], shape: ModelShape | None, unit: str, console: Console) -> None:
    names = ["schedule", "V", "M", f"{unit} per microbatch", "bubble", "over bound", "in flight", "messages"]
    rows = [
        [c.spec.schedule, str(c.spec.num_chunks), str(c.spec.num_microbatches), short(c.per_microbatch)]
        + [percent(c.bubble_share), "-" if c.bound is None else percent(c.bound.excess(c.makespan))]
        + [short(c.peak_in_flight / c.spec.num_chunks), str(c.messages)]
        + ([size_label(c.peak_bytes or 0.0)] if shape else [])
        for c in found
        if not c.refused
    ]
    names += ["peak memory"] if shape else []
    print_table(console, "Fastest first; in flight: microbatches of a rank", names, rows)
    refused = [
        [f"{c.spec.schedule} V={c.spec.num_chunks} M={c.spec.num_microbatches}", c.refused] for c in found if c.refused
    ]
    print_table(console, "Not possible", ["schedule", "why"], refused)


def _schedule_facts(compared: ComparedSchedule) -> dict[str, Any]:
    numbers = ("makespan", "per_microbatch", "bubble_share", "peak_in_flight", "peak_bytes", "messages", "sent_bytes")
    return {
        **{name: getattr(compared.spec, name) for name in ("schedule", "num_chunks", "num_microbatches")},
        "refused": compared.refused or None,
        **{name: getattr(compared, name) for name in numbers},
        "bound": _bound_facts(compared.bound, compared.makespan),
    }
