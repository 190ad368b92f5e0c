"""Run `megatron-pp parity --strict` on every functional recipe of Megatron-LM that has a pipeline, and write a table.

    python scripts/megatron_recipes.py --megatron DIR [--only TEXT ...] [--jobs N] [--csv FILE [--resume]]

DIR is a checkout of Megatron-LM. Recipes are the `model_config.yaml` under tests/functional_tests/test_cases whose
pipeline has more than one stage. `megatron-pp parity` makes them small, and runs them on the CPU under both schedules
and as one process. Recipes whose small commands are equal share a run. A recipe passes if both schedules compute the
same bits. If a run fails, Megatron's schedule runs alone, to show which schedule failed. The exit status is 1 if a
recipe that Megatron runs does not pass. Needs PyYAML.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_pp.tools.check.jobs.read import words_of  # noqa: E402
from megatron_pp.tools.flags.flags import Flags  # noqa: E402
from megatron_pp.tools.parity.layout import PP, Layout, fewest_processes  # noqa: E402
from megatron_pp.tools.parity.shrink import for_parity  # noqa: E402

CASES = Path("tests/functional_tests/test_cases")
SCRIPTS = {"bert": "examples/bert/pretrain_bert.py", "hybrid": "pretrain_hybrid.py", "t5": "examples/t5/pretrain_t5.py"}
NOT_TRAINING = ("inference", "_rl", "grpo")  # parts of the names of recipes that generate text
LOGGED = ("--log-", "--tensorboard", "--wandb", "--timing", "--save", "--load", "--exit", "--ckpt", "--use-persistent")
MOST = 16  # processes
SAME, OTHER_BITS, OURS, MEGATRON, NO_SCHEDULE = (
    "same bits",
    "other bits",
    "fails with this engine",
    "fails with Megatron's schedule",
    "no training schedule",
)


@dataclass(frozen=True)
class Recipe:
    name: str
    script: str
    flags: Flags

    @property
    def trains(self) -> bool:
        return not any(word in self.name for word in NOT_TRAINING)

    def key(self) -> tuple[object, ...]:
        """A key that is equal for recipes whose small commands are equal."""
        world = fewest_processes(self.flags)
        small, _ = for_parity(Layout(self.flags, world), 2, shrunk=True, gpu=False)
        flags = sorted(item for item in small.flags.items if not item[0].startswith(LOGGED))
        return self.script, world, tuple(flags)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a recipe. ``result``: one of the five above. ``alone``: how each engine compares with one process.
    ``reason``: why a run failed."""

    result: str
    layout: str = ""
    alone: str = ""
    reason: str = ""


def recipes_of(megatron: Path) -> list[Recipe]:
    found = []
    for path in sorted((megatron / CASES).glob("*/*/model_config.yaml")):
        arguments = yaml.safe_load(path.read_text())["MODEL_ARGS"]
        if not isinstance(arguments, dict) or int(arguments.get(PP) or 1) < 2:
            continue
        words = [word for name, value in arguments.items() for word in words_of(str(name), value)]
        script = SCRIPTS.get(path.parent.parent.name, "pretrain_gpt.py")
        layout = few_enough(Flags.read(words))
        found.append(Recipe(f"{path.parent.parent.name}/{path.parent.name}", script, layout.flags))
    return found


def few_enough(flags: Flags) -> Layout:
    """The layout with at most MOST processes, if possible. EP, TP, CP and PP are halved until it fits."""
    layout = Layout(flags, fewest_processes(flags))
    while layout.world > MOST:
        halves = (layout.halved(part) for part in ("EP", "TP", "CP", "PP"))
        fewest = (one.resized(1) for one in halves if one is not None)
        smaller = next((one for one in fewest if one.world < layout.world), None)
        if smaller is None:
            break
        layout = smaller
    return layout


def parity(recipe: Recipe, megatron: Path, engine: str, deadline: float) -> dict[str, Any]:
    """The JSON object that `megatron-pp parity` prints, or its error."""
    options = f"--json --strict --masks full --engine {engine} --deadline {deadline}"
    command = [sys.executable, "-m", "megatron_pp", "parity", *options.split()]
    command += [str(megatron / recipe.script), *recipe.flags.words()]
    path = os.pathsep.join([str(ROOT), str(megatron)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=20 * deadline, check=False
        )
    except subprocess.TimeoutExpired:
        return {"verdict": None, "error": f"no answer within {20 * deadline:g} s"}
    try:
        return json.loads(ran.stdout)
    except ValueError:
        return {"verdict": None, "error": ran.stderr[-2000:]}


def outcome_of(recipe: Recipe, megatron: Path, deadline: float) -> Outcome:
    if not recipe.trains:
        return Outcome(NO_SCHEDULE)
    said = parity(recipe, megatron, "both", deadline)
    if said["verdict"] is not None:
        alone = ", ".join(f"{engine}: {verdict}" for engine, verdict in said["engines"].items())
        return Outcome(SAME if said["same"] else OTHER_BITS, said["layout"], alone)
    theirs = parity(recipe, megatron, "megatron", deadline)
    failed = theirs if theirs["verdict"] is None else said
    reason = str(failed.get("error") or "").strip().splitlines()
    return Outcome(MEGATRON if theirs["verdict"] is None else OURS, reason=(reason or [""])[-1].strip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="a checkout of Megatron-LM")
    parser.add_argument("--only", nargs="*", default=None, metavar="TEXT", help="recipes whose names have one of these")
    parser.add_argument("--jobs", type=int, default=1, help="commands that run at the same time; default: 1")
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds for each run; default: 240")
    parser.add_argument("--csv", type=Path, default=None, metavar="FILE", help="write the table, row by row")
    parser.add_argument("--resume", action="store_true", help="keep the rows of FILE that are not failures")
    args = parser.parse_args()
    if not (args.megatron / CASES).is_dir():
        parser.error(f"--megatron {args.megatron}: it has no {CASES}")
    if args.resume and args.csv is None:
        parser.error("--resume needs --csv FILE, whose rows it keeps")
    megatron = args.megatron.resolve()
    recipes = [one for one in recipes_of(megatron) if args.only is None or any(text in one.name for text in args.only)]
    groups: dict[tuple[object, ...], list[Recipe]] = {}
    for recipe in recipes:
        groups.setdefault(recipe.key(), []).append(recipe)
    print(f"{len(recipes)} recipes, {len(groups)} different small commands", file=sys.stderr, flush=True)
    rows = _rows_of(args.csv) if args.resume else {}
    left = [same for same in groups.values() if not all(recipe.name in rows for recipe in same)]
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(outcome_of, same[0], megatron, args.deadline): same for same in left}
        try:
            for done in as_completed(running):
                outcome = done.result()
                for recipe in running[done]:
                    row = [recipe.name, outcome.layout, outcome.result, outcome.alone, outcome.reason]
                    rows[recipe.name] = row
                    print(" | ".join(row), flush=True)
                if args.csv is not None:
                    _write(args.csv, rows)
        finally:  # an interrupt waits only for the runs that have started
            pool.shutdown(wait=False, cancel_futures=True)
    for result, count in Counter(row[2] for row in rows.values()).most_common():
        print(f"{count} of {len(rows)}: {result}")
    return int(any(row[2] in (OTHER_BITS, OURS) for row in rows.values()))


def _rows_of(path: Path) -> dict[str, list[str]]:
    """The rows of an interrupted table, by recipe. Failures are left out, because a busy machine may have caused
    them."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row[0]: row for row in list(csv.reader(file))[1:] if row[2] not in (OURS, MEGATRON)}


def _write(path: Path, rows: dict[str, list[str]]) -> None:
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["recipe", "layout", "both schedules", "beside one process", "reason"])
        writer.writerows(sorted(rows.values()))
    unfinished.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
