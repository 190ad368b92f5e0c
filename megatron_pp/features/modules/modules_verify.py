"""``verify`` for pipelines of several modules.

Each rank by itself: the rules are the core's (``plan/ir/rules.py``). A transfer needs and adds facts of one message; a
forward or backward needs those of all messages of its microbatch. So a forward comes behind the inputs of every module,
and every output that is sent is released behind its own send. All ranks against each other: the core's check of
deadlock and crossing messages (``plan/verify/rendezvous.py``), under the rules of the device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.activations import peak_activations
from megatron_pp.plan.gc_pause import collector_paused
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

if TYPE_CHECKING:
    from megatron_pp.features.modules.graph import Edge

AT_ENDS = {FORWARD: (0, 1), BACKWARD: (1, 0)}
"""Instruction.stage of a transfer at its sender and at its receiver, for ``message_of``: edges have names of their own,
and are no step from a stage to the next."""

_RAN = rules.F_RAN | rules.B_RAN
_HERE = {FORWARD: rules.F_HERE, BACKWARD: rules.B_HERE}
_AT_END = {  # of a message
    (FORWARD, "received"): rules.F_POSTED | rules.F_HERE,
    (FORWARD, "sent"): rules.F_SENT | rules.F_FREED,
    (BACKWARD, "received"): rules.B_POSTED | rules.B_HERE,
    (BACKWARD, "sent"): rules.B_SENT | rules.B_FREED,
}


@collector_paused()
def verify_modules(plan: Plan, device: Collection[str] | None = None) -> Verdict:
    """As ``verify``, for a plan of ``modules_plan``: raises PlanError where it is incomplete, hangs, or reads, frees or
    receives wrongly. ``device``: which of DEVICE_RULES hold, by default those that it was lowered for."""
    found = plan.spec.device if device is None else checked_device(device)
    if STATIC_BUFFERS in found:
        raise PlanError(f"{STATIC_BUFFERS} is not checked in a pipeline of several modules: leave the rule out")
    if len(plan.programs) != plan.spec.pipeline_size:
        raise PlanError(f"the plan has {len(plan.programs)} rank programs for {plan.spec.pipeline_size} ranks")
    peaks = tuple(_Walk(plan, rank).run() for rank in range(len(plan.programs)))
    for rank, chunks in enumerate(plan.placement.graph.chunks):  # type: ignore[attr-defined]
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
    activations = peak_activations(plan, programs=runs)
    return Verdict(peaks, activations, certificate, found, (0.0,) * len(peaks), plan.spec.num_chunks)


class _Walk:
    """What is true on one rank, and alive there, as its program runs."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.program, self.rank, self.spec = plan.programs[rank], rank, plan.spec
        self.kinds = (FORWARD,) if plan.spec.forward_only else (FORWARD, BACKWARD)
        self.edges = {kind: plan.placement.graph.edges[kind][rank] for kind in self.kinds}  # type: ignore[attr-defined]
        self.known = {self._key(at): (at, chunk) for at, chunk in self._transfers()}  # of microbatch 0
        self.chunks, self.count = len(plan.placement.graph.chunks[rank]), plan.spec.num_microbatches  # type: ignore[attr-defined]
        self.ran = dict.fromkeys(product(range(self.chunks), range(self.count)), 0)
        self.facts: defaultdict[tuple[str, str, str, int], int] = defaultdict(int)  # kind, end, edge, microbatch
        self.next = [0] * self.chunks  # forwards

    def run(self) -> RankPeaks:
        """Raises PlanError."""
        now: Counter[str] = Counter()
        peaks: Counter[str] = Counter()
        together = 0
        for at in self.program:
            change = self._step(at) if at.op not in ins.SYNC_OPS else Memory()
            now.update(change._asdict())
            peaks |= now
            together = max(together, Memory(**now).tensors)
        self._check_end()
        return RankPeaks(Memory(**peaks), together)

    def _transfers(self) -> Iterator[tuple[Instruction, int]]:
        """Those of this rank, of microbatch 0, with their chunk."""
        for kind, chunks in self.edges.items():
            moves, (at_sender, at_receiver) = MOVES[kind], AT_ENDS[kind]
            for chunk, (received, sent) in enumerate(chunks):
                for edge in filter(_travels, received):
                    yield from ((_of(edge, op, at_receiver, edge.source), chunk) for op in (moves.recv, moves.wait))
                for edge in filter(_travels, sent):
                    yield from ((_of(edge, op, at_sender, edge.target), chunk) for op in (moves.send, moves.free))

    def _key(self, at: Instruction) -> tuple[str, str]:
        return at.op, at.tensor

    def _step(self, at: Instruction) -> Memory:
        if not 0 <= at.mb < self.count:
            raise self._error(at, f"microbatches are 0..{self.count - 1}")
        return self._compute(at) if at.op in self.kinds else self._transfer(at)

    def _transfer(self, at: Instruction) -> Memory:
        known, chunk = self.known.get(self._key(at), (None, 0))
        if known is None or at != known._replace(mb=at.mb):
            raise self._error(
                at, f"the rank has no such message with peer {at.peer}, stage {at.stage} and chunk {at.chunk}"
            )
        kind = KIND_OF[at.op]
        end = "sent" if at.op in (*ins.SEND_OPS, *ins.FREE_OPS) else "received"
        cell = kind, end, at.tensor, at.mb
        rule, before = RULES[at.op], self.facts[cell] | self.ran[(chunk, at.mb)]
        self._require(at, rule.needs & ~before, rule.adds & before)
        self.facts[cell] |= rule.adds
        return change_of(at.op, Site())

    def _compute(self, at: Instruction) -> Memory:
        own = at.chunk in range(self.chunks) and at.stage == at.chunk * self.spec.pipeline_size + self.rank
        if not own or (at.peer, at.slice, at.tensor) != (NONE, NONE, ""):
            raise self._error(at, "it is none of this rank's")
        rule, before = RULES[at.op], self.ran[(at.chunk, at.mb)]
        received, sent = self.edges[at.op][at.chunk]
        for edge in received:
            if not edge.travels:
                if not self.ran[(edge.chunks[0], at.mb)] & RULES[at.op].adds:
                    raise self._error(at, f"it comes before that of chunk {edge.chunks[0]}")
                continue
            here = self.facts[(at.op, "received", edge.name, at.mb)]
            if not here & _HERE[at.op]:
                raise self._error(at, f"it comes before {next(words_of(_HERE[at.op]))} (message {edge.name})")
        self._require(at, rule.needs & _RAN & ~before, rule.adds & before)
        if at.op == FORWARD:
            due = self.next[at.chunk]
            if at.mb != due:
                raise self._error(at, f"the next forward is that of microbatch {due}: data come in order")
            self.next[at.chunk] += 1
        self.ran[(at.chunk, at.mb)] |= rule.adds
        received, sent = ([*filter(_travels, edges)] for edges in (received, sent))
        trains, inputs = not self.spec.forward_only, sum(map(_travels, self.edges[FORWARD][at.chunk].received))
        if at.op == FORWARD:
            return Memory(outputs=len(sent), inputs=0 if trains else -inputs, in_flight=trains)
        return Memory(inputs=-inputs, output_grads=-len(received), input_grads=len(sent), in_flight=-1)

    def _require(self, at: Instruction, missing: int, twice: int) -> None:
        if missing:
            raise self._error(at, "it comes before " + " and before ".join(words_of(missing)))
        if twice:
            raise self._error(at, " and ".join(words_of(twice)) + " already: it stands twice")

    def _check_end(self) -> None:
        wanted = rules.F_RAN if self.spec.forward_only else _RAN
        for (chunk, mb), facts in self.ran.items():
            self._at_end(wanted & ~facts, f"chunk {chunk}, microbatch {mb}")
        for kind, chunks in self.edges.items():
            for end, edges in ((end, edges) for ends in chunks for end, edges in ends._asdict().items()):
                for edge in filter(_travels, edges):
                    for mb in range(self.count):
                        lacking = _AT_END[kind, end] & ~self.facts[(kind, end, edge.name, mb)]
                        self._at_end(lacking, f"message {edge.name}, microbatch {mb}")

    def _at_end(self, missing: int, of: str) -> None:
        if missing:
            words = " nor that ".join(words_of(missing))
            raise PlanError(f"rank {self.rank}: at the end of the plan, of {of} it is not true that {words}")

    def _error(self, at: Instruction, why: str) -> PlanError:
        return refusal(self.rank, at, why)


def _travels(edge: Edge) -> bool:
    return edge.travels


def _of(edge: Edge, op: str, stage: int, peer: int) -> Instruction:
    return placed(op, stage, 0, peer, 0, tensor=edge.name)
