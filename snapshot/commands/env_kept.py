"""``omniload env``: show, verify, prune: what a store and a node keep."""

import json
import shlex
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

# Imported with every verb of ``omniload env``; what these alone need, their functions import.
from omniload.base.errors import ConfigError, IntegrityError, StateError
from snapshot.commands.env_options import EnvironmentOptions, environment_options, store_option
from snapshot.env.format.entries import Kind, Target
from snapshot.env.key.base import shown
from snapshot.env.key.keys import differences
from snapshot.env.node.cache import NodeCache, prune_cache, verify_node
from snapshot.env.node.tree import TreeHead
from snapshot.env.store.access import opened

if TYPE_CHECKING:
    from snapshot.env.format.manifest import Manifest
    from snapshot.env.store.repository import Repository

__all__ = [
    "manifest_of",
    "prune_command",
    "show_all",
    "show_command",
    "show_difference",
    "show_environment",
    "show_node",
    "show_one",
    "summary_of",
    "verify_command",
]


@click.command("show")
@store_option(required=True)
@click.option("--diff", "pair", nargs=2, metavar="A B", help="Say why two keys differ.")
@click.option("--files", is_flag=True, help="List every path.")
@click.option("--json", "as_json", is_flag=True)
@click.argument("key", required=False)
def show_command(
    url: str, pair: tuple[str, str] | None, files: bool, as_json: bool, key: str | None
) -> None:
    """List the snapshots of STORE, show one, or say why two differ.

    \b
    Example:
      omniload env show -o /mnt/envs
      omniload env show 3f9a01c2 -o /mnt/envs --files
      omniload env show -o /mnt/envs --diff 3f9a01c2 77b0e4d1
    """  # noqa: D301 -- click's own marker
    with opened(url) as repository:
        if pair:
            left, right = (manifest_of(repository, each) for each in pair)
            show_difference(left, right, as_json=as_json)
        elif key:
            show_one(manifest_of(repository, key), files=files, as_json=as_json)
        else:
            show_all(repository, as_json=as_json)


@click.command("verify")
@store_option(required=False)
@environment_options
@click.option("--node", is_flag=True, help="All trees of the node cache; damaged ones are removed.")
@click.option("--json", "as_json", is_flag=True)
@click.argument("key", required=False)
def verify_command(
    given: EnvironmentOptions, url: str | None, node: bool, as_json: bool, key: str | None
) -> None:
    """Compare every file of the environment with its snapshot, by digest.

    \b
    Example:
      omniload env verify -o /mnt/envs
      omniload env verify --node
    """  # noqa: D301 -- click's own marker
    if node:
        show_node(as_json=as_json)
        return
    if url is None:
        raise ConfigError("no store to compare with; name it with -o, or compare with --node")
    environment = given.environment
    with environment.locked():
        record = environment.heal()
    if key is None and record is None:
        raise StateError(f"{environment.interpreter.prefix} holds no snapshot; give a KEY")
    with opened(url) as repository:
        manifest = manifest_of(repository, key or (record.key if record else ""))
    environment.check_fits(TreeHead.of(manifest))
    show_environment(manifest, environment.targets, as_json=as_json)


@click.command("prune")
@click.option("-o", "--store", "url", help="Prune this store; else the node cache.")
@click.option(
    "--unused",
    default="30d",
    show_default=True,
    help="Node cache: remove what was not restored for so long.",
)
@click.option(
    "--grace",
    default="1d",
    show_default=True,
    help="Store: remove packs that were condemned so long ago. Longer than any save takes.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
@click.option("--json", "as_json", is_flag=True)
@click.argument("keys", nargs=-1)
def prune_command(
    url: str | None, unused: str, grace: str, dry_run: bool, as_json: bool, keys: tuple[str, ...]
) -> None:
    """Remove trees nobody has used from the node cache, or from a store the snapshots KEYS.

    Packs that no snapshot names are condemned, and removed by a run a grace later, so that a
    save under way may rely on what it found. Run it every day or so.

    \b
    Example:
      omniload env prune --unused 14d
      omniload env prune -o hdfs://namenode:9000/envs 3f9a01c2
      omniload env prune -o hdfs://namenode:9000/envs --dry-run
    """  # noqa: D301 -- click's own marker
    if url is None:
        if keys:
            raise ConfigError(f"{keys[0]!r}: snapshots are removed from a store; name it with -o")
        _prune_node(_seconds("--unused", unused), act=not dry_run, as_json=as_json)
    else:
        _prune_store(url, keys, _seconds("--grace", grace), act=not dry_run, as_json=as_json)


def _seconds(option: str, text: str) -> float:
    # Imported here: every other command would load pydantic for it.
    from omniload.base.units import parse_seconds  # noqa: PLC0415

    try:
        found = parse_seconds(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error
    assert isinstance(found, float)
    return found


def _prune_node(unused_s: float, *, act: bool, as_json: bool) -> None:
    from omniload.base.units import format_bytes  # noqa: PLC0415

    cache = NodeCache()
    found = list(prune_cache(cache, unused_s=unused_s, now_ns=time.time_ns(), act=act))
    if as_json:
        click.echo(json.dumps([each._asdict() for each in found]))
        return
    for each in found:
        outcome, freed = _tense(each.outcome, act=act), format_bytes(each.freed_bytes)
        click.echo(f"{each.kind} {each.name[:16]}: {outcome}, {freed}")
    total = format_bytes(sum(each.freed_bytes for each in found))
    click.echo(f"{total} {'freed' if act else 'would be freed'} in {cache.folder}")


def _prune_store(
    url: str, starts: tuple[str, ...], grace_s: float, *, act: bool, as_json: bool
) -> None:
    from omniload.base.units import format_bytes  # noqa: PLC0415
    from snapshot.env.store.repository import prune_store  # noqa: PLC0415

    with opened(url) as repository:
        keys = [repository.full_key(start) for start in starts]
        known = set(repository.all_keys())
        if missing := [key for key in keys if key not in known]:
            raise ConfigError(f"no snapshot {missing[0]} in {url}; omniload env show lists them")
        done = prune_store(repository, keys, grace_s=grace_s, now_ns=time.time_ns(), act=act)
    if as_json:
        verdict = {name: list(packs) for name, packs in done.verdict._asdict().items()}
        document = {"snapshots": list(done.snapshots), **verdict, "freed_bytes": done.freed_bytes}
        click.echo(json.dumps(document))
        return
    for key in done.snapshots:
        click.echo(f"snapshot {key[:16]}: {_tense('removed', act=act)}")
    click.echo(
        f"packs: {len(done.verdict.removed)} {_tense('removed', act=act)} ({format_bytes(done.freed_bytes)}), "
        f"{len(done.verdict.condemned)} {_tense('condemned', act=act)}, "
        f"{len(done.verdict.pardoned)} {_tense('pardoned', act=act)}"
    )


def _tense(outcome: str, *, act: bool) -> str:
    done = outcome in {"removed", "condemned", "pardoned"}
    return f"would be {outcome}" if done and not act else outcome


def manifest_of(repository: "Repository", start: str) -> "Manifest":
    """Return the manifest of the one key that begins with ``start``.

    Raises:
        StateError: There is none, or several do.
    """
    key = repository.full_key(start)
    manifest = repository.manifest(key)
    if manifest is None:
        raise StateError(f"no snapshot {key} in {repository.store.location}")
    return manifest


def summary_of(manifest: "Manifest") -> dict[str, Any]:
    """Return what is worth knowing of a snapshot, ready for JSON."""
    head = manifest.head
    created = datetime.fromtimestamp(head.created_ns / 1e9, UTC)
    return {
        "key": head.key,
        "created": created.isoformat(timespec="seconds"),
        "command": shlex.join(head.document.get("command", [])),
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


def show_all(repository: "Repository", *, as_json: bool) -> None:
    """List the snapshots of a store, the newest first."""
    from omniload.base.units import format_bytes  # noqa: PLC0415

    found = [summary_of(manifest_of(repository, each)) for each in repository.all_keys()]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for each in found:
        size = format_bytes(each["raw_bytes"])
        click.echo(
            f"{each['key'][:16]}  {each['created']}  {each['files']} files  {size}  {each['command']}"
        )


def show_one(manifest: "Manifest", *, files: bool, as_json: bool) -> None:
    """Print all of one snapshot."""
    from omniload.base.units import format_bytes  # noqa: PLC0415

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


def show_difference(left: "Manifest", right: "Manifest", *, as_json: bool) -> None:
    """Print the inputs in which two snapshots differ."""
    found = differences(left.head.document, right.head.document)
    if as_json:
        click.echo(json.dumps([each._asdict() for each in found], indent=2))
        return
    for each in found:
        click.echo(f"{each.place}: {each.left or '(absent)'} -> {each.right or '(absent)'}")
    if not found:
        click.echo("the same key")


def show_environment(manifest: "Manifest", targets: Sequence[Target], *, as_json: bool) -> None:
    """Print what differs between an environment and its snapshot.

    Raises:
        IntegrityError: Something does.
    """
    from snapshot.env.target.verification import faults_of  # noqa: PLC0415

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
