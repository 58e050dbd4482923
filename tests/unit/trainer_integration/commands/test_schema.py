"""The JSON schema of a training file says what its models say, as a validator that is not ours reads it."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from trainer_integration.cli import command

ROOT = Path(__file__).parents[4]
EXAMPLE = (ROOT / "examples" / "train.yaml").read_text()


@pytest.fixture(scope="module")
def printed():
    done = CliRunner().invoke(command, ["schema"], catch_exceptions=False)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def validator(printed):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(printed)
    return jsonschema.Draft202012Validator(printed)


def test_the_schema_says_what_it_is_and_what_every_key_means(printed):
    assert printed["$id"] == "urn:omniload:train:1"
    models = [printed, *printed["$defs"].values()]
    silent = [
        key
        for model in models
        for key, said in model.get("properties", {}).items()
        if not said.get("description")
    ]
    assert silent == []


def test_what_the_models_take_the_schema_takes(validator):
    assert list(validator.iter_errors(yaml.safe_load(EXAMPLE))) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("steps: 60", "stepz: 60"),
        ("steps: 60", "steps: 0"),
        ("steps: 60", "steps: ${STEPS}"),
        ("{dp: 2}", "{dp: two}"),
    ],
)
def test_what_the_models_refuse_the_schema_refuses(validator, old, new):
    text = EXAMPLE.replace(old, new)
    assert text != EXAMPLE
    assert list(validator.iter_errors(yaml.safe_load(text)))
