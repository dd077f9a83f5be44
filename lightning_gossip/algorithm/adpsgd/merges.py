"""The sum of half-differences m, in memory that nobody clears."""

from __future__ import annotations

from torch import Tensor


class Merges:
    """m: the first half-difference that comes to a place is copied there, later ones are added.

    To clear a vector of a large model costs as much as to copy it, so it is not cleared: m is 0 where nothing has come.

    Args:
        vector: its memory, shape (d,), of any content.

    Attributes:
        places: where half-differences have come, in ascending order, apart from each other.

    >>> import torch
    >>> m = Merges(torch.full((4,), float("nan")))
    >>> m.add(slice(1, 3), torch.tensor([1.0, 2.0]))
    >>> m.add(slice(2, 4), torch.tensor([10.0, 20.0]))
    >>> out = torch.zeros(4)
    >>> m.add_to(slice(0, 4), out)
    >>> m.places, out.tolist()
    ([slice(1, 4, None)], [0.0, 1.0, 12.0, 20.0])
    """

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector
        self.places: list[slice] = []

    def __bool__(self) -> bool:
        return bool(self.places)

    def add(self, chunk: slice, half_difference: Tensor) -> None:
        """m += d in one chunk.

        Args:
            chunk: where.
            half_difference: shape ``(chunk.stop - chunk.start,)``.
        """
        at = chunk.start
        for place in self._within(chunk):
            self._put(slice(at, place.start), chunk, half_difference)
            self.vector[place] += half_difference[place.start - chunk.start : place.stop - chunk.start]
            at = place.stop
        self._put(slice(at, chunk.stop), chunk, half_difference)
        self.places = _united([*self.places, chunk])

    def add_to(self, chunk: slice, out: Tensor) -> None:
        """``out`` += m of one chunk; ``out`` has the chunk's shape."""
        for place in self._within(chunk):
            out[place.start - chunk.start : place.stop - chunk.start] += self.vector[place]

    def dense(self) -> Tensor:
        """m as a whole vector: where nothing has come, 0 is written first."""
        at = 0
        for place in [*self.places, slice(self.vector.numel(), 0)]:
            if at < place.start:
                self.vector[at : place.start].zero_()
            at = place.stop
        self.places = _united([slice(0, self.vector.numel())]) if self.places else []
        return self.vector

    def clear(self) -> None:
        """m ← 0."""
        self.places = []

    def _put(self, place: slice, chunk: slice, half_difference: Tensor) -> None:
        if place.start < place.stop:
            self.vector[place] = half_difference[place.start - chunk.start : place.stop - chunk.start]

    def _within(self, chunk: slice) -> list[slice]:
        pieces = [slice(max(place.start, chunk.start), min(place.stop, chunk.stop)) for place in self.places]
        return [piece for piece in pieces if piece.start < piece.stop]


def _united(places: list[slice]) -> list[slice]:
    united: list[slice] = []
    for place in sorted(places, key=lambda place: (place.start, place.stop)):
        if place.start >= place.stop:
            continue
        if united and place.start <= united[-1].stop:
            united[-1] = slice(united[-1].start, max(united[-1].stop, place.stop))
        else:
            united.append(place)
    return united
