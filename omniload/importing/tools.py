"""The tools whose files are known: a closed list."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from omniload.base.errors import ConfigError, StateError
from omniload.importing import (
    axolotl,
    energon,
    llm_foundry,
    megatron,
    nanotron,
    olmo_core,
    veomni,
)
from omniload.importing.imported import Asked, Imported

__all__ = ["TOOLS", "read_as"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tool:
    """A tool, by its files."""

    read: Callable[[object, Asked], Imported]
    """Reads what a file holds."""
    sign: str
    """What every file of it has, for messages."""
    holds: Callable[[object], bool]
    """Whether a document has that, as far as a look tells."""
    no_state: str = "its states are not known here"
    """Why no state of its loader is read; empty where one is."""


def _with(*keys: str) -> Callable[[object], bool]:
    return lambda document: isinstance(document, dict) and any(key in document for key in keys)


def _with_sources(kind: type) -> Callable[[object], bool]:
    def holds(document: object) -> bool:
        sources = document.get("sources") if isinstance(document, dict) else None
        return isinstance(sources, list) and any(isinstance(source, kind) for source in sources)

    return holds


TOOLS: Mapping[str, _Tool] = {
    "axolotl": _Tool(
        read=axolotl.read,
        sign="a list of datasets",
        holds=_with("datasets", "pretraining_dataset"),
    ),
    "energon": _Tool(
        read=energon.read,
        sign="splits",
        holds=_with("splits"),
        no_state="a state of its loader is a pickle for every rank, which is never loaded, and holds places of its "
        "workers in their slices of shards and keys of samples in their shuffle buffers",
    ),
    "llm-foundry": _Tool(
        read=llm_foundry.read,
        sign="a train_loader",
        holds=_with("train_loader"),
        no_state="",
    ),
    "megatron": _Tool(
        read=megatron.read,
        sign="words of --data-path, or JSON with train",
        holds=lambda document: isinstance(document, str | list) or _with("train")(document),
        no_state="its checkpoints hold a number of samples, in the order of index caches that it made for its own rows",
    ),
    "nanotron": _Tool(read=nanotron.read, sign="data_stages", holds=_with("data_stages")),
    "olmo-core": _Tool(
        read=olmo_core.read, sign="sources, a list of mappings", holds=_with_sources(dict)
    ),
    "veomni": _Tool(read=veomni.read, sign="sources, a list of paths", holds=_with_sources(str)),
}
"""A tool by its name, as the command line says it."""


def read_as(name: str, document: object, asked: Asked) -> Imported:
    """Read a document as a file of the tool called ``name``.

    Raises:
        ConfigError: It is no such file; what is wrong with one that is stands in ``asked.report``.
        StateError: A state is asked for, and none of the tool is read, or this is none.
    """
    if asked.state is not None and (why := TOOLS[name].no_state):
        raise StateError(
            f"{asked.state}: no state of {name} is read: {why}; begin a new epoch with the saved model, or name the "
            "records that were drawn under drawn_before, as docs/migrate.md says"
        )
    if not TOOLS[name].holds(document):
        others = [other for other, tool in TOOLS.items() if tool.holds(document)]
        remedy = (
            f"give --from {' or '.join(others)}" if others else "is it the file that was meant?"
        )
        raise ConfigError(
            f"{asked.file}: is no file of {name}, which has {TOOLS[name].sign}; {remedy}"
        )
    return TOOLS[name].read(document, asked)
