"""Checks of the gradients of Megatron-core's routers, which run on ranks in the processes of
testkit/megatron/runner.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from testkit.megatron import lab as megatron_lab
from testkit.megatron.cases import Case

SAMPLES = 4


def router_gradients(case: Case) -> dict[str, list[float]]:
    """Return the gradient of each router on this rank after one step. The step has the same samples for every number of
    samples in a microbatch. No token is masked."""
    with megatron_lab.engine(case):
        run = megatron_lab.Run(case)
        run.loop.forward_step = _forward_step
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        run._call([iter(_samples(case).split(case.model.micro_batch)) for _ in run.chunks], False)
    return {name: grad.flatten().tolist() for name, grad in run.gradients().items() if name.endswith("router.weight")}


def _samples(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(case.model.vocab, (SAMPLES, case.model.seq + 1), generator=generator)


def _forward_step(data_iterator: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[Any, Any]:
    tokens = next(data_iterator)
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    output = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])

    def loss_func(losses: torch.Tensor) -> tuple[Any, ...]:
        total, count = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
        return total, count, {"loss": torch.stack([total.detach(), count.float()])}

    return output, loss_func
