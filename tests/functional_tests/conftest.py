"""What functional tests run under."""

from __future__ import annotations

import multiprocessing

# Ranks that a test starts with start_method="forkserver" are forked from a process that has loaded these. Tests of
# numbers, and of groups that all ranks make in one order, start theirs as a launcher does: each with an interpreter,
# and an order of sets, of its own. Optimizers load torch._dynamo.
multiprocessing.set_forkserver_preload(
    [
        *("pytest", "torch.distributed", "torch._dynamo", "matplotlib.figure"),
        *("megatron_pp.schedules", "megatron_pp.weight_grad", "examples.gpt.program", "tests.harness.processes"),
    ]
)
