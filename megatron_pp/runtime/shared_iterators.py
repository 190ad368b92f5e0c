"""One data iterator for several model chunks: right while one of them draws from it, as the first or the last stage of
a rank does; an error where a second one does, as each would get microbatches of the other.
"""

from collections.abc import Sequence
from typing import Any

from megatron_pp.errors import ScheduleInputError

# Methods that Python looks for in the type of an object.
_OF_TYPES = ("__len__", "__getitem__", "__contains__", "__bool__", "__call__", "__enter__", "__exit__")


def told_apart(iterators: Sequence[Any]) -> list[Any]:
    """``iterators``, by chunk; those that are one object in several places say which chunk draws from them."""
    places: dict[int, list[int]] = {}
    for chunk, given in enumerate(iterators):
        if hasattr(type(given), "__next__"):
            places.setdefault(id(given), []).append(chunk)
    found = list(iterators)
    for chunks in places.values():
        drawn: list[int] = []
        for chunk in chunks if len(chunks) > 1 else ():
            found[chunk] = _kind_of(type(iterators[chunk]))(iterators[chunk], chunk, drawn)
    return found


class _OfChunk:
    """``given`` as ``chunk`` has it; ``drawn``: the chunk that has drawn from it, of all of its places."""

    def __init__(self, given: Any, chunk: int, drawn: list[int]) -> None:
        vars(self).update(_given=given, _chunk=chunk, _drawn=drawn)

    def __next__(self) -> Any:
        if not self._drawn:
            self._drawn.append(self._chunk)
        if self._drawn != [self._chunk]:
            raise ScheduleInputError(
                f"model chunks {self._drawn[0]} and {self._chunk} of this rank draw from one data iterator, a "
                f"{type(self._given).__name__}: the list has the same object for both, so each gets microbatches of "
                "the other. Give each chunk an iterator of its own over the same microbatches: iter(batches) of a "
                "list, or one of itertools.tee(iterator, number of chunks)"
            )
        return next(self._given)

    def __iter__(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_given"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._given, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For isinstance(), as of Megatron's RerunDataIterator."""
        return type(self._given)


def _kind_of(kind: type) -> type[_OfChunk]:
    """The class that forwards the methods of ``_OF_TYPES`` that ``kind`` has."""
    return type(_OfChunk.__name__, (_OfChunk,), {name: _forwarded(name) for name in _OF_TYPES if hasattr(kind, name)})


def _forwarded(name: str) -> Any:
    def method(self: _OfChunk, *args: Any) -> Any:
        return getattr(self._given, name)(*args)

    return method
