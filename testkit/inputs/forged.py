"""Forged descriptions of checkpoints: their CRC-32 is right."""

from __future__ import annotations

import json
import zlib


def sealed(text: str) -> bytes:
    """The JSON ``text`` with its CRC-32, as bytes. JSON that is not an object is returned unchanged."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict):
        text = json.dumps({**content, "crc32": zlib.crc32(json.dumps(content, sort_keys=True).encode())})
    return text.encode("utf-8", "surrogatepass")
