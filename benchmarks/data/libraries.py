"""Reading, tokenising and chat data compared with the usual library for each, on the same files and cores.

.venv-frameworks/bin/python -m benchmarks.data.libraries --help
"""

import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import click
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from benchmarks.data.library_ways import (
    CHAT_FILE,
    MODEL,
    Way,
    chat_ways,
    reading_ways,
    tokenising_ways,
)
from benchmarks.report import Table, print_table, write_report
from omniload.base.linux.freed_memory import keep_freed
from omniload.base.linux.huge_pages import spare_host
from omniload.source.sample_data.corpus import (
    Text,
    functions_and_docstrings,
    texts_of,
    this_installation,
    train_tokenizer,
)
from tests.support.chats import CHATML, MARKED, write_model

__all__ = [
    "even_texts",
    "main",
    "rates_of",
    "reading_tables",
    "table_of",
    "write_chats",
    "write_texts",
]

_SHARDS, _GROUP_ROWS = 12, 1_000
_EVEN_LETTERS = 3_000
"""Letters of a typical document of web text."""
_CORES = 2
_WAIT_S = 300.0
_SPECIAL = ["<|im_start|>", "<|im_end|>", "<bos>", "<eos>"]


def documents_of(size: int) -> list[str]:
    """Return about ``size`` bytes of this Python's source code: modules and, in equal bytes, functions."""
    paths = this_installation().modules()
    functions, _ = functions_and_docstrings(
        paths[::-1], function_bytes=size // 2, docstring_bytes=1
    )
    texts = [text.text for text in (*texts_of(paths, size // 2), *functions)]
    random.Random(0).shuffle(texts)
    return texts


def even_texts(texts: Sequence[str], letters: int = _EVEN_LETTERS) -> list[str]:
    """Return the same letters as documents of ``letters`` each; the last one may have fewer."""
    whole = "".join(texts)
    return [whole[at : at + letters] for at in range(0, len(whole), letters)]


def write_texts(folder: Path, texts: Sequence[str]) -> None:
    """Write the same documents as parquet and as compressed lines."""
    for shard in range(_SHARDS):
        mine = texts[shard::_SHARDS]
        table = pa.table({"id": range(len(mine)), "text": mine})
        pq.write_table(
            table, folder / f"{shard}.parquet", row_group_size=_GROUP_ROWS, compression="zstd"
        )
        lines = b"".join(
            orjson.dumps({"id": i, "text": text}) + b"\n" for i, text in enumerate(mine)
        )
        (folder / f"{shard}.jsonl.zst").write_bytes(zstandard.compress(lines))


def write_tokenizer(folder: Path, template: str, texts: Sequence[str]) -> None:
    """Write a model with a byte-level BPE of 32,000 tokens, and a chat template."""
    write_model(folder / MODEL, template)
    library = train_tokenizer({"texts": [Text(name="", text=text) for text in texts]}, 32_000)
    library.add_special_tokens(_SPECIAL)
    library.save(str(folder / MODEL / "tokenizer.json"))


def write_chats(folder: Path, texts: Sequence[str], count: int) -> None:
    """Write conversations of one to four turns: a line or two of text, and an answer of some hundred letters."""
    rng = random.Random(1)
    words = " ".join(texts[:500])

    def said(least: int, most: int) -> str:
        at = rng.randrange(len(words) - most)
        return words[at : at + rng.randrange(least, most)]

    lines = []
    for i in range(count):
        messages = [{"role": "system", "content": "You answer briefly."}] if i % 2 else []
        for _ in range(rng.randrange(1, 5)):
            messages.append({"role": "user", "content": said(20, 300)})
            messages.append({"role": "assistant", "content": said(100, 1_000)})
        lines.append(orjson.dumps({"messages": messages}) + b"\n")
    (folder / CHAT_FILE).write_bytes(b"".join(lines))


def rates_of(
    ways: Mapping[str, Way], repeats: int, *, unmeasured: int = 0
) -> dict[str, list[float]]:
    """Return the rate of each way per processor second, ``repeats`` times alternately after a first turn.

    Each way runs ``unmeasured`` times right before it is measured. Its memory is then already allocated, as within a
    long run, and it does not use the memory that the previous way freed.
    """
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            for _ in range(unmeasured if turn else 0):
                way()
            count, spent_s = way()
            if turn:
                rates[name].append(count / spent_s)
    return rates


@dataclass(frozen=True, slots=True)
class Cores:
    """The use of two cores by a way of making chat data."""

    way: str
    processes: int
    threads: bool
    """Whether the tokenizers library has a thread for each core."""


CHAT = {
    "omniload, 2 readers": Cores("omniload", 2, threads=False),
    "transformers, a conversation at a time": Cores("apply_chat_template, each", 1, threads=False),
    "transformers, batches of 256, the library's threads": Cores(
        "apply_chat_template, batches", 1, threads=True
    ),
    "transformers, batches of 256, 2 processes": Cores(
        "apply_chat_template, batches", 2, threads=False
    ),
}


@cache
def _ways(folder: Path, part: int, parts: int) -> dict[str, Way]:
    return chat_ways(folder, part, parts)


def _part(folder: Path, way: str, part: int, parts: int) -> tuple[int, float]:
    return _ways(folder, part, parts)[way]()


def _threads(value: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = value


def chat_rates(folder: Path, repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return tokens per second, and per processor second, for each way to use two cores."""
    walls: dict[str, list[float]] = {name: [] for name in CHAT}
    cpus: dict[str, list[float]] = {name: [] for name in CHAT}
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as held:
        pools = {
            name: [
                held.enter_context(
                    ProcessPoolExecutor(
                        1,
                        mp_context=spawn,
                        initializer=_threads,
                        initargs=("true" if cores.threads else "false",),
                    )
                )
                for _ in range(cores.processes)
            ]
            for name, cores in CHAT.items()
        }
        for turn in range(repeats + 1):
            for name, cores in CHAT.items():
                began_s = time.perf_counter()
                asked = [
                    pool.submit(_part, folder, cores.way, part, cores.processes)
                    for part, pool in enumerate(pools[name])
                ]
                parts = [each.result(_WAIT_S) for each in asked]
                passed_s = time.perf_counter() - began_s
                if turn:  # the first turn opens the model and the source
                    count = sum(tokens for tokens, _ in parts)
                    walls[name].append(count / passed_s)
                    cpus[name].append(count / sum(spent_s for _, spent_s in parts))
    return walls, cpus


def table_of(caption: str, unit: str, rates: Mapping[str, list[float]], scale: float) -> Table:
    """Return medians, least and most, and the ratio of ours to each other way."""
    ours = median(next(iter(rates.values())))
    return Table(
        columns=("way", unit, "least", "most", "omniload over it"),
        rows=tuple(
            (
                name,
                f"{median(found) / scale:.2f}",
                f"{min(found) / scale:.2f}",
                f"{max(found) / scale:.2f}",
                f"{ours / median(found):.2f}",
            )
            for name, found in rates.items()
        ),
        caption=caption,
    )


def reading_tables(folder: Path, texts: Sequence[str], repeats: int) -> list[Table]:
    """Return the rates of reading documents as they are, and of the same text cut to documents of one size."""
    tables = []
    for size, documents in (
        ("modules and functions", texts),
        (f"{_EVEN_LETTERS:,} letters each", even_texts(texts)),
    ):
        with tempfile.TemporaryDirectory(dir=folder) as made:
            write_texts(Path(made), documents)
            for form, ways in reading_ways(Path(made)).items():
                caption = f"Reading {form}, {size}, one core"
                tables.append(table_of(caption, "MB a CPU second", rates_of(ways, repeats), 1e6))
    return tables


def tokenising_tables(folder: Path, texts: Sequence[str], repeats: int) -> list[Table]:
    """Return the rate of each way in tokens and in MB of text, which can be compared with the rates of reading."""
    ways = tokenising_ways(folder, texts)
    rates = rates_of(ways, repeats)
    tokens, _ = next(iter(ways.values()))()
    token_bytes = sum(len(text.encode()) for text in texts) / tokens
    read = {name: [token_bytes * rate for rate in found] for name, found in rates.items()}
    caption = "Tokenising, one core"
    return [
        table_of(caption, "million tokens a CPU second", rates, 1e6),
        table_of(caption, "MB of text a CPU second", read, 1e6),
    ]


READING = """\
Reading: {mib} MiB of source code in {shards} shards, zstd, row groups of {rows:,} documents, on one core. Documents
are modules and functions (of which most are short), or have {letters:,} letters each, as long as web text; files are
in the page cache. Ours gives a megabyte of documents at a time, with their positions, shuffled within blocks of four
row groups, or in the order of the file; the time of the tokenizer is subtracted. pyarrow gives its columns in the
order of the file. In one row of the table it gives row groups that are freed at once; in one they are also shuffled
within row groups; in one its UTF-8 is checked, and documents are shuffled over four row groups, as ours. In all rows
the process keeps freed memory for a while, as source loaders do. Tokenising: the same documents, 256 at a time, and a
byte-level BPE of 32,000 tokens. Ours gives arrays; the library gives objects of its own, which are converted to
lists. Chat: {chats:,} conversations of one to four turns, converted to tokens and the mask of the assistant's
answers, under a template with generation blocks and under one without, for which transformers gives a mask of zeros.
Each way has two cores, in processes that have opened everything before."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--repeats", default=5, show_default=True, type=click.IntRange(1), help="Runs of each way."
)
@click.option("--mib", default=24, show_default=True, type=click.IntRange(1, 256))
@click.option("--chats", default=2_000, show_default=True, type=click.IntRange(10))
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(repeats: int, mib: int, chats: int, report: bool) -> None:
    """Compare sources with pyarrow, tokenizers and transformers; needs all three.

    \b
    Example:
      .venv-frameworks/bin/python -m benchmarks.data.libraries --repeats 1 --no-report
    """  # noqa: D301 -- click's own marker
    refuse_without_frameworks()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    spare_host()
    keep_freed()
    tables = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        texts = documents_of(mib << 20)
        tables += reading_tables(folder, texts, repeats)
        write_tokenizer(folder, MARKED, texts)
        tables += tokenising_tables(folder, texts[:: max(1, mib // 4)], repeats)
        write_chats(folder, texts, chats)
        for name, template in (
            ("with generation blocks", MARKED),
            ("without generation blocks", CHATML),
        ):
            write_template(folder, template)
            walls, cpus = chat_rates(folder, repeats)
            caption = f"Chat, a template {name}"
            tables += [
                table_of(f"{caption}, {_CORES} cores", "million tokens/s", walls, 1e6),
                table_of(f"{caption}, per core", "million tokens a CPU second", cpus, 1e6),
            ]
    for table in tables:
        print_table(table)
    if report:
        path = write_report(
            __file__,
            "libraries",
            "Reading, tokenising and chat data beside libraries",
            ".venv-frameworks/bin/python -m benchmarks.data.libraries "
            f"--repeats {repeats} --mib {mib} --chats {chats}",
            tables,
            READING.format(
                mib=mib, shards=_SHARDS, rows=_GROUP_ROWS, letters=_EVEN_LETTERS, chats=chats
            ).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


def refuse_without_frameworks() -> None:
    """Refuse an environment without transformers at once, because chat data is measured last, minutes later.

    Raises:
        click.ClickException: With the command whose environment has it.
    """
    if find_spec("transformers") is None:
        raise click.ClickException(
            "transformers is not installed here; run make setup once, then "
            ".venv-frameworks/bin/python -m benchmarks.data.libraries"
        )


def write_template(folder: Path, template: str) -> None:
    """Give the model another chat template."""
    path = folder / MODEL / "tokenizer_config.json"
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"chat_template": template}))


if __name__ == "__main__":
    main()
