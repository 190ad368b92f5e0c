"""Runs scripts/pretrain_gpt_megatron.py on a virtual device, also as scripts/gpu_check.py runs it on a rank. Megatron's
state is global, so these scenarios have their own process.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from testkit.streams import StreamNetwork
from testkit.virtual_ranks import virtual_machine

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt_megatron.py"
_SMALL = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --train-iters 1"
_FLAGS = f"{_SMALL} --compare"


def the_script(folder: Path) -> None:
    """Run it from its command line, and as a part of scripts/gpu_check.py calls it."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(SCRIPT.parent))
    network = StreamNetwork(1, seed=None)
    with virtual_machine((sys, "argv", [SCRIPT.name, *_FLAGS.split()])), network.running(0):
        script = importlib.import_module(SCRIPT.stem)
        script.main()
        script.parallel_state.destroy_model_parallel()
        megatron = importlib.import_module("gpu_day.parts.megatron")
        script.dist.init_process_group("nccl", rank=0, world_size=1)
        found = megatron.train(0, 1, script.torch.device("cuda", 0), _FLAGS.split())
        assert (len(found["losses"]), found["theirs"], found["difference"]) == (1, found["losses"], 0.0)
        script.dist.init_process_group("nccl", rank=0, world_size=1)
        timed = megatron.timed(0, 1, script.torch.device("cuda", 0), _SMALL.split(), 1)
        assert (timed["difference"], [len(ms) for ms in timed["ms"].values()]) == (0.0, [1, 1])
        _every_variant_has_a_config(script, megatron)
        _graphs_are_captured_between_steps(script)


def _every_variant_has_a_config(script: Any, megatron: Any) -> None:
    """Make each variant's config under the installed release; flags that contradict each other are refused."""
    for flags in ("--fp8-format hybrid", "--compare --cuda-graph-impl local"):
        with pytest.raises(SystemExit):
            script.parse_arguments(flags.split())
    for variant in megatron.VARIANTS.values():
        args = script.parse_arguments([*_SMALL.split(), *variant.flags.split()])
        config = script.transformer_config(args)
        assert config.fp8 == args.fp8_format
        assert config.cuda_graph_impl == args.cuda_graph_impl
        assert script.layer_graphs.seed_options(args) == ({"use_cudagraphable_rng": True} if variant.apart else {})


def _graphs_are_captured_between_steps(script: Any) -> None:
    """Assert that graphs are captured once, without the hooks that gather parameters. A stand-in replaces Transformer
    Engine's part."""
    calls = mock.Mock()
    calls.graphs_created.side_effect = [False, True]
    chunk = mock.Mock()
    calls.attach_mock(chunk, "chunk")
    sizes = {"global_batch_size": 2, "micro_batch_size": 1, "seq_length": 16, "overlap_param_gather": True}
    args = argparse.Namespace(cuda_graph_impl=script.layer_graphs.TRANSFORMER_ENGINE, **sizes)
    script.dist.init_process_group("nccl", rank=0, world_size=1)
    script.parallel_state.initialize_model_parallel()
    with mock.patch("megatron.core.transformer.cuda_graphs.TECudaGraphHelper", return_value=calls) as helper:
        graphs = script.layer_graphs.made(args, [chunk], "the config", "the optimizer")
    helper.assert_called_once_with([chunk], "the config", 16, 1, ["the optimizer"])
    for _ in range(2):
        graphs.capture()
    hooks = [mock.call.chunk.disable_forward_pre_hook(param_sync=False), mock.call.create_cudagraphs()]
    hooks += [mock.call.chunk.enable_forward_pre_hook(), mock.call.cuda_graph_set_manual_hooks()]
    assert calls.mock_calls == [mock.call.graphs_created(), *hooks, mock.call.graphs_created()]


SCENARIOS = (the_script,)
