"""The process from which tests fork ranks imports this module, once for all of them.

No garbage is collected during the import, and no rank's garbage collector scans the libraries' objects.
"""

from __future__ import annotations

import gc
import importlib

gc.disable()
# torch._dynamo is here because optimizers load it.
for _name in (
    *("pytest", "torch.distributed", "torch._dynamo", "megatron_pp.schedules", "megatron_pp.weight_grad"),
    *("megatron_pp.testing.pipeline", "examples.gpt.program", "testkit.processes"),
):
    importlib.import_module(_name)
gc.freeze()
gc.enable()
