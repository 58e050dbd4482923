"""``omniload mix import``: the mix of another tool as a mix file, or the reason why it cannot become one."""

import os
from pathlib import Path
from typing import Literal

import click

from omniload.base.config import read_text
from omniload.base.errors import ConfigError
from omniload.base.state import JsonObject
from omniload.base.writing import write_whole
from omniload.commands.display import emit_json, output, say
from omniload.commands.options import COUNT, json_option
from omniload.importing.documents import parsed
from omniload.importing.fields import Report
from omniload.importing.files import tokenizer_of_texts
from omniload.importing.imported import Asked, Imported, mix_text
from omniload.importing.tools import TOOLS, read_as
from omniload.mix.sources import SOURCE_TYPES
from omniload.source.distinct.drawn_before import write_drawn

__all__ = ["import_mix"]


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "tool",
    type=click.Choice(sorted(TOOLS)),
    required=True,
    help="Tool that the file belongs to; llm-foundry for the streams of Mosaic. For megatron, the file "
    "holds the arguments of --data-path.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Mix file to write; by default, the mix is printed.",
)
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="tokenizer.json, or the folder of a model."
)
@click.option("--length", type=COUNT, metavar="TOKENS", help="Tokens of a row, such as 4Ki.")
@click.option(
    "--batch",
    type=COUNT,
    metavar="TOKENS",
    help="Tokens of a step over all ranks, such as 4Mi.",
)
@click.option("--micro", type=COUNT, metavar="TOKENS", help="Tokens of a microbatch of a rank.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed, in place of the one in the file.")
@click.option("--text", metavar="NAME", help="Column, key or extension of the text.")
@click.option("--tokens", metavar="NAME", help="Column of token ids.")
@click.option(
    "--type",
    "source_type",
    type=click.Choice(SOURCE_TYPES),
    help="Type of sources whose paths do not show it.",
)
@click.option("--dtype", metavar="TYPE", help="Type of the ids in flat files, such as uint16.")
@click.option(
    "--end-of-document",
    type=click.IntRange(min=0),
    metavar="ID",
    help="Token that ends a document of flat files.",
)
@click.option(
    "--documents",
    type=click.Choice(["joined", "apart"]),
    help="For megatron, nanotron and olmo-core: whether attention crosses the documents in a row.",
)
@click.option(
    "--template",
    type=click.Path(path_type=Path),
    help="File of the chat template (Jinja), if the tool keeps a template of its own.",
)
@click.option(
    "--placeholder",
    metavar="TOKEN",
    help="Token in the place of the embeddings of an image: its id, or its name in the vocabulary.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    help="A state of the tool's loader; the first epoch leaves out the records that it had drawn. Needs --output.",
)
@click.option(
    "--leave-out",
    multiple=True,
    metavar="KEY",
    help="Ignore a key that would cause the file to be refused.",
)
@json_option
def import_mix(  # noqa: PLR0913, PLR0917 -- one for each option
    file: Path,
    tool: str,
    output: Path | None,
    tokenizer: Path | None,
    length: int | None,
    batch: int | None,
    micro: int | None,
    seed: int | None,
    text: str | None,
    tokens: str | None,
    source_type: str | None,
    dtype: str | None,
    end_of_document: int | None,
    documents: Literal["joined", "apart"] | None,
    template: Path | None,
    placeholder: str | None,
    state: Path | None,
    leave_out: tuple[str, ...],
    as_json: bool,
) -> None:
    """Turn FILE of another tool into a mix file.

    Each key is carried over, or noted because it has no equivalent and changes no sample, or the file is refused.
    Options supply settings that a tool keeps in code or on its command line. `omniload mix check` then reads the data.

    A state is JSON, from llm-foundry (a state of Mosaic Streaming) or torchdata. The records that its unfinished epoch
    had drawn are written next to the mix file, and the first epoch leaves them out; none is lost.

    \b
    Example:
      omniload mix import blend.yaml --from energon --length 4Ki --batch 512Ki --tokenizer model/ -o mix.yaml
      omniload mix check mix.yaml
    """  # noqa: D301 -- click's own marker
    report, beside = Report(left_out=frozenset(leave_out)), _folder_of(output)
    asked = Asked(
        file=file,
        report=report,
        text=text,
        tokens=tokens,
        dtype=dtype,
        end_of_document=end_of_document,
        documents=documents,
        source_type=source_type,
        template=None if template is None else _seen_from(beside, template),
        placeholder=placeholder and _token(placeholder),
        state=state,
    )
    found = _read(tool, asked, output)
    written = mix_text(
        found,
        report.notes,
        beside=beside,
        heading=f"From {file.name} of {tool}.",
        sizes={"row_tokens": length, "step_tokens": batch, "micro_tokens": micro, "seed": seed},
        tokenizer=_tokenizer(tokenizer or found.tokenizer, beside, found, asked),
    )
    if output is not None:
        _write(found, written, output)
    _show(file, output, written, report, as_json=as_json)


def _folder_of(output: Path | None) -> Path:
    """Return the folder of the mix file, where its relative paths start."""
    # Only the folder is resolved: if the file is a link, even a broken one, the mix file replaces the link.
    return Path.cwd() if output is None else Path(os.path.realpath(output.parent))


def _read(tool: str, asked: Asked, output: Path | None) -> Imported:
    """Read the file; each source names a file next to ``output`` with the records that were drawn from it."""
    if asked.state is not None and output is None:
        raise ConfigError(
            "--state needs --output: the records that were drawn lie beside the mix file"
        )
    found = read_as(tool, parsed(read_text(asked.file), str(asked.file)), asked)
    asked.report.raise_faults(str(asked.file))
    if output is not None:
        for name in found.drawn:
            found.sources[name]["drawn_before"] = f"{output.stem}.drawn/{name}.arrow"
    return found


def _write(found: Imported, written: str, output: Path) -> None:
    """Write the mix file, after the files that it names."""
    # An imported mix file is edited by hand later, so an existing one is never overwritten.
    if output.exists():
        raise ConfigError(f"{output}: is there already; give another --output, or remove it")
    for name, shards in found.drawn.items():
        path = output.parent / str(found.sources[name]["drawn_before"])
        path.parent.mkdir(exist_ok=True)
        write_drawn(path, shards.items())
    write_whole(output, written.encode())


def _tokenizer(path: Path | None, beside: Path, found: Imported, asked: Asked) -> JsonObject | None:
    return (
        None if path is None else tokenizer_of_texts(_seen_from(beside, path), beside, found, asked)
    )


def _token(given: str) -> int | str:
    """Return a token of the command line: its id, or its name."""
    return int(given) if given.isdecimal() else given


def _seen_from(beside: Path, path: Path) -> str:
    """Return a path of the command line in the form for a mix file in ``beside``."""
    # Not Path.resolve, which raises no OSError for links in a circle up to Python 3.12; ``check`` reports the fault.
    return str(path if Path.cwd() == beside else os.path.realpath(path))


def _show(
    file: Path, written_to: Path | None, written: str, report: Report, *, as_json: bool
) -> None:
    if as_json:
        emit_json(
            {
                "file": str(file),
                "output": None if written_to is None else str(written_to),
                "notes": list(report.notes),
                "mix": written,
            }
        )
        return
    if written_to is None:
        # Printed unchanged, so that it can be redirected into a file.
        click.echo(written, nl=False)
        return
    for note in report.notes:
        say(output(), note)
    say(output(), f"{written_to}: next, omniload mix check {written_to}")
