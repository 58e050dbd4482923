"""A microbatch in the form that the model takes: tensors, concatenated, without padding.

Shape suffixes:
    R  rows        T  tokens in a row        N  tokens of this rank that are not padding
    M  those of all its sequence-parallel peers, peer by peer        L  tokens with a label
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omniload import PackedRows
from omniload.batch.microbatch import IGNORE_LABEL, CpSlice, Microbatch
from omniload.batch.rows import documents_of
from omniload.batch.slices import cp_indices
from trainer_integration.moe.documents import DocumentGroups, on_device
from trainer_integration.moe.parallel.collectives import ALONE, Peers

__all__ = ["ModelInputs", "WholeRows", "on_host"]


def on_host(tensor: Any) -> NDArray[Any]:  # noqa: ANN401 -- of torch, on any device, or of numpy
    """Return a tensor as an array of numpy."""
    return np.asarray(tensor.cpu() if isinstance(tensor, Tensor) else tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRows:
    """Rows with their padding, as arrays of the host."""

    tokens_RT: NDArray[Any]
    """Token ids."""
    labels_RT: NDArray[Any]
    """Next tokens; ``IGNORE_LABEL`` where nothing is predicted."""
    real_RT: NDArray[np.bool_]
    """Whether a token is not padding."""
    positions_RT: NDArray[Any]
    """Position within the document."""
    cu_seqlens: NDArray[np.int32]
    """Bounds of the documents in the flattened rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """All tokens of a rank's part of a microbatch; padding costs nothing because it is gone."""

    tokens_N: Tensor
    """Token ids, int64."""
    labels_N: Tensor
    """Next tokens, int64; ``IGNORE_LABEL`` where nothing is predicted."""
    labelled_L: Tensor
    """Indices of tokens with a label, int64. Computed on the host, because asking a device would wait for all earlier
    layers."""
    positions_N: Tensor
    """Position within the document, int64, from 0."""
    rows_N: Tensor
    """Row of the microbatch, int64, never falling."""
    num_rows: int
    """Rows of the microbatch."""
    tokens_in_rows_R: Tensor
    """Tokens of each row, including those of the peers, int64."""
    documents: DocumentGroups
    """Which tokens may attend to each other, of all peers."""
    tokens_of_peers: tuple[int, ...]
    """Tokens of each peer; they sum to ``M``."""
    places_M: Tensor | None = None
    """Place of each token in the rows, counted without padding; ``None`` if it is the token's index."""

    @classmethod
    def of(
        cls,
        microbatch: Microbatch | CpSlice,
        peers: Peers = ALONE,
        device: str | torch.device = "cpu",
        *,
        varlen: bool = False,
    ) -> Self:
        """Drop the padding of ``microbatch`` and concatenate its tokens.

        Tokens without a source are padding. A row's padding is a document of its own, so it is dropped as a whole.

        Args:
            microbatch: Whole rows, or this rank's slice of them.
            peers: The sequence-parallel peers that share the rows.
            device: Device of the model.
            varlen: Whether its attention is a varlen kernel's.

        Raises:
            TypeError: Whole rows were given although peers share them, or a slice although no peers do.
        """
        if isinstance(microbatch, CpSlice) != (peers.size > 1):
            came = "a slice of its rows" if isinstance(microbatch, CpSlice) else "whole rows"
            raise TypeError(
                f"a microbatch brings {came}, and {peers.size} sequence-parallel peers share them; open the data "
                "plane with as many cp peers as there are sp peers"
            )
        if isinstance(microbatch, CpSlice):
            return cls._of_slice(microbatch, peers, device, varlen=varlen)
        documents = documents_of(microbatch)
        return cls._of_whole(
            WholeRows(
                tokens_RT=microbatch.tokens_RT,
                labels_RT=microbatch.labels_RT,
                # By the source and not by the token, because the padding's 0 is a token id of every tokenizer.
                real_RT=microbatch.source_ids_RT >= 0,
                positions_RT=documents.positions,
                cu_seqlens=documents.cu_seqlens,
            ),
            device,
            varlen=varlen,
        )

    @classmethod
    def of_packed(
        cls, rows: PackedRows, device: str | torch.device = "cpu", *, varlen: bool = False
    ) -> Self:
        """Drop the padding of rows that the user's own loop received; otherwise like ``of``.

        Raises:
            ConfigError: The rows are shared among cp peers.
            ValueError: Their labels are unshifted.
        """
        if rows.label_form != "shifted":
            raise ValueError(
                f"labels of the rows are {rows.label_form}, and the model compares each token with the next; open the "
                "mix with labels='shifted'"
            )
        whole = WholeRows(
            tokens_RT=on_host(rows.tokens),
            labels_RT=on_host(rows.labels),
            real_RT=on_host(rows.padding_mask),
            positions_RT=on_host(rows.position_ids),
            cu_seqlens=on_host(rows.cu_seqlens),
        )
        return cls._of_whole(whole, device, varlen=varlen)

    @classmethod
    def _of_whole(cls, whole: WholeRows, device: str | torch.device, *, varlen: bool) -> Self:
        num_rows, row_length = whole.tokens_RT.shape
        real = whole.real_RT.reshape(-1)
        kept = np.flatnonzero(real)
        # Number of tokens ahead of each place, which turns bounds of the padded rows into bounds without padding.
        before = np.concatenate(([0], np.cumsum(real)))
        labels = whole.labels_RT.reshape(-1)[kept]
        return cls(
            tokens_N=on_device(whole.tokens_RT.reshape(-1)[kept], device),
            labels_N=on_device(labels, device),
            labelled_L=on_device(np.flatnonzero(labels != IGNORE_LABEL), device),
            positions_N=on_device(whole.positions_RT.reshape(-1)[kept], device),
            rows_N=on_device(kept // max(1, row_length), device),
            num_rows=num_rows,
            tokens_in_rows_R=on_device(whole.real_RT.sum(-1), device),
            documents=DocumentGroups.of(before[whole.cu_seqlens], device=device, varlen=varlen),
            tokens_of_peers=(len(kept),),
        )

    @classmethod
    def _of_slice(
        cls, piece: CpSlice, peers: Peers, device: str | torch.device, *, varlen: bool
    ) -> Self:
        num_rows, columns = piece.tokens_RC.shape
        length = columns * peers.size
        real = np.repeat(piece.sources_D >= 0, np.diff(piece.cu_seqlens))
        before = np.concatenate(([0], np.cumsum(real)))
        # Places of each peer's tokens in the whole rows, in the peer's order.
        starts = np.arange(num_rows)[:, None] * length
        # For every peer, because the layout of attention covers all their tokens, although this rank trains on its own.
        parts = [
            (starts + cp_indices(length, p, peers.size)).reshape(-1) for p in range(peers.size)
        ]
        kept = [part[real[part]] for part in parts]
        own = real[parts[peers.rank]]
        places = before[np.concatenate(kept)]
        labels = piece.labels_RC.reshape(-1)[own]
        return cls(
            tokens_N=on_device(piece.tokens_RC.reshape(-1)[own], device),
            labels_N=on_device(labels, device),
            labelled_L=on_device(np.flatnonzero(labels != IGNORE_LABEL), device),
            positions_N=on_device(piece.positions_RC.reshape(-1)[own], device),
            rows_N=on_device(kept[peers.rank] // max(1, length), device),
            num_rows=num_rows,
            tokens_in_rows_R=on_device(real.reshape(num_rows, length).sum(-1), device),
            documents=DocumentGroups.of(
                before[documents_of(piece).cu_seqlens], places, device, varlen=varlen
            ),
            # From the bounds of the whole rows, which every peer has, so no message is needed.
            tokens_of_peers=tuple(map(len, kept)),
            places_M=on_device(places, device),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank that are not padding."""
        return len(self.tokens_N)

    @property
    def is_empty(self) -> bool:
        """Whether no peer has a token; all peers know this."""
        return sum(self.tokens_of_peers) == 0

    @property
    def meets_peers(self) -> bool:
        """Whether data-parallel peers need this rank's passes for their own, even if it has no token."""
        return False

    def labels_in_rows_R(self) -> Tensor:
        """Return the number of labels of each row on this rank, float64."""
        predicted_N = (self.labels_N != IGNORE_LABEL).double()
        return predicted_N.new_zeros(self.num_rows).index_add_(0, self.rows_N, predicted_N)

    def of_all_peers(self, values_N: Tensor, peers: Peers) -> Tensor:
        """Return one value for each token of the whole rows, in their order, without a gradient."""
        if self.places_M is None:
            return values_N
        sizes = [len(values_N)] * peers.size
        with torch.no_grad():
            # An exchange, because an all-gather needs the same number from every peer.
            copies = values_N.expand(peers.size, *values_N.shape).flatten(0, 1)
            arrived_M = peers.exchange(copies, sizes, self.tokens_of_peers, "capacity")
        # Into the order of whole rows, so that ties between affinities are decided as on one rank.
        return torch.empty_like(arrived_M).index_copy_(0, self.places_M, arrived_M)

    def of_this_peer(self, values_M: Tensor, peers: Peers) -> Tensor:
        """Return this rank's part of the result of ``of_all_peers``."""
        if self.places_M is None:
            return values_M
        own = torch.split(self.places_M, list(self.tokens_of_peers))[peers.rank]
        return values_M.index_select(0, own)
