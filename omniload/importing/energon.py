"""Megatron-Energon's metadataset, version 2: a tree of blends, whose leaves are folders of tar shards.

::

    __module__: megatron.energon
    __class__: MetadatasetV2
    splits:
      train:
        blend:
          - {weight: 5, path: ./web}
          - {weight: 2, path: ./more.yaml}     # another metadataset: weights multiply

A leaf has a folder ``.nv-meta``: ``dataset.yaml`` gives the member for each field of a sample, ``split.yaml`` the
shards of the split, and ``.info.json`` (formerly ``.info.yaml``) the number of samples of each shard. Nothing that
these files name is imported.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from omniload.base.config import read_text
from omniload.base.errors import OmniloadError
from omniload.base.reading import read_small_file
from omniload.base.state import Json, JsonObject
from omniload.importing.documents import parsed
from omniload.importing.fields import Fields, is_count
from omniload.importing.imported import Asked, Imported, new_name
from omniload.importing.tools import Tool, has_key
from omniload.source.braces import expanded

__all__ = ["TOOL"]

_MOST_FILES = 1_000
"""Largest number of metadatasets that are read for one file."""
_DEEPEST = 64
"""Largest depth of blends and files within each other; the walk is recursive, and Python allows a thousand calls."""
_MOST_INFO_BYTES = 64 << 20
_TEXT_FIELDS = ("text", "caption", "texts")
"""Fields of Energon's sample types that contain text."""
_IMAGE_FIELDS = ("image", "images")
"""Fields of Energon's sample types that contain images."""


def _read(document: object, asked: Asked) -> Imported:
    """Return the training split of the metadataset with the content ``document``."""
    found = Imported(base=asked.file.resolve().parent, level="sample")
    asked.report.note(
        "",
        "rows are packed, as by a task encoder that packs; pack.method none gives each sample a row",
    )
    reader = _Reader(asked, found)
    reader.metadataset(document, "train", _Branch(files=(asked.file.resolve(),)))
    found.stages.append((0, reader.weights))
    if not found.sources:
        asked.report.refuse("splits.train", "holds no dataset")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """The current place in the tree."""

    files: tuple[Path, ...]
    """The metadataset that is read, preceded by those that lead to it."""
    weight: float = 1.0
    """Share of all samples."""
    tags: Mapping[str, str] = field(default_factory=dict)
    depth: int = 0
    """Number of blends and files around it."""

    def part(self, share: float) -> Self:
        """Return a branch with a share of this one."""
        return replace(self, weight=self.weight * share, depth=self.depth + 1)

    def into(self, file: Path) -> Self:
        """Return the branch of a metadataset that this branch's file names."""
        return replace(self, files=(*self.files, file), depth=self.depth + 1)


class _Reader:
    """Walks the tree and collects its leaves."""

    def __init__(self, asked: Asked, found: Imported) -> None:
        self._asked, self._found = asked, found
        self._report = asked.report
        self._files = 0
        self.weights: dict[str, float] = {}

    def metadataset(self, document: object, part: str, at: _Branch) -> None:
        """Read the split ``part`` of one file."""
        *around, file = at.files
        where = str(file) if around else ""
        # Only the files around it are checked, because two blends may name one file side by side.
        if file in around:
            self._report.refuse(where, f"is part of itself, by {around[-1]}")
            return
        # Counted over the whole tree: if each file names two others, the number doubles at every level.
        self._files += 1
        if self._files > _MOST_FILES:
            self._report.refuse(
                where, f"is one of more than {_MOST_FILES} metadatasets that the file names"
            )
            return
        top = Fields(document if isinstance(document, dict) else {}, where, self._report)
        kind = top.take("__class__", str, "")
        if kind != "MetadatasetV2":
            top.refuse("__class__", f"is {kind!r}; MetadatasetV2 is known")
        top.take("__module__", str, "")
        splits = top.inner("splits")
        split = splits.inner(part)
        for other in splits.keys:
            # Taken whatever the value is, because keys that are left at the end are refused as unknown.
            splits.take(other, object, None)
            self._report.note(splits.at(other), "is another split: declare it as an evaluation mix")
        top.end()
        self._node(split, at)

    def _node(self, node: Fields, at: _Branch) -> None:
        """Read a blend, or a reference to a dataset."""
        if at.depth > _DEEPEST:
            node.refuse("path", f"lies deeper than {_DEEPEST} blends and files; name it further up")
            return
        if node.peek("join") and not {"path", "blend", "blend_epochized"} & {*node.keys}:
            node.refuse(
                "join",
                "samples of several datasets are not joined, and nothing else is in this entry: take the entry out of "
                "the file, or name a dataset in its place",
            )
            return
        node.refuse_if_set(
            {
                "join": "samples of several datasets are not joined",
                "joiner": "samples of several datasets are not joined",
                "subset": "a part of a dataset is not declared",
                "aux": "samples have no further files",
            }
        )
        if node.peek("blend") is not None:
            entries = [(entry, entry.number("weight")) for entry in node.items("blend")]
            # Not divided by 0 if all are 0; weights of which none is above 0 are refused together with the mix.
            total = sum(1.0 if share is None else share for _, share in entries) or 1.0
            for entry, share in entries:
                self._node(entry, at.part((1.0 if share is None else share) / total))
        elif node.peek("blend_epochized") is not None:
            self._epochs(node, at)
        elif "path" in node.keys:
            self._reference(node, at)
        else:
            node.refuse("path", "is missing, and there is no blend")
        node.end()

    def _epochs(self, node: Fields, at: _Branch) -> None:
        """Read a blend by repetitions: a dataset's share is the number of its samples in an epoch."""
        entries = [(entry, entry.number("repetitions")) for entry in node.items("blend_epochized")]
        sizes = [
            (1.0 if times is None else times) * self._samples(entry, at.files[-1].parent)
            for entry, times in entries
        ]
        total = sum(sizes) or 1.0
        for (entry, _), size in zip(entries, sizes, strict=True):
            self._node(entry, at.part(size / total))

    def _samples(self, entry: Fields, beside: Path) -> float:
        """Return the number of samples of a leaf, in which the share of an epoch is counted."""
        if "path" not in entry.keys:
            entry.refuse("repetitions", "count the samples of a dataset, and here are several")
            return 1.0
        folder = beside / str(entry.peek("path"))
        counts, why = _counts(folder / ".nv-meta")
        if why is None:
            part = str(entry.peek("split_part") or "train")
            try:
                named = {s for pattern in _shards(folder, part)[0] for s in expanded(pattern)}
            except ValueError as error:
                entry.refuse("path", f"{folder}/.nv-meta/split.yaml: {error}")
                return 1.0
            return sum(float(n) for name, n in counts.items() if name in named and is_count(n))
        entry.refuse("repetitions", f"count samples, and {why}; run beside the data")
        return 1.0

    def _reference(self, node: Fields, at: _Branch) -> None:
        """Read a reference to another metadataset or to a folder of shards."""
        path = node.need("path", str, ".")
        part = node.take("split_part", str, "train")
        flavors = node.inner("subflavors")
        # Energon accepts any key, while the key of a tag must be a valid name here.
        own = {new_name(key, ()): str(flavors.take(key, object, None)) for key in flavors.keys}
        at = replace(at, tags={**at.tags, **own})
        node.note({"shuffle_over_epochs_multiplier": "an epoch is shuffled by itself"})
        for key in ("dataset_config", "split_config"):
            name = key.replace("_config", ".yaml")
            if (other := node.take(key, str, name)) != name:
                node.refuse(key, f"is {other!r}: {name} of .nv-meta is read")
        if "://" in path or "\x00" in path:
            node.refuse(
                "path",
                f"{path!r}: what is in .nv-meta of a store cannot be read here; import beside a copy",
            )
            return
        try:
            target = (at.files[-1].parent / path).resolve()
        # Circular links raise up to Python 3.12; and JSON can contain texts that no path can, such as half a surrogate
        # pair.
        except (RuntimeError, ValueError) as error:
            node.refuse("path", f"{path!r}: {error}")
            return
        if target.suffix in (".yaml", ".yml"):
            try:
                document = parsed(read_text(target), str(target))
            except OmniloadError as error:
                node.refuse("path", str(error))
                return
            self.metadataset(document, part, at.into(target))
            return
        self._leaf(node, target, part, at)

    def _leaf(self, node: Fields, folder: Path, part: str, at: _Branch) -> None:
        """Read a folder of shards, or a file of JSON lines, which has no splits and whose keys no file describes."""
        if folder.suffix == ".jsonl":
            if self._asked.text is None:
                node.refuse(
                    "path", f"{folder}: its lines do not say where the text is: give --text KEY"
                )
            key = self._asked.text or "text"
            self._add(folder.stem, {"type": "jsonl", "path": str(folder), "text": key}, at)
            return
        members = self._members_of(node, folder)
        if members is None:
            return
        shards, why = _shards(folder, part)
        if why is not None:
            node.refuse("path", why)
        paths: list[Json] = [str(folder / shard) for shard in shards]
        self._add(folder.name, {"type": "webdataset", "path": paths, **members}, at)

    def _add(self, wanted: str, source: JsonObject, at: _Branch) -> None:
        """Add a source, under the name ``wanted`` if it is free."""
        if at.tags:
            source["tags"] = dict(at.tags)
        # A folder that the tree names twice is one source, and its weights are added.
        same = (name for name, known in self._found.sources.items() if known == source)
        if (name := next(same, None)) is None:
            name = new_name(wanted, self._found.sources)
            self._found.sources[name] = source
        self.weights[name] = self.weights.get(name, 0.0) + at.weight

    def _members_of(self, node: Fields, folder: Path) -> JsonObject | None:
        """Return the keys of a source that give the places of text and images in a sample."""
        if self._asked.text is not None:
            return {"text": self._asked.text}
        file = folder / ".nv-meta" / "dataset.yaml"
        try:
            settings = parsed(read_text(file), str(file))
        except OmniloadError as error:
            node.refuse("path", f"{error}; or give --text EXTENSION")
            return None
        fields = settings.get("field_map") if isinstance(settings, dict) else None
        fields = fields if isinstance(fields, dict) else {}
        name = next((name for name in _TEXT_FIELDS if name in fields), None)
        if name is None:
            node.refuse(
                "path",
                f"{file}: its field_map {fields!r:.100} holds no text; give --text EXTENSION",
            )
            return None
        # json[caption] is the key caption in the member json of a sample.
        member, _, inner = str(fields[name]).partition("[")
        text: JsonObject = {"text": member, "key": inner.rstrip("]")} if inner else {"text": member}
        return text | self._images_of(
            node, file, {str(n): v for n, v in fields.items() if n != name}
        )

    def _images_of(self, node: Fields, file: Path, fields: Mapping[str, object]) -> JsonObject:
        """Return the keys of a source that turn its images into patches; refuse other contents of a sample."""
        images: list[Json] = []
        for name, member in sorted(fields.items()):
            if name in self._report.left_out:
                self._report.note(f"{file}: field_map.{name}", "was left out, as asked")
            elif name not in _IMAGE_FIELDS:
                said = (
                    f"{file}: {name} of a sample is not read; --leave-out {name} goes on without it"
                )
                node.refuse("path", said)
            elif self._asked.placeholder is None:
                said = (
                    f"{file}: {name} holds images: give --placeholder TOKEN, which stands for their embeddings, or "
                    f"--leave-out {name} for the text alone"
                )
                node.refuse("path", said)
            else:
                # Alternative members, of which each sample has one, are written like jpg;png.
                images += [each.strip() for each in str(member).split(";")]
        if not images:
            return {}
        self._report.note(
            "",
            "images become patches of 14 pixels, a token each: set patch and merge to those of the encoder",
        )
        placeholder = self._asked.placeholder
        return {"images": images, "transforms": [{"type": "images", "placeholder": placeholder}]}


def _counts(folder: Path) -> tuple[dict[object, object], str | None]:
    """Return the samples of each shard, and why they are unknown; from JSON, or from the YAML of an older Energon."""
    kinds = [".info.json", ".info.yaml"]
    # By os.path, which accepts any text, while Path raises if a text is longer than a path can be.
    file = next((folder / kind for kind in kinds if os.path.isfile(folder / kind)), None)  # noqa: PTH113
    if file is None:
        return {}, f"neither {' nor '.join(kinds)} of {folder} is here"
    try:
        if file.suffix == ".json":
            content: object = json.loads(
                read_small_file(file, most_bytes=_MOST_INFO_BYTES, what="counts of shards")
            )
        else:
            content = parsed(read_text(file), str(file))
    except (OmniloadError, ValueError, RecursionError) as error:
        return {}, f"{file} cannot be read ({error!s:.200})"
    counts = content.get("shard_counts") if isinstance(content, dict) else None
    return (counts, None) if isinstance(counts, dict) else ({}, f"{file} holds no shard_counts")


def _shards(folder: Path, part: str) -> tuple[list[str], str | None]:
    """Return the shards of a split, as patterns within the folder, and what cannot be declared about them."""
    file = folder / ".nv-meta" / "split.yaml"
    try:
        settings = parsed(read_text(file), str(file))
    except OmniloadError as error:
        return [], str(error)
    fields: dict[object, object] = settings if isinstance(settings, dict) else {}
    parts, excluded = fields.get("split_parts"), fields.get("exclude") or []
    named = parts.get(part) if isinstance(parts, dict) else None
    if not isinstance(named, list) or not named:
        return [], f"{file}: names no shard of the split {part!r}"
    shards, dropped = (
        [str(shard) for shard in named],
        {str(shard) for shard in excluded if shard} if isinstance(excluded, list) else set(),
    )
    # A split may only name files in its folder; other files would be read without the user having named them.
    if outside := [shard for shard in shards if ".." in Path(shard).parts or shard.startswith("/")]:
        return [], f"{file}: {outside[0]!r} is outside the folder"
    if unknown := sorted(dropped - set(shards)):
        return (
            [],
            f"{file}: excludes {unknown[0]!r}, no shard that it names one by one; samples are not left out",
        )
    return [shard for shard in shards if shard not in dropped], None


TOOL = Tool(
    read=_read,
    sign="splits",
    holds=has_key("splits"),
    no_state="a state of its loader is a pickle for every rank, which is never loaded, and holds places of its "
    "workers in their slices of shards and keys of samples in their shuffle buffers",
)
