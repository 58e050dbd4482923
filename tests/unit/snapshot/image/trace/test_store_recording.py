"""A trace is kept once: at the end of the window, or at the unmount where that is sooner."""

import logging
import threading

from omniload.base.errors import UnavailableError
from snapshot.image.layer.index import Entry
from snapshot.image.trace.store import Recording
from snapshot.image.trace.trace import Touch
from snapshot.image.tree.merge import merge

IMAGE = "sha256:" + "ab" * 32


def a_recording(keep, window_s=60.0):
    tree = merge([(Entry(path="f", kind="file", size_bytes=10),)])
    recording = Recording(tree, IMAGE, ["python", "a.py"], keep, lambda: 0.0, window_s)
    recording.note(tree.lookup("f").number, 0, 10)
    return recording


def test_what_was_read_is_kept_with_image_and_command():
    kept = []

    a_recording(kept.append).finish()

    (trace,) = kept
    assert (trace.image, trace.command, trace.runs) == (IMAGE, ("python", "a.py"), 1)
    assert trace.touches == (Touch(0, "f", 0, 10),)


def test_it_is_kept_when_the_window_ends_and_not_again_at_the_unmount():
    kept, done = [], threading.Event()

    def keep(trace):
        kept.append(trace)
        done.set()

    recording = a_recording(keep, window_s=0.0)
    recording.start()
    assert done.wait(60)
    recording.finish()

    assert len(kept) == 1


def test_an_unmount_before_the_end_of_the_window_keeps_it_once():
    kept = []
    recording = a_recording(kept.append, window_s=1e12)  # longer than any timer can wait

    recording.start()
    recording.finish()
    recording.finish()

    assert len(kept) == 1


def test_a_trace_that_cannot_be_kept_costs_a_warning(caplog):
    def fail(_):
        raise UnavailableError("no disk")

    with caplog.at_level(logging.WARNING, "omniload"):
        a_recording(fail).finish()

    assert "what was recorded is lost: no disk" in caplog.text


def test_a_mount_from_which_nothing_was_read_is_no_start():
    kept = []
    tree = merge([(Entry(path="f", kind="file", size_bytes=10),)])

    Recording(tree, IMAGE, ["python"], kept.append, lambda: 0.0, 60.0).finish()

    assert kept == []
