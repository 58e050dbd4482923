"""Keeps experts evenly busy: losses, a capacity with dropped tokens, a bias, and figures of their load.

Experts form groups, one for each device that could hold a group (DeepSeek-V2's balance of devices). With a group for
every expert, this is the experts' own balance. Everything is computed row by row, because the data plane places rows.
Computed over a microbatch, it would depend on which rows happen to share one, and training would depend on the number
of ranks. A row that sequence-parallel peers share counts as a whole: the peers add up their counts first.

Shape suffixes:
    N  tokens of this rank    M  tokens of all peers    R  rows    E  experts    K  experts of a token
    G  groups of experts      L  layers
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.parallel.collectives import Peers
from trainer_integration.moe.router import Routing

__all__ = [
    "BalanceLosses",
    "RouterFigures",
    "balance_losses",
    "figures_of",
    "moved_bias_E",
    "within_capacity",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceLosses:
    """This rank's share of the losses of all rows: the part of its own tokens, mean over layers."""

    balance: Tensor
    """Each row's balance loss times the labels in the row. A row's loss is 1 at even load, and at most ``G``."""
    z: Tensor
    """Each row's mean square of ``log_sums`` times the labels in the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFigures:
    """Load of the experts by this rank's tokens, without a gradient."""

    slots_LE: Tensor
    """Rows that each expert computed, int64."""
    dropped: Tensor
    """Choices beyond a capacity, over all layers, int64."""
    entropy: Tensor
    """Entropy of the probabilities summed over tokens, mean over layers, in nats, float64."""


def balance_losses(
    routings: Sequence[Routing], inputs: ModelInputs, peers: Peers, num_groups: int
) -> BalanceLosses:
    """Return this rank's share of the losses that keep the routers of all layers balanced.

    A row's balance loss is ``G * sum over groups of (share of choices) * (mean probability)``.

    Args:
        routings: Decisions of each layer.
        inputs: The tokens.
        peers: The ranks that share the rows.
        num_groups: ``G``, a divisor of the number of experts.

    Source:
        Fedus et al., arXiv 2101.03961, for the product; DeepSeek-V2, arXiv 2405.04434, for taking it
        between devices, DeepSeek-V3, arXiv 2412.19437, within a sequence; Zoph et al., arXiv 2202.08906, for ``z``.
    """
    num_experts = routings[0].probabilities_NE.shape[1]
    size = inputs.num_rows * num_experts
    cells = [
        (inputs.rows_N.unsqueeze(1) * num_experts + r.experts_NK).reshape(-1) for r in routings
    ]
    labels_R = inputs.labels_in_rows_R()
    # One message for the counts of all layers and the labels.
    counted = peers.summed(torch.cat([*(_counts(c, size) for c in cells), labels_R]))
    counts_LRE, labels_R = torch.split(counted, [len(routings) * size, inputs.num_rows])
    counts_LRE = counts_LRE.view(len(routings), inputs.num_rows, num_experts)
    # A row of only padding has no token, and no label for which its loss would count.
    tokens_R = inputs.tokens_in_rows_R.clamp(min=1)
    dtype = routings[0].probabilities_NE.dtype
    # Weighted by labels, by which the sum is divided in the end, so that a row counts as in the token loss.
    weights_N = (labels_R / tokens_R).to(dtype).index_select(0, inputs.rows_N)
    top_k = routings[0].experts_NK.shape[1]
    shares_LRG = (counts_LRE / (tokens_R * top_k).view(1, -1, 1)).to(dtype)
    per_group = num_experts // num_groups
    shares_LRG = shares_LRG.view(*shares_LRG.shape[:2], num_groups, per_group).sum(-1)
    balance, z = [], []
    for shares_RG, routing in zip(shares_LRG, routings, strict=True):
        sums_NG = routing.probabilities_NE.view(-1, num_groups, per_group).sum(-1)
        losses_N = (shares_RG.index_select(0, inputs.rows_N) * sums_NG).sum(-1)
        balance.append((losses_N * weights_N).sum())
        z.append((routing.log_sums_N.square() * weights_N).sum())
    return BalanceLosses(balance=num_groups * torch.stack(balance).mean(), z=torch.stack(z).mean())


def within_capacity(
    routing: Routing, inputs: ModelInputs, peers: Peers, num_groups: int, factor: float
) -> Routing:
    """Drop the least probable choices of each row and group beyond the capacity of the group's devices.

    A group has room for ``factor`` times the choices of a row at even load, rounded up. Among equal probabilities, the
    earlier token's choice stays. The weights of a token's other choices do not change.

    Source:
        DeepSeek-V2, arXiv 2405.04434, on token dropping.
    """
    top_k, num_experts = routing.experts_NK.shape[1], routing.probabilities_NE.shape[1]
    # Without the bias, which only changes which experts are chosen: dropping goes by the router's own probability.
    affinity_NK = routing.probabilities_NE.detach().gather(-1, routing.experts_NK)
    groups_NK = routing.experts_NK // (num_experts // num_groups)
    cells_NK = inputs.rows_N.unsqueeze(1) * num_groups + groups_NK
    cells, affinities = (inputs.of_all_peers(x, peers) for x in (cells_NK, affinity_NK))
    # Two stable sorts: by cell, within a cell by affinity, and among equal ones the earlier token first.
    order = torch.argsort(affinities.reshape(-1), descending=True, stable=True)
    order = order[torch.argsort(cells.reshape(-1)[order], stable=True)]
    sorted_cells = cells.reshape(-1)[order]
    places = torch.arange(len(order), device=order.device)
    # Rounded up, so that a short row has room for at least one choice in each group.
    room_R = (inputs.tokens_in_rows_R * (top_k * factor / num_groups)).ceil()
    taken_before = places - torch.searchsorted(sorted_cells, sorted_cells)
    kept = torch.empty_like(order, dtype=torch.bool)
    kept[order] = taken_before < room_R.index_select(0, sorted_cells // num_groups)
    return replace(routing, kept_NK=inputs.of_this_peer(kept.view(-1, top_k), peers))


def figures_of(routings: Sequence[Routing]) -> RouterFigures:
    """Return the load of the experts of all layers by this rank's tokens."""
    num_experts = routings[0].probabilities_NE.shape[1]
    slots, dropped, entropies = [], [], []
    for routing in routings:
        counts = _counts(routing.served_NK().reshape(-1), num_experts + 1).long()
        # The last cell collects choices that no expert serves.
        slots.append(counts[:-1])
        dropped.append(counts[-1])
        probabilities_NE = routing.probabilities_NE.detach()
        # ``entr`` of 0 is 0, while ``-p * log(p)`` would be NaN.
        entropies.append(torch.special.entr(probabilities_NE).sum(dtype=torch.float64))
    return RouterFigures(
        slots_LE=torch.stack(slots),
        dropped=torch.stack(dropped).sum(),
        entropy=torch.stack(entropies).mean(),
    )


def moved_bias_E(bias_E: Tensor, slots_E: Tensor, rate: float) -> Tensor:
    """Return the bias after a step: up by ``rate`` for experts below the mean load, down for those above it.

    Source:
        Wang et al., arXiv 2408.15664.
    """
    return bias_E + rate * torch.sign(slots_E.double().mean() - slots_E).to(bias_E.dtype)


def _counts(values: Tensor, size: int) -> Tensor:
    """Count integers below ``size``, as float64, which is exact; unlike ``bincount`` it waits for no device."""
    ones = torch.ones(1, dtype=torch.float64, device=values.device).expand(len(values))
    return torch.zeros(size, dtype=torch.float64, device=values.device).scatter_add_(
        0, values, ones
    )
