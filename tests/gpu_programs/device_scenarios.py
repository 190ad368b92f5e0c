"""Programs that together run every line of the project which only a GPU or NCCL reaches, on virtual devices."""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu as gpu_benchmark
from benchmarks.work import Unavailable
from examples.gpt import libraries, metrics, process
from examples.gpt import program as training
from examples.gpt.errors import ArgumentError
from examples.gpt.settings import parse
from megatron_pp.comm import abort
from megatron_pp.comm.backends import group_transport
from megatron_pp.comm.channels import SHAPES
from megatron_pp.comm.transport import P2PRequest, Preparation
from megatron_pp.config.conversions import chosen_steps
from megatron_pp.errors import P2PError, P2PTransferError
from megatron_pp.faults.position.device_events import CompletedWork, EventQueries
from megatron_pp.features.pairs.pair_runner import on_two_streams
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.runtime.alone import SoloTransport
from megatron_pp.testing.toy import ToyData
from megatron_pp.tools.cli import main
from megatron_pp.tools.parity import command
from megatron_pp.tracing.recorder import Tracer
from megatron_pp.weight_grad.linear import add_weight_grad, fused_kernels
from testkit import processes
from testkit.device_runs.nccl_runs import FailingBlock, step_on_nccl
from testkit.streams import StreamNetwork, virtual_cuda
from testkit.streams.torch_calls.cuda import replaced
from testkit.thread_runs import output_layer_runs
from testkit.train_flags import SMALL_MODEL
from testkit.training_ranks import train_here
from testkit.virtual_ranks import run_on_virtual_devices, virtual_machine
from tests.unit_tests.faults.position.test_hosts_that_run_ahead import Runtime
from tests.unit_tests.features.modules import test_modules_steps
from tests.unit_tests.testkit.streams import test_streams_steps

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import gpu_check
import soak
from gpu_day import outside, table
from gpu_day.bench import Bench, Machine
from gpu_day.parts import ahead as gpu_ahead
from gpu_day.parts import links as gpu_links
from gpu_day.parts import megatron as gpu_megatron
from gpu_day.parts import named as gpu_named
from gpu_day.unloaded import Launches
from made_parts import with_tables

from tests.gpu_programs import first_day

Scenario = Callable[[Path], None]


def on_ranks(size: int, program: Callable[[dist.ProcessGroup], None]) -> None:
    """Run ``program`` on the ranks of a job of ``size`` ranks, with their process group."""
    store = dist.HashStore()

    def rank_main(rank: int, size: int) -> None:
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
        assert dist.group.WORLD is not None
        program(dist.group.WORLD)
        dist.destroy_process_group()

    with virtual_machine():
        run_on_virtual_devices(rank_main, size)


def steps(folder: Path) -> None:
    """Run steps with channels, batches and their synchronisation, traces and metrics by events, NVTX ranges, pairs on
    two streams, debug mode, and copies to host memory and back.
    """
    for fields in (
        {"overlap_p2p_comm": True, "trace_dir": str(folder), "trace_steps": "1"},
        {"batch_p2p_comm": True, "batch_p2p_sync": True, "warm_up_p2p": False, "metrics": lambda *_: None},
        {"overlap_p2p_comm": True, "p2p_debug": True, "warm_up_p2p": False},
        {"overlap_p2p_comm": True, "pipeline_schedule": "pipe_offload"},
        {"overlap_p2p_comm": True, "pipeline_schedule": "dualpipe_v", "overlapped_forward_backward": on_two_streams},
    ):
        report, _ = step_on_nccl(2, 2, ToyData(4), **fields)
        assert not report.races, report
    assert len(list(folder.glob("trace-*.jsonl"))) == 2


def a_split_output_layer(folder: Path) -> None:
    """Run steps with an output layer whose collectives are on their own stream."""
    report, *_ = output_layer_runs.step_on_nccl(output_layer_runs.Case("vocab_1f1b", 2, 3))
    assert not report.races, report


def pairs_by_schedule_plans(folder: Path) -> None:
    """Run steps whose outputs are made and sent on the stream of all-to-alls."""
    test_streams_steps.test_outputs_of_the_other_stream_are_not_reused_before_they_are_sent()


def times_of_events(folder: Path) -> None:
    """Read the times of a traced step from its events, after the step."""

    def program(group: dist.ProcessGroup) -> None:
        plan = build_plan(PlanSpec("1f1b", 1, 1, 1))
        transport = SoloTransport(torch.device("cuda", 0))
        tracer = Tracer(folder, chosen_steps("1"), transport, 1)
        recording = tracer.next_step(plan, 1.0)
        assert recording is not None
        recording.start()
        for at in plan.programs[0]:
            recording.begin(at)
            recording.end(at)
        recording.finish()
        tracer.resolve_pending()

    on_ranks(1, program)
    assert '"step"' in next(folder.glob("trace-*.jsonl")).read_text()


def a_failure(folder: Path) -> None:
    errors: dict[int, str] = {}
    step_on_nccl(2, 1, ToyData(4), overlap_p2p_comm=True, block=FailingBlock, errors=errors)
    assert errors[0].startswith("PipelinePeerError")


def what_the_library_raises(folder: Path) -> None:
    """Raise the errors of a step in a capture, of a batch on an aborted communicator, of an abort that raises, of one
    that does not return, and of a close that raises.
    """
    released = threading.Event()

    def program(group: dist.ProcessGroup) -> None:
        transport = group_transport(group)
        needs, patience = Preparation(((0, 1),)), timedelta(seconds=30)
        transport.prepare(needs, patience)
        group._get_backend(transport.device)._set_default_timeout(patience)  # as Megatron's update_pg_timeout
        transport.prepare(needs, patience)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        with pytest.raises(P2PError, match="a whole pipeline step cannot be captured in a CUDA graph"):
            transport.prepare(needs, patience)
        graph.capture_end()
        for channel in transport._channels.values():
            channel.group.shutdown = _raises  # type: ignore[method-assign]
        transport.close()
        group._set_group_name("a hash")  # as split_group names its groups
        assert group_transport(group).name == "0-1 in group a hash"
        aborts: list[Any] = [_raises, lambda: released.wait(30.0)]
        whole = group.abort
        for group.abort in aborts:  # type: ignore[method-assign]
            abort.abort_groups([group])
        whole()
        with pytest.raises(P2PTransferError, match=r"batch of 1 .* cannot be posted: NCCL communicator was aborted"):
            transport.batch([P2PRequest(True, torch.zeros(1), 1 - transport.rank, "A")])
        for post, what in ((transport.isend, "send on channel A to"), (transport.irecv, "receive on channel A from")):
            with pytest.raises(P2PTransferError, match=f"{what} rank .* was aborted"):
                post(torch.zeros(1), 1 - transport.rank, "A")
        shape = SimpleNamespace(is_cuda=False)
        with pytest.raises(P2PError, match="no channel for shapes was made with rank"):
            transport.isend(shape, 1 - transport.rank, "A")
        transport._groups = SimpleNamespace(timeout=patience)
        transport._channels[0, 1, SHAPES] = SimpleNamespace(group=SimpleNamespace(send=_raises), peer=0)
        with pytest.raises(P2PTransferError, match="shape on channel A, with rank"):
            transport.isend(shape, 1 - transport.rank, "A")

    with replaced([(abort, "_NCCL_PATIENCE", 0.1)]):
        on_ranks(2, program)
    released.set()


def events_asked_of_the_runtime(folder: Path) -> None:
    """Ask in builds of torch without CUDA, and with a CUDA whose library is missing or there."""
    for built_with in (None, "999.0"):
        with replaced([(torch.version, "cuda", built_with)]):
            EventQueries().begin()
    with replaced([(torch.version, "cuda", "13.0"), (ctypes, "CDLL", Runtime)]):
        queries = EventQueries()
        queries.begin()
    answers = [queries.is_over(SimpleNamespace(cuda_event=event)) for event in (7, 8)]
    assert answers == [True, False]
    with pytest.raises(RuntimeError, match="returned 700"):
        queries.is_over(SimpleNamespace(cuda_event=9))


def the_wait_before_an_optimizer(folder: Path) -> None:
    """Wait before an optimizer, but not while a graph is captured."""

    def program(group: dist.ProcessGroup) -> None:
        for capturing in (False, True):
            with replaced([(torch.cuda, "is_current_stream_capturing", partial(bool, capturing))]):
                CompletedWork().synchronize()

    on_ranks(1, program)


def _raises(*_: Any) -> None:
    raise RuntimeError("NCCL says no")


def parity_counts_gpus(folder: Path) -> None:
    with virtual_machine():
        assert command._gpus() == torch.cuda.device_count()


def kernels(folder: Path) -> None:
    """Run the kernels of apex's extension, the replacements without it, and torch's addmm with a wide output."""

    def program(group: dist.ProcessGroup) -> None:
        name, module = "fused_weight_gradient_mlp_cuda", ModuleType("stand-in")
        sys.modules[name] = module
        assert fused_kernels() is module
        del sys.modules[name]
        assert fused_kernels() is None
        main_grad = torch.zeros(2, 2)
        add_weight_grad(None, torch.ones(3, 2), torch.ones(3, 2), main_grad)
        assert main_grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]

    on_ranks(1, program)


def the_first_day(folder: Path) -> None:
    """Run every part of scripts/gpu_check.py, on eight GPUs and on one; a second call has no part left to run."""
    page = folder / "results.md"
    with first_day.machine(8, *first_day.NO_FAULTS):
        for _ in range(2):
            assert gpu_check.main(["--out", str(page)]) == 0
    assert with_tables(page, page.read_text()).count("| pass |") == len(table.PARTS) - 2
    on_one_gpu = ("shaped_link", "overlap_mps", "links", "contexts", "exposed")
    for links, names in ((first_day.links, on_one_gpu), (first_day.no_links, ("shaped_link",))):
        with first_day.machine(1, (outside, "links_of", links), (gpu_links, "SHAPED", (0.0, math.inf))):
            assert gpu_check.main(["--out", str(folder / "alone.md"), "--only", *names]) == 0


def what_fails_on_the_first_day(folder: Path) -> None:
    """Run parts that fail: bytes change on their way, ranks hang, a GPU lacks FP8, and a file of other results has the
    JSON's name."""
    out = ["--out", str(folder / "results.md")]
    for fault, parts in (
        ("bytes change on their way", ["facts", "links", "steps"]),
        ("ranks hang after a fault", ["faults"]),
        ("processes have other ids outside", ["contexts"]),
        ("the GPUs have no FP8", ["megatron_fp8"]),
    ):
        with first_day.machine(2, *first_day.FAULTS[fault].places):
            assert gpu_check.main([*out, "--only", *parts]) == 1, "what has failed stays"
    (folder / "data" / "results.json").write_text("{}")
    with first_day.machine(2):
        assert gpu_check.main(out) == 2


MPS_CONTROL = "#!/bin/sh\ntest $# = 1 || cat\n"


def what_cannot_run_on_the_first_day(folder: Path) -> None:
    """Run parts that cannot succeed: their time ends, there is no compiler, ranks never leave their step, there is no
    Megatron-core, and no MPS or one whose clients fail. Then write the page alone."""
    none_left = Bench(Machine("nccl", 1), first_day.SIZES, 0.0)
    assert gpu_ahead._said(none_left, 2, "1f1b", "default") == gpu_ahead.NOT_REACHED
    with pytest.raises(RuntimeError, match="there is no nvidia-cuda-mps-control"), outside.mps():
        pass
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(MPS_CONTROL)
    program.chmod(0o755)
    with mock.patch.dict("os.environ", PATH=f"{folder}:{os.environ['PATH']}"), outside.mps() as environment:
        assert set(environment) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
    out = ["--out", str(folder / "results.md")]
    refused: list[tuple[Any, str, Any]] = [
        (outside, "compiled", lambda function: _raises),
        (gpu_named, "make_step", _has_no_megatron),
    ]
    with first_day.machine(1, *refused):
        assert gpu_check.main([*out, "--only", "more_waits", "named"]) == 0
    for parts, places in (
        (["named"], [(outside, "run_ranks", _raises)]),
        (["overlap_mps"], [(outside, "run_ranks", _raises)]),
        (["overlap_mps"], [(outside, "mps", _raises)]),
    ):
        with first_day.machine(1, *places):
            gpu_check.main([*out, "--only", *parts])
    assert gpu_check.main(["--page", *out]) == 0
    shown = with_tables(folder / "results.md", (folder / "results.md").read_text())
    assert "| Two operations that wait for each other | **fail** |" in shown
    assert "| What safety costs, under MPS | not run | 0 | NCCL says no |" in shown
    on_ranks(1, lambda group: Launches(torch.device("cuda", 0)).launch())


def _has_no_megatron(*_: Any) -> None:
    raise Unavailable("no Megatron-core here")


def what_a_machine_answers(folder: Path) -> None:
    def program(group: dist.ProcessGroup) -> None:
        assert outside.contexts() == [0]
        assert outside.peer_access(0, 0)
        assert outside.peak_mib(torch.device("cuda", 0), list) == 0.0
        memory: list[float] = []
        allocator = [
            (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 << 30)),
            (torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: memory.append(fraction)),
            (torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 3}),
            (torch, "compile", lambda function: function),
        ]
        with replaced(allocator):
            outside.limit_memory(torch.device("cuda", 0), 2.0)
            assert (memory, outside.allocator_retries(torch.device("cuda", 0))) == ([0.25], 3)
            assert outside.compiled(abs)(-1) == 1
        with replaced([(torch.cuda, "get_device_capability", lambda device: (8, 0))]):
            assert gpu_megatron.train(0, 1, torch.device("cuda", 0), ["--fp8-format"]) == {"not run": mock.ANY}

    reads = (torch.cuda, "can_device_access_peer", lambda one, other: True)
    with replaced([(torch._C, "_cuda_hasPrimaryContext", lambda index: True), reads]):
        on_ranks(1, program)
    assert outside.gpu_count() == torch.cuda.device_count()


def the_engines_on_a_gpu(folder: Path) -> None:
    """Run `scripts/benchmark.py gpu`."""
    sizes = argparse.Namespace(mib=[0.1], forward_ms=1.0, microbatches=2, rounds=1, timeout=60.0)
    with virtual_machine((processes, "run_processes", run_on_virtual_devices)):
        assert {row["engine"] for row in gpu_benchmark.run(sizes).rows} >= {"ours"}


def the_trainer_s_parts(folder: Path) -> None:
    def program(group: dist.ProcessGroup) -> None:
        device = process.choose_device("cuda", process.Process())
        assert device == torch.device("cuda", 0)
        with pytest.raises(ArgumentError, match="of 2 ranks here each needs a GPU, and there are 1"):
            process.choose_device("cuda", process.Process(local_world_size=2))
        assert (metrics.peak_tflops(device), metrics.peak_memory_gib(device)) == (0.0, 0.0)
        with pytest.raises(ArgumentError, match=r"--norm-impl is apex, but apex\.normalization cannot be imported"):
            libraries._required("--norm-impl", "apex.normalization", True)
        assert libraries._find("--norm-impl", "auto", "apex.normalization", "FusedLayerNorm", True) is None
        assert libraries._find("--flag", "auto", "math", "sqrt", True) is math.sqrt
        assert libraries._find("--flag", "math", "math", "sqrt", True) is math.sqrt
        with pytest.raises(ArgumentError, match=r"transformer_engine, but .* cannot be imported"):
            libraries._transformer_engine(parse(["--transformer-impl", "transformer_engine"]), device, False)

    on_ranks(1, program)


def the_training_program(folder: Path) -> None:
    """Train and continue the run on one rank, in this thread: only the main one may set signal handlers."""
    flags = [*SMALL_MODEL, "--device", "cuda", "--num-microbatches", "2", "--warmup-steps", "1"]
    flags += ["--max-data-bytes", "100000"]
    network = StreamNetwork(1, seed=None)
    with virtual_machine((training, "plot_loss", lambda *_: None)), network.running(0):
        train_here([*flags, "--run-dir", str(folder / "run"), "--train-steps", "2", "--measure", "1"])
        trainer = train_here([*flags, "--resume", str(folder / "run"), "--train-steps", "3"])
    assert trainer.steps_done == 3
    assert not network.devices[0].races, list(network.devices[0].races.values())


def the_soak_on_nccl(folder: Path) -> None:
    """Check its command line, and that it names no other backend; the run, whose processes are killed, is left out."""
    with virtual_machine((sys, "argv", ["soak.py", "--backend", "nccl"])):
        assert soak.parse_arguments().backend == "nccl"
    assert soak._other_backend("nccl") == ""


def what_a_gpu_holds(folder: Path) -> None:
    """Give the memory of GPUs on the command line: counted, within a limit, and beyond it."""
    model = ["--layers", "8", "--hidden-size", "64", "--seq-length", "64"]
    assert main(["simulate", "-s", "1f1b", "-P", "2", "-M", "4", "--memory", *model]) == 0
    question = ["advise", "-P", "2", "--global-batch", "4", "--forward-ms", "1", "--backward-ms", "2", "--jobs", "1"]
    for limit, status in (("80", 0), ("0.1", 1)):
        assert main([*question, "--activation-gb", "0.01", "--memory-gb", limit]) == status


def several_modules(folder: Path) -> None:
    setup = next(iter(test_modules_steps.JOINED.values()))
    with virtual_cuda():
        test_modules_steps.run(setup, StreamNetwork(test_modules_steps.size_of(setup)))


SCENARIOS: tuple[Scenario, ...] = (
    steps,
    a_split_output_layer,
    pairs_by_schedule_plans,
    times_of_events,
    a_failure,
    what_the_library_raises,
    events_asked_of_the_runtime,
    the_wait_before_an_optimizer,
    parity_counts_gpus,
    kernels,
    the_first_day,
    what_fails_on_the_first_day,
    what_cannot_run_on_the_first_day,
    what_a_machine_answers,
    the_engines_on_a_gpu,
    the_trainer_s_parts,
    the_training_program,
    the_soak_on_nccl,
    what_a_gpu_holds,
    several_modules,
)
