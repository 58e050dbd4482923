"""Generated pages are what the models and commands say today; the page of installation what the package asks for."""

import functools
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from itertools import chain
from typing import Annotated, Literal

import click
import pytest
from pydantic import Field

from omniload.base.config import StrictModel
from omniload.base.settings.quantities import Bytes, Count
from omniload.mix.config import MixConfig
from omniload.mix.schema.policies import SteeringConfig
from tests.docs.snippets import ROOT
from trainer_integration.config import TrainConfig


def _generator():
    path = ROOT / "scripts/generate_reference.py"
    spec = importlib.util.spec_from_file_location("generate_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = _generator()


class Leaf(StrictModel):
    """What is held."""

    size: Bytes = 4
    """A size."""


class Tagged(StrictModel):
    """One of several."""

    type: Literal["one"]
    """Which."""


class Root(StrictModel):
    """All kinds of keys."""

    limited: int = Field(ge=2, lt=1 << 63)
    """Says ``x``."""
    amount: Count = Field(default=3, ge=2)
    """Counted."""
    pair: tuple[float, float] = (0.9, 0.95)
    """Two."""
    optional: str | None = None
    """Perhaps."""
    flag: bool = True
    """Yes or no."""
    many: tuple[Leaf, ...] = Field(min_length=1)
    """Several."""
    named: dict[str, Annotated[Tagged, Field()]] = Field(default_factory=dict)
    """By name."""


SHOW = """
import json, runpy, sys
pages = runpy.run_path(sys.argv[1])["pages"]()
print(json.dumps({path.name: text for path, text in pages.items()}))
"""


@functools.cache
def fresh_pages():
    """Return the pages as a process of its own writes them: click keeps the help option of who ran a command first."""
    line = [sys.executable, "-c", SHOW, ROOT / "scripts/generate_reference.py"]
    return json.loads(subprocess.run(line, check=True, capture_output=True, cwd=ROOT).stdout)


@pytest.mark.parametrize("name", ["mix.md", "train.md", "steer.md", "cli.md"])
def test_the_page_is_up_to_date(name):
    page = (generator.FOLDER / name).read_text(encoding="utf-8")

    assert page == fresh_pages()[name], (
        "the page is stale; run python scripts/generate_reference.py"
    )


@pytest.mark.parametrize("model", [MixConfig, TrainConfig, SteeringConfig])
def test_every_key_of_the_file_has_a_row(model):
    page = generator.model_page("", model)

    for key in model.model_fields:
        assert f"| `{key}` |" in page


def test_types_limits_and_defaults_are_said_in_words():
    page = generator.model_page("# Page", Root)

    assert "| `limited` | whole number, at least 2, below 2^63 | required | Says `x`. |" in page
    assert "| `amount` | [count](#quantities), at least 2 | `3` | Counted. |" in page
    assert "| `pair` | list of number, number | `[0.9, 0.95]` | Two. |" in page
    assert "| `optional` | text | none | Perhaps. |" in page
    assert "| `flag` | `true` or `false` | `true` | Yes or no. |" in page
    assert "| `many` | list of [many[]](#many), not empty | required | Several. |" in page
    assert "| `named` | mapping of name to [named.NAME of type one]" in page
    assert "| `size` | [size](#quantities), at least 0 | `4` | A size. |" in page


def test_a_model_under_several_keys_has_one_section_that_names_them_all():
    class Twice(StrictModel):
        """Holds it twice."""

        first: Leaf = Leaf()
        """Once."""
        second: Leaf = Leaf()
        """Again."""

    page = generator.model_page("", Twice)

    assert page.count("What is held.") == 1
    assert "Also `second`." in page


def test_a_key_without_a_docstring_is_refused():
    class Silent(StrictModel):
        key: int = 1

    with pytest.raises(AssertionError, match=r"Silent.key has no docstring"):
        generator.model_page("", Silent)


def test_the_help_of_every_command_is_on_the_page_of_commands():
    @click.group()
    def root():
        """Do things."""

    @root.command()
    @click.option("--often", help="Not once.")
    def verb():
        """Do one thing."""

    page = generator.command_page(root)

    assert "## omniload\n" in page
    assert "## omniload verb\n" in page
    assert "Do one thing." in page
    assert "--often TEXT  Not once." in page


def test_the_oldest_versions_on_the_page_are_those_that_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = chain(project["dependencies"], *project["optional-dependencies"].values())
    oldest = dict(re.findall(r"^(\w+)>=([\d.]+)", "\n".join(asked), re.MULTILINE))
    page = (ROOT / "docs/how-to/trainers/own-loop.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("The oldest versions"))

    named = dict(re.findall(r"(\w+) (\d[\d.]*\d)", line))

    assert named.pop("Python") == project["requires-python"].removeprefix(">=")
    assert named.keys() == {"numpy", "pyarrow", "torch", "ray"}
    assert named == {name: oldest[name] for name in named}
