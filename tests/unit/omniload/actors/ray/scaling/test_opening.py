"""Whether a started loader has found the same contents in its sources as at first."""

from concurrent.futures import Future

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.scaling.opening import event_of_opening
from omniload.base.errors import UnavailableError
from omniload.machine.roster.members import Member, MemberEnded, MemberReady
from tests.support.plane.builders import a_mix, some_facts

CODE, WEB, BOOKS = some_facts([100, 101, 55])


@pytest.mark.parametrize(
    ("found", "heard"),
    [
        ({0: CODE, 2: BOOKS}, MemberReady),
        ({0: WEB, 2: BOOKS}, MemberEnded),
        (None, MemberEnded),
        (UnavailableError("lost"), MemberEnded),
    ],
)
def test_a_loader_that_is_started_while_a_source_is_opened_is_heard_of(found, heard):
    found_there, member = Future(), Member("loader-0", 1)
    if isinstance(found, Exception):
        found_there.set_exception(found)
    else:
        found_there.set_result(found)

    event = event_of_opening(member, found_there, {0: CODE, 1: WEB}, a_mix())

    assert isinstance(event, heard)
    assert event.member == member


def test_a_loader_that_finds_other_data_says_of_which_source_and_what():
    found = Future()
    found.set_result({0: CODE, 1: BOOKS})

    event = event_of_opening(Member("loader-0", 1), found, {0: CODE, 1: WEB}, a_mix())

    assert (
        "sources.web.records: 101 then, 55 now, of source 'web' how many records it has"
        in event.why
    )
    assert "code" not in event.why
