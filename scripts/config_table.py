"""Writes the README's table of config fields from the dataclasses. ``--check`` only reports whether it is up to date.

python scripts/config_table.py [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_pp.config.model_config import TransformerConfig  # noqa: E402

README = ROOT / "README.md"
START, END = "<!-- config table: made by scripts/config_table.py -->", "<!-- end of config table -->"


def default_text(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{str(field.default).removeprefix('torch.')}`"
    return "from the environment"


def table() -> str:
    """The fields as a Markdown table, a heading row per section."""
    rows = ["| field | default | what it says |", "| --- | --- | --- |"]
    for field in dataclasses.fields(TransformerConfig):
        section = field.metadata.get("section")
        if section:
            rows.append(f"| **{section}** | | |")
        choices = field.metadata.get("choices")
        rest = "" if not choices or ":" in field.metadata["help"] else f" ({', '.join(choices)})"
        help_text = field.metadata["help"].replace("|", "\\|")
        rows.append(f"| `{field.name}` | {default_text(field)} | {help_text}{rest} |")
    return "\n".join(rows)


def updated(text: str) -> str:
    """``text`` with the table between its marks renewed."""
    before, _, rest = text.partition(START)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{README} has no place for the table: it needs the lines {START!r} and {END!r}")
    return f"{before}{START}\n{table()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where the table is out of date, change nothing"
    )
    check = parser.parse_args().check
    old = README.read_text()
    new = updated(old)
    if check:
        if old != new:
            print("README.md: the config table is out of date; run python scripts/config_table.py", file=sys.stderr)
        return int(old != new)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
