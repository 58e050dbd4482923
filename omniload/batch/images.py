"""The images of a microbatch: what they hold, where their embeddings belong, and both as tensors of a loop.

Shape suffixes:
    I  images of a microbatch        K  pieces        V  values of an image, or of all
    P  patches        E  embeddings        W  ranks
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.batch.encoding import EncoderShare, counts_by_rank
from omniload.batch.microbatch import CpSlice, Microbatch
from omniload.mix.columns import GRIDS, IMAGE_PLACES, IMAGES

__all__ = [
    "BatchImage",
    "EncodingArrays",
    "ImageArrays",
    "PatchArrays",
    "dealt_images",
    "images_of",
    "own_images",
    "places_of",
    "share_of",
]

_LARGEST_VALUE = 255.0
_COLOURS = 3
OfColours: TypeAlias = float | Sequence[float]
"""One number for all colours, or one for each."""
_ToTensor: TypeAlias = Callable[[NDArray[Any], type[np.generic]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchImage:
    """One image of a microbatch."""

    key: NDArray[np.int64]
    """Source, position and sub of its sample, ``[3]``."""
    number: int
    """Its number in the sample, from 0."""
    grid: tuple[int, int]
    """Rows and columns of its patches."""
    values_V: NDArray[Any]
    """Values of its patches, end to end."""


def images_of(microbatch: Microbatch) -> Iterator[BatchImage]:
    """Yield the images of a microbatch: those in its rows, or those that its rank encodes.

    Until the microbatch is split among the ranks that share its rows, it has the images of all of them.
    """
    shares = () if microbatch.encoding is None else microbatch.encoding.of_ranks
    for share in shares:
        for i, (key, grid) in enumerate(zip(share.keys_I4, share.grids_I2.tolist(), strict=True)):
            yield BatchImage(
                key=key[:3], number=int(key[3]), grid=tuple(grid), values_V=share.images_I[i]
            )
    if shares:
        return
    images = microbatch.columns_K.get(IMAGES)
    if images is None or not len(images.values_V):
        return
    grids = microbatch.columns_K[GRIDS]
    sizes_I = _values_per_image(grids, len(images.values_V))
    stops_I = np.cumsum(sizes_I)
    pieces_I = np.repeat(np.arange(len(grids)), grids.lengths_N // 2)
    numbers_I = np.arange(len(pieces_I)) - (grids.offsets[:-1] // 2)[pieces_I]
    for i, (piece, number) in enumerate(zip(pieces_I.tolist(), numbers_I.tolist(), strict=True)):
        yield BatchImage(
            key=microbatch.keys_K4[piece, :3],
            number=number,
            grid=(int(grids.values_V[2 * i]), int(grids.values_V[2 * i + 1])),
            values_V=images.values_V[stops_I[i] - sizes_I[i] : stops_I[i]],
        )


def _values_per_image(grids_K: Ragged, num_values: int) -> NDArray[np.int64]:
    """Return the values of each image, ``[I]``: all images of a mix have patches of one size.

    Args:
        grids_K: Rows and columns of the patches of each image.
        num_values: Values of all images together.
    """
    patches_I = grids_K.values_V[::2].astype(np.int64) * grids_K.values_V[1::2]
    sizes_I: NDArray[np.int64] = patches_I * (num_values // max(1, int(patches_I.sum())))
    return sizes_I


def places_of(microbatch: Microbatch) -> NDArray[np.int64]:
    """Return where the embeddings of all images belong, in the flattened rows.

    Returns:
        First placeholder of each image, and how many it has, ``[I, 2]``, in the order of ``images_of``.
    """
    places = microbatch.columns_K.get(IMAGE_PLACES)
    if places is None or not len(places.values_V):
        return np.empty((0, 2), np.int64)
    begins_D = microbatch.cu_seqlens[:-1].astype(np.int64)
    begins_K = begins_D[microbatch.sources_D >= 0]
    # A copy, for another type: what is added below must not reach the column, which the batch keeps.
    places_I2 = places.values_V.reshape(-1, 2).astype(np.int64)
    places_I2[:, 0] += np.repeat(begins_K, places.lengths_N // 2)
    return places_I2


def share_of(microbatch: Microbatch, rank: int, num_ranks: int) -> EncoderShare:
    """Return what a rank encodes where each encodes the images of its own rows: nothing travels.

    Args:
        microbatch: Rows with their images.
        rank: The rank.
        num_ranks: Ranks among which images could have been dealt.
    """
    images = list(images_of(microbatch))
    places_I2 = places_of(microbatch)
    sizes_I = places_I2[:, 1]
    # All that is encoded stays: nothing goes to any other rank, or comes from one.
    own_C2 = counts_by_rank(np.full(int(sizes_I.sum()), rank))
    starts_I = places_I2[:, 0] - (np.cumsum(sizes_I) - sizes_I)
    return EncoderShare(
        images_I=Ragged.of([image.values_V for image in images], np.uint8),
        grids_I2=np.array([image.grid for image in images], np.int32).reshape(-1, 2),
        keys_I4=np.array([[*image.key, image.number] for image in images], np.int64).reshape(-1, 4),
        num_ranks=num_ranks,
        sends_C2=own_C2,
        receives_C2=own_C2,
        places_E=np.repeat(starts_I, sizes_I) + np.arange(int(sizes_I.sum())),
    )


class PatchArrays:
    """Patches of some images, each field a tensor made when it is first asked for."""

    def __init__(
        self,
        values_V: NDArray[np.uint8],
        grids_I2: NDArray[np.integer[Any]],
        tensor: _ToTensor,
        values_per_patch: int = 0,
    ) -> None:
        self._grids_I2, self._tensor = grids_I2.astype(np.int64), tensor
        num = int((self._grids_I2[:, 0] * self._grids_I2[:, 1]).sum())
        self._patches_PV = values_V.reshape(num, -1 if num else values_per_patch)

    @cached_property
    def patches(self) -> Any:  # noqa: ANN401 -- the tensor type of whichever library
        """Pixels of all patches ``[P, V]``, uint8, image by image; see ``patches_of`` for their order."""
        return self._tensor(self._patches_PV, np.uint8)

    def floats(self, mean: OfColours = 0.5, deviation: OfColours = 0.5) -> Any:  # noqa: ANN401
        """Return the patches as float32: pixels from 0 to 1, less ``mean``, over ``deviation``.

        Args:
            mean: One number, or a number for each of red, green and blue, as image processors have them.
            deviation: The same.

        Raises:
            ConfigError: There are other than one or three numbers.
        """
        # Only where it is asked for: as float32 the patches would be four times as many bytes on the way to a rank.
        scaled = self._patches_PV.astype(np.float32) / _LARGEST_VALUE
        scaled -= self._by_value("mean", mean)
        scaled /= self._by_value("deviation", deviation)
        return self._tensor(scaled, np.float32)

    def _by_value(self, name: str, given: OfColours) -> NDArray[np.float32]:
        """Return one number, or that of each value of a patch, in which colours alternate."""
        numbers = np.asarray(given, np.float32)
        if numbers.shape not in {(), (_COLOURS,)}:
            raise ConfigError(
                f"{name} is {given!r:.80}; give one number, or {_COLOURS}: of red, green and blue"
            )
        return np.resize(numbers, self._patches_PV.shape[1]) if numbers.shape else numbers

    @cached_property
    def grids(self) -> Any:  # noqa: ANN401
        """Rows and columns of the patches of each image ``[I, 2]``, int64."""
        return self._tensor(self._grids_I2, np.int64)

    def __len__(self) -> int:
        return len(self._grids_I2)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}(images={len(self)}, patches={list(self._patches_PV.shape)})"


class ImageArrays(PatchArrays):
    """The images of rows, in their order; rows without images have patches ``[0, V]``, for an encoder to run on."""

    def __init__(self, rows: Microbatch, tensor: _ToTensor, values_per_patch: int = 0) -> None:
        grids, images = rows.columns_K.get(GRIDS), rows.columns_K.get(IMAGES)
        super().__init__(
            np.empty(0, np.uint8) if images is None else images.values_V,
            (np.empty(0, np.int32) if grids is None else grids.values_V).reshape(-1, 2),
            tensor,
            values_per_patch,
        )
        self._rows = rows

    @cached_property
    def places(self) -> Any:  # noqa: ANN401
        """First placeholder of each image in the flattened rows, and how many it has, ``[I, 2]``, int64."""
        return self._tensor(places_of(self._rows), np.int64)


class EncodingArrays(PatchArrays):
    """The images that a rank encodes, ordered by the place along dp and cp that their embeddings go to.

    A rank without images has patches ``[0, V]``, so that its encoder runs like any other.
    """

    def __init__(self, share: EncoderShare, tensor: _ToTensor) -> None:
        super().__init__(share.images_I.values_V, share.grids_I2, tensor, share.values_per_patch)
        self._share = share

    @cached_property
    def order(self) -> Any:  # noqa: ANN401
        """Sending order of the embeddings, int64: an index into the embeddings as made, image by image.

        ``None`` where they are sent as they are made. They are often not along cp, where a place takes the first and
        the last parts of a row, whether an image is cut or not; nor where a mesh numbers its ranks in another order
        than their places along dp and cp.
        """
        order_M = self._share.order_M
        return None if order_M is None else self._tensor(order_M, np.int64)

    @property
    def sends(self) -> list[int]:
        """Embeddings that go to each rank of the job, in the order of ranks: input splits of an all-to-all."""
        sends: list[int] = self._share.sends_W.tolist()
        return sends

    @property
    def receives(self) -> list[int]:
        """Embeddings that come from each rank: output splits of it."""
        receives: list[int] = self._share.receives_W.tolist()
        return receives

    @cached_property
    def places(self) -> Any:  # noqa: ANN401
        """Place in the flattened rows, or slice of them, of each embedding that comes, in its order, ``[E]``, int64."""
        return self._tensor(self._share.places_E, np.int64)


def own_images(
    rows: Microbatch | CpSlice,
    parts: Sequence[Microbatch | CpSlice],
    tensor: _ToTensor,
    values_per_patch: int = 0,
) -> ImageArrays:
    """Return the images of rows.

    Args:
        rows: The rows.
        parts: The microbatches that they were joined of.
        tensor: Makes tensors.
        values_per_patch: Values of a patch of the mix, which rows without images do not tell.

    Raises:
        ConfigError: The rows are shared among cp peers, or their images are encoded elsewhere.
    """
    if any(part.encoding is not None for part in parts):
        raise ConfigError(
            "balance.strategy deals images apart from rows; take microbatches[i].encoding, which says what this "
            "rank encodes and where embeddings go"
        )
    if isinstance(rows, CpSlice):
        raise ConfigError(
            "rows shared among cp peers have no images of their own; use cp 1, or balance.strategy hybrid and "
            "microbatches[i].encoding"
        )
    return ImageArrays(rows, tensor, values_per_patch)


def dealt_images(rows: Microbatch | CpSlice, tensor: _ToTensor) -> EncodingArrays:
    """Return what a rank encodes for a microbatch.

    Raises:
        ConfigError: No strategy deals images apart from rows, or the rows are not one microbatch.
    """
    share = rows.encoding
    if share is None:
        raise ConfigError(
            "these rows come with their own images; take images, or set balance.strategy hybrid and take "
            "microbatches[i].encoding"
        )
    return EncodingArrays(share, tensor)
