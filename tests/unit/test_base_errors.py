"""The exception tree: what it promises to callers and to other processes."""

import pickle

import pytest

from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
)

KINDS = [ConfigError, UnavailableError, StateError, IntegrityError]


@pytest.mark.parametrize("kind", [OmniloadError, *KINDS])
def test_an_error_crosses_a_process_boundary_unchanged(kind):
    error = kind("rank 3: 5 found, 4 at most; lower it")

    again = pickle.loads(pickle.dumps(error))

    assert type(again) is kind
    assert str(again) == str(error)
    assert again.exit_code == error.exit_code


def test_notes_cross_a_process_boundary():
    error = UnavailableError("no answer")
    error.add_note("gave up after 3 attempts")

    assert pickle.loads(pickle.dumps(error)).__notes__ == ["gave up after 3 attempts"]


def test_exit_codes_tell_the_caller_what_to_do():
    assert [kind.exit_code for kind in KINDS] == [2, 3, 4, 5]
    assert OmniloadError.exit_code == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_caught_as_the_projects_own(kind):
    with pytest.raises(OmniloadError, match="found 5"):
        raise kind("found 5")
