"""The programs on pages and in examples/ run unchanged and end with the numbers that they promise: the quick start,
docs/migrating, docs/recipes/library.md, a Llama and attention residuals. They share two processes; those with replicas
share four. The parts of the README and of docs/ that commands make are up to date. test_printed.py runs the commands.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.pages import ROOT, PageOutput, code_blocks, run_page

QUICK_START = "docs/quick_start.md"
MIGRATING = ["before.py", "after.py", "layers.py"]
LIBRARY = "docs/recipes/library.md"
REPLICATED = ["ddp.py", "all_reduce.py", "overlapped.py"]
PIPELINED = ["tied.py", "clip.py", "evaluate.py", "checkpoint.py"]
SYNCHRONISED = {"tied.py": "sum_tied_gradients", "all_reduce.py": "average_gradients"}  # by this function
LLAMA = {"interleaved_1f1b.py": "interleaved_1f1b", "zb_v.py": "zb_v"}
_LLAMA_STEP = r"step \d rank \d: (torchtitan|own Llama|zb_v), loss [\d.]+, largest difference (\S+)"

Outputs = dict[str, list[PageOutput]]

adds_as_the_page = pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="the page was made with Python 3.11; since 3.12 sum() of floats is exact, and 2.645 s is rounded down",
)


def _quick_start() -> dict[str, str]:
    """Return the program unchanged, and with the other schedule that it names for the first 10 of its 50 steps."""
    example = code_blocks(QUICK_START)["example.py"]
    named = re.search(r'`(SCHEDULE = "\w+")`', (ROOT / QUICK_START).read_text())
    assert named is not None
    other = re.sub(r'SCHEDULE = "\w+"', named[1], example)
    assert other != example
    other, count = re.subn(r"in range\(50\):", "in range(10):", other)
    assert count == 1
    return {"example.py": example, "other.py": other}


def _from_torch() -> dict[str, str]:
    """Return the program of the page, and the program with the two changed lines."""
    page = "docs/migrating/from_torch.md"
    before = after = code_blocks(page)["before.py"]
    lines = code_blocks(page, "diff")["after.diff"].splitlines()
    for old, new in zip(lines[::2], lines[1::2], strict=True):
        assert (old[0], new[0], f"\n{old[1:]}\n" in after) == ("-", "+", True), old
        after = after.replace(old[1:], new[1:])
    return {"before.py": before, "after.py": after}


def _without_synchronisation(recipe: str, code: str) -> str:
    line = f"config.finalize_model_grads_func = {SYNCHRONISED[recipe]}\n"
    assert line in code
    suppressed = "\nimport contextlib\nwith contextlib.suppress(AssertionError):\n    check("
    return code.replace(line, "").replace("\ncheck(", suppressed)


def _example(name: str, *arguments: str) -> str:
    path = str(ROOT / "examples" / name)
    return f"import runpy, sys\nsys.argv[1:] = {list(arguments)}\nrunpy.run_path({path!r}, run_name='__main__')"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    library = code_blocks(LIBRARY)
    assert set(library) == {"common.py", *REPLICATED, *PIPELINED}, "each recipe of the page is run here"
    library |= {f"broken_{name}": _without_synchronisation(name, library[name]) for name in SYNCHRONISED}
    migrating = {**_from_torch(), **code_blocks("docs/migrating/from_deepspeed.md")}
    assert set(migrating) == set(MIGRATING)
    examples = {
        name: _example("llama_stages.py", "--schedule", schedule, "--steps", "1") for name, schedule in LLAMA.items()
    }
    examples["stages.py"] = _example("torch_pipelining.py", "--schedule", "zb_v", "--steps", "1")
    examples["residuals.py"] = _example("attention_residuals.py", "--chunks", "2", "--steps", "1")
    start = _quick_start()
    files = {**library, **migrating, **examples, **start}
    folder: Path = tmp_path_factory.mktemp("pages")
    pairs = run_page(files, [*start, *MIGRATING, *PIPELINED, "broken_tied.py", *examples], folder, 2)
    sharded = _example("torch_pipelining.py", "--schedule", "zb_v", "--replicas", "2", "--steps", "1")
    on_four = {**library, "sharded.py": sharded}
    return {**pairs, **run_page(on_four, [*REPLICATED, "broken_all_reduce.py", "sharded.py"], folder, 4)}


def _printed(outputs: Outputs, name: str) -> list[str]:
    return [output.printed for output in outputs[name]]


def test_the_quick_start_trains_the_same_under_any_schedule(outputs: Outputs) -> None:
    first, last = _printed(outputs, "example.py")
    losses = [float(line.split()[1]) for line in last.splitlines()]
    assert first == ""
    assert len(losses) == 5
    assert losses[-1] < 0.9 * losses[0]
    assert _printed(outputs, "other.py") == [last.splitlines(keepends=True)[0], ""]  # in a V rank 0 has the last stage


def test_torchs_schedule_and_ours_give_the_same_losses(outputs: Outputs) -> None:
    first, before = _printed(outputs, "before.py")
    assert first == "", "the first stage has no loss"
    assert len(set(before.splitlines())) == 3, "three steps, and it learns"
    assert _printed(outputs, "after.py")[1] == before


def test_the_recipe_of_a_list_of_layers_has_the_numbers_of_one_process(outputs: Outputs) -> None:
    assert _printed(outputs, "layers.py") == ["0 losses, 2 gradients equal\n", "4 losses, 4 gradients equal\n"]


@pytest.mark.parametrize("recipe", REPLICATED + PIPELINED)
def test_a_recipes_numbers_are_those_of_one_process(outputs: Outputs, recipe: str) -> None:
    replicas = 2 if recipe in REPLICATED else 1
    first = "0 losses and 9 gradients are those of one process\n"  # an embedding, two blocks of four parameters
    last = "8 losses and 9 gradients are those of one process\n"  # two blocks and the output layer
    assert _printed(outputs, recipe) == [first] * replicas + [last] * replicas
    assert not any(re.search("nothing (averages|sums)", output.warnings) for output in outputs[recipe])


@pytest.mark.parametrize(("recipe", "warning"), [("tied.py", "nothing sums"), ("all_reduce.py", "nothing averages")])
def test_recipes_without_gradient_synchronisation_differ_and_the_engine_warns(
    outputs: Outputs, recipe: str, warning: str
) -> None:
    broken = outputs[f"broken_{recipe}"]
    assert [output.printed for output in broken] == [""] * len(broken)
    assert [output.warnings.count(warning) for output in broken] == [1] + [0] * (len(broken) - 1)
    assert LIBRARY in broken[0].warnings


@pytest.mark.parametrize("name", [*LLAMA, "stages.py", "sharded.py"])
def test_a_llama_has_the_numbers_of_one_process(outputs: Outputs, name: str) -> None:
    for printed in _printed(outputs, name):
        steps = re.findall(_LLAMA_STEP, printed)
        assert len(steps) == 1, printed
        assert [float(difference) for _, difference in steps] == [0.0]


def test_the_recipe_of_skipping_blocks_has_the_numbers_of_one_process(outputs: Outputs) -> None:
    printed = _printed(outputs, "residuals.py")
    assert "blocks sent per microbatch, and on the busiest hop: (5, 2)" in printed[0]
    for rank, text in enumerate(printed):
        found = re.search(rf"step 1 rank {rank}: loss [\d.]+, largest difference (\S+)", text)
        assert found is not None, text
        assert float(found[1]) < 1e-12


def _stages_of_ours() -> list[str]:
    """Return each call of ``megatron_pp.PipelineStage`` in the README, docs/ and examples/, with its file. torch's
    class of the same name takes the stage's number as its second argument, and a device."""
    found = []
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*")]
    for file in (file for file in files if file.suffix in (".md", ".py", ".ipynb")):
        text = file.read_text()
        for start in re.finditer(r"PipelineStage\(", text):
            end, depth = start.end(), 1
            while depth and end < len(text):
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            call = text[start.start() : end]
            if "torch.device" not in call:
                found.append(f"{file.relative_to(ROOT)}: {call}")
    return found


def test_every_stage_on_a_page_says_its_number() -> None:
    stages = _stages_of_ours()
    assert len(stages) > 10
    assert [call for call in stages if not re.search(r"\bstage=|PipelineStage\(\.\.\.\)", call)] == []


@pytest.mark.parametrize(
    "command",
    [
        "config_table.py",
        "known_faults.py",
        pytest.param("model_recipes.py", marks=adds_as_the_page),
        "page_answers.py check",
        "readme_tables.py",
        "readme_picture.py",
    ],
)
def test_generated_files_equal_what_their_commands_make(command: str) -> None:
    arguments = [sys.executable, *shlex.split(str(ROOT / "scripts" / command)), "--check"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
