"""Gzip as other programs write it: one way to compress a layer for each usual writer.

``layer_by_go.gz`` is ``mixed_tar()`` as written by Go's compress/gzip, the writer of containerd and BuildKit. Its
program::

    package main

    import ("compress/gzip"; "io"; "os")

    func main() {
        out := gzip.NewWriter(os.Stdout)
        io.Copy(out, os.Stdin)
        out.Close()
    }

``python -m tests.support.snapshot.gzip_writers | go run gz.go > tests/support/snapshot/layer_by_go.gz``
with Debian's Go 1.19.8.
"""

import gzip
import hashlib
import itertools
import subprocess
import sys
import zlib
from pathlib import Path

from tests.support.snapshot.image_builders import a_member, a_tar
from tests.support.snapshot.registries.registry import needs

__all__ = ["WRITERS", "mixed_files", "mixed_tar"]

BY_GO = Path(__file__).with_name("layer_by_go.gz")
STRATEGIES = {
    "default": zlib.Z_DEFAULT_STRATEGY,
    "filtered": zlib.Z_FILTERED,
    "huffman": zlib.Z_HUFFMAN_ONLY,
    "rle": zlib.Z_RLE,
    "fixed": zlib.Z_FIXED,
}


def _text(size):
    line = b"%d " + b"is the number of a line in a file that compresses well, as a source does " * 3
    return b"\n".join(line % number for number in range(size // (len(line) - 2)))


def mixed_files():
    """Return files by name; incompressible files lie between compressible ones, as in any image.

    Writers store incompressible bytes without compression, from a byte boundary on.
    """
    noise = hashlib.shake_256(b"noise").digest(60_000)
    return {
        "first": _text(1_500_000),
        "noise": noise[:40_000],
        "short": noise[40_000:45_000],
        "second": _text(1_300_000),
        "last": noise[45_000:],
    }


def mixed_tar():
    return a_tar(*(a_member(name, data) for name, data in mixed_files().items()))


def _by_zlib(level, strategy):
    def write(data):
        packer = zlib.compressobj(level, wbits=31, strategy=strategy)
        return packer.compress(data) + packer.flush()

    return write


def _by(*command):
    def write(data):
        needs(command[0])
        return subprocess.run(command, input=data, capture_output=True, check=True).stdout

    return write


def _with_a_full_header(data):
    """Compress with an extra field, a name, a comment and a checksum of the header (RFC 1952, section 2.3)."""
    header = b"\x1f\x8b\x08\x1e" + bytes(4) + b"\0\xff"
    header += b"\x04\0XX\0\0" + b"layer.tar\0" + "a comment é\0".encode("latin-1")
    header += (zlib.crc32(header) & 0xFFFF).to_bytes(2, "little")
    packer = zlib.compressobj(6, wbits=-15)
    trailer = zlib.crc32(data).to_bytes(4, "little") + len(data).to_bytes(4, "little")
    return header + packer.compress(data) + packer.flush() + trailer


def _in_members(data):
    """Compress into members of all sizes, as concatenated streams; some are empty."""
    cuts = [0, 1, 1, 700, 70_000, 71_000, 1_520_001, 1_530_000, len(data)]
    return b"".join(
        gzip.compress(data[start:end], level)
        for level, (start, end) in enumerate(itertools.pairwise(cuts), 1)
    )


def _flushed(data):
    """Compress like a writer that flushes: with empty stored blocks at any bit."""
    packer, out = zlib.compressobj(6, wbits=31), b""
    for at in range(0, len(data), 30_011):
        out += packer.compress(data[at : at + 30_011]) + packer.flush(zlib.Z_SYNC_FLUSH)
    return out + packer.flush()


WRITERS = {
    **{f"zlib {level}": _by_zlib(level, zlib.Z_DEFAULT_STRATEGY) for level in range(10)},
    **{f"zlib {name}": _by_zlib(6, strategy) for name, strategy in STRATEGIES.items()},
    **{f"gzip -{level}": _by("gzip", f"-{level}") for level in (1, 6, 9)},
    **{f"pigz -{level}": _by("pigz", "-p2", "-b128", f"-{level}") for level in (1, 6, 9)},
    "pigz -i": _by("pigz", "-p2", "-i"),
    "compress/gzip of Go": lambda _: BY_GO.read_bytes(),
    "full header": _with_a_full_header,
    "members": _in_members,
    "flushed": _flushed,
    "filled up by a tape": lambda data: gzip.compress(data) + bytes(10_240),
}
"""The compressors of layers, by the name of the writer."""


if __name__ == "__main__":
    sys.stdout.buffer.write(mixed_tar())
