"""The routes of named tensors, which later stages use in addition to their input. They are sent from stage to stage,
and each rank may keep them.

A named tensor moves like the activations, a hop at a time: from stage s to s + 1, behind the stage's own output. Its
gradient moves over the same edges in the other direction. The hops depend on what a rank keeps (``CACHES``):

``none``      A rank keeps nothing: every hop up to the last user moves the tensor.
``received``  A rank keeps received tensors, so none is sent to it twice (arXiv 2603.15031, section 4.1). A tensor that
              the rank has made comes back once, if a later chunk of the rank uses it.
``all``       A rank also keeps tensors that it has made. This needs the fewest hops.

A rank's chunks share one copy (``Held``). The rank's gradient of it is one sum, which goes back over the hop that
brought the tensor. Additions are in the same order under every schedule: from the last stage to the first, and at each
stage first the sum from the stage after it, then its own gradient.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from megatron_pp.common.names import unknown
from megatron_pp.errors import PlanError
from megatron_pp.feature_table import ALL, CACHES, NO_CACHE
from megatron_pp.features.skip_tensors.skip_instructions import DROP
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import BACKWARD_OPS, FORWARD, FREE_F, SEND_F, Instruction, each
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import Plan

BLOCKS = "blocks"
"""A value in place of a declaration: every stage makes a block that all later stages use (Attention Residuals)."""

_NAME = re.compile(r"[A-Za-z_]\w{0,63}\Z", re.ASCII)
_ENTRY = re.compile(r"(\w+)=(\d{1,9})>(\d{1,9}(?:,\d{1,9})*)(\s+no_grad)?\Z", re.ASCII)


class SkipTensor(NamedTuple):
    """A tensor that stage ``source`` makes and the later stages ``users`` use.

    gradient  whether it has a gradient, which goes back to ``source``
    shape     its shape in one microbatch; None: that of the activations between stages. Not used if shapes vary
    dtype     the name of its dtype in torch, as in "int64"; None: config.pipeline_dtype"""

    name: str
    source: int
    users: tuple[int, ...]
    gradient: bool = True
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


def skip_tensors(given: str | Iterable[SkipTensor], num_stages: int) -> tuple[SkipTensor, ...]:
    """The tensors that ``given`` declares: such tensors; or as text, ``NAME=SOURCE>USER,USER`` with semicolons between
    them and ``no_grad`` behind one without a gradient; or ``blocks``. Raises PlanError."""
    if given == BLOCKS:
        return stage_blocks(num_stages)
    found = [_parsed(entry) for entry in given.split(";")] if isinstance(given, str) and given.strip() else given
    return checked_tensors([SkipTensor(*one) for one in found or ()], num_stages)


def stage_blocks(num_stages: int) -> tuple[SkipTensor, ...]:
    """``block0`` of stage 0 and so on, each used by all later stages; by name, as those that are declared."""
    last = num_stages - 1
    return tuple(sorted(SkipTensor(f"block{s}", s, tuple(range(s + 1, num_stages))) for s in range(last)))


def declared_tensors(produces: Sequence[Collection[str]], uses: Sequence[Collection[str]]) -> tuple[SkipTensor, ...]:
    """The tensors by the names that each stage produces and uses, in the order of stages. Raises PlanError for a name
    that several stages produce, or that is used and not produced."""
    sources: dict[str, int] = {}
    for stage, names in enumerate(produces):
        for name in names:
            if sources.setdefault(name, stage) != stage:
                raise PlanError(f"tensor {name} is produced by stages {sources[name]} and {stage}; one stage makes it")
    users: dict[str, list[int]] = {name: [] for name in sources}
    for stage, names in enumerate(uses):
        for name in names:
            if name not in users:
                raise PlanError(f"stage {stage} uses tensor {name}, which no stage produces")
            users[name].append(stage)
    found = [SkipTensor(name, sources[name], tuple(used)) for name, used in users.items()]
    return checked_tensors(found, max(len(produces), len(uses)))


def checked_tensors(tensors: Iterable[SkipTensor], num_stages: int) -> tuple[SkipTensor, ...]:
    """``tensors`` sorted by name, with their users sorted. Raises PlanError for an impossible one."""
    found = sorted(one._replace(users=tuple(sorted(set(one.users)))) for one in tensors)
    for name, count in Counter(one.name for one in found).items():
        if not _NAME.match(name):
            raise PlanError(f"{name!r} is no name of a tensor: letters, digits and underscores, at most 64")
        if count > 1:
            raise PlanError(f"tensor {name} is declared {count} times; once will do")
    for one in found:
        if not 0 <= one.source < num_stages:
            raise PlanError(f"tensor {one.name}: there is no stage {one.source}; stages are 0..{num_stages - 1}")
        wrong = [user for user in one.users if not one.source < user < num_stages]
        if wrong or not one.users:
            given = f"stage {wrong[0]} uses it" if wrong else "no stage uses it"
            raise PlanError(
                f"tensor {one.name} of stage {one.source}: {given}; only stages behind it may, up to {num_stages - 1}"
            )
    return tuple(found)


def _parsed(text: str) -> SkipTensor:
    found = _ENTRY.match(text.strip())
    if found is None:
        raise PlanError(
            f"{text.strip()[:60]!r} declares no tensor; it would look like skip=0>3, mask=0>1,2,3 no_grad, or {BLOCKS}"
        )
    name, source, users, no_grad = found.groups()
    return SkipTensor(name, int(source), tuple(map(int, users.split(","))), not no_grad)


@dataclass
class Held:
    """A tensor on one rank. ``stage`` makes it or receives it. ``users`` and ``sends`` are the stages of this rank that
    use it and that send it on, in order."""

    tensor: SkipTensor
    stage: int
    users: list[int] = field(default_factory=list)
    sends: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def is_made_here(self) -> bool:
        return self.stage == self.tensor.source


@dataclass(frozen=True)
class Routes:
    """The routes of named tensors, for each stage.

    made       tensors that the stage makes
    came       tensors that the edge to the stage moves, by name in order
    used       tensors that the stage uses, by name
    sent       tensors that the edge from the stage moves, by name in order"""

    made: Sequence[Mapping[str, Held]]
    came: Sequence[Mapping[str, Held]]
    used: Sequence[Mapping[str, Held]]
    sent: Sequence[Mapping[str, Held]]

    def over(self, kind: str, stage: int) -> tuple[str, ...]:
        """The names on the edge from ``stage`` to the one after it, of activations or of gradients."""
        found = self.sent[stage].items()
        return tuple(name for name, held in found if kind == FORWARD or held.tensor.gradient)

    def of(self, at: Instruction) -> Held | None:
        """The tensor, on its rank, of a transfer or DROP with a name; None if there is none."""
        tables = (self.made, self.came) if at.op == DROP else (self.sent,) if at.op in _OF_SENT else (self.came,)
        return next((table[at.stage][at.tensor] for table in tables if at.tensor in table[at.stage]), None)


_OF_SENT = frozenset({SEND_F, FREE_F, ins.RECV_B, ins.WAIT_B})


@lru_cache(maxsize=256)
def routes_of(tensors: tuple[SkipTensor, ...], cache: str, placement: Placement) -> Routes:
    """The hops of ``tensors``. Raises PlanError for a stage that does not exist, and for an unknown cache."""
    if cache not in CACHES:
        raise PlanError(unknown("cache of skip tensors", cache, CACHES))
    tables: list[list[dict[str, Held]]] = [[{} for _ in range(placement.num_stages)] for _ in range(4)]
    made, came, used, sent = tables
    for tensor in checked_tensors(tensors, placement.num_stages):
        for held in _route(tensor, cache, placement):
            (made if held.is_made_here else came)[held.stage][tensor.name] = held
            for table, stages in ((used, held.users), (sent, held.sends)):
                for stage in stages:
                    table[stage][tensor.name] = held
    return Routes(made, came, used, sent)


def routes_in(plan: Plan) -> Routes | None:
    """The routes of the plan's named tensors; None if there are none."""
    tensors = plan.spec.skip_tensors
    cache = plan.spec.skip_cache
    return routes_of(tensors, cache, plan.placement) if tensors else None


def _route(tensor: SkipTensor, cache: str, placement: Placement) -> list[Held]:
    """Walk from the source to the last user; a rank that keeps the tensor needs no hop. Hops that bring it to where it
    is neither used nor sent on are left out again."""
    here = Held(tensor, tensor.source)
    found = [here]
    kept = dict[int, Held]()
    if cache == ALL:
        kept[placement.homes[tensor.source][0]] = here
    brought: dict[int, Held] = {}  # stage of a hop's sender -> the copy that it sends
    for stage in range(tensor.source, tensor.users[-1]):
        if placement.crosses_ranks(stage):
            rank = placement.homes[stage + 1][0]
            there = kept.get(rank)
            if there is None:
                brought[stage] = here
                there = Held(tensor, stage + 1)
                found.append(there)
                if cache != NO_CACHE:
                    kept[rank] = there
            here = there
        if stage + 1 in tensor.users:
            here.users.append(stage + 1)
    for there in reversed(found[1:]):
        if there.users or there.sends:
            brought[there.stage - 1].sends.insert(0, there.stage - 1)
    return [held for held in found if held.users or held.sends]


def with_drops(
    program: Iterable[Instruction], routes: Routes, placement: Placement, forward_only: bool
) -> list[Instruction]:
    """The program with a DROP of each named tensor right behind the last instruction on this rank that needs it: the
    end of its sends, and the backwards (in evaluation, the forwards) of its users."""
    left: defaultdict[tuple[int, str, int, int], int] = defaultdict(int)
    result = []
    for entry in program:
        result.append(entry)
        for at in each((entry,)):
            for held in _released_by(at, routes, forward_only):
                key = held.stage, held.name, at.mb, at.part
                left[key] += 1
                if left[key] == len(held.sends) + len(held.users):
                    del left[key]
                    chunk = placement.homes[held.stage][1]
                    result.append(ins.placed(DROP, held.stage, at.mb, ins.NONE, chunk, at.part, held.name))
    return result


def _released_by(at: Instruction, routes: Routes, forward_only: bool) -> Iterable[Held]:
    """The tensors whose number of uses ``at`` lowers by one."""
    if at.op == FREE_F and at.tensor:
        return (routes.sent[at.stage][at.tensor],)
    return routes.used[at.stage].values() if ends_use(at.op, forward_only) else ()


def ends_use(op: str, forward_only: bool) -> bool:
    """Whether a stage's ``op`` is the last that reads the tensors that it uses."""
    return op == FORWARD if forward_only else op in BACKWARD_OPS


class Traffic(NamedTuple):
    """The number of named tensors of one microbatch that are sent to later stages, in total and on the busiest hop."""

    messages: int
    peak: int


def traffic_of(programs: Iterable[Iterable[Instruction]]) -> Traffic:
    """The traffic in a plan's programs."""
    sent = (at for program in programs for at in each(program) if at.op == SEND_F and at.tensor and at.mb == 0)
    hops = Counter(at.stage for at in sent if at.part <= 0)
    return Traffic(hops.total(), max(hops.values(), default=0))
