"""An image with this Python and numpy for real engines, made from this machine's files without network."""

import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from functools import cache
from pathlib import Path

import numpy
import orjson

from snapshot.image.layer.convert import write_chunked
from snapshot.image.layer.tar import read_table
from snapshot.oci.digest import digest_of
from snapshot.oci.image import resolve
from snapshot.oci.manifest import MANIFEST_TYPE, Descriptor
from tests.support.snapshot.registries.contract import CONFIG, push

__all__ = ["PYTHON", "push_config", "push_python_image"]

PYTHON = str(Path(sys.executable).resolve())
"""Path of Python in the image, the same as here."""
SHELL, CAT = (Path(f"/bin/{name}").resolve() for name in ("sh", "cat"))
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "ensurepip", "tkinter")
LEFT_OUT += ("lib2to3", "__pycache__", "pydoc_data", "turtledemo", "f2py", "include", "distutils")
COLD = 6_000_000
"""Bytes of a file that no start reads."""


def push_python_image(store, tag):
    """Push an image of two zstd:chunked layers; the upper layer also deletes files of the lower one.

    ``/data/gone`` is deleted, ``/data/old`` is emptied and filled again, ``/data/kept`` stays unchanged.
    """
    return push_config(store, tag, [_layer(store, made) for made in _both()])


def push_config(store, tag, layers, **process):
    """Push an image of (descriptor, diff id) pairs; its process is as given, in Pascal case."""
    env = ["PATH=/usr/bin:/bin", "PYTHONPATH=/opt/site", "GREETING=hello"]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["/bin/sh"], "Env": env, "WorkingDir": "/data", **process},
        "rootfs": {"type": "layers", "diff_ids": [diff_id for _, diff_id in layers]},
    }
    value = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": _plain(push(store, orjson.dumps(config), CONFIG)),
        "layers": [_plain(layer) for layer, _ in layers],
    }
    store.push_manifest(orjson.dumps(value), MANIFEST_TYPE, tag)
    return resolve(store, tag)


def _lower():
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    tar = _Tar()
    for name in ("proc", "sys", "dev", "run", "usr/bin", "bin", "opt", "data", "data/old"):
        tar.directory(name)
    tar.directory("tmp", 0o1777)
    tar.directory("root", 0o700)
    tar.file("etc/passwd", b"root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/data:/bin/sh\n")
    tar.file("etc/group", b"root:x:0:\nann:x:1000:\n")
    for name in ("gone", "kept", "old/hidden"):
        tar.file(f"data/{name}", b"lower\n")
    tar.file("data/cold", numpy.random.default_rng(1).bytes(COLD))
    tar.copy(Path(PYTHON))
    tar.copy(SHELL, "bin/sh")
    tar.copy(CAT, "bin/cat")
    tar.link("usr/bin/python", PYTHON)
    extensions = tar.tree(stdlib, str(stdlib)[1:])
    tar.libraries([Path(PYTHON), SHELL, CAT, *extensions])
    return tar.done()


def _upper():
    package = Path(numpy.__file__).parent
    tar = _Tar()
    extensions = tar.tree(package, "opt/site/numpy")
    libraries = package.with_name("numpy.libs")
    if libraries.is_dir():
        extensions += tar.tree(libraries, "opt/site/numpy.libs")
    tar.libraries(extensions, without=str(package.parent))
    tar.file("data/.wh.gone", b"")
    tar.file("data/old/.wh..wh..opq", b"")
    tar.file("data/old/new", b"upper\n")
    tar.file("tmp/.keep", b"")
    return tar.done()


class _Tar:
    def __init__(self):
        self._out = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._out, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 -- closed when done
        self._known = set()

    def directory(self, name, mode=0o755):
        member = tarfile.TarInfo(name)
        member.type, member.mode = tarfile.DIRTYPE, mode
        self._tar.addfile(member)

    def file(self, name, data, mode=0o644):
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), mode
        self._tar.addfile(member, io.BytesIO(data))

    def link(self, name, target):
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(member)

    def copy(self, path, name=None):
        name = name or str(path)[1:]
        if name not in self._known:
            self._known.add(name)
            self.file(name, path.read_bytes(), 0o755)

    def tree(self, folder, name):
        """Copy the files of a folder; return the shared libraries among them."""
        found = []
        for at, folders, files in os.walk(folder):
            # These folders are not walked at all: a Python may have ten times as many files of packages as of its
            # own.
            folders[:] = sorted(each for each in folders if not _is_left_out(each))
            for path in (Path(at, each) for each in sorted(files) if not _is_left_out(each)):
                if path.suffix not in {".a", ".pyi", ".h", ".pyc"}:
                    self.copy(path, f"{name}/{path.relative_to(folder)}")
                if ".so" in path.name:
                    found.append(path)
        return found

    def libraries(self, programs, without="\0"):
        """Copy the libraries that programs are linked with, under the names that the linker looks for."""
        line = ["ldd", *map(str, programs)]
        told = subprocess.run(line, capture_output=True, text=True, check=False).stdout
        for name in sorted(set(re.findall(r"(?:=> |^\t)(/\S+) \(0x", told, re.MULTILINE))):
            if not name.startswith(without):
                self.copy(Path(name), str(Path(name))[1:])

    def done(self):
        self._tar.close()
        return self._out.getvalue()


def _is_left_out(name):
    return name in LEFT_OUT or name.startswith("config-")


@cache
def _both():
    """Make the two layers, once for all modules; return the bytes of each, its table and the digest of its archive."""
    return [_compressed(tar) for tar in (_lower(), _upper())]


def _compressed(tar):
    out = io.BytesIO()
    entries = list(read_table(io.BytesIO(tar), layer="made"))
    annotations = write_chunked(io.BytesIO(tar), entries, out, level=1)
    return out.getvalue(), annotations, digest_of(tar)


def _layer(store, made):
    blob, annotations, diff_id = made
    media_type = "application/vnd.oci.image.layer.v1.tar+zstd"
    push(store, blob, media_type)
    layer = Descriptor(
        media_type=media_type, digest=digest_of(blob), size=len(blob), annotations=annotations
    )
    return layer, diff_id


def _plain(layer):
    return layer.model_dump(by_alias=True, exclude_none=True)
