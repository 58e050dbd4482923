"""How Hadoop's client runs in this process: settings it gets where the user says nothing.

libhdfs starts a Java machine inside the mount, and its first quarter of a gigabyte is what a
job waits for. Measured on a fresh one, 256 MiB by four threads (Hadoop 2.7.3, Java 17, two
cores): the serial collector and the first compiler alone took processor time of a write from
1.35 to 0.85 s and of a read from 0.8 to 0.7 s; CRC32 instead of CRC32C took them to 0.6 and
0.45 s. Java has CRC32 built in, while the client computes CRC32C in plain Java
unless it finds Hadoop's native library. Both detect the same faults, and a block says which
it has, so readers of either kind read either.
"""

import os
from urllib.parse import parse_qsl, urlencode, urlsplit

__all__ = ["set_jvm_options", "with_client_settings", "with_jvm_defaults"]

OPTIONS_VARIABLE = "LIBHDFS_OPTS"
CLIENT_SETTINGS = {"dfs.checksum.type": "CRC32"}
_COLLECTORS = ("Serial", "Parallel", "G1", "Z", "Shenandoah", "Epsilon", "ConcMarkSweep")
_COMPILERS = (
    "-Xint",
    "-Xcomp",
    "-XX:TieredStopAtLevel",
    "-XX:+TieredCompilation",
    "-XX:-TieredCompilation",
)


def with_jvm_defaults(options: str) -> str:
    """Add the collector and the compiler that start fast, unless ``options`` choose their own.

    Args:
        options: What ``LIBHDFS_OPTS`` holds: options of the Java machine, parted by spaces.
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


def with_client_settings(url: str) -> str:
    """Add to a URL's query the client settings that it does not name."""
    parts = urlsplit(url)
    named = parse_qsl(parts.query, keep_blank_values=True)
    missing = {k: v for k, v in CLIENT_SETTINGS.items() if k not in dict(named)}
    return parts._replace(query=urlencode([*named, *missing.items()])).geturl()
