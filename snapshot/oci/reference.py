"""References: the names by which people call images.

::

    registry.example:5000/team/torch:2.13@sha256:4f53...
    registry              repository tag  digest
"""

import re
from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from omniload.base.errors import ConfigError
from snapshot.oci.digest import check_digest

__all__ = ["Reference", "address_of", "check_tag"]

_MAX_NAME = 255
_HUB, _HUB_SERVER = "docker.io/", "registry-1.docker.io/"
_REGISTRY = re.compile(
    r"(?:\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?)(?::[0-9]{1,5})?\Z"
)
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*\Z")
_TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}\Z")


def check_tag(tag: str) -> str:
    """Return ``tag`` if it is valid.

    Raises:
        ValueError: It is not 1 to 128 letters, digits, ``.``, ``_`` and ``-``.
    """
    if _TAG.match(tag) is None:
        raise ValueError(
            f"tag {tag[:150]!r} is not 1 to 128 letters, digits, '.', '_' or '-', "
            "the first of them a letter, a digit or '_'"
        )
    return tag


def address_of(reference: str) -> str:
    """Return the address at which an engine's name of an image is served, as Docker's hub has another host name."""
    if reference.startswith(_HUB):
        return _HUB_SERVER + reference.removeprefix(_HUB)
    return reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An image of a registry, by tag, by digest, or by both; if both are given, the digest decides.

    Raises:
        ValueError: A part breaks the grammar of references.
    """

    registry: str
    """Host, with a port if it has one."""
    repository: str
    tag: str | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        if _REGISTRY.match(self.registry) is None:
            raise ValueError(f"registry {self.registry!r} is not HOST or HOST:PORT")
        if _REPOSITORY.match(self.repository) is None or len(self.repository) > _MAX_NAME:
            raise ValueError(
                f"repository {self.repository[:300]!r} is not lower-case words of letters and "
                f"digits, joined by '.', '_', '-' and '/', of {_MAX_NAME} characters at most"
            )
        if self.tag is None and self.digest is None:
            raise ValueError(f"{self.registry}/{self.repository} has neither tag nor digest")
        if self.tag is not None:
            check_tag(self.tag)
        if self.digest is not None:
            check_digest(self.digest)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a reference. Without tag and digest, the tag is ``latest``.

        Raises:
            ConfigError: The text is not a reference.
        """
        rest, at, digest = text.partition("@")
        head, slash, tail = rest.partition("/")
        # No default registry is assumed, because a short name that means different images in different places leads to
        # starts of the wrong image.
        if not slash or not ("." in head or ":" in head or head == "localhost"):
            raise ConfigError(
                f"reference {text!r} names no registry; write REGISTRY/REPOSITORY:TAG"
            )
        repository, colon, tag = tail.partition(":")
        if not colon and not at:
            tag = "latest"
        try:
            return cls(
                registry=head,
                repository=repository,
                tag=tag if colon or tag else None,
                digest=digest if at else None,
            )
        except ValueError as error:
            raise ConfigError(
                f"reference {text!r}: {error}; write REGISTRY/REPOSITORY:TAG"
            ) from error

    @property
    def name(self) -> str:
        """Name by which a store is asked: the digest if there is one, else the tag."""
        return self.digest or self.tag or ""

    @override
    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag is not None else ""
        digest = f"@{self.digest}" if self.digest is not None else ""
        return f"{self.registry}/{self.repository}{tag}{digest}"
