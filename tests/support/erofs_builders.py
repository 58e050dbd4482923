"""Layers whose files lie anywhere in a stream, for tests of EROFS images."""

import numpy as np
from hypothesis import strategies as st

from snapshot.image.entries import Entry, Extent
from snapshot.image.erofs_blobs import blob_layout
from snapshot.image.erofs_writer import plan_metadata, write_metadata
from snapshot.image.layer_index import BLOCK, LayerIndex
from snapshot.image.tree import merge
from snapshot.oci.digest import digest_of

__all__ = [
    "a_directory",
    "a_file",
    "a_stream",
    "an_index",
    "content_of",
    "filled",
    "layers_of_entries",
    "written",
]

names = st.text(
    st.characters(exclude_categories=(), exclude_characters="/\0"), min_size=1, max_size=40
).filter(
    lambda n: (
        n not in {".", ".."}
        and not n.startswith(".wh.")
        and len(n.encode("utf-8", "surrogatepass")) <= 255
        and not any("\ud800" <= c <= "\udfff" for c in n)
    )
)


def a_directory(path="", **changes):
    return Entry(path=path, kind="directory", **{"mode": 0o755} | changes)


def a_file(path, size, at=512, **changes):
    extents = (Extent(0, at, size),) if size else ()
    fields = {"mode": 0o644, "size_bytes": size, "extents": extents} | changes
    return Entry(path=path, kind="file", **fields)


def a_stream(size, seed=1):
    return np.random.default_rng(seed).bytes(size)


def an_index(entries, stream, block_bytes=5000):
    """An index of a layer that is not compressed, in blocks that fit no page."""
    blocks = []
    for at in range(0, len(stream), block_bytes):
        part = stream[at : at + block_bytes]
        digest = bytes.fromhex(digest_of(part).removeprefix("sha256:"))
        blocks.append((at, len(part), len(part), at, -1, 0, b"", digest))
    return LayerIndex(
        blob_digest=digest_of(stream),
        blob_bytes=len(stream),
        format="tar",
        stream_bytes=len(stream),
        diff_id=digest_of(stream),
        blocks_B=np.array(blocks, BLOCK),
        entries=tuple(entries),
    )


def content_of(entry, stream):
    """What a file holds, by the plainest way there is."""
    data = bytearray(entry.size_bytes)
    for extent in entry.extents:
        part = stream[extent.stream_offset : extent.stream_offset + extent.size_bytes]
        data[extent.file_offset : extent.file_offset + extent.size_bytes] = part
    return bytes(data)


def filled(layout, stream):
    """A blob, whole."""
    blob = bytearray(layout.size_bytes)
    for piece in layout.pieces(0, layout.size_bytes):
        part = stream[piece.stream_offset : piece.stream_offset + piece.size_bytes]
        blob[piece.offset : piece.offset + piece.size_bytes] = part
    return bytes(blob)


def written(layers):
    """Metadata of merged layers, the layouts, and which layers have a blob."""
    layouts = [blob_layout(entries) for entries in layers]
    tree = merge(layers)
    plan = plan_metadata(tree, layouts)
    return b"".join(write_metadata(plan, uuid=bytes(range(16)))), plan, tree


@st.composite
def _extents(draw, stream_bytes, max_file_bytes):
    """Pieces of a file, dense or with holes, and its size."""
    if draw(st.booleans()):
        size = draw(st.integers(0, min(max_file_bytes, stream_bytes)))
        at = draw(st.integers(0, stream_bytes - size))
        return size, ((Extent(0, at, size),) if size else ())
    pieces, end = [], 0
    for _ in range(draw(st.integers(0, 4))):
        start = end + draw(st.integers(0, max_file_bytes // 4))
        size = draw(st.integers(1, min(9000, stream_bytes)))
        pieces.append(Extent(start, draw(st.integers(0, stream_bytes - size)), size))
        end = start + size
    return end + draw(st.integers(0, 10000)), tuple(pieces)


@st.composite
def layers_of_entries(draw, *, stream_bytes, max_file_bytes=60000, max_entries=12, most_layers=3):
    """Layers of a random image, lowest first."""
    return [
        draw(_layer(stream_bytes, max_file_bytes, max_entries))
        for _ in range(draw(st.integers(1, most_layers)))
    ]


@st.composite
def _layer(draw, stream_bytes, max_file_bytes, max_entries):
    entries, folders, files = [a_directory()], [""], []
    for _ in range(draw(st.integers(0, max_entries))):
        above = draw(st.sampled_from(folders))
        name = draw(names)
        path = f"{above}/{name}" if above else name
        if any(entry.path == path for entry in entries):
            continue
        kind = draw(
            st.sampled_from(("file", "file", "directory", "symlink", "character", "fifo", "block"))
        )
        fields = {
            "mode": draw(st.integers(0, 0o7777)),
            "uid": draw(st.integers(0, (1 << 32) - 2)),
            "gid": draw(st.integers(0, (1 << 32) - 2)),
            "mtime_ns": draw(st.integers(-(10**18), 4 * 10**18)),
        }
        if kind == "file":
            if files and draw(st.integers(0, 4)) == 0:
                entries.append(
                    Entry(path=path, kind="hardlink", target=draw(st.sampled_from(files)))
                )
                continue
            fields["size_bytes"], fields["extents"] = draw(_extents(stream_bytes, max_file_bytes))
            fields["xattrs"] = draw(_xattrs)
            files.append(path)
        if kind == "symlink":
            fields["target"] = draw(
                st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
            )[:900]
        if kind in {"character", "block"}:
            fields["device"] = (draw(st.integers(0, 4095)), draw(st.integers(0, (1 << 20) - 1)))
        entries.append(Entry(path=path, kind=kind, **fields))
        if kind == "directory":
            folders.append(path)
    return entries


_xattrs = st.dictionaries(
    st.sampled_from(("user.a", "user.long." + "n" * 200, "trusted.overlay.x", "security.note")),
    st.binary(max_size=300),
    max_size=3,
).map(lambda found: tuple(sorted(found.items())))
