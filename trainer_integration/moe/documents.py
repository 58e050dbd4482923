"""Decides which documents share a call of the attention kernel.

A call costs as much as a short document, so documents of similar length are padded to the longest of them and processed
together. Padding is on the right: with a causal mask no token sees later tokens, so padding needs no mask and changes
nothing.

Shape suffixes:
    N  tokens        P  places in the padded layout        D  documents
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from trainer_integration.moe.gather import gather

__all__ = ["CALL_PAIRS", "DocumentGroups", "group_lengths", "on_device"]

CALL_PAIRS = 4096
"""Token pairs that cost as much as one call of the kernel: about 0.1 ms forward and backward, compared with 22 ms for
1024 x 1024 pairs of 4 heads of 32 (one CPU thread)."""


def group_lengths(lengths: Sequence[int], call_pairs: int = CALL_PAIRS) -> list[tuple[int, int]]:
    """Split lengths, longest first, into groups that are padded to their longest.

    Args:
        lengths: Document lengths in falling order.
        call_pairs: Token pairs that may be wasted on padding to save a call.

    Returns:
        ``(documents, padded length)`` of each group, in order. No group wastes more than
        ``call_pairs``, so all groups together cost at most twice the unpadded documents
        and their calls.
    """
    groups: list[tuple[int, int]] = []
    count = waste = longest = 0
    for length in lengths:
        # Squares: attention costs by pairs, so padding a long document wastes more than padding a short one.
        extra = longest * longest - length * length
        if count and waste + extra > call_pairs:
            groups.append((count, longest))
            count = 0
        if count == 0:
            longest, waste, extra = length, 0, 0
        count, waste = count + 1, waste + extra
    if count:
        groups.append((count, longest))
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentGroups:
    """The padded layout of one microbatch, computed once for all layers."""

    groups: tuple[tuple[int, int], ...]
    """``(documents, padded length)`` of each group; the groups are concatenated."""
    tokens_of_places_P: Tensor | None
    """Token at each place; padding has token 0. None if nothing moves."""
    places_of_tokens_N: Tensor | None
    """Place of each token; None if nothing moves."""
    cu_seqlens: Tensor
    """Bounds of the concatenated documents, int32, for a varlen kernel."""
    longest: int
    """Tokens of the longest document."""
    varlen: bool
    """Whether a varlen kernel attends."""

    @classmethod
    def of(
        cls,
        cu_seqlens: NDArray[np.integer[Any]],
        places: NDArray[np.integer[Any]] | None = None,
        device: str | torch.device = "cpu",
        *,
        varlen: bool = False,
    ) -> Self:
        """Lay out the documents bounded by ``cu_seqlens``, ``[D + 1]``.

        Args:
            cu_seqlens: Bounds of concatenated documents.
            places: Places of the coming tokens in these documents, ``[N]``; by default they come in order.
            device: Device of the tokens.
            varlen: Leave out the padding, because a varlen kernel takes concatenated documents.
        """
        lengths = np.diff(cu_seqlens).astype(np.int64)
        # A stable sort: equal lengths keep their order, so the layout is the same in every run.
        order = np.argsort(-lengths, kind="stable")
        # Padding, which is left out, leaves documents without a token.
        order = order[lengths[order] > 0]
        sorted_lengths, starts = lengths[order], cu_seqlens[order].astype(np.int64)
        groups = tuple(group_lengths(sorted_lengths.tolist()))
        padded = np.repeat([length for _, length in groups], [count for count, _ in groups])
        num_tokens = int(lengths.sum())
        moves: tuple[NDArray[np.int64], NDArray[np.int64]] | None
        moves = None if varlen else _moves(sorted_lengths, starts, padded, num_tokens)
        if places is not None:
            at: NDArray[np.int64] = places.astype(np.int64)
            # The tokens come in another order than the documents of the bounds. Both moves become one, at no cost.
            inverse: NDArray[np.int64] = np.empty(num_tokens, np.int64)
            inverse[at] = np.arange(num_tokens)
            moves = (inverse, at) if moves is None else (inverse[moves[0]], moves[1][at])
        return cls(
            groups=groups,
            tokens_of_places_P=None if moves is None else on_device(moves[0], device),
            places_of_tokens_N=None if moves is None else on_device(moves[1], device),
            cu_seqlens=on_device(cu_seqlens, device, np.int32),
            longest=int(lengths.max(initial=0)),
            varlen=varlen,
        )

    @property
    def num_pairs(self) -> int:
        """Token pairs the attention computes, padding included."""
        return sum(count * length * length for count, length in self.groups)

    def pad(self, x_ND: Tensor) -> Tensor:
        """Move tokens to their places, ``[P, ...]``; the values at padding must be ignored."""
        if self.tokens_of_places_P is None or self.places_of_tokens_N is None:
            return x_ND
        # Padding comes after every token that matters, so its gradient is zero.
        return gather(x_ND, self.tokens_of_places_P, self.places_of_tokens_N)

    def unpad(self, x_PD: Tensor) -> Tensor:
        """Move tokens back, ``[N, ...]``."""
        if self.tokens_of_places_P is None:
            return x_PD
        tokens: Tensor = _Unpad.apply(x_PD, self.places_of_tokens_N)  # type: ignore[no-untyped-call]
        return tokens


def _moves(
    lengths: NDArray[np.int64],
    starts: NDArray[np.int64],
    padded: NDArray[np.int64],
    num_tokens: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return the token at each place and the place of each token, or ``None`` if nothing moves."""
    if len(lengths) <= 1 or (
        padded.sum() == num_tokens and bool(np.all(starts[1:] >= starts[:-1]))
    ):
        return None
    # All documents at once, because a microbatch may have hundreds of short ones.
    within = np.arange(num_tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    tokens = np.repeat(starts, lengths) + within
    places = np.repeat(np.cumsum(padded) - padded, lengths) + within
    # Padding has token 0: any token will do, because no token attends to it.
    tokens_of_places = np.zeros(int(padded.sum()), np.int64)
    tokens_of_places[places] = tokens
    places_of_tokens = np.empty(num_tokens, np.int64)
    places_of_tokens[tokens] = places
    return tokens_of_places, places_of_tokens


def on_device(
    values: NDArray[np.integer[Any]],
    device: str | torch.device,
    dtype: type[np.integer[Any]] = np.int64,
) -> Tensor:
    """Copy integers to the model's device, without waiting for outstanding work of the device.

    A copy from memory that is not pinned would wait for its end, and so for every layer before it.
    """
    here = torch.from_numpy(values.astype(dtype))
    if torch.device(device).type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)


class _Unpad(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x_PD: Tensor, places_N: Tensor) -> Tensor:
        ctx.save_for_backward(places_N)
        ctx.num_places = len(x_PD)
        return x_PD.index_select(0, places_N)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        (places_N,) = ctx.saved_tensors
        grad_PD = grad_ND.new_zeros(ctx.num_places, *grad_ND.shape[1:])
        # Copied and not summed, because no two tokens have the same place.
        return grad_PD.index_copy_(0, places_N, grad_ND), None
