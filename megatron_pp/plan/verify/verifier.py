"""Accepts or refuses a plan. Checked are completeness, buffer lifetime and memory (``lifetime.py``), deadlock and
crossing messages (``rendezvous.py``), buffers that the device reuses (``static_buffers.py``), and the plan's own
compute order (``order_check.py``). A refusal names the rank, the instruction, and the cycle or the missing piece.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from megatron_pp.common.gc_pause import collector_paused
from megatron_pp.errors import PlanError
from megatron_pp.plan.ir import certificate as cert
from megatron_pp.plan.ir.feature import hooks_of, words_of_features
from megatron_pp.plan.ir.instruction import COMPUTE_OPS, COPY_OPS
from megatron_pp.plan.ir.repeated import Block
from megatron_pp.plan.ir.spec import STATIC_BUFFERS, Plan, checked_device
from megatron_pp.plan.lower.order_check import check_programs
from megatron_pp.plan.verify.lifetime import RankPeaks, check_rank
from megatron_pp.plan.verify.rendezvous import check_rendezvous

_RUN = COMPUTE_OPS | COPY_OPS


@dataclass(frozen=True)
class Verdict:
    """The needs of an accepted plan on each rank.

    ranks        peaks of live pipeline tensors
    certificate  what was proven, and for which programs
    plan         the verified plan
    device       the rules besides rendezvous under which it was verified
    on_host      peak of activations on the host, in the same units
    num_chunks   chunks of a rank
    """

    ranks: tuple[RankPeaks, ...]
    certificate: cert.Certificate = field(repr=False, compare=False)
    plan: Plan = field(repr=False, compare=False)
    device: tuple[str, ...] = ()
    on_host: tuple[float, ...] = ()
    num_chunks: int = 1

    @cached_property
    def activations(self) -> tuple[float, ...]:
        """The peak of activations that chunks keep, in units of one chunk's forward. A waiting weight gradient counts
        with its share (``activations.py``)."""
        from megatron_pp.plan.costs.activations import peak_activations  # a step does not need it

        return peak_activations(self.plan)

    @property
    def worst_rank(self) -> int:
        """The rank with the most pipeline tensors alive together."""
        return max(range(len(self.ranks)), key=lambda r: self.ranks[r].tensors)

    def __str__(self) -> str:
        r = self.worst_rank
        each = self.ranks[r].each
        host = ""
        if any(self.on_host):
            host = f", {max(self.on_host) / self.num_chunks:.4g} {words_of_features('host_words')}"
        under = f" under {' and '.join(self.device)}" if self.device else ""
        return (
            f"deadlock-free{under}, every send waited before its buffer is released; peak on rank {r}: "
            f"{self.ranks[r].tensors} pipeline tensors "
            f"({each.outputs} outputs, {each.inputs} inputs, {each.act_buffers + each.grad_buffers} receive buffers, "
            f"{each.pending_sends} pending sends, {each.in_flight} chunk forwards before their backward); "
            f"activations of at most {max(self.activations) / self.num_chunks:.4g} microbatches on a rank{host}"
        )


@collector_paused()
def verify(
    plan: Plan,
    deallocate: bool = True,
    device: Collection[str] | None = None,
    block: Block | None = None,
) -> Verdict:
    """Raises PlanError for a plan that is incomplete, hangs, or reads, frees or receives wrongly.

    ``device``: the DEVICE_RULES that hold together on the device, by default those for which the plan was lowered.
    Rendezvous always holds. ``block``: raises RepetitionError unless this run also verifies the plan with further
    copies of the block, each of later microbatches (docs/proofs.md, "A new number of microbatches").
    """
    rules = plan.spec.device if device is None else checked_device(device)
    if len(plan.programs) != plan.spec.pipeline_size:
        raise PlanError(f"the plan has {len(plan.programs)} rank programs for a pipeline of {plan.spec.pipeline_size}")
    peaks, runs = [], []
    for rank, program in enumerate(plan.programs):
        peaks.append(check_rank(plan, rank, deallocate, block))
        runs.append([at for at in program if at.op in _RUN])
    check_rendezvous(plan, rules, block)
    for hooks in hooks_of(plan.spec.added, plan.placement.barriers):
        hooks.check_plan(plan, rules)
    if STATIC_BUFFERS in rules:
        from megatron_pp.plan.verify import static_buffers

        static_buffers.check_static_buffers(plan, block)
    check_programs(plan, runs)
    proven = {cert.COMPLETE, cert.LIFETIME if deallocate else cert.KEPT_OUTPUTS, cert.RENDEZVOUS, *rules, cert.ORDER}
    certificate = cert.Certificate.of([r for r in cert.PROOFS if r in proven], rules, plan.spec, plan.programs)
    on_host = tuple(one.each.on_host / plan.spec.num_parts for one in peaks)
    return Verdict(tuple(peaks), certificate, plan, rules, on_host, plan.spec.num_chunks)
