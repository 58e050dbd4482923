"""Expert parallelism: how tokens come to the ranks that hold their experts, and back.

Every rank holds whole experts, rank 0 the first of them. Rows at an expert are sorted by (expert, source
rank), as tiles of a fused dispatch would wait for one rank at a time. Three transports do the same:

========= ====================================================== ==========================================
local     one rank: rows are copied                              nothing is sent
a2a       each row goes to its expert's rank and comes back      rows for other ranks, twice
ag_rs     all tokens go to all ranks, which pick theirs; sums    ``(n - 1)`` times a rank's tokens, twice
          over local experts are scattered back and added up
========= ====================================================== ==========================================

``a2a`` needs the number of rows on the host, for which a GPU has to be waited for once a layer, forward;
``ag_rs`` and ``local`` leave everything on the device.

Shape suffixes:
    N  tokens of this rank        M  tokens of all peers, padded to the most        K  experts of a token
    S  slots: rows at experts     E  experts of this rank        P  peers           D  width
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from trainer_integration.moe.gather import gather
from trainer_integration.moe.parallel.collectives import Peers
from trainer_integration.moe.parallel.crossover_table import TransportName

__all__ = [
    "AllGatherReduceScatter",
    "AllToAll",
    "Local",
    "RowMap",
    "Slots",
    "Transport",
    "chosen_transport",
    "combine",
    "dispatch",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMap:
    """The routing of one layer, computed once and used by every copy of rows.

    Slots of one expert are contiguous, and in the order of their tokens. Both directions are plain gathers, forward and
    backward. Nothing is summed through unordered indices, so results do not depend on the order of threads. Nothing
    here waits for the device.
    """

    slots_of_tokens_NK: Tensor
    """Slots that hold a token."""
    tokens_of_slots_S: Tensor
    """Token in each slot."""
    choices_of_slots_S: Tensor
    """Entry of the flattened ``[N, K]`` choices that each slot serves."""
    ends_E: Tensor
    """Where the slots of each expert end, int32. Slots beyond the last end serve no expert."""
    kept_NK: Tensor | None
    """Choices that an expert serves; ``None`` means all of them."""

    @classmethod
    def of(cls, experts_NK: Tensor, num_experts: int, *, drops: bool = False) -> Self:
        """Sort the choices ``experts_NK`` by expert.

        Args:
            experts_NK: Chosen experts; ``num_experts`` for a choice that is dropped.
            num_experts: Number of experts.
            drops: Whether a choice may be dropped.
        """
        chosen_S = experts_NK.reshape(-1)
        # A stable sort, so that the slots of an expert keep the order of tokens, and sums have one order in every run.
        order_S = torch.argsort(chosen_S, stable=True)
        slots_S = torch.empty_like(order_S)
        slots_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        experts_E = torch.arange(num_experts, device=chosen_S.device)
        return cls(
            slots_of_tokens_NK=slots_S.view(experts_NK.shape),
            tokens_of_slots_S=order_S // experts_NK.shape[1],
            choices_of_slots_S=order_S,
            ends_E=torch.searchsorted(chosen_S[order_S], experts_E, right=True, out_int32=True),
            kept_NK=experts_NK < num_experts if drops else None,
        )

    def first(self, num_slots: int) -> Self:
        """Return the map without the slots from ``num_slots`` on, which serve no expert."""
        if num_slots == len(self.choices_of_slots_S):
            return self
        return replace(
            self,
            # Dropped choices point beyond the end. Any row will do for them, because ``kept_NK`` leaves it out.
            slots_of_tokens_NK=self.slots_of_tokens_NK.clamp(max=max(0, num_slots - 1)),
            tokens_of_slots_S=self.tokens_of_slots_S[:num_slots],
            choices_of_slots_S=self.choices_of_slots_S[:num_slots],
        )

    def gates(self, gates_NK: Tensor) -> Tensor:
        """Return the weight of each slot, ``[S]``."""
        if self.kept_NK is not None:
            # The result in a slot of no expert may be NaN, and goes no further.
            gates_NK = torch.where(self.kept_NK, gates_NK, 0)
        return gates_NK.reshape(-1).index_select(0, self.choices_of_slots_S)


def dispatch(x_ND: Tensor, row_map: RowMap) -> Tensor:
    """Copy every token into its slots, ``[S, D]``."""
    rows_SD: Tensor = _Dispatch.apply(  # type: ignore[no-untyped-call]
        x_ND, row_map.tokens_of_slots_S, row_map.slots_of_tokens_NK, row_map.kept_NK
    )
    return rows_SD


def combine(rows_SD: Tensor, row_map: RowMap) -> Tensor:
    """Sum every token's slots, ``[N, D]``: the transpose of ``dispatch``."""
    x_ND: Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
        rows_SD, row_map.tokens_of_slots_S, row_map.slots_of_tokens_NK, row_map.kept_NK
    )
    return x_ND


def _sum_of_slots(rows_SD: Tensor, slots_NK: Tensor, kept_NK: Tensor | None) -> Tensor:
    if len(rows_SD) == 0:
        return rows_SD.new_zeros(len(slots_NK), *rows_SD.shape[1:])
    total_ND = _rows_at(rows_SD, slots_NK, kept_NK, 0)
    # One choice after another, in a fixed order, because ``index_add_`` on a GPU adds in the order of its threads.
    for k in range(1, slots_NK.shape[1]):
        total_ND += _rows_at(rows_SD, slots_NK, kept_NK, k)
    return total_ND


def _rows_at(rows_SD: Tensor, slots_NK: Tensor, kept_NK: Tensor | None, k: int) -> Tensor:
    rows_ND = rows_SD.index_select(0, slots_NK[:, k])
    return rows_ND if kept_NK is None else torch.where(kept_NK[:, k].unsqueeze(1), rows_ND, 0)


# By hand, because the gradient of ``index_select`` sums by atomics on a GPU, in another order each time.
class _Dispatch(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, x_ND: Tensor, tokens_S: Tensor, slots_NK: Tensor, kept_NK: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(slots_NK, kept_NK)
        return x_ND.index_select(0, tokens_S)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None, None]:
        slots_NK, kept_NK = ctx.saved_tensors
        return _sum_of_slots(grad_SD, slots_NK, kept_NK), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, rows_SD: Tensor, tokens_S: Tensor, slots_NK: Tensor, kept_NK: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(tokens_S)
        return _sum_of_slots(rows_SD, slots_NK, kept_NK)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        (tokens_S,) = ctx.saved_tensors
        return grad_ND.index_select(0, tokens_S), None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Rows at the experts of this rank."""

    rows_SD: Tensor
    """Rows sorted by (expert, source rank); those beyond the last end are undefined."""
    gates_S: Tensor
    """Weight of each row, float32 or wider."""
    ends_E: Tensor
    """Where each expert's rows end, int32."""


class Transport(Protocol):
    """Moves one layer's rows of one microbatch; made for it, and used once in each direction."""

    @abstractmethod
    def there(self, x_ND: Tensor, gates_NK: Tensor, experts_NK: Tensor) -> Slots:
        """Bring tokens to experts. A choice is dropped if its expert is the number of experts, which does not exist."""

    @abstractmethod
    def back(self, rows_SD: Tensor) -> Tensor:
        """Sum the results of each token's rows, ``[N, D]``."""


class Local(Transport):
    """All experts are on this rank."""

    def __init__(self, num_experts: int, *, drops: bool) -> None:
        self._num_experts, self._drops = num_experts, drops

    @override
    def there(self, x_ND: Tensor, gates_NK: Tensor, experts_NK: Tensor) -> Slots:
        self._row_map = row_map = RowMap.of(experts_NK, self._num_experts, drops=self._drops)
        return Slots(
            rows_SD=dispatch(x_ND, row_map), gates_S=row_map.gates(gates_NK), ends_E=row_map.ends_E
        )

    @override
    def back(self, rows_SD: Tensor) -> Tensor:
        return combine(rows_SD, self._row_map)


class AllToAll(Transport):
    """Single rows are sent, so that fewer experts per token mean fewer rows."""

    def __init__(self, num_experts: int, peers: Peers, *, drops: bool) -> None:
        self._num_experts, self._peers, self._drops = num_experts, peers, drops

    @override
    def there(self, x_ND: Tensor, gates_NK: Tensor, experts_NK: Tensor) -> Slots:
        peers = self._peers
        row_map = RowMap.of(experts_NK, self._num_experts, drops=self._drops)
        counts_PPE = self._counts(row_map)
        rows_PP = _on_host(counts_PPE.sum(-1))
        self._send, self._receive = rows_PP[peers.rank], [sent[peers.rank] for sent in rows_PP]
        self._row_map = row_map = row_map.first(sum(self._send))
        rows = peers.exchange(dispatch(x_ND, row_map), self._send, self._receive, "dispatch")
        gates = peers.exchange(row_map.gates(gates_NK), self._send, self._receive, "gates")
        counts_PE = counts_PPE[:, peers.rank]
        self._order_S, self._inverse_S = _by_expert_then_source(counts_PE, sum(self._receive))
        return Slots(
            rows_SD=gather(rows, self._order_S, self._inverse_S),
            gates_S=gather(gates, self._order_S, self._inverse_S),
            ends_E=counts_PE.sum(0).cumsum(0).int(),
        )

    @override
    def back(self, rows_SD: Tensor) -> Tensor:
        rows = gather(rows_SD, self._inverse_S, self._order_S)
        returned = self._peers.exchange(rows, self._receive, self._send, "combine")
        return combine(returned, self._row_map)

    def _counts(self, row_map: RowMap) -> Tensor:
        """Return the number of rows that each rank has for each expert of each rank."""
        peers = self._peers
        own_E = torch.diff(row_map.ends_E, prepend=row_map.ends_E.new_zeros(1))
        with torch.no_grad():
            counts = peers.gather(own_E, "routing")
        return counts.view(peers.size, peers.size, -1)


class AllGatherReduceScatter(Transport):
    """All tokens are sent once, however many experts they have."""

    def __init__(self, num_experts: int, peers: Peers, tokens_of_peers: Sequence[int]) -> None:
        self._peers, self._tokens_of_peers = peers, tokens_of_peers
        self._held = num_experts // peers.size

    @override
    def there(self, x_ND: Tensor, gates_NK: Tensor, experts_NK: Tensor) -> Slots:
        # Padded to the largest number, because a gather needs parts of one size.
        peers, most = self._peers, max(self._tokens_of_peers)
        x_MD = peers.gather(_padded(x_ND, most, 0), "dispatch")
        gates_MK = peers.gather(_padded(gates_NK, most, 0), "gates")
        # Padding chooses an expert that does not exist.
        nobody = peers.size * self._held
        experts_MK = peers.gather(_padded(experts_NK, most, nobody), "routing")
        own_MK = experts_MK - peers.rank * self._held
        own_MK = torch.where((own_MK >= 0) & (own_MK < self._held), own_MK, self._held)
        row_map = RowMap.of(own_MK, self._held, drops=True)
        if row_map.ends_E.device.type == "cpu":
            # A GPU is not waited for to learn this number; the rows beyond it stay, and are ignored.
            row_map = row_map.first(max(int(row_map.ends_E[-1]), min(1, own_MK.numel())))
        self._row_map = row_map
        return Slots(
            rows_SD=dispatch(x_MD, row_map), gates_S=row_map.gates(gates_MK), ends_E=row_map.ends_E
        )

    @override
    def back(self, rows_SD: Tensor) -> Tensor:
        share = self._peers.sum_scattered(combine(rows_SD, self._row_map), "combine")
        return share[: self._tokens_of_peers[self._peers.rank]]


def chosen_transport(
    name: Literal["auto", "a2a", "ag_rs"], top_k: int, peers: int, crossover: int | None = None
) -> TransportName:
    """Return the transport to use.

    Args:
        name: ``auto`` takes ``ag_rs`` above the crossover.
        top_k: Experts of a token.
        peers: Ranks.
        crossover: Most experts of a token at which ``a2a`` was measured to be faster; ``None`` takes the number of
            ranks, up to which it sends fewer bytes.
    """
    if name != "auto":
        return name
    return "ag_rs" if top_k > (peers if crossover is None else crossover) else "a2a"


def _on_host(rows_PP: Tensor) -> list[list[int]]:
    """Return how many rows go from rank to rank, the one number of a layer for which a GPU is waited for."""
    found: list[list[int]] = rows_PP.tolist()
    return found


def _by_expert_then_source(counts_PE: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the order that sorts rows that arrived by (source, expert) by (expert, source), and its inverse."""
    num_peers, num_experts = counts_PE.shape
    experts = torch.arange(num_experts, device=counts_PE.device).repeat(num_peers)
    # Without this number, the function would ask the device.
    arrived_S = experts.repeat_interleave(counts_PE.flatten(), output_size=num_rows)
    order_S = torch.argsort(arrived_S, stable=True)
    inverse_S = torch.empty_like(order_S)
    inverse_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return order_S, inverse_S


def _padded(x: Tensor, length: int, value: int) -> Tensor:
    if len(x) == length:
        return x
    return torch.cat((x, x.new_full((length - len(x), *x.shape[1:]), value)))
