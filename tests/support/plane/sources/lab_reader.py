"""A user's own format, its reader, and a distribution that registers it.

A file is frames: the length of a text in four bytes, and the text.
"""

import struct
import sys
from pathlib import Path

from omniload.base.settings import registry

__all__ = ["READER", "install", "write_frames"]

READER = '''
import struct

import pyarrow as pa


class Frames:
    """Texts, each behind its length in four bytes; ``frames`` of them are a unit."""

    def __init__(self, *, frames: int = 256, as_ids: bool = False) -> None:
        self._frames, self._as_ids = frames, as_ids

    def units(self, file):
        size, at, begin, count = file.size(), 0, 0, 0
        while at < size:
            file.seek(at)
            (length,) = struct.unpack("<I", file.read(4))
            if at + 4 + length > size:
                raise ValueError(f"the frame at {at} has {length} bytes, {size - at - 4} are left")
            at, count = at + 4 + length, count + 1
            if count == self._frames or at == size:
                yield begin, at, count
                begin, count = at, 0

    def read(self, file, start, stop):
        file.seek(start)
        data, at, texts = file.read(stop - start), 0, []
        while at < len(data):
            (length,) = struct.unpack_from("<I", data, at)
            texts.append(data[at + 4 : at + 4 + length].decode())
            at += 4 + length
        if self._as_ids:
            ids = [[*text.encode(), 256] if text else [] for text in texts]
            return pa.array(ids, pa.list_(pa.int32()))
        return pa.array(texts, pa.string())
'''


def write_frames(path: Path, texts: list[str]) -> None:
    """Write a file of frames."""
    data = [text.encode() for text in texts]
    path.write_bytes(b"".join(struct.pack("<I", len(each)) + each for each in data))


def install(
    folder: Path, version: str = "1.0", *, name: str = "frames", code: str = READER
) -> None:
    """Install a distribution ``lab`` in a folder of ``sys.path``, replacing another version."""
    for old in folder.glob("lab-*.dist-info"):
        old.rename(folder / f"gone-{old.name}.txt")
    (folder / "lab_of_readers.py").write_text(code)
    meta = folder / f"lab-{version}.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lab\nVersion: {version}\n")
    lines = f"[omniload.readers]\n{name} = lab_of_readers:Frames\n"
    (meta / "entry_points.txt").write_text(lines)
    sys.modules.pop("lab_of_readers", None)
    sys.path_importer_cache.clear()
    registry.registered.cache_clear()
