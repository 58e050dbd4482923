"""Which bytes of a saved chunk hold a box of it. Arithmetic: no tensors, no I/O.

A chunk is a box of a tensor, stored row-major. A box of the chunk is a slice along every
dimension; its elements lie in runs, one where only the outermost dimension is cut. With
a chunk of 3 rows of 4 elements, of which rows 1 and 2 are wanted from column 2 on::

    . . . .
    . . X X      two runs of 2 elements, enclosed by 6 elements from element 6 on
    . . X X

Shape suffixes in this module:
    D  dimensions of the tensor
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Box", "Slab"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """Some rows of a box, along one of its dimensions, and the bytes of the chunk that enclose them."""

    dimension: int
    first_row: int
    """Along ``dimension`` of the box."""
    num_rows: int
    offset_bytes: int
    """First byte within the chunk."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a chunk.

    Raises:
        ValueError: It leaves the chunk.
    """

    sizes_D: tuple[int, ...]
    """Elements of the chunk along each dimension."""
    offsets_D: tuple[int, ...]
    """First element of the box."""
    lengths_D: tuple[int, ...]
    """Elements of the box."""

    def __post_init__(self) -> None:
        fits = len(self.sizes_D) == len(self.offsets_D) == len(self.lengths_D) and all(
            at >= 0 and length >= 0 and at + length <= size
            for size, at, length in zip(self.sizes_D, self.offsets_D, self.lengths_D, strict=True)
        )
        if not fits:
            raise ValueError(
                f"box {self.lengths_D} at {self.offsets_D} is not within a chunk of {self.sizes_D}"
            )

    @property
    def strides_D(self) -> tuple[int, ...]:
        """Elements of the chunk between neighbours along each dimension."""
        return tuple(math.prod(self.sizes_D[d + 1 :]) for d in range(len(self.sizes_D)))

    @property
    def first_element(self) -> int:
        """Number of the box's first element within the chunk."""
        return sum(at * step for at, step in zip(self.offsets_D, self.strides_D, strict=True))

    @property
    def num_elements(self) -> int:
        """Elements of the box."""
        return math.prod(self.lengths_D)

    @property
    def run_elements(self) -> int:
        """Elements of the box that lie side by side in the chunk, everywhere the same number."""
        run = 1
        for size, length in zip(reversed(self.sizes_D), reversed(self.lengths_D), strict=True):
            run *= length
            if length != size:
                break
        return run

    def runs(self) -> Iterator[int]:
        """Yield the first element of every run, rising: in the order of the box's own elements.

        There are ``num_elements / run_elements``; none for an empty box.
        """
        if not self.num_elements:
            return
        dimensions = len(self.sizes_D)
        inner = next(
            d for d in range(dimensions + 1) if math.prod(self.lengths_D[d:]) == self.run_elements
        )
        # Dimensions of one element beyond the run add nothing but an offset.
        yield from self._starts(0, inner, self.first_element)

    def _starts(self, dimension: int, stop: int, at: int) -> Iterator[int]:
        if dimension == stop:
            yield at
            return
        for row in range(self.lengths_D[dimension]):
            yield from self._starts(dimension + 1, stop, at + row * self.strides_D[dimension])

    def slabs(self, element_bytes: int, *, most_bytes: int) -> Iterator[Slab]:
        """Cut the box along its first dimension of more than one element, for reading by pieces.

        Args:
            element_bytes: Bytes of an element.
            most_bytes: Most bytes of the chunk that a slab encloses; one row is always allowed.

        Yields:
            Slabs of whole rows that together hold the box once; none for an empty box.
        """
        if not self.num_elements:
            return
        # Cut along one of a single element, every slab would enclose the whole box.
        dimension = next((d for d, n in enumerate(self.lengths_D) if n > 1), 0)
        rows = self.lengths_D[dimension] if self.lengths_D else 1
        stride = self.strides_D[dimension] if self.strides_D else 1
        # From the first element of a row to its last, both included.
        row = 1 + sum(
            (length - 1) * step
            for d, (length, step) in enumerate(zip(self.lengths_D, self.strides_D, strict=True))
            if d != dimension
        )
        # The first row counts whole, every further one as the stride to it.
        per_slab = 1 + max(0, (most_bytes // element_bytes - row) // stride)
        for begin in range(0, rows, per_slab):
            num_rows = min(per_slab, rows - begin)
            yield Slab(
                dimension=dimension,
                first_row=begin,
                num_rows=num_rows,
                offset_bytes=(self.first_element + begin * stride) * element_bytes,
                size_bytes=((num_rows - 1) * stride + row) * element_bytes,
            )
