"""The page that says how to install names the oldest versions that the package asks for."""

import re
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_oldest_versions_on_the_page_are_those_that_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = chain(project["dependencies"], *project["optional-dependencies"].values())
    oldest = dict(re.findall(r"^(\w+)>=([\d.]+)", "\n".join(asked), re.MULTILINE))
    page = (ROOT / "docs/how-to/trainers/own-loop.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("What your container has"))

    named = dict(re.findall(r"(\w+) (\d[\d.]*\d)", line))

    assert named.pop("Python") == project["requires-python"].removeprefix(">=")
    assert named.keys() == {"numpy", "pyarrow", "torch", "ray"}
    assert named == {name: oldest[name] for name in named}
