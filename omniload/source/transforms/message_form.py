"""The content of messages that a template takes, and the text around images that a processor adds.

The form is found by rendering a message of each form. The processor of a model replaces the template's marker of an
image by placeholders with words around them.
"""

from dataclasses import dataclass, replace
from typing import Self

from omniload.base.errors import ConfigError
from omniload.mix.schema.messages import ImageWords
from omniload.mix.schema.transforms import ImagesTransform
from omniload.source.transforms.chat_template import ChatTemplate, Rendered
from omniload.source.transforms.conversations import BadConversationError

__all__ = ["MessageForm"]

_SAID = "a word about it"
"""Text of the messages for trying a template."""
_SHOWN = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """The content of messages that a template takes, and what it writes for an image."""

    words: ImageWords
    """Marker that the template writes for an image, and the words that a processor puts around the placeholders."""
    placeholder: str
    """Text for the placeholders of an image in a text that is tokenised."""
    takes_parts: bool
    """Whether the content may be a list of parts; otherwise it is a text that contains the marker."""
    takes_texts: bool
    """Whether the content may be a text."""
    text_marker: str
    """Marker of an image in the text of a message of a record."""
    tried: str
    """Output of the template for an image and a text, as it is tokenised."""

    @classmethod
    def of(cls, template: ChatTemplate, words: ImageWords, images: ImagesTransform) -> Self:
        """Find the form that a template takes.

        Raises:
            ConfigError: The template does not write this marker for an image, or the placeholder would appear twice.
        """
        marker, around = words.marker, words.before + words.after
        # A named token, because a tokenizer separates it from the text around it; nothing is known of a number.
        named = around and isinstance(images.placeholder, str)
        placeholder = str(images.placeholder) if named else marker
        if placeholder in around:
            raise ConfigError(
                f"transforms: before and after of image hold {placeholder!r}, which stands for the placeholders "
                "between them; leave it out there, or name the token under placeholder of the images"
            )
        plain = _tried(template, _SAID)
        takes_texts = plain is not None and _SAID in plain
        parts = _tried(template, [{"type": "image"}, {"type": "text", "text": _SAID}])
        # A template for texts writes the list itself, as Python or JSON shows it, or fails.
        takes_parts = (
            parts is not None
            and parts.count(_SAID) == 1
            and not any(f"{q}type{q}" in parts for q in "'\"")
        )
        if takes_parts and parts is not None and parts.count(marker) != 1:
            raise ConfigError(
                f"{template.path}: image is {marker!r}, but for an image and a text the template writes "
                f"{parts!r:.{_SHOWN}}; set image of the transform to the text that the template writes for an image, "
                "once, or use a template of a model that takes images"
            )
        if not (takes_parts or takes_texts):
            raise ConfigError(
                f"{template.path}: the template writes nothing for a message of a user, whether its content is a text "
                "or a list of parts; name another under template of the transform"
            )
        form = cls(
            words=words,
            placeholder=placeholder,
            takes_parts=takes_parts,
            takes_texts=takes_texts,
            text_marker=images.marker,
            tried="",
        )
        tried = form.written_out(Rendered((parts if takes_parts else plain) or "", ()))
        return replace(form, tried=tried.text)

    def written_out(self, rendered: Rendered) -> Rendered:
        """Return the output of a template with a processor's words around each image; none of them is trained on.

        ::

            user: <start_of_image> see      ->      user: BEFORE placeholder AFTER see
        """
        words = self.words
        if not (words.before or words.after):
            return rendered
        image = words.before + self.placeholder + words.after
        at, moved, spans = 0, 0, list[tuple[int, int]]()
        pieces = rendered.text.split(words.marker)
        for piece in pieces:
            stop = at + len(piece)
            spans += (
                (max(first, at) + moved, min(end, stop) + moved)
                for first, end in rendered.spans
                if first < stop and end > at
            )
            at = stop + len(words.marker)
            moved += len(image) - len(words.marker)
        return Rendered(image.join(pieces), spans)


def _tried(template: ChatTemplate, content: object) -> str | None:
    try:
        return template.text_of([{"role": "user", "content": content}])
    except BadConversationError:
        return None
