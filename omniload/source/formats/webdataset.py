"""WebDataset: tar archives in which neighbouring members with the same key form a sample.

The key of ``a/b.seg.json`` is ``a/b``, and its extension is ``seg.json``. An archive is walked once, header by header,
to find the starts of samples. A unit is a range of whole samples. A compressed archive is one unit.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import xxhash
from typing_extensions import override

from omniload.mix.schema.splits import key_of
from omniload.mix.sources import SAMPLE_NAME, WebDatasetSource
from omniload.source.files import ShardFile, reading
from omniload.source.formats.content import digest_of_ranges, even_ranges
from omniload.source.formats.format import (
    FIRST_RECORDS,
    IndexedFormat,
    Records,
    require_as_indexed,
)
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.beginnings import codec_of
from omniload.source.parsing.compressed import (
    chunks_of,
    doubt_of_wholes,
    range_of,
    require_held_whole,
    stream_of,
)
from omniload.source.parsing.conditions import keeps
from omniload.source.parsing.cutting import byte_ranges, cuts, whole_shard
from omniload.source.parsing.image_cells import encoded_columns
from omniload.source.parsing.json_lines.lines import (
    BadLineError,
    key_in,
    object_of,
    text_in,
    text_of,
)
from omniload.source.parsing.table_records import with_others
from omniload.source.parsing.tar_members import (
    Sample,
    TarBytes,
    held_by,
    members_of,
    samples_of,
)
from omniload.source.parsing.token_lists import RowsAt
from omniload.source.patterns import FileNames
from omniload.source.sample_tags import MemberTags, Tags

__all__ = ["FORMAT", "WebDatasetFormat"]

_WINDOW_BYTES = 64 << 10
_IMAGES = frozenset({"bmp", "gif", "jpeg", "jpg", "png", "webp"})
"""Extensions of members that are probably images, of the kinds that can be decoded."""


class WebDatasetFormat(IndexedFormat):
    """Reads the text in one member of each sample, and images in other members."""

    holds_text = True

    def __init__(
        self, files: Sequence[ShardFile], config: WebDatasetSource, cache: IndexCache | None = None
    ) -> None:
        self._files, self._config = files, config
        # Stored here, because a property of the configuration is computed at each access, and there are many samples.
        self._known_by = config.key_column
        self._object = config.text if config.text.endswith("json") else "json"
        """Extension of the member that is an object, for conditions, columns and keys of documents."""
        self._own = MemberTags(config.columns_read) if config.columns_read else None
        # The 3 excludes indexes of earlier releases, which ignored links, or all but hard links.
        kind = f"webdataset/3/{config.unit}"
        self._units = index_of(files, self._index, kind=kind, cache=cache, unpacks=True)
        self._keys: dict[int, list[str]] = {}
        """Keys of the units that were asked for, because an audit asks for each piece of a step."""

    @override
    def read_unit(self, unit: int) -> Records:
        path = self._files[self._units.shards_U[unit]].path
        return self._records(path, *self._samples_of(unit))

    @override
    def first_records_of(self, file: int) -> Records | None:
        # The smallest read is a unit, which includes images next to the text, and is the whole of a compressed archive.
        if self._config.images or codec_of(self._files[file]) is not None:
            return None
        units = np.flatnonzero((self._units.shards_U == file) & (self._units.rows_U > 0))
        return self.read_unit(int(units[0])).first(FIRST_RECORDS)

    def _samples_of(self, unit: int) -> tuple[memoryview, int, list[Sample]]:
        """Return the bytes of a unit, their start in the archive, and the samples in them."""
        place = self._units[unit]
        file, start, stop = self._files[place.shard], place.start, place.stop
        with reading(file, f"bytes {start} to {stop}"):
            data = memoryview(range_of(file, start, stop))
            archive = TarBytes(
                path=file.path, at=start, stop=stop, fetch=lambda a, b: data[a - start : b - start]
            )
            samples = list(samples_of(members_of(archive, ends=False)))
        require_as_indexed(file.path, place, len(samples), "samples")
        return data, start, samples

    @override
    def found_at(self, shard: str, unit: int, before: int, row: int) -> tuple[str, str]:
        if unit not in self._keys:
            self._keys[unit] = [sample.key for sample in self._headers_of(unit)]
        return shard, f"sample {self._keys[unit][row]!a}"

    def _headers_of(self, unit: int) -> list[Sample]:
        """Return the samples of a unit; only headers are read, unless the archive is compressed."""
        place = self._units[unit]
        file = self._files[place.shard]
        if codec_of(file) is not None:
            return self._samples_of(unit)[2]
        with reading(file, "headers"):
            samples = list(
                samples_of(members_of(_plain(file, place.start, place.stop), ends=False))
            )
        require_as_indexed(file.path, place, len(samples), "samples")
        return samples

    @override
    def doubt(self) -> str:
        units, first = self._units, self._units.first_filled()
        together = min(self._config.shuffle.units_together(len(units)), len(units))
        sizes_U = units.stops_U - units.starts_U
        if wholes := doubt_of_wholes(self._files, units.shards_U, sizes_U, together):
            return wholes
        if not self._config.images or first is None:
            return ""
        _, _, samples = self._samples_of(first)
        for sample in samples[:FIRST_RECORDS]:
            for name in sample.members:
                extension = name.rpartition(".")[2]
                if extension in _IMAGES.difference(self._config.images):
                    return (
                        f"images [{', '.join(self._config.images)}] leave out .{name} of sample {sample.key!a}: add "
                        f"{extension}, unless it is no part of the sample"
                    )
        return ""

    def _records(self, path: str, data: memoryview, start: int, samples: list[Sample]) -> Records:
        texts: list[str | None] = []
        images: list[list[memoryview]] = []
        keys_B, kept_B = np.zeros(len(samples), np.uint64), np.ones(len(samples), np.bool_)
        own, reason = self._own, ""
        tags = None if own is None else own.gathered()
        for i, sample in enumerate(samples):
            try:
                text, keys_B[i], kept_B[i], found = self._read(sample, data, start)
            except BadLineError as error:
                text, found = None, () if own is None else own.blank
                reason = reason or f"{path}: {_named(sample)}: {error}"
            texts.append(text)
            if tags is not None:
                tags.add(found)
            # Images of a record that is left out are not decoded.
            is_read = text is not None and kept_B[i]
            images.append(self._images(sample, data, start) if is_read else [])
        records = replace(
            Records.of_texts(texts, reason),
            keys_B=None if self._known_by is None else keys_B,
            kept_B=kept_B if self._config.where else None,
        )
        if tags is not None:
            at = RowsAt(where=path, names=list(map(_named, samples)))
            records = with_others(records, tags.columns(), at)
        if not self._config.images:
            return records
        return replace(records, others={**records.others, **encoded_columns(images)})

    def _images(self, sample: Sample, data: memoryview, start: int) -> list[memoryview]:
        """Return the members that are images, in the order of the archive."""
        return [
            data[member.start - start : member.stop - start]
            for extension, member in sample.members.items()
            if extension.rpartition(".")[2] in self._config.images
        ]

    def _read(self, sample: Sample, data: memoryview, start: int) -> tuple[str, int, bool, Tags]:
        """Return the text of a sample, the hash of its key, whether it is drawn from at all, and its tags.

        Raises:
            BadLineError: The sample has no text.
        """
        where, key, own, held = self._config.where, self._known_by, self._own, None
        asked = where or key not in {None, SAMPLE_NAME}
        if asked or (own is not None and own.wants_object):
            # If only columns need the object, and each of them has a default, the object may be missing.
            if asked or self._object in sample.members or not (own and own.may_lack_object):
                member = held_by(sample, self._object, data, start, {self._object})
                held = _object_in(member, self._object)
            if where and held is not None and not keeps(where, held):
                return "", 0, False, () if own is None else own.blank
        text = self._text(sample, data, start, held)
        tags: Tags = ()
        if own is not None:

            def member_of(extension: str) -> bytes | None:
                if extension not in sample.members:
                    return None
                return bytes(held_by(sample, extension, data, start, {extension}))

            tags = own.of(sample.key, member_of, held or {})
        if key is None:
            return text, 0, True, tags
        name = sample.key.encode() if held is None or key == SAMPLE_NAME else key_in(held, key)
        return text, key_of(name), True, tags

    def _text(
        self, sample: Sample, data: memoryview, start: int, held: dict[str, object] | None
    ) -> str:
        """Return the text of a sample; ``held`` is its object if the object was read."""
        config, extension = self._config, self._config.text
        member = held_by(sample, extension, data, start, {extension, *config.images})
        # This includes ``seg.json``, because everything after the first dot is the extension.
        if extension.endswith("json"):
            if held is None:
                return text_of(member, config.key, nested=config.is_nested).decode()
            return text_in(held, config.key, nested=config.is_nested).decode()
        try:
            return bytes(member).decode()
        except UnicodeDecodeError as error:
            raise BadLineError(f".{extension} is not UTF-8: {error}") from error

    def _index(self, file: ShardFile) -> FileUnits:
        digest = xxhash.xxh3_128()
        plain = codec_of(file) is None
        with reading(file, "headers"):
            archive = _plain(file, 0, file.size_bytes) if plain else _decompressed(file)
            # The digest covers every header as it is read, and a sample of the bodies.
            archive.digest = digest
            starts: list[int] = []
            stop = 0
            for sample in samples_of(members_of(archive)):
                starts.append(sample.start)
                # Members without a sample may follow the last sample, and are not read.
                stop = max(member.next for member in sample.members.values())
            if file.size_bytes:
                digest.update(digest_of_ranges(file, even_ranges(file.size_bytes)).encode())
        content = digest.hexdigest()
        if not plain:
            # From the first byte, even if something comes before the first sample.
            return whole_shard(file, 0, archive.stop, rows=len(starts), content=content)
        ends = np.array([*starts[1:], stop] if starts else [], np.int64)
        begin = starts[0] if starts else 0
        found = cuts([ends - begin], self._config.unit)
        return byte_ranges(file, begin, found, content=content)


def _named(sample: Sample) -> str:
    """Return the name of a sample, and its place."""
    return f"sample {sample.key!a} at byte {sample.start}"


def _object_in(member: memoryview, extension: str) -> dict[str, object]:
    """Return the object of a member; a blank member is an empty object.

    Raises:
        BadLineError: The member is not a JSON object; the message names the member.
    """
    try:
        found = object_of(member)
    except BadLineError as error:
        raise BadLineError(f".{extension} {error}") from error
    if found is None:
        raise BadLineError(f".{extension} is blank, not a JSON object")
    return found


def _plain(file: ShardFile, at: int, stop: int) -> TarBytes:
    """Return whole members of an archive. Headers are read through a window, which includes small members.

    Args:
        file: The archive.
        at: Start of the first member.
        stop: End of the last member.
    """
    window = [0, b""]

    def fetch(start: int, stop: int) -> bytes:
        at, held = window
        assert isinstance(at, int)
        assert isinstance(held, bytes)
        # Headers come in order, so data before the window is not needed again.
        if not at <= start <= stop <= at + len(held):
            at = start
            held = file.read_range(start, min(max(stop, start + _WINDOW_BYTES), file.size_bytes))
            window[:] = at, held
        return held[start - at : stop - at]

    return TarBytes(path=file.path, at=at, stop=stop, fetch=fetch)


def _decompressed(file: ShardFile) -> TarBytes:
    # Headers are spread over the archive, and each is only reached by decompressing everything before it.
    chunks: list[pa.Buffer] = []
    size = 0
    with stream_of(file) as stream:
        for chunk in chunks_of(stream, file):
            size += len(chunk)
            require_held_whole(file, size)
            chunks.append(chunk)
    held = memoryview(b"".join(chunks))
    return TarBytes(path=file.path, at=0, stop=size, fetch=lambda start, stop: held[start:stop])


FORMAT = FormatSpec(
    what="a tar archive",
    names=FileNames(suffixes=frozenset({".tar", ".tgz"}), compressed=True),
    open=WebDatasetFormat,
    magic=(((257, b"ustar"),),),
)
