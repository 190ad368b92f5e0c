"""scripts/pretrain_gpt_megatron.py on a virtual device. Megatron's state needs a process of its own."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

from megatron_pp.testing.streams import StreamNetwork
from tests.harness.virtual_ranks import virtual_machine

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt_megatron.py"
_FLAGS = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --train-iters 1 --compare"


def the_script(folder: Path) -> None:
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(SCRIPT.parent))
    network = StreamNetwork(1, seed=None)
    with virtual_machine((sys, "argv", [SCRIPT.name, *_FLAGS.split()])), network.running(0):
        importlib.import_module(SCRIPT.stem).main()


SCENARIOS = (the_script,)
