"""Options for the costs of compute, transfers and memory, or for a traced run that has them."""

import argparse
import dataclasses
import math
import re
from dataclasses import replace

from megatron_pp.features.modules.modules_plan import ModulesSpec, costs_of_modules
from megatron_pp.plan.costs.cost_hooks import known_costs
from megatron_pp.plan.costs.measured import LARGEST
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts, regrouped
from megatron_pp.plan.ir.spec import Plan, PlanSpec, checked_device
from megatron_pp.plan.simulate.memory import RECOMPUTE, ModelShape
from megatron_pp.tools.cli.errors import UsageError
from megatron_pp.tools.cli.options.parser import given, option, refuse
from megatron_pp.tools.cli.options.plan_options import count, counts, help_of, whole
from megatron_pp.tracing.analysis import Findings, analyse
from megatron_pp.tracing.run import load_run

_GB = 1e9
_LINK = re.compile(r"([^-:]+)-([^-:]+):([^:]+)(?::([^:]+))?")
_TIMES = ("forward_ms", "backward_ms", "weight_ms")
COPIES = ("offload_ms", "offload_bandwidth")
COLLECTIVES = ("unshard_ms", "reduce_grad_ms")
COSTS = (
    *_TIMES,
    "output_ms",
    *COPIES,
    *COLLECTIVES,
    "attention_share",
    "p2p_ms",
    "bandwidth",
    "activation_mb",
    "gloo",
    "link",
)
_NO_OPTIONS = ("element_bytes", "gradient_bytes", "splits_optimizer")
MODEL = tuple(field.name for field in dataclasses.fields(ModelShape) if field.name not in _NO_OPTIONS)
_NEEDED = ("num_layers", "hidden_size", "seq_length")
RUN = ("run_name", "rank", "step")
MILLISECONDS = "ms"
SLOTS = "slots"


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "costs",
        "times of one microbatch. A single number is the time of one rank's share of the model, all its chunks "
        "together; a list (a,b,c) has a number for each of equal stages in model order. Without times, F, B and W take "
        "1 slot on each stage, or on each rank if schedules are compared.",
    )
    whole_backward = "backward: the input gradients if --weight-ms is given, otherwise the whole (two equal halves)"
    group.add_argument("--forward-ms", type=times, metavar="MS", help="forward")
    group.add_argument("--backward-ms", type=times, metavar="MS", help=whole_backward)
    group.add_argument("--weight-ms", type=times, metavar="MS", help="weight gradients; a whole backward includes them")
    output = "forward of the whole output layer with its loss on one rank; its input gradients and its weight "
    output += "gradients take the same time each. It is on the last stage, or split over all ranks; default 0"
    group.add_argument("--output-ms", type=number, metavar="MS", help=output)
    attention = "share of causal attention in these times: of slices of equal length, later slices cost more; default "
    attention += "0, slices of equal cost"
    group.add_argument("--attention-share", type=number, metavar="A", help=attention)
    copies = "copy of a forward's activations to host memory, or back"
    group.add_argument("--offload-ms", type=times, metavar="MS", help=f"time of a {copies}; default 0")
    by_size = "speed of a copy of the model's activations to host memory, or back; default infinite"
    group.add_argument("--offload-bandwidth", type=number, metavar="GB/S", help=by_size)
    unshard = "time of an all-gather of the parameters over data-parallel replicas; default 0"
    group.add_argument("--unshard-ms", type=times, metavar="MS", help=unshard)
    reduction = "time of a reduce-scatter of the gradients; default --unshard-ms"
    group.add_argument("--reduce-grad-ms", type=times, metavar="MS", help=reduction)
    group.add_argument("--p2p-ms", type=number, metavar="MS", help="latency of a transfer; default 0")
    group.add_argument(
        "--bandwidth", type=number, metavar="GB/S", help="bandwidth of each directed link; default infinite"
    )
    group.add_argument("--activation-mb", type=number, metavar="MB", help="size of one message; default the model's")
    announced = "transfers as on gloo: the announcement of a receive waits for data in the other direction"
    group.add_argument("--gloo", action="store_true", help=announced)
    one_link = "latency and bandwidth of one directed link, as in 3-4:0.1:25; repeatable"
    group.add_argument("--link", action="append", default=[], type=link, metavar="SRC-DST:MS[:GB/S]", help=one_link)


def add_model_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Adds the options for sizes of the model. ``several``: the command accepts a list of micro-batch sizes."""
    group = parser.add_argument_group("model", "sizes of the whole model, for memory in bytes")
    size, many = (counts, "s to try, with commas; times are for the first size") if several else (count, "")
    group.add_argument("--layers", dest="num_layers", type=whole, metavar="N", help=help_of("num_layers"))
    group.add_argument("--hidden-size", type=whole, metavar="H", help=help_of("hidden_size"))
    group.add_argument("--seq-length", type=whole, metavar="S")
    group.add_argument("--micro-batch-size", type=size, metavar="B", help=f"sequence{many or 's'}; default 1")
    heads = help_of("num_attention_heads")
    group.add_argument("--attention-heads", dest="num_attention_heads", type=whole, metavar="A", help=heads)
    group.add_argument("--ffn-hidden-size", type=whole, metavar="F", help=help_of("ffn_hidden_size"))
    group.add_argument("--vocab-size", type=whole, metavar="N")
    group.add_argument("--tensor-parallel", type=whole, metavar="T", help=help_of("tensor_model_parallel_size"))
    group.add_argument("--context-parallel", type=whole, metavar="C", help=help_of("context_parallel_size"))
    group.add_argument(
        "--data-parallel", type=whole, metavar="D", help="replicas over which the distributed optimizer is split"
    )
    sequence = help_of("sequence_parallel", many="; needs --tensor-parallel")
    group.add_argument("--sequence-parallel", action="store_true", help=sequence)
    group.add_argument("--recompute", choices=RECOMPUTE, help=f"default {ModelShape.recompute}")


def number(text: str) -> float:
    """The number of an argument: 0, or a number whose products and squares are finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value != 0 and not 1 / LARGEST <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 nor a number from {1 / LARGEST:g} to {LARGEST:g}")
    return value


def times(text: str) -> tuple[float, ...]:
    """Numbers with commas between them, for argparse."""
    return tuple(number(part) for part in text.split(","))


def link(text: str) -> tuple[tuple[int, int], Link]:
    """``SRC-DST:MS[:GB/S]``, for argparse."""
    found = _LINK.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a link; write SRC-DST:MS or SRC-DST:MS:GB/S, as 3-4:0.1:25")
    source, target, latency, bandwidth = found.groups()
    rate = number(bandwidth) * _GB / 1e3 if bandwidth else math.inf
    if rate == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: the bandwidth must be above 0")
    return (whole(source), whole(target)), Link(number(latency), rate)


def cost_unit(args: argparse.Namespace) -> str:
    """The unit of times: milliseconds, or slots if no costs are given."""
    times_given = given(args, (*_TIMES, "output_ms", *COPIES, *COLLECTIVES, "p2p_ms", "bandwidth", "link"))
    return MILLISECONDS if any(times_given.values()) else SLOTS


def cost_profile(
    args: argparse.Namespace, shape: ModelShape | None, pipeline_size: int, num_chunks: int, slices: int
) -> StageCosts:
    """The times along the model's depth. Raises UsageError if only one of forward and backward is given, for a share of
    attention without several slices, and for a bandwidth of copies without a model or together with their time.
    """
    if slices == 1:
        refuse(args, ["attention_share"], "needs --sequence-slices above 1: it weighs the slices of a sequence")
    costs = _times_along(args, pipeline_size, num_chunks)
    copies = _copies_along(args, shape, pipeline_size)
    if len(copies) > costs.num_stages:
        costs = costs.regrouped(len(copies))
    output = (args.output_ms or 0.0,) * 3
    attention = args.attention_share or 0.0
    copied = regrouped(copies, costs.num_stages)
    unshard = _collective_along(args.unshard_ms, costs.num_stages, pipeline_size)
    reduced = _collective_along(args.reduce_grad_ms or args.unshard_ms, costs.num_stages, pipeline_size)
    of_features = known_costs(
        attention=attention, output_layer=output, offload=copied, unshard=unshard, reduce_grad=reduced
    )
    return replace(costs, **of_features)


def _collective_along(given_times: tuple[float, ...] | None, num_stages: int, pipeline_size: int) -> tuple[float, ...]:
    """The time of a collective on each stage. A single number is the time of one rank's share of the model."""
    times_of = given_times or (0.0,)
    return regrouped(times_of if len(times_of) > 1 else (pipeline_size * times_of[0],), num_stages)


def _copies_along(args: argparse.Namespace, shape: ModelShape | None, pipeline_size: int) -> tuple[float, ...]:
    if args.offload_bandwidth is None:
        copies = args.offload_ms or (0.0,)
        return copies if len(copies) > 1 else (pipeline_size * copies[0],)
    refuse(args, ["offload_ms"], "and --offload-bandwidth both give the time of a copy; give only one of them")
    if shape is None:
        raise UsageError("--offload-bandwidth needs the shape of the model: --layers, --hidden-size, --seq-length")
    if args.offload_bandwidth == 0:
        raise UsageError("--offload-bandwidth must be above 0")
    return (shape.num_layers * shape.layer_bytes / (args.offload_bandwidth * _GB / 1e3),)


def _times_along(args: argparse.Namespace, pipeline_size: int, num_chunks: int) -> StageCosts:
    lists = {option(args, name): values for name, values in given(args, _TIMES).items()}
    if not lists:
        stages = float(pipeline_size * num_chunks)
        return StageCosts.uniform(1, stages, stages, stages)
    if "--forward-ms" not in lists or "--backward-ms" not in lists:
        raise UsageError("--forward-ms and --backward-ms go together")
    lengths = {name: len(values) for name, values in lists.items() if len(values) > 1}
    if len(set(lengths.values())) > 1:
        lengths_given = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UsageError(f"lists of times must have the same length; {lengths_given}")
    longest = max(lengths.values(), default=1)  # a single number among lists is the time of every stage
    forward, backward, *rest = (v if len(v) == longest else v * longest for v in lists.values())
    (weight,) = rest or (tuple(b / 2 for b in backward),)
    if not rest:
        backward = weight
    if longest == 1:
        return StageCosts.uniform(1, *(pipeline_size * part[0] for part in (forward, backward, weight)))
    return StageCosts.per_stage(forward, backward, weight)


def network(args: argparse.Namespace, shape: ModelShape | None, pipeline_size: int) -> Network:
    """The links. Raises UsageError as ``check_links`` does."""
    of_model = 0.0 if shape is None else shape.message_bytes
    size = of_model if args.activation_mb is None else args.activation_mb * 1e6
    check_links(args, size, pipeline_size)
    bandwidth = math.inf if args.bandwidth is None else args.bandwidth * _GB / 1e3  # bytes per millisecond
    return Network(size, link=Link(args.p2p_ms or 0.0, bandwidth), links=dict(args.link), gloo=args.gloo)


def check_links(args: argparse.Namespace, message: float, pipeline_size: int) -> None:
    """Raises UsageError for a bandwidth of 0, for a bandwidth without a message size, and for a link between ranks that
    do not exist."""
    for (source, target), _ in args.link:
        if source == target or max(source, target) >= pipeline_size:
            raise UsageError(
                f"--link {source}-{target} is not a link between two of the ranks 0 to {pipeline_size - 1}"
            )
    if args.bandwidth == 0:
        raise UsageError("--bandwidth must be above 0")
    if message == 0 and args.bandwidth is not None:
        raise UsageError("--bandwidth needs the size of a message: --activation-mb, or the shape of the model")


def model_shape(args: argparse.Namespace) -> ModelShape | None:
    """The shape of the model; None if it is not given. Raises UsageError if only a part is given."""
    parts = given(args, MODEL)
    if not parts:
        return None
    missing = [option(args, name) for name in _NEEDED if name not in parts]
    if missing:
        raise UsageError(f"the shape of the model also needs {' and '.join(missing)}")
    if args.tensor_parallel in (None, 1):
        refuse(args, ["sequence_parallel"], "needs --tensor-parallel above 1")
    return ModelShape(**parts)


def refuse_copies(args: argparse.Namespace, schedule: str, offloads: bool, shards: bool = False) -> None:
    """Raises UsageError if the time of copies or collectives is given, but the schedule has none."""
    if not offloads:
        refuse(args, COPIES, f"is for copies to host memory, but {schedule} has none here")
    if not shards:
        refuse(args, COLLECTIVES, "is for collectives of replicas, which need --fsdp-collectives")


def costs_of(
    args: argparse.Namespace,
    spec: PlanSpec,
    traced: Findings | None,
    shape: ModelShape | None,
    of_one_model: bool = False,
) -> tuple[StageCosts, Network]:
    """The costs of compute and transfers, from the trace or the options. If no costs are given, F, I and W take 1 slot
    on each stage; with ``of_one_model`` they take P slots for the whole model.
    """
    stages = spec.pipeline_size * spec.num_chunks
    if traced is not None:
        return traced.costs.regrouped(stages), traced.network
    if isinstance(spec, ModulesSpec) and not given(args, _TIMES):
        return costs_of_modules(spec.graph), network(args, shape, spec.pipeline_size)
    costs = cost_profile(args, shape, spec.pipeline_size, 1 if of_one_model else spec.num_chunks, spec.num_parts)
    return costs.regrouped(stages), network(args, shape, spec.pipeline_size)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose a run, a pipeline and a step."""
    parser.add_argument("--run", dest="run_name", metavar="RUN", help="name of the run, if the folder has several")
    parser.add_argument("--rank", type=whole, metavar="N", help="the pipeline of this global rank; default 0")
    parser.add_argument("--step", type=whole, metavar="N", help="one step; default all steps of the last plan")


def add_from_trace_option(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Adds ``--from-trace FOLDER``, and the options that choose a run, a pipeline and a step in it."""
    parser.add_argument("--from-trace", metavar="FOLDER", help=help_text)
    add_run_options(parser)


def traced_findings(args: argparse.Namespace) -> Findings | None:
    """The findings in the traces that --from-trace names; None without that option."""
    if args.from_trace is None:
        refuse(args, RUN, "needs --from-trace: it chooses among its traces")
        return None
    refuse(args, COSTS, "does not go with --from-trace: the costs are those of the trace")
    return analyse(load_run(args.from_trace, args.run_name, args.rank or 0), args.step)


def is_on_gloo(traced: Findings | None) -> bool:
    """Whether the traced run was on gloo."""
    return traced is not None and traced.network.gloo


def timed_rules(args: argparse.Namespace, plan: Plan, network: Network) -> tuple[str, ...]:
    """The device rules under which ``plan`` is simulated: the given ones, none on gloo, otherwise those that the plan
    was made for.
    """
    if args.device is not None:
        return checked_device(args.device)
    return () if network.gloo else plan.spec.device
