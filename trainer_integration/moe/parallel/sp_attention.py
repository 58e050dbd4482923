"""Sequence-parallel attention: each rank brings some tokens with all heads, and attends to all tokens with some heads.

An all-to-all after the rotary positions exchanges queries, keys and values, and another returns the attended values.
The weights are the same on all ranks. Relative to the tokens' hidden states, each rank sends, forward and again
backward, ``(2 + 2/m) / n * (n - 1) / n``, where ``m`` query heads share a KV head.

Shape suffixes:
    N  tokens of this rank        M  tokens of all peers        C  width of a head
    H  query heads                G  KV heads                   X  query, key and value heads
    P  peers
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer_integration.moe.parallel.collectives import Peers

__all__ = ["replicas_of", "to_heads", "to_tokens", "volume_ratio"]


def replicas_of(num_kv_heads: int, peers: int) -> int:
    """Return how many peers hold each KV head: 1 if there are enough heads."""
    return max(1, peers // num_kv_heads)


def volume_ratio(num_heads: int, num_kv_heads: int, peers: int) -> float:
    """Return the ratio of the bytes sent to those of the formula: above 1 if KV heads are replicated."""
    sent = 2 * num_heads + 2 * num_kv_heads * replicas_of(num_kv_heads, peers)
    return sent / (2 * num_heads + 2 * num_kv_heads)


def to_heads(
    qkv_NXC: Tensor, num_heads: int, tokens_of_peers: Sequence[int], peers: Peers
) -> Tensor:
    """Exchange heads for tokens.

    Args:
        qkv_NXC: ``H`` query heads, ``G`` key heads, ``G`` value heads of this rank's tokens, rotated.
        num_heads: ``H``.
        tokens_of_peers: Tokens of each peer, ``[P]``.
        peers: The ranks; their number divides ``H``, and ``G`` or is a multiple of it.

    Returns:
        This rank's query, key and value heads of all tokens, ``[M, X / P, C]``: peer by peer, each in its own order.
    """
    num_tokens, num_all, width = qkv_NXC.shape
    num_kv = (num_all - num_heads) // 2
    q, k, v = torch.split(qkv_NXC, [num_heads, num_kv, num_kv], dim=1)
    replicas = replicas_of(num_kv, peers.size)
    if replicas > 1:
        # The backward of this sums the gradients from all holders of a head.
        k, v = k.repeat_interleave(replicas, dim=1), v.repeat_interleave(replicas, dim=1)
    # Queries, keys and values for a peer are adjacent, so that one message carries all three.
    dealt_NPXC = torch.cat(
        [
            heads.reshape(num_tokens, peers.size, heads.shape[1] // peers.size, width)
            for heads in (q, k, v)
        ],
        dim=2,
    )
    sent = dealt_NPXC.transpose(0, 1).flatten(0, 1)
    return peers.exchange(sent, [num_tokens] * peers.size, tokens_of_peers, "attention")


def to_tokens(attended_MHC: Tensor, tokens_of_peers: Sequence[int], peers: Peers) -> Tensor:
    """Exchange back: return this rank's tokens with all query heads, ``[N, H, C]``."""
    num_tokens = tokens_of_peers[peers.rank]
    back = peers.exchange(attended_MHC, tokens_of_peers, [num_tokens] * peers.size, "attention")
    heads, width = attended_MHC.shape[1:]
    back_NPHC = back.view(peers.size, num_tokens, heads, width).transpose(0, 1)
    return back_NPHC.reshape(num_tokens, peers.size * heads, width)
