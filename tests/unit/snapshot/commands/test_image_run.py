"""``omniload image prefetch``, from a layout: what it brings, says, and refuses; and who may record."""

import json
import os

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError, StateError, UnavailableError
from snapshot.commands.image import command
from snapshot.image.trace.store import TraceStore
from snapshot.image.trace.trace import Touch, encode_trace, trace_of
from snapshot.oci.layout import OciLayout
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, an_image, zran_friendly

TAR = a_tar(a_member("big", zran_friendly(5_000_000)))
RUN = ("python", "a.py")


@pytest.fixture
def place(tmp_path):
    """An image in a layout, and the trace of a start that touched its first 2 MB."""
    layout = OciLayout.create(tmp_path / "layout")
    layer = a_layer(layout, TAR, "tar")
    digest = an_image(layout, [(layer, TAR)], command=RUN).digest
    trace = trace_of(digest, RUN, [Touch(1, "big", 0, 2_000_000)])
    (tmp_path / "trace").write_bytes(encode_trace(trace))
    return tmp_path, layout, layer, trace


def prefetch(folder, *words):
    given = ["prefetch", f"oci:{folder / 'layout'}:v", "--option", f"cache={folder / 'cache'}"]
    found = CliRunner().invoke(command, [*given, *map(str, words)])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.stdout


def test_the_blocks_of_a_trace_are_brought_once(place):
    folder, *_ = place

    first = json.loads(prefetch(folder, "--trace", folder / "trace", "--json"))
    again = prefetch(folder, "--trace", folder / "trace")

    assert first["blocks"] == 2
    assert first["bytes_of"] == {"registry": 2 << 20}
    assert again == "2 blocks, 2 of them here before, 0 B moved\n"


def test_the_trace_is_found_by_the_command_of_the_image_or_the_one_given(place):
    folder, _, _, trace = place
    shared = ("--option", f"traces={folder / 'shared'}")
    with pytest.raises(ConfigError, match=r"no start of 'python a\.py'"):
        prefetch(folder)

    TraceStore(folder / "shared").add(trace)
    assert prefetch(folder, *shared).startswith("2 blocks")
    TraceStore(folder / "cache/traces").add(trace)
    assert prefetch(folder, "--", "python", "a.py", "--more").startswith("2 blocks")
    with pytest.raises(ConfigError, match="no start of 'sh'"):
        prefetch(folder, "--", "sh")


def test_blocks_that_are_not_to_be_had_are_an_outage(place):
    folder, _, layer, _ = place
    prefetch(folder, "--trace", folder / "trace")
    for path in (folder / "cache/blocks").glob("??/*"):
        path.unlink()
    (folder / "layout/blobs/sha256" / layer.digest.partition(":")[2]).unlink()

    with pytest.raises(UnavailableError, match="2 of 2 blocks"):
        prefetch(folder, "--trace", folder / "trace")


def test_a_cap_too_low_to_keep_them_is_said(place):
    folder, *_ = place

    with pytest.raises(StateError, match="2 of 2 blocks are not kept"):
        prefetch(folder, "--trace", folder / "trace", "--option", "disk=1KiB")


@pytest.mark.parametrize("verb", ["run", "record"])
def test_who_is_not_root_starts_nothing(monkeypatch, verb):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    found = CliRunner().invoke(command, [verb, "oci:/none:v", "--", "sh"])

    assert isinstance(found.exception, ConfigError)
    assert "run it as root" in str(found.exception)
