"""The output of ``omniload env verify``, for an environment and for a node."""

import json
from collections.abc import Sequence

import click

from omniload.base.errors import IntegrityError
from snapshot.env.format.entries import Target
from snapshot.env.format.manifest import Manifest
from snapshot.env.key.keys import shown
from snapshot.env.node.cache import NodeCache
from snapshot.env.node.verification import verify_node
from snapshot.env.target.verification import faults_of

__all__ = ["show_environment", "show_node"]


def show_environment(manifest: Manifest, targets: Sequence[Target], *, as_json: bool) -> None:
    """Print what differs between an environment and its snapshot.

    Raises:
        IntegrityError: Something does.
    """
    faults = faults_of(manifest, targets, digests=True)
    if as_json:
        click.echo(json.dumps({"key": manifest.head.key, "faults": [f._asdict() for f in faults]}))
    else:
        for fault in faults:
            click.echo(shown(f"{fault.kind}: {fault.path}: {fault.detail}"))
        click.echo(f"{len(manifest.entries)} paths compared, {len(faults)} faults")
    if faults:
        raise IntegrityError(
            f"{len(faults)} paths are not as in {manifest.head.key[:16]}; restore it"
        )


def show_node(*, as_json: bool) -> None:
    """Print what is damaged in the node cache, and remove it.

    Raises:
        IntegrityError: A tree is damaged.
    """
    found = list(verify_node(NodeCache()))
    damaged = [each for each in found if each.faults]
    if as_json:
        click.echo(json.dumps([each._asdict() for each in found]))
    else:
        for each in damaged:
            click.echo(shown(f"{each.key[:16]}: {len(each.faults)} damaged: {each.faults[0]}"))
        click.echo(f"{len(found)} trees compared, {len(damaged)} damaged")
    if damaged:
        raise IntegrityError(
            f"{len(damaged)} of {len(found)} trees are damaged and removed; restore again where "
            "they are linked or mounted, which fetches them from the store"
        )
