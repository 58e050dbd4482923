"""The places of images in the text of a record: at markers in a text, or at parts of messages.

::

    [{"type": "image"}, {"type": "text", "text": "What is it?"}]     parts, as OpenAI and Hugging Face have them
    "<image> What is it?"                                            a text with a marker, as LLaVA has it

Both forms are converted to the form that the template of a model takes. The template writes its own marker for each
image.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.units import counted, so_often
from omniload.source.transforms.chat_template import Rendered
from omniload.source.transforms.conversations import BadConversationError, shown, texts_in
from omniload.source.transforms.encoders import ChatEncoder, PreferenceEncoder
from omniload.source.transforms.image_patches import BadImageError
from omniload.source.transforms.message_form import MessageForm

__all__ = ["ChatLayout", "Laid", "Layout", "PairLayout", "TextLayout", "TextPairLayout"]

_SHOWN = 120
_IN_ANSWER = "an answer of it has a place for an image; images of a pair stand in its prompt, which both answers are to"
_DATA, _BASE64 = "data:", ";base64,"
_IMAGE_TYPES = ("image", "image_url")
_IMAGE_KEYS = ("image_url", "image", "url", "index")
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """A record: its text, with a marker at the place of each image, and its images in the order of the markers."""

    sides: tuple[Rendered, ...]
    """One text for a document or a conversation; two for a pair, each with a marker for every image."""
    images: Sequence[Bytes]
    """Encoded images."""


class Layout(Protocol):
    """Finds the places of images in records."""

    marker: str
    """Marker of an image in a text."""
    sides: int
    """Texts per record."""
    masks: bool
    """Whether only spans of a text are trained on; otherwise the whole text is."""
    ends: bool
    """Whether the tokenizer's end of a document is added after a text."""
    special: bool
    """Whether special tokens in a text are intended, because a template writes them."""
    tried: str
    """Output of a template for an image and a text, including the marker; empty without a template."""
    around: tuple[str, str] = ("", "")
    """Text that a processor writes before and after each image, and that stays with the image."""

    def of(self, record: str, images: Sequence[Bytes]) -> Laid:
        """Return a record with its images at their places.

        Raises:
            BadImageError: The images do not match the places.
            BadConversationError: The record is no conversation, or the template refuses it.
        """
        ...


class TextLayout(Layout):
    """Texts that are documents, with markers; in a text without a marker, images come first."""

    sides, masks, ends, special, tried = 1, False, True, False, ""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    @override
    def of(self, record: str, images: Sequence[Bytes]) -> Laid:
        places = record.count(self.marker)
        _require_markers("text", self.marker, places, images)
        text = record if places else self.marker * len(images) + record
        return Laid(sides=(Rendered(text, ()),), images=images)


class _Places:
    """The places of the images of one record, in the order of its messages."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._found: list[int | str | Bytes | None] = []
        """Image of each place: the data itself, a number, a name, or ``None`` for the next image."""

    def __len__(self) -> int:
        return len(self._found)

    def of_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of a template, with messages in the form that it takes."""
        for name in ("tools", "documents"):
            self._require_none(variables.get(name))
        return {**variables, "messages": self.of_messages(variables["messages"])}

    def of_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in the form that the template takes.

        Raises:
            BadConversationError: A text contains the marker that the template writes for an image, or a part is
                invalid.
        """
        return [self._of_message(i, message) for i, message in enumerate(messages)]

    def _of_message(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            parts = self._cut(content)
        elif isinstance(content, list):
            parts = [self._part(f"message {number}: part {i}", p) for i, p in enumerate(content)]
        else:
            parts = None
        rest = {key: value for key, value in message.items() if key != "content"}
        self._require_none(rest)
        self._require_none(parts)
        if parts is None:
            return dict(message)
        form = self._form
        if not form.takes_parts:
            said = (part.get("text", form.words.marker) for part in parts)
            return {**message, "content": "".join(said)}
        is_text = isinstance(content, str) and all(part["type"] == "text" for part in parts)
        return {**message, "content": content if is_text and form.takes_texts else parts}

    def _cut(self, text: str) -> list[dict[str, Any]]:
        """Return a text as parts: texts, and images at the markers."""
        parts: list[dict[str, Any]] = []
        for i, piece in enumerate(text.split(self._form.text_marker)):
            if i:
                parts.append(self._image(None))
            if piece:
                parts.append({"type": "text", "text": piece})
        return parts

    def _part(self, where: str, part: object) -> dict[str, Any]:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise BadConversationError(f"{where} is {shown(part)}, not an object with a type")
        # In a table, every part has every field, but a template checks which fields exist.
        given = {key: value for key, value in part.items() if value is not None}
        if given["type"] == "text":
            if not isinstance(given.get("text"), str):
                raise BadConversationError(f"{where} is {shown(part)}, not a text")
            # The empty image field of a table is removed from a text, because templates check for this key too.
            return {key: value for key, value in given.items() if key not in _IMAGE_KEYS}
        if given["type"] not in _IMAGE_TYPES:
            raise BadConversationError(
                f"{where} is of type {given['type']!r:.{_SHOWN}}; texts and images are read"
            )
        url, number = _named(where, given)
        if url is not None and url.startswith(_DATA):
            return self._image(_decoded(where, url))
        return self._image(url if number is None else number)

    def _image(self, held: int | str | Bytes | None) -> dict[str, Any]:
        self._found.append(held)
        # The same for all records, because templates expect this form.
        return {"type": "image"}

    def _require_none(self, value: object) -> None:
        """Raise for a text that would be taken for an image after rendering."""
        form = self._form
        for mark in {form.words.marker, form.placeholder}:
            if any(mark in text for text in texts_in(value)):
                raise BadConversationError(
                    f"a text of it holds {mark!r}, which the template writes for an image; take it out"
                )

    def images(self, beside: Sequence[Bytes]) -> list[Bytes]:
        """Return the image of each place.

        Args:
            beside: Images next to the messages, which parts refer to by number, or take in order.

        Raises:
            BadImageError: The images do not match the places.
        """
        own = [found for found in self._found if isinstance(found, np.ndarray)]
        numbers = [found for found in self._found if isinstance(found, int)]
        others = len(self._found) - len(own)
        if numbers and len(numbers) < others:
            raise BadImageError(
                f"{len(numbers)} of its {others} places name an image by number; name all, or none"
            )
        if numbers and sorted(set(numbers)) != list(range(len(beside))):
            raise BadImageError(
                f"its places name the images {', '.join(map(str, numbers))!s:.{_SHOWN}}, counted from 0, and it has "
                f"{len(beside)}; name each that there is"
            )
        if not numbers and others != len(beside):
            named = next((f for f in self._found if isinstance(f, str)), None)
            said = (
                "" if named is None else f"; of {named!r:.{_SHOWN}} nothing is read: it is a name"
            )
            raise BadImageError(
                f"its messages have {counted(others, 'place')} for images, and it has "
                f"{counted(len(beside), 'image')} beside them{said}"
            )
        order = iter(numbers or range(others))
        return [
            found if isinstance(found, np.ndarray) else beside[next(order)] for found in self._found
        ]

    def require_written(self, rendered: Rendered) -> None:
        """Raise for a text in which the template left out an image, or wrote a further one."""
        marker = self._form.words.marker
        written = rendered.text.count(marker)
        if written != len(self):
            raise BadImageError(
                f"the template writes {marker!r} {so_often(written)}, and its messages have "
                f"{counted(len(self), 'image')}"
            )


def _named(where: str, part: Mapping[str, object]) -> tuple[str | None, int | None]:
    """Return what refers to the image of a part: a URL or a name, and a number.

    Raises:
        BadConversationError: Something else refers to it. Ignoring it would assign images in another order.
    """
    url = number = None
    for key in _IMAGE_KEYS:
        held = part.get(key)
        if isinstance(held, dict):
            held = _held_in(held)
        # A bool is an int in Python, but not the number of an image.
        if isinstance(held, int) and not isinstance(held, bool):
            number = held if number is None else number
        elif isinstance(held, str) and key != "index":
            url = held if url is None else url
        elif held is not None:
            wanted = "an integer" if key == "index" else "a data URL, a name or an integer"
            raise BadConversationError(f"{where}: its {key} is {shown(held)}, not {wanted}")
    return url, number


def _held_in(image: Mapping[str, object]) -> object:
    """Return the URL of an image in OpenAI's form, or the bytes, as a URL, or path of one in Hugging Face's form."""
    return next((image[key] for key in ("url", "bytes", "path") if image.get(key)), None)


def _decoded(where: str, url: str) -> Bytes:
    head, found, data = url.partition(_BASE64)
    try:
        if not found:
            raise BadConversationError(
                f"{where}: its image is {head!r:.{_SHOWN}}, not of base64; write {_DATA}image/png{_BASE64}..."
            )
        return np.frombuffer(base64.b64decode(data, validate=True), np.uint8)
    except ValueError as error:  # Python has no error of its own for non-ASCII letters
        raise BadConversationError(f"{where}: its image is not base64: {error}") from error


class ChatLayout(Layout):
    """Conversations with images, which are rendered one by one."""

    sides, ends, special = 1, False, True

    def __init__(self, encoder: ChatEncoder, form: MessageForm) -> None:
        self._encoder, self._form = encoder, form
        self.marker, self.masks, self.tried = form.placeholder, encoder.masks, form.tried
        self.around = form.words.before, form.words.after

    @override
    def of(self, record: str, images: Sequence[Bytes]) -> Laid:
        if not record:
            return Laid(sides=(Rendered("", ()),), images=())
        places = _Places(self._form)
        rendered = self._encoder.rendered(record, places.of_variables)
        placed = places.images(images)
        places.require_written(rendered)
        return Laid(sides=(self._form.written_out(rendered),), images=placed)


class PairLayout(Layout):
    """Preference pairs whose prompt has images, which both sides include."""

    sides, masks, ends, special = 2, True, False, True

    def __init__(self, encoder: PreferenceEncoder, form: MessageForm) -> None:
        self._encoder, self._form = encoder, form
        self.marker, self.tried = form.placeholder, form.tried
        self.around = form.words.before, form.words.after

    @override
    def of(self, record: str, images: Sequence[Bytes]) -> Laid:
        if not record:
            return Laid(sides=(Rendered("", ()),) * 2, images=())
        places = _Places(self._form)
        sides = self._encoder.sides(record, places.of_messages, self._of_answer)
        placed = places.images(images)
        for side in sides:
            places.require_written(side)
        return Laid(sides=tuple(map(self._form.written_out, sides)), images=placed)

    def _of_answer(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        places = _Places(self._form)
        made = places.of_messages(messages)
        if len(places):
            raise BadImageError(_IN_ANSWER)
        return made


class TextPairLayout(Layout):
    """Preference pairs of texts with markers in the prompt; without a marker, images come first, on both sides."""

    sides, masks, ends, special, tried = 2, True, True, False, ""

    def __init__(self, encoder: PreferenceEncoder, marker: str) -> None:
        self._encoder, self.marker = encoder, marker

    @override
    def of(self, record: str, images: Sequence[Bytes]) -> Laid:
        if not record:
            return Laid(sides=(Rendered("", ()),) * 2, images=())
        sides = self._encoder.sides(record)
        for side in sides:
            # The answer of a side is trained on, and the rest is the prompt before it.
            (first, stop), *_ = side.spans
            if self.marker in side.text[first:stop]:
                raise BadImageError(_IN_ANSWER)
            _require_markers("prompt", self.marker, side.text.count(self.marker), images)
        if self.marker in sides[0].text:
            return Laid(sides=sides, images=images)
        before = self.marker * len(images)
        moved = (
            Rendered(
                before + side.text, [(a + len(before), b + len(before)) for a, b in side.spans]
            )
            for side in sides
        )
        return Laid(sides=tuple(moved), images=images)


def _require_markers(what: str, marker: str, places: int, images: Sequence[Bytes]) -> None:
    if places not in (0, len(images)):
        raise BadImageError(
            f"its {what} holds {marker!r} {so_often(places)}, and it has {counted(len(images), 'image')}"
        )
