"""Nodes that push their traces at the same time, to a real registry and to a layout."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from snapshot.image.trace.sharing import pull_trace, push_trace
from snapshot.image.trace.store import TraceStore, push_new
from snapshot.image.trace.trace import Touch, merge_traces, trace_of
from snapshot.oci.image import open_store
from snapshot.oci.layout import OciLayout
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, an_image
from tests.support.snapshot.registry import needs, running_registry

RUN = ("python", "train.py")
TAR = a_tar(a_member("f", b"data"))


@pytest.fixture
def registry(tmp_path):
    needs("docker-registry")
    with running_registry(tmp_path) as address:
        yield f"{address}/a/b:v"


def built(store):
    return an_image(store, [(a_layer(store, TAR, "tar"), TAR)]).digest


def a_trace(image, number):
    return trace_of(image, RUN, [Touch(number, "f", 0, 4), Touch(number, f"of-{number}", 0, 9)])


def push_together(opened, image, traces):
    """Push each trace from a node of its own, all at once."""
    together = threading.Barrier(len(traces))

    def node(trace):
        store = opened()
        together.wait(20)
        push_trace(store, trace)
        store.close()

    with ThreadPoolExecutor(len(traces)) as pool:
        list(pool.map(node, traces))


def test_two_that_push_at_once_to_a_registry_end_as_one_merged_trace(registry):
    store, _ = open_store(registry)
    image = built(store)
    traces = [a_trace(image, number) for number in (1, 2)]

    push_together(lambda: open_store(registry)[0], image, traces)

    assert pull_trace(store, image, RUN) == merge_traces(traces)
    store.close()


def test_many_that_push_at_once_to_a_layout_lose_no_start(tmp_path):
    layout = OciLayout.create(tmp_path / "layout")
    image = built(layout)
    traces = [a_trace(image, number) for number in range(6)]

    push_together(lambda: OciLayout(tmp_path / "layout"), image, traces)

    assert pull_trace(layout, image, RUN) == merge_traces(traces)


def test_nodes_that_start_and_push_again_and_again_are_counted_once_each(registry, tmp_path):
    store, _ = open_store(registry)
    image = built(store)
    nodes = [TraceStore(tmp_path / f"node-{number}") for number in range(2)]

    for round_number in range(2):
        for number, node in enumerate(nodes):
            node.add(a_trace(image, number + 2 * round_number))
            push_new(store, node.path(image, RUN))

    found = pull_trace(store, image, RUN)
    assert found.runs == 4
    assert found == merge_traces([node.get(image, RUN) for node in nodes])
    store.close()
