"""The output of ``omniload env show`` and ``verify``, as text and as JSON."""

import json
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from omniload.base.errors import IntegrityError, StateError
from omniload.base.units import format_bytes
from snapshot.env.format.entries import Kind, Target
from snapshot.env.format.manifest import Manifest
from snapshot.env.key.keys import differences, shown
from snapshot.env.node.cache import NodeCache
from snapshot.env.node.verification import verify_node
from snapshot.env.store.repository import Repository
from snapshot.env.target.verification import faults_of

__all__ = [
    "manifest_of",
    "show_all",
    "show_difference",
    "show_environment",
    "show_node",
    "show_one",
    "summary_of",
]


def manifest_of(repository: Repository, start: str) -> Manifest:
    """Return the manifest of the one key that begins with ``start``.

    Raises:
        StateError: There is none, or several do.
    """
    key = repository.full_key(start)
    manifest = repository.manifest(key)
    if manifest is None:
        raise StateError(f"no snapshot {key} in {repository.store.location}")
    return manifest


def summary_of(manifest: Manifest) -> dict[str, Any]:
    """Return what is worth knowing of a snapshot, ready for JSON."""
    head = manifest.head
    created = datetime.fromtimestamp(head.created_ns / 1e9, UTC)
    return {
        "key": head.key,
        "created": created.isoformat(timespec="seconds"),
        "command": shlex.join(head.document["command"]),
        "files": manifest.num_files,
        "deleted": sum(entry.kind is Kind.DELETED for entry in manifest.entries),
        "raw_bytes": manifest.raw_bytes,
        "stored_bytes": head.stored_bytes,
        "packs": len(head.packs),
        "install_s": head.install_s,
        "distributions": list(head.distributions),
        "skipped": list(head.skipped),
        "document": head.document,
    }


def show_all(repository: Repository, *, as_json: bool) -> None:
    """List the snapshots of a store, the newest first."""
    found = [summary_of(manifest_of(repository, each)) for each in repository.all_keys()]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for each in found:
        size = format_bytes(each["raw_bytes"])
        click.echo(
            f"{each['key'][:16]}  {each['created']}  {each['files']} files  {size}  {each['command']}"
        )


def show_one(manifest: Manifest, *, files: bool, as_json: bool) -> None:
    """Print all of one snapshot."""
    found = summary_of(manifest)
    names = [target.name for target in manifest.head.targets]
    paths = [
        {
            "target": names[e.target],
            "path": shown(e.path),
            "kind": e.kind.name.lower(),
            "bytes": e.size_bytes,
        }
        for e in (manifest.entries if files else ())
    ]
    if as_json:
        click.echo(json.dumps({**found, **({"paths": paths} if files else {})}, indent=2))
        return
    for name in ("key", "created", "command", "files", "deleted", "packs"):
        click.echo(f"{name:14}{found[name]}")
    click.echo(
        f"{'size':14}{format_bytes(manifest.raw_bytes)}, {format_bytes(manifest.head.stored_bytes)} added to the store"
    )
    click.echo(f"{'installed in':14}{manifest.head.install_s:.1f} s")
    click.echo(f"{'distributions':14}{' '.join(manifest.head.distributions)}")
    for path in paths:
        click.echo(f"{path['kind']:10}{path['bytes']:>12}  {path['target']}/{path['path']}")


def show_difference(left: Manifest, right: Manifest, *, as_json: bool) -> None:
    """Print the inputs in which two snapshots differ."""
    found = differences(left.head.document, right.head.document)
    if as_json:
        click.echo(json.dumps([each._asdict() for each in found], indent=2))
        return
    for each in found:
        click.echo(f"{each.place}: {each.left or '(absent)'} -> {each.right or '(absent)'}")
    if not found:
        click.echo("the same key")


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
