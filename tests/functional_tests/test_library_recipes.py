"""docs/recipes/library.md: every recipe runs as it stands on the page, and ends with the numbers of one process.
Without its synchronisation the numbers differ, and the engine has warned.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.pages import PageOutput, code_blocks, run_page

PAGE = "docs/recipes/library.md"
REPLICATED = ["ddp.py", "all_reduce.py", "overlapped.py"]
PIPELINED = ["tied.py", "clip.py", "evaluate.py", "checkpoint.py"]
SYNCHRONISED = {"tied.py": "sum_tied_gradients", "all_reduce.py": "average_gradients"}  # by this function


def _without_synchronisation(recipe: str, code: str) -> str:
    line = f"config.finalize_model_grads_func = {SYNCHRONISED[recipe]}\n"
    assert line in code
    suppressed = "\nimport contextlib\nwith contextlib.suppress(AssertionError):\n    check("
    return code.replace(line, "").replace("\ncheck(", suppressed)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PageOutput]]:
    files = code_blocks(PAGE)
    assert set(files) == {"common.py", *REPLICATED, *PIPELINED}, "each recipe of the page is run here"
    files |= {f"broken_{name}": _without_synchronisation(name, files[name]) for name in SYNCHRONISED}
    folder: Path = tmp_path_factory.mktemp("recipes")
    pipelined = run_page(files, [*PIPELINED, "broken_tied.py"], folder, 2)
    return {**pipelined, **run_page(files, [*REPLICATED, "broken_all_reduce.py"], folder, 4)}


@pytest.mark.parametrize("recipe", REPLICATED + PIPELINED)
def test_its_numbers_are_those_of_one_process(outputs: dict[str, list[PageOutput]], recipe: str) -> None:
    replicas = 2 if recipe in REPLICATED else 1
    first = "0 losses and 9 gradients are those of one process\n"  # an embedding, two blocks of four parameters
    last = "8 losses and 9 gradients are those of one process\n"  # two blocks and the output layer
    assert [output.printed for output in outputs[recipe]] == [first] * replicas + [last] * replicas
    assert not any("nothing averages" in output.warnings for output in outputs[recipe])
    assert not any("nothing sums" in output.warnings for output in outputs[recipe])


@pytest.mark.parametrize(("recipe", "warning"), [("tied.py", "nothing sums"), ("all_reduce.py", "nothing averages")])
def test_without_synchronisation_they_differ_and_the_engine_warns(
    outputs: dict[str, list[PageOutput]], recipe: str, warning: str
) -> None:
    broken = outputs[f"broken_{recipe}"]
    assert [output.printed for output in broken] == [""] * len(broken)
    assert [output.warnings.count(warning) for output in broken] == [1] + [0] * (len(broken) - 1)
    assert PAGE in broken[0].warnings
