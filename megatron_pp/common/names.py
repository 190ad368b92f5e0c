"""The message about a name that is not known: the same everywhere, with the nearest name that is."""

import difflib
from collections.abc import Iterable


def nearest_name(value: object, known: Iterable[object]) -> str:
    """The name among ``known`` that the text ``value`` was most likely meant to be; empty where none is near.

    Capitals and signs do not count (``1F1B``, ``zbv``, ``DualPipeV``); then a beginning, then spelling.
    """
    names = {_letters(name): str(name) for name in reversed(list(known))}  # of two alike, the first
    wanted = _letters(value) if isinstance(value, str) else ""
    if not wanted:
        return ""
    if wanted in names:
        return names[wanted]
    begun = [name for name in reversed(names) if name.startswith(wanted)]
    close = begun or difflib.get_close_matches(wanted, names, n=1, cutoff=0.6)
    return names[close[0]] if close else ""


def did_you_mean(value: object, known: Iterable[object]) -> str:
    """`` (did you mean x?)``, or nothing where no name is near."""
    name = nearest_name(value, known)
    return f" (did you mean {name}?)" if name else ""


def unknown(what: str, value: object, known: Iterable[object], choices: str = "") -> str:
    """``what 'value' is not known (did you mean x?); it is one of x, y``. ``choices`` replaces the list."""
    names = list(known)
    listed = choices or f"one of {', '.join(map(str, names))}"
    return f"{what} {value!r} is not known{did_you_mean(value, names)}; it is {listed}"


def _letters(name: object) -> str:
    return "".join(letter for letter in str(name).lower() if letter.isalnum())
