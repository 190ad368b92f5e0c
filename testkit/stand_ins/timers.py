"""Megatron's timers, as schedules and communicators use them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Timers:
    """Records each call as "name start" or "name stop", with "barrier" if it has a barrier, and the levels by name."""

    def __init__(self, log_level: int = 1) -> None:
        self._log_level = log_level
        self.lines: list[str] = []
        self.levels: dict[str, int] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        if log_level is not None:
            self.levels[name] = log_level

        def note(what: str, barrier: bool = False) -> None:
            self.lines.append(f"{name} {what}{' barrier' if barrier else ''}")

        return SimpleNamespace(start=lambda **more: note("start", **more), stop=lambda **more: note("stop", **more))
