"""docs/migrating: the programs on the pages run, and have the numbers that the pages promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.pages import PageOutput, code_blocks, run_page


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PageOutput]]:
    files = {**code_blocks("docs/migrating/from_torch.md"), **code_blocks("docs/migrating/from_deepspeed.md")}
    assert set(files) == {"before.py", "after.py", "layers.py"}
    folder: Path = tmp_path_factory.mktemp("migrating")
    return run_page(files, list(files), folder, 2)


def test_torchs_schedule_and_ours_give_the_same_losses(outputs: dict[str, list[PageOutput]]) -> None:
    (first, before), (_, after) = outputs["before.py"], outputs["after.py"]
    assert first.printed == "", "the first stage has no loss"
    assert len(set(before.printed.splitlines())) == 3, "three steps, and it learns"
    assert after.printed == before.printed


def test_a_list_of_layers(outputs: dict[str, list[PageOutput]]) -> None:
    printed = [output.printed for output in outputs["layers.py"]]
    assert printed == ["0 losses, 2 gradients equal\n", "4 losses, 4 gradients equal\n"]
