"""Megatron's blend: ``--data-path`` with weights and prefixes, as text, or JSON with a list for each split.

::

    0.7 data/web_text_document 0.3 data/code_text_document          --data-args-path
    {"train": ["0.7", "data/web_text_document", ...], "valid": ...}  --per-split-data-args-path

Without weights, Megatron draws each prefix in proportion to its tokens. Samples are rows of equal length, cut from the
joined documents of one prefix, and weights count such rows.
"""

from pathlib import Path

from omniload.base.errors import OmniloadError
from omniload.importing.fields import Fields
from omniload.importing.files import mixed_over_shards
from omniload.importing.imported import Asked, Imported, new_name
from omniload.importing.tools import Tool, has_key
from omniload.source.files import beside, local_file
from omniload.source.parsing.arrays.idx import idx_head

__all__ = ["TOOL"]


def _read(document: object, asked: Asked) -> Imported:
    """Return the blend in ``document``, which is the text of a file or its JSON content."""
    report = asked.report
    words = _words(document, asked)
    weights, prefixes = _weights_and_prefixes(words, asked)
    found = Imported(base=Path.cwd(), sequences=True, documents=asked.documents or "joined")
    if not prefixes:
        report.refuse("", "holds no prefix; give the words that --data-path takes")
        return found
    by_name: dict[str, float] = {}
    for weight, prefix in zip(weights, prefixes, strict=True):
        name = new_name(Path(prefix).name, found.sources)
        found.sources[name] = mixed_over_shards({"type": "megatron", "path": prefix}, asked)
        by_name[name] = weight
    found.stages.append((0, by_name))
    if found.documents == "joined":
        report.note(
            "",
            "samples are cut from the joined documents of one prefix and attend across them, as in Megatron by "
            "default; for a run with --reset-attention-mask and --reset-position-ids give --documents apart",
        )
    else:
        report.note(
            "",
            "attention and positions stay within documents, as in Megatron with --reset-attention-mask and "
            "--reset-position-ids; the last token of a document has no label, as there with --eod-mask-loss",
        )
    # For a file with a list for each split, Megatron accepts no --split.
    if not isinstance(document, dict):
        report.note(
            "",
            "--split of Megatron's command line is not in this file: every document is trained on",
        )
    return found


def _words(document: object, asked: Asked) -> list[str]:
    match document:
        case str():
            return document.split()
        case list():
            return [str(word) for word in document]
        case dict():
            fields = Fields(document, "", asked.report)
            words = [str(word) for word in fields.take("train", list, [])]
            if not words:
                fields.refuse("train", "holds no prefix")
            fields.note(
                # NeMo calls the second one "validation".
                dict.fromkeys(("valid", "validation", "test"), "declare it as an evaluation mix")
            )
            fields.end()
            return words
        case _:
            asked.report.refuse("", f"is a {type(document).__name__}, not the words of --data-path")
            return []


def _weights_and_prefixes(words: list[str], asked: Asked) -> tuple[list[float], list[str]]:
    """Return weights and prefixes; if there are no weights, the numbers of tokens are the weights."""
    numbers = [_number(word) for word in words[::2]]
    # Distinguished as in Megatron: there are weights if every second word, beginning with the first, is a number.
    if len(words) % 2 == 0 and all(number is not None for number in numbers):
        for number, word, prefix in zip(numbers, words[::2], words[1::2], strict=True):
            if not 0 <= (number or 0.0) < float("inf"):
                asked.report.refuse("", f"the weight {word} of {prefix} is no number from 0 on")
        return [number or 0.0 for number in numbers], words[1::2]
    if any(_number(word) is not None for word in words):
        asked.report.refuse(
            "",
            f"its {len(words)} words are no pairs of a weight and a prefix: {' '.join(words)[:80]!r}",
        )
        return [1.0] * len(words), words
    if len(words) == 1:
        return [1.0], words  # the only prefix, whatever its size
    asked.report.note("", "prefixes without weights are drawn in proportion to their tokens")
    return [_tokens(prefix, asked) for prefix in words], words


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _tokens(prefix: str, asked: Asked) -> float:
    """Return the number of tokens of a prefix: its bytes, divided by the token size in the index next to it."""
    stem = Path(prefix.removesuffix(".bin"))
    try:
        # Absolute, because files next to it are searched in its folder.
        data = local_file(f"{stem.absolute()}.bin")
        return data.size_bytes / idx_head(beside(data, f"{stem.name}.idx")).dtype.itemsize
    except (OmniloadError, OSError, ValueError) as error:
        said = getattr(error, "strerror", None)
        asked.report.refuse(
            prefix,
            f"has no weight, and its tokens cannot be counted here: {f'{stem}.bin: {said}' if said else error}; "
            "write weights",
        )
        return 1.0


TOOL = Tool(
    read=_read,
    sign="words of --data-path, or JSON with train",
    holds=lambda document: isinstance(document, str | list) or has_key("train")(document),
    no_state="its checkpoints hold a number of samples, in the order of index caches that it made for its own rows",
)
