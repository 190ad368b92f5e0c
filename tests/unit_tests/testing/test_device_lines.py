"""Every line of the project that is there for a GPU or for NCCL runs on virtual devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.device_lines import ROOT, LineLog, device_lines, project_files
from tests.harness.device_scenarios import SCENARIOS

# (file, statement's first line): why no scenario runs it.
EXEMPT: dict[tuple[str, str], str] = {}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)


def test_every_line_of_the_device_runs(tmp_path: Path) -> None:
    files = project_files()
    log = LineLog(files)
    for scenario in SCENARIOS:
        folder = tmp_path / scenario.__name__
        folder.mkdir()
        with log.watching():
            scenario(folder)
    found, missing = 0, []
    for path in files:
        name, lines = str(path.relative_to(ROOT)), path.read_text().splitlines()
        left = [n for n in log.missing(path) if (name, lines[n - 1].strip()) not in EXEMPT]
        found += len(device_lines(path))
        print(f"{name}: {len(device_lines(path))} lines of the device, {len(log.missing(path))} not run")
        missing += [f"{name}:{n}: {lines[n - 1].strip()}" for n in left]
    print(f"{found} lines of the device; {len(missing)} not run, {len(EXEMPT)} exempt")
    assert not missing, "no scenario runs\n" + "\n".join(missing)
