"""What ranks of tests are forked with: imported once, by the process that they are forked from.

Nothing is collected meanwhile, and no rank's garbage collector looks through what the libraries hold.
"""

from __future__ import annotations

import gc
import importlib

gc.disable()
# Optimizers load torch._dynamo.
for _name in (
    *("pytest", "torch.distributed", "torch._dynamo", "megatron_pp.schedules", "megatron_pp.weight_grad"),
    *("megatron_pp.testing.pipeline", "examples.gpt.program", "testkit.processes"),
):
    importlib.import_module(_name)
gc.freeze()
gc.enable()
