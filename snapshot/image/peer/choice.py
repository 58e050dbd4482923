"""Which peer is asked for which block, so that nodes that start together read a registry once.

Blobs are cut into *regions*. For each region every node has a score, the same wherever it is
computed; the order of scores is the region's *ranking*, and its first node is the *home*.
A node asks only nodes that rank before it, so the home asks the registry, and requests for
one region can never go in a circle, even among nodes with different lists and open circuits.

Requests go up a tree over the ranks, here with a fan-out of 2; it is drawn anew for each
region, so every node is near the root of some and a leaf of most::

    registry <- 0 <- 1 <- 3
                  |    |- 4
                  |- 2 <- 5
                       |- 6
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from snapshot.image.layer.index import BlockRef

__all__ = ["REGION_BYTES", "holders", "parent", "ranking", "region_of", "regions", "runs"]

REGION_BYTES = 1 << 20
"""Size of a region, in bytes of the blob: a node hands on nothing of a region before it has all it asked for."""


def region_of(ref: BlockRef) -> str:
    """Return the name of the region in which a block begins."""
    return f"{ref.blob}/{ref.offset // REGION_BYTES}"


def regions(refs: Sequence[BlockRef]) -> Iterator[tuple[str, list[BlockRef]]]:
    """Return neighbours of one region together, in order; none is left out."""
    return ((region, list(found)) for region, found in groupby(refs, key=region_of))


def runs(refs: Sequence[BlockRef], bridge_bytes: int = 0) -> Iterator[list[BlockRef]]:
    """Yield blocks that lie side by side together, in order, over gaps of ``bridge_bytes``; none is left out."""
    run: list[BlockRef] = []
    for ref in refs:
        if run and not (ref.blob == run[-1].blob and 0 <= ref.offset - run[-1].end <= bridge_bytes):
            yield run
            run = []
        run.append(ref)
    if run:
        yield run


def ranking(members: Collection[str], region: str) -> tuple[str, ...]:
    """Return the members by their score for a region, the home first.

    A member that comes or goes changes nobody else's order, so only its own share of the
    regions moves.

    Source:
        Rendezvous hashing; Thaler and Ravishankar, "Using Name-Based Mappings to Increase
        Hit Rates" (1998).
    """
    return tuple(sorted(members, key=lambda member: _score(member, region)))


def parent(
    ranked: Sequence[str], me: str, region: str, away: Collection[str], *, fanout: int = 8
) -> str | None:
    """Return the parent of a node in the tree of a region; None at the root.

    Args:
        ranked: All members, as ``ranking`` gives them.
        me: The node that asks. One that is no member serves nobody and stands below all.
        region: Which region.
        away: Members that are not to be asked.
        fanout: Children of a node, members and others counted apart.

    Returns:
        A member that ranks before ``me`` and is not away.
    """
    before = list(ranked[: ranked.index(me)] if me in ranked else ranked)
    present = [member for member in before if member not in away]
    if not present:
        return None
    if me in ranked:
        # As in a heap: this node comes after all of them, at place len(present).
        return present[(len(present) - 1) // fanout]
    # Nodes that do not serve are dealt over the upper half of the tree, where blocks come first.
    return present[int.from_bytes(_score(me, region)) % (len(present) // 2 + 1) % len(present)]


def holders(ranked: Sequence[str], me: str, away: Collection[str]) -> tuple[str, ...]:
    """Return nodes that may hold a region that none before ``me`` gave: the first two ranked after it.

    They stood in for ``me`` while it was away. They may be asked for what they hold and never
    for what they would have to fetch, since they would ask ``me``.
    """
    after = ranked[ranked.index(me) + 1 :] if me in ranked else ()
    return tuple(member for member in after if member not in away)[:2]


def _score(member: str, region: str) -> bytes:
    # The same on every node, as Python's own hash is not.
    return hashlib.blake2b(f"{member}\0{region}".encode(), digest_size=8).digest()
