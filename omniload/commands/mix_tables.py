"""Tables of a mix: its shares, which several verbs show, and the findings of ``omniload mix stats``."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from omniload.base.state import Json, JsonObject
from omniload.base.units import counted, format_count
from omniload.commands.display import Cell, FittedTable, bar, colour_of, say, table
from omniload.commands.runs.tag_shares import tag_table, tags_json
from omniload.mix.config import MixConfig, Stage
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import by_epochs
from omniload.mix.schedule import boundaries, weights_at
from omniload.mix.schema.stages import said_epochs
from omniload.plan.forecast.sizes import repetitions_of
from omniload.plan.placement import num_microbatches_of
from omniload.source.estimate import SourceProfile
from omniload.source.formats.opening import spec_of
from omniload.source.kept_findings import FoundSource
from omniload.source.survey.documents import LengthHistogram
from omniload.source.survey.duplicates import Duplicates
from omniload.source.survey.spread import Differences
from omniload.source.survey.tag_shares import TagShares

__all__ = [
    "MOST_ROWS",
    "Rate",
    "SourceStats",
    "Stats",
    "bounded",
    "print_stats",
    "said_of_files",
    "said_of_step",
    "shares_at",
    "shares_table",
    "sorted_files",
    "stages_by_epochs_json",
    "stats_json",
    "sureness",
]

_BAR_WIDTH = 8
MOST_ROWS = 64
"""Most sources in a table: a table of a thousand takes longer to lay out than to compute, and is too long to read."""
_MOST_STEPS = 16
"""Most steps in a table of shares, because a terminal has no room for more columns."""
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_PAIRS_SHOWN = 10
_WARNINGS_SHOWN = 10
"""Most sources named in one warning."""
_MUCH_REPEATED = 0.01


def shares_table(mix: MixConfig) -> FittedTable:
    """Lay out the normalised weight of each source at every step where weights start or stop to change, or amounts."""
    if (amounts := mix.mix.amounts) is not None:
        wanted: list[list[Cell]] = [
            [Text(name, colour_of(s)), str(amounts[name])]
            for s, name in enumerate(mix.names[:MOST_ROWS])
        ]
        columns = [("source", False), ("of the run", True)]
        return table("amounts", columns, bounded(wanted, len(mix.names)))
    steps = boundaries(mix)
    waiting = [stage for stage in mix.mix.stages if stage.waits]
    # For stages that wait, the weights at the end of their ramps are shown.
    ends = [stage.from_step + stage.ramp_steps for stage in waiting]
    shown = [(step, f"step {step:,}") for step in steps]
    shown += [
        (end, f"once {said_epochs(stage.from_epochs or {})}")
        for end, stage in zip(ends, waiting, strict=True)
    ]
    left = len(shown) - _MOST_STEPS
    shares = [shares_at(mix, step) for step, _ in shown[:_MOST_STEPS]]
    rows: list[list[Cell]] = [
        [Text(name, colour_of(s)), *(_share_cell(at[name], s) for at in shares)]
        for s, name in enumerate(mix.names[:MOST_ROWS])
    ]
    columns = [("source", False), *((said, False) for _, said in shown[:_MOST_STEPS])]
    more = f", and at {counted(left, 'more step')}: --json" if left > 0 else ""
    return table(f"shares by {mix.mix.level}{more}", columns, bounded(rows, len(mix.names)))


def said_of_files(found: Sequence[FoundSource]) -> str:
    """Return from how many files records were looked at."""
    looked, files = sum(each.looked for each in found), sum(each.shards for each in found)
    columns = (
        "; of tables, at the columns of all"
        if any(each.shards > 1 and spec_of(each.format).knows_columns for each in found)
        else ""
    )
    return f"looked at the first records of {looked:,} of {files:,} {'file' if files == 1 else 'files'}{columns}"


def said_of_step(mix: MixConfig, dp: int) -> str:
    """Return the composition of a step, and whether all microbatches have one shape, which compilers require."""
    most, rows = mix.rows_per_microbatch, mix.rows_per_step
    count = num_microbatches_of(rows, dp, most)
    # If all are full, costs decide which rows go together, but not how many.
    up_to = "" if rows == count * dp * most else "up to "
    each = f"{count} microbatch{'es' if count > 1 else ''} of {up_to}{most} row{'s' if most > 1 else ''}"
    ranks = f"{dp} data-parallel ranks, each" if dp > 1 else "1 data-parallel rank,"
    return f"{counted(rows, 'row')} of {mix.pack.length:,} tokens over {ranks} with {each}"


def stages_by_epochs_json(history: History) -> list[JsonObject]:
    """Return the stages that begin by epochs as plain JSON; ``step`` is null for a stage that waits."""
    names = history.latest.names
    return [
        {
            "stage": number,
            "from_epochs": dict(stage.from_epochs or {}),
            "step": step,
            "ramp_steps": stage.ramp_steps,
            # The weights at the end of the ramp.
            "shares": dict(zip(names, weights_at([_at_once(stage)], names, 0), strict=True)),
        }
        for number, step, stage in by_epochs(history)
    ]


def _at_once(stage: Stage) -> Stage:
    return stage.model_copy(update={"from_step": 0, "ramp_steps": 0})


def bounded(rows: list[list[Cell]], count: int) -> list[list[Cell]]:
    """Return the first rows of a table of ``count`` rows, and a row with the number of the others."""
    if count <= len(rows):
        return rows
    return [*rows, [f"and {count - len(rows):,} more: --json", *([""] * (len(rows[0]) - 1))]]


def shares_at(mix: MixConfig, step: int) -> dict[str, float]:
    """Return the normalised weight of each source at a step, by name."""
    return dict(zip(mix.names, weights_at(mix.mix.stages, mix.names, step), strict=True))


def _share_cell(share: float, source: int) -> Text:
    return Text.assemble(f"{share:7.2%} ", (bar(share, _BAR_WIDTH), colour_of(source)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStats:
    """Findings about a source."""

    name: str
    records: int
    """Exact number of records in an epoch."""
    looked_at: int
    """Documents behind the other figures."""
    bad: int
    """Records among these that could not be decoded."""
    lengths: LengthHistogram
    epoch_tokens: int
    """Tokens that an epoch trains on; exact if every document was looked at, and all of them are drawn."""
    steps_per_epoch: int | None
    """Steps after which every record was drawn once; ``None`` for never."""
    epochs: float
    """Number of epochs of the source in the run."""
    is_rough: bool = False
    """Whether ``epoch_tokens`` are estimated."""
    skips: bool = False
    """Whether the run leaves out what cannot be decoded: ``on_error: {policy: skip}``."""
    longer: str = ""
    """Message about documents longer than a row: ``drop`` leaves them out, ``refuse`` ends the run."""

    @property
    def is_exact(self) -> bool:
        """Whether every document was looked at."""
        return self.looked_at == self.records


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Results of a short run of the data plane, in one process and without a trainer."""

    tokens_per_s: float
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Facts about a mix that are known before training."""

    steps: int
    """Steps of the run that ``epochs`` refers to."""
    tokens_per_step: float
    sources: Sequence[SourceStats]
    duplicates: Duplicates
    rate: Rate | None
    padded: Sequence[str] = ()
    """Messages about sources that have rows to themselves."""
    sorted: Sequence[str] = ()
    """Messages about sources whose files look sorted."""
    tags: Sequence[TagShares] = ()
    """Shares of the tags of samples."""


def stats_json(stats: Stats) -> JsonObject:
    """Return the findings as plain JSON."""
    names = [source.name for source in stats.sources]
    found = stats.duplicates
    sources: list[Json] = [
        {
            "name": source.name,
            "records": source.records,
            "looked_at": source.looked_at,
            "bad": source.bad,
            "empty": source.lengths.empty,
            "tokens_per_record": source.lengths.mean,
            "length": {
                "p50": source.lengths.quantile(0.5),
                "p90": source.lengths.quantile(0.9),
                "p99": source.lengths.quantile(0.99),
                "longest": source.lengths.longest,
                "by_doubling": list(source.lengths.by_doubling()),
            },
            "epoch_tokens": source.epoch_tokens,
            "steps_per_epoch": source.steps_per_epoch,
            "epochs": source.epochs,
            "hashed": int(found.documents_S[s]),
            "repeated": int(found.repeated_S[s]),
            "elsewhere": int(found.elsewhere_S[s]),
        }
        for s, source in enumerate(stats.sources)
    ]
    pairs: list[Json] = [[names[one], names[other], count] for one, other, count in found.pairs]
    return {
        "steps": stats.steps,
        "tokens_per_step": stats.tokens_per_step,
        "sources": sources,
        "one_hash_in": found.one_in,
        "pairs": pairs,
        "measured": None if stats.rate is None else asdict(stats.rate),
        "tags": tags_json(stats.tags),
        "warnings": list(_warnings(stats)),
    }


def print_stats(console: Console, file: Path, stats: Stats) -> None:
    """Print lengths, then repetition, then warnings."""
    most = max(len(source.lengths.by_doubling()) for source in stats.sources)
    columns = [("source", False), ("records", True), ("looked at", True), ("tokens each", True)]
    columns += [(heading, True) for heading in ("p50", "p99", "longest")]
    columns += [(f"1 to {(1 << most) - 1:,} tokens", False)]
    rows: list[list[Cell]] = [
        [
            Text(source.name, colour_of(s)),
            f"{source.records:,}",
            "all" if source.is_exact else f"{source.looked_at:,}",
            f"{source.lengths.mean:,.1f}",
            f"{source.lengths.quantile(0.5):,}",
            f"{source.lengths.quantile(0.99):,}",
            f"{source.lengths.longest:,}",
            Text(_heights(source.lengths.by_doubling(), most), colour_of(s), no_wrap=True),
        ]
        for s, source in enumerate(stats.sources[:MOST_ROWS])
    ]
    rows = bounded(rows, len(stats.sources))
    console.print(table("lengths of documents; a bar for each doubling", columns, rows))
    console.print(_repetition(stats))
    for shares in stats.tags:
        console.print(tag_table(shares))
    for line in _sentences(file, stats):
        say(console, line)
    for warning in _warnings(stats):
        say(console, f"warning: {warning}", "yellow")


def _heights(counts: Sequence[int], width: int) -> str:
    highest = max(counts, default=1) or 1
    # Rounded up, so that any share above 0 shows, even that of one document in millions.
    drawn = (_HEIGHTS[-(-count * 8 // highest)] for count in counts)
    return "".join(drawn).ljust(width)


def _repetition(stats: Stats) -> object:
    columns = [("source", False), ("tokens an epoch", True), ("steps an epoch", True)]
    columns += [(f"epochs in {stats.steps:,} steps", True)]
    columns += [("repeated within", True), ("in other sources", True)]
    found = stats.duplicates
    rows: list[list[Cell]] = [
        [
            Text(source.name, colour_of(s)),
            "about " * source.is_rough + format_count(source.epoch_tokens),
            "never" if source.steps_per_epoch is None else f"{source.steps_per_epoch:,}",
            f"{source.epochs:.2f}",
            _part(int(found.repeated_S[s]), int(found.documents_S[s])),
            _part(int(found.elsewhere_S[s]), int(found.documents_S[s])),
        ]
        for s, source in enumerate(stats.sources[:MOST_ROWS])
    ]
    return table("repetition", columns, bounded(rows, len(stats.sources)))


def _part(count: int, of: int) -> str:
    return f"{count:,} ({count / max(of, 1):.2%})" if count else "0"


def _sentences(file: Path, stats: Stats) -> Iterator[str]:
    if any(not source.is_exact for source in stats.sources):
        yield (
            "documents that are there twice are sought among those looked at: of all documents more are; "
            "--all looks at every one"
        )
    if stats.duplicates.one_in > 1:
        yield f"of the hashes of documents one in {stats.duplicates.one_in} was compared, which bounds memory"
    if stats.rate is None:
        yield f"{file}: tokens per second were not measured"
    else:
        yield (
            f"{file}: {format_count(stats.rate.tokens_per_s)} tokens/s, measured in a run of {stats.rate.steps} steps "
            f"and {stats.rate.seconds:.1f} s, in one process without a trainer, on this machine as it is now"
        )


def _warnings(stats: Stats) -> Iterator[str]:
    found, names = stats.duplicates, [source.name for source in stats.sources]
    repeated, bad = list[str](), list[str]()
    often = repetitions_of(names, (source.epochs for source in stats.sources))
    for s, source in enumerate(stats.sources):
        if found.repeated_S[s] > _MUCH_REPEATED * max(int(found.documents_S[s]), 1):
            repeated.append(
                f"{int(found.repeated_S[s]):,} of {int(found.documents_S[s]):,} documents of {source.name} equal an "
                "earlier one; leave them out, or they are trained on more often than its epochs say"
            )
        if source.bad:
            remedy = (
                "mend them, or they are left out, as its on_error says"
                if source.skips
                else "mend them, or leave them out with on_error: {policy: skip}"
            )
            bad.append(f"{source.bad:,} records of {source.name} cannot be decoded; {remedy}")
    # In a mix of a thousand sources, most may deserve the same warning, which is printed only for the first few.
    longer = [source.longer for source in stats.sources if source.longer]
    for same in (longer, repeated, bad, often, stats.padded):
        yield from same[:_WARNINGS_SHOWN]
        if len(same) > _WARNINGS_SHOWN:
            yield f"and so of {counted(len(same) - _WARNINGS_SHOWN, 'more source')}: --json"
    yield from stats.sorted
    for one, other, count in found.pairs[:_PAIRS_SHOWN]:
        yield f"{names[one]} and {names[other]} have {counted(count, 'document')} in common"


_SORTED = 0.5
"""Share of the spread of tokens between places of a source above which its files look sorted."""
_UNEQUAL = 2.0
"""Ratio of the lengths of records in different units above which the files look sorted."""
_FEW_BLOCKS = 4
"""Blocks in a source's shuffle below which it is mixed well enough."""


def sureness(source: SourceProfile) -> str:
    """Return the uncertainty of a source's tokens, if they are estimated."""
    if source.exact:
        return ""
    error = source.tokens_error
    return " (one place seen)" if error is None else f" ±{2 * error:.0%}"


def sorted_files(mix: MixConfig, found: Mapping[str, Differences]) -> Iterator[str]:
    """Yield the sources whose records differ between places of their files, and whose shuffle does not mix them."""
    said = [
        each for name, of_source in found.items() if (each := _sorted_file(mix, name, of_source))
    ]
    yield from said[:_WARNINGS_SHOWN]
    if len(said) > _WARNINGS_SHOWN:
        yield f"and {len(said) - _WARNINGS_SHOWN:,} more sources look sorted"


def _sorted_file(mix: MixConfig, name: str, found: Differences) -> str:
    source = mix.sources[name]
    shuffle = source.shuffle
    if shuffle.method in ("units", "full"):
        return ""
    is_mixed = shuffle.units_together(found.units) * _FEW_BLOCKS > found.units
    if shuffle.method != "block" and found.along >= _SORTED:
        seen = f"{found.along:.0%} of the spread of its records' lengths goes by where they lie"
    elif is_mixed:
        return ""
    elif found.between >= _SORTED:
        seen = f"{found.between:.0%} of the spread of its records' tokens lies between places of its files"
    elif found.times >= _UNEQUAL:
        seen = (
            f"records at some places of its files are {found.times:.1f} times as long as at others"
        )
    else:
        return ""
    remedy = "shuffle: {method: units} mixes over all files with the same memory, and reads them from places all over"
    if source.type == "jsonl":
        remedy += "; where it refuses compressed shards, raise block_units"
    return (
        f"sources.{name}: {seen}, so its files look sorted, and shuffle method {shuffle.method} keeps records near "
        f"where they lie: steps will differ in how many records they hold, and of what kind; {remedy}"
    )
