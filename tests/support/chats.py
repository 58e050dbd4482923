"""Conversations, templates of three styles, and a tokenizer whose special tokens they use."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["CHATML", "MARKED", "conversations", "write_model"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template without generation blocks."""
MARKED = (
    "{{ bos_token }}{%- if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template with generation blocks."""

_WORDS = (
    "the answer is that fields hold no water",
    "zażółć",
    "漢字 🙂",
    "and",
    "{{ braces }}",
    "stay",
    "here",
)
_SPECIAL = ["<|im_start|>", "<|im_end|>", "<bos>", "<eos>"]


def conversations(count: int, turns: int = 3) -> list[list[dict[str, str]]]:
    """Return conversations that differ in every turn."""
    found = []
    for i in range(count):
        messages = [{"role": "system", "content": f"be brief {i}"}] if i % 2 else []
        for turn in range(1 + (i + turns) % turns):
            words = _WORDS[(i + turn) % 5 :]
            messages.append({"role": "user", "content": f"{i}.{turn} " + " ".join(words)})
            messages.append({"role": "assistant", "content": " ".join(reversed(words)) + "\n"})
        found.append(messages)
    return found


def write_model(folder: Path, template: str) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` of a byte-level BPE into ``folder``."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=_SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator([json.dumps(conversations(20), ensure_ascii=False)], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": "<eos>"},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
