"""axolotl's training file: datasets of text, messages or pairs of answers, which are joined and shuffled.

::

    sequence_len: 4096
    micro_batch_size: 2
    gradient_accumulation_steps: 8
    datasets:
      - {path: data/notes.jsonl, type: completion, field: text}
      - {path: data/chats, ds_type: json, type: chat_template, field_messages: messages}
      - {path: data/asked.jsonl, type: alpaca}       # with rl: dpo, of pairs: type: chat_template.default
      - {path: data/made.parquet}                    # ids and labels

axolotl joins the datasets, so each is passed over once: ``stop: each_once``, with weights by size.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from omniload.base.state import JsonObject
from omniload.importing.fields import Fields
from omniload.importing.files import (
    ids_with_labels,
    mixed_over_shards,
    size_of,
    source_of_path,
    tokenizer_folder,
)
from omniload.importing.imported import Asked, Imported, new_name
from omniload.importing.tools import Tool, has_key

__all__ = ["TOOL"]

_TYPES = {"json": "jsonl", "parquet": "parquet", "arrow": "arrow", "csv": "csv", "text": "text"}
_OF_THE_TOKENIZER = "tokenizer_default"
_BY_HAND = "declare it by hand"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatForm:
    """Defaults of a type of conversations, for what its dataset does not say."""

    column: str
    role: str
    content: str
    names_template: str
    """Key with which a dataset names its template."""
    template: str


_CHATS = {
    "chat_template": _ChatForm(
        column="messages", role="role", content="content", names_template="chat_template", template=_OF_THE_TOKENIZER,
    ),
    "sharegpt": _ChatForm(
        column="conversations", role="from", content="value", names_template="conversation", template="vicuna_v1.1",
    ),
}  # fmt: skip
_ASKED = {
    "alpaca": (["instruction", "input"], "output"),
    "alpaca_chat.load_camel_ai": (["message_1"], "message_2"),
    "alpaca_chat.load_qa": (["question"], "answer"),
    "gpteacher": (["instruction", "input"], "response"),
    "oasst": (["INSTRUCTION"], "RESPONSE"),
    "summarizetldr": (["article"], "summary"),
}
"""Keys of prompt and answer, for types that put their own words around them."""
_PAIRS = {
    "argilla": "instruction", "icr": "input", "intel": "question", "prompt_pairs": "prompt", "argilla_chat": None,
    "ultra": None,
}  # fmt: skip
"""Key of the prompt, for types of pairs under chatml and llama3; without it, the answers are whole conversations."""
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
"""Roles that keep their names unless the file says otherwise."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""Further roles that axolotl knows if a dataset names no roles, whatever its type."""


def _read(document: object, asked: Asked) -> Imported:
    """Return the mix of the training file with the content ``document``."""
    found = Imported(base=Path.cwd(), stop="each_once", around="special and eos")
    top = Fields(document if isinstance(document, dict) else {}, "", asked.report)
    of_all = _of_all(top)
    found.row_tokens = top.take("sequence_len", int, 0) or None
    rows = top.take("micro_batch_size", int, 1)
    parts = top.take("gradient_accumulation_steps", int, 1)
    if found.row_tokens:
        found.micro_tokens = rows * found.row_tokens
        found.step_tokens = found.micro_tokens * parts
        asked.report.note(
            "gradient_accumulation_steps", "batch.tokens is of one rank: multiply it by your ranks"
        )
    found.tokenizer = _tokenizer(top, asked)
    found.end = (special := top.inner("special_tokens")).take("eos_token", str, "")
    special.note(dict.fromkeys(special.keys, "those of --tokenizer hold"))
    found.seed = max(top.take("seed", int, 42), 0)
    weights: dict[str, float] = {}
    for dataset in top.items("datasets"):
        name, source, size = _dataset(dataset, asked, found, of_all)
        found.sources[name], weights[name] = source, size
    if not weights:
        top.refuse("datasets", "names no dataset")
    found.stages.append((0, weights))
    _end(top, found, asked)
    if held := top.number("val_set_size"):
        if held < 1:
            found.splits["eval"] = held
            asked.report.note(
                "val_set_size",
                f"is the split eval: {held:g} of each dataset, by a hash of its content",
            )
        else:
            top.refuse("val_set_size", f"is {held:g}; a share below 1 is held out")
    if not top.take("sample_packing", bool, False):
        found.method = "none"
        asked.report.note(
            "sample_packing",
            "is off: each sample has a row of its own; pack.method best_fit fills rows",
        )
    _read_rest(top)
    if not top.take("shuffle_merged_datasets", bool, True):
        asked.report.note(
            "shuffle_merged_datasets",
            "is off: the trainer below axolotl draws at random all the same, and so do sources here",
        )
    top.note_unread()
    return found


def _tokenizer(top: Fields, asked: Asked) -> Path | None:
    """Return the folder of the tokenizer that axolotl uses, if it is on this machine."""
    model = top.take("base_model", str, "")
    model = top.take("base_model_config", str, "") or model
    return tokenizer_folder(top.take("tokenizer_config", str, "") or model, "base_model", asked)


def _end(top: Fields, found: Imported, asked: Asked) -> None:
    """Read when a run ends. By default, it passes over each dataset once."""
    epochs, steps = top.number("num_epochs"), top.number("max_steps", least=-1)
    # As in the trainer below axolotl, a number of steps takes precedence over epochs.
    if steps is not None and steps > 0:
        found.stop = "never"
        asked.report.note("max_steps", f"is {steps:g}, above num_epochs: train for so many steps")
    elif epochs == 0:
        top.refuse("num_epochs", "is 0; give more, or max_steps")
    elif epochs is not None and epochs != 1:
        found.epochs = epochs
        asked.report.note(
            "num_epochs",
            f"is {epochs:g}: mix.amounts goes through each dataset so often; mix plan says in how many steps",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfAll:
    """Settings of the file for all its datasets."""

    top: Fields
    template: str
    """Name of the template; empty if the file names none."""
    every_token: bool
    """Whether prompts are trained on too."""
    overlong: str
    """Treatment of a conversation that is longer than a row."""
    pairs: bool
    """Whether datasets contain preference pairs."""


def _of_all(top: Fields) -> _OfAll:
    overlong = top.take("excess_length_strategy", str, "drop")
    if overlong not in ("drop", "truncate"):
        top.refuse("excess_length_strategy", f"is {overlong!r}; drop and truncate are known")
    pairs = top.peek("rl") in ("dpo", "ipo")
    if pairs:
        top.note({"rl": "the loss is the trainer's; its pairs are samples"})
        if overlong != "drop":
            top.refuse("excess_length_strategy", f"is {overlong!r}, and a pair is never cut: drop")
    return _OfAll(
        top=top,
        pairs=pairs,
        template=top.take("chat_template", str, ""),
        every_token=top.take("train_on_inputs", bool, False),
        overlong=overlong,
    )


def _read_rest(top: Fields) -> None:
    """Refuse other keys that would change samples, and note keys that would not; the rest concerns the training."""
    top.refuse_if_set(
        {
            "pretraining_dataset": "datasets are known",
            "curriculum_sampling": "the order of a file is no curriculum",
            "rl": "pairs of dpo and ipo are known",
            "reward_model": f"pairs are a transform of type preference; {_BY_HAND}",
            "process_reward_model": "marks of steps are not known",
            "dataset_exact_deduplication": f"sources have dedupe: content; {_BY_HAND}",
            "default_system_message": "a template has its own; write it into the file of --template",
            "min_sample_len": f"a transform of type filter has min_tokens; {_BY_HAND}",
            "tokens": "the tokenizer of --tokenizer holds; add them to it",
            "added_tokens_overrides": "the tokenizer of --tokenizer holds; change them in it",
        }
    )
    top.note(
        {
            "test_datasets": "declare them as an evaluation mix",
            "chat_template_jinja": "read with chat_template",
            "group_by_length": "the order is another",
        }
    )


def _dataset(
    dataset: Fields, asked: Asked, found: Imported, of_all: _OfAll
) -> tuple[str, JsonObject, float]:
    """Return the name, the source and the size in bytes of a dataset."""
    path = dataset.need("path", str, "dataset")
    files = dataset.texts("data_files")
    name = new_name(dataset.take("name", str, "") or Path(path).stem, found.sources)
    wanted = files or [path]
    if not files and "://" not in path and not os.path.exists(path):  # noqa: PTH110 -- takes any text
        dataset.refuse(
            "path",
            f"{path!r} is no file or folder in {Path.cwd()}: paths start at the folder of the command, as axolotl "
            "has it, and datasets of the hub are downloaded first",
        )
    source = source_of_path(wanted[0], dataset, asked, key="path")
    if len(wanted) > 1:
        # All files get the type of the first; ``omniload mix check`` names a file of another type.
        source["path"] = [*wanted]
    kind = dataset.take("ds_type", str, "")
    if kind in _TYPES:
        source["type"] = _TYPES[kind]
    elif kind:
        dataset.refuse("ds_type", f"is {kind!r}; known are {', '.join(_TYPES)}")
    _read_form(dataset, source, asked, of_all)
    split = dataset.take("split", str, "train")
    if split != "train":
        dataset.refuse("split", f"is {split!r}: give the files of the split as data_files")
    dataset.note(
        {
            "trust_remote_code": "no code of a dataset runs",
            "preprocess_shards": "samples are made as they are read",
        }
    )
    dataset.end()
    # 1 instead of 0: the sizes of files on a store are unknown here, and a weight of 0 would leave them out.
    source = mixed_over_shards(source, asked)
    return name, source, max(size_of(wanted), 1.0)


def _read_form(dataset: Fields, source: JsonObject, asked: Asked, of_all: _OfAll) -> None:
    """Read the kind of the records: text, which is cut if it is too long, token ids, messages, or a pair of answers."""
    form = dataset.take("type", str, "")
    # The part after a colon is a style of the same words.
    asked_form = _ASKED.get(form.partition(":")[0])
    if of_all.pairs:
        _read_pairs(dataset, source, asked, of_all, form)
    elif not form:
        ids_with_labels(source, dataset, asked)
        source["overlong"] = of_all.overlong
    elif form == "completion":
        column = dataset.take("field", str, "text")
        # Files of plain text have no columns to name.
        if source["type"] != "text":
            source["text"] = column
    elif form in _CHATS:
        _read_chat(dataset, source, asked, of_all, _CHATS[form])
    elif asked_form is not None:
        keys, source["text"] = asked_form
        source["overlong"] = of_all.overlong
        made: JsonObject = {"type": "completion", "prompt": keys[0] if len(keys) == 1 else [*keys]}
        if dataset.take("train_on_inputs", bool, of_all.every_token):
            made["loss"] = "all"
        source["transforms"] = [made | _template(dataset, asked, form, "type")]
        said = "the template writes bos_token before a prompt and eos_token behind its answer, as there"
        if len(keys) > 1:
            said += f"; a blank line joins {' and '.join(keys)} to the prompt, which the template is given"
        asked.report.note(dataset.at("type"), f"is {form}: {said}")
    else:
        dataset.refuse(
            "type", f"is {form!r}; known are completion, {', '.join((*_CHATS, *_ASKED))}"
        )


def _read_pairs(
    dataset: Fields, source: JsonObject, asked: Asked, of_all: _OfAll, form: str
) -> None:
    """Read the keys of the prompt and the answers of a pair, and the template that turns them into text."""
    family, _, kind = form.partition(".")
    made: JsonObject = {"type": "preference"}
    if family == "chat_template" and kind in ("default", "argilla_chat"):
        messages = dataset.take("field_messages", str, "messages")
        prompt = messages if kind == "default" else None
        chosen, rejected = (
            dataset.take(f"field_{name}", str, name) for name in ("chosen", "rejected")
        )
        roles: JsonObject = {**_ROLES, **_given_roles(dataset)}
        made["messages"] = {**_keys(dataset, _CHATS[family]), "roles": roles}
        made |= _named_template(dataset, asked, of_all, family, _OF_THE_TOKENIZER)
    elif family in ("chatml", "llama3") and kind in _PAIRS:
        prompt, end = _PAIRS[kind], "_response" * (kind == "argilla")
        chosen, rejected = f"chosen{end}", f"rejected{end}"
        made |= _template(dataset, asked, form, "type")
        system = "a system text beside the prompt is not read: name its column under system"
        asked.report.note(dataset.at("type"), f"is {form}: {system}")
    else:
        dataset.refuse(
            "type",
            f"is {form!r}; of pairs are known chat_template.default and .argilla_chat, and behind chatml and llama3 "
            f"{', '.join(_PAIRS)}",
        )
        return
    source["text"], source["overlong"] = chosen, "drop"
    source["transforms"] = [{**made, "prompt": prompt, "rejected": rejected}]


def _read_chat(
    dataset: Fields, source: JsonObject, asked: Asked, of_all: _OfAll, form: _ChatForm
) -> None:
    """Read how a conversation becomes text, and which part of it is trained on."""
    source["text"] = dataset.take("field_messages", str, form.column)
    source["overlong"] = of_all.overlong
    tools = dataset.take("field_tools", str, "")
    beside = "a system text in a column beside them is not"
    beside += ": name its column" if tools else ", nor tools: name their columns"
    keys = f"under system{'' if tools else ' and tools'} of the transform"
    asked.report.note("field_messages", f"messages alone are read: {beside} {keys}")
    roles = _ROLES | (_given_roles(dataset) or _SHAREGPT_ROLES)
    template: JsonObject = {
        "type": "chat",
        "messages": {**_keys(dataset, form), "roles": {**roles}},
        **({"tools": tools} if tools else {}),
    }
    template |= _named_template(dataset, asked, of_all, form.names_template, form.template)
    ends = dataset.take("train_on_eos", str, "turn")
    if ends != "turn":
        why = "what the template has of a turn, its end too, is trained on"
        dataset.refuse("train_on_eos", f"is {ends!r}: {why}")
    trained = dataset.texts("roles_to_train")
    if dataset.take("train_on_inputs", bool, of_all.every_token) or trained == ["all"]:
        template["loss"] = "all"
    # A role may have its name in the data or its name in the template; both are accepted.
    elif not {roles.get(role, role) for role in trained} <= {"assistant"}:
        dataset.refuse("roles_to_train", f"is {trained}; assistant alone is trained on, or all")
    source["transforms"] = [template]


def _named_template(
    dataset: Fields, asked: Asked, of_all: _OfAll, key: str, usual: str
) -> JsonObject:
    """Return the template that a key of the dataset names, or otherwise the template of the file."""
    named = dataset.peek(key) is not None or key in asked.report.left_out
    if of_all.template and not named:
        return _template(of_all.top, asked, of_all.template, "chat_template")
    return _template(dataset, asked, dataset.take(key, str, usual), key)


def _template(dataset: Fields, asked: Asked, named: str, key: str) -> JsonObject:
    """Return the template of messages, if it is not the tokenizer's; the key ``type`` implies its own words."""
    given_up = "chat_template" if key == "type" else key
    if asked.template is not None:
        return {"template": asked.template}
    # A template that no key names is left out by the same option as one that a key names.
    if named != _OF_THE_TOKENIZER and given_up not in asked.report.left_out:
        dataset.refuse(
            key,
            f"is {named!r}, which axolotl keeps: write its words to a file, as a chat template, and give --template "
            f"FILE, or --leave-out {given_up} for that of --tokenizer",
        )
    return {}


def _keys(dataset: Fields, form: _ChatForm) -> dict[str, str]:
    """Return the keys of the messages for ``role`` and ``content``, in the form of the transform ``chat``."""
    mapping = dataset.inner("message_property_mappings")
    keys = {}
    for key, usual in (("role", form.role), ("content", form.content)):
        # The older of two ways to say it.
        found = dataset.take(f"message_field_{key}", str, usual)
        keys[key] = mapping.take(key, str, found)
    for key in mapping.keys:
        value = mapping.take(key, str, key)
        if value != key:
            mapping.refuse(key, f"is {value!r}; role and content alone may be called otherwise")
    return {key: name for key, name in keys.items() if name != key}


def _given_roles(dataset: Fields) -> dict[str, str]:
    """Return the template's name of each role of the messages, as far as the dataset gives it."""
    roles = dataset.inner("roles")
    given: dict[str, str] = {}
    for role in roles.keys:
        if role in ("input", "output"):
            roles.refuse(role, f"names no role of a template; {_BY_HAND}")
        given |= dict.fromkeys(roles.texts(role), role)
    return given


TOOL = Tool(read=_read, sign="a list of datasets", holds=has_key("datasets", "pretraining_dataset"))
