"""Every exception of ours can cross a process boundary, and most tell the caller what to do."""

import inspect
import pickle

from omniload.base.errors import OmniloadError
from tests.house.modules import base_files, imported


def exceptions():
    """Return every exception that one of our modules defines."""
    return [
        value
        for module in map(imported, base_files())
        for _, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, BaseException) and value.__module__ == module.__name__
    ]


def test_every_exception_crosses_a_process_boundary():
    assert len(exceptions()) > 20
    for kind in exceptions():
        again = pickle.loads(pickle.dumps(kind("what, value, limit, remedy")))

        assert type(again) is kind
        assert str(again) == "what, value, limit, remedy"


def test_every_public_exception_has_a_code_for_the_caller():
    public = [kind for kind in exceptions() if not kind.__name__.startswith("_")]

    assert [kind.__name__ for kind in public if not issubclass(kind, OmniloadError)] == []
