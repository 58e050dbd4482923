"""Distance of each source's share of the tokens from the requested weights.

python -m benchmarks.planner.mix_accuracy --help
"""

from collections.abc import Mapping
from dataclasses import dataclass

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.planned_steps import Lengths, steps_of
from benchmarks.report import Table, print_table, write_report
from omniload.mix.config import MixConfig
from omniload.mix.schedule import boundaries, weights_at

__all__ = ["main"]

_SAMPLES = 10_000
_LENGTH = 8_192
_ROWS = 64
WEIGHTED, CORRECTED = "choice by weight", "choice by weight / mean length"
DRAWN, TRAINED = "omniload, drawn", "omniload, in rows"
METHODS = (WEIGHTED, CORRECTED, DRAWN, TRAINED)


@dataclass(frozen=True, slots=True)
class Case:
    """A number of sources, and the seed of their weights and lengths."""

    num_sources: int
    seed: int

    def rng(self, purpose: int) -> np.random.Generator:
        """Return independent random numbers for one purpose."""
        return np.random.default_rng((self.num_sources, self.seed, purpose))

    def lengths(self) -> list[Lengths]:
        """Draw sources that differ tenfold in mean length, each with a long tail to 32k."""
        rng = self.rng(0)
        medians = np.exp(rng.uniform(np.log(150), np.log(1_500), self.num_sources))
        return [
            Lengths(np.clip(rng.lognormal(np.log(m), 1.2, 20_000), 1, 32_768).astype(np.int32))
            for m in medians
        ]

    def mix(self, rows: int, steps: int) -> MixConfig:
        """Return a mix of three stages of ``steps`` steps each; the last begins with a ramp."""
        rng = self.rng(1)
        names = [f"s{i}" for i in range(self.num_sources)]
        stages = [
            {
                "from_step": stage * steps,
                "weights": dict(
                    zip(names, rng.dirichlet(np.ones(len(names))).tolist(), strict=True)
                ),
                "ramp_steps": steps // 2 if stage == 2 else 0,
            }
            for stage in range(3)
        ]
        source = {"type": "parquet", "path": "x", "tokens": "x"}
        return MixConfig.model_validate(
            {
                "version": 1,
                "seed": self.seed,
                "sources": dict.fromkeys(names, source),
                "mix": {"stages": stages},
                "pack": {"length": _LENGTH},
                "batch": {"tokens": rows * _LENGTH, "micro_tokens": _LENGTH},
            }
        )


@dataclass(slots=True)
class Shares:
    """Tokens of each source so far, by method, and the requested weights."""

    tokens: dict[str, NDArray[np.float64]]
    asked: dict[str, NDArray[np.float64]]

    @classmethod
    def none(cls, num_sources: int) -> "Shares":
        """Return the shares before the first step."""
        return cls(*({m: np.zeros(num_sources) for m in METHODS} for _ in range(2)))

    def add(
        self, method: str, tokens_S: NDArray[np.float64], weights_S: NDArray[np.float64]
    ) -> None:
        """Count the tokens of one step."""
        self.tokens[method] += tokens_S
        self.asked[method] += weights_S * tokens_S.sum()

    def worst(self) -> dict[str, float]:
        """Return, by method, the distance of the worst source from its share, in percentage points."""
        return {
            m: float(np.abs(self.tokens[m] - self.asked[m]).max() / self.tokens[m].sum() * 100)
            for m in METHODS
        }


def chosen_tokens(
    rng: np.random.Generator, lengths: list[Lengths], odds_S: NDArray[np.float64], budget: int
) -> NDArray[np.float64]:
    """Draw samples by weighted random choice until they have ``budget`` tokens; return tokens by source."""
    tokens_S = np.zeros(len(lengths))
    while tokens_S.sum() < budget:
        left = budget - tokens_S.sum()
        count = max(1, int(left / 2_000))
        for s, n in enumerate(rng.multinomial(count, odds_S / odds_S.sum()).tolist()):
            if n:
                tokens_S[s] += rng.choice(lengths[s].lengths_N, n).sum()
    return tokens_S


def deviations(case: Case, *, rows: int, steps: int, samples: int) -> dict[str, dict[str, float]]:
    """Return the worst deviation of each method, by moment."""
    mix, lengths, rng = case.mix(rows, steps), case.lengths(), case.rng(2)
    means_S = np.array([column.lengths_N.mean() for column in lengths])
    shares, drawn = Shares.none(case.num_sources), 0
    found: dict[str, dict[str, float]] = {}
    edges = {edge: f"step {edge}, a stage or ramp ends" for edge in boundaries(mix) if edge}
    for state, membership in steps_of(mix, lengths):
        weights_S = np.array(weights_at(mix.mix.stages, mix.names, state.step))
        budget = rows * _LENGTH
        shares.add(WEIGHTED, chosen_tokens(rng, lengths, weights_S, budget), weights_S)
        shares.add(CORRECTED, chosen_tokens(rng, lengths, weights_S / means_S, budget), weights_S)
        shares.add(DRAWN, np.array(membership.served_S, np.float64), weights_S)
        pieces = membership.pieces
        shares.add(
            TRAINED,
            np.bincount(pieces.sources_P, pieces.lengths_P, minlength=case.num_sources).astype(
                np.float64
            ),
            weights_S,
        )
        before, drawn = drawn, drawn + int(membership.finished_S.sum())
        if before < samples <= drawn:
            found[f"{samples:,} samples"] = shares.worst()
        if membership.after.step in edges:
            found[edges[membership.after.step]] = shares.worst()
        if membership.after.step >= 3 * steps and drawn >= samples:
            return found | {f"step {membership.after.step}, the end": shares.worst()}
    raise AssertionError("steps go on for ever")


def table_of(worst: Mapping[tuple[int, str], Mapping[str, float]], draws: int) -> Table:
    """Return one row for each number of sources and moment."""
    return Table(
        columns=("sources", "moment", *METHODS),
        rows=tuple(
            (str(num), moment, *(f"{by_method[m]:.4f}" for m in METHODS))
            for (num, moment), by_method in worst.items()
        ),
        caption=f"Furthest any source is from its share of the tokens, percentage points, worst of {draws} draws",
    )


READING = """\
After {samples:,} samples the worst source of the worst mix is {drawn:.4f} points from its share of the drawn tokens,
and {trained:.4f} from its share of the tokens in rows (the difference waits to be packed); at the boundaries of
stages and ramps at most {edge:.4f} and {edge_trained:.4f}. Choosing sources by weight, as loaders do that mix by
`random.choices` or by sample probabilities, misses by up to {weighted:.1f} points, because documents differ in length
between sources. Dividing weights by the true mean lengths, which must be known for that, leaves up to
{corrected:.2f}. Targets are cumulative: at every step the weights then in force times the tokens of the step. Lengths
are log-normal (sigma 1.2, medians from 150 to 1,500, cut at 32k), weights random (flat Dirichlet), rows of {length:,}
tokens, {rows} in a step. Longer documents are drawn row by row, so none puts a source ahead by more than a row. That
limits the deviation to {length:,} tokens after any number of draws, so the share comes closer with every step."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--draws", default=5, show_default=True, type=click.IntRange(1), help="Mixes of each size."
)
@click.option("--most", default=306, show_default=True, help="Most sources.")
@click.option(
    "--rows", default=_ROWS, show_default=True, type=click.IntRange(1), help="Rows of a step."
)
@click.option(
    "--steps", default=24, show_default=True, type=click.IntRange(2), help="Steps of a stage."
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(draws: int, most: int, rows: int, steps: int, report: bool) -> None:
    """Compare token shares with the requested weights.

    \b
    Example:
      python -m benchmarks.planner.mix_accuracy --draws 1 --most 16 --no-report
    """  # noqa: D301 -- click's own marker
    worst: dict[tuple[int, str], dict[str, float]] = {}
    for num in [n for n in (2, 16, 64, 306) if n <= most]:
        for seed in range(draws):
            for moment, found in deviations(
                Case(num, seed), rows=rows, steps=steps, samples=_SAMPLES
            ).items():
                kept = worst.setdefault((num, moment), dict.fromkeys(METHODS, 0.0))
                kept.update({m: max(kept[m], found[m]) for m in METHODS})
    table = table_of(worst, draws)
    print_table(table)
    if report:
        path = write_report(
            __file__,
            "mix_accuracy",
            "Shares of the sources against their weights",
            f"python -m benchmarks.planner.mix_accuracy --draws {draws} --most {most} --rows {rows} --steps {steps}",
            [table],
            reading_of(worst, rows),
        )
        click.echo(f"wrote {path.name}")


def reading_of(worst: Mapping[tuple[int, str], Mapping[str, float]], rows: int) -> str:
    """Return the reading of the figures."""
    first = [found for (_, moment), found in worst.items() if moment.endswith("samples")]
    edges = [found for (_, moment), found in worst.items() if moment.startswith("step")]
    everything = list(worst.values())
    return READING.format(
        samples=_SAMPLES,
        drawn=max(f[DRAWN] for f in first),
        trained=max(f[TRAINED] for f in first),
        edge=max(f[DRAWN] for f in edges),
        edge_trained=max(f[TRAINED] for f in edges),
        weighted=max(f[WEIGHTED] for f in everything),
        corrected=max(f[CORRECTED] for f in everything),
        length=_LENGTH,
        rows=rows,
    ).replace("\n", " ")


if __name__ == "__main__":
    main()
