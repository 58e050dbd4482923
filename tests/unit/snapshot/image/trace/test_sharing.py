"""Traces that many nodes push for one command: one merged trace, each start counted once."""

import logging
from dataclasses import replace

import pytest

from omniload.base.errors import IntegrityError, UnavailableError
from snapshot.image.trace.sharing import ENOUGH_PARTS, TRACE_TYPE, pull_trace, push_trace
from snapshot.image.trace.trace import Touch, encode_trace, merge_traces, trace_of
from snapshot.oci.artifacts import push_artifact
from snapshot.oci.layout import OciLayout
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, an_image

RUN = ("python", "train.py")


@pytest.fixture
def layout(tmp_path):
    return OciLayout.create(tmp_path / "layout")


@pytest.fixture
def image(layout):
    tar = a_tar(a_member("f", b"data"))
    return an_image(layout, [(a_layer(layout, tar, "tar"), tar)]).digest


def a_trace(image, number, command=RUN):
    return trace_of(
        image, command, [Touch(number, "f", 0, 10), Touch(number, f"of-{number}", 0, 5)]
    )


class Between:
    """A store that lets something happen before a list of referrers is told."""

    def __init__(self, store, *happens):
        self.store, self.happens = store, list(happens)

    def __getattr__(self, name):
        return getattr(self.store, name)

    def referrers(self, *given):
        if self.happens:
            self.happens.pop(0)()
        return self.store.referrers(*given)


class Losing(Between):
    """A store whose list of referrers is a tag: what is listed is taken away by others that write it."""

    def __init__(self, store, *lost):
        super().__init__(store)
        self.lost = list(lost)

    def referrers(self, *given):
        found = self.store.referrers(*given)
        hidden = self.lost.pop(0) if self.lost else None
        return () if hidden == "all" else found


def documents(store, image):
    return store.referrers(image, TRACE_TYPE)


def test_two_nodes_that_push_end_as_one_merged_trace(layout, image):
    one, other = a_trace(image, 1), a_trace(image, 2)

    push_trace(layout, one)
    push_trace(layout, other)

    assert pull_trace(layout, image, RUN) == merge_traces([one, other])
    assert pull_trace(layout, image, RUN).runs == 2


def test_a_part_pushed_while_another_pushes_is_not_lost(layout, image):
    first, second, third = (a_trace(image, number) for number in (1, 2, 3))
    push_trace(layout, first)
    # The second pusher has listed what is there and not pushed yet when the third comes.
    meanwhile = Between(layout, lambda: push_trace(layout, third))

    push_trace(meanwhile, second)

    assert meanwhile.happens == []
    assert pull_trace(layout, image, RUN) == merge_traces([first, second, third])


def test_what_the_list_of_referrers_lost_is_pushed_again(layout, image):
    push_trace(layout, a_trace(image, 1))
    # Not listed when it looks after the push, for another has written the list: it pushes again.
    losing = Losing(layout, None, "all")

    push_trace(losing, a_trace(image, 2))

    assert losing.lost == []
    assert pull_trace(layout, image, RUN).runs == 2


def test_a_list_that_never_holds_what_is_pushed_costs_a_warning(layout, image, caplog):
    losing = Losing(layout, *["all"] * 99)

    with caplog.at_level(logging.WARNING, "omniload"):
        push_trace(losing, a_trace(image, 1))

    assert "may be overwritten" in caplog.text
    assert len(losing.lost) > 0, "it gives up in the end"


def test_enough_parts_are_enough(layout, image):
    for number in range(ENOUGH_PARTS):
        push_trace(layout, a_trace(image, number))
    before = documents(layout, image)

    push_trace(layout, a_trace(image, 99))

    assert documents(layout, image) == before
    assert pull_trace(layout, image, RUN).runs == ENOUGH_PARTS


def test_of_too_many_parts_those_of_the_most_starts_are_read(layout, image):
    told = {"io.omniload.trace.command": '["python", "train.py"]'}
    for number in range(ENOUGH_PARTS + 3):
        trace = replace(a_trace(image, number), runs=1 + number)
        named = told | {"io.omniload.trace.runs": str(trace.runs)}
        push_artifact(layout, image, TRACE_TYPE, encode_trace(trace), named)

    assert pull_trace(layout, image, RUN).runs == sum(range(4, ENOUGH_PARTS + 4))


def test_what_is_pushed_twice_under_one_name_counts_once(layout, image):
    one = a_trace(image, 1)
    push_trace(layout, one, "node")
    push_trace(layout, merge_traces([one, a_trace(image, 2)]), "node")

    assert pull_trace(layout, image, RUN).runs == 2


def test_other_commands_are_merged_apart(layout, image):
    push_trace(layout, a_trace(image, 1))
    push_trace(layout, a_trace(image, 2, ("sh",)))
    push_trace(layout, a_trace(image, 3))

    assert pull_trace(layout, image, RUN) == merge_traces([a_trace(image, 1), a_trace(image, 3)])
    assert pull_trace(layout, image, ("sh",)) == a_trace(image, 2, ("sh",))


def test_a_broken_part_is_passed_over_and_the_others_serve(layout, image, caplog):
    push_trace(layout, a_trace(image, 1))
    annotations = {
        "io.omniload.trace.command": '["python", "train.py"]',
        "io.omniload.trace.runs": "9",
    }
    push_artifact(layout, image, TRACE_TYPE, b"no trace", annotations)

    with caplog.at_level(logging.WARNING, "omniload"):
        found = pull_trace(layout, image, RUN)

    assert found == a_trace(image, 1)
    assert "passed over" in caplog.text


def test_documents_of_the_release_before_are_parts(layout, image):
    annotations = {
        "io.omniload.trace.command": '["python", "train.py"]',
        "io.omniload.trace.runs": "1",
    }
    push_artifact(layout, image, TRACE_TYPE, encode_trace(a_trace(image, 1)), annotations)

    push_trace(layout, a_trace(image, 2))

    assert pull_trace(layout, image, RUN).runs == 2


def test_a_document_that_the_release_before_merged_of_parts_is_passed_over(layout, image):
    push_trace(layout, a_trace(image, 1))
    annotations = {
        "io.omniload.trace.command": '["python", "train.py"]',
        "io.omniload.trace.runs": "2",
        "io.omniload.trace.parts": "2",
    }
    push_artifact(layout, image, TRACE_TYPE, encode_trace(a_trace(image, 5)), annotations)

    assert pull_trace(layout, image, RUN) == a_trace(image, 1)


def test_an_outage_in_the_middle_is_told_and_not_taken_for_a_broken_part(layout, image):
    push_trace(layout, a_trace(image, 1))

    class Away(Between):
        def manifest(self, name):
            raise UnavailableError("gone")

    with pytest.raises(UnavailableError, match="gone"):
        pull_trace(Away(layout), image, RUN)


def test_a_part_whose_manifest_is_gone_alone_is_an_error(layout, image):
    push_trace(layout, a_trace(image, 1))

    class Gone(Between):
        def manifest(self, name):
            raise IntegrityError("altered")

    with pytest.raises(IntegrityError, match="altered"):
        pull_trace(Gone(layout), image, RUN)
