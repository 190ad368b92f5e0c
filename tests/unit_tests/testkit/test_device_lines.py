"""Every line of the project that is there for a GPU or for NCCL runs on virtual devices."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from testkit.processes import run_processes
from tests.gpu_programs.device_lines import NOT_MEASURED, ROOT, LineLog, device_lines, lines_that_run, project_files

PROGRAMS = ("tests.gpu_programs.device_scenarios", "tests.gpu_programs.device_scenario_megatron")
# (file, line): why no scenario runs it.
_ONLY_WITHOUT_A_GPU = "part of what replaces torch.zeros on machines that have no GPU"
EXEMPT = {
    ("benchmarks/engine_megatron.py", 'if kwargs.get("device") == "cuda":'): _ONLY_WITHOUT_A_GPU,
    ("benchmarks/engine_megatron.py", 'kwargs["device"] = "cpu"'): _ONLY_WITHOUT_A_GPU,
    (
        "megatron_pp/tools/parity/cpu/latent_layers.py",
        "tracker = random.get_cuda_rng_tracker()",
    ): "in ranks of models with latent attention",
    (
        "megatron_pp/tools/parity/workers/processes.py",
        'os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # for Megatron',
    ): "in ranks that are forked",
    (
        "megatron_pp/tools/parity/script.py",
        'if not getattr(torch.cuda, "_megatron_pp_stand_in", False):',
    ): "in processes of scripts",
    ("scripts/megatron_own_tests.py", "if not torch.cuda.is_available():"): "in processes of Megatron's tests",
    ("scripts/megatron_pretrain_gpt.py", "if not torch.cuda.is_available():"): "needs a checkout of Megatron-LM",
    (
        "scripts/torch_own_tests.py",
        'for name in ("requires_accelerator_dist_backend", "requires_nccl", "skip_if_lt_x_gpu"):',
    ): "in processes of torch's tests",
}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_every_line_of_the_device_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    files = project_files()
    log = LineLog(files)
    for ran in run_processes(lines_that_run, len(PROGRAMS), (tmp_path, PROGRAMS, files), backend=None, timeout=600.0):
        for path, lines in ran.items():
            log.ran[path] |= lines

    exempt, missing, total = set(), [], 0
    for path in files:
        name, lines = str(path.relative_to(ROOT)), path.read_text().splitlines()
        left = {(name, lines[number - 1].strip()): number for number in log.missing(path)}
        total += len(device_lines(path))
        print(f"{name}: {len(device_lines(path)) - len(left)} of {len(device_lines(path))} lines of the device run")
        exempt |= left.keys() & EXEMPT.keys()
        missing += [f"{name}:{number}: {line}" for (_, line), number in left.items() if (name, line) not in EXEMPT]
    print(f"{total} lines of the device: {total - len(exempt) - len(missing)} run, {len(exempt)} exempt")
    assert not missing, "no scenario runs\n" + "\n".join(missing)
    assert exempt == EXEMPT.keys(), "exempt, but they run or are gone"


def test_files_that_are_not_measured_exist() -> None:
    assert [path for path in NOT_MEASURED if not path.exists()] == []


PROGRAM = '''
import torch

NAME = "nccl"                                # runs wherever it is imported

def both(backend, x):
    """Of "nccl" and gloo."""
    y = x + 1
    if backend != "nccl":                    # DEVICE
        return y
    y += 1                                   # DEVICE
    for i in range(y):                       # DEVICE
        y += i                               # DEVICE
    return y                                 # DEVICE

def ternary(device):
    return 1 if device.type == "cuda" else 2  # DEVICE

def whole(device):
    began = 1                                # DEVICE
    torch.cuda.synchronize(device)           # DEVICE
    return began                             # DEVICE

def asked(x):
    if x and not torch.cuda.is_available():  # DEVICE
        return "no cuda here"
    if x:
        return 1
    return 2

class _CudaThing:
    size = "cuda"

    def get(self):
        return self.size                     # DEVICE
'''


def test_lines_of_the_device_are_found(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    marked = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if "# DEVICE" in line]
    assert list(device_lines(path)) == marked


def test_lines_that_do_not_run_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "marked_program.py"
    path.write_text("def on_cuda(x):\n    if x:\n        return 1\n    return 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    log = LineLog([path])
    with log.marking():
        program = importlib.import_module("marked_program")
    monkeypatch.delitem(sys.modules, "marked_program")
    assert program.on_cuda(True) == 1
    assert log.missing(path) == [4]
