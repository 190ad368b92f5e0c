#!/usr/bin/env python
"""Print what the schedules of Megatron-LM checkouts make use of and `integrations/megatron_reads.py` does not know.

    python scripts/megatron_reads.py ~/Megatron-LM-0.20 ~/Megatron-LM-0.21

Give them oldest first: each is compared with the table up to its release, and with the checkouts before it. Nothing of
Megatron is imported.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_pp.integrations.megatron_reads import COMMUNICATOR, known_reads, names_read
from megatron_pp.integrations.megatron_versions import ENTRIES


def reads_of(checkout: Path) -> dict[str, set[str]]:
    """As `megatron_reads.reads_of`, of the files of a checkout."""
    folder = checkout / "megatron/core/pipeline_parallel"
    reads = {}
    for name in (*ENTRIES, COMMUNICATOR):
        source = (folder / ("p2p_communication.py" if name == COMMUNICATOR else "schedules.py")).read_text()
        (node,) = [n for n in ast.parse(source).body if getattr(n, "name", None) == name]
        found = names_read(ast.get_source_segment(source, node) or "")
        reads[name] = {n for n in found if n.startswith("config.")} if name == COMMUNICATOR else found
    return reads


def release_of(checkout: Path) -> tuple[int, int]:
    path = checkout / "megatron/core/package_info.py"
    if not path.is_file():
        sys.exit(f"{checkout} has no {path.relative_to(checkout)}; give checkouts of Megatron-LM")
    text = path.read_text()
    major, minor = (re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR"))
    assert major is not None
    assert minor is not None
    return int(major[1]), int(minor[1])


def main() -> None:
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    found: dict[str, set[str]] = {name: set() for name in (*ENTRIES, COMMUNICATOR)}
    for path in sys.argv[1:]:
        release = release_of(Path(path))
        print(f"{path}: {release}")
        for name, names in reads_of(Path(path)).items():
            unknown = names - known_reads(name, release) - found[name]
            found[name] |= names
            if unknown:
                print(f'    "{name}":')
                print(textwrap.fill(" ".join(sorted(unknown)), 116, initial_indent=" " * 8, subsequent_indent=" " * 8))


if __name__ == "__main__":
    main()
