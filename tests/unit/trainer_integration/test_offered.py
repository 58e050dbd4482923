"""What the package offers, where torch is not installed."""

import sys

import pytest

import trainer_integration


def test_what_needs_torch_names_the_line_that_installs_it_in_an_error_of_the_import(monkeypatch):
    monkeypatch.delitem(sys.modules, "trainer_integration.loader.balancing", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(ImportError) as caught:
        from trainer_integration import token_mean  # noqa: F401, PLC0415

    said = "trainer_integration.token_mean needs the package torch, which is not installed; pip install"
    assert str(caught.value).startswith(said)
    assert isinstance(caught.value, ModuleNotFoundError)
    assert caught.value.name == "torch"
    with pytest.raises(AttributeError):
        trainer_integration.nothing  # noqa: B018
