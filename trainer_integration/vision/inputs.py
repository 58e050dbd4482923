"""A microbatch with images as the model takes it.

Shape suffixes:
    N  tokens that are not padding        P  patches that this rank encodes        V  values of a patch
    E  embeddings that this rank receives
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from omniload.batch.encoding import EncoderShare
from omniload.batch.images import share_of
from omniload.batch.microbatch import Microbatch
from trainer_integration.moe.documents import on_device
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.parallel.collectives import ALONE, Peers

__all__ = ["VisionInputs"]

_MEAN = 127.5
"""Pixels become numbers from -1 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionInputs(ModelInputs):
    """Tokens of rows, patches to encode for whichever rank, and where embeddings that come belong."""

    patches_PV: Tensor
    """Patches, uint8."""
    grids: tuple[tuple[int, int], ...]
    """Rows and columns of patches of each image."""
    sends: tuple[int, ...]
    """Embeddings that go to each data-parallel peer; to this rank alone, where images stay with their rows."""
    receives: tuple[int, ...]
    """Embeddings that come from each."""
    places_E: Tensor
    """Token that each embedding takes the place of, int64."""

    @classmethod
    def of_microbatch(
        cls,
        microbatch: Microbatch,
        dp_peers: Peers = ALONE,
        device: str | torch.device = "cpu",
        *,
        varlen: bool = False,
    ) -> "VisionInputs":
        """Drop the padding of ``microbatch``, and say where embeddings belong without it.

        Args:
            microbatch: Whole rows; where no strategy dealt their images, this rank encodes them.
            dp_peers: The data-parallel ranks.
            device: Where the model is.
            varlen: Whether its attention is a varlen kernel's.

        Raises:
            ValueError: Images were dealt to other ranks than there are, or the counts of what comes and of its places
                differ.
        """
        text = ModelInputs.of(microbatch, device=device, varlen=varlen)
        share = microbatch.encoding or share_of(microbatch, 0, 1)
        _require_fit(share, 1 if microbatch.encoding is None else dp_peers.size)
        num = int((share.grids_I2[:, 0].astype(np.int64) * share.grids_I2[:, 1]).sum())
        depth = len(share.images_I.values_V) // max(1, num)
        before = np.cumsum(microbatch.source_ids_RT.reshape(-1) >= 0) - 1
        return cls(
            **{field.name: getattr(text, field.name) for field in fields(ModelInputs)},
            patches_PV=torch.from_numpy(share.images_I.values_V.copy()).view(num, depth).to(device),
            grids=tuple((rows, columns) for rows, columns in share.grids_I2.tolist()),
            sends=tuple(share.sends_W.tolist()),
            receives=tuple(share.receives_W.tolist()),
            places_E=on_device(before[share.places_E], device),
        )

    @property
    @override
    def meets_peers(self) -> bool:
        return len(self.sends) > 1

    def pixels(self, dtype: torch.dtype) -> Tensor:
        """Return the patches as numbers from -1 to 1, ``[P, V]``."""
        return self.patches_PV.to(dtype) / _MEAN - 1


def _require_fit(share: EncoderShare, num_ranks: int) -> None:
    """Refuse a share that was made for other ranks, before ranks wait for embeddings that nobody sends."""
    for name, counts_W in (("sends to", share.sends_W), ("receives from", share.receives_W)):
        if len(counts_W) != num_ranks:
            raise ValueError(
                f"a microbatch {name} {len(counts_W)} ranks, and {num_ranks} data-parallel ranks share the images; "
                "open the data plane with as many dp ranks as the model has peers"
            )
    if int(share.receives_W.sum()) != len(share.places_E):
        raise ValueError(
            f"a microbatch receives {int(share.receives_W.sum())} embeddings and has places for "
            f"{len(share.places_E)}; the plan and the rows are of different steps"
        )
