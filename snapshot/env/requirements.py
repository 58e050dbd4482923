"""What an installation asks for, in a form in which equal requests are equal.

Read are the arguments of ``pip install`` and ``uv pip install``, the requirement and
constraint files they name (and those that these name), the variables of pip and uv,
and project and lock files for ``uv sync``, Poetry, PDM and Pipenv. Order, blanks, comments,
case and spelling of names do not matter; local sources count by content. Of any other
command, arguments that are files count by content.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from omniload.base.errors import ConfigError
from snapshot.env.sources import digest_of

__all__ = ["Requests", "canonical_name", "normalised", "requests_of", "without_credentials"]

_FILES = {"-r": False, "--requirement": False, "--requirements": False}
_FILES |= {"-c": True, "--constraint": True, "--constraints": True}
_FILES |= {"-b": True, "--build-constraint": True, "--build-constraints": True}
"""Options that name a file; whether it holds constraints."""
_WITH_VALUE = frozenset(
    {"-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--index", "--default-index"}
    | {"--no-binary", "--only-binary", "--platform", "--python-version", "--abi", "--override"}
    | {"--implementation", "-t", "--target", "--prefix", "--root", "--trusted-host", "--cache-dir"}
    | {
        "--config-settings",
        "-C",
        "--python",
        "-p",
        "--retries",
        "--timeout",
        "--link-mode",
        "--src",
    }
    | {
        "--upgrade-strategy",
        "--report",
        "--log",
        "--proxy",
        "--cert",
        "--client-cert",
        "--progress-bar",
    }
    | {"--exclude-newer", "--resolution", "--prerelease", "--index-strategy", "--keyring-provider"}
    | {"--upgrade-package", "-P", "--reinstall-package", "--global-option", "--group", "--extra"}
)
_NO_INPUT = frozenset(
    {"--log", "--report", "--python", "-p", "--cert", "--client-cert", "--proxy", "--cache-dir"}
)
"""Options whose files are written, or decide nothing that is not in the key already."""
_SHORT = {*_FILES, *_WITH_VALUE, "-e"}
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
_ARCHIVES = (".whl", ".tar.gz", ".tgz", ".zip", ".tar.bz2", ".tar.xz")
_OPTION = re.compile(r"\s--(?:hash|config-settings?|global-option)[= ]")
_HASH = re.compile(r"\s--hash[= ]\s*(\S+)")
_LINE_OPTION = re.compile(r"^(--[^\s=]+|-[A-Za-z])(?:[=\s]?\s*(.*))?$")
_PLAIN = re.compile(
    r"^([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(==[0-9]+(?:\.[0-9]+)*)?$", re.ASCII
)
"""A name, with one version of numbers or with none: its form needs no parser."""
_PIP = re.compile(r"^pip[0-9.]*(\.py)?$")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")


@dataclass(slots=True)
class Requests:
    """What was asked for. Sorted when it goes into a key."""

    requirements: set[str] = field(default_factory=set)
    constraints: set[str] = field(default_factory=set)
    options: set[str] = field(default_factory=set)
    """Options in requirement files and variables that steer the choice, without credentials."""
    sources: dict[str, str] = field(default_factory=dict)
    """Digest of each local source, by the path as it was written."""

    def document(self) -> dict[str, object]:
        """Return the part of the key."""
        return {
            "requirements": sorted(self.requirements),
            "constraints": sorted(self.constraints),
            "options": sorted(self.options),
            "sources": dict(sorted(self.sources.items())),
        }


def normalised(text: str) -> str:
    """Return a requirement in its one form: ``Torch [B,a] >=2 ,<3`` is ``torch[a,b]<3,>=2``.

    Raises:
        ConfigError: It is no requirement.
    """
    body, options = _parted(text)
    plain = _PLAIN.match(body.strip())
    if plain:
        return " ".join([canonical_name(plain[1]) + (plain[2] or ""), *options])
    # Imported here: it takes a third of a warm restore to load, and most requirements are plain.
    from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415

    try:
        found = Requirement(body.strip())
    except InvalidRequirement as error:
        raise ConfigError(f"{text!r} is no requirement: {error}") from error
    found.name = canonical_name(found.name)
    found.extras = {canonical_name(extra) for extra in found.extras}
    if found.url:
        found.url = without_credentials(found.url)
    return " ".join([str(found), *options])


def canonical_name(name: str) -> str:
    """Return the one spelling of a distribution's name: ``Foo.Bar__baz`` is ``foo-bar-baz``.

    Source:
        PEP 503.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def _parted(text: str) -> tuple[str, list[str]]:
    """Part a line of a requirement file into the requirement and its own options, hashes sorted."""
    found = _OPTION.search(text)
    if found is None:
        return text, []
    rest = text[found.start() :]
    others = " ".join(_HASH.sub("", rest).split())
    hashes = sorted({f"--hash={value}" for value in _HASH.findall(rest)})
    return text[: found.start()], [*hashes, *([others] if others else [])]


def without_credentials(text: str) -> str:
    """Return an argument with the user and password of a URL in it taken out: keys are not secret."""
    head, mark, rest = text.partition("=") if text.startswith("--") else ("", "", text)
    if "://" not in rest:
        return text
    try:
        parts = urlsplit(rest)
        place = parts.netloc.rpartition("@")[2]
        return head + mark + urlunsplit(parts._replace(netloc=place))
    except ValueError:
        return text


def requests_of(
    command: Sequence[str], folder: str, environment: Mapping[str, str] = os.environ
) -> Requests:
    """Read what a command asks for.

    Args:
        command: Program and arguments.
        folder: Where it runs; relative paths start there.
        environment: Its variables.

    Raises:
        ConfigError: A file that it names cannot be read, or a line in one makes no sense.
    """
    reader = _Reader(Path(folder), environment)
    words = list(command)
    before = words[: words.index("install")] if "install" in words else []
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
        """Read the arguments after ``install``."""
        rest, unsure = iter(words), False
        for word in rest:
            option, value = _option_of(word)
            if not option:
                self.input(word)
                # After an option that we do not know it may be a value: no fault of ours.
                with suppress(*[ConfigError] if unsure else []):
                    self.requirement(word)
                continue
            takes = option in _FILES or option in _WITH_VALUE or option in {"-e", "--editable"}
            unsure = value is None and not takes
            if value is None and takes:
                value = next(rest, "")
            if option in _FILES:
                self.file(value or "", constraints=_FILES[option])
            elif option in {"-e", "--editable"}:
                self.requirement(value or "", mark="-e ")
            elif value and option not in _NO_INPUT:
                self.input(value)  # as text it is in the key already: the command is part of it

    def variables(self) -> None:
        """Read the variables by which pip and uv are steered."""
        for name, value in self._environment.items():
            if _VARIABLES.match(name) and value:
                shown = " ".join(without_credentials(word) for word in value.split())
                self.found.options.add(f"{name}={shown}")
            if name in _NAMED_FILES:
                for path in value.split():
                    self.file(path, constraints=_NAMED_FILES[name])

    def file(self, name: str, *, constraints: bool, above: Path | None = None) -> None:
        """Read a requirement or constraint file and those it names."""
        if "://" in name:
            self.found.options.add(f"file {without_credentials(name)}")
            return
        path = (above or self.folder) / name
        if (path, constraints) in self._read:
            return
        self._read.add((path, constraints))
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: a requirement file that cannot be read: {error}") from error
        for number, line in _lines(text):
            try:
                self._line(_VARIABLE.sub(self._value, line), path.parent, constraints=constraints)
            except ConfigError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error

    def _line(self, line: str, above: Path, *, constraints: bool) -> None:
        split = _LINE_OPTION.match(line)
        option, value = (split[1], split[2] or "") if split else ("", line)
        if option in _FILES and value:
            self.file(value.strip(), constraints=_FILES[option] or constraints, above=above)
        elif option in {"-e", "--editable"} or not option:
            self.requirement(value, mark="-e " if option else "", constraints=constraints)
        else:
            try:
                words = shlex.split(line)
            except ValueError as error:
                raise ConfigError(f"{line!r}: {error}; close it") from error
            self.found.options.add(" ".join(map(without_credentials, words)))

    def requirement(self, text: str, *, mark: str = "", constraints: bool = False) -> None:
        """Read one requirement: a name, a URL, or a path, which starts where the command runs."""
        body, options = _parted(text.strip())
        reference = re.split(r"\s;|;\s", body.partition("@")[2].strip())[0].strip()
        path = re.split(r"[\[;]", body, maxsplit=1)[0].strip()
        local = _local_path(reference if reference.startswith("file:") else path)
        into = self.found.constraints if constraints else self.found.requirements
        if local is not None:
            rest = body[len(path) :] if local == path else ""
            label = " ".join([f"{mark}{local}{rest}", *options])
            self.found.sources[label] = digest_of(self.folder / local)
        elif "://" in text and "@ " not in text:
            into.add(mark + " ".join(map(without_credentials, text.split())))
        else:
            into.add(mark + normalised(text))

    def input(self, name: str) -> None:
        """Take a file by its content, if there is one."""
        # os.path: an argument may be a program, longer than any path.
        if os.path.isfile(self.folder / name):  # noqa: PTH113
            self.found.sources[name] = digest_of(self.folder / name)

    def _value(self, match: re.Match[str]) -> str:
        return self._environment.get(match[1], match[0])


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Join continued lines, drop comments; number each by its first line."""
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
    """Return the path if ``text`` names something on this machine."""
    if text.startswith("file:"):
        return unquote(urlsplit(text).path)
    is_path = text.startswith((".", "/", "~")) or "/" in text or text.endswith(_ARCHIVES)
    return text if is_path and "://" not in text and text and not _is_vcs(text) else None


def _is_vcs(text: str) -> bool:
    return bool(re.match(r"^(git|hg|svn|bzr)\+", text))
