"""The exception tree: its promises to callers and to other processes."""

import pickle
import traceback

import pytest

from omniload.base.errors import (
    ConfigError,
    DefectError,
    IntegrityError,
    OmniloadError,
    ShownAtOnce,
    StateError,
    UnavailableError,
    project_error,
    shown_at_once,
)
from omniload.base.retry import with_retries

KINDS = [ConfigError, UnavailableError, StateError, IntegrityError, DefectError]


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
    assert [kind.exit_code for kind in KINDS] == [2, 3, 4, 5, 1]
    assert OmniloadError.exit_code == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_caught_as_the_projects_own(kind):
    with pytest.raises(OmniloadError, match="found 5"):
        raise kind("found 5")


def raised(error):
    """Return an error with the place where it was raised."""
    try:
        raise error
    except type(error) as found:
        return found


def test_an_error_of_the_project_is_told_as_it_is():
    error = StateError("rank 3: 5 found")

    assert project_error(error, "the planner") is error


@pytest.mark.parametrize("error", [KeyError((0, 3)), AssertionError("x"), ValueError("bad shape")])
def test_an_error_that_nobody_foresaw_is_told_as_a_fault_of_the_project_with_its_place(error):
    told = project_error(raised(error), "the planner")

    assert type(told) is DefectError
    assert told.exit_code == 1
    assert f"a fault of omniload itself in the planner: {type(error).__name__}" in str(told)
    assert "test_errors.py:" in str(told)
    assert "please report" in str(told)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
def test_what_the_system_refuses_may_be_tried_again(error):
    told = project_error(error, "the planner")

    assert type(told) is UnavailableError
    assert str(told).startswith("the planner ")


def transform():
    raise ValueError("a fault of the user's function")


def caught(call):
    """Return the exception of a call of ours, with our frames first."""
    try:
        with_retries(call, (), lambda _: None)
    except (OmniloadError, ValueError) as error:
        return error.with_traceback(error.__traceback__.tb_next)


def frames(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_an_error_of_ours_is_shown_without_our_frames_and_with_those_of_a_users_function():
    cause = caught(transform)

    def carried_out():
        raise ConfigError("sources.web: its transform fails; mend it") from cause

    error = caught(carried_out)
    assert frames(error)[0] == frames(cause)[0] == "with_retries"

    shown_at_once(error)

    assert frames(error) == ["carried_out"]
    assert error.__cause__ is cause
    assert frames(cause) == ["transform"]


def test_of_an_error_that_leaves_a_call_of_a_users_the_line_that_made_it_is_shown():
    def fail():
        raise ConfigError("mix.yaml:3: no such key; remove it")

    opened = ShownAtOnce()(with_retries)

    with pytest.raises(ConfigError) as told:
        opened(fail, (), lambda _: None)

    # That line, and frames outside our files: neither the call nor the decorator.
    assert [name for name in frames(told.value) if not name.startswith("test_")] == ["fail"]
    assert opened.__name__ == "with_retries"


@pytest.mark.parametrize("error", [DefectError("ours"), ValueError("another's")])
def test_what_is_to_be_reported_keeps_its_frames(error):
    def fail():
        raise error

    told = caught(fail)

    shown_at_once(told)

    assert frames(told) == ["with_retries", "fail"]
