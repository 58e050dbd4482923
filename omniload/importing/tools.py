"""The known tools: a closed list of modules, each of which recognizes and reads the files of its tool."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from omniload.base.errors import ConfigError, StateError
from omniload.importing.imported import Asked, Imported, leave_undrawn_out

__all__ = ["TOOLS", "Tool", "has_key", "has_sources", "read_as", "tool_of"]

TOOLS = (
    "axolotl",
    "energon",
    "llm-foundry",
    "megatron",
    "nanotron",
    "olmo-core",
    "torchdata",
    "veomni",
)
"""Names of the tools on the command line; each is a module in this folder that contains a ``TOOL``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool and its files."""

    read: Callable[[object, Asked], Imported]
    """Function that reads the content of a file."""
    sign: str
    """Common feature of all its files, for messages."""
    holds: Callable[[object], bool]
    """Function that returns whether a document has this feature, at first sight."""
    no_state: str = "its states are not known here"
    """Reason why no state of its loader is read; empty if states are read."""


def has_key(*keys: str) -> Callable[[object], bool]:
    """Return a function that tells whether a document is a mapping with one of ``keys``."""
    return lambda document: isinstance(document, dict) and any(key in document for key in keys)


def has_sources(kind: type) -> Callable[[object], bool]:
    """Return a function that tells whether a document lists ``sources`` of a kind."""

    def holds(document: object) -> bool:
        sources = document.get("sources") if isinstance(document, dict) else None
        return isinstance(sources, list) and any(isinstance(source, kind) for source in sources)

    return holds


def tool_of(name: str) -> Tool:
    """Return a tool by its name."""
    # By name, like formats, so that a command that imports a file of one tool loads no other reader.
    tool = import_module(f"omniload.importing.{name.replace('-', '_')}").TOOL
    assert isinstance(tool, Tool), f"the module of {name} holds no TOOL"
    return tool


def read_as(name: str, document: object, asked: Asked) -> Imported:
    """Read a document as a file of the tool called ``name``.

    Raises:
        ConfigError: It is not such a file; faults in such a file are in ``asked.report``.
        StateError: A state is given, but states of the tool are not read, or this is not a state.
    """
    tool = tool_of(name)
    if asked.state is not None and tool.no_state:
        raise StateError(
            f"{asked.state}: no state of {name} is read: {tool.no_state}; begin a new epoch with the saved model, or "
            "name the records that were drawn under drawn_before, as docs/migrate/README.md says"
        )
    if not tool.holds(document):
        # Other tools are loaded only here, because the file most often belongs to one of them.
        others = [other for other in TOOLS if tool_of(other).holds(document)]
        remedy = (
            f"give --from {' or '.join(others)}" if others else "is it the file that was meant?"
        )
        raise ConfigError(f"{asked.file}: is no file of {name}, which has {tool.sign}; {remedy}")
    found = tool.read(document, asked)
    if asked.documents is not None and not found.sequences:
        raise ConfigError(
            f"--documents is {asked.documents}, and nothing that {asked.file} declares is cut from joined documents; "
            "leave it out"
        )
    leave_undrawn_out(found, asked.report)
    return found
