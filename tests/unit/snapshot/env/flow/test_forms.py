"""Which form an environment gets, keeps, or gets back."""

import errno

import pytest

from omniload.base.errors import IntegrityError, UnavailableError
from snapshot.env.flow.forms import form_to_put_back, forms_of, is_refusal, kept_by
from snapshot.env.target.records import Record

KEY, OTHER = "a" * 64, "b" * 64


def held(form, key=KEY):
    return Record(action="apply", key=key, form=form, base={}, targets=())


def test_auto_tries_the_fastest_first_and_a_form_asked_for_alone():
    assert forms_of("auto") == ("mount", "link", "copy")
    assert forms_of("copy") == ("copy",)


@pytest.mark.parametrize(
    ("form", "requested", "keeps"),
    [
        ("mount", "auto", "as it is"),
        ("mount", "mount", "as it is"),
        ("mount", "link", "no"),
        ("link", "auto", "if sound"),
        ("link", "link", "if sound"),
        ("link", "copy", "no"),
        ("copy", "mount", "no"),
        ("command", "auto", "if sound"),
        ("command", "mount", "if sound"),
    ],
)
def test_what_is_held_is_kept_where_it_is_what_was_asked_for(form, requested, keeps):
    assert kept_by(held(form), KEY, requested) == keeps
    assert kept_by(held(form, OTHER), KEY, requested) == "no"
    assert kept_by(None, KEY, requested) == "no"


@pytest.mark.parametrize(
    ("form", "back"), [("link", "link"), ("copy", "copy"), ("mount", None), ("command", None)]
)
def test_files_of_the_same_snapshot_are_put_back(form, back):
    assert form_to_put_back(held(form), KEY) == back
    assert form_to_put_back(held(form, OTHER), KEY) is None
    assert form_to_put_back(None, KEY) is None


@pytest.mark.parametrize(
    ("error", "refuses"),
    [
        (UnavailableError("no overlay"), True),
        (OSError(errno.EXDEV, "another disk"), True),
        (OSError(errno.EMLINK, "too many links"), True),
        (OSError(errno.ENOSPC, "full"), False),
        (OSError("no number"), False),
        (IntegrityError("damaged"), False),
    ],
)
def test_only_a_form_that_cannot_be_had_lets_another_be_tried(error, refuses):
    assert is_refusal(error) is refuses
