"""Conversations to tokens with a mask of what the assistant says."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from typing_extensions import override

from omniload.base.ragged import Ragged
from omniload.mix.columns import LOSS_MASK
from omniload.source.tokenize import Tokenizer
from omniload.source.transforms.samples import Encoder, Samples
from omniload.source.transforms.template import BadConversationError, ChatTemplate, Rendered

__all__ = ["ChatEncoder"]


class ChatEncoder(Encoder):
    """Renders conversations one by one and tokenises them together."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, loss: Literal["assistant", "all"]
    ) -> None:
        self._template, self._tokenizer, self._masks = template, tokenizer, loss == "assistant"

    @override
    def encode(self, texts: pa.Array) -> Samples:
        records: Sequence[Any] = texts.to_pylist()
        rendered, reason = [], ""
        bad_N = np.zeros(len(records), np.bool_)
        for i, record in enumerate(records):
            try:
                rendered.append(self._template.render(record, wants_spans=self._masks))
            except BadConversationError as error:
                bad_N[i] = True
                reason = reason or str(error)
                rendered.append(Rendered("", ()))
        tokens, mask = self._tokenizer.encode_spans(
            [each.text for each in rendered], [each.spans for each in rendered]
        )
        others: dict[str, Ragged] = {LOSS_MASK: mask} if self._masks else {}
        return Samples(
            tokens=tokens, others=others, bad_N=bad_N if bad_N.any() else None, reason=reason
        )
