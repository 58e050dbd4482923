"""Names, versions and examples agree with the rules of the house."""

import re

import pytest
import yaml

from omniload import __version__
from omniload.base.config import load_yaml
from omniload.mix.config import MixConfig
from tests.house.modules import ROOT, faults, source_files

BANNED = {"util", "utils", "helper", "helpers", "manager", "managers", "common", "misc"}
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


def banned_words(path):
    return BANNED & {word for part in path.with_suffix("").parts for word in part.split("_")}


def test_every_module_is_named_for_what_it_holds():
    assert faults(source_files(), banned_words) == {}


def test_the_changelog_is_headed_by_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)

    assert next(head for head in heads if head != "Unreleased") == __version__


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_loads_with_its_model(path):
    train = pytest.importorskip("trainer_integration.config")
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))

    model = MixConfig if "sources" in keys else train.TrainConfig

    assert load_yaml(path, model).version == 1


def test_every_path_that_contributing_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:omniload|fusefs|snapshot|trainer_integration|tests)/[\w./]+)`", text)

    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_ten_questions_lead_to_their_modules():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, after = text.partition("## Where would I change it?")
    rows = [line.split("|") for line in after.partition("\n## ")[0].splitlines() if "?" in line]

    assert len(rows) >= 10
    assert [question for _, question, modules, *_ in rows if "`" not in modules] == []
