"""What the scripts start listens on the loopback alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Of all sockets of this machine, those that listen on the port of the job's store, by address.
WORKER = """
import os
from tests.unit_tests.comm.test_bound_stores import listeners
print("listens on", listeners(int(os.environ["MASTER_PORT"])))
"""


@pytest.mark.slow
def test_the_store_of_a_launch_listens_on_the_loopback(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{WORKER}")
    launch = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--standalone", "--nproc-per-node", "1", str(script)]
    ran = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert "listens on ['127.0.0.1']" in ran.stdout, ran.stdout + ran.stderr


def test_scripts_start_ranks_through_it() -> None:
    """torchrun's own store listens on all interfaces."""
    module, command = r"-m\"?,? *\"?torch\.distributed\.run", r"^\s*(exec )?torchrun "
    found = []
    for kind, starts in (("py", module), ("sh", f"{module}|{command}")):
        sources = list(ROOT.glob(f"scripts/*.{kind}"))
        assert len(sources) > 5
        found += [path.name for path in sources if re.search(starts, path.read_text(), re.MULTILINE)]
    assert found == []
