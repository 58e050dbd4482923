"""Settings that include files and name variables: merging, refusals, and an equivalent single text."""

import subprocess

import pytest
import yaml

import omniload
from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError
from omniload.base.secrets import names_secret
from omniload.base.settings.include import read_settings
from omniload.mix.config import MixConfig, load_mix
from omniload.mix.run_record import mix_text, read_run_record, write_run_record

WHOLE = """
version: 2
seed: 7
sources:
  code: {type: jsonl, path: /data/code.jsonl, shuffle: {block_units: 3}}
  web: {type: jsonl, path: "other/web.jsonl", tags: {size: large}}
mix: {stages: [{weights: {code: 1, web: 3}}]}
tokenizer: {type: bytes}
pack: {length: 16}
batch: {tokens: 64, micro_tokens: 32}
"""


def put(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / "mix.yaml"


@pytest.fixture
def parted(tmp_path):
    """Return the mix of ``WHOLE`` in three files."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common/sources.yaml").write_text(
        "include: tags.yaml\nsources:\n  code: {type: jsonl, path: '${DATA:-/data}/code.jsonl'}\n"
        "  web: {type: jsonl, path: web.jsonl}\n",
        encoding="utf-8",
    )
    (tmp_path / "common/tags.yaml").write_text(
        "sources:\n  web: {path: '${DATA:-/data}/tags', tags: {size: large}}\n", encoding="utf-8"
    )
    return put(
        tmp_path,
        size="pack: {length: 16}\nbatch: {tokens: 128, micro_tokens: 32}\ntokenizer: {type: bytes}\n",
        mix="version: 2\ninclude: [common/sources.yaml, size.yaml]\nseed: ${SEED}\n"
        "batch: {tokens: 64}\n"
        "sources:\n  web: {path: '${WEB}'}\n  code: {shuffle: {block_units: 3}}\n"
        "mix: {stages: [{weights: {code: 1, web: 3}}]}\n",
    )


def test_parts_are_the_mix_that_is_written_in_one(parted, monkeypatch, tmp_path):
    monkeypatch.setenv("SEED", "7")
    monkeypatch.setenv("WEB", "other/web.jsonl")

    mix, folder = load_mix(parted)

    assert mix == parse_yaml(WHOLE, MixConfig, name="whole")
    assert folder == tmp_path


def test_the_record_of_a_run_says_it_whole_whatever_becomes_of_files_and_variables(
    parted, monkeypatch, tmp_path
):
    monkeypatch.setenv("SEED", "7")
    monkeypatch.setenv("WEB", "other/web.jsonl")
    write_run_record(tmp_path / "run", parted, {"dp": 1})
    text = mix_text(parted)
    monkeypatch.delenv("SEED")
    parted.with_name("size.yaml").unlink()

    life = read_run_record(tmp_path / "run").last

    assert life.mix() == parse_yaml(WHOLE, MixConfig, name="whole")
    assert life.text == text
    assert text.startswith(
        "# mix.yaml, sources.yaml, tags.yaml, size.yaml and DATA, SEED, WEB of the environment"
    )
    assert yaml.safe_load(text)["seed"] == 7  # another reader of YAML


def test_a_file_that_names_nothing_is_kept_as_it_stands(tmp_path):
    for text in (WHOLE, WHOLE.replace("version: 2", "version: 1").replace("other/", "${HOME}/")):
        mix = put(tmp_path, mix=text)

        assert mix_text(mix) == text
        assert load_mix(mix)[0] == parse_yaml(text, MixConfig, name="whole")


WORDS = ["${A}", "${A:-b}", "${B:-b c}", "x${A}y${A}", "${EMPTY:-word}", "${B:-}", "$A ${A:-$A}"]


@pytest.mark.parametrize("word", WORDS)
def test_variables_are_what_a_shell_makes_of_them(tmp_path, word):
    environment = {"A": "a: 1", "EMPTY": ""}
    asked = word.replace("$A", "\\$A")  # without braces it is text here
    shell = ["bash", "-c", f'printf %s "{asked}"']
    wanted = subprocess.run(shell, env=environment, capture_output=True, text=True, check=True)

    tree = read_settings(put(tmp_path, mix=f'version: 2\nsaid: "{word}"\n'), environment)

    assert tree.root.value["said"] == wanted.stdout


def test_a_variable_without_quotes_is_read_as_if_it_stood_there(tmp_path):
    text = "version: 2\nplain: ${N}\nquoted: '${N}'\nboth: $${N} ${N}\n"

    tree = read_settings(put(tmp_path, mix=text), {"N": "12"})

    assert tree.root.value == {"version": 2, "plain": 12, "quoted": "12", "both": "${N} 12"}
    assert yaml.safe_load(tree.text) == tree.root.value


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"mix": "seed: ${SEED}"},
            "mix.yaml:2: seed names ${SEED}, which is not set; set it, or write ${SEED:-word}",
        ),
        (
            {"mix": "a: {b: ['${}']}"},
            "mix.yaml:2: a.b.0 holds '${' that names no variable; write ${NAME}",
        ),
        ({"mix": "a: ${HF_TOKEN}"}, "mix.yaml:2: a names ${HF_TOKEN}, a secret by its name"),
        (
            {"mix": "include: mix.yaml"},
            "mix.yaml:2: include: 'mix.yaml' includes itself, by way of mix.yaml",
        ),
        (
            {"mix": "include: [a.yaml]", "a": "b: 1\ninclude: [mix.yaml]"},
            "a.yaml:2: include: 'mix.yaml' includes itself, by way of mix.yaml -> a.yaml; remove one of them",
        ),
        ({"mix": "include: none.yaml"}, "mix.yaml:2: include: 'none.yaml': "),
        (
            {"mix": "include: 3"},
            "mix.yaml:2: include is 3; give the name of a file, or a list of names",
        ),
        (
            {"mix": "include: [a.yaml, {}]", "a": ""},
            "mix.yaml:2: include is {}; give the name of a file",
        ),
        (
            {"mix": "include: a.yaml", "a": "- 1"},
            "a.yaml:1: an included file holds keys and values; found none",
        ),
        ({"mix": "include: a.yaml", "a": "b: ["}, "a.yaml:2: not valid YAML: "),
    ],
)
def test_what_cannot_be_meant_is_told_with_its_file_and_line(tmp_path, monkeypatch, files, said):
    monkeypatch.delenv("SEED", raising=False)
    mix = put(tmp_path, **{**files, "mix": f"version: 2\n{files['mix']}\n"})

    with pytest.raises(ConfigError) as refused:
        load_mix(mix)

    assert said in str(refused.value)


def test_files_that_include_many_end(tmp_path):
    deep = {f"d{k}": f"include: d{k + 1}.yaml" for k in range(12)}
    put(tmp_path, **deep, mix="version: 2\ninclude: d0.yaml\n")
    with pytest.raises(
        ConfigError, match=r"d\d.yaml:1: include: 'd\d.yaml' lies deeper than 8 files"
    ):
        load_mix(tmp_path / "mix.yaml")

    wide = {f"w{k}": f"include: [{', '.join([f'w{k + 1}.yaml'] * 9)}]" for k in range(5)}
    put(tmp_path, **wide, w5="a: 1", mix="version: 2\ninclude: w0.yaml\n")
    with pytest.raises(ConfigError, match=r"mix.yaml: includes more than 64 files"):
        load_mix(tmp_path / "mix.yaml")


def test_a_fault_in_an_included_file_is_told_with_its_place(tmp_path):
    mix = put(tmp_path, mix="version: 2\ninclude: a.yaml\nseed: -1\n", a="batch:\n  tokens: -3\n")

    with pytest.raises(ConfigError) as refused:
        load_mix(mix)

    lines = str(refused.value).splitlines()
    assert any(line.startswith(f"{mix}:3: seed: found -1; give at least 0") for line in lines)
    assert lines[-1].startswith(f"{tmp_path / 'a.yaml'}:2: batch.tokens: found -3; give at least 2")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("circle.yaml", "Too many levels of symbolic links"),
        ('"a\\0.yaml"', "(open: )?embedded null"),
    ],
)
def test_a_name_that_can_be_no_file_is_told_with_its_place(tmp_path, name, said):
    (tmp_path / "circle.yaml").symlink_to("circle.yaml")
    mix = put(tmp_path, mix=f"version: 2\ninclude: {name}\n")

    with pytest.raises(ConfigError, match=rf"mix.yaml:2: include: .* cannot be read: {said}"):
        load_mix(mix)


def test_version_1_has_no_include(tmp_path):
    mix = put(tmp_path, mix=WHOLE.replace("version: 2", "version: 1\ninclude: a.yaml"))

    with pytest.raises(
        ConfigError, match=r"mix.yaml:3: include: include came with version 2; write version: 2"
    ):
        load_mix(mix)


def test_a_file_that_was_read_by_others_is_told_to_be_given_by_its_path():
    with pytest.raises(ConfigError, match=r"include: a mapping includes no files; give the path"):
        omniload.open({"version": 2, "include": "sources.yaml", "seed": 1})


def test_secrets_are_known_by_the_words_of_their_names():
    secret = [
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "password",
        "WANDB_API_KEY",
        "GH_PAT",
        "SAS",
        "MY_TOKEN_2",
    ]
    plain = [
        "TOKENIZER",
        "TOKENIZER_DIR",
        "PATH",
        "DATA",
        "KEYS",
        "AUTHOR",
        "SASHA",
        "PATTERN",
        "SEED",
    ]

    assert [name for name in (*secret, *plain) if names_secret(name)] == secret


def test_a_variable_has_no_more_characters_than_a_path(tmp_path):
    file = put(tmp_path, mix="version: 2\nseed: 1\nmix: ${LONG}\n")

    assert read_settings(file, {"LONG": "v" * 4096}).root.child("mix")[1].content == "v" * 4096
    with pytest.raises(ConfigError) as refused:
        read_settings(file, {"LONG": "v" * 4097})

    assert str(refused.value) == (
        f"{file}:3: mix names ${{LONG}}, whose value has 4,097 characters, more than 4,096; shorten it, or write it "
        "into a file that is included"
    )


def test_variables_make_no_file_larger_than_the_largest(tmp_path):
    """A word of seven characters, 100,000 times in a file, would be 400 MiB."""
    lines = "".join(f"- ${{LONG}}  # {number}\n" for number in range(300))
    file = put(tmp_path, mix=f"version: 2\nseed:\n{lines}")

    with pytest.raises(ConfigError, match=r"mix.yaml:259: seed.256 makes it 1,052,672 characters"):
        read_settings(file, {"LONG": "v" * 4096})
