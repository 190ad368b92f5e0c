"""Writes the tables of docs/config.md: fields of a config, and settings of install(). ``--check`` only reports
whether they are up to date.

python scripts/config_table.py [--check]
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from made_parts import MadePart, markdown_table, renew  # noqa: E402

from megatron_pp.config.model_config import TransformerConfig  # noqa: E402
from megatron_pp.integrations.megatron.settings import TABLE  # noqa: E402


def default_text(field: dataclasses.Field) -> str:
    if " [env " in field.metadata["help"]:
        return "from the environment"
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return f"`{str(default).removeprefix('torch.')}`"


def config_table() -> str:
    """The fields of a config as a Markdown table, with a heading row for each section."""
    rows = [["field", "default", "what it says"]]
    for field in dataclasses.fields(TransformerConfig):
        section = field.metadata.get("section")
        if section:
            rows.append([f"**{section}**", "", ""])
        kind = field.metadata["kind"]
        choices = () if kind is None else kind.choices
        rest = "" if not choices or ":" in field.metadata["help"] else f" ({', '.join(choices)})"
        help_text = field.metadata["help"].replace("|", "\\|")
        rows.append([f"`{field.name}`", default_text(field), f"{help_text}{rest}"])
    return markdown_table(rows)


def settings_table() -> str:
    """The settings of install(). Those that are fields of the config are named in a line, the others are in a table."""
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    keyword = " (a keyword only)"
    shared = [f"`{name}`{keyword * one.kind.only_keyword}" for name, one in TABLE.items() if name in fields]
    others = ((name, one) for name, one in TABLE.items() if name not in fields)
    rows = [["setting", "what it says"], *([f"`{name}`", one.help] for name, one in others)]
    return f"Fields of the table above: {', '.join(shared)}.\n\n{markdown_table(rows)}"


PARTS = [
    MadePart(ROOT / "docs" / "config.md", "config fields", config_table),
    MadePart(ROOT / "docs" / "config.md", "settings of install()", settings_table),
]

if __name__ == "__main__":
    sys.exit(renew(PARTS, __doc__.splitlines()[0]))
