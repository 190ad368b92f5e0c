"""Overlapped pairs of a mixture of experts. CUDA events must show that a pair's forward and backward run at the same
time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.stages import BusyStage
from gpu_day import ranks
from gpu_day.bench import Bench, NotRun
from megatron_pp.features.pairs.pair_runner import HalfCall, in_turn, on_two_streams
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.pipeline import run_rank

RANKS, MICROBATCHES = 2, 8  # of each pipeline
SHARED = 0.5  # share of the shorter half that must run beside the other half
RUNS = {"in turn": in_turn, "on two streams": on_two_streams}


class _AllToAll(torch.autograd.Function):
    """Sends an equal number of rows to each rank of ``group``. Their gradients return the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _exchanged(grad, ctx.group), None


def _exchanged(x: torch.Tensor, group: Any) -> torch.Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received


class Experts(torch.nn.Module):
    """A layer with one expert on each rank of ``group``: tokens go to the experts and back. A layer before it keeps the
    device busy in place of attention."""

    def __init__(self, stage: int, hidden: int, group: Any, device: torch.device, forward_ms: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 * stage + group.rank())
        self.attention = BusyStage(forward_ms / 1e3, forward_ms / 1e3)
        self.expert = torch.nn.Linear(hidden, hidden, bias=False)
        with torch.no_grad():
            self.expert.weight.copy_(torch.randn(hidden, hidden, generator=generator) / hidden**0.5)
        self.expert.to(device)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        tokens = _AllToAll.apply(x.reshape(-1, x.shape[-1]), self.group)
        outputs = _AllToAll.apply(torch.tanh(self.expert(tokens)), self.group)
        return x + outputs.view_as(x)


class TimedPairs:
    """``run``, with an event before and after each half on the stream where the half runs."""

    def __init__(self, run: Callable[[HalfCall, HalfCall], Any]) -> None:
        self.run = run
        self.pairs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []

    def __call__(self, forward_call: HalfCall, backward_call: HalfCall) -> None:
        self.pairs.append([_timed(forward_call), _timed(backward_call)])
        self.run(forward_call, backward_call)

    def shares(self) -> list[float]:
        """For each pair, the share of its shorter half that ran beside the other half. Negative if they did not
        overlap."""
        found = []
        for halves in self.pairs:
            origin = halves[0][0]
            (b1, e1), (b2, e2) = ((origin.elapsed_time(begin), origin.elapsed_time(end)) for begin, end in halves)
            found.append((min(e1, e2) - max(b1, b2)) / max(1e-9, min(e1 - b1, e2 - b2)))
        return found


def _timed(call: HalfCall) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run = call.run

    def timed() -> None:
        begin.record()
        run()
        end.record()

    call.run = timed
    return begin, end


def run(bench: Bench) -> None:
    if not bench.machine.has_gpus:
        raise NotRun("there is no CUDA stream without a GPU")
    experts = max(1, bench.machine.gpus // RANKS)
    sizes = bench.sizes.seq_length, bench.sizes.hidden, bench.sizes.forward_ms
    found = bench.ranks(_rank, *sizes, size=RANKS * experts)
    shares = [one["shares"] for one in found]
    steady = [share for of_rank in shares for share in of_rank["on two streams"][1:-1]]
    overlapping = sum(share > SHARED for share in steady)
    what = f"the halves of all {len(steady)} pairs of the steady state run at the same time"
    bench.check(overlapping == len(steady) > 0, f"{what} ({overlapping} do)")
    apart = max(share for of_rank in shares for share in of_rank["in turn"])
    bench.check(apart <= 0.0, "the control, halves in turn, shows none")
    bench.check(all(one["equal"] for one in found), "gradients are those of halves in turn, to the last bit")
    bench.text(
        f"dualpipe_v, P={RANKS}, M={MICROBATCHES}, {experts} ranks of experts: the part of a pair's shorter half that "
        f"ran beside the other one, at least {min(steady, default=0.0):.0%}."
    )


def _rank(rank: int, size: int, device: torch.device, seq_length: int, hidden: int, forward_ms: float) -> Any:
    """The shares of this rank's pairs, and whether gradients are equal. The ranks of a stage hold its experts."""
    experts = size // RANKS
    stages = [dist.new_group([stage * experts + k for k in range(experts)]) for stage in range(RANKS)]
    pipelines = [dist.new_group([stage * experts + k for stage in range(RANKS)]) for k in range(experts)]
    stage = rank // experts
    group = stages[rank // experts]
    grads, shares = [], {}
    for name, function in RUNS.items():
        pairs = TimedPairs(function)
        fields = {**ranks.OVERLAP, "overlapped_forward_backward": pairs}
        step = ranks.Step("dualpipe_v", 2, MICROBATCHES, fields, seq_length, hidden)
        config = step.config()
        communicator = P2PCommunicator(pipelines[rank % experts], config)

        def block(number: int) -> torch.nn.Module:
            return Experts(number, hidden, group, device, forward_ms)

        for _ in range(2):  # the first step makes channels and warms up
            pairs.pairs.clear()
            result = run_rank(stage, RANKS, 2, step.data(device), config, communicator, block=block)
        ranks.synchronize(device)
        shares[name] = pairs.shares()
        grads.append(result.grads)
        communicator.transport.close()
    equal = all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())
    return {"shares": shares, "equal": equal}
