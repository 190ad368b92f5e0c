#!/usr/bin/env python
"""Write the table of docs/recipes/models.md: what `megatron-pp check` says of each recipe in examples/recipes.

python scripts/model_recipes.py [--check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from made_parts import MadePart, markdown_table, renew  # noqa: E402

from megatron_pp.tools.advise.gpus import gpu_named  # noqa: E402
from megatron_pp.tools.check.command import Answer, check  # noqa: E402
from megatron_pp.tools.check.findings import ERROR  # noqa: E402
from megatron_pp.tools.check.read import Given, read_job  # noqa: E402

PAGE, RECIPES = ROOT / "docs" / "recipes" / "models.md", ROOT / "examples" / "recipes"
COMMAND = re.compile(r"megatron-pp check --gpus (\d+) --gpu (\S+) examples/recipes/(\S+)")


def answer_of(path: Path) -> Answer:
    """As the command in the file's head asks. The flags are read by the table, also where Megatron-LM is installed."""
    found = COMMAND.search(path.read_text(encoding="utf-8"))
    if found is None or found[3] != path.name:
        raise SystemExit(f"{path} does not say how it is checked")
    return check(read_job(Given([str(path)], int(found[1]))), gpu_named(found[2]))


def table() -> str:
    rows = [["recipe", "GPUs", "Megatron's schedule", "bubble", "fastest of this engine", "its step", "fullest rank"]]
    for path in sorted(RECIPES.glob("*.sh")):
        answer = answer_of(path)
        data = {section.name: section.data for section in answer.sections}
        wrong = answer.findings(ERROR)
        if wrong:
            raise SystemExit(f"{path.name}: {wrong[0].text}")
        rows.append([f"[`{path.stem}`](../../examples/recipes/{path.name})", *_numbers(answer, data)])
    return markdown_table(rows)


def _numbers(answer: Answer, data: dict[str, object]) -> list[str]:
    time, memory = data["time"], data["memory"]
    assert isinstance(time, dict)
    assert isinstance(memory, dict)
    ours = [one for one in time["better"] if "pipeline_schedule" in one["change"]]
    name = re.search(r"pipeline_schedule='(\w+)'", ours[0]["change"]) if ours else None
    return [
        f"{answer.job.gpus:,}",
        f"{time['step_ms'] / 1000:.3g} s",
        f"{time['bubble']:.1%}",
        f"`{name[1]}`" if name else "Megatron's",
        f"{ours[0]['step_ms'] / 1000:.3g} s" if ours else "the same",
        f"{memory['ranks'][memory['fullest']]['total']:.3g} of {memory['device']:g} GB",
    ]


if __name__ == "__main__":
    sys.exit(renew([MadePart(PAGE, "recipes", table)], __doc__.partition("\n\n")[0]))
