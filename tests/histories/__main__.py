"""Run histories of a whole data plane under faults: one seed is one history, which can be repeated.

python -m tests.histories --help
"""

import time
from collections import Counter
from pathlib import Path

import click

from tests.histories.safeguards import caught, safeguards


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", default="0:1000", show_default=True, help="Histories FIRST:BEHIND-LAST.")
@click.option("--world", "words", help="One history, as a failing one is printed.")
@click.option("--seed", type=int, help="One history.")
@click.option(
    "--page", type=click.Path(path_type=Path), help="Write that one history here, as HTML."
)
@click.option("--safeguards", "without", is_flag=True, help="Take safeguards away, one by one.")
@click.option(
    "--known-safeguards", "known", is_flag=True, help="Likewise, by the seeds noted with them."
)
def main(
    *,
    seeds: str,
    words: str | None,
    seed: int | None,
    page: Path | None,
    without: bool,
    known: bool,
) -> None:
    """Run histories, and print their events.

    \b
    Example:
      python -m tests.histories --seeds 0:200
      python -m tests.histories --seed 7 --page history.html
      python -m tests.histories --seeds 0:400 --safeguards
    """
    first, _, behind = seeds.partition(":")
    asked = range(int(first), int(behind))
    if without or known:
        _without_safeguards(None if known else asked)
    elif words is not None or seed is not None:
        _one(words or f"seed={seed}", page, drawn=words is None)
    else:
        _many(asked)


def _without_safeguards(asked: range | None) -> None:
    missed = 0
    click.echo(
        "| safeguard that is taken away | seed | what breaks | s |\n| --- | --- | --- | --- |"
    )
    for found in caught(safeguards(), asked):
        missed += found.seed is None
        seed = "none" if found.seed is None else found.seed
        click.echo(
            f"| {found.safeguard.holds} | {seed} | {found.broken:.110} | {found.seconds:.1f} |"
        )
    if missed:
        raise click.ClickException(f"{missed} safeguards are missed by no history of these")


def _one(words: str, page: Path | None, *, drawn: bool) -> None:
    from tests.histories.checking import history_of  # noqa: PLC0415 -- not where safeguards go
    from tests.histories.page import page_of  # noqa: PLC0415
    from tests.histories.worlds import World, world_of  # noqa: PLC0415

    world = World.from_words(words)
    world = world_of(world.seed) if drawn else world
    outcome = history_of(world, traced=True)
    click.echo(f"{world.to_words()}\n{outcome.messages:,} messages: {outcome.broken or 'ok'}")
    if page is not None:
        page.write_text(page_of(world, outcome), encoding="utf-8")
    if outcome.broken:
        raise SystemExit(1)


def _many(asked: range) -> None:
    from tests.histories.checking import (  # noqa: PLC0415
        history_of,
        shrunk,
        without_collection,
    )
    from tests.histories.plane import SOMETIMES  # noqa: PLC0415
    from tests.histories.scaled import SCALED_SOMETIMES  # noqa: PLC0415
    from tests.histories.worlds import world_of  # noqa: PLC0415

    seen: Counter[str] = Counter()
    longest, broken, began_s = 0, 0, time.process_time()
    with without_collection():
        for seed in asked:
            outcome = history_of(world_of(seed))
            seen += outcome.seen
            longest = max(longest, outcome.longest_wait)
            if outcome.broken is not None:
                broken += 1
                smallest = shrunk(world_of(seed), outcome.broken)
                click.echo(
                    f"seed {seed}: {outcome.broken}\n  python -m tests.histories --world ",
                    nl=False,
                )
                click.echo(smallest.to_words())
    took_s = time.process_time() - began_s
    for what in (*SOMETIMES, *SCALED_SOMETIMES):
        click.echo(f"{seen[what]:>9,}  {what}")
    click.echo(
        f"{len(asked):,} histories, {len(asked) / took_s:.0f} a second of one core; "
        f"longest wait {longest:,} messages; {broken} broke a promise"
    )
    if broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
