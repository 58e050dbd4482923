"""The declared dataflow of a step, over metadata alone.

The paper's ``DGraph``: samples in states, and the calls that took them from one to the
next. It says what should happen; ``plan`` ties it to a mesh and carries it out::

    placement = (
        DGraph.of_samples(lengths_N, sources_N)
        .mix(MixSchedule.constant({"web": 7, "code": 3}), budget=4_000_000)
        .distribute("dp", microbatches=4)
        .cost(QuadraticCost(24_576, 1))
        .balance("greedy_swap")
        .broadcast_at("tp")
        .plan(ClientPlaceTree.of(dp=8, tp=4))
    )

    loaded --mix--> mixed --distribute--> distributed --cost--> costed --balance--> balanced

Every call returns a new graph. ``mix`` may be left out; ``cost`` may be called for
several modules (encoder, backbone), which are balanced together. Which members a
step has is settled before ``distribute``, so it cannot depend on the mesh.

Source:
    OVERLORD / Omniload / MegaScale-Data, arXiv 2504.09844, on the declarative primitives.

Shape suffixes:
    N  samples or rows      P  pieces, grouped by row      S  sources
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from omniload.base.units import format_count
from omniload.mix.deficit import Drawn
from omniload.mix.schedule import MixSchedule
from omniload.plan.balance_methods import BalanceMethod, imbalance_of, loads_in_order
from omniload.plan.cost import CostFunction, combined_cost, require_costs, row_costs
from omniload.plan.drawing import draw_candidates
from omniload.plan.place_tree import BucketAxis, ClientPlaceTree, MeshAxis, require_broadcast
from omniload.plan.placement import (
    Distribution,
    Placement,
    loads_of,
    microbatch_bound_of,
    place,
    require_dealing,
)

__all__ = ["DGraph", "Node", "State", "read_only"]

State: TypeAlias = Literal["loaded", "mixed", "distributed", "costed", "balanced"]
"""How far the members of a graph have come."""

_STATES: tuple[State, ...] = get_args(State)

_CALL_TO: Mapping[State, str] = MappingProxyType(
    {"distributed": "distribute", "costed": "cost", "balanced": "balance"}
)
"""The call that leads to each state that must be passed."""


@dataclass(frozen=True, slots=True)
class Node:
    """One state that the members of a graph have been in, and the call that led there."""

    call: str
    """The call as it was written, without its data."""
    state: State
    """State after it."""
    detail: Callable[[], str]
    """Says what it did, for people: in words that are made when somebody reads them, and plans seldom are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DGraph:
    """Samples or packed rows on their way to the ranks. Immutable: a caller that changes a column works on a copy."""

    columns: Mapping[str, NDArray[Any]]
    """Metadata of each sample, or of each piece of the rows; ``lengths`` is always there."""
    row_offsets: NDArray[np.int64] | None = None
    """Boundaries of the rows in the columns, ``[N + 1]``; ``None`` if members are samples."""
    members_N: NDArray[np.int64]
    """Index of each member among the loaded members, in the order of the step."""
    nodes: tuple[Node, ...]
    """The calls so far."""
    drawn: Drawn | None = None
    """Result of ``mix``: counts of the sources, and credits for the next step."""
    distribution: Distribution | None = None
    """Declared by ``distribute``."""
    costs: Mapping[str, NDArray[np.float64]] = field(
        default_factory=lambda: MappingProxyType[str, NDArray[np.float64]]({})
    )
    """Cost of each member, ``[N]``, by module."""
    method: BalanceMethod = "none"
    """Declared by ``balance``."""
    dealing: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
    """Bucket and microbatch of each member, if ``deal`` gave them."""
    broadcast: tuple[MeshAxis, ...] = ()
    """Axes declared by ``broadcast_at``."""

    @classmethod
    def of_samples(
        cls,
        lengths_N: NDArray[Any],
        sources_N: NDArray[Any] | None = None,
        columns: Mapping[str, NDArray[Any]] | None = None,
    ) -> Self:
        """Return a graph of samples.

        Args:
            lengths_N: Tokens in each sample.
            sources_N: Number of the source of each sample; required by ``mix``.
            columns: More metadata for cost functions, a value for each sample.

        Raises:
            ValueError: A column has another length than ``lengths_N``.
        """
        held = _columns(lengths_N, sources_N, columns)

        def detail() -> str:
            return f"{len(lengths_N):,} samples, {format_count(float(np.sum(lengths_N)))} tokens"

        return cls(
            columns=held,
            members_N=np.arange(len(lengths_N)),
            nodes=(Node("of_samples()", "loaded", detail),),
        )

    @classmethod
    def of_rows(
        cls,
        piece_lengths_P: NDArray[Any],
        row_offsets: NDArray[Any],
        columns: Mapping[str, NDArray[Any]] | None = None,
    ) -> Self:
        """Return a graph of packed rows; a row costs what its pieces cost.

        Args:
            piece_lengths_P: Tokens in each piece, grouped by row.
            row_offsets: Boundaries of the rows in the pieces, ``[N + 1]``.
            columns: More metadata for cost functions, a value for each piece.

        Raises:
            ValueError: A column has another length, or the boundaries do not cover the pieces.
        """
        held = _columns(piece_lengths_P, None, columns)
        tokens_R = row_costs(piece_lengths_P, row_offsets)
        num = len(row_offsets) - 1

        def detail() -> str:
            tokens = format_count(float(tokens_R.sum()))
            return f"{num:,} rows, {len(piece_lengths_P):,} pieces, {tokens} tokens"

        return cls(
            columns=held,
            row_offsets=read_only(np.asarray(row_offsets, np.int64)),
            members_N=np.arange(num),
            nodes=(Node("of_rows()", "loaded", detail),),
        )

    def __len__(self) -> int:
        return len(self.members_N)

    @property
    def state(self) -> State:
        """How far the members have come."""
        return self.nodes[-1].state

    def mix(
        self,
        schedule: MixSchedule,
        *,
        step: int = 0,
        budget: int,
        credits_S: Sequence[int] | None = None,
    ) -> Self:
        """Draw the samples of a step from the candidates, by the weights at that step.

        Samples of a source are drawn in the order in which they were loaded.

        Args:
            schedule: Weights over time.
            step: Number of the step.
            budget: Tokens to draw; the last sample may exceed it.
            credits_S: Credits after the step before (``drawn.credits_S``); zeros at the start.

        Raises:
            ValueError: The candidates have no sources or are rows; otherwise as for ``draw_candidates``.
        """
        self._require("mix", "loaded", "loaded")
        if self.row_offsets is not None or "sources" not in self.columns:
            raise ValueError("mix draws samples by source; load them with of_samples and sources_N")
        chosen_N, drawn = draw_candidates(
            schedule,
            self.columns["lengths"],
            self.columns["sources"],
            step=step,
            budget=budget,
            credits_S=credits_S,
        )

        def detail() -> str:
            shares = schedule.shares_at(step).items()
            told = ", ".join(f"{name} {share:.3g}" for name, share in shares if share > 0)
            return f"{len(chosen_N):,} of {len(self):,} samples: {told}"

        return replace(
            self,
            columns=MappingProxyType({name: c[chosen_N] for name, c in self.columns.items()}),
            members_N=self.members_N[chosen_N],
            drawn=drawn,
            nodes=(*self.nodes, Node(f"mix(step={step}, budget={budget})", "mixed", detail)),
        )

    def distribute(
        self,
        axis: BucketAxis = "dp",
        group_size: int = 1,
        *,
        microbatches: int = 1,
        max_count: int | None = None,
    ) -> Self:
        """Declare the buckets that members are dealt to, and their microbatches.

        Args:
            axis: Axis of the mesh: ``dp``, ``cp``, ``ep`` or ``world``.
            group_size: Number of neighbouring consumers that share a bucket.
            microbatches: Number of microbatches of a bucket.
            max_count: Largest number of members of one microbatch; any number by default.
        """
        self._require("distribute", "loaded", "mixed")
        deal = Distribution(
            axis=axis, group_size=group_size, microbatches=microbatches, max_count=max_count
        )
        call = f"distribute({axis!r}, group_size={group_size}, microbatches={microbatches})"
        cap = "any number" if max_count is None else f"at most {max_count}"
        node = Node(call, "distributed", lambda: f"buckets along {axis}; {cap} in a microbatch")
        return replace(self, distribution=deal, nodes=(*self.nodes, node))

    def cost(
        self, function: CostFunction, module: str = "backbone", *, of: Sequence[str] = ("lengths",)
    ) -> Self:
        """Give members a cost for one module of the model. Call it again for another module.

        Args:
            function: Cost of each sample or piece, computed from columns of metadata.
            module: Name of the module in reports.
            of: Columns to call the function with, in order.

        Raises:
            ValueError: A column is missing, the module has a cost already, or a cost is not finite and at least 0.
        """
        self._require("cost", "distributed", "costed")
        if module in self.costs:
            raise ValueError(f"module {module!r} has a cost already; name another module")
        values = require_costs(function, self.columns, of, module)
        cost_N = values if self.row_offsets is None else row_costs(values, self.row_offsets)

        def detail() -> str:
            mean, most = cost_N.mean() if len(cost_N) else 0, cost_N.max(initial=0)
            return f"{module}: mean {mean:.4g}, most {most:.4g}"

        node = Node(f"cost({module!r}, of={tuple(of)})", "costed", detail)
        costs = MappingProxyType({**self.costs, module: cost_N})
        return replace(self, costs=costs, nodes=(*self.nodes, node))

    def balance(self, method: BalanceMethod = "greedy_swap") -> Self:
        """Declare the method by which ``plan`` deals members evenly.

        Raises:
            ValueError: The method is unknown.
        """
        self._require("balance", "costed", "costed")
        if method not in get_args(BalanceMethod):
            raise ValueError(f"method is {method!r}; choose one of {list(get_args(BalanceMethod))}")
        node = Node(f"balance({method!r})", "balanced", lambda: f"by {' + '.join(self.costs)}")
        return replace(self, method=method, nodes=(*self.nodes, node))

    def deal(self, buckets_N: NDArray[Any], microbatches_N: NDArray[Any]) -> Self:
        """Deal members by hand instead of by ``balance``: each to a bucket and one of its microbatches.

        Raises:
            ValueError: A column does not have one number for each member, within the distribution.
        """
        self._require("deal", "costed", "costed")
        assert self.distribution is not None, "a costed graph has been distributed"
        dealing = require_dealing(buckets_N, microbatches_N, len(self), self.distribution)
        node = Node("deal()", "balanced", lambda: "by hand")
        return replace(self, dealing=dealing, nodes=(*self.nodes, node))

    def broadcast_at(self, axis: MeshAxis) -> Self:
        """Declare that one rank along ``axis`` fetches and the trainer broadcasts; repeatable."""
        self._require("broadcast_at", "distributed", "balanced")
        require_broadcast((axis,))
        if axis in self.broadcast:
            raise ValueError(f"broadcast along {axis!r} is declared already; once is enough")
        call = f"broadcast_at({axis!r})"
        node = Node(call, self.state, lambda: f"one rank along {axis} fetches")
        return replace(self, broadcast=(*self.broadcast, axis), nodes=(*self.nodes, node))

    def plan(self, tree: ClientPlaceTree) -> Placement:
        """Tie the graph to a mesh: decide where every member goes.

        If there are several modules, the sum of their costs is balanced, each divided by its mean so that no module
        outweighs the others.

        Raises:
            ValueError: A call is missing, the members do not fit the buckets of the mesh, or one rank would broadcast
                to ranks of several buckets.
        """
        self._require("plan", "balanced", "balanced")
        assert self.distribution is not None, "a balanced graph has been distributed"
        tree.require_fetched(self.distribution.axis, self.distribution.group_size, self.broadcast)
        num_buckets = tree.num_buckets(self.distribution.axis, self.distribution.group_size)
        cost_N = combined_cost(self.costs)
        dealt, microbatches_N = place(
            cost_N, num_buckets, self.distribution, method=self.method, dealing=self.dealing
        )
        shape = (num_buckets, self.distribution.microbatches)
        by_module = {
            name: imbalance_of(np.bincount(dealt.bins_N, c, num_buckets).astype(np.float64))
            for name, c in self.costs.items()
        }
        return Placement(
            members_N=self.members_N,
            buckets_N=dealt.bins_N,
            microbatches_N=microbatches_N,
            loads_BM=loads_of(cost_N, dealt.bins_N, microbatches_N, shape),
            imbalance=dealt.imbalance,
            bound=dealt.least_imbalance,
            microbatch_bound=microbatch_bound_of(cost_N, num_buckets, self.distribution),
            imbalance_before=imbalance_of(loads_in_order(cost_N, num_buckets)),
            imbalance_of_module=MappingProxyType(by_module),
            tree=tree,
            distribution=self.distribution,
            broadcast=self.broadcast,
        )

    def describe(self) -> str:
        """Return the calls so far as a table in text."""
        rows = [("call", "state", "what it did")]
        rows += [(node.call, node.state, node.detail()) for node in self.nodes]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        return "\n".join(f"{c:<{widths[0]}}  {s:<{widths[1]}}  {d}" for c, s, d in rows)

    def _require(self, call: str, first: State, last: State) -> None:
        """Refuse a call that comes too early or too late."""
        now = _STATES.index(self.state)
        if now < _STATES.index(first):
            missing = next(_CALL_TO[s] for s in _STATES[now + 1 :] if s in _CALL_TO)
            raise ValueError(
                f"{call} was called on a graph that is {self.state}; call {missing} first"
            )
        if now > _STATES.index(last):
            raise ValueError(
                f"{call} was called on a graph that is {self.state} already; call it before "
                f"the call {self.nodes[-1].call}"
            )


def _columns(
    lengths: NDArray[Any],
    sources: NDArray[Any] | None,
    more: Mapping[str, NDArray[Any]] | None,
) -> Mapping[str, NDArray[Any]]:
    held = {"lengths": np.asarray(lengths)}
    if sources is not None:
        held["sources"] = np.asarray(sources)
    for name, column in (more or {}).items():
        if name in held:
            raise ValueError(f"column {name!r} is taken by the graph's own; give it another name")
        held[name] = np.asarray(column)
    for name, column in held.items():
        if column.shape != (len(held["lengths"]),):
            raise ValueError(
                f"column {name!r} has shape {column.shape} for {len(held['lengths'])} lengths; "
                "give one value for each"
            )
    # A cost that writes to its argument would change the step itself, whose columns these are, or what others read.
    return MappingProxyType({name: read_only(column) for name, column in held.items()})


def read_only(column: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view of the array; the array itself stays writable."""
    held = column.view()
    held.flags.writeable = False
    return held
