"""Run `megatron-pp check` on every functional recipe of Megatron-LM that has a pipeline. It must report no error for a
recipe that runs.

    python scripts/check_recipes.py --megatron DIR [--only TEXT ...] [--csv FILE]

DIR is a checkout of Megatron-LM. Its own parser and checks read each unchanged recipe, in a process that is forked from
one that has imported them. Recipes that generate text are left out, because other programs run them.
docs/data/megatron_recipes.csv, which scripts/megatron_recipes.py writes, says which recipes ran. The exit status is 1
if check reports an error for a recipe that ran and agrees with one process. Needs PyYAML.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_recipes import CASES, NO_SCHEDULE, SAME, SCRIPTS  # noqa: E402

from megatron_pp.tools.advise.layers.gpus import gpu_named  # noqa: E402
from megatron_pp.tools.check.command import Answer, check  # noqa: E402
from megatron_pp.tools.check.findings import ERROR, RISK  # noqa: E402
from megatron_pp.tools.check.jobs.job import Job  # noqa: E402
from megatron_pp.tools.check.jobs.megatron_flags import HOPPER, job_of_answer  # noqa: E402
from megatron_pp.tools.check.jobs.megatron_process import import_arguments, read_request  # noqa: E402
from megatron_pp.tools.check.jobs.read import words_of  # noqa: E402
from megatron_pp.tools.flags.flags import Flags  # noqa: E402
from megatron_pp.tools.parity.layout import PP, fewest_processes  # noqa: E402

RAN = ROOT / "docs" / "data" / "megatron_recipes.csv"
NODE = 8  # GPUs
NOT_TRAINED = "not trained"
DROPPED = {
    "--deterministic-mode requires: tp_comm_overlap=False": "parity leaves --tp-comm-overlap out: it needs a GPU"
}
"""Correct refusals by Megatron -> why the recipe ran nevertheless."""
COLUMNS = ("recipe", "ran", "errors", "risks", "text of errors")


@dataclass(frozen=True)
class Recipe:
    name: str
    script: Path
    words: tuple[str, ...]
    gpus: int


def recipes_of(megatron: Path) -> Iterator[Recipe]:
    for path in sorted((megatron / CASES).glob("*/*/model_config.yaml")):
        arguments = yaml.safe_load(path.read_text(encoding="utf-8"))["MODEL_ARGS"]
        if not isinstance(arguments, dict) or int(arguments.get(PP) or 1) < 2:
            continue
        words = tuple(word for name, value in arguments.items() for word in words_of(str(name), value))
        fewest = fewest_processes(Flags.read(list(words)))
        group = path.parent.parent.name
        script = megatron / SCRIPTS.get(group, "pretrain_gpt.py")
        gpus = fewest if NODE % fewest else NODE
        yield Recipe(f"{group}/{path.parent.name}", script, words, gpus)


def job_of(recipe: Recipe, imported: tuple[Any, Any, list[str]]) -> Job:
    """The recipe's job, as Megatron's parser reads it. It runs in a process of its own, because parsers and Megatron's
    modules keep state."""
    request = {"script": str(recipe.script), "module": False, "words": [*recipe.words], "gpus": recipe.gpus}
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        os.dup2(2, 1)
        with os.fdopen(send, "w") as answer:
            json.dump(read_request({**request, "generation": HOPPER}, imported), answer)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as said:
        text = said.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError(f"{recipe.name}: its process ended without an answer")
    return job_of_answer(json.loads(text), [str(recipe.script), *recipe.words], str(recipe.script), recipe.gpus)


def what_ran() -> Mapping[str, str]:
    """Recipe -> "yes" if both schedules have the numbers of one process, "differs" if they differ from it, or why
    not."""
    with RAN.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    words = {SAME: "yes", NO_SCHEDULE: NOT_TRAINED}
    found = {row["recipe"]: words.get(row["both schedules"], "not run") for row in rows}
    return {**found, **{row["recipe"]: "differs" for row in rows if "different" in row["beside one process"]}}


def row_of(recipe: Recipe, answer: Answer, ran: str) -> list[str]:
    errors, risks = answer.findings(ERROR), answer.findings(RISK)
    names = [", ".join(sorted({one.name for one in found})) for found in (errors, risks)]
    return [recipe.name, ran, *names, " | ".join(one.text for one in errors)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="a checkout of Megatron-LM")
    parser.add_argument("--only", nargs="*", default=None, metavar="TEXT", help="recipes whose names have one of these")
    parser.add_argument("--csv", type=Path, default=None, metavar="FILE", help="write the table")
    args = parser.parse_args()
    megatron = args.megatron.resolve()
    if not (megatron / CASES).is_dir():
        parser.error(f"--megatron {megatron}: it has no {CASES}")
    rows = run(megatron, args.only)
    if args.csv is not None:
        with args.csv.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    for what, count in Counter((row[1], "errors" if row[2] else "no error") for row in rows).most_common():
        print(f"{count} of {len(rows)}: ran: {what[0]}, {what[1]}")
    false = false_errors(rows)
    for row in false:
        print(f"false error in {row[0]}: {row[4]}", file=sys.stderr)
    return int(bool(false))


def run(megatron: Path, only: Sequence[str] | None) -> list[list[str]]:
    """A row for each recipe whose name contains one of ``only``. The checkout's parser stays imported."""
    sys.path.insert(0, str(megatron))
    imported = import_arguments(HOPPER)
    ran = what_ran()
    gpu = gpu_named("h100")
    rows = []
    for recipe in recipes_of(megatron):
        if ran.get(recipe.name) != NOT_TRAINED and (only is None or any(text in recipe.name for text in only)):
            answer = check(job_of(recipe, imported), gpu)
            rows.append(row_of(recipe, answer, ran.get(recipe.name, "not run")))
            print(" | ".join(rows[-1]), flush=True)
    return rows


def false_errors(rows: Sequence[list[str]]) -> list[list[str]]:
    """The rows with an error for a recipe that ran and agrees with one process."""
    return [row for row in rows if row[1] == "yes" and row[2] and not any(text in row[4] for text in DROPPED)]


if __name__ == "__main__":
    raise SystemExit(main())
