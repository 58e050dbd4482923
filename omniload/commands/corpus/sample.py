"""``omniload mix sample``: a small corpus to try things on, offline."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
import yaml
from rich.console import Console
from rich.text import Text

from omniload.base.errors import ConfigError
from omniload.base.units import counted, format_bytes, format_count
from omniload.base.writing import write_whole
from omniload.commands.display import (
    Cell,
    FittedTable,
    colour_of,
    emit_json,
    output,
    progress,
    say,
    stacked_bar,
    table,
)
from omniload.commands.options import BYTES, json_option
from omniload.mix.schema.json_schema import mix_schema
from omniload.source.sample_data.corpus import build_sample_corpus
from omniload.source.sample_data.kept import SampleCorpus, SampleSource

__all__ = ["MIX_NAME", "sample", "sample_mix"]

MIX_NAME = "mix.yaml"
"""The mix file that is written next to the corpus."""

_BAR_WIDTH = 40
_BYTES = 12 << 20
"""Default size of a corpus's text, in bytes."""
_LEAST_BYTES = 16 << 10
"""Least size of a corpus's text. With less, some sources, or all, would get no document."""
_WEIGHTS = (
    {
        "modules": 40,
        "functions": 25,
        "docstrings": 15,
        "long_modules": 8,
        "notices": 8,
        "reference": 4,
    },
    {
        "modules": 25,
        "functions": 20,
        "docstrings": 15,
        "long_modules": 24,
        "notices": 10,
        "reference": 6,
    },
)
SCHEMA_NAME = "mix.schema.json"
"""The schema with which an editor checks the mix file."""
_HEAD = (
    f"# yaml-language-server: $schema={SCHEMA_NAME}\n"
    "# The mix of this corpus; examples/quickstart.yaml explains every key.\n"
)
_PATCHES = [{"type": "images", "patch": 14, "merge": 2, "max_patches": 1024, "placeholder": 7}]
_DRAWN: dict[str, dict[str, object]] = {
    "captions": {
        "type": "webdataset",
        "path": "captions-*.tar",
        "text": "json",
        "images": ["png"],
        "transforms": _PATCHES,
    },
    "pages": {
        "type": "parquet",
        "path": "pages-*.parquet",
        "text": "text",
        "images": "images",
        "transforms": _PATCHES,
    },
}
"""The sources of drawn images, as declared in a mix file in their folder."""


@click.command
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--size", type=BYTES, show_default="12MiB", help="Size of the text, about, at most.")
@click.option(
    "--images", is_flag=True, help="Also draw images with captions, and texts with images."
)
@json_option
def sample(folder: Path, size: int | None, images: bool, as_json: bool) -> None:
    """Build a tokenizer and a corpus of very different sources from this Python installation.

    If the corpus exists already, it is shown unchanged. Next to the sources is a mix file to start from; if you have
    changed that file, it is kept.

    \b
    Example:
      omniload mix sample demo/corpus --size 12MiB
      omniload mix check demo/corpus/mix.yaml
      omniload mix sample drawn --images
    """  # noqa: D301 -- click's own marker
    if images:
        if size is not None:
            raise ConfigError("--size is of text, and --images draws; leave one of them out")
        _draw(folder, as_json=as_json)
        return
    size = _BYTES if size is None else size
    if size < _LEAST_BYTES:
        raise ConfigError(
            f"--size of {size:,} bytes leaves sources without a document; give "
            f"{format_bytes(_LEAST_BYTES)} or more"
        )
    with progress("building the corpus", 1.0) as advance:
        done = 0.0

        # The corpus reports its total progress, but a bar takes increments.
        def tell(_what: str, part: float) -> None:
            nonlocal done
            advance(part - done)
            done = part

        corpus = build_sample_corpus(folder, size=size, progress=tell)
    mix_path = _write_mix(corpus.folder, sample_mix(corpus))
    if as_json:
        emit_json(
            {
                "folder": str(corpus.folder),
                "built": corpus.built,
                "vocab_size": corpus.vocab_size,
                "mix": str(mix_path),
                "sources": [asdict(source) for source in corpus.sources],
            }
        )
        return
    _print(output(), corpus, mix_path)


def sample_mix(corpus: SampleCorpus) -> dict[str, object]:
    """Return a mix of the corpus, as declared in a mix file in its folder; it is the mix of the quickstart."""
    names = [source.name for source in corpus.sources]
    first, later = ({name: weights[name] for name in names} for weights in _WEIGHTS)
    return {
        "version": 1,
        "seed": 20250101,
        "sources": {source.name: source.config for source in corpus.sources},
        "mix": {
            "level": "token",
            "stages": [
                {"from_step": 0, "weights": first},
                {"from_step": 20, "ramp_steps": 20, "weights": later},
            ],
        },
        "tokenizer": corpus.tokenizer.model_dump(),
        "pack": {"length": 512, "lookahead_rows": 2},
        "batch": {"tokens": 8192, "micro_tokens": 4096},
        "balance": {"method": "greedy_swap"},
    }


def _draw(folder: Path, *, as_json: bool) -> None:
    """Draw images into an empty folder; the mix file is written last, and shows that they are complete."""
    # The images need an extra, which a text corpus does without.
    from omniload.source.sample_data.images import build_sample_images  # noqa: PLC0415

    built = not (folder / MIX_NAME).exists()
    if built:
        ours = ("captions-", "pages-", SCHEMA_NAME)
        there = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        if foreign := [name for name in there if not name.startswith(ours)]:
            raise ConfigError(f"{folder} holds {foreign[0]!r}; choose another folder for images")
        build_sample_images(folder)
        _write_mix(folder, _drawn_mix())
    path = folder / MIX_NAME
    if as_json:
        emit_json({"folder": str(folder), "built": built, "mix": str(path), "sources": [*_DRAWN]})
        return
    how = "drawn" if built else "there already"
    say(output(), f"images {how}: {folder}, sources {' and '.join(_DRAWN)}; mix file {path}")


def _drawn_mix() -> dict[str, object]:
    """Return a mix of drawn images, as declared in a mix file in their folder."""
    return {
        "version": 1,
        "seed": 1,
        "tokenizer": {"type": "bytes"},
        "sources": _DRAWN,
        "mix": {"stages": [{"from_step": 0, "weights": dict.fromkeys(_DRAWN, 1)}]},
        "pack": {"length": 512},
        "batch": {"tokens": 4096, "micro_tokens": 1024},
    }


def _write_mix(folder: Path, mix: dict[str, object]) -> Path:
    path = folder / MIX_NAME
    if not path.exists():
        # The schema comes first, because nothing is written again if a mix file exists.
        schema = json.dumps(mix_schema(), indent=2) + "\n"
        write_whole(path.with_name(SCHEMA_NAME), schema.encode())
        write_whole(path, (_HEAD + yaml.safe_dump(mix, sort_keys=False)).encode())
    return path


def _print(console: Console, corpus: SampleCorpus, mix_path: Path) -> None:
    console.print(_sources_table(corpus.sources))
    console.print(_histogram(corpus.sources))
    how = "built" if corpus.built else "there already"
    vocabulary = f"tokenizer of {corpus.vocab_size:,} tokens"
    say(console, f"corpus {how}: {corpus.folder}, {vocabulary}; mix file {mix_path}")


def _sources_table(sources: Sequence[SampleSource]) -> FittedTable:
    columns = [("source", False), ("files", False)]
    columns += [(heading, True) for heading in ("documents", "text", "stored", "tokens")]
    columns += [("mean length", True), ("longest", True)]
    rows: list[list[Cell]] = [
        [
            Text(source.name, colour_of(s)),
            source.config["path"],
            f"{source.records:,}",
            format_bytes(source.text_bytes),
            format_bytes(source.stored_bytes),
            format_count(source.tokens),
            f"{source.tokens / max(source.records, 1):,.0f}",
            f"< {1 << len(source.lengths_log2):,}",
        ]
        for s, source in enumerate(sources)
    ]
    total = [sum(getattr(s, key) for s in sources) for key in ("records", "text_bytes", "tokens")]
    rows.append(
        ["all", "", f"{total[0]:,}", format_bytes(total[1]), "", format_count(total[2]), "", ""]
    )
    return table(counted(len(sources), "source"), columns, rows)


def _histogram(sources: Sequence[SampleSource]) -> FittedTable:
    """Lay out the lengths of documents, and their shares of the tokens: a few documents hold most tokens."""
    most = max(len(source.lengths_log2) for source in sources)
    counts = [
        [source.lengths_log2[i] if i < len(source.lengths_log2) else 0 for source in sources]
        for i in range(most)
    ]
    largest = max(map(sum, counts))
    rows: list[list[Cell]] = [
        [
            f"{1 << i:,} to {(2 << i) - 1:,}",
            f"{sum(row):,}",
            stacked_bar([count / largest for count in row], _BAR_WIDTH),
        ]
        for i, row in enumerate(counts)
        if sum(row)
    ]
    columns = [("tokens in a document", True), ("documents", True), ("by source", False)]
    return table("lengths, in powers of two", columns, rows)
