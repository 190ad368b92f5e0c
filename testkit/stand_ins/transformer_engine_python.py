"""The real Python of Transformer Engine on a CPU: only its compiled extension is a stand-in.

The wheel ``transformer-engine`` from PyPI has all of the Python and no binary. ``scripts/setup_env.sh`` puts it into
its own folder. In ``site-packages`` it would make Megatron-core's guarded import fail.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron_pp.tools.parity.cpu_stand_in import triton_stand_in
from testkit.stand_ins.transformer_engine_torch import Extension

FOLDER = Path(sys.prefix) / "transformer_engine_python"
# Modules without libraries and compiled activations.
_ENVIRONMENT = {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}


@functools.cache
def transformer_engine() -> ModuleType:
    """The imported ``transformer_engine.pytorch``. Raises ImportError if the set-up script has not installed it."""
    if not FOLDER.is_dir():
        raise ImportError(f"{FOLDER} is missing: scripts/setup_env.sh test makes it")
    importlib.import_module("torch._dynamo")  # it looks for triton, which is absent
    importlib.import_module("torch._inductor.utils")
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]), mock.patch.dict(os.environ, _ENVIRONMENT):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first attempt to import .pytorch fails for want of the extension
            common = importlib.import_module("transformer_engine.common")
        sources = (FOLDER / "transformer_engine" / "pytorch").rglob("*.py")
        names = {name for path in sources for name in re.findall(r"\btex\.([A-Za-z]\w+)", path.read_text())}
        sys.modules["transformer_engine_torch"] = Extension(sorted(names))
        with triton_stand_in(), mock.patch.object(common, "load_framework_extension"):
            return importlib.import_module("transformer_engine.pytorch")


@contextmanager
def on_cpu() -> Iterator[Any]:
    """A context with ``transformer_engine.pytorch``, whose layers use the CPU in place of a GPU."""
    te = transformer_engine()
    properties = SimpleNamespace(major=8, minor=0, multi_processor_count=1)
    answers = {
        "is_available": True,
        "current_device": torch.device("cpu"),
        "get_device_properties": properties,
        "get_device_capability": (8, 0),
        "is_current_stream_capturing": False,
    }
    cuda = mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=value) for name, value in answers.items()})
    tensors = mock.patch.multiple(torch.Tensor, is_cuda=True, cuda=torch.Tensor.cpu)
    none = mock.patch.object(torch.accelerator, "current_accelerator", return_value=None)  # optimizers ask
    with cuda, tensors, none, mock.patch.object(torch, "empty", functools.partial(_empty, torch.empty)):
        yield te


def _empty(plain: Any, *size: Any, **options: Any) -> torch.Tensor:
    """``torch.empty`` on the CPU, filled with NaN so that unwritten elements show."""
    made = plain(*size, **{**options, "device": "cpu"})
    return made.fill_(torch.nan) if made.is_floating_point() else made
