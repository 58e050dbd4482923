"""Samples, and the encoders that make them of text: documents, conversations, prompts with an answer, and pairs.

All but documents have a mask of the answer. A pair has a prompt with its chosen, then with its rejected answer::

    tokens        p p p c c c | p p p r r
    loss_mask     0 0 0 1 1 1 | 0 0 0 1 1
    rejected_at   6

Shape suffixes:
    N  records, each a sample or none
    S  prompts with an answer: one a record, or of pairs two, chosen and rejected in turns
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Protocol

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.ragged import Ragged, offsets_of
from omniload.mix.columns import LOSS_MASK, REJECTED_AT
from omniload.mix.schema.messages import ChatTransform, CompletionTransform, PreferenceTransform
from omniload.source.tokenize import Tokenizer, around_documents
from omniload.source.transforms.chat_template import ChatTemplate, Rendered, require_no_marks
from omniload.source.transforms.conversations import (
    BadConversationError,
    begun_by,
    doubt_of_text,
    messages_under,
    require_answer,
    system_in,
    text_under,
    variables_of,
    with_beside,
)

__all__ = [
    "ChatEncoder",
    "CompletionEncoder",
    "Encoder",
    "PlainEncoder",
    "PreferenceEncoder",
    "Samples",
    "pairs_of",
]

_NOTHING = Rendered("", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One sample per record; an empty sample counts as none."""

    tokens: Ragged
    """Token ids (int32)."""
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name; aligned columns have the lengths of ``tokens``."""
    extents: Ragged | None = None
    """Three numbers (int32) per encoded image of a record: its first token and the first token after it,
    both including the text around the image, and 1 or the number of its tiles; ``None`` without images."""
    bad_N: NDArray[np.bool_] | None = None
    """Whether a record could not be made into a sample, which is then empty, ``[N]``; ``None`` if all could."""
    reason: str = ""
    """Fault of the first bad record."""


class Encoder(Protocol):
    """Makes samples of the records of a text source."""

    def encode(self, texts: pa.Array) -> Samples:
        """Return the sample of each record, which does not depend on the other records."""
        ...

    def doubt(self, texts: pa.Array) -> str:  # noqa: ARG002 -- most have none
        """Describe what is probably unintended in the samples of these records; empty if there is nothing."""
        return ""


class PlainEncoder(Encoder):
    """Tokenises documents without changes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @override
    def encode(self, texts: pa.Array) -> Samples:
        return Samples(tokens=self._tokenizer.encode(texts))


class ChatEncoder(Encoder):
    """Renders conversations one by one, and tokenises them together."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, chat: ChatTransform, key: str = ""
    ) -> None:
        """Store the configuration; ``key`` is the key of the messages if further fields are read."""
        self._template, self._tokenizer, self._names = template, tokenizer, chat.messages
        self._key, self._tools, self._system = key, chat.tools, chat.system
        self._loss, self.masks = chat.loss, chat.loss != "all"
        """Whether the words of the assistant are masked separately."""

    @override
    def encode(self, texts: pa.Array) -> Samples:
        rendered, bad_N, reason = _rendered(texts, lambda record: (self.rendered(record),))
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
            with suppress(BadConversationError):  # reported when samples are made
                conversation, _ = self._with_beside(record)
                messages = variables_of(conversation, self._names)["messages"]
                if said := doubt_of_text(messages, self.rendered(record).text):
                    return said
        return ""

    def rendered(
        self,
        record: str,
        placed: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    ) -> Rendered:
        """Return the text of a conversation; arguments and errors as for ``ChatTemplate.render``."""
        record, system = self._with_beside(record)
        return self._template.render(
            record, loss=self._loss, names=self._names, placed=placed, system=system
        )

    def _with_beside(self, record: str) -> tuple[str, str]:
        if self._tools is None and self._system is None:
            return record, ""
        return with_beside(record, self._key, self._tools, self._system)


class PreferenceEncoder(Encoder):
    """Renders both sides of each preference pair, and tokenises all of them together.

    Args:
        config: The transform in the mix file.
        chosen: Key of the chosen answer.
        template: Template for pairs of messages; ``None`` for pairs of texts.
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
        rendered, bad_N, reason = _rendered(texts, self.sides, sides=2)
        tokens_S, mask_S = _tokens_of(rendered, self._template, self._tokenizer)
        return pairs_of(tokens_S, mask_S, bad_N, reason)

    def sides(
        self,
        record: str,
        of_prompt: Callable[[Sequence[Mapping[str, Any]]], list[Any]] = list,
        of_answer: Callable[[Sequence[Mapping[str, Any]]], list[Any]] = list,
    ) -> tuple[Rendered, Rendered]:
        """Return the texts of a pair, with the parts that are trained on.

        Args:
            record: JSON of an object with the keys of the pair.
            of_prompt: Converts the messages of the prompt to the form that the template takes.
            of_answer: Does the same for the messages of an answer.

        Raises:
            BadConversationError: The record is no pair, or the template refuses it.
        """
        # The record was written by omniload from several keys.
        found, config = orjson.loads(record), self._config
        if self._template is None:
            assert config.prompt is not None, "the model has seen to it"
            prompt, *answers = (
                text_under(key, found[key])
                for key in (config.prompt, self._chosen, config.rejected)
            )
            first, second = (_joined(prompt, answer) for answer in answers)
            return first, second
        require_no_marks(record, found)
        keys = self._chosen, config.rejected
        names = config.messages
        sides = [messages_under(key, found[key], names) for key in keys]
        if config.prompt is not None:
            asked = messages_under(config.prompt, found[config.prompt], names, role="user")
            remedy = "write prompt: null, for which what both begin with is the prompt"
            for key, side in zip(keys, sides, strict=True):
                require_answer(key, asked, side, by=config.prompt, remedy=remedy)
        else:
            pairs = zip(*sides, strict=False)
            # The common beginning of both sides is the prompt.
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            asked, sides = sides[0][:alike], [side[alike:] for side in sides]
            if asked and not any(sides):
                raise BadConversationError(
                    f"{self._chosen} and {config.rejected} are alike to their end, a tie, which prefers nothing"
                )
        for key, side in zip(keys, sides, strict=True):
            # If one answer is a beginning of the other, nothing is left of it after the common part.
            if not asked or not side:
                raise BadConversationError(
                    f"{key} has {len(side)} messages behind a prompt of {len(asked)}; a pair has a prompt and two "
                    "answers that differ"
                )
        asked = of_prompt(begun_by(system_in(found, config.system), asked))
        first, second = (self._template.render_answer(asked, of_answer(side)) for side in sides)
        return first, second


class CompletionEncoder(Encoder):
    """Renders each prompt with its answer, and tokenises all of them together.

    Args:
        config: The transform in the mix file.
        answer: Key of the answer.
        template: Template for messages; ``None`` for texts.
        tokenizer: Tokenizer of the mix.
    """

    def __init__(
        self,
        config: CompletionTransform,
        answer: str,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
    ) -> None:
        self._config, self._answer = config, answer
        self._template, self._tokenizer = template, tokenizer

    @override
    def encode(self, texts: pa.Array) -> Samples:
        rendered, bad_N, reason = _rendered(texts, lambda record: (self.rendered(record),))
        tokens, mask = _tokens_of(rendered, self._template, self._tokenizer)
        silent = "its answer has no token; use a template that writes it"
        made = _answered(tokens, mask, bad_N, reason or silent)
        return made if self._config.loss == "answer" else replace(made, others={})

    @override
    def doubt(self, texts: pa.Array) -> str:
        if self._template is not None or self._tokenizer.end_of_document_id is not None:
            return ""
        return (
            "no token ends its answers, so a model does not learn where to stop: name the one that ends a document "
            "under tokenizer.end_of_document"
        )

    def rendered(self, record: str) -> Rendered:
        """Return the text of a prompt with its answer, and the parts that are trained on.

        Args:
            record: JSON of an object with the keys of prompt and answer.

        Raises:
            BadConversationError: The prompt or the answer is empty, or the template refuses them.
        """
        found, key, config = orjson.loads(record), self._answer, self._config
        if self._template is None:
            prompt = self._asked(found)
            return _joined(prompt + config.between * bool(prompt), text_under(key, found[key]))
        require_no_marks(record, found)
        if isinstance(config.prompt, str):
            prompt = found[config.prompt]
            asked = messages_under(config.prompt, prompt, config.messages, role="user")
        else:
            asked = [{"role": "user", "content": self._asked(found)}]
        answer = messages_under(key, found[key], config.messages)
        by = " and ".join(config.asks)
        require_answer(key, asked, answer, by=by, remedy="use the transform chat")
        if not asked or not answer:
            raise BadConversationError(
                f"{key} has {len(answer)} messages behind a prompt of {len(asked)}; both say something"
            )
        asked = begun_by(system_in(found, config.system), asked)
        return self._template.render_answer(asked, answer)

    def _asked(self, found: Mapping[str, object]) -> str:
        """Return the text of a prompt. If the prompt has several parts, some of them may be missing."""
        config = self._config
        if isinstance(config.prompt, str):
            return text_under(config.prompt, found[config.prompt])
        said = [key for key in config.prompt if found[key] not in (None, "")]
        if not said and not (config.form == "text" and config.loss == "all"):
            raise BadConversationError(
                f"{' and '.join(config.prompt)} say nothing; a prompt has a text under one of them"
            )
        return "\n\n".join(text_under(key, found[key]) for key in said)


def _rendered(
    texts: pa.Array, render: Callable[[str], Sequence[Rendered]], sides: int = 1
) -> tuple[list[Rendered], NDArray[np.bool_], str]:
    """Render records; a record that cannot be rendered keeps its place, and has no token.

    Returns:
        The texts of each record, ``sides`` for each; which records are bad, ``[N]``; and the fault of the first of
        them.
    """
    rendered, reason = list[Rendered](), ""
    bad_N = np.zeros(len(texts), np.bool_)
    for i, record in enumerate(texts.to_pylist()):
        try:
            rendered += render(record) if record else (_NOTHING,) * sides
        except BadConversationError as error:
            bad_N[i] = True
            reason = reason or str(error)
            rendered += (_NOTHING,) * sides
    return rendered, bad_N, reason


def _joined(prompt: str, answer: str) -> Rendered:
    return Rendered(prompt + answer, ((len(prompt), len(prompt) + len(answer)),))


def _tokens_of(
    rendered_S: Sequence[Rendered], template: ChatTemplate | None, tokenizer: Tokenizer
) -> tuple[Ragged, Ragged]:
    """Return token ids and masks of prompts with an answer; texts get the tokens that begin and end a document."""
    tokens_S, mask_S = tokenizer.encode_spans(
        [each.text for each in rendered_S],
        [each.spans for each in rendered_S],
        # A template writes special tokens on purpose; in a user's text, the same characters are text.
        special=template is not None,
    )
    if template is not None:
        return tokens_S, mask_S
    begin, end = tokenizer.begin_of_document_id, tokenizer.end_of_document_id
    # The end of a document is trained on, its beginning is not.
    marks = (None if begin is None else 0, None if end is None else 1)
    return around_documents(tokens_S, begin, end), around_documents(mask_S, *marks)


def pairs_of(tokens_S: Ragged, mask_S: Ragged, bad_N: NDArray[np.bool_], reason: str) -> Samples:
    """Make a sample of every two sides; a pair is bad if one of its sides trains on nothing."""
    silent = "an answer has no token; both sides of a pair say something"
    made = _answered(tokens_S, mask_S, bad_N, reason or silent, sides=2)
    there_N = made.tokens.lengths_N > 0
    places = Ragged(
        values_V=tokens_S.lengths_N[::2][there_N].astype(np.int32),
        offsets=offsets_of(there_N),
    )
    return replace(made, others={**made.others, REJECTED_AT: places})


def _answered(
    tokens_S: Ragged, mask_S: Ragged, bad_N: NDArray[np.bool_], reason: str, *, sides: int = 1
) -> Samples:
    """Make a sample of every ``sides`` prompts with an answer; it is bad if one of the answers trains on nothing.

    Args:
        tokens_S: Token ids of the prompts with an answer.
        mask_S: Mask of the tokens that are trained on.
        bad_N: Records that are bad already.
        reason: Fault of the first of these, if there are any, else the message for an answer without a token.
        sides: Prompts with an answer per record.
    """
    firsts_S, seen = tokens_S.offsets[:-1], offsets_of(mask_S.values_V)
    # A span is marked up to the token in which its last character begins, but further tokens may hold the rest of it.
    mask_V = seen[1:] > np.repeat(seen[firsts_S], tokens_S.lengths_N)
    # The first token of a side has no predecessor; otherwise the last token of the side before it would predict it.
    mask_V[firsts_S[tokens_S.lengths_N > 0]] = False
    trained = offsets_of(mask_V)
    trained_NS = (trained[tokens_S.offsets[1:]] - trained[firsts_S]).reshape(-1, sides)
    there_N = tokens_S.lengths_N[::sides] > 0
    silent_N = there_N & (trained_NS == 0).any(axis=1)
    bad_N, there_N = bad_N | silent_N, there_N & ~silent_N
    sizes_N = np.diff(tokens_S.offsets[::sides])
    # A pair is kept completely or not at all.
    keeps_V = np.repeat(there_N, sizes_N)
    offsets = offsets_of(sizes_N * there_N)
    return Samples(
        tokens=Ragged(values_V=tokens_S.values_V[keeps_V], offsets=offsets),
        others={LOSS_MASK: Ragged(values_V=mask_V[keeps_V], offsets=offsets)},
        bad_N=bad_N if bad_N.any() else None,
        reason=reason if bad_N.any() else "",
    )
