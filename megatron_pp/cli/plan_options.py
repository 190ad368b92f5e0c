"""Options that name a plan, and the plans that they name."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_pp.cli.errors import RefusedError, UsageError
from megatron_pp.cli.terminal import print_line
from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import lowered_plan
from megatron_pp.plan.family import Announce
from megatron_pp.plan.orders import OLD_NAMES, SCHEDULES
from megatron_pp.plan.schedule_file import find_family
from megatron_pp.plan.serialize import load_plan
from megatron_pp.plan.sim.naive import NAIVE, naive_plan
from megatron_pp.plan.spec import (
    CHANNELS,
    DEVICE_RULES,
    EXPLICIT,
    HOOKS,
    ONE_WAY,
    OVERLAP,
    POLICIES,
    Plan,
    PlanSpec,
    checked_device,
)
from megatron_pp.plan.verifier import verify

_DEFAULT_SCHEDULE = "1f1b"
_DEFAULT_RANKS = 4
_NAMING = ("schedule", "pipeline_size", "num_chunks", "num_microbatches")
_LOWERING = ("policy", "channels", "variable_shapes", "release_after", "lookahead", "grad_sync", "param_sync", "device")


def add_plan_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """``several``: schedules, chunks and microbatches may be lists, as for a comparison."""
    group = parser.add_argument_group("plan", "a schedule by name and size, or --import FILE")
    many = " (or a list: a,b,c)" if several else ""
    number: Any = whole_list if several else whole
    names = f"{', '.join(SCHEDULES)}, or {NAIVE}{many}; default {_DEFAULT_SCHEDULE}"
    group.add_argument("-s", "--schedule", metavar="NAME", help=names)
    group.add_argument("-P", "--pipeline-size", type=whole, metavar="P", help="ranks; default 4")
    group.add_argument("-V", "--num-chunks", type=number, metavar="V", help=f"model chunks a rank{many}")
    group.add_argument("-M", "--num-microbatches", type=number, metavar="M", help=f"default 2 P{many}")
    group.add_argument("--group-size", type=whole, default=0, metavar="G", help="microbatches a chunk; default P")
    group.add_argument("--policy", choices=POLICIES, default=OVERLAP, help="how transfers go out; default overlap")
    group.add_argument("--channels", choices=CHANNELS, default=ONE_WAY, help="default one_way")
    group.add_argument("--forward-only", action="store_true", help="evaluation: forwards alone")
    group.add_argument("--variable-shapes", action="store_true", help="shapes travel ahead of the tensors")
    group.add_argument("--release-after", type=whole, default=1, metavar="N", help="slots from a send to its release")
    group.add_argument("--lookahead", type=whole, default=1, metavar="N", help="slots that a receive is posted ahead")
    group.add_argument(
        "--device",
        action="extend",
        type=_rules,
        default=[],
        metavar="RULE",
        help=f"rules that hold where it runs, {', '.join(DEVICE_RULES)} (or a list: a,b,c): the plan is lowered for "
        "them and verified under them together; default rendezvous, which always holds",
    )
    group.add_argument("--grad-sync", choices=(HOOKS, EXPLICIT), default=HOOKS)
    group.add_argument("--param-sync", action="store_true", help="with PARAM_SYNC marks")
    imported = "a plan in our JSON or PyTorch's CSV (where it is compute-only, lowered as --policy and --channels say)"
    group.add_argument("--import", dest="source", metavar="FILE", help=imported)


def whole(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _rules(text: str) -> tuple[str, ...]:
    """Rules of a device with commas between them, for argparse."""
    try:
        return checked_device(text.split(","))
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def whole_list(text: str) -> list[int]:
    """Whole numbers with commas between them, for argparse."""
    return [whole(part) for part in text.split(",")]


def names_no_plan(args: argparse.Namespace) -> bool:
    """Whether the options leave the plan to the command."""
    return all(getattr(args, name) is None for name in ("source", *_NAMING))


def single_plan(args: argparse.Namespace) -> Plan:
    """The one plan that the options name, not verified. Raises PlanError, UsageError."""
    if args.source is not None:
        return _imported(args)
    spec = _spec(args, args.schedule or _DEFAULT_SCHEDULE, _one(args.num_chunks), _one(args.num_microbatches))
    return named_plan(spec, partial(_note, args))


def verified_single_plan(args: argparse.Namespace) -> Plan:
    """The one plan that the options name. Raises RefusedError where it does not verify."""
    return verified(single_plan(args))


def verified(plan: Plan) -> Plan:
    """``plan``. Raises RefusedError where it does not verify."""
    try:
        verify(plan)
    except PlanError as error:
        raise RefusedError(f"{plan.spec.describe()}: refused: {error}") from error
    return plan


def named_plan(spec: PlanSpec, announce: Announce | None = None) -> Plan:
    """The plan of a family, or the naive one, before it is verified."""
    return naive_plan(spec) if spec.schedule == NAIVE else lowered_plan(spec, announce)


def _note(args: argparse.Namespace, text: str) -> None:
    print_line(args.console_errors, f"note: {text}")


def listed_specs(args: argparse.Namespace, names: Sequence[str]) -> Iterator[PlanSpec]:
    """Every combination of schedule, chunks and microbatches that the options list. Families that fix V have theirs."""
    for name in names:
        fixed = SCHEDULES[name].chunks if name in SCHEDULES else None
        for v in [fixed] if fixed is not None else args.num_chunks or [None]:
            for m in args.num_microbatches or [None]:
                yield _spec(args, name, v, m)


def schedule_names(text: str | None) -> list[str]:
    """The names in a comma list; ``all`` stands for every family. Raises PlanError for one that is none."""
    names = [name.strip() for name in (text or _DEFAULT_SCHEDULE).split(",")]
    for name in names:
        if name not in ("all", NAIVE):
            find_family(name)
    return [known for name in names for known in (SCHEDULES if name == "all" else [OLD_NAMES.get(name, name)])]


def _imported(args: argparse.Namespace) -> Plan:
    clash = next((name for name in _NAMING if getattr(args, name) is not None), None)
    if clash is not None:
        raise UsageError(f"--import brings its own {clash.replace('_', ' ')}; leave --{clash.replace('_', '-')} out")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        plan = load_plan(args.source, **_given(args, _LOWERING))
    for note in notes:
        _note(args, str(note.message))
    return replace(plan, spec=replace(plan.spec, device=tuple(args.device))) if args.device else plan


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def _one(value: list[int] | int | None) -> int | None:
    """The number where only one makes sense."""
    if isinstance(value, list):
        if len(value) != 1:
            raise UsageError("several numbers of chunks or microbatches are for --compare and --style grid")
        return value[0]
    return value


def _spec(args: argparse.Namespace, name: str, chunks: int | None, microbatches: int | None) -> PlanSpec:
    name = OLD_NAMES.get(name, name)
    family = SCHEDULES.get(name)
    size = _DEFAULT_RANKS if args.pipeline_size is None else args.pipeline_size
    if chunks is None:
        default = 1 if name == NAIVE else 2
        chunks = default if family is None or family.chunks is None else family.chunks
    options = _given(args, ("group_size", "forward_only", *_LOWERING))
    return PlanSpec(name, size, chunks, 2 * size if microbatches is None else microbatches, **options)
