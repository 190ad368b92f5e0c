#!/usr/bin/env python
"""Write the table of Megatron's flags from checkouts of Megatron-LM, the newest last.

    python scripts/megatron_flags_table.py CHECKOUT... > megatron_pp/tools/flags/megatron.csv

Each checkout is read in a process of its own. If several releases have a flag, its row is that of the newest.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_pp.tools.check.jobs import megatron_process
from megatron_pp.tools.flags.table import COLUMNS

_GENERATION = 9
_KINDS = {int: "int", float: "float"}
CONFIGS = (
    "megatron.core.model_parallel_config.ModelParallelConfig",
    "megatron.core.transformer.transformer_config.TransformerConfig",
    "megatron.core.transformer.transformer_config.MLATransformerConfig",
    "megatron.core.distributed.DistributedDataParallelConfig",
    "megatron.core.optimizer.OptimizerConfig",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", metavar="CHECKOUT", help="a checkout of Megatron-LM; the newest last")
    # How this script calls itself for one checkout.
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        sys.path[0] = given.checkouts[0]
        print(json.dumps(rows_of_checkout()))
        return
    for checkout in given.checkouts:
        if not Path(checkout, "megatron").is_dir():
            parser.error(f"{checkout} has no folder megatron; give checkouts of Megatron-LM")
    rows: dict[str, dict[str, Any]] = {}
    for checkout in given.checkouts:
        done = subprocess.run([sys.executable, __file__, "--one", checkout], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        for row in found["rows"]:
            releases = rows.get(row["setting"], {"releases": []})["releases"]
            rows[row["setting"]] = {**row, "releases": [*releases, found["release"]]}
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for _, row in sorted(rows.items()):
        writer.writerow({**row, "options": " ".join(row["options"]), "releases": " ".join(row["releases"])})


def rows_of_checkout() -> dict[str, Any]:
    _, arguments, _ = megatron_process.import_arguments(_GENERATION)
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    rows: dict[str, dict[str, Any]] = {}
    for action in parser._actions:
        options = [option for option in action.option_strings if option.startswith("--")]
        if not options or action.dest in ("help", "version"):
            continue
        row = {"setting": action.dest, "kind": _kind(action), "options": options}
        default = megatron_process.plain(action.default)
        row["default"] = "" if default is None or default == argparse.SUPPRESS else json.dumps(default)
        if action.dest in rows:  # one flag switches it on, another one off
            row["options"] = [*rows[action.dest]["options"], *(f"{option}:{_kind(action)}" for option in options)]
            row["kind"], row["default"] = rows[action.dest]["kind"], rows[action.dest]["default"]
        rows[action.dest] = row
    for row in rows_of_configs():
        rows.setdefault(row["setting"], row)
    return {"release": arguments_release(), "rows": list(rows.values())}


def rows_of_configs() -> list[dict[str, Any]]:
    """Rows for the fields of the configs that Megatron makes from its arguments. A field without a flag has no
    options."""
    found = []
    for place in CONFIGS:
        module, _, name = place.rpartition(".")
        for field in dataclasses.fields(getattr(importlib.import_module(module), name)):
            default = None if field.default is dataclasses.MISSING else megatron_process.plain(field.default)
            row = {"setting": field.name, "kind": _kind_of_field(str(field.type)), "options": []}
            found.append({**row, "default": "" if default is None else json.dumps(default)})
    return found


def _kind_of_field(annotation: str) -> str:
    words = re.findall(r"bool|int|float|List|Callable|str", annotation)
    kinds = {"bool": "either", "int": "int", "float": "float"}
    return kinds.get(words[0], "text") if len(set(words)) == 1 else "text"


def arguments_release() -> str:
    import megatron.core

    return str(megatron.core.__version__)


def _kind(action: argparse.Action) -> str:
    """The kind of a flag. "on" and "off" are switches, "either" is a switch that also has --no-..., and "... list"
    takes several words."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "either"
    if action.nargs == 0:
        return "off" if getattr(action, "const", True) is False else "on"
    kind = _KINDS.get(action.type, "text") if isinstance(action.type, type) else "text"
    if kind == "text" and isinstance(action.default, (int, float)) and not isinstance(action.default, bool):
        kind = _KINDS.get(type(action.default), "text") if action.type in (int, float) else "text"
    return f"{kind} list" if action.nargs in ("*", "+") or isinstance(action.nargs, int) else kind


if __name__ == "__main__":
    main()
