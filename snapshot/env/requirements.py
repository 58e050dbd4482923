"""What an installation asks for, in a form in which equal requests are equal.

Read are the arguments of ``pip install`` and ``uv pip install``, the requirement and
constraint files they name (and those that these name), the variables of pip and uv,
and ``pyproject.toml`` with ``uv.lock`` for ``uv sync``. Order, blanks, comments, case
and spelling of names do not matter; local sources count by content. Of any other
command, arguments that are files count by content.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from omniload.base.errors import ConfigError
from snapshot.env.sources import digest_of

__all__ = ["Requests", "normalised", "requests_of", "without_credentials"]

_FILES = {"-r": False, "--requirement": False, "--requirements": False}
_FILES |= {"-c": True, "--constraint": True, "--constraints": True}
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
_VARIABLES = re.compile(
    r"^(PIP|UV)_(DEFAULT_INDEX|INDEX|INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX|PRE|PRERELEASE"
    r"|NO_BINARY|ONLY_BINARY|NO_DEPS|REQUIREMENT|CONSTRAINT|OVERRIDE|EXCLUDE_NEWER|RESOLUTION"
    r"|NO_COMPILE|COMPILE_BYTECODE|TARGET|PREFIX|ROOT|USER|TORCH_BACKEND|EXTRA)$"
)
_NAMED_FILES = {"PIP_REQUIREMENT": False, "PIP_CONSTRAINT": True}
_NAMED_FILES |= {"UV_CONSTRAINT": True, "UV_OVERRIDE": True}
_ARCHIVES = (".whl", ".tar.gz", ".tgz", ".zip", ".tar.bz2", ".tar.xz")
_OPTION = re.compile(r"\s--(?:hash|config-settings|global-option)[= ]")
_LINE_OPTION = re.compile(r"^(-[^\s=]+)(?:[=\s]\s*(.*))?$")
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
    body, *rest = _OPTION.split(text, maxsplit=1)
    hashes = sorted(set(re.findall(r"--hash[= ]\s*(\S+)", text))) if rest else []
    try:
        found = Requirement(body.strip())
    except InvalidRequirement as error:
        raise ConfigError(f"{text!r} is no requirement: {error}") from error
    found.name = canonicalize_name(found.name)
    found.extras = {canonicalize_name(extra) for extra in found.extras}
    if found.url:
        found.url = without_credentials(found.url)
    return " ".join([str(found), *(f"--hash={value}" for value in hashes)])


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
    if "install" in words and any("pip" in Path(word).name for word in words[:4]):
        reader.arguments(words[words.index("install") + 1 :])
        reader.variables()
    elif words and Path(words[0]).name == "uv":
        reader.variables()
        for name in ("pyproject.toml", "uv.lock", "uv.toml"):
            if (reader.folder / name).is_file():
                reader.source(name)
    else:
        for word in words[1:]:
            # os.path: an argument may be a program, longer than any path.
            if os.path.isfile(reader.folder / word):  # noqa: PTH113
                reader.source(word)
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
        rest = iter(words)
        for word in rest:
            option, given, value = word.partition("=")
            if option in _FILES:
                self.file(value if given else next(rest, ""), constraints=_FILES[option])
            elif option in {"-e", "--editable"}:
                self.requirement(value if given else next(rest, ""), self.folder)
            elif option in _WITH_VALUE and not given:
                next(rest, None)  # it stands in the command, which is part of the key
            elif not word.startswith("-"):
                self.requirement(word, self.folder)

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
            text = path.read_text(encoding="utf-8")
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
            self.requirement(value, above, constraints=constraints)
        else:
            self.found.options.add(" ".join(without_credentials(w) for w in shlex.split(line)))

    def requirement(self, text: str, above: Path, *, constraints: bool = False) -> None:
        """Read one requirement: a name, a URL, or a path."""
        path, _, extras = text.strip().partition("[")
        path = path.partition(" --")[0].strip()
        reference = text.partition("@")[2].strip()
        local = _local_path(reference if reference.startswith("file:") else path)
        if local is not None:
            self.source(os.fspath(local), above, extras)
        elif "://" in text and "@ " not in text:
            shown = without_credentials(text.strip())
            (self.found.constraints if constraints else self.found.requirements).add(shown)
        else:
            into = self.found.constraints if constraints else self.found.requirements
            into.add(normalised(text))

    def source(self, name: str, above: Path | None = None, extras: str = "") -> None:
        """Take a local file or tree by its content."""
        label = f"{name}[{extras}" if extras else name
        self.found.sources[label] = digest_of((above or self.folder) / name)

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


def _local_path(text: str) -> str | None:
    """Return the path if ``text`` names something on this machine."""
    if text.startswith("file:"):
        return unquote(urlsplit(text).path)
    is_path = text.startswith((".", "/", "~")) or "/" in text or text.endswith(_ARCHIVES)
    return text if is_path and "://" not in text and text and not _is_vcs(text) else None


def _is_vcs(text: str) -> bool:
    return bool(re.match(r"^(git|hg|svn|bzr)\+", text))
