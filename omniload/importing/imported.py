"""The common form of every tool's file, and the mix file that is written from it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import yaml
from numpy.typing import NDArray

from omniload.base.config import checked
from omniload.base.errors import ConfigError
from omniload.base.secrets import without_secrets
from omniload.base.state import Json, JsonObject
from omniload.importing.fields import Report
from omniload.mix.config import MixConfig

__all__ = ["Around", "Asked", "Imported", "holds_text", "leave_undrawn_out", "mix_text", "new_name"]

_NAME_LENGTH = 100
_PARTS_A_STEP = 8
"""Number of microbatches of a step if nothing gives their tokens."""
_WIDTH = 110


Around = Literal["special", "special and eos", "eos"]
"""Tokens around a text: the tokenizer's own special tokens, and ``eos_token`` after the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Options of the user in addition to the file, for what other tools keep in code or on their command line."""

    file: Path
    """The file that is imported; relative paths in it start where its tool says."""
    report: Report
    text: str | None = None
    """Column, key or extension of the text."""
    tokens: str | None = None
    """Column of token ids."""
    dtype: str | None = None
    """Type of the ids of flat files."""
    end_of_document: int | None = None
    """Token that ends every document of flat files."""
    source_type: str | None = None
    """Type of the sources, if their paths do not show it."""
    documents: Literal["joined", "apart"] | None = None
    """Whether attention crosses the documents in a row that is cut from joined documents."""
    template: str | None = None
    """File of the chat template, if the tool has its own template."""
    placeholder: int | str | None = None
    """Token that stands for the embeddings of an image."""
    state: Path | None = None
    """A state of the tool's loader."""


@dataclass(slots=True, kw_only=True)
class Imported:
    """A mix of another tool in the terms of a mix file."""

    base: Path
    """Folder in which relative paths start."""
    sources: dict[str, JsonObject] = field(default_factory=dict)
    stages: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """First step of each stage, or tokens before it, and its weights."""
    stages_by: Literal["step", "tokens"] = "step"
    """Unit of the starts of stages."""
    level: Literal["token", "sample"] = "token"
    stop: Literal["never", "first_exhausted", "all_exhausted", "each_once"] = "never"
    epochs: float | None = None
    """Number of passes over each source before the run ends, instead of weights."""
    total_tokens: int | None = None
    """Tokens of the whole run, which are shared by the weights of its only stage."""
    sequences: bool = False
    """Whether a row is cut from the documents of one source, laid end to end, and weights count such rows."""
    documents: Literal["joined", "apart"] = "joined"
    """Whether attention crosses the documents in such a row."""
    method: Literal["best_fit", "concat_and_split", "none"] = "best_fit"
    overlong: Literal["split", "truncate"] = "split"
    """Treatment of documents that are longer than a row."""
    splits: dict[str, float] = field(default_factory=dict)
    """Shares of the documents that are held out."""
    drawn: Mapping[str, Mapping[str, NDArray[np.int64]]] = field(default_factory=dict)
    """Records that the first epoch of a source leaves out, by shard, because the tool had drawn them."""
    tokenizer: Path | None = None
    """Folder of the model whose tokenizer the tool uses, if it is on this machine."""
    around: Around | None = None
    """Which tokens the tool puts around a text; ``None`` where code of its user's says it."""
    end: str = ""
    """The token that ends a text, where the file names one in place of the tokenizer's."""
    seed: int | None = None
    row_tokens: int | None = None
    """Tokens of a row."""
    step_tokens: int | None = None
    """Tokens of a step over all ranks."""
    micro_tokens: int | None = None
    """Tokens of a microbatch of a rank."""


def leave_undrawn_out(found: Imported, report: Report) -> None:
    """Leave out sources with weight 0 in every stage, which other tools allow but a mix file does not."""
    drawn = {name for _, weights in found.stages for name, weight in weights.items() if weight}
    # A mix without any weight is kept, so that its error can be reported.
    for name in [name for name in found.sources if drawn and name not in drawn]:
        del found.sources[name]
        report.note(f"sources.{name}", "has weight 0 and was left out")
    found.stages = [
        (first, {name: weight for name, weight in weights.items() if name in found.sources})
        for first, weights in found.stages
    ]
    found.drawn = {name: shards for name, shards in found.drawn.items() if name in found.sources}


def new_name(wanted: str, taken: Iterable[str]) -> str:
    """Return a name for a source that a mix file allows and that is still free."""
    name = re.sub(r"[^A-Za-z0-9_.\-]+", "_", wanted).strip("_.-")[-_NAME_LENGTH:].lstrip("_.-")
    name, taken = name or "source", set(taken)
    if name not in taken:
        return name
    # One of these numbers is free, because there are more numbers than taken names.
    return next(
        new for number in range(2, len(taken) + 3) if (new := f"{name}_{number}") not in taken
    )


def mix_text(
    found: Imported,
    notes: Iterable[str],
    *,
    beside: Path,
    heading: str,
    sizes: Mapping[str, int | None],
    tokenizer: Mapping[str, Json] | None,
) -> str:
    """Return the mix file.

    Args:
        found: The imported mix.
        notes: Lines of the report, which are written at the head of the file.
        beside: Folder of the mix file, in which relative paths start.
        heading: Origin of the mix.
        sizes: ``seed``, ``row_tokens``, ``step_tokens``, ``micro_tokens`` as given by the user, or None.
        tokenizer: The tokenizer section of the mix file.

    Raises:
        ConfigError: A size or a tokenizer is missing, or the imported mix is not valid.
    """
    if tokenizer is None and (texts := [n for n, s in found.sources.items() if holds_text(s)]):
        raise ConfigError(
            f"source {texts[0]!r} holds text: give --tokenizer, a tokenizer.json or its folder"
        )
    row = _size(sizes["row_tokens"], found.row_tokens, "--length", "tokens of a row")
    step = _size(
        sizes["step_tokens"], found.step_tokens, "--batch", "tokens of a step over all ranks"
    )
    # Rounded down to whole rows, because a step consists of whole rows here.
    step = max(1, step // row) * row
    micro = sizes["micro_tokens"] or found.micro_tokens or step // _PARTS_A_STEP
    content: JsonObject = {
        "version": 1
        if found.epochs is None and found.total_tokens is None and found.stages_by == "step"
        else 2,
        "seed": sizes["seed"] if sizes["seed"] is not None else found.seed or 0,
        **({} if tokenizer is None else {"tokenizer": dict(tokenizer)}),
        "sources": {
            name: {
                **(_of_rows(source, row, found.documents) if found.sequences else source),
                "path": _paths(source["path"], found.base, beside),
            }
            for name, source in found.sources.items()
        },
        **({"splits": dict(found.splits)} if found.splits else {}),
        "mix": _drawn(found),
        "pack": {"length": row, "method": found.method, "overlong": found.overlong},
        "batch": {"tokens": step, "micro_tokens": min(step, max(1, micro // row) * row)},
    }
    checked(content, MixConfig, name=heading.rstrip("."))
    head = "".join(map(_comment, (heading, *(f"- {note}" for note in notes))))
    body = yaml.safe_dump(content, sort_keys=False, width=_WIDTH, allow_unicode=True)
    # Notes quote the other file. Sources keep their whole URLs, because a run needs them.
    return without_secrets(head) + body


def _drawn(found: Imported) -> JsonObject:
    """Return what is drawn: amounts if the tool gives epochs or a total, otherwise stages of weights."""
    if found.epochs is not None:
        return {"amounts": {name: {"epochs": found.epochs} for name in found.sources}}
    if found.total_tokens is not None:
        ((_, weights),) = found.stages
        shares: JsonObject = {
            name: {"weight": weight} for name, weight in weights.items() if weight
        }
        return {"total": {"tokens": found.total_tokens}, "amounts": shares}
    return {
        "level": "sequence" if found.sequences else found.level,
        "stop": found.stop,
        "stages": [
            {f"from_{found.stages_by}": first, "weights": dict(weights)}
            for first, weights in found.stages
        ],
    }


def _of_rows(source: JsonObject, row: int, documents: str) -> JsonObject:
    """Return a source of rows: files of token ids are cut as stored, and documents are joined before."""
    if source["type"] == "numpy":
        return {**source, "row_tokens": row}
    apart = {} if documents == "joined" else {"documents": documents}
    return {**source, "transforms": [{"type": "concat", "tokens": row, **apart}]}


def _comment(text: str) -> str:
    """Return a text as a comment of one line, whatever it quotes; names that are not UTF-8 are escaped too."""
    # A line end in a key of the other file would end the comment, and the rest would become a key of the mix file.
    return f"# {''.join(c if c.isprintable() else repr(c)[1:-1] for c in text)}\n"


def holds_text(source: JsonObject) -> bool:
    """Whether a source, as a mix file has it, is tokenised."""
    return source["type"] not in ("megatron", "numpy") and "tokens" not in source


def _size(asked: int | None, found: int | None, option: str, what: str) -> int:
    size = asked or found
    if size is None:
        raise ConfigError(f"the {what} are not in the file: give {option}")
    return size


def _paths(written: Json, base: Path, beside: Path) -> Json:
    """Return paths as they are written in a mix file in ``beside``."""
    if isinstance(written, list):
        return [_paths(each, base, beside) for each in written]
    path = str(written)
    if "://" in path or Path(path).is_absolute() or base.resolve() == beside.resolve():
        return path
    # Only the folder is resolved, because the path may be a pattern.
    return str(base.resolve() / path)
