"""Lists and estimates the candidates: every schedule with every number of chunks and microbatches that the question
allows. The estimates decide the order in which plans are built.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import lowered_plan
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.ir.spec import PlanSpec, Shape
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.orders.family import Family, Order
from megatron_pp.planner.bound import lower_bound
from megatron_pp.planner.timing import Kept, kept_states, order_time
from megatron_pp.tools.advise.fit import Fitted, Room, States, best_counts, fitted, stages_of
from megatron_pp.tools.advise.model import Model
from megatron_pp.tools.advise.pilots import PILOTS, continued
from megatron_pp.tools.advise.question import Question

_LOGITS = 2  # assumed microbatches between S and T, before a plan is known
_TENSORS = 4  # assumed pipeline tensors of a chunk without its stages' inputs, before a plan is known
_ROOM = 1.5  # memory of a search, in P microbatches; with more it rarely finds a shorter step
_SEEDS = {LOOP: ("1f1b", "interleaved_1f1b"), "v": ("v_half", "v_half")}  # with one chunk, with several


@dataclass(frozen=True)
class Candidate:
    """A pipeline that may be recommended. Other fields are those of ``PlanSpec``.

    micro_batch   sequences in a microbatch
    group_size    0 means the family's default
    memory_share  share of the device's memory that a search may fill
    """

    schedule: str
    num_chunks: int
    micro_batch: int
    num_microbatches: int
    policy: str
    group_size: int = 0
    slices: int = 1
    memory_share: float = 1.0
    offload_chunks: int = 0
    offload_slots: int = 1

    @property
    def family(self) -> Family:
        return SCHEDULES[self.schedule]

    @property
    def searches(self) -> bool:
        return self.family.search is not None

    @property
    def is_bounded(self) -> bool:
        """Whether the candidate is estimated by its lower bound."""
        return self.searches or bool(self.family.barriers)

    def placement(self, pipeline_size: int) -> Placement:
        return Placement(self.family.placement, pipeline_size, self.num_chunks, self.family.barriers)

    def model(self, question: Question) -> Model:
        """The model for microbatches of this size, without its output layer if that is split over all ranks."""
        model = question.model(self.micro_batch)
        return replace(model, layers=model.layers[:-1], output=model.layers[-1]) if self.family.barriers else model

    def shape(self, pipeline_size: int, most: int | None = None) -> Shape:
        """The shape of the pipeline, with at most ``most`` microbatches."""
        count = min(self.num_microbatches, most or self.num_microbatches)
        group = min(self.group_size or -(-pipeline_size // self.slices), count)
        return Shape(pipeline_size, self.num_chunks, count, group, self.slices)

    def forwards(self, pipeline_size: int, pilot: bool = False) -> int:
        """The number of forwards of a step on all stages and slices. With ``pilot``, of the longest order that is used
        for an estimate."""
        shape = self.shape(pipeline_size, PILOTS[-1] * pipeline_size if pilot else None)
        return pipeline_size * self.num_chunks * shape.num_microbatches * self.slices

    def work(self, pipeline_size: int) -> int:
        """The work to build, verify and simulate the plan, in forwards. It is the forwards of a step, and the forwards
        that would take the time of about V P passes over all ranks.
        """
        return self.forwards(pipeline_size) + self._turns(pipeline_size)

    def work_of_estimate(self, pipeline_size: int) -> int:
        """The work of the estimate, in forwards: for the pilots, for the bound, which has all microbatches, and for the
        whole order if a rank keeps more with each microbatch.
        """
        whole = self.forwards(pipeline_size)
        grows = self.family.repeats is None and not self.searches
        return self.forwards(pipeline_size, pilot=True) + whole * (1 + grows) + self._turns(pipeline_size) // 3

    def _turns(self, pipeline_size: int) -> int:
        """The work of these passes in forwards, as measured: a fiftieth of P squared for each chunk of a rank."""
        return pipeline_size**2 * (50 * (self.num_chunks - 1) + 1) // 50

    def __str__(self) -> str:
        slices = f" slices={self.slices}" if self.slices > 1 else ""
        group = f" group={self.group_size}" if self.group_size else ""
        memory = f" memory={self.memory_share:.0%}" if self.memory_share < 1 else ""
        offload = f" offload={self.offload_chunks}" if self.offload_chunks else ""
        return f"{self.schedule} V={self.num_chunks} M={self.num_microbatches}{slices}{group}{memory}{offload}"


@dataclass(frozen=True)
class Estimate:
    """The estimate of a candidate.

    cut      the model on its stages
    step     milliseconds, with free buffers and no queues
    peak     GB of the fullest rank
    bound    a lower bound in milliseconds of all plans on this placement with these costs
    refused  the reason if the candidate is impossible, otherwise empty
    """

    candidate: Candidate
    cut: Fitted | None = None
    step: float = 0.0
    peak: float = 0.0
    bound: float = 0.0
    refused: str = ""


def candidates(question: Question) -> Iterator[Candidate]:
    """All candidates that the question allows."""
    policy = question.policies[0]
    for name in question.tried:
        family = SCHEDULES[name]
        if family.splits_weight and not question.splits_backward:
            continue
        slices_tried = [slices for slices in question.slices if slices > 1] if family.sliced else [1]
        for (size, count), chunks in product(question.microbatches(), _chunks(family, question.most_chunks)):
            for slices in slices_tried:
                one = Candidate(name, chunks, size, count, policy, slices=slices)
                if one.searches:
                    one = replace(one, memory_share=_memory_share(question, one))
                yield from _with_offloads(question, one)


def why_none(question: Question) -> str:
    """The reasons why the question allows none of its schedules."""
    return "; ".join(_why_untried(question, SCHEDULES[name]) for name in question.tried)


def _why_untried(question: Question, family: Family) -> str:
    name = family.name
    if family.splits_weight and not question.splits_backward:
        return f"{name} splits backwards, but the model cannot (--no-split-backward)"
    if not _chunks(family, question.most_chunks):
        most = f"at most {question.max_chunks} are tried (--max-chunks)"
        most = "Megatron needs two ranks or more for several chunks (-P)" if question.pipeline_size == 1 else most
        return f"{name} has {family.chunks or 2} chunks a rank, but {most}"
    if family.sliced:
        return f"{name} needs slices of sequences, but --sequence-slices is {question.slices[0]}"
    return f"{name} offloads, but the time of copies is not known (--offload-bandwidth)"


def _with_offloads(question: Question, one: Candidate) -> Iterator[Candidate]:
    """``one``, and ``one`` with half and with all of its chunks offloaded. A schedule that offloads by itself keeps its
    own number."""
    own = one.family.added(one.shape(question.pipeline_size)).get("offload_chunks", 0)
    if not own:
        yield one
    if question.host_bandwidth is None or one.searches or one.slices > 1 or one.family.barriers:
        return
    slots = question.offload_slots(question.model(one.micro_batch))
    for count in {own} if own else {(one.num_chunks + 1) // 2, one.num_chunks}:
        yield replace(one, offload_chunks=count, offload_slots=slots)


def _memory_share(question: Question, candidate: Candidate) -> float:
    """The share of a device's memory for a search."""
    model = question.model(candidate.micro_batch)
    ranks = question.pipeline_size
    activation = sum(one.activation for one in model.layers) / ranks
    static = 2 * sum(one.static for one in model.layers) / ranks  # twice the mean, as ranks are unequal
    needed = static + _ROOM * ranks * activation + 8 * question.max_chunks * model.message
    needed += max(question.taken(candidate.placement(ranks), candidate.policy))
    return min(1.0, needed / question.memory) if activation else 1.0


def _chunks(family: Family, most: int) -> list[int]:
    if family.chunks is not None:
        return [family.chunks] if family.chunks <= most else []
    # With one chunk a family for several chunks equals another family.
    return list(range(1 if family.search is not None else 2, most + 1))


def estimate(question: Question, candidate: Candidate, bounds: dict[Any, float] | None = None) -> Estimate:
    """The estimate of a candidate. A search is estimated by its bound, and so is a schedule with collectives, which
    ``order_time`` does not know. ``bounds`` has the known bounds; the bound of this candidate is added to it.
    """
    model = candidate.model(question)
    try:
        cut = cut_model(question, candidate, model)
        placement = candidate.placement(question.pipeline_size)
        known = {} if bounds is None else bounds
        key = placement, candidate.num_microbatches, candidate.slices, cut.costs
        if key not in known:
            conditions = candidate.num_microbatches, cut.costs, question.network(model)
            split = question.splits_backward
            slices = candidate.slices
            known[key] = lower_bound(placement, *conditions, split=split, slices=slices).step
        bound = known[key]
        step = 0.0 if candidate.is_bounded else _order_time(question, candidate, cut, question.transfer(model))
    except PlanError as error:
        return Estimate(candidate, refused=str(error))
    return Estimate(candidate, cut, max(step, bound), max(cut.peaks), bound)


def _order_time(question: Question, candidate: Candidate, cut: Fitted, transfer: float) -> float:
    """The time of a step, extrapolated from two pilots. A further microbatch takes the mean time of the microbatches
    that the longer pilot has in addition to the shorter one."""
    size = question.pipeline_size
    placement = candidate.placement(question.pipeline_size)
    shapes = [candidate.shape(size, pilot * size) for pilot in PILOTS]
    orders = (_orders(candidate.schedule, shape) for shape in shapes)
    short, long = (order_time(each, placement, cut.costs, transfer, candidate.slices) for each in orders)
    few, many = (shape.num_microbatches for shape in shapes)
    return continued(short, long, few, many, candidate.num_microbatches)


def fixed_memory(
    question: Question, candidate: Candidate, model: Model, tensors: Sequence[int], logits: int = _LOGITS
) -> tuple[float, ...]:
    """GB of each rank for communicators, CUDA context, its pipeline tensors, and its share of a split output layer: the
    parameters, and the logits of ``logits`` microbatches.
    """
    output = model.output
    ranks = len(tensors)
    share = 0.0 if output is None else (output.static + logits * output.activation) / ranks
    taken = question.taken(candidate.placement(ranks), candidate.policy)
    each = model.message / candidate.slices
    return tuple(gb + count * each + share for gb, count in zip(taken, tensors, strict=True))


def tensors_before(question: Question, candidate: Candidate) -> tuple[int, ...]:
    """The assumed pipeline tensors of each rank without the inputs of its stages, before a plan is known."""
    states = states_of(candidate, question.pipeline_size)
    kept = [max(sum(flight) for flight, _ in rank) if question.keep_outputs else 0 for rank in states]
    return tuple(_TENSORS * candidate.num_chunks + outputs for outputs in kept)


def cut_model(question: Question, candidate: Candidate, model: Model) -> Fitted:
    """The model on the candidate's stages, with the recomputation that it needs. Raises PlanError if there are fewer
    layers than stages.
    """
    size = question.pipeline_size
    placement = candidate.placement(size)
    fixed = fixed_memory(question, candidate, model, tensors_before(question, candidate))
    room = Room(placement, states_of(candidate, size), candidate.slices, question.memory, fixed)
    units = model.units(placement.num_stages)
    try:
        counts = best_counts(units, room, question.recompute)
    except PlanError:
        units = model.units(placement.num_stages, mtp_with_loss=True)
        counts = best_counts(units, room, question.recompute)
    return fitted(stages_of(units, counts), room, model, question.recompute)


def states_of(candidate: Candidate, pipeline_size: int) -> States:
    """The activations that each rank keeps at its peaks. For a search they are those of a family with little memory on
    the same placement."""
    name = candidate.schedule
    if candidate.searches:
        name = _SEEDS[candidate.family.placement][candidate.num_chunks > 1]
    if candidate.offload_chunks:
        count = min(PILOTS[-1] * pipeline_size, candidate.num_microbatches)
        return _offloaded_states(replace(candidate, num_microbatches=count), pipeline_size)
    shapes = [candidate.shape(pipeline_size, pilot * pipeline_size) for pilot in PILOTS]
    few, many = (_states(name, shape) for shape in shapes)
    if [_most(rank) for rank in few] == [_most(rank) for rank in many]:
        return many
    return _states(name, candidate.shape(pipeline_size))  # it grows with the microbatches


def _most(states: Sequence[Kept]) -> int:
    return max(sum(flight) + sum(waiting) for flight, waiting in states)


@lru_cache(maxsize=256)
def _offloaded_states(candidate: Candidate, pipeline_size: int) -> tuple[tuple[Kept, ...], ...]:
    sizes = pipeline_size, candidate.num_chunks, candidate.num_microbatches
    chunks = candidate.offload_chunks
    slots = candidate.offload_slots
    spec = PlanSpec(candidate.schedule, *sizes, offload_chunks=chunks, offload_slots=slots)
    return tuple(kept_states(program, candidate.num_chunks) for program in lowered_plan(spec).programs)


@lru_cache(maxsize=256)
def _states(schedule: str, shape: Shape) -> tuple[tuple[Kept, ...], ...]:
    return tuple(kept_states(order, shape.num_chunks) for order in _orders(schedule, shape))


@lru_cache(maxsize=128)
def _orders(schedule: str, shape: Shape) -> list[Order]:
    return SCHEDULES[schedule].orders(shape)
