"""What scripts/gpu_check.py says before it begins; what it does is tried by ``--cpu``, which takes minutes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import gpu_check


@pytest.mark.parametrize("out", [".", "no/such/folder/results.md"])
def test_a_report_that_could_not_be_written_is_refused_at_once(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check.Check, "run", lambda check: pytest.fail("it began"))
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--cpu", "--out", str(tmp_path / out)])
    assert ended.value.code == 2
    assert f"--out {tmp_path / out}: must be a file" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "torch finds no CUDA device here; --cpu tries the script" in capsys.readouterr().err
