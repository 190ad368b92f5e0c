#!/usr/bin/env python
"""Print the names that schedules of Megatron-LM checkouts use and that `reads.py` lacks, and the digests of sources
that `sources.py` lacks. Both files are in `integrations/megatron/releases/`.

    python scripts/megatron_reads.py ~/Megatron-LM-0.20 ~/Megatron-LM-0.21

Give the oldest checkout first: each is compared with the table up to its release, and with the checkouts before it. The
script does not import Megatron.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_pp.integrations.megatron.releases.reads import COMMUNICATOR, known_reads, names_read
from megatron_pp.integrations.megatron.releases.sources import KNOWN, MODULES
from megatron_pp.integrations.megatron.releases.versions import ENTRIES


def reads_of(checkout: Path) -> dict[str, set[str]]:
    """The result of `reads.reads_of`, from the files of a checkout."""
    folder = checkout / "megatron/core/pipeline_parallel"
    reads = {}
    for name in (*ENTRIES, COMMUNICATOR):
        source = (folder / ("p2p_communication.py" if name == COMMUNICATOR else "schedules.py")).read_text()
        (node,) = [n for n in ast.parse(source).body if getattr(n, "name", None) == name]
        found = names_read(ast.get_source_segment(source, node) or "")
        reads[name] = {n for n in found if n.startswith("config.")} if name == COMMUNICATOR else found
    return reads


def digests_of(checkout: Path) -> dict[str, str]:
    """The result of `sources.digest` for each function and class in KNOWN, from the files of a checkout."""
    found = {}
    for module in MODULES:
        path = checkout / f"megatron/core/pipeline_parallel/{module}.py"
        text = path.read_text() if path.is_file() else ""
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in KNOWN:
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                source = "".join(lines[first - 1 : node.end_lineno])
                found[node.name] = hashlib.sha256(source.encode()).hexdigest()[:12]
    return found


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", metavar="CHECKOUT", help="a checkout of Megatron-LM; the oldest first")
    found: dict[str, set[str]] = {name: set() for name in (*ENTRIES, COMMUNICATOR)}
    for path in parser.parse_args().checkouts:
        release = release_of(Path(path))
        print(f"{path}: {release}")
        for name, names in reads_of(Path(path)).items():
            unknown = names - known_reads(name, release) - found[name]
            found[name] |= names
            if unknown:
                print(f'    "{name}":')
                print(textwrap.fill(" ".join(sorted(unknown)), 116, initial_indent=" " * 8, subsequent_indent=" " * 8))
        for name, digest in digests_of(Path(path)).items():
            if digest not in KNOWN[name]:
                print(f'    source of "{name}": {digest}')


if __name__ == "__main__":
    main()
