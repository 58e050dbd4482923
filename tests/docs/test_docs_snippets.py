"""What the documentation shows is run."""

import sys
import tomllib
import traceback
from pathlib import Path

import pytest
import yaml

from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig
from omniload.mix.schema.policies import SteeringConfig
from tests.docs.snippets import (
    FRAMEWORK_PAGES,
    LANGUAGES,
    ROOT,
    TORCHRUN_PAGES,
    blocks_of,
    documents,
    page_of,
    parse_blocks,
    run_page,
)
from trainer_integration.config import TrainConfig

DOCUMENTS = documents()
RUNNABLE = [
    path
    for path in DOCUMENTS
    if page_of(path) not in FRAMEWORK_PAGES | TORCHRUN_PAGES
    and any(b.language == "python" for b in blocks_of(path))
]

SCRIPT_PAGES = {"how-to/running/elastic.md"}
"""Pages that start scripts of theirs, each by torch, in processes of their own."""


def _id(path):
    return str(path.relative_to(ROOT))


_FILES = {
    "sources": ("mix.yaml", MixConfig),
    "policy": ("steer.yaml", SteeringConfig),
    "version": ("train.yaml", TrainConfig),
}
"""A file by a key that it has and those before it here have not."""


def _yaml_file(block):
    """Check a whole YAML block; return the name of the file it stands for."""
    keys = yaml.safe_load(block.text)
    assert isinstance(keys, dict), f"{block.where}: is no mapping; mark it `yaml fragment`"
    name, model = next(file for key, file in _FILES.items() if key in keys)
    try:
        parse_yaml(block.text, model, name=block.where)
    except ConfigError as error:
        pytest.fail(f"{block.where}: {error}")
    return name


@pytest.mark.parametrize("path", DOCUMENTS, ids=_id)
def test_every_fence_is_closed_and_labelled_with_a_language_that_is_checked(path):
    labels = {block.where: block.language for block in blocks_of(path)}

    assert {where: label for where, label in labels.items() if label not in LANGUAGES} == {}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_id)
def test_every_whole_yaml_block_is_a_mix_or_a_training_file(path):
    blocks = [block for block in blocks_of(path) if block.language == "yaml"]

    for block in blocks:
        if block.info == ("yaml", "fragment"):
            assert isinstance(yaml.safe_load(block.text), dict), f"{block.where}: holds no key"
        else:
            assert block.info == ("yaml",), f"{block.where}: say `yaml` or `yaml fragment`"
            _yaml_file(block)


@pytest.mark.parametrize("path", DOCUMENTS, ids=_id)
def test_every_toml_block_holds_settings(path):
    for block in blocks_of(path):
        if block.language == "toml":
            assert tomllib.loads(block.text), f"{block.where}: holds no key"


@pytest.mark.parametrize("path", RUNNABLE, ids=_id)
def test_the_python_blocks_of_a_page_run_one_after_the_other(
    path, warm_python, work, monkeypatch, leaves_nothing_behind
):
    if page_of(path) in SCRIPT_PAGES:
        monkeypatch.setattr(sys, "executable", warm_python.path)
    assert run_page(path, _yaml_file)


def test_a_failing_block_shows_the_line_of_the_document():
    page = "# Page\n\nText.\n\n```python\nvalue = 1\nraise RuntimeError(value)\n```\n"
    (block,) = parse_blocks(page, Path("page.md"))

    with pytest.raises(RuntimeError) as caught:
        exec(block.compiled(), {})

    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno) == ("page.md", 7)


def test_blocks_keep_their_place_labels_and_indentation():
    page = "- item\n\n  ```yaml fragment\n  a:\n    b: 1\n  ```\n\n````\n```\n````\n"

    first, second = parse_blocks(page, Path("page.md"))

    assert (first.line, first.info, first.text) == (4, ("yaml", "fragment"), "a:\n  b: 1\n")
    assert (second.line, second.info, second.text) == (9, (), "```\n")


def test_a_fence_that_is_never_closed_is_reported_with_its_line():
    with pytest.raises(AssertionError, match=r"page.md:2: the fence is never closed"):
        parse_blocks("text\n```python\nx = 1\n", Path("page.md"))


def test_commands_follow_the_prompt_in_a_console_and_fill_a_script():
    console = "```console\n$ omniload a \\\n    --b\nwhat it printed\n$ ls\n```\n"
    script = "```sh\nomniload c\n```\n"

    first, second = parse_blocks(console + script, Path("page.md"))

    assert list(first.commands()) == [(2, "omniload a     --b"), (5, "ls")]
    assert list(second.commands()) == [(8, "omniload c")]
