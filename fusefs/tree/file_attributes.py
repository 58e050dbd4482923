"""Attributes of the file or directory at a path, kept in a manifest or in the directory itself."""

import errno
from dataclasses import replace

from fusefs.format.attributes import Attributes
from fusefs.format.manifest import Manifest
from fusefs.tree.namespace import OpenVersion, StripedFiles
from fusefs.tree.open_versions import MOST_VERSIONS

__all__ = ["set_attributes", "xattrs_at"]


def xattrs_at(files: StripedFiles, path: str) -> dict[str, bytes]:
    """Return the extended attributes of a file or directory."""
    path = files.visible(path)
    info, manifest = files.catalog.current(path)
    kept = files.directories.of(path) if info.kind == "directory" else manifest
    return dict(kept.xattrs) if kept is not None else {}


def set_attributes(files: StripedFiles, path: str, attributes: Attributes) -> None:
    """Set those attributes of a path that are not None; a plain file gets a manifest.

    Raises:
        OSError: ``ENOSPC``: they do not fit a header; ``EBUSY``: others replace the
            file again and again.
    """
    path = files.visible(path)
    for _ in range(MOST_VERSIONS):
        if _set_on_this_version(files, path, attributes):
            return
    raise OSError(errno.EBUSY, f"replaced {MOST_VERSIONS} times meanwhile; try again", path)


def _set_on_this_version(files: StripedFiles, path: str, attributes: Attributes) -> bool:
    """Set attributes of the version at a path; return False if it was replaced before they could show."""
    try:
        opened = files.open(path)
    except IsADirectoryError:
        files.directories.set(path, attributes, files.store.stat(path))
        return True
    with opened as file:
        known = file.manifest
        made = known if known is not None else _manifest_from_plain(files, path, file)
        # Put attributes of this version over this version only; a version that another mount publishes keeps its
        # content.
        changed = replace(made, **attributes.given)
        if files.publisher.replace(path, changed, file.info.entry, was=known):
            return True
    if known is None:
        # The manifest may be there nevertheless, if the answer of a successful call was lost.
        files.publisher.remove_replaced(path, [made])
    return False


def _manifest_from_plain(files: StripedFiles, path: str, file: OpenVersion) -> Manifest:
    size, mtime_ns = file.reader.size_bytes, file.info.mtime_ns
    if size <= files.config.plain_limit:
        return Manifest(mtime_ns=mtime_ns, inline=bytes(file.reader.read(0, size)))
    content = files.writers.copying(path, file.reader).finish()
    assert not isinstance(content, bytes), "larger than plain_limit, so striped"
    return Manifest(mtime_ns=mtime_ns, segments=content)
