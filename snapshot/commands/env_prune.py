"""``omniload env prune``: remove unused trees from a node cache, and packs that no snapshot names from a store."""

import json
import time

import click

from omniload.base.cli import DURATION
from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import format_bytes
from snapshot.env.key.interpreter import shown
from snapshot.env.node.cache import NodeCache, prune_cache
from snapshot.env.store.access import opened
from snapshot.env.store.repository import prune_store

__all__ = ["prune_command"]


@click.command("prune")
@click.option("-o", "--store", "url", help="Prune this store; by default, the node cache.")
@click.option(
    "--unused",
    type=DURATION,
    default="30d",
    show_default=True,
    help="Node cache: remove trees that were not restored for this long.",
)
@click.option(
    "--grace",
    type=DURATION,
    default="1d",
    show_default=True,
    help="Store: remove packs this long after they were marked. It must be longer than any save takes.",
)
@click.option("--verify", is_flag=True, help="Node cache: read every tree and remove damaged ones.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option("--json", "as_json", is_flag=True)
@click.argument("keys", nargs=-1)
def prune_command(  # noqa: PLR0913, PLR0917 -- the options of a command
    url: str | None,
    unused: float,
    grace: float,
    verify: bool,
    dry_run: bool,
    as_json: bool,
    keys: tuple[str, ...],
) -> None:
    """Remove unused trees from the node cache, or the snapshots KEYS from a store.

    Packs that no snapshot names are marked first. A run after the grace period removes them, so that a save under way
    can still use the packs it found. Run this command about once a day.

    \b
    Example:
      omniload env prune --unused 14d --verify
      omniload env prune -o hdfs://namenode:9000/envs 3f9a01c2
      omniload env prune -o hdfs://namenode:9000/envs --dry-run
    """  # noqa: D301 -- click's own marker
    if url is None:
        if keys:
            raise ConfigError(f"{keys[0]!r}: snapshots are removed from a store; name it with -o")
        _prune_node(unused, act=not dry_run, verify=verify, as_json=as_json)
    elif verify:
        raise ConfigError(
            "--verify reads the node cache; a pack of a store is compared as it is read"
        )
    else:
        _prune_store(url, keys, grace, act=not dry_run, as_json=as_json)


def _prune_node(unused_s: float, *, act: bool, verify: bool, as_json: bool) -> None:
    cache, now_ns = NodeCache(), time.time_ns()
    found = list(prune_cache(cache, unused_s=unused_s, now_ns=now_ns, act=act, verify=verify))
    if as_json:
        click.echo(json.dumps([each._asdict() for each in found]))
    else:
        for each in found:
            outcome, freed = _tense(each.outcome, act=act), format_bytes(each.freed_bytes)
            where = shown(f" ({each.fault})") if each.fault else ""
            click.echo(f"{each.kind} {each.name[:16]}: {outcome}{where}, {freed}")
        total = format_bytes(sum(each.freed_bytes for each in found))
        click.echo(f"{total} {'freed' if act else 'would be freed'} in {cache.folder}")
    # Report it last, and by the exit code, because a daily timer looks at nothing else.
    if damaged := sum(each.outcome == "damaged" for each in found):
        trees = sum(each.kind == "tree" for each in found)
        raise IntegrityError(
            f"{damaged} of {trees} trees are damaged{' and removed' if act else ''}; restore "
            "again where they are linked or mounted, which fetches them from the store"
        )


def _prune_store(
    url: str, starts: tuple[str, ...], grace_s: float, *, act: bool, as_json: bool
) -> None:
    with opened(url) as repository:
        keys = [repository.full_key(start) for start in starts]
        # A whole key is used as it is, so it is not known yet whether it exists.
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
