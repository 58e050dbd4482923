"""Every exception of ours crosses a process boundary, and most tell the caller what to do."""

import inspect
import pickle

import pytest

from omniload.base.errors import OmniloadError
from tests.house.modules import imported, name_of, source_files


def exceptions_of(path):
    module = imported(path)
    classes = [value for _, value in inspect.getmembers(module, inspect.isclass)]
    return [c for c in classes if issubclass(c, BaseException) and c.__module__ == name_of(path)]


@pytest.mark.parametrize("path", source_files(), ids=str)
def test_an_exception_crosses_a_process_boundary(path):
    for kind in exceptions_of(path):
        again = pickle.loads(pickle.dumps(kind("what, value, limit, remedy")))

        assert type(again) is kind
        assert str(again) == "what, value, limit, remedy"


@pytest.mark.parametrize("path", source_files(), ids=str)
def test_a_public_exception_has_a_code_for_the_caller(path):
    public = [kind for kind in exceptions_of(path) if not kind.__name__.startswith("_")]

    assert [kind.__name__ for kind in public if not issubclass(kind, OmniloadError)] == []
