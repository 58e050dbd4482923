"""``omniload mix import``: a file next to its data becomes a mix that ``check`` accepts."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer, processors

import omniload
from omniload.base.errors import ConfigError, StateError
from omniload.mix.config import load_mix
from omniload.mix.schema.stages import WeightsConfig
from omniload.source.tokenize import open_tokenizer
from tests.support.chats import write_model
from tests.support.plane.edits.mix_commands import json_of, run_mix
from tests.support.plane.sources.source_kinds import MdsTokens


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        rows = {"text": [f"{name} {i} is a document" for i in range(40)]}
        pq.write_table(pa.table(rows), tmp_path / name / "part-0.parquet")
    content = {
        "sources": ["web", "code"],
        "names": ["web", "code"],
        "schedule": [{"schedule_type": "const", "weights": [3, 1]}],
        "level": "token",
        "dataset_type": "iterable",
    }
    path = tmp_path / "veomni.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_mix_file_is_written_that_check_finds_sound(file, tmp_path):
    write_model(tmp_path / "model", "")
    tokenizer = tmp_path / "model"
    output = tmp_path / "elsewhere" / "mix.yaml"
    output.parent.mkdir()
    options = ("--tokenizer", tokenizer, "--length", "32", "--batch", "1Ki", "-o", output)

    result = run_mix("import", file, "--from", "veomni", *options)

    assert result.exception is None, result.output
    assert (
        "dataset_type: 'iterable' has no equivalent: sources are always read by position"
        in result.output
    )
    assert "# From veomni.yaml of veomni." in output.read_text()
    mix, _ = load_mix(output)
    assert (mix.batch.tokens, mix.batch.micro_tokens) == (1024, 128)
    checked = json_of("check", output)
    assert {source["name"]: source["records"] for source in checked["sources"]} == {
        "code": 40,
        "web": 40,
    }
    again = run_mix("import", file, "--from", "veomni", *options)
    assert "is there already" in str(again.exception)


def test_a_mix_file_takes_the_place_of_links_in_a_circle(file, tmp_path):
    (tmp_path / "mix.yaml").symlink_to("mix.yaml")
    sizes = ("--length", "32", "--batch", "64", "--tokens", "ids")

    result = run_mix("import", file, "--from", "veomni", *sizes, "-o", tmp_path / "mix.yaml")

    assert result.exception is None, result.output
    assert load_mix(tmp_path / "mix.yaml")[0].pack.length == 32


def test_paths_start_at_the_folder_of_a_mix_file_that_takes_the_place_of_a_link(file, tmp_path):
    write_model(tmp_path / "model", "")
    (tmp_path / "elsewhere").mkdir()
    output = tmp_path / "elsewhere" / "mix.yaml"
    output.symlink_to("../not-yet.yaml")
    sizes = ("--tokenizer", "model", "--length", "32", "--batch", "64")

    result = run_mix("import", file, "--from", "veomni", *sizes, "-o", output)

    assert result.exception is None, result.output
    assert not output.is_symlink()
    assert {source["records"] for source in json_of("check", output)["sources"]} == {40}


def test_a_tokenizer_behind_links_in_a_circle_is_left_to_check(file, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    output = tmp_path / "elsewhere" / "mix.yaml"
    output.parent.mkdir()
    options = ("--tokenizer", "loop", "--length", "32", "--batch", "1Ki", "-o", output)

    result = run_mix("import", file, "--from", "veomni", *options)

    assert result.exception is None, result.output
    assert yaml.safe_load(output.read_text())["tokenizer"]["path"] == str(tmp_path / "loop")


def test_the_tokenizer_that_the_file_names_stands_in_the_mix_file_unless_another_is_given(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for model in ("model", "other"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "tokenizer.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    dataset = {"path": "a.jsonl", "type": "completion"}
    training = {"base_model": "model", "sequence_len": 64, "datasets": [dataset]}
    (tmp_path / "axolotl.yaml").write_text(json.dumps(training))
    (tmp_path / "mixes").mkdir()

    def path_in(output, *more):
        run_mix("import", "axolotl.yaml", "--from", "axolotl", "-o", output, *more)
        return yaml.safe_load((tmp_path / output).read_text())["tokenizer"]["path"]

    assert path_in("mix.yaml") == "model"
    assert path_in("mixes/mix.yaml") == str(tmp_path / "model")
    assert path_in("second.yaml", "--tokenizer", "other") == "other"


def a_tokenizer(folder, around, **settings):
    """Write a tokenizer whose own template is ``around``, and its settings."""
    write_model(folder, "", ["<other>"])
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [(token, library.token_to_id(token)) for token in ("<bos>", "<eos>", "<other>")]
    library.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=around, special_tokens=ids),
        ]
    )
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return library


EOS = {"eos_token": {"content": "<eos>"}}


@pytest.mark.parametrize(
    ("around", "settings", "special", "said"),
    [
        ("<bos> $A", EOS, {}, {"begin_of_document": "<bos>", "end_of_document": "<eos>"}),
        ("$A", EOS, {}, {"end_of_document": "<eos>"}),
        ("<bos> $A", EOS, {"eos_token": "<other>"}, {"begin_of_document": "<bos>", "end_of_document": "<other>"}),
        ("<bos> $A", {}, {}, {"begin_of_document": "<bos>"}),
    ],
)  # fmt: skip
def test_texts_of_axolotl_begin_and_end_as_there(
    tmp_path, monkeypatch, around, settings, special, said
):
    """They had no token around them: a model was trained on other texts than by axolotl."""
    monkeypatch.chdir(tmp_path)
    library = a_tokenizer(tmp_path / "model", around, **settings)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    dataset = {"path": "a.jsonl", "type": "completion"}
    training = {"base_model": "model", "sequence_len": 64, "datasets": [dataset]}
    training |= {"special_tokens": special | {"pad_token": "<other>"}}
    (tmp_path / "axolotl.yaml").write_text(json.dumps(training))

    result = run_mix("import", "axolotl.yaml", "--from", "axolotl", "-o", "mix.yaml")

    assert result.exception is None, result.output
    mix, _ = load_mix(tmp_path / "mix.yaml")
    told = mix.tokenizer.model_dump(exclude_none=True)
    assert told == {"type": "bpe", "path": "model"} | said
    # As axolotl does: what the tokenizer puts there by itself, and eos_token where it is not the last one yet.
    ids = library.encode("one").ids
    ids += [library.token_to_id(said["end_of_document"])] if "end_of_document" in said else []
    made = open_tokenizer(mix.tokenizer, tmp_path).encode(["one"])
    assert made[0].tolist() == ids
    assert ("name it under end_of_document" in result.output) == ("end_of_document" not in said)
    assert "special_tokens.pad_token: '<other>' has no equivalent" in result.output


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("llm-foundry", {"begin_of_document": "<bos>", "end_of_document": "<other>"}),
        ("veomni", {"end_of_document": "<eos>"}),
        ("torchdata", {}),
    ],
)
def test_texts_of_a_tool_have_the_tokens_around_them_that_it_puts_there(
    file, tmp_path, monkeypatch, tool, said
):
    monkeypatch.chdir(tmp_path)
    a_tokenizer(tmp_path / "model", "<bos> $A <other>", **EOS)
    contents = {
        "veomni": yaml.safe_load(file.read_text()),
        "llm-foundry": {
            "max_seq_len": 32,
            "train_loader": {"name": "text", "dataset": {"local": "mds"}},
        },
        "torchdata": {"dataset": ["a.jsonl"], "batch_size": 2, "shuffle": True},
    }
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "tool.yaml").write_text(yaml.safe_dump(contents[tool]))
    sizes = ("--length", "32", "--batch", "64", "--text", "text", "--tokenizer", "model")

    result = run_mix("import", "tool.yaml", "--from", tool, *sizes, "--json")

    assert result.exception is None, result.output
    told = json.loads(result.stdout)
    tokenizer = yaml.safe_load(told["mix"])["tokenizer"]
    assert tokenizer == {"type": "bpe", "path": "model"} | said
    assert any("where your code has a token" in note for note in told["notes"]) == (not said)


def test_a_file_of_any_name_becomes_a_mix_file_that_names_it(file, tmp_path):
    odd = file.rename(tmp_path / "a\udcff\nseed: 7.yaml")
    options = ("--tokenizer", "model", "--length", "32", "--batch", "1Ki", "-o", "mix.yaml")

    result = run_mix("import", odd, "--from", "veomni", *options)

    assert result.exception is None, result.output
    written = (tmp_path / "mix.yaml").read_text()
    assert written.startswith("# From a\\udcff\\nseed: 7.yaml of veomni.\n")
    assert yaml.safe_load(written)["seed"] == 0


def test_without_an_output_the_file_is_printed_and_as_json_with_its_notes(file):
    sizes = ("--length", "32", "--batch", "64", "--text", "text")

    printed = run_mix("import", file, "--from", "veomni", *sizes, "--tokenizer", ".")
    as_json = json.loads(
        run_mix("import", file, "--from", "veomni", *sizes, "--tokenizer", ".", "--json").stdout
    )

    assert yaml.safe_load(printed.stdout)["pack"] == {
        "length": 32,
        "method": "best_fit",
        "overlong": "split",
    }
    assert as_json["mix"] == printed.stdout
    packed, sources, ends = as_json["notes"]
    assert "each text ends with its eos_token there, which no tokenizer_config.json" in ends
    assert "pack.method none gives each sample a row" in packed
    assert "dataset_type" in sources


def test_all_faults_are_said_at_once_and_nothing_is_written(file, tmp_path):
    content = yaml.safe_load(file.read_text()) | {"level": "byte", "surprise": 1}
    file.write_text(yaml.safe_dump(content))

    result = run_mix("import", file, "--from", "veomni", "-o", tmp_path / "mix.yaml")

    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).splitlines() == [
        f"{file}:2: level: is 'byte'; known are token and sample",
        f"{file}:14: surprise: this key is not known; --leave-out surprise goes on without it",
    ]
    assert not (tmp_path / "mix.yaml").exists()


def test_sources_of_text_need_a_tokenizer(file):
    result = run_mix("import", file, "--from", "veomni", "--length", "32", "--batch", "64")

    assert "source 'web' holds text: give --tokenizer" in str(result.exception)


def test_a_tag_that_names_code_is_refused(file):
    file.write_text("sources: !!python/object/apply:os.system [ls]\n")

    assert isinstance(run_mix("import", file, "--from", "veomni").exception, ConfigError)


STATE = {"epoch": 2, "sample_in_epoch": 24, "num_canonical_nodes": 1, "shuffle_seed": 9176}
SIZES = ("--length", "32", "--batch", "64")


@pytest.fixture
def training(tmp_path, monkeypatch):
    """Write two streams of MDS, the training file over them, and a state; return the file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number, name in enumerate(("web", "code")):
        (tmp_path / name).mkdir()
        for shard in range(2):
            texts = [f"{number}.{shard * 20 + i}" for i in range(20)]
            MdsTokens().write(tmp_path / name / f"shard.{shard:05}.mds", texts)
    streams = {name: {"local": name} for name in ("web", "code")}
    content = {"train_loader": {"name": "text", "dataset": {"streams": streams, "shuffle": True}}}
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(content))
    (tmp_path / "state.json").write_text(json.dumps(STATE))
    return path


def imported(training, *more):
    words = ("--from", "llm-foundry", *SIZES, "--state", "state.json", *more)
    return run_mix("import", training, *words)


def test_a_state_of_mosaic_is_brought_along(training, tmp_path):
    result = imported(training, "-o", "mix.yaml")

    assert result.exception is None, result.output
    assert "--state: epoch 2, 24 of 80 samples drawn" in result.output
    mix, _ = load_mix(tmp_path / "mix.yaml")
    assert {name: source.drawn_before for name, source in mix.sources.items()} == {
        "web": "mix.drawn/web.arrow",
        "code": "mix.drawn/code.arrow",
    }
    drawn = {
        f"{number}.{int(shard[6:11]) * 20 + record}"
        for number, name in enumerate(("web", "code"))
        for shard, record in rows_of(tmp_path / "mix.drawn" / f"{name}.arrow")
    }
    assert len(drawn) == 24
    whole = mix.model_copy(update={"mix": WeightsConfig(stages=mix.mix.stages, stop="each_once")})
    with omniload.open(whole, arrays="numpy") as loader:
        tokens = np.concatenate([batch.tokens.reshape(-1) for batch in loader])
    every = {f"{number}.{i}" for number in range(2) for i in range(40)}
    assert set(counted(tokens)) == every - drawn
    assert len(counted(tokens)) == 56


def rows_of(path):
    table = pa.ipc.open_file(path).read_all().to_pydict()
    return zip(table["shard"], table["record"], strict=True)


def counted(tokens):
    """Return the texts in rows of tokens; tokens are bytes, with an end token after each text."""
    text = bytes(t if t < 256 else 0x20 for t in tokens.tolist() if t).decode()
    return text.split()


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("energon", "is a pickle for every rank, which is never loaded"),
        ("megatron", "in the order of index caches"),
        ("nanotron", "its states are not known here"),
    ],
)
def test_a_state_that_cannot_be_read_is_refused_before_it_is_opened(tmp_path, tool, said):
    contents = {
        "energon": {"__class__": "MetadatasetV2", "splits": {"train": {"path": "x"}}},
        "megatron": {"train": ["a"]},
        "nanotron": {"data_stages": []},
    }
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(contents[tool]))
    os.mkfifo(tmp_path / "state.pt")  # a read of it would wait

    result = run_mix(
        *("import", tmp_path / "file.yaml", "--from", tool, "-o", tmp_path / "mix.yaml"),
        *("--state", tmp_path / "state.pt"),
    )

    assert isinstance(result.exception, StateError)
    assert f"no state of {tool} is read" in str(result.exception)
    assert said in str(result.exception)
    assert "drawn_before" in str(result.exception)
    assert not (tmp_path / "mix.yaml").exists()


def test_a_state_needs_a_place_for_its_records(training):
    result = imported(training)

    assert "--state needs --output" in str(result.exception)


def test_a_state_of_data_that_is_not_here_is_refused(training, tmp_path):
    (tmp_path / "web" / "index.json").unlink()

    result = imported(training, "-o", "mix.yaml")

    assert isinstance(result.exception, ConfigError)
    assert "a state needs the sizes of shards: run this beside the data" in str(result.exception)
    assert not (tmp_path / "mix.drawn").exists()


def test_a_template_and_a_placeholder_of_the_command_line_stand_in_the_mix_file(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "chatml.jinja").write_text("{{ messages }}")
    (tmp_path / "chats.jsonl").write_text("{}\n")
    chats = {"path": "chats.jsonl", "type": "chat_template", "chat_template": "chatml"}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({"sequence_len": 32, "datasets": [chats]}))
    meta = tmp_path / "coco" / ".nv-meta"
    meta.mkdir(parents=True)
    (meta / "dataset.yaml").write_text("field_map: {caption: txt, image: jpg}")
    (meta / "split.yaml").write_text("split_parts: {train: [a.tar]}")
    (tmp_path / "blend.yaml").write_text("__class__: MetadatasetV2\nsplits: {train: {path: coco}}")
    options = ("--tokenizer", tmp_path, "--length", "32", "--batch", "1Ki", "-o")

    def transform_of(tool, file, *given):
        output = tmp_path / "elsewhere" / f"{tool}.yaml"
        result = run_mix("import", file, "--from", tool, *given, *options, output)
        assert result.exception is None, result.output
        (source,) = yaml.safe_load(output.read_text())["sources"].values()
        return source["transforms"][0]

    # A relative path starts at the mix file, which lies in another folder than the one that the command is given in.
    template = transform_of("axolotl", "train.yaml", "--template", "chatml.jinja")
    assert template["template"] == str(tmp_path / "chatml.jinja")
    by_id = transform_of("energon", "blend.yaml", "--placeholder", "7")
    assert by_id["placeholder"] == 7
    (tmp_path / "elsewhere" / "energon.yaml").unlink()
    by_name = transform_of("energon", "blend.yaml", "--placeholder", "<|image_pad|>")
    assert by_name["placeholder"] == "<|image_pad|>"
