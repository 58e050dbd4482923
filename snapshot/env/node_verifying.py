"""Every file of a node's trees compared with its digest; a tree that is damaged goes."""

from collections.abc import Iterator
from typing import NamedTuple

from omniload.base.errors import OmniloadError
from snapshot.env.locks import exclusively
from snapshot.env.node_cache import NodeCache, Tree

__all__ = ["Verified", "verify_node"]


class Verified(NamedTuple):
    """What was found of one tree."""

    key: str
    faults: list[str]
    """Paths that are not what was extracted, or what is wrong with the manifest; none where it is sound."""
    was_linked: bool
    """Environments hold the same files: they have to be restored again."""


def verify_node(cache: NodeCache) -> Iterator[Verified]:
    """Compare the trees one after another; remove those that are damaged, so that they are fetched again.

    A tree is locked while it is compared: restores of the same snapshot wait for it.
    """
    for folder in sorted((cache.folder / "trees").iterdir()):
        key = folder.name
        with exclusively(cache.lock(key)):
            tree = Tree(folder)
            linked = (folder / "linked").exists()
            try:
                faults = tree.changed_files(digests=True)
            except FileNotFoundError:
                continue  # pruned since
            except OmniloadError as error:
                faults = [str(error)]
            if faults:
                cache.drop(key)
        yield Verified(key, faults, linked)
