"""Conversations, templates of several styles, and a tokenizer whose special tokens they use."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = [
    "CHATML",
    "GEMMA",
    "LLAVA",
    "MARKED",
    "QWEN",
    "QWEN_MARKED",
    "SMOLVLM",
    "conversations",
    "write_model",
]

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

QWEN = (
    "{% set image_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}"
    "Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of Qwen2-VL, without videos: content is a text or a list of parts."""
QWEN_MARKED = QWEN.replace(
    "\n{% if message['content'] is string %}",
    "\n{% if message['role'] == 'assistant' %}{% generation %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}{{ content['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endgeneration %}{% elif message['content'] is string %}",
)
"""The same with generation blocks."""
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{% generation %}"
    "{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""The template of LLaVA 1.5: content is always a list of parts, and images come first."""

GEMMA = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' }}"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}{{ '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""The template of Gemma 3: each image has one token, which the processor replaces."""
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The template of SmolVLM: content is always a list of parts."""

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


def write_model(folder: Path, template: str, special: Sequence[str] = (), text: str = "") -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` of a byte-level BPE into ``folder``.

    Args:
        folder: Folder to write to; made if it is missing.
        template: The chat template.
        special: Special tokens in addition to those of the text templates.
        text: Text whose letters the tokenizer learns to join, in addition to the words of conversations.
    """
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*_SPECIAL, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learnt = [json.dumps(conversations(20), ensure_ascii=False), *([text] if text else [])]
    library.train_from_iterator(learnt, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": "<eos>"},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
