"""Settings for Hadoop's client in this process, if neither the user nor the site sets them.

libhdfs starts a Java machine inside the mount, and a job waits for the first 256 MiB that go through
it. Measured with 256 MiB by four threads in a fresh Java machine (Hadoop 2.7.3, Java 17, two
cores): the serial collector and the first compiler alone reduced the processor time of a write from
1.35 to 0.85 s and of a read from 0.8 to 0.7 s. CRC32 instead of CRC32C reduced them to 0.6 and
0.45 s. Java has CRC32 built in, but the client computes CRC32C in plain Java
unless it finds Hadoop's native library. Both detect the same faults, and a block says which
it has, so readers of either kind can read both.

pyarrow asks for three copies of every block, whatever ``dfs.replication`` says. On a site that keeps
one or two copies, each written byte then costs the data nodes three. A replication of 0 leaves the number to the site.

A file is complete once a data node has reported its last block to the name node. The client asks right
after the last byte, usually a millisecond too early, and then sleeps 400 ms before it asks again. Clients
since 2.8 can be set to ask again sooner.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit
from xml.etree import ElementTree as Xml

from fusefs.stores.deadlines import request_limit_s
from omniload.base.log import get_logger

__all__ = [
    "client_version",
    "set_jvm_options",
    "site_settings",
    "with_client_settings",
    "with_jvm_defaults",
]

_LOG = get_logger(__name__)
OPTIONS_VARIABLE = "LIBHDFS_OPTS"
CHECKSUM = "dfs.checksum.type"
REPLICATION = "dfs.replication"
CLOSING = {
    "dfs.client.block.write.locateFollowingBlock.initial.delay.ms": "13",
    # The delay doubles: 13 s in all; the client's default, five times from 400 ms on, is 12 s.
    "dfs.client.block.write.locateFollowingBlock.retries": "10",
}
_CLOSING_SINCE = (2, 8)
_JAR = re.compile(r"hadoop-(?:client-api|client|hdfs-client|hdfs)-(\d+)\.(\d+)[^/]*\.jar")
_SITE_FILES = ("core-site.xml", "hdfs-site.xml")
_INCLUDE = "{http://www.w3.org/2001/XInclude}include"
_COLLECTORS = ("Serial", "Parallel", "G1", "Z", "Shenandoah", "Epsilon", "ConcMarkSweep")
_COMPILERS = (
    "-Xint",
    "-Xcomp",
    "-XX:TieredStopAtLevel",
    "-XX:+TieredCompilation",
    "-XX:-TieredCompilation",
)


def with_jvm_defaults(options: str) -> str:
    """Add the collector and the compiler that start fast, unless ``options`` choose others.

    Args:
        options: Value of ``LIBHDFS_OPTS``: options of the Java machine, separated by spaces.
    """
    given = options.split()
    if not any(o.startswith(tuple(f"-XX:+Use{name}" for name in _COLLECTORS)) for o in given):
        given.append("-XX:+UseSerialGC")
    if not any(o.startswith(_COMPILERS) for o in given):
        given.append("-XX:TieredStopAtLevel=1")
    return " ".join(given)


def set_jvm_options() -> None:
    """Set the options of the Java machine that the first connection of this process starts."""
    os.environ[OPTIONS_VARIABLE] = with_jvm_defaults(os.environ.get(OPTIONS_VARIABLE, ""))


def site_settings(classpath: str) -> frozenset[str] | None:
    """Return the names of the settings that a site's own files set.

    Args:
        classpath: Value of ``CLASSPATH``; the client reads ``core-site.xml`` and
            ``hdfs-site.xml`` in its folders.

    Returns:
        The names; None if a file cannot be evaluated here (it includes others, or is broken).
    """
    names: set[str] = set()
    for folder in filter(None, classpath.split(":")):
        for path in (Path(folder, name) for name in _SITE_FILES):
            try:
                names |= _names_in(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, Xml.ParseError, ValueError) as error:
                _LOG.info("%s: settings of the client stay the site's: %s", path, error)
                return None
    return frozenset(names)


def client_version(classpath: str) -> tuple[int, int] | None:
    """Return major and minor version of the client in a class path, by the names of its jars; None if they do not say.

    Args:
        classpath: Value of ``CLASSPATH``, jar by jar, as libhdfs wants it.
    """
    versions = {
        (int(found[1]), int(found[2]))
        for part in classpath.split(":")
        if (found := _JAR.fullmatch(part.rpartition("/")[2]))
    }
    # If there are several, the oldest may be the one that runs.
    return min(versions, default=None)


def with_client_settings(
    url: str,
    site: Iterable[str] | None = (),
    version: tuple[int, int] | None = None,
    give_up_after_s: float | None = None,
) -> str:
    """Add to a URL's query the client settings that neither it nor the site names.

    Args:
        url: URL of one of Hadoop's own schemes.
        site: Names of the settings in the site's files; None if they are not known.
        version: Version of the client; None if it is not known.
        give_up_after_s: Limit of a call; None keeps the client's own limit.
    """
    parts = urlsplit(url)
    named = parse_qsl(parts.query, keep_blank_values=True)
    given = dict(named)
    missing: dict[str, str] = {}
    if site is not None and CHECKSUM not in {*site, *given}:
        missing[CHECKSUM] = "CRC32"
    knows_closing = version is not None and version >= _CLOSING_SINCE
    if site is not None and knows_closing and CLOSING.keys().isdisjoint({*site, *given}):
        missing |= CLOSING
    if site is not None and give_up_after_s is not None:
        known = {*site, *given}
        missing |= {k: v for k, v in _impatience(give_up_after_s).items() if k not in known}
    if "replication" not in given:
        # The client opens files by the site's settings alone, so the value in the URL must be passed on.
        missing["replication"] = given.get(REPLICATION, "0")
    return parts._replace(query=urlencode([*named, *missing.items()])).geturl()


def _impatience(give_up_after_s: float) -> dict[str, str]:
    """Return settings by which one request ends in time: with the client's defaults it may wait up to 15 minutes."""
    limit_ms = str(round(request_limit_s(give_up_after_s) * 1000))
    return {
        "ipc.client.connect.timeout": limit_ms,
        "ipc.client.connect.max.retries": "1",
        "ipc.client.connect.max.retries.on.timeouts": "1",
        "ipc.client.rpc-timeout.ms": limit_ms,
        "dfs.client.socket-timeout": limit_ms,
        # A data node that pauses during a write costs the object, because a stream is never repeated.
        "dfs.datanode.socket.write.timeout": str(round(give_up_after_s * 1000)),
        "dfs.client.max.block.acquire.failures": "1",
        "dfs.client.retry.window.base": "500",
    }


def _names_in(path: Path) -> set[str]:
    root = Xml.fromstring(path.read_bytes())  # noqa: S314 -- the client of this process reads it too
    if root.find(f".//{_INCLUDE}") is not None:
        raise ValueError("it includes other files")
    return {name.strip() for p in root.iter("property") if (name := p.findtext("name"))}
