"""Almost correct inputs for fuzzing parsers: mutated texts and JSON values, drawn by hypothesis."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

DEEP = "[" * 20_000 + "]" * 20_000
_DEEP_MARK = "put something deep here"
_HUGE = "9" * 5_000  # Python does not parse numbers with this many digits

# Values that a file may have in place of the right one. Python's json writes and reads Infinity and NaN.
WEIRD = st.one_of(
    st.sampled_from(
        (
            *(None, True, False, -1, 0, 2**31, 2**63, 2**70, 10**400, 0.5, float("inf"), float("nan"), -0.0),
            *("", "x", "\x00", "é", "\ud800", "999999999", _DEEP_MARK),
            *([], {}, [None], [[]], {"": None}, ["x"], [2**70]),
        )
    ),
    st.integers(),
    st.text(max_size=8),
).map(copy.deepcopy)
_SNIPPETS = (_HUGE, "9", "-1", "1e9", "\x00", "\ufeff", '"', ",", "\n", "\r", "[", "]", "{", "(", "²", "٣", ".", "|*(")


@st.composite
def mutated_text(draw: st.DrawFn, text: str) -> str:
    """``text`` with one to three faults: it is cut off, or a piece is removed, doubled, moved or inserted."""
    for _ in range(draw(st.integers(1, 3))):
        a = draw(st.integers(0, len(text)))
        b = draw(st.integers(a, min(len(text), a + 40)))
        how = draw(st.sampled_from(["cut", "drop", "double", "put", "write", "move"]))
        if how == "cut":
            text = text[:a]
        elif how == "drop":
            text = text[:a] + text[b:]
        elif how == "double":
            text = text[:b] + text[a:]
        elif how == "move":
            text = text[:a] + text[b:] + text[a:b]
        else:
            new = draw(st.one_of(st.sampled_from(_SNIPPETS), st.text(max_size=6)))
            text = text[:a] + new + text[b if how == "write" else a :]
    return text


@st.composite
def mutated_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """``data`` with one to three faults."""
    for _ in range(draw(st.integers(1, 3))):
        a = draw(st.integers(0, len(data)))
        b = draw(st.integers(a, min(len(data), a + 16)))
        data = draw(st.sampled_from([data[:a], data[:a] + data[b:], data[:a] + draw(st.binary(max_size=8)) + data[b:]]))
    return data


@st.composite
def mutated_json(draw: st.DrawFn, content: Any) -> str:
    """``content`` as JSON, with one to three values replaced, removed or renamed."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        content = _with_fault(draw, content)
    return json.dumps(content).replace(f'"{_DEEP_MARK}"', DEEP)


def _with_fault(draw: st.DrawFn, content: Any) -> Any:
    """``content`` with a fault at a random place."""
    inside: list[Any] = []
    if isinstance(content, dict):
        inside = sorted(content)
    elif isinstance(content, list):
        inside = list(range(len(content)))
    if not inside or draw(st.integers(0, 5)) == 0:
        return draw(WEIRD)
    key = draw(st.sampled_from(inside))
    how = draw(st.sampled_from(["inside", "inside", "inside", "gone", "renamed"]))
    if how == "gone":
        del content[key]
    elif how == "renamed" and isinstance(content, dict):
        content[draw(st.text(max_size=4))] = content.pop(key)
    else:
        content[key] = _with_fault(draw, content[key])
    return content
