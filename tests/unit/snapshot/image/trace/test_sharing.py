"""Traces beside their image: of each command that of the most starts, whoever pushed it."""

import io
import json
import logging

import pytest

from omniload.base.errors import IntegrityError, UnavailableError
from snapshot.image.trace.sharing import (
    TRACE_TYPE,
    pull_trace,
    pull_traces,
    push_trace,
    traces_tag,
)
from snapshot.image.trace.trace import Touch, encode_trace, merge_traces, trace_of
from snapshot.oci.digest import digest_of
from snapshot.oci.layout import OciLayout
from snapshot.oci.manifest import EMPTY_CONFIG, MANIFEST_TYPE, Descriptor, Manifest, encode
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, an_image

RUN = ("python", "train.py", "--step", "7")
OTHER = "sha256:" + "b" * 64
WORDS = "io.omniload.trace.command"
RUNS = "io.omniload.trace.runs"


@pytest.fixture
def layout(tmp_path):
    return OciLayout.create(tmp_path / "layout")


@pytest.fixture
def image(layout):
    tar = a_tar(a_member("f", b"data"))
    return an_image(layout, [(a_layer(layout, tar, "tar"), tar)]).digest


def a_trace(image, number=1, command=RUN, runs=1):
    one = trace_of(image, command, [Touch(number, "f", 0, 10)])
    return merge_traces([one] * runs)


def put(layout, image, data, annotations):
    """Write a document of one trace beside an image, as anybody may."""

    def pushed(media_type, data, annotations):
        blob = Descriptor(
            media_type=media_type, digest=digest_of(data), size=len(data), annotations=annotations
        )
        layout.push_blob(blob, lambda: io.BytesIO(data))
        return blob

    manifest = Manifest(
        schema_version=2,
        config=pushed(EMPTY_CONFIG, b"{}", {}),
        layers=(pushed(TRACE_TYPE, data, annotations),),
    )
    layout.push_manifest(encode(manifest), MANIFEST_TYPE, traces_tag(image))


def test_a_pushed_trace_is_found_by_command_or_a_near_one(layout, image):
    trace = a_trace(image)
    assert pull_trace(layout, image, RUN) is None

    assert push_trace(layout, trace)
    assert push_trace(layout, a_trace(image, command=("sh",)))

    assert pull_trace(layout, image, RUN) == trace
    assert pull_trace(layout, image, (*RUN[:-1], "8")) == trace
    assert pull_trace(layout, image, ("bash",)) is None
    assert pull_trace(layout, OTHER, RUN) is None


def test_the_traces_of_an_image_are_no_image_of_the_layout(layout, image, tmp_path):
    before = layout.tags()

    push_trace(layout, a_trace(image))

    assert OciLayout(tmp_path / "layout").tags() == before


def test_of_one_command_the_trace_of_the_most_starts_stays(layout, image):
    push_trace(layout, a_trace(image, 1, runs=2))

    assert not push_trace(layout, a_trace(image, 2, runs=2)), "the same, or another of as many"
    assert pull_trace(layout, image, RUN) == a_trace(image, 1, runs=2)
    assert push_trace(layout, a_trace(image, 3, runs=3))
    assert pull_trace(layout, image, RUN) == a_trace(image, 3, runs=3)


def test_traces_of_other_commands_stay_as_they_are(layout, image):
    push_trace(layout, a_trace(image, 1, ("sh",)))

    push_trace(layout, a_trace(image, 2))

    assert pull_trace(layout, image, ("sh",)) == a_trace(image, 1, ("sh",))


def test_a_command_too_long_to_be_told_stays_on_its_node(layout, image):
    assert not push_trace(layout, a_trace(image, command=("x" * 5000,)))

    assert pull_trace(layout, image, ("x" * 5000,)) is None


def test_an_image_that_is_not_there_gets_no_traces(layout):
    with pytest.raises(FileNotFoundError):
        push_trace(layout, a_trace(OTHER))


@pytest.mark.parametrize(
    "annotations",
    [
        {},
        {WORDS: "[[", RUNS: "1"},
        {WORDS: '{"a": 1}', RUNS: "1"},
        {WORDS: "[7]", RUNS: "1"},
        {WORDS: '["python"]', RUNS: "many"},
        {WORDS: "[" * 3000, RUNS: "1"},
    ],
)
def test_what_strangers_annotate_is_passed_over(layout, image, annotations):
    put(layout, image, encode_trace(a_trace(image)), annotations)

    assert pull_trace(layout, image, RUN) is None


@pytest.mark.parametrize("data", [encode_trace(a_trace(OTHER)), b"no trace"])
def test_a_trace_about_another_image_or_broken_is_refused_and_never_hot(
    layout, image, data, caplog
):
    put(layout, image, data, {WORDS: json.dumps(list(RUN)), RUNS: "2"})

    with pytest.raises(IntegrityError, match="trace"):
        pull_trace(layout, image, RUN)
    with caplog.at_level(logging.WARNING, "omniload"):
        assert pull_traces(layout, image) == []
    assert "passed over" in caplog.text


def test_of_an_unknown_command_the_traces_of_most_starts_are_read(layout, image):
    often = a_trace(image, runs=6)
    push_trace(layout, often)
    push_trace(layout, a_trace(image, command=("rare",)))

    assert pull_traces(layout, image) == [often]


def test_a_store_that_does_not_answer_is_told(layout, image):
    class Away:
        def manifest(self, name):
            raise UnavailableError(f"{name} does not answer")

    with pytest.raises(UnavailableError):
        pull_trace(Away(), image, RUN)
