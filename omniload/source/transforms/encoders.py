"""Samples, and how text becomes them: documents as they are, conversations and preference pairs.

Of conversations and pairs there is a mask of what the assistant says. A pair is a prompt with its chosen answer, and
behind it the prompt with the rejected one::

    tokens        p p p c c c | p p p r r
    loss_mask     0 0 0 1 1 1 | 0 0 0 1 1
    rejected_at   6

Shape suffixes:
    N  records, each a sample or none      S  sides of pairs, twice as many: chosen and rejected in turns
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.ragged import Ragged, offsets_of
from omniload.mix.columns import LOSS_MASK, REJECTED_AT
from omniload.mix.schema.transforms import ChatTransform, MessageNames, PreferenceTransform
from omniload.source.tokenize import Tokenizer
from omniload.source.transforms.chat_template import ChatTemplate, Rendered, require_no_marks
from omniload.source.transforms.conversations import BadConversationError, named, with_tools

__all__ = ["ChatEncoder", "Encoder", "PlainEncoder", "PreferenceEncoder", "Samples", "pairs_of"]

_NOTHING = Rendered("", ())
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One sample a record; an empty one is none."""

    tokens: Ragged
    """Token ids (int32)."""
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name; an aligned one has the lengths of ``tokens``."""
    extents: Ragged | None = None
    """Of each encoded image of a record, in turns: its first token and the first behind it, with what stands around it,
    and how many images of the columns it is: itself, or its tiles (int32). ``None`` where there are no images."""
    bad_N: NDArray[np.bool_] | None = None
    """True where a record could not be made a sample, which is then empty; ``None`` where all could."""
    reason: str = ""
    """What is wrong with the first bad record."""


class Encoder(Protocol):
    """Turns the records of a source of text into samples."""

    def encode(self, texts: pa.Array) -> Samples:
        """Return the sample of each record, whatever others stand beside it."""
        ...

    def doubt(self, texts: pa.Array) -> str:  # noqa: ARG002 -- of most there is none
        """Say what seems not to be meant in the samples of these records; empty where nothing does."""
        return ""


class PlainEncoder(Encoder):
    """Tokenises a document as it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @override
    def encode(self, texts: pa.Array) -> Samples:
        return Samples(tokens=self._tokenizer.encode(texts))


class ChatEncoder(Encoder):
    """Renders conversations one by one and tokenises them together."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, chat: ChatTransform, key: str = ""
    ) -> None:
        """Take what the mix file says; ``key`` is that of the messages, where tools are read beside them."""
        self._template, self._tokenizer, self._names = template, tokenizer, chat.messages
        self._key, self._tools = key, chat.tools
        self.masks = chat.loss == "assistant"
        """Whether what the assistant says is told from the rest."""

    @override
    def encode(self, texts: pa.Array) -> Samples:
        records: Sequence[Any] = texts.to_pylist()
        rendered, reason = [], ""
        bad_N = np.zeros(len(records), np.bool_)
        for i, record in enumerate(records):
            try:
                rendered.append(self.rendered(record) if record else _NOTHING)
            except BadConversationError as error:
                bad_N[i] = True
                reason = reason or str(error)
                # It keeps its place among the others, and has no token.
                rendered.append(_NOTHING)
        tokens, mask = self._tokenizer.encode_spans(
            [each.text for each in rendered], [each.spans for each in rendered]
        )
        others: dict[str, Ragged] = {LOSS_MASK: mask} if self.masks else {}
        return Samples(
            tokens=tokens, others=others, bad_N=bad_N if bad_N.any() else None, reason=reason
        )

    @override
    def doubt(self, texts: pa.Array) -> str:
        for record in texts.to_pylist():
            arguments = [text for text in _texts_of_arguments(record) if _escaped(text) != text]
            with suppress(BadConversationError):  # told by whoever makes samples
                text = self.rendered(record).text if arguments else ""
                if any(_escaped(each) in text and each not in text for each in arguments):
                    return (
                        "its tool calls have their arguments as texts of JSON, which the template quotes once more: "
                        "make them objects, or name a template that writes a text of arguments as it is"
                    )
        return ""

    def rendered(
        self,
        record: str,
        placed: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    ) -> Rendered:
        """Return the text of a conversation; arguments and errors as of ``ChatTemplate.render``."""
        if self._tools is not None:
            record = with_tools(record, self._key, self._tools)
        return self._template.render(
            record, wants_spans=self.masks, names=self._names, placed=placed
        )


def _texts_of_arguments(record: str) -> Iterator[str]:
    """Give the arguments of tool calls in a conversation that are texts; nothing of what is none."""
    with suppress(ValueError, TypeError, AttributeError):
        value = orjson.loads(record)
        messages = value["messages"] if isinstance(value, dict) and "messages" in value else value
        for message in messages:
            for call in message.get("tool_calls") or ():
                arguments = call.get("function", call).get("arguments")
                if isinstance(arguments, str):
                    yield arguments


def _escaped(text: str) -> str:
    """Return a text as JSON writes it within quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class PreferenceEncoder(Encoder):
    """Renders both sides of each pair, and tokenises all of them together.

    Args:
        config: What the mix file says.
        chosen: Key of the chosen answer.
        template: For pairs of messages; ``None`` for texts.
        tokenizer: Tokenizer of the mix.
    """

    def __init__(
        self,
        config: PreferenceTransform,
        chosen: str,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
    ) -> None:
        self._config, self._chosen = config, chosen
        self._template, self._tokenizer = template, tokenizer

    @override
    def encode(self, texts: pa.Array) -> Samples:
        rendered: list[Rendered] = []
        reason = ""
        bad_N = np.zeros(len(texts), np.bool_)
        for i, record in enumerate(texts.to_pylist()):
            try:
                rendered += self.sides(record) if record else (_NOTHING, _NOTHING)
            except BadConversationError as error:
                bad_N[i] = True
                reason = reason or str(error)
                rendered += (_NOTHING, _NOTHING)
        tokens_S, mask_S = self._tokenizer.encode_spans(
            [each.text for each in rendered],
            [each.spans for each in rendered],
            # What a template writes is meant as special tokens; what stands in a text of somebody's is text.
            special=self._template is not None,
        )
        if self._template is None:
            tokens_S, mask_S = self._ended(tokens_S, mask_S)
        return pairs_of(tokens_S, mask_S, bad_N, reason)

    def sides(
        self,
        record: str,
        of_prompt: Callable[[Sequence[Mapping[str, Any]]], list[Any]] = list,
        of_answer: Callable[[Sequence[Mapping[str, Any]]], list[Any]] = list,
    ) -> tuple[Rendered, Rendered]:
        """Return the texts of a pair, with what is trained on.

        Args:
            record: JSON of an object with its keys.
            of_prompt: Makes of the messages of the prompt what the template is given.
            of_answer: Makes it of those of an answer.

        Raises:
            BadConversationError: It is no pair, or the template refuses it.
        """
        # It was written by us, of several keys of a record.
        found, config = orjson.loads(record), self._config
        if self._template is not None:
            require_no_marks(record, found)
        if self._template is None:
            assert config.prompt is not None, "the model has seen to it"
            prompt, *answers = (
                _text(found[key], key) for key in (config.prompt, self._chosen, config.rejected)
            )
            first, second = (
                Rendered(prompt + answer, ((len(prompt), len(prompt) + len(answer)),))
                for answer in answers
            )
            return first, second
        keys = self._chosen, config.rejected
        names = config.messages
        sides = [_messages(found[key], key, names) for key in keys]
        if config.prompt is not None:
            asked = _messages(found[config.prompt], config.prompt, names, role="user")
            self._require_answers(asked, sides)
        else:
            pairs = zip(*sides, strict=False)
            # What both sides begin with is what was asked.
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            asked, sides = sides[0][:alike], [side[alike:] for side in sides]
            if asked and not any(sides):
                raise BadConversationError(
                    f"{self._chosen} and {config.rejected} are alike to their end, a tie, which prefers nothing"
                )
        for key, side in zip(keys, sides, strict=True):
            # Two answers that are alike to their end leave nothing behind what they share.
            if not asked or not side:
                raise BadConversationError(
                    f"{key} has {len(side)} messages behind a prompt of {len(asked)}; a pair has a prompt and two "
                    "answers that differ"
                )
        asked = of_prompt(asked)
        first, second = (self._template.render_answer(asked, of_answer(side)) for side in sides)
        return first, second

    def _require_answers(self, asked: list[Any], sides: list[list[Any]]) -> None:
        """Refuse answers that hold the prompt once more, as sets write them that keep a text of it besides."""
        for key, side in zip((self._chosen, self._config.rejected), sides, strict=True):
            if asked and side and _said(side[0]) == _said(asked[0]):
                raise BadConversationError(
                    f"{key} begins with what {self._config.prompt} does: it is a whole conversation; write "
                    "prompt: null, for which what both begin with is the prompt"
                )

    def _ended(self, tokens_S: Ragged, mask_S: Ragged) -> tuple[Ragged, Ragged]:
        """Put the end of a document behind each side that is there."""
        end = self._tokenizer.end_of_document_id
        if end is None:
            return tokens_S, mask_S
        there_S = tokens_S.lengths_N > 0
        # ``insert`` takes places in what is there before; a side that is empty gets none.
        at = tokens_S.offsets[1:][there_S]
        offsets = tokens_S.offsets.copy()
        offsets[1:] += np.cumsum(there_S)
        return (
            Ragged(values_V=np.insert(tokens_S.values_V, at, np.int32(end)), offsets=offsets),
            Ragged(values_V=np.insert(mask_S.values_V, at, np.True_), offsets=offsets),
        )


def _said(message: Mapping[str, Any]) -> tuple[object, object]:
    return message.get("role"), message.get("content")


def _text(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadConversationError(f"{key} is {_shown(value)}, not a text that says something")
    return value


def _messages(
    value: object, key: str, names: MessageNames, *, role: str = "assistant"
) -> list[Any]:
    """Return the messages under a key, by the names that templates know.

    A message alone, or the text of one by ``role``, stands for a list of it.
    """
    if isinstance(value, str) and value:
        return [{"role": role, "content": value}]
    given = [value] if isinstance(value, dict) else value
    if not isinstance(given, list) or not all(
        isinstance(each, dict) and isinstance(each.get(names.role), str) for each in given
    ):
        raise BadConversationError(
            f"{key} is {_shown(value)}, not a list of messages with {names.role} and {names.content}"
        )
    try:
        return [named(i, message, names) for i, message in enumerate(given)]
    except BadConversationError as error:
        raise BadConversationError(f"{key}: {error}") from None


def _shown(value: object) -> str:
    return orjson.dumps(value).decode()[:_SHOWN]


def pairs_of(tokens_S: Ragged, mask_S: Ragged, bad_N: NDArray[np.bool_], reason: str) -> Samples:
    """Make a sample of every two sides; a pair of which a side trains on nothing is bad."""
    ends_S = tokens_S.offsets[1:]
    mask_V = mask_S.values_V.copy()
    # The first token of a side follows nothing: else the last one of the chosen side would predict it.
    mask_V[tokens_S.offsets[:-1][tokens_S.lengths_N > 0]] = False
    trained = offsets_of(mask_V)
    trained_S = trained[ends_S] - trained[tokens_S.offsets[:-1]]
    there_N = tokens_S.lengths_N[::2] > 0
    silent_N = there_N & ((trained_S[::2] == 0) | (trained_S[1::2] == 0))
    if silent_N.any():
        bad_N, there_N = bad_N | silent_N, there_N & ~silent_N
        reason = reason or "an answer has no token; both sides of a pair say something"
    sizes_N = np.diff(tokens_S.offsets[::2])
    # A pair is there whole or not at all.
    keeps_V = np.repeat(there_N, sizes_N)
    offsets = offsets_of(sizes_N * there_N)
    places = Ragged(
        values_V=tokens_S.lengths_N[::2][there_N].astype(np.int32),
        offsets=offsets_of(there_N),
    )
    return Samples(
        tokens=Ragged(values_V=tokens_S.values_V[keeps_V], offsets=offsets),
        others={
            LOSS_MASK: Ragged(values_V=mask_V[keeps_V], offsets=offsets),
            REJECTED_AT: places,
        },
        bad_N=bad_N if bad_N.any() else None,
        reason=reason,
    )
