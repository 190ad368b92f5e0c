"""What Megatron's schedule functions make use of is found in their source, and compared with the table by release."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from megatron_pp.integrations.megatron_reads import COMMUNICATOR, known_reads, names_read
from megatron_pp.integrations.megatron_versions import ENTRIES
from tests.conftest import PROJECT_ROOT

ALONE = ENTRIES[0]

SOURCE = """
@traced('step')
def forward_backward(*, model: Module, num_microbatches: int, slots=None):
    config = get_model_config(model)
    outputs = []
    if hasattr(config, 'graph_slots') and getattr(config, "graphs", None):
        outputs.append(forward_step(model, config.timers, slot=slots))
    for chunk in range(num_microbatches):
        chunk.reset_slots(value=1)
    def helper(index: int):
        return len(outputs) + index
    config.finalize(helper(0), groups=model.groups)
    backward = partial(backward_step, model)
    return backward()
"""


def test_what_a_function_makes_use_of() -> None:
    assert names_read(SOURCE) == {
        *("traced", "get_model_config", "forward_step", "forward_step(slot=)", "partial", "backward_step"),
        *("config.graph_slots", "config.graphs", "config.timers", "config.finalize", "config.finalize(groups=)"),
        *(".reset_slots", ".groups"),
    }


def test_a_communicators_config_is_its_own() -> None:
    source = "class C:\n    def send(self, x):\n        return self.config.compresses(x), self.rank"
    assert names_read(source) == {".config", "config.compresses", ".rank"}


def test_names_are_known_from_their_release_on() -> None:
    assert "config.moe_paged_stash" not in known_reads(ALONE, (0, 17))
    assert "config.moe_paged_stash" in known_reads(ALONE, (0, 18)) & known_reads(ALONE, (1, 0))
    assert ".synchronize_param_gather" not in known_reads(ENTRIES[1], (0, 20))
    assert "config.moe_paged_stash" not in known_reads(COMMUNICATOR, (0, 20))


def test_the_script_prints_what_a_checkout_has_beyond_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "megatron/core/pipeline_parallel"
    folder.mkdir(parents=True)
    (folder.parent / "package_info.py").write_text("MAJOR = 0\nMINOR = 21\n")
    functions = [f"def {name}(model):\n    return set_slot(get_model_config(model).slots)\n" for name in ENTRIES]
    (folder / "schedules.py").write_text("\n".join(functions))
    (folder / "p2p_communication.py").write_text("class P2PCommunicator:\n    x = None\n")
    monkeypatch.setattr(sys, "argv", ["megatron_reads.py", str(tmp_path)])
    runpy.run_path(str(PROJECT_ROOT / "scripts" / "megatron_reads.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "(0, 21)" in printed
    assert f'"{ALONE}":\n        .slots set_slot\n' in printed
    assert COMMUNICATOR not in printed
