"""The released torchtitan (0.3) with its Llama debug model on two ranks: its pipeline with torch's classes and ours.

The tests are skipped if torchtitan is not installed (``pip install torchtitan==0.3.0``, with torch 2.15). They leave
out the parts that need a GPU: its trainer, and its attention (flex, varlen), which torchtitan's
ScaledDotProductAttention replaces.
"""

from __future__ import annotations

import importlib
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pp.integrations.torch_pipelining import PlanSchedule, use_in
from testkit.processes import run_processes
from tests.functional_tests.numbers.torch_runtime import largest_difference
from tests.functional_tests.numbers.torch_stages import CHUNKS

pytestmark = [
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed"),
    pytest.mark.slow,
]
MICROBATCHES, LENGTH, VOCABULARY = 8, 16, 2048


def _pipeline(name: str) -> tuple[Any, list[Any]]:
    """Return torchtitan's schedule of the debug model, and this rank's parts of the model, in torchtitan's FSDP2."""
    config_of, parallel, llama, pipelines, attention = map(
        importlib.import_module,
        (
            "torchtitan.config",
            "torchtitan.distributed.parallel_dims",
            "torchtitan.models.llama3",
            "torchtitan.distributed.pipeline_parallel",
            "torchtitan.models.common.attention",
        ),
    )
    vars(parallel)["device_type"] = "cpu"
    loss = importlib.import_module("torchtitan.components.loss").CrossEntropyLoss
    model = llama.model_registry("debugmodel").model
    for layer in model.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    parallelism = config_of.ParallelismConfig(
        pipeline_parallel_degree=2, pipeline_parallel_schedule=name, spmd_backend="partial_dtensor"
    )
    training = config_of.TrainingConfig(local_batch_size=MICROBATCHES, seq_len=LENGTH, mixed_precision_param="float32")
    torch.manual_seed(0)
    whole = model.build()
    whole.init_states(buffer_device=torch.device("cpu"))
    schedule, parts, _, _ = pipelines.pipeline_llm(
        whole,
        parallel_dims=parallel.ParallelDims.from_config(parallelism, 2),
        training=training,
        parallelism=parallelism,
        compile_config=config_of.CompileConfig(),
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=model,
        parallelize_fn=llama.parallelize_llama,
        loss_fn=loss(loss.Config()),
    )
    return schedule, parts


def _trained(name: str, ours: bool) -> list[Tensor]:
    """Take two steps as torchtitan's trainer does, and return losses and gradients."""
    schedule, parts = _pipeline(name)
    assert isinstance(schedule, PlanSchedule) == ours
    stages = getattr(schedule, "_stages", None) or [call.stage for call in getattr(schedule, "calls", ())]
    stages = stages or [schedule._stage]
    optimizer = torch.optim.AdamW([parameter for part in parts for parameter in part.parameters()])
    found: list[Tensor] = []
    for step in range(2):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        tokens, targets = (torch.randint(VOCABULARY, (MICROBATCHES, LENGTH), generator=generator) for _ in range(2))
        first, last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))
        losses: list[Tensor] = []
        schedule.step(
            arg_mbs=[(one,) for one in tokens.split(1)] if first else None,
            kwarg_mbs=[{} for _ in range(MICROBATCHES)],
            target_mbs=list(targets.split(1)) if last else None,
            losses=losses if last else None,
            loss_kwargs={"global_valid_tokens": torch.tensor(float(targets.numel()))},
            return_outputs=False,
        )
        found += [loss.detach() for loss in losses]
        grads = [parameter.grad for part in parts for parameter in part.parameters()]
        found += [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
        optimizer.step()
    return found


def _compared(rank: int, size: int) -> dict[str, float]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    theirs = {name: _trained(name, False) for name in CHUNKS}
    use_in(importlib.import_module("torchtitan.distributed.pipeline_parallel"))
    return {name: largest_difference(_trained(name, True), theirs[name]) for name in CHUNKS}


def test_losses_and_gradients_are_those_of_torchs_classes() -> None:
    """All bits are equal, except under LoopedBFS, whose backwards torch runs from the last microbatch on."""
    for found in run_processes(_compared, 2, timeout=900, environment={"LOCAL_RANK": "0"}):
        assert found.pop("LoopedBFS") < 1e-6
        assert found == dict.fromkeys(found, 0.0)
