"""Where images stand in the text of a record: at markers of a text, and at parts of messages.

::

    [{"type": "image"}, {"type": "text", "text": "What is it?"}]     parts, as OpenAI and Hugging Face have them
    "<image> What is it?"                                            a text with a marker, as LLaVA has it

Either is given to the template of a model as it takes it, which writes a marker of its own for each image.
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
    """A record: its text, with a marker wherever an image belongs, and its images in the order of the markers."""

    sides: tuple[Rendered, ...]
    """One of a text or a conversation; of a pair two, each with a marker for every image."""
    images: Sequence[Bytes]
    """Encoded images."""


class Layout(Protocol):
    """Says of records where their images belong."""

    marker: str
    """What stands in a text for an image."""
    sides: int
    """Texts of a record."""
    masks: bool
    """Whether spans of a text are trained on; else all of it is."""
    ends: bool
    """Whether the tokenizer's end of a document is put behind a text."""
    special: bool
    """Whether special tokens in a text are meant: a template writes them."""
    tried: str
    """What a template writes of an image and a text, the marker among it; empty where there is none."""
    around: tuple[str, str] = ("", "")
    """What a processor writes into the text before and behind each image, which stays with it."""

    def of(self, record: str, images: Sequence[Bytes]) -> Laid:
        """Return a record with its images in their places.

        Raises:
            BadImageError: Images and places do not match.
            BadConversationError: It is no conversation, or the template refuses it.
        """
        ...


class TextLayout(Layout):
    """Texts that are documents, with markers in them; in one without, images come first."""

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
    """The places of one record's images, as its messages come to them."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._found: list[int | str | Bytes | None] = []
        """The image of each place: of its own, by its number, by a name, or the next one."""

    def __len__(self) -> int:
        return len(self._found)

    def of_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a template is given, its messages in the form that it takes."""
        for name in ("tools", "documents"):
            self._require_none(variables.get(name))
        return {**variables, "messages": self.of_messages(variables["messages"])}

    def of_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in the form that the template takes.

        Raises:
            BadConversationError: A text holds what the template writes for an image, or a part is none.
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
        """Return a text as parts: texts, and images where markers stand."""
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
        # A table has every field in every part, and a template asks which there are.
        given = {key: value for key, value in part.items() if value is not None}
        if given["type"] == "text":
            if not isinstance(given.get("text"), str):
                raise BadConversationError(f"{where} is {shown(part)}, not a text")
            # Nor has a text the empty image of a table: templates ask for that key too.
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
        # Alike for all, whatever a record calls them: it is what templates know.
        return {"type": "image"}

    def _require_none(self, value: object) -> None:
        """Refuse a text that would be taken for an image once it is rendered."""
        form = self._form
        for mark in {form.words.marker, form.placeholder}:
            if any(mark in text for text in texts_in(value)):
                raise BadConversationError(
                    f"a text of it holds {mark!r}, which the template writes for an image; take it out"
                )

    def images(self, beside: Sequence[Bytes]) -> list[Bytes]:
        """Return the image of each place.

        Args:
            beside: Images beside the messages, which parts name by their numbers, or take in order.

        Raises:
            BadImageError: Images and places do not match.
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
        """Refuse a text in which the template left an image out, or wrote another."""
        marker = self._form.words.marker
        written = rendered.text.count(marker)
        if written != len(self):
            raise BadImageError(
                f"the template writes {marker!r} {so_often(written)}, and its messages have "
                f"{counted(len(self), 'image')}"
            )


def _named(where: str, part: Mapping[str, object]) -> tuple[str | None, int | None]:
    """Return what names the image of a part: a URL or a name, and a number.

    Raises:
        BadConversationError: Something else does. Passed over, it would have images taken in another order.
    """
    url = number = None
    for key in _IMAGE_KEYS:
        held = part.get(key)
        if isinstance(held, dict):
            held = _held_in(held)
        # A bool is an int to Python, and no number of an image.
        if isinstance(held, int) and not isinstance(held, bool):
            number = held if number is None else number
        elif isinstance(held, str) and key != "index":
            url = held if url is None else url
        elif held is not None:
            wanted = "an integer" if key == "index" else "a data URL, a name or an integer"
            raise BadConversationError(f"{where}: its {key} is {shown(held)}, not {wanted}")
    return url, number


def _held_in(image: Mapping[str, object]) -> object:
    """Return the URL of an image of OpenAI's, or the bytes of Hugging Face's, as a URL, or their path."""
    return next((image[key] for key in ("url", "bytes", "path") if image.get(key)), None)


def _decoded(where: str, url: str) -> Bytes:
    head, found, data = url.partition(_BASE64)
    try:
        if not found:
            raise BadConversationError(
                f"{where}: its image is {head!r:.{_SHOWN}}, not of base64; write {_DATA}image/png{_BASE64}..."
            )
        return np.frombuffer(base64.b64decode(data, validate=True), np.uint8)
    except ValueError as error:  # of letters that are no ASCII Python has no error of its own
        raise BadConversationError(f"{where}: its image is not base64: {error}") from error


class ChatLayout(Layout):
    """Conversations with images, rendered one by one."""

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
    """Preference pairs whose prompt has images, which both sides show."""

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
    """Preference pairs of texts, with markers in the prompt; to one without, images come first, on both sides."""

    sides, masks, ends, special, tried = 2, True, True, False, ""

    def __init__(self, encoder: PreferenceEncoder, marker: str) -> None:
        self._encoder, self.marker = encoder, marker

    @override
    def of(self, record: str, images: Sequence[Bytes]) -> Laid:
        if not record:
            return Laid(sides=(Rendered("", ()),) * 2, images=())
        sides = self._encoder.sides(record)
        for side in sides:
            # Of a side its answer is trained on, and the prompt before it is all the rest.
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
