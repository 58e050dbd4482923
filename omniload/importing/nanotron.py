"""nanotron's training file: stages of data, each with folders of token files and weights.

::

    data_stages:
      - name: stable
        start_training_step: 1
        data:
          dataset: {dataset_folder: {datasets/web: 0.8, datasets/code: 0.2}, token_size_in_bytes: 2}
          seed: 42
    tokens: {sequence_length: 4096, micro_batch_size: 2, batch_accumulation_per_replica: 8}
    parallelism: {dp: 8}

Steps begin at 1 in nanotron and at 0 here.
"""

from dataclasses import replace
from pathlib import Path

from omniload.importing.fields import Fields, is_count
from omniload.importing.files import numpy_source, of_token_files
from omniload.importing.imported import Asked, Imported, new_name
from omniload.importing.tools import Tool, has_key

__all__ = ["TOOL"]

_DTYPES = {2: "uint16", 4: "uint32"}
_MOST_OF_TWO_BYTES = 1 << 16
_OF_THE_HUB = (
    "hf_dataset_or_datasets", "hf_dataset_config_name", "hf_dataset_splits", "text_column_name",
    "dataset_processing_num_proc_per_process", "dataset_overwrite_cache",
)  # fmt: skip
_OF_TRAINING = (
    "checkpoints", "general", "lighteval", "logging", "model", "optimizer", "profiler", "s3_upload", "metrics_logging",
)  # fmt: skip


def _read(document: object, asked: Asked) -> Imported:
    """Return the mix of the training file with the content ``document``."""
    top = Fields(document if isinstance(document, dict) else {}, "", asked.report)
    asked = _with_documents(top, asked)
    found = of_token_files(asked)
    tokens, parallel = top.inner("tokens"), top.inner("parallelism")
    row = tokens.take("sequence_length", int, 0)
    micro = tokens.take("micro_batch_size", int, 1)
    parts = tokens.take("batch_accumulation_per_replica", int, 1)
    if row > 0:
        found.row_tokens, found.micro_tokens = row, row * micro
        found.step_tokens = row * micro * parts * parallel.take("dp", int, 1)
    for stage in top.items("data_stages"):
        _read_stage(stage, asked, found)
    if not found.stages:
        top.refuse("data_stages", "names no stage")
    found.stages.sort(key=lambda stage: stage[0])
    # The remaining keys in these mappings concern the training, not its data.
    for key in _OF_TRAINING:
        top.take(key, dict, {})
    asked.report.note(
        "tokenizer", "the files hold token ids; give --tokenizer to see text in previews"
    )
    top.take("tokenizer", dict, {})
    top.end()
    return found


def _with_documents(top: Fields, asked: Asked) -> Asked:
    """Return the options of the user, with documents apart if the model has a mask of documents."""
    model = top.peek("model")
    config = model.get("model_config") if isinstance(model, dict) else None
    if (
        asked.documents
        or not isinstance(config, dict)
        or config.get("_use_doc_masking") is not True
    ):
        return asked
    asked = replace(asked, documents="apart")
    end = config.get("eos_token_id")
    if asked.end_of_document is None and isinstance(end, int) and not isinstance(end, bool):
        asked.report.note(
            "model.model_config.eos_token_id",
            f"is {end}, and is taken for the token that ends documents, which stay apart (_use_doc_masking); give "
            "--end-of-document for another, or --documents joined",
        )
        return replace(asked, end_of_document=end)
    return asked


def _read_stage(stage: Fields, asked: Asked, found: Imported) -> None:
    data = stage.inner("data")
    dataset = data.inner("dataset")
    stage.take("name", str, "")
    first = stage.need("start_training_step", int, 1) - 1
    seed = data.take("seed", int, 0)
    if found.seed is not None and seed != found.seed:
        asked.report.note(
            data.at("seed"), f"is {seed}; the first stage's seed {found.seed} holds for all"
        )
    found.seed = seed if found.seed is None else found.seed
    size = dataset.take("token_size_in_bytes", int, 0)
    # The same rule as in nanotron if the file does not give the size.
    if not size and (vocabulary := dataset.peek("vocab_size")) and is_count(vocabulary):
        size = 2 if vocabulary <= _MOST_OF_TWO_BYTES else 4
    weights: dict[str, float] = {}
    for folder, weight in _folders(dataset):
        name = _named(folder, found)
        # A size that one stage gives applies to all stages with the folder.
        known = _DTYPES.get(size) or found.sources.get(name, {}).get("dtype")
        # Datatrove, which writes these folders, puts index files next to the token files.
        found.sources[name] = numpy_source(
            [folder.rstrip("/") + "/*.ds"],
            asked,
            dtype=None if known is None else str(known),
        )
        weights[name] = weight
    if not weights:
        dataset.refuse(
            "dataset_folder",
            "names no folder of tokens; those of the hub are tokenised first",
        )
        for key in _OF_THE_HUB:
            dataset.take(key, object, None)
    limits = dataset.peek("dataset_max_tokens")
    if isinstance(limits, list) and not any(each is not None for each in limits):
        dataset.take("dataset_max_tokens", list, [])
    # Only the first tokens of a folder, for all epochs: this changes the samples, not the end of the run.
    said = "a part of a folder cannot be declared: name a folder of fewer files"
    dataset.refuse_if_set({"dataset_max_tokens": said})
    dataset.note(
        {
            "skip_in_stream": "a resume goes to its place at once",
            "pad_samples_to_global_batch_size": "steps are whole; the end is a matter of mix.stop",
            "shuffle_files": "units of all files are in a random order",
            "vocab_size": "the tokens say it",
            "tokenizer_name": "the files hold token ids",
            "tokenizer_name_or_path": "the files hold token ids",
            "return_positions": "batches always hold position_ids",
            "dataset_read_path": "it names a mount of the same files",
            "use_old_brrr_dataloader": "an older reader of the same files",
        }
    )
    data.note({"num_loading_workers": "loaders are counted by runtime"})
    for fields in (dataset, data, stage):
        fields.end()
    found.stages.append((first, weights))


def _named(folder: str, found: Imported) -> str:
    """Return the name of a folder: the name from an earlier stage, or a new one."""
    for name, source in found.sources.items():
        if source["path"] == folder.rstrip("/") + "/*.ds":
            return name
    return new_name(Path(folder).name, found.sources)


def _folders(dataset: Fields) -> list[tuple[str, float]]:
    """Return the folders of a stage with their weights; without weights, all are equal."""
    if "dataset_folder" not in dataset.keys:
        return []
    if isinstance(dataset.peek("dataset_folder"), dict):
        by_folder = dataset.inner("dataset_folder")
        return [(folder, by_folder.number(folder) or 0.0) for folder in by_folder.keys]
    folders = dataset.texts("dataset_folder")
    if dataset.peek("dataset_weights") is None:
        return [(folder, 1.0) for folder in folders]
    weights = dataset.numbers("dataset_weights", len(folders)) or [1.0] * len(folders)
    return list(zip(folders, weights, strict=True))


TOOL = Tool(read=_read, sign="data_stages", holds=has_key("data_stages"))
