"""axolotl's training file: datasets that are joined and shuffled, of text or of conversations.

::

    sequence_len: 4096
    micro_batch_size: 2
    gradient_accumulation_steps: 8
    datasets:
      - {path: data/notes.jsonl, type: completion, field: text}
      - {path: data/chats, ds_type: json, type: chat_template, field_messages: messages}

Datasets are joined there, so each goes through once: ``stop: each_once``, with weights by size.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from omniload.base.state import JsonObject
from omniload.importing.fields import Fields
from omniload.importing.files import mixed_over_shards, source_of_path
from omniload.importing.imported import Asked, Imported, new_name
from omniload.importing.tools import Tool, has_key

__all__ = ["TOOL"]

_TYPES = {"json": "jsonl", "parquet": "parquet", "arrow": "arrow", "csv": "csv", "text": "text"}
_OF_THE_TOKENIZER = "tokenizer_default"
_BY_HAND = "declare it by hand"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatForm:
    """What a type of conversations is where its dataset does not say otherwise."""

    column: str
    role: str
    content: str
    names_template: str
    """Key of a dataset that names its template."""
    template: str


_CHATS = {
    "chat_template": _ChatForm(
        column="messages",
        role="role",
        content="content",
        names_template="chat_template",
        template=_OF_THE_TOKENIZER,
    ),
    "sharegpt": _ChatForm(
        column="conversations",
        role="from",
        content="value",
        names_template="conversation",
        template="vicuna_v1.1",
    ),
}
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
"""Roles that stay as they are unless the file says otherwise."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""What axolotl knows beside them where a dataset names no roles, whatever its type."""


def _read(document: object, asked: Asked) -> Imported:
    """Return the mix of the training file whose content is ``document``."""
    found = Imported(base=Path.cwd(), stop="each_once")
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
    """Return the folder whose tokenizer axolotl takes; one of the hub, or with no ``tokenizer.json``, is noted."""
    model = top.take("base_model", str, "")
    model = top.take("base_model_config", str, "") or model
    named = top.take("tokenizer_config", str, "") or model
    if not named or (Path(named) / "tokenizer.json").is_file():
        return Path(named) if named else None
    asked.report.note(
        "base_model",
        f"the tokenizer is that of {named!r}, whose tokenizer.json is not here: --tokenizer FOLDER stands for it",
    )
    return None


def _end(top: Fields, found: Imported, asked: Asked) -> None:
    """Read when a run ends. Without a word of it, it goes through each dataset once."""
    epochs, steps = top.number("num_epochs"), top.number("max_steps", least=-1)
    # As the trainer below axolotl has it: steps that are said stand above epochs.
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
    """What the file says of all its datasets."""

    template: str
    """Empty where it names none."""
    every_token: bool
    """Whether prompts are trained on too."""
    overlong: str
    """What becomes of a conversation that is longer than a row."""


def _of_all(top: Fields) -> _OfAll:
    overlong = top.take("excess_length_strategy", str, "drop")
    if overlong not in ("drop", "truncate"):
        top.refuse("excess_length_strategy", f"is {overlong!r}; drop and truncate are known")
    return _OfAll(
        template=top.take("chat_template", str, ""),
        every_token=top.take("train_on_inputs", bool, False),
        overlong=overlong,
    )


def _read_rest(top: Fields) -> None:
    """Refuse what else would change samples, and note what would not; the rest is of the training."""
    top.refuse_if_set(
        {
            "pretraining_dataset": "datasets are known",
            "curriculum_sampling": "the order of a file is no curriculum",
            "rl": f"pairs are a transform of type preference; {_BY_HAND}",
            "reward_model": f"pairs are a transform of type preference; {_BY_HAND}",
            "process_reward_model": "marks of steps are not known",
            "dataset_exact_deduplication": f"sources have dedupe: content; {_BY_HAND}",
            "min_sample_len": f"a transform of type filter has min_tokens; {_BY_HAND}",
            "tokens": "the tokenizer of --tokenizer holds; add them to it",
            "added_tokens_overrides": "the tokenizer of --tokenizer holds; change them in it",
        }
    )
    top.note(
        {
            "test_datasets": "declare them as an evaluation mix",
            "special_tokens": "those of --tokenizer hold; tokenizer.end_of_document names the one that ends a text",
            "chat_template_jinja": "read with chat_template",
        }
    )


def _dataset(
    dataset: Fields, asked: Asked, found: Imported, of_all: _OfAll
) -> tuple[str, JsonObject, float]:
    """Return name, source and size in bytes of a dataset."""
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
        # All of the type of the first: a file that is of another, check names.
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
    # 1, not 0: of files on a store no size is known here, and a weight of 0 would leave them out.
    source = mixed_over_shards(source, asked)
    return name, source, max(_size(wanted), 1.0)


def _read_form(dataset: Fields, source: JsonObject, asked: Asked, of_all: _OfAll) -> None:
    """Read what a record of the dataset is: text, which is cut where it is too long, or a conversation."""
    form = dataset.take("type", str, "completion")
    if form == "completion":
        column = dataset.take("field", str, "text")
        # Files of plain text have no columns to name.
        if source["type"] != "text":
            source["text"] = column
    elif form in _CHATS:
        _read_chat(dataset, source, asked, of_all, _CHATS[form])
    else:
        dataset.refuse("type", f"is {form!r}; completion, {' and '.join(_CHATS)} are known")


def _read_chat(
    dataset: Fields, source: JsonObject, asked: Asked, of_all: _OfAll, form: _ChatForm
) -> None:
    """Read how a conversation becomes text, and what of it is trained on."""
    source["text"] = dataset.take("field_messages", str, form.column)
    source["overlong"] = of_all.overlong
    tools = dataset.take("field_tools", str, "")
    beside = "a system text" if tools else "a system text or tools"
    asked.report.note(
        "field_messages",
        f"messages alone are read: {beside} in columns beside them are not"
        + (
            ""
            if tools
            else "; where there are tools, name their column under tools of the transform"
        ),
    )
    roles = _roles(dataset)
    template: JsonObject = {
        "type": "chat",
        "messages": {**_keys(dataset, form), "roles": {**roles}},
        **({"tools": tools} if tools else {}),
    }
    key = form.names_template
    named = dataset.take(key, str, of_all.template or form.template)
    if asked.template is not None:
        template["template"] = asked.template
    # A template that no key names is given up like one that a key does.
    elif named != _OF_THE_TOKENIZER and key not in asked.report.left_out:
        dataset.refuse(
            key,
            f"is {named!r}, which axolotl keeps: write it to a file and give --template FILE, or --leave-out "
            f"{key} for that of --tokenizer",
        )
    ends = dataset.take("train_on_eos", str, "turn")
    if ends != "turn":
        dataset.refuse(
            "train_on_eos",
            f"is {ends!r}: what the template has of a turn, its end too, is trained on",
        )
    trained = dataset.texts("roles_to_train")
    if dataset.take("train_on_inputs", bool, of_all.every_token) or trained == ["all"]:
        template["loss"] = "all"
    # A role by its name in the data or in the template: either is known there.
    elif not {roles.get(role, role) for role in trained} <= {"assistant"}:
        dataset.refuse("roles_to_train", f"is {trained}; assistant alone is trained on, or all")
    source["transforms"] = [template]


def _keys(dataset: Fields, form: _ChatForm) -> dict[str, str]:
    """Return what messages call ``role`` and ``content``, as the transform ``chat`` has it."""
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


def _roles(dataset: Fields) -> dict[str, str]:
    """Return what the template calls each role of the messages."""
    roles = dataset.inner("roles")
    given: dict[str, str] = {}
    for role in roles.keys:
        if role in ("input", "output"):
            roles.refuse(role, f"names no role of a template; {_BY_HAND}")
        given |= dict.fromkeys(roles.texts(role), role)
    return _ROLES | (given or _SHAREGPT_ROLES)


def _size(paths: list[str]) -> float:
    """Return the bytes of local files and folders."""
    total = 0
    for path in map(Path, paths):
        try:
            files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
            total += sum(file.stat().st_size for file in files)
        except OSError:
            continue  # check says why it cannot be read
    return float(total)


TOOL = Tool(read=_read, sign="a list of datasets", holds=has_key("datasets", "pretraining_dataset"))
