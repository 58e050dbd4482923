"""Write ``docs/reference/{mix,train,steer,cli}.md`` from the models and commands themselves.

::

    python scripts/generate_reference.py

A test fails if a page differs from the output of this script.
"""

import inspect
import math
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from omniload.base.cli import omniload
from omniload.base.units import parse_bytes, parse_count, parse_seconds
from omniload.mix.config import MixConfig
from omniload.mix.schema.json_schema import meanings_of
from omniload.mix.schema.policies import SteeringConfig
from omniload.mix.schema.records import parse_count_or_percentage
from trainer_integration.config import TrainConfig

__all__ = ["command_page", "main", "model_page", "pages"]

FOLDER = Path(__file__).parents[1] / "docs/reference"

_GENERATED = "<!-- Written by scripts/generate_reference.py; edit the models and commands, not this page. -->"
_HELP_WIDTH = 96
_TAG_MEANING = "Selects this kind."

_PLAIN: Mapping[type, str] = {
    bool: "`true` or `false`",
    int: "whole number",
    float: "number",
    str: "text",
}
_QUANTITY = {
    parse_count: "[count](#quantities)",
    parse_count_or_percentage: "[count](#quantities) or percentage of the source's records",
    parse_bytes: "[size](#quantities)",
    parse_seconds: "[duration](#quantities)",
}

_QUANTITIES = """## Quantities

| kind | written as | suffixes |
| --- | --- | --- |
| count | `16384`, `16Ki`, `512k`, `1.5T` | `Ki` to `Ti`: powers of 1024; `k`, `M`, `G` or `B`, `T`: powers of 1000 |
| size | `4MiB`, `64MB` | `KiB` to `TiB`: powers of 1024; `kB` to `TB`: powers of 1000 |
| duration | `30s`, `250ms` | `ms`, `s`, `m` or `min`, `h`, `d`; a bare number is seconds |

The largest count is 2^53, the largest size 2^60 bytes, and the longest duration 2 billion seconds.
"""

_OF_QUANTITIES = {1 << 53, 1 << 60, 2e9}
"""Largest values of these kinds."""

_MIX_INTRO = """# Mix file

The mix file says which samples a run draws, how they are packed into rows, and how each step is dealt to ranks. One
file serves any number of ranks. Relative paths start at the folder of the file. Unknown keys are refused. All faults
are reported together, as `file:line: key: reason`. Rules that span several keys are checked once each key is valid by
itself.

```yaml
version: 1
seed: 17
tokenizer: {type: bpe, path: corpus/tokenizer.json, end_of_document: "<eos>"}
sources:
  modules: {type: parquet, path: "corpus/modules/*.parquet", text: text}
  functions: {type: jsonl, path: "corpus/functions/*.jsonl.zst", on_error: {policy: skip, limit: 10}}
  long_modules: {type: parquet, path: "corpus/long_modules/*.parquet", tokens: tokens}
  notices: {type: text, path: "corpus/notices/*.txt", shuffle: {method: shards}}
mix:
  level: token
  stages:
    - {from_step: 0, weights: {modules: 3, functions: 2, notices: 1}}
    - {from_step: 500, ramp_steps: 100, weights: {modules: 1, long_modules: 1}}
pack: {length: 1024, method: best_fit, overlong: split}
batch: {tokens: 16384, micro_tokens: 4096}
balance: {method: greedy_swap, linear: 768, quadratic: 1}
runtime: {kind: auto, prefetch_steps: 4}
```

Rules that span keys:

- `batch.tokens` and `batch.micro_tokens` are multiples of `pack.length`. `16Ki` is 16,384;
  `16k` is 16,000, which is no multiple of 1,024.
- Every weight names a declared source, and every source has a weight above 0 in some stage.
- In a file of `version: 2`, a name among the weights may stand for a group. The group has a `weight` relative to its
  neighbours, and `of` lists its sources and groups with their weights. Its `temperature` evens out the weights in `of`
  (`weight ** (1 / temperature)`).
- The first stage starts at step 0 without a ramp. A later stage starts after the ramp of the stage before it has ended.
- Text needs a `tokenizer`. A mix of token columns alone needs none.
- A step has at least one row for every data-parallel rank. With context parallelism, `pack.length` is a multiple of
  `2 * cp`.
- `sources`, `splits`, `mix`, `pack`, `batch.tokens`, `seed` and the tokenizer decide which samples are trained on.
  Therefore they must not change when a run is resumed, and neither must the records that `drawn_before` names.
  `batch.micro_tokens`, `batch.pipeline`, `balance`, `runtime`, `tags` and `on_error` may change.
"""

_TRAIN_INTRO = """# Training file

The training file describes one run of the included trainer: `omniload train run FILE`. Relative paths start at the
folder of the file. Unknown keys are refused. All faults are reported together, as `file:line: key: reason`.

```yaml
version: 1
mix: mix.yaml
steps: 200
parallel: {dp: 2}
model: {dim: 128, num_layers: 2, num_heads: 4, num_kv_heads: 2, hidden: 256, num_experts: 8, top_k: 2}
optimizer: {lr: 0.002, warmup_steps: 20}
checkpoint: {every_steps: 50, keep: 3}
run_dir: run
```

Rules that span keys:

- `optimizer.warmup_steps` is at most `steps`.
- `vocab_size` is required if the mix has no tokenizer. It must not be below the size of the tokenizer's vocabulary.
- The model must not change when a run is resumed; `parallel` may change.
"""

_STEER_INTRO = """# Steering file

The steering file declares a policy that moves the weights of a run while it goes on: `omniload mix steer RUN FILE`
([how](../how-to/running/steer.md)).
Unknown keys are refused. All faults are reported together, as `file:line: key: reason`.

```yaml
version: 1
every: 500
policy: {type: loss, rate: 0.1, reference: {web: 2.4, code: 1.1}}
```

Rules that span keys:

- `to_step` of a temperature is after its `from_step`.
- A source whose share is 0 keeps that share. `max_fraction` in the mix file, also of groups, limits every policy.
"""

_CLI_INTRO = """# Commands

Commands have the form `omniload NOUN VERB`. Results go to standard output, faults to standard error. A verb means the
same under every noun: **check** (is it valid? no side effects), **plan** (dry run), **show** (print), **preview** (a
few real items), **run**, **verify**, **audit**, **bench**, **mount** and **umount**, **save** and **restore**,
**prefetch** and **drop** (fill and empty caches).

| exit code | means | what to do |
| --- | --- | --- |
| 0 | done | |
| 1 | a bug in omniload | report it |
| 2 | a fault in the configuration or the command line | fix what the message names |
| 3 | unavailable: a store or a process did not answer | try again |
| 4 | state: the saved state does not fit | resume with the files and settings it was saved with, or start a new run |
| 5 | integrity: bytes or samples are damaged or have changed | replace the file, or use an earlier checkpoint |
| 130 | interrupted | |
"""


@dataclass(slots=True)
class _Section:
    """One model, and the keys that contain it."""

    model: type[BaseModel]
    paths: list[str] = field(default_factory=list)


def model_page(intro: str, root: type[BaseModel]) -> str:
    """Return a page with one table for ``root`` and one for every model under it."""
    sections: dict[type[BaseModel], _Section] = {}
    _collect(root, "", sections)
    titles = {model: _title(section) for model, section in sections.items()}
    parts = [_GENERATED, intro.rstrip()]
    for model, section in sections.items():
        parts.append(f"## {titles[model]}")
        parts.append(_prose(inspect.getdoc(model) or ""))
        if others := section.paths[1:]:
            parts.append("Also " + ", ".join(f"`{path}`" for path in others) + ".")
        parts.append(_table(model, titles))
    page = "\n\n".join(parts) + "\n"
    return f"{page}\n{_QUANTITIES}" if "(#quantities)" in page else page


def command_page(root: click.Command) -> str:
    """Return a page with the help of ``root`` and of every command under it."""
    parts = [_GENERATED, _CLI_INTRO.rstrip()]
    for path, text in _helps(root, None, "omniload"):
        parts.append(f"## {path}")
        parts.append(f"```\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """Return the generated pages by file."""
    return {
        FOLDER / "mix.md": model_page(_MIX_INTRO, MixConfig),
        FOLDER / "train.md": model_page(_TRAIN_INTRO, TrainConfig),
        FOLDER / "steer.md": model_page(_STEER_INTRO, SteeringConfig),
        FOLDER / "cli.md": command_page(omniload),
    }


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path}\n")


def _collect(model: type[BaseModel], path: str, sections: dict[type[BaseModel], _Section]) -> None:
    """Enter ``model`` and its nested models, in the order of the keys, depth first."""
    section = sections.setdefault(model, _Section(model))
    if path in section.paths:
        return
    section.paths.append(path)
    for key, info in model.model_fields.items():
        here = f"{path}.{key}" if path else key
        for held, suffix in _models_in(info.annotation, ""):
            _collect(held, here + suffix, sections)


def _models_in(annotation: object, suffix: str) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the models in a type, each with its suffix of the path to the key."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, suffix
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _models_in(arguments[0], suffix)
    elif origin is dict:
        yield from _models_in(arguments[1], suffix + ".NAME")
    elif origin is tuple:
        yield from _models_in(arguments[0], suffix + "[]")
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _models_in(argument, suffix)


def _title(section: _Section) -> str:
    path = section.paths[0]
    tag = section.model.model_fields.get("type")
    told = f" of type {get_args(tag.annotation)[0]}" if tag is not None else ""
    return f"{path}{told}" if path else "The file"


def _table(model: type[BaseModel], titles: Mapping[type[BaseModel], str]) -> str:
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key, info in model.model_fields.items():
        meaning = meanings_of(model).get(key) or (_TAG_MEANING if key == "type" else None)
        assert meaning, f"{model.__name__}.{key} has no docstring"
        kind = _kind(info.annotation, info.metadata, titles)
        lines.append(f"| `{key}` | {kind} | {_default(info)} | {_prose(meaning)} |")
    return "\n".join(lines)


def _kind(annotation: object, metadata: list[Any], titles: Mapping[type[BaseModel], str]) -> str:
    """Describe a type and its limits in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0], [*_flat(arguments[1:]), *metadata], titles)
    if origin is not None:
        words = _compound(origin, arguments, titles)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        words = f"[{titles[annotation]}](#{_anchor(titles[annotation])})"
    else:
        assert isinstance(annotation, type), f"{annotation!r} has no words; add them"
        words = _PLAIN[annotation]
    for validator in metadata:
        if isinstance(validator, BeforeValidator) and validator.func in _QUANTITY:
            words = _QUANTITY[validator.func]
    return words + _limits(metadata)


def _compound(
    origin: object, arguments: tuple[Any, ...], titles: Mapping[type[BaseModel], str]
) -> str:
    """Describe a type that is composed of others."""
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    held = [_kind(a, [], titles) for a in arguments if a not in (type(None), Ellipsis)]
    if origin is dict:
        return f"mapping of name to {held[1]}"
    if origin is tuple:
        return f"list of {held[0]}" if Ellipsis in arguments else f"list of {', '.join(held)}"
    return " or ".join(held)


def _flat(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


def _limits(metadata: list[Any]) -> str:
    least = max((str(m.ge) for m in metadata if isinstance(m, Ge)), key=float, default=None)
    words = [] if least is None else [f"at least {least}"]
    words += [f"above {m.gt}" for m in metadata if isinstance(m, Gt)]
    most = min((m.le for m in metadata if isinstance(m, Le)), default=None)
    # The largest value of a quantity is described in the section about quantities.
    words += [f"at most {_power(most)}"] if most is not None and most not in _OF_QUANTITIES else []
    words += [f"below {_power(m.lt)}" for m in metadata if isinstance(m, Lt)]
    words += ["not empty" for m in metadata if isinstance(m, MinLen) and m.min_length == 1]
    return f", {', '.join(words)}" if words else ""


def _power(value: object) -> str:
    if isinstance(value, int | float) and value >= 1 << 20:
        exponent = math.log2(value)
        if exponent.is_integer():
            return f"2^{exponent:.0f}"
        exponent = round(math.log10(value))
        if value == 10**exponent:
            return f"10^{exponent}"
    return str(value)


def _default(info: FieldInfo) -> str:
    if info.default_factory is not None:
        return "empty"
    value = info.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "its own defaults"
    if isinstance(value, bool) or value is None:
        return {True: "`true`", False: "`false`", None: "none"}[value]
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value.value if isinstance(value, Enum) else value}`"


def _prose(text: str) -> str:
    """Turn a docstring into one paragraph of Markdown."""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))


def _anchor(title: str) -> str:
    """Return GitHub's fragment for a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _helps(
    command: click.Command, parent: click.Context | None, name: str
) -> Iterator[tuple[str, str]]:
    context = click.Context(
        command,
        info_name=name,
        parent=parent,
        terminal_width=_HELP_WIDTH,
        max_content_width=_HELP_WIDTH,
        **command.context_settings,
    )
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    yield context.command_path, text
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            under = command.get_command(context, verb)
            assert under is not None, f"{context.command_path} lists {verb} and does not have it"
            yield from _helps(under, context, verb)


if __name__ == "__main__":
    main()
