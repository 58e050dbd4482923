"""The key of a snapshot: everything that decides which files an installation puts where.

A key is the SHA-256 of a document in canonical JSON. The manifest keeps the document,
so two keys can be compared by their ingredients.

The request of an installation includes the lines and files that it names: the arguments of
``pip install`` and ``uv pip install``, the requirement and constraint files they name (and the files that
these name), the variables of pip and uv, and project and lock files for ``uv sync``, Poetry, PDM and
Pipenv. Order, blanks and comments of a file do not matter; local sources count by content. For any
other command, arguments that are files count by content.

A requirement is not parsed. Two spellings of one requirement are two requests, which costs
one installation; but two different requests never share a key.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from omniload.base.errors import ConfigError, StateError
from omniload.base.reading import read_small_file
from omniload.base.secrets import with_urls_hidden
from snapshot.env.format.digests import digest_of
from snapshot.env.format.entries import Target
from snapshot.env.key.interpreter import Base, Interpreter, shown

__all__ = [
    "VERSION",
    "Installation",
    "Requests",
    "document_of",
    "key_of",
    "requests_of",
    "without_credentials",
]

VERSION = 1
_FILES = {"-r": False, "--requirement": False, "--requirements": False}
_FILES |= {"-c": True, "--constraint": True, "--constraints": True}
_FILES |= {"-b": True, "--build-constraint": True, "--build-constraints": True}
"""Options that name a file, and whether it holds constraints."""
_EDITABLE = frozenset({"-e", "--editable"})
# These options name files that are written, or that decide nothing beyond the rest of the key.
_NO_INPUT = frozenset(
    {"--log", "--report", "--python", "-p", "--cert", "--client-cert", "--proxy", "--cache-dir"}
    | {"-t", "--target", "--prefix", "--root", "--src", "-f", "--find-links"}
)
_SHORT = frozenset({*_FILES, *_EDITABLE, "-p", "-t", "-f"})
_VARIABLES = re.compile(
    r"^(PIP|UV)_(DEFAULT_INDEX|INDEX|INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX|PRE|PRERELEASE"
    r"|NO_BINARY|ONLY_BINARY|NO_DEPS|REQUIREMENT|CONSTRAINT|OVERRIDE|EXCLUDE_NEWER|RESOLUTION"
    r"|NO_COMPILE|COMPILE_BYTECODE|TARGET|PREFIX|ROOT|USER|TORCH_BACKEND|EXTRA)$"
)
_NAMED_FILES = {"PIP_REQUIREMENT": False, "PIP_CONSTRAINT": True}
_NAMED_FILES |= {"UV_CONSTRAINT": True, "UV_OVERRIDE": True}
_NAMED_FILES |= {"PIP_BUILD_CONSTRAINT": True, "UV_BUILD_CONSTRAINT": True}
_PROJECTS = {
    "uv": ("pyproject.toml", "uv.lock", "uv.toml"),
    "poetry": ("pyproject.toml", "poetry.lock", "poetry.toml"),
    "pdm": ("pyproject.toml", "pdm.lock", "pdm.toml"),
    "pipenv": ("Pipfile", "Pipfile.lock"),
}
"""Files that decide what a tool for whole projects installs."""
_MOST_REQUIREMENT_BYTES = 64 << 20
_ARCHIVES = (".whl", ".tar.gz", ".tgz", ".zip", ".tar.bz2", ".tar.xz")
_LINE_OPTION = re.compile(r"^(--[^\s=]+|-[A-Za-z])(?:[=\s]?\s*(.*))?$")
_PIP = re.compile(r"^pip[0-9.]*(\.py)?$")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_VCS = re.compile(r"^(git|hg|svn|bzr)\+")


@dataclass(slots=True)
class Requests:
    """The requests of an installation. They are sorted when they go into a key."""

    requirements: set[str] = field(default_factory=set)
    """Lines of requirement files."""
    constraints: set[str] = field(default_factory=set)
    options: set[str] = field(default_factory=set)
    """Options in requirement files and variables that affect the choice, without credentials."""
    sources: dict[str, str] = field(default_factory=dict)
    """Digest of each local source and file, by the path as it was written."""

    def document(self) -> dict[str, object]:
        """Return the requests in the form for the key."""
        return {
            "requirements": sorted(self.requirements),
            "constraints": sorted(self.constraints),
            "options": sorted(self.options),
            "sources": dict(sorted(self.sources.items())),
        }


def without_credentials(text: str) -> str:
    """Return an argument without users, passwords and tokens of URLs in it, because keys are not secret."""
    head, mark, rest = text.partition("=") if text.startswith("--") else ("", "", text)
    if "://" not in rest:
        return text
    try:
        parts = urlsplit(rest)
        place = parts.netloc.rpartition("@")[2]
        text = head + mark + urlunsplit(parts._replace(netloc=place))
    except ValueError:
        pass
    # The text as a whole is no URL, but may contain one: ``-iURL``, ``NAME @ URL``, the words of a shell.
    return with_urls_hidden(text)


def requests_of(
    command: Sequence[str], folder: str, environment: Mapping[str, str] = os.environ
) -> Requests:
    """Read the requests of a command that runs in ``folder``, in addition to its words, which the key holds.

    Raises:
        ConfigError: A file that it names cannot be read.
    """
    reader = _Reader(Path(folder), environment)
    words = list(command)
    before = words[: words.index("install")] if "install" in words else []
    # ``pip``, ``pip3.11``, ``uv pip``, ``python -m pip``: any words may come before the verb.
    if any(_PIP.match(Path(word).name) for word in before):
        reader.arguments(words[len(before) + 1 :])
        reader.variables()
        return reader.found
    named = [Path(word).name for word in words[:4]]
    projects = [name for name in named if name in _PROJECTS]
    if projects:
        reader.variables()
    for name in (file for project in projects for file in _PROJECTS[project]):
        reader.input(name)
    # Any argument of an unknown program may be a file that affects the result.
    for word in words[1:]:
        reader.input(word)
    return reader.found


class _Reader:
    """Walks arguments and files; each file once."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.found = Requests()
        self._environment = environment
        self._read: set[tuple[Path, bool]] = set()

    def arguments(self, words: Sequence[str]) -> None:
        """Read the arguments after ``install``; a word that names no input is part of the key itself."""
        rest = iter(words)
        for word in rest:
            option, value = _option_of(word)
            if option in _FILES:
                self.file(value or next(rest, ""), constraints=_FILES[option])
            elif option in _EDITABLE:
                self._source(value or next(rest, ""), mark="-e ")
            elif option in _NO_INPUT:
                _ = value or next(rest, "")
            elif (word := value or "" if option else word) and not self.input(word):
                local = _local_path(word)
                if local is not None and (self.folder / local).is_dir():
                    self._source(word)

    def variables(self) -> None:
        """Read the variables that affect pip and uv."""
        for name, value in self._environment.items():
            if _VARIABLES.match(name) and value:
                shown = " ".join(without_credentials(word) for word in value.split())
                self.found.options.add(f"{name}={shown}")
            if name in _NAMED_FILES:
                for path in value.split():
                    self.file(path, constraints=_NAMED_FILES[name])

    def file(self, name: str, *, constraints: bool, above: Path | None = None) -> None:
        """Read a requirement or constraint file and the files that it names.

        Raises:
            ConfigError: It cannot be read, or it names a source that cannot be read.
        """
        if "://" in name:
            self.found.options.add(f"file {without_credentials(name)}")
            return
        path = (above or self.folder) / name
        if (path, constraints) in self._read:
            return
        self._read.add((path, constraints))
        try:
            # Refuse a pipe (``-r <(...)``), because this read would leave nothing for pip.
            held = read_small_file(
                path, most_bytes=_MOST_REQUIREMENT_BYTES, what="a requirement file"
            )
            text = held.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: a requirement file that cannot be read: {error}") from error
        for number, line in _lines(text):
            try:
                # As in pip's requirement files, a variable counts by its value, not its name.
                self._line(_VARIABLE.sub(self._value, line), path.parent, constraints=constraints)
            except ConfigError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error

    def input(self, name: str) -> bool:
        """Add a file by its content; return whether there is a file of that name."""
        # os.path, because an argument may be program text, longer than any path.
        is_file = os.path.isfile(self.folder / name)  # noqa: PTH113
        if is_file:
            # Use the name as it was written: on another machine the folder above may differ.
            self.found.sources[name] = digest_of(self.folder / name)
        return is_file

    def _line(self, line: str, above: Path, *, constraints: bool) -> None:
        split = _LINE_OPTION.match(line)
        option, value = (split[1], split[2] or "") if split else ("", line)
        if option in _FILES and value:
            self.file(value.strip(), constraints=_FILES[option] or constraints, above=above)
        elif option and option not in _EDITABLE:
            self.found.options.add(" ".join(map(without_credentials, line.split())))
        elif not self._source(value, mark="-e " if option else ""):
            into = self.found.constraints if constraints else self.found.requirements
            into.add(" ".join(map(without_credentials, line.split())))

    def _source(self, text: str, *, mark: str = "") -> bool:
        """Add a local source by its content, given by a path or ``NAME @ file:...``; return whether it is local."""
        reference = re.split(r"[\s;]", text.partition("@")[2].strip())[0]
        local = _local_path(
            reference if reference.startswith("file:") else re.split(r"[\[;\s]", text.strip())[0]
        )
        if local is None:
            return False
        # As for pip and uv, paths are relative to the working directory, even in a file from another folder.
        self.found.sources[mark + " ".join(text.split())] = digest_of(self.folder / local)
        return True

    def _value(self, match: re.Match[str]) -> str:
        return self._environment.get(match[1], match[0])


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Join continued lines, drop comments, and number each line by its first."""
    held, first = "", 0
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        first = first or number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            held += line[:-1] + " "
            continue
        whole = re.sub(r"(^|\s)#.*$", "", held + line).strip()
        if whole:
            yield first, whole
        held, first = "", 0


def _option_of(word: str) -> tuple[str, str | None]:
    """Return the option that a word names and the value in it: ``-Ur=x`` gives ``-r``, as pip reads it."""
    if not word.startswith("-") or word == "-":
        return "", None
    if word.startswith("--"):
        option, given, value = word.partition("=")
        return option, value if given else None
    for at, letter in enumerate(word[1:], start=2):
        if f"-{letter}" in _SHORT:
            return f"-{letter}", word[at:].removeprefix("=") or None
    return word, None


def _local_path(text: str) -> str | None:
    """Return the path if ``text`` is a path on this machine, and no name, URL or repository."""
    if text.startswith("file:"):
        return unquote(urlsplit(text).path)
    is_path = text.startswith((".", "/", "~")) or "/" in text or text.endswith(_ARCHIVES)
    return text if is_path and "://" not in text and not _VCS.match(text) else None


class Installation(NamedTuple):
    """A command that installs, and everything but the environment that decides its outcome."""

    command: tuple[str, ...]
    """Program and arguments."""
    folder: str
    """Working directory of the command."""
    environment: Mapping[str, str]
    """Variables of the command."""
    files: tuple[str, ...] = ()
    """Files and folders that the command reads, by content, in addition to those in its arguments."""
    variables: tuple[str, ...] = ()
    """Names of the variables that the command reads."""


def document_of(
    interpreter: Interpreter,
    targets: Sequence[Target],
    base: Base,
    installation: Installation,
) -> dict[str, Any]:
    """Return the document from which the key of an installation is made.

    Raises:
        ConfigError: No command is given, or an input cannot be read.
    """
    command, folder, environment, files, variables = installation
    if not command:
        raise ConfigError("no command given; write it after --, such as -- pip install numpy")
    return {
        "version": VERSION,
        "interpreter": dict(interpreter.identity),
        "prefix": shown(os.path.realpath(interpreter.prefix)),
        "targets": [shown(target.name) for target in targets],
        "base": base._asdict(),
        "requests": _all_shown(requests_of(command, folder, environment).document()),
        "command": [shown(without_credentials(word)) for word in command],
        "files": {shown(name): digest_of(Path(folder) / name) for name in sorted(set(files))},
        # Digests only, because many users can read the manifest, which holds this document.
        "variables": {name: _secret(environment.get(name)) for name in sorted(set(variables))},
    }


def key_of(document: Mapping[str, Any]) -> str:
    """Return the key of a document: 64 hexadecimal digits.

    Raises:
        StateError: The document is of another version.
    """
    if document.get("version") != VERSION:
        raise StateError(
            f"key document has version {document.get('version')!r}, this code reads {VERSION}"
        )
    # Use the canonical form (members sorted, no blanks, UTF-8), so that equal requests have equal keys.
    text = json.dumps(document, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _secret(value: str | None) -> str:
    if value is None:
        return "unset"
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def _all_shown(value: Any) -> Any:  # noqa: ANN401 -- JSON
    if isinstance(value, Mapping):
        return {shown(name): _all_shown(below) for name, below in value.items()}
    return [_all_shown(item) for item in value] if isinstance(value, list) else shown(value)
