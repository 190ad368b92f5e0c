"""Options that name a plan, and the plans that they name."""

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_pp.common.names import unknown
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.config.rules import schedule_name
from megatron_pp.errors import PlanError
from megatron_pp.feature_table import CACHES, FSDP_COLLECTIVES
from megatron_pp.features.modules.modules_plan import ModulesSpec, lowered_modules, modules_spec
from megatron_pp.features.modules.modules_text import graphs_in
from megatron_pp.features.modules.modules_verify import verify_modules
from megatron_pp.features.skip_tensors.routes import Traffic, skip_tensors, traffic_of
from megatron_pp.plan.builder import lowered_plan
from megatron_pp.plan.io.serialize import load_plan
from megatron_pp.plan.ir.feature import hooks_of, known_settings
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.ir.spec import (
    CHANNELS,
    DEVICE_RULES,
    DEVICE_SYNC,
    EXPLICIT,
    HOOKS,
    ON_NCCL,
    ONE_WAY,
    OVERLAP,
    POLICIES,
    Plan,
    PlanSpec,
    Shape,
    checked_device,
)
from megatron_pp.plan.lower.lowering import lowered
from megatron_pp.plan.orders import SCHEDULES, choices, find_family, names_a_file
from megatron_pp.plan.orders.family import Family
from megatron_pp.plan.verify.verifier import Verdict, verify
from megatron_pp.planner.naive import NAIVE, NAIVE_FAMILY, naive_orders
from megatron_pp.tools.cli.errors import UsageError, refusing
from megatron_pp.tools.cli.options.parser import given, option, refuse

_DEFAULT_RANKS = 4
_SIZES = ("pipeline_size", "num_chunks", "num_microbatches", "group_size", "slices", "offload_chunks")
NAMING = ("schedule", *_SIZES, "modules")
_LOWERING = ("policy", "channels", "forward_only", "variable_shapes", "release_after", "lookahead", "grad_sync")
_FSDP = ("fsdp_collectives", "fsdp_max_active_stages")
LOWERING = (*_LOWERING, "param_sync", "device", "offload_slots", "skip_tensors", "skip_cache", *_FSDP)
PLAN_OPTIONS = (*NAMING, *LOWERING, "source")
_NOT_OF_MODULES = ("from_trace", "num_layers", "keep_outputs", "optimizer_bypass")
_OF_MODULES = ("num_microbatches", "modules", "forward_only", "variable_shapes", "release_after", "grad_sync", "device")
# The cache of named tensors, in words.
_CACHE_WORDS = {
    "none": "without a cache",
    "received": "if ranks keep received ones",
    "all": "if ranks also keep their own",
}


def add_plan_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Adds the options. ``several``: the command accepts lists of schedules, chunks and microbatches."""
    group = parser.add_argument_group("plan", "a schedule by name and size, or --import FILE")
    many = " (or a list: a,b,c)" if several else ""
    files = f"your own MODULE:NAME, or a .csv or .json file, which has its own P, V and M{many}"
    names = f"{', '.join(SCHEDULES)}, {NAIVE}, {files}"
    default = f"default {schedule_name(None, 1, ())}, or {_schedule_of_slices(None)} with --sequence-slices"
    group.add_argument("-s", "--schedule", metavar="NAME", help=f"{names}; {default}")
    ranks = help_of("pipeline_model_parallel_size", _DEFAULT_RANKS)
    group.add_argument("-P", "--pipeline-size", type=count, metavar="P", help=ranks)
    chunks = help_of("virtual_pipeline_model_parallel_size", many=many)
    group.add_argument("-V", "--num-chunks", type=counts, metavar="V", help=chunks)
    group.add_argument("-M", "--num-microbatches", type=counts, metavar="M", help=f"default 2 P{many}")
    group.add_argument("--group-size", type=whole, metavar="G", help=help_of("microbatch_group_size_per_vp_stage"))
    group.add_argument("--sequence-slices", dest="slices", type=count, metavar="N", help=help_of("sequence_slices"))
    group.add_argument("--offload-chunks", type=whole, metavar="N", help=help_of("offload_chunks"))
    group.add_argument("--offload-slots", type=count, metavar="N", help=help_of("offload_slots"))
    collectives = help_of("fsdp_collectives")
    group.add_argument("--fsdp-collectives", choices=FSDP_COLLECTIVES, help=collectives)
    group.add_argument("--fsdp-max-active-stages", type=count, metavar="N", help=help_of("fsdp_max_active_stages"))
    group.add_argument("--policy", choices=POLICIES, help=f"how transfers are issued; default {PlanSpec.policy}")
    group.add_argument("--channels", choices=CHANNELS, help=help_of("p2p_channels"))
    group.add_argument("--forward-only", action="store_true", help="evaluation: forwards only")
    group.add_argument("--variable-shapes", action="store_true", help=help_of("variable_seq_lengths"))
    release = f"slots from a send to its release; default {PlanSpec.release_after}"
    group.add_argument("--release-after", type=count, metavar="N", help=release)
    ahead = f"slots by which a receive is posted ahead; default {PlanSpec.lookahead}"
    group.add_argument("--lookahead", type=whole, metavar="N", help=ahead)
    rules = f"rules of the device that the plan runs on: {', '.join(DEVICE_RULES)} (or a list: a,b,c). The plan is "
    rules += "lowered for these rules and verified under all of them; default "
    rules += f"{' and '.join(ON_NCCL)}, as on NCCL; with --gloo only rendezvous, which always holds"
    group.add_argument("--device", action="extend", type=device_rules, metavar="RULE", help=rules)
    group.add_argument("--grad-sync", choices=(HOOKS, EXPLICIT), help=f"default {PlanSpec.grad_sync}")
    group.add_argument("--param-sync", action="store_true", help="add PARAM_SYNC marks")
    group.add_argument("--skip-tensors", metavar="TEXT", help=help_of("skip_tensors"))
    group.add_argument("--skip-cache", choices=CACHES, help=help_of("skip_cache"))
    of_modules = "several modules on their ranks, as 'vision=0/1; llm=2,3; vision>llm': / separates replicas, a comma "
    of_modules += "separates stages, + separates tensor-parallel ranks. llm#1*2/4=0,1 is chunk 1 of its ranks; its "
    of_modules += "forward takes 2 and its backward 4. It goes with -M and options that do not name a schedule"
    group.add_argument("--modules", metavar="TEXT", help=of_modules)
    imported = (
        "a plan in megatron_pp's JSON or PyTorch's CSV; if it is compute-only, --policy and --channels add transfers"
    )
    group.add_argument("--import", dest="source", metavar="FILE", help=imported)


def help_of(name: str, default: object = None, many: str = "") -> str:
    """The config's help for a field. In a command None means the default."""
    field = TransformerConfig.__dataclass_fields__[name]
    default = default or field.default
    text = field.metadata["help"].replace("; None: ", "; default ")
    return f"{text}{many}; default {default}" if default else f"{text}{many}"


def whole(text: str, least: int = 0) -> int:
    """The number of an argument: a whole number of at least ``least``."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to 999999999")
    return int(text)


def count(text: str) -> int:
    """The number of an argument: a whole number of at least 1."""
    return whole(text, 1)


def device_rules(text: str) -> tuple[str, ...]:
    """The device rules of an argument, with commas between them."""
    try:
        return checked_device(text.split(","))
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def rules_of(args: argparse.Namespace, on_gloo: bool = False) -> tuple[str, ...]:
    """The device rules that a plan is made for: the given ones, otherwise those of NCCL. With --gloo, or ``on_gloo``
    (the options name the trace of a run on gloo), there are none.
    """
    if args.device is not None:
        return checked_device(args.device)
    return () if on_gloo or getattr(args, "gloo", False) else ON_NCCL


def counts(text: str) -> list[int]:
    """The whole numbers of an argument, each at least 1, with commas between them."""
    return [count(part) for part in text.split(",")]


def single_plan(
    args: argparse.Namespace, fit: Callable[[PlanSpec], PlanSpec] = lambda spec: spec, on_gloo: bool = False
) -> Plan:
    """The single plan that the options name. It is not verified. ``fit`` may change its spec. ``on_gloo`` is that of
    ``rules_of``. Raises PlanError, UsageError and RefusedError.
    """
    if args.source is not None:
        return _imported(args, on_gloo)
    if args.modules is not None:
        return _of_modules(args)
    specs = list(listed_specs(args, named_schedules(args), on_gloo))
    if len(specs) > 1:
        raise UsageError(
            f"-s, -V and -M name {len(specs)} plans, but this command needs one; lists are for simulate --compare "
            "and draw"
        )
    return named_plan(fit(specs[0]))


def verified_single_plan(
    args: argparse.Namespace, fit: Callable[[PlanSpec], PlanSpec] = lambda spec: spec, on_gloo: bool = False
) -> Plan:
    """The single plan, verified. Raises as ``single_plan`` does, and RefusedError if the plan does not verify."""
    return verified(single_plan(args, fit, on_gloo), args.device)


def verified(plan: Plan, device: Sequence[str] | None = None) -> Plan:
    """``plan``, verified under ``device`` or the rules that it was lowered for. Raises RefusedError if it does not
    verify."""
    with refusing(plan.spec.describe()):
        verdict_of(plan, device=device)
    return plan


def verdict_of(plan: Plan, deallocate: bool = True, device: Sequence[str] | None = None) -> Verdict:
    """The result of ``verify``, or of ``verify_modules`` for a plan of several modules. Raises PlanError."""
    if isinstance(plan.spec, ModulesSpec):
        return verify_modules(plan, device)
    return verify(plan, deallocate=deallocate, device=device)


def named_plan(spec: PlanSpec) -> Plan:
    """The plan of a family or a schedule file, or the naive plan. It is not verified."""
    if spec.schedule == NAIVE:
        return lowered(spec, Placement(LOOP, spec.pipeline_size, 1), naive_orders(spec.shape))
    if names_a_file(spec.schedule):
        with refusing():
            return lowered_plan(spec)
    return lowered_plan(spec, warnings.warn)


def named_schedules(args: argparse.Namespace) -> list[str]:
    """The schedules of the option, or the default schedule. Raises as ``schedule_names`` does."""
    return schedule_names(
        schedule_name(args.schedule, 1, ()) if args.slices is None else _schedule_of_slices(args.schedule)
    )


def schedule_names(text: str) -> list[str]:
    """The names in a comma list. ``all`` means every family; ``MODULE:NAME`` is a family that importing the module
    registers. Raises PlanError for an unknown name.
    """
    names = [name.strip() for name in text.split(",")]
    names = [_imported_from(*name.split(":", 1)) if ":" in name else name for name in names]
    found = [known for name in names for known in (SCHEDULES if name == "all" else [name])]
    for name in found:
        _family(name)
    return found


def _imported_from(module: str, name: str) -> str:
    sys.path.insert(0, os.getcwd())  # as with ``python -m``
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"{module}:{name}: there is no module {error.name} in this folder, nor installed") from error
    finally:
        sys.path.pop(0)
    return name


def _family(name: str) -> Family:
    if name == NAIVE:
        return NAIVE_FAMILY
    if name not in SCHEDULES and not names_a_file(name):
        raise UsageError(unknown("schedule", name, [*SCHEDULES, NAIVE, "all"], choices()))
    with refusing():
        return find_family(name)


def listed_specs(args: argparse.Namespace, names: Sequence[str], on_gloo: bool = False) -> Iterator[PlanSpec]:
    """All combinations of schedule, chunks and microbatches that the options list. A family with a fixed V has only
    that V. A schedule file determines P and M of all. Raises UsageError for an option that applies to none of them.
    """
    families = [_family(name) for name in names]
    _check_sizes(args, families)
    _check_lowering(args, families)
    size = pipeline_size(args, names)
    counts = args.num_microbatches
    if counts is None:
        counts = next(([family.shape.num_microbatches] for family in families if family.shape), [2 * size])
    options = given(args, ("group_size", "offload_chunks", *LOWERING)) | {"device": rules_of(args, on_gloo)}
    for family in families:
        wanted = 1 if args.slices is None or not family.sliced else args.slices
        slices = family.shape.num_parts if family.shape else wanted
        for chunks in _chunks(args, family):
            for microbatches in counts:
                spec = PlanSpec(family.name, size, chunks, microbatches, digest=family.digest, **options)
                yield replace(spec, **known_settings(slices=slices))


def _schedule_of_slices(schedule: str | None) -> str:
    return schedule_name(schedule, 1, hooks_of([("slices", 2)]))


def pipeline_size(args: argparse.Namespace, names: Sequence[str]) -> int:
    """The given P; otherwise that of the first file among ``names``, or the default."""
    if args.pipeline_size is not None:
        return int(args.pipeline_size)
    shapes = (_family(name).shape for name in names)
    return next((shape.pipeline_size for shape in shapes if shape), _DEFAULT_RANKS)


def _check_sizes(args: argparse.Namespace, families: Sequence[Family]) -> None:
    """Raises UsageError if the given sizes do not fit the schedules: at least one must have V, and a file has its own P
    and M."""
    for chunks in args.num_chunks or ():
        if all(family.chunks not in (None, chunks) for family in families):
            first = families[0]
            fitting = ", ".join(name for name, other in SCHEDULES.items() if other.chunks in (None, chunks))
            raise UsageError(
                f"schedule {first.name} has {first.chunks} model chunk(s) a rank, not {chunks}; leave -V out, or use "
                f"a schedule with {chunks}: {fitting}"
            )
    shapes = [(family.name, family.shape) for family in families if family.shape]
    for name, shape in shapes:
        for mine, what, way, sizes in (
            (shape.pipeline_size, "ranks", "-P", [args.pipeline_size]),
            (shape.num_parts, "slice(s) a sequence", option(args, "slices"), [args.slices]),
            (shape.num_microbatches, "microbatches", "-M", args.num_microbatches or ()),
        ):
            for size in sizes:
                if size not in (None, mine):
                    raise UsageError(f"{name} is a schedule of {mine} {what}, but {way} is {size}")
        one = shapes[0][1]
        other = shape
        if (one.pipeline_size, one.num_microbatches) != (other.pipeline_size, other.num_microbatches):
            raise UsageError(
                f"{shapes[0][0]} is a schedule of {one.num_microbatches} microbatches on {one.pipeline_size} ranks, "
                f"{name} of {other.num_microbatches} on {other.pipeline_size}; they cannot be compared"
            )


def _check_lowering(args: argparse.Namespace, families: Sequence[Family]) -> None:
    """Raises UsageError for an option that would have no effect."""
    for name, what, field in (("group_size", "with groups", "grouped"), ("slices", "of slices", "sliced")):
        if not any(getattr(family, field) for family in families):
            having = ", ".join(known for known, family in SCHEDULES.items() if getattr(family, field))
            refuse(args, [name], f"is for schedules {what} ({having}), not {families[0].name}")
    if args.forward_only:
        refuse(args, ["offload_chunks"], "does not go with --forward-only, which keeps no activations")
    if not args.offload_chunks and not any(map(_offloads, families)):
        refuse(args, ["offload_slots"], f"is for schedules that offload; {families[0].name} needs --offload-chunks")
    if args.fsdp_collectives is None:
        refuse(args, ["fsdp_max_active_stages"], "needs --fsdp-collectives")
    elif NAIVE_FAMILY in families:
        refuse(args, ["fsdp_collectives"], f"does not go with the schedule {NAIVE}")
    if args.policy not in (None, OVERLAP):
        refuse(args, ["release_after", "lookahead"], f"is for --policy overlap, not {args.policy}")
    if args.channels not in (None, ONE_WAY):
        refuse(args, ["lookahead"], f"is for --channels one_way, not {args.channels}")
    if args.skip_tensors is None:
        refuse(args, ["skip_cache"], "needs --skip-tensors")
    if args.variable_shapes:
        refuse(args, ["lookahead"], "does not go with --variable-shapes, which waits for each receive at once")
    if args.forward_only:
        refuse(args, ["grad_sync"], "does not go with --forward-only, which has no gradients")
    if DEVICE_SYNC in rules_of(args):
        refuse(args, ["lookahead"], f"does not go with --device {DEVICE_SYNC}, which posts no receive ahead")
    if all(_chunks(args, family) == [1] for family in families):
        refuse(args, ["param_sync"], "needs several model chunks a rank; here each rank has one")


def _offloads(family: Family) -> bool:
    """Whether the family offloads by itself."""
    return bool(family.added(family.shape or Shape(2, 2, 2, 2)))


def _chunks(args: argparse.Namespace, family: Family) -> list[int]:
    """The numbers of chunks to take of ``family``."""
    return [family.chunks] if family.chunks is not None else args.num_chunks or [2]


def _imported(args: argparse.Namespace, on_gloo: bool) -> Plan:
    """The plan of --import. Raises UsageError for options that do not fit the plan."""
    for name in given(args, NAMING):
        raise UsageError(f"the plan of --import has its own {name.replace('_', ' ')}; leave {option(args, name)} out")
    lowering: dict[str, Any] = given(args, LOWERING)
    with refusing():
        plan = load_plan(args.source, **(lowering | {"device": rules_of(args, on_gloo)}))
    for name, value in lowering.items():
        mine = getattr(plan.spec, name)
        if name == "skip_tensors":
            value = skip_tensors(value, plan.placement.num_stages)
        if name != "device" and mine != value:
            raise UsageError(f"{option(args, name)} is {value}, but the plan in {args.source} was lowered with {mine}")
    return plan


def _of_modules(args: argparse.Namespace) -> Plan:
    """The plan of --modules. It is not verified."""
    others = {*PLAN_OPTIONS, *_NOT_OF_MODULES} - {*_OF_MODULES}
    refuse(args, sorted(name for name in others if name in args), "does not go with --modules")
    if args.forward_only:
        refuse(args, ["grad_sync"], "does not go with --forward-only, which has no gradients")
    graphs = graphs_in(args.modules)
    if len(graphs) > 1:
        found = "; ".join(map(str, graphs))
        raise UsageError(f"--modules has {len(graphs)} pipelines without messages between them ({found}); give one")
    sizes = args.num_microbatches or [2 * graphs[0].size]
    if len(sizes) > 1:
        raise UsageError(f"-M has {len(sizes)} numbers of microbatches; with --modules it needs one")
    spec = modules_spec(graphs[0], sizes[0], **(given(args, _OF_MODULES[2:]) | {"device": rules_of(args)}))
    with refusing(spec.describe()):
        return lowered_modules(spec)


def skip_facts(plan: Plan) -> dict[str, Any]:
    """The JSON facts about tensors that skip stages; empty if the plan has none."""
    if not plan.spec.skip_tensors:
        return {}
    counts = {cache: traffic._asdict() for cache, traffic in _by_cache(plan).items()}
    return {"skip_tensors": {"cache": plan.spec.skip_cache, **counts[plan.spec.skip_cache], "by_cache": counts}}


def skip_sentences(plan: Plan) -> list[str]:
    """A line about tensors that skip stages; none if the plan has none."""
    if not plan.spec.skip_tensors:
        return []
    counts = _by_cache(plan)
    mine = counts.pop(plan.spec.skip_cache)
    others = (f"{_CACHE_WORDS[cache]} {of.messages} ({of.peak})" for cache, of in counts.items())
    words = f"{_CACHE_WORDS[plan.spec.skip_cache]}: {mine.messages} sent per microbatch, at most {mine.peak} on a hop"
    return [f"tensors to later stages, {words}; {', '.join(others)}"]


def _by_cache(plan: Plan) -> dict[str, Traffic]:
    plans = {cache: replace(plan.spec, skip_cache=cache) for cache in CACHES if cache != plan.spec.skip_cache}
    programs = {cache: lowered(spec, plan.placement, plan.orders).programs for cache, spec in plans.items()}
    programs[plan.spec.skip_cache] = plan.programs
    return {cache: traffic_of(programs[cache]) for cache in CACHES}
