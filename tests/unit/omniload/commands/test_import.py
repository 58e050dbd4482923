"""``omniload mix import``: a file that stands beside its data becomes a mix that ``check`` finds sound."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from omniload.base.errors import ConfigError
from omniload.mix.config import load_mix
from tests.support.chats import write_model
from tests.support.plane.mix_commands import json_of, run_mix


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


def test_without_an_output_the_file_is_printed_and_as_json_with_its_notes(file):
    sizes = ("--length", "32", "--batch", "64", "--text", "text")

    printed = run_mix("import", file, "--from", "veomni", *sizes, "--tokenizer", ".")
    as_json = json.loads(
        run_mix("import", file, "--from", "veomni", *sizes, "--tokenizer", ".", "--json").stdout
    )

    assert yaml.safe_load(printed.stdout)["pack"] == {"length": 32, "method": "best_fit"}
    assert as_json["mix"] == printed.stdout
    assert len(as_json["notes"]) == 1


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
