import inspect

from omniload.base.config import StrictModel
from omniload.mix.schema.json_schema import json_schema_of, meanings_of


class Held(StrictModel):
    """What is held."""

    size: int = 4
    """How large."""
    name: str = ""


class More(Held):
    """More of it."""

    size: int = 5
    """How large at most."""
    deep: bool = False
    """Whether it goes
    on."""


def test_keys_have_the_docstrings_of_the_model_and_of_those_that_it_extends():
    assert meanings_of(Held) == {"size": "How large."}
    assert meanings_of(More) == {"size": "How large at most.", "deep": "Whether it goes\non."}


def test_a_schema_says_what_its_keys_mean():
    keys = json_schema_of(More)["properties"]

    assert keys["deep"]["description"] == "Whether it goes\non."
    assert "description" not in keys["name"]


def test_the_source_of_a_model_is_read_once(monkeypatch):
    class Late(Held):
        """One that nobody asked for before."""

        at: int = 0
        """When."""

    read = []
    getsource = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda of: read.append(of) or getsource(of))

    assert meanings_of(Late)["at"] == meanings_of(Late)["at"] == "When."

    assert read.count(Late) == 1
