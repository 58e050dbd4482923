"""Every file of a node's trees compared with its digest; a tree that is damaged goes."""

from collections.abc import Iterator
from typing import NamedTuple

from omniload.base.errors import OmniloadError
from snapshot.env.node.cache import NodeCache, Tree
from snapshot.env.node.locks import exclusively

__all__ = ["Verified", "verify_node", "verify_tree"]


class Verified(NamedTuple):
    """What was found of one tree."""

    key: str
    faults: list[str]
    """Paths that are not what was extracted, or what is wrong with the manifest; none where it is sound."""
    was_linked: bool
    """Environments hold the same files: they have to be restored again."""


def verify_node(cache: NodeCache) -> Iterator[Verified]:
    """Compare the trees one after another; remove those that are damaged, so that they are fetched again."""
    for folder in sorted((cache.folder / "trees").iterdir()):
        if (verified := verify_tree(cache, folder.name)) is not None:
            yield verified


def verify_tree(cache: NodeCache, key: str) -> Verified | None:
    """Compare one tree; remove it where it is damaged. Return ``None`` where it was pruned since.

    The tree is locked while it is compared: restores of the same snapshot wait for it.
    """
    folder = cache.folder / "trees" / key
    with exclusively(cache.lock(key)):
        linked = (folder / "linked").exists()
        try:
            faults = Tree(folder).changed_files(digests=True)
        except FileNotFoundError:
            return None
        except OmniloadError as error:
            faults = [str(error)]
        if faults:
            cache.drop(key)
    return Verified(key, faults, linked)
