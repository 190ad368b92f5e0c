"""``verify`` for pipelines of several modules.

Each rank is checked by itself with the core's rules (``plan/ir/rules.py``). A transfer needs and adds facts of one
message; a forward or backward needs those of all messages of its microbatch. So a forward comes behind the inputs of
every module, and every output that is sent is released behind its own send. Then all ranks are run against each other
by the core's check of deadlock and crossing messages (``plan/verify/rendezvous.py``), under the rules of the device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

from megatron_pp.common.gc_pause import collector_paused
from megatron_pp.errors import PlanError
from megatron_pp.features.modules.graph import Edge, ModuleGraph, check_names
from megatron_pp.plan.ir import certificate as cert
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir import rules
from megatron_pp.plan.ir.dataflow import KIND_OF, MOVES
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, NONE, Instruction, placed, refusal
from megatron_pp.plan.ir.ledger import Memory, Site, change_of
from megatron_pp.plan.ir.rules import RULES, words_of
from megatron_pp.plan.ir.spec import STATIC_BUFFERS, Plan, checked_device
from megatron_pp.plan.verify.lifetime import RankPeaks
from megatron_pp.plan.verify.rendezvous import check_rendezvous
from megatron_pp.plan.verify.sync_check import SyncCheck
from megatron_pp.plan.verify.verifier import Verdict

_RAN = rules.F_RAN | rules.B_RAN
_HERE = {FORWARD: rules.F_HERE, BACKWARD: rules.B_HERE}


@collector_paused()
def verify_modules(plan: Plan, device: Collection[str] | None = None) -> Verdict:
    """``verify`` for a plan of ``modules_plan``: raises PlanError if it is incomplete, hangs, or reads, frees or
    receives wrongly. ``device``: the DEVICE_RULES that hold, by default those for which it was lowered."""
    found = plan.spec.device if device is None else checked_device(device)
    if STATIC_BUFFERS in found:
        raise PlanError(f"{STATIC_BUFFERS} is not checked in a pipeline of several modules: leave the rule out")
    if len(plan.programs) != plan.spec.pipeline_size:
        raise PlanError(f"the plan has {len(plan.programs)} rank programs for {plan.spec.pipeline_size} ranks")
    graph: ModuleGraph = plan.placement.graph  # type: ignore[attr-defined]
    check_names([*graph.activations, *graph.gradients])
    peaks = tuple(_ModulesWalk(plan, rank).run() for rank in range(len(plan.programs)))
    for rank, chunks in enumerate(graph.chunks):
        syncs = SyncCheck(plan, rank)
        syncs.spec = replace(plan.spec, num_chunks=len(chunks))
        syncs.run()
    check_rendezvous(plan, found)
    runs = [[at for at in program if at.op in ins.COMPUTE_OPS] for program in plan.programs]
    for rank, (order, run) in enumerate(zip(plan.orders, runs, strict=True)):
        if [*order] != run:
            raise PlanError(f"rank {rank}: its program does not run the plan's order")
    proven = {cert.COMPLETE, cert.LIFETIME, cert.RENDEZVOUS, *found, cert.ORDER}
    certificate = cert.Certificate.of([r for r in cert.PROOFS if r in proven], found, plan.spec, plan.programs)
    return Verdict(peaks, certificate, plan, found, (0.0,) * len(peaks), plan.spec.num_chunks)


class _ModulesWalk:
    """Follows one rank's program: the facts, and the tensors that are alive."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.program = plan.programs[rank]
        self.rank = rank
        self.spec = plan.spec
        self.kinds = (FORWARD,) if plan.spec.forward_only else (FORWARD, BACKWARD)
        self.edges = {kind: plan.placement.graph.edges[kind][rank] for kind in self.kinds}  # type: ignore[attr-defined]
        self.known: dict[
            tuple[str, str], tuple[Instruction, int]
        ] = {}  # (op, edge) -> its instruction at microbatch 0, and the chunk
        self.wanted: defaultdict[tuple[str, str], int] = defaultdict(int)  # (kind, edge) -> facts at the end
        for at, chunk in self._transfers():
            self.known[at.op, at.tensor] = at, chunk
            self.wanted[KIND_OF[at.op], at.tensor] |= RULES[at.op].adds
        self.chunks = len(plan.placement.graph.chunks[rank])  # type: ignore[attr-defined]
        self.count = plan.spec.num_microbatches
        self.ran = dict.fromkeys(product(range(self.chunks), range(self.count)), 0)
        self.facts: defaultdict[tuple[str, str, int], int] = defaultdict(int)  # kind, edge, microbatch
        self.next = [0] * self.chunks  # forwards

    def run(self) -> RankPeaks:
        """Raises PlanError."""
        now: Counter[str] = Counter()
        peaks: Counter[str] = Counter()
        together = 0
        for at in self.program:
            for one in at.members or (at,):
                change = self._step(one) if one.op not in ins.SYNC_OPS else Memory()
                now.update(change._asdict())
            peaks |= now
            together = max(together, Memory(**now).tensors)
        self._check_end()
        return RankPeaks(Memory(**peaks), together)

    def _transfers(self) -> Iterator[tuple[Instruction, int]]:
        """The transfers of this rank for microbatch 0, with their chunk."""
        for kind, chunks in self.edges.items():
            moves = MOVES[kind]
            for chunk, edges in enumerate(chunks):
                for edge, op in product(edges.arriving, (moves.recv, moves.wait)):
                    yield transfer(op, edge, 0, self.rank), chunk
                for edge, op in product(edges.leaving, (moves.send, moves.free)):
                    yield transfer(op, edge, 0, self.rank), chunk

    def _step(self, at: Instruction) -> Memory:
        if not 0 <= at.mb < self.count:
            raise self._error(at, f"microbatches are 0..{self.count - 1}")
        return self._compute(at) if at.op in self.kinds else self._transfer(at)

    def _transfer(self, at: Instruction) -> Memory:
        known, chunk = self.known.get((at.op, at.tensor), (None, 0))
        if known is None or at != known._replace(mb=at.mb):
            raise self._error(
                at, f"the rank has no such message with peer {at.peer}, stage {at.stage} and chunk {at.chunk}"
            )
        cell = KIND_OF[at.op], at.tensor, at.mb
        rule = RULES[at.op]
        before = self.facts[cell] | self.ran[(chunk, at.mb)]
        self._require(at, rule.needs & ~before, rule.adds & before)
        self.facts[cell] |= rule.adds
        return change_of(at.op, Site())

    def _compute(self, at: Instruction) -> Memory:
        own = at.chunk in range(self.chunks) and at.stage == at.chunk * self.spec.pipeline_size + self.rank
        if not own or (at.peer, at.part, at.tensor) != (NONE, NONE, ""):
            raise self._error(at, "it is none of this rank's")
        rule = RULES[at.op]
        before = self.ran[(at.chunk, at.mb)]
        edges = self.edges[at.op][at.chunk]
        for edge in edges.received:
            if edge.travels and not self.facts[(at.op, edge.name, at.mb)] & _HERE[at.op]:
                raise self._error(at, f"it comes before {next(words_of(_HERE[at.op]))} (message {edge.name})")
            if not edge.travels and not self.ran[(edge.chunks[0], at.mb)] & rule.adds:
                raise self._error(at, f"it comes before that of chunk {edge.chunks[0]}")
        self._require(at, rule.needs & _RAN & ~before, rule.adds & before)
        if at.op == FORWARD:
            due = self.next[at.chunk]
            if at.mb != due:
                raise self._error(at, f"the next forward is that of microbatch {due}: data come in order")
            self.next[at.chunk] += 1
        self.ran[(at.chunk, at.mb)] |= rule.adds
        trains = not self.spec.forward_only
        inputs = len(self.edges[FORWARD][at.chunk].arriving)
        arriving = len(edges.arriving)
        leaving = len(edges.leaving)
        if at.op == FORWARD:
            return Memory(outputs=leaving, inputs=0 if trains else -inputs, in_flight=trains)
        return Memory(inputs=-inputs, output_grads=-arriving, input_grads=leaving, in_flight=-1)

    def _require(self, at: Instruction, missing: int, twice: int) -> None:
        if missing:
            raise self._error(at, "it comes before " + " and before ".join(words_of(missing)))
        if twice:
            raise self._error(at, " and ".join(words_of(twice)) + " already: it occurs twice")

    def _check_end(self) -> None:
        wanted = rules.F_RAN if self.spec.forward_only else _RAN
        for (chunk, mb), facts in self.ran.items():
            self._at_end(wanted & ~facts, f"chunk {chunk}, microbatch {mb}")
        for (kind, name), facts in self.wanted.items():
            for mb in range(self.count):
                self._at_end(facts & ~self.facts[(kind, name, mb)], f"message {name}, microbatch {mb}")

    def _at_end(self, missing: int, of: str) -> None:
        if missing:
            words = " nor that ".join(words_of(missing))
            raise PlanError(f"rank {self.rank}: at the end of the plan, of {of} it is not true that {words}")

    def _error(self, at: Instruction, why: str) -> PlanError:
        return refusal(self.rank, at, why)


def transfer(op: str, edge: Edge, mb: int, rank: int) -> Instruction:
    """``op`` of one message of ``edge``; ``rank`` is one end. Edges are no step from a stage to the next:
    activations go from stage 0 to stage 1 and gradients back, which ``message_of`` tells apart by the edges' names.
    """
    sends = edge.source == rank
    stage = int(sends == (KIND_OF[op] == BACKWARD))
    return placed(op, stage, mb, edge.target if sends else edge.source, 0, tensor=edge.name)
