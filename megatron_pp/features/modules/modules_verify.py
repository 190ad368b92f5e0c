"""``verify`` for pipelines of several modules.

Each rank by itself: the rules are the core's (``plan/ir/rules.py``). A transfer needs and adds facts of one message; a
forward or backward needs those of all messages of its microbatch. So a forward comes behind the inputs of every module,
and every output that is sent is released behind its own send. All ranks against each other: the core's check of
deadlock and crossing messages (``plan/verify/rendezvous.py``), under the rules of the device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
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
from megatron_pp.plan.lower.order_check import check_programs
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
    for rank in range(len(plan.programs)):
        SyncCheck(plan, rank).run()
    check_rendezvous(plan, found)
    runs = [[at for at in program if at.op in ins.COMPUTE_OPS] for program in plan.programs]
    check_programs(plan, runs)
    proven = {cert.COMPLETE, cert.LIFETIME, cert.RENDEZVOUS, *found, cert.ORDER}
    certificate = cert.Certificate.of([r for r in cert.PROOFS if r in proven], found, plan.spec, plan.programs)
    return Verdict(peaks, peak_activations(plan, programs=runs), certificate, found, (0.0,) * len(peaks))


class _Walk:
    """What is true on one rank, and alive there, as its program runs."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.program, self.rank, self.spec = plan.programs[rank], rank, plan.spec
        self.kinds = (FORWARD,) if plan.spec.forward_only else (FORWARD, BACKWARD)
        self.edges = {kind: plan.placement.graph.edges[kind][rank] for kind in self.kinds}  # type: ignore[attr-defined]
        self.known = {self._key(at): at for at in self._transfers()}  # of microbatch 0
        self.ran = dict.fromkeys(range(plan.spec.num_microbatches), 0)
        self.facts: defaultdict[tuple[str, str, str, int], int] = defaultdict(int)  # kind, end, edge, microbatch
        self.next = 0  # forward

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

    def _transfers(self) -> Iterator[Instruction]:
        """Those of this rank, of microbatch 0."""
        for kind, (received, sent) in self.edges.items():
            moves, (at_sender, at_receiver) = MOVES[kind], AT_ENDS[kind]
            for edge in received:
                yield from (_of(edge, op, at_receiver, edge.source) for op in (moves.recv, moves.wait))
            for edge in sent:
                yield from (_of(edge, op, at_sender, edge.target) for op in (moves.send, moves.free))

    def _key(self, at: Instruction) -> tuple[str, str]:
        return at.op, at.tensor

    def _step(self, at: Instruction) -> Memory:
        if at.mb not in self.ran:
            raise self._error(at, f"microbatches are 0..{len(self.ran) - 1}")
        return self._compute(at) if at.op in self.kinds else self._transfer(at)

    def _transfer(self, at: Instruction) -> Memory:
        known = self.known.get(self._key(at))
        if known is None or at != known._replace(mb=at.mb):
            raise self._error(
                at, f"the rank has no such message with peer {at.peer}, stage {at.stage} and chunk {at.chunk}"
            )
        kind = KIND_OF[at.op]
        end = "sent" if at.op in (*ins.SEND_OPS, *ins.FREE_OPS) else "received"
        cell = kind, end, at.tensor, at.mb
        rule, before = RULES[at.op], self.facts[cell] | self.ran[at.mb]
        self._require(at, rule.needs & ~before, rule.adds & before)
        self.facts[cell] |= rule.adds
        return change_of(at.op, Site())

    def _compute(self, at: Instruction) -> Memory:
        if (at.stage, at.peer, at.chunk, at.slice, at.tensor) != (self.rank, NONE, 0, NONE, ""):
            raise self._error(at, "it is none of this rank's")
        rule, before = RULES[at.op], self.ran[at.mb]
        received, sent = self.edges[at.op]
        for edge in received:
            here = self.facts[(at.op, "received", edge.name, at.mb)]
            if not here & _HERE[at.op]:
                raise self._error(at, f"it comes before {next(words_of(_HERE[at.op]))} (message {edge.name})")
        self._require(at, rule.needs & _RAN & ~before, rule.adds & before)
        if at.op == FORWARD:
            if at.mb != self.next:
                raise self._error(at, f"the next forward is that of microbatch {self.next}: data come in order")
            self.next += 1
        self.ran[at.mb] |= rule.adds
        trains, inputs = not self.spec.forward_only, len(self.edges[FORWARD].received)
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
        for mb, facts in self.ran.items():
            self._at_end(wanted & ~facts, f"microbatch {mb}")
        for kind, ends in self.edges.items():
            for end, edges in ends._asdict().items():
                for edge in edges:
                    for mb in self.ran:
                        lacking = _AT_END[kind, end] & ~self.facts[(kind, end, edge.name, mb)]
                        self._at_end(lacking, f"message {edge.name}, microbatch {mb}")

    def _at_end(self, missing: int, of: str) -> None:
        if missing:
            words = " nor that ".join(words_of(missing))
            raise PlanError(f"rank {self.rank}: at the end of the plan, of {of} it is not true that {words}")

    def _error(self, at: Instruction, why: str) -> PlanError:
        return refusal(self.rank, at, why)


def _of(edge: Edge, op: str, stage: int, peer: int) -> Instruction:
    return placed(op, stage, 0, peer, 0, tensor=edge.name)
