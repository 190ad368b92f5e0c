"""Descriptions of checkpoints as somebody might forge them: with a right CRC-32."""

from __future__ import annotations

import json
import zlib


def sealed(text: str) -> bytes:
    """A description of this content, which is JSON; as it is where it is no object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict):
        text = json.dumps({**content, "crc32": zlib.crc32(json.dumps(content, sort_keys=True).encode())})
    return text.encode("utf-8", "surrogatepass")
