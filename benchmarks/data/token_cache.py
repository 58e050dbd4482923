"""Text through a token cache: without one, while it fills, from a full one, and filled before a run.

python -m benchmarks.data.token_cache --help
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import Table, print_table, write_report
from omniload.mix.runtime import TokenCacheConfig
from omniload.mix.sources import ParquetSource, SourceConfig
from omniload.source.record_source import open_source
from omniload.source.sample_data.corpus import SampleCorpus, build_sample_corpus
from omniload.source.source import Source
from omniload.source.spec import SourceSpec
from omniload.source.token_cache.opening import open_token_cache

__all__ = ["main"]

_READ = 256
"""Records of a read."""
_GROUP = 512
"""Records of a row group of the pre-tokenised file."""
_CORES = 2
_MIX = """\
version: 2
seed: 1
tokenizer: {type: bpe, path: tokenizer.json, end_of_document: "<eos>"}
sources: {web: {type: parquet, path: "modules/*.parquet", text: text}}
mix: {stages: [{weights: {web: 1}}]}
pack: {length: 4096}
batch: {tokens: 8192, micro_tokens: 8192}
loader: {token_cache: {path: PLACE}}
"""
_BY_TOKENIZERS = """\
import sys, pathlib, tokenizers, pyarrow as pa, pyarrow.parquet as pq
folder, to = map(pathlib.Path, sys.argv[1:])
library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
to.mkdir()
for path in sorted(folder.glob("modules/*.parquet")):
    texts = pq.read_table(path, columns=["text"])["text"].to_pylist()
    ids = [
        encoding.ids
        for at in range(0, len(texts), 1000)
        for encoding in library.encode_batch_fast(texts[at : at + 1000], add_special_tokens=False)
    ]
    pq.write_table(pa.table({"tokens": pa.array(ids, pa.large_list(pa.int32()))}), to / path.name)
"""
_BY_DATASETS = """\
import sys, pathlib, datasets, transformers
if __name__ == "__main__":
    folder, to = map(pathlib.Path, sys.argv[1:])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    held = datasets.load_dataset(
        "parquet", data_files=str(folder / "modules/*.parquet"), split="train", cache_dir=str(to)
    )
    held.map(
        lambda rows: {"input_ids": tokenizer(rows["text"], add_special_tokens=False)["input_ids"]},
        batched=True, num_proc=2, remove_columns=held.column_names,
    ).save_to_disk(str(to / "saved"))
"""
READING = (
    "One thread reads an epoch of each, shuffled within blocks, alternately. Figures are medians of "
    "processor seconds, with files in the page cache, on a machine with other work on it. *filling* "
    "tokenises and writes the cache. *from the cache* finds every unit in it, with a checksum and "
    "with a key. *parquet* has the same tokens as lists of int32, zstd, in row groups of 512 "
    "documents. Before a run: each way is a command that starts, reads the text of the same "
    "documents, and leaves tokens on disk, of 16 bits in the cache and of 32 bits elsewhere. datasets "
    "also keeps its own copy of the text."
)


def _opened(corpus: SampleCorpus, config: SourceConfig, cache: TokenCacheConfig | None) -> Source:
    tokens = open_token_cache(cache, corpus.tokenizer, corpus.folder)
    return open_source(
        SourceSpec(
            "web",
            config,
            seed=1,
            tokenizer=corpus.tokenizer,
            base_dir=corpus.folder,
            cache_dir=corpus.folder / "index",
        ),
        token_cache=tokens,
    )


def _spent(source: Source) -> tuple[float, int]:
    """Return the processor seconds for reading an epoch, and its tokens."""
    tokens, began_s = 0, time.process_time()
    for start in range(0, source.positions_per_epoch, _READ):
        block = source.read(start, min(start + _READ, source.positions_per_epoch))
        tokens += len(block.tokens.values_V)
    return time.process_time() - began_s, tokens


def _write_tokens(source: Source, path: Path) -> None:
    block = source.read(0, source.positions_per_epoch)
    lists = pa.LargeListArray.from_arrays(
        pa.array(block.tokens.offsets), pa.array(np.ascontiguousarray(block.tokens.values_V))
    )
    pq.write_table(pa.table({"tokens": lists}), path, row_group_size=_GROUP, compression="zstd")


def _ahead_ways(
    folder: Path, with_datasets: Path | None
) -> dict[str, tuple[list[str], Mapping[str, str]]]:
    """Return, by name, the commands that make the tokens of all files before a run, and their variables."""
    python = [sys.executable, "-c"]
    threads = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(_CORES)}
    ways: dict[str, tuple[list[str], Mapping[str, str]]] = {
        f"omniload mix tokenise, {_CORES} workers": (
            [sys.executable, "-m", "omniload", "mix", "tokenise", "MIX", "--workers", str(_CORES)],
            {},
        ),
        f"tokenizers, {_CORES} threads, to Parquet": (
            [*python, _BY_TOKENIZERS, str(folder), "PLACE"],
            threads,
        ),
    }
    if with_datasets is not None:
        ways[f"datasets.map, {_CORES} processes, saved"] = (
            [str(with_datasets), "-c", _BY_DATASETS, str(folder), "PLACE"],
            {"TOKENIZERS_PARALLELISM": "false"},
        )
    return ways


def _ahead(folder: Path, rounds: int, with_datasets: Path | None) -> dict[str, list[float]]:
    """Return the wall seconds in which each way makes all tokens; whole commands run alternately."""
    found: dict[str, list[float]] = {}
    for turn in range(rounds):
        for number, (way, (command, variables)) in enumerate(
            _ahead_ways(folder, with_datasets).items()
        ):
            place = folder / f"ahead-{turn}-{number}"
            mix = folder / "ahead.yaml"
            mix.write_text(_MIX.replace("PLACE", place.name))
            words = {"MIX": str(mix), "PLACE": str(place)}
            began_s = time.perf_counter()
            subprocess.run(
                [words.get(word, word) for word in command],
                env={**os.environ, **variables},
                check=True,
                capture_output=True,
            )
            found.setdefault(way, []).append(time.perf_counter() - began_s)
    return found


@click.command
@click.option(
    "--mib",
    type=click.IntRange(1, 1024),
    default=24,
    show_default=True,
    help="Size of the corpus, whose modules are read.",
)
@click.option("--rounds", type=click.IntRange(1, 50), default=5, show_default=True)
@click.option(
    "--datasets-python",
    type=click.Path(path_type=Path),
    help="Python of an environment with datasets and transformers, for the usual way.",
)
@click.option("--report", is_flag=True, help="Write a report.")
def main(mib: int, rounds: int, datasets_python: Path | None, report: bool) -> None:
    """Measure the costs and savings of a token cache."""
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        corpus = build_sample_corpus(folder / "corpus", size=mib << 20)
        text = ParquetSource(type="parquet", path="modules/*.parquet", text="text")
        (folder / "key").write_text("k" * 64)
        (folder / "key").chmod(0o600)
        plain = TokenCacheConfig(path=str(folder / "plain"))
        keyed = TokenCacheConfig(path=str(folder / "keyed"), key_file=str(folder / "key"))
        _write_tokens(_opened(corpus, text, None), folder / "tokens.parquet")
        _spent(_opened(corpus, text, plain))
        _spent(_opened(corpus, text, keyed))
        made = ParquetSource(type="parquet", path=str(folder / "tokens.parquet"), tokens="tokens")
        ways: dict[str, Callable[[int], Source]] = {
            "text, without a cache": lambda _: _opened(corpus, text, None),
            "text, filling": lambda turn: _opened(
                corpus, text, TokenCacheConfig(path=str(folder / f"new-{turn}"))
            ),
            "from the cache": lambda _: _opened(corpus, text, plain),
            "from the cache, with a key": lambda _: _opened(corpus, text, keyed),
            "parquet of tokens": lambda _: _opened(corpus, made, None),
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        tokens = 0
        for turn in range(rounds):
            for way, opened in ways.items():
                spent_s, tokens = _spent(opened(turn))
                found[way].append(spent_s / tokens * 1e6)
        base = statistics.median(found["parquet of tokens"])
        rows = [
            (way, f"{statistics.median(times):.4f}", f"{statistics.median(times) / base:.2f}")
            for way, times in found.items()
        ]
        size = sum(path.stat().st_size for path in (folder / "plain").rglob("*") if path.is_file())
        ahead = _ahead(corpus.folder, rounds, datasets_python)
    table = Table(
        caption=f"{tokens / 1e6:.1f} M tokens of source code; the cache holds {size / tokens:.2f} bytes a token",
        columns=("read", "CPU s per M tokens", "beside parquet"),
        rows=tuple(rows),
    )
    first = statistics.median(next(iter(ahead.values())))
    before = Table(
        caption=f"The same tokens made before a run, by the clock on {_CORES} cores, each a command of its own",
        columns=("way", "s", "least", "most", "times as long as omniload"),
        rows=tuple(
            (
                *(way, f"{statistics.median(times):.1f}", f"{min(times):.1f}", f"{max(times):.1f}"),
                f"{statistics.median(times) / first:.2f}",
            )
            for way, times in ahead.items()
        ),
    )
    print_table(table)
    print_table(before)
    if report:
        command = f"python -m benchmarks.data.token_cache --mib {mib} --rounds {rounds}"
        command += " --datasets-python PYTHON" if datasets_python else ""
        path = write_report(
            __file__, "token_cache", "Text through a token cache", command, [table, before], READING
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
