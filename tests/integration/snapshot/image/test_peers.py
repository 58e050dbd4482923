"""Nodes as processes before one real registry, each with its own network where that can be had."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from snapshot.commands.image import command
from snapshot.image.layer.convert import convert_image
from snapshot.oci.image import open_store
from snapshot.oci.layout import OciLayout
from tests.support.namespaces import inside
from tests.support.snapshot import peer_process
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, an_image
from tests.support.snapshot.peer_builders import free_addresses
from tests.support.snapshot.registries.registry import needs, running_registry

NODES = 8
SIZE = 24 << 20
RATE = 16e6
"""Bytes per second of the registry's link: alone, a node needs 1.6 s for all."""


class Relay:
    """Passes connections on to the registry, and counts what comes back."""

    def __init__(self, target, host, rate):
        self.sent_bytes, self._rate, self._free_at_s = 0, rate, 0.0
        self._target = target
        self._lock, self._open = threading.Lock(), []
        self._listener = socket.create_server((host, 0), backlog=256)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            host, port = self._target.split(":")
            registry = socket.create_connection((host, int(port)))
            self._open += [client, registry]
            for source, goal, counts in ((client, registry, False), (registry, client, True)):
                thread = threading.Thread(target=self._pass, args=(source, goal, counts))
                self._threads.append(thread)
                thread.start()

    def _pass(self, source, goal, counts):
        try:
            while data := source.recv(1 << 18):
                goal.sendall(data)
                if counts:
                    self._sent(len(data))
            goal.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def _sent(self, size):
        """Count, and keep to the rate: all connections share one link, as a registry's do."""
        with self._lock:
            self.sent_bytes += size
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s) + size / self._rate
            wait_s = self._free_at_s - now_s
        if wait_s > 0.01:
            time.sleep(wait_s)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._open:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._open):
            each.close()


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """A registry's address, and the size of the one layer of its ``a/hot:v``, which can be read in parts."""
    needs("docker-registry")
    folder = tmp_path_factory.mktemp("registry")
    layout = OciLayout.create(folder / "layout")
    files = [(f"opt/file{i}", os.urandom(SIZE // 12)) for i in range(12)]
    tar = a_tar(*(a_member(name, data) for name, data in files))
    image = an_image(layout, [(a_layer(layout, tar, "tar"), tar)])
    with running_registry(folder) as address:
        goal, tag = open_store(f"{address}/a/hot:v")
        made = convert_image(layout, image, goal, tag)
        goal.close()
        yield address, sum(layer.size for layer in made.layers), dict(files)


@contextmanager
def relayed(registry, host="127.0.0.1", rate=1e9):
    relay = Relay(registry[0], host, rate)
    try:
        yield relay
    finally:
        relay.close()


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextmanager
def networks(count):
    """Yield the prefix, address and link of each node: namespaces on one bridge, 10.213.x.0/24."""
    needs("ip")
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: network namespaces need root")
    number = os.getpid() % 250
    # Not by the number: of a test that was killed names are left.
    bridge, prefix = f"omni{uuid.uuid4().hex[:6]}", f"10.213.{number}"
    with ExitStack() as undone:
        try:
            ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"NOT TESTED: no bridges and namespaces here: {error.stderr!r}")
        undone.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{prefix}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        nodes = []
        for i in range(count):
            name, address = f"{bridge}n{i}", f"{prefix}.{i + 10}"
            ip("netns", "add", name)
            undone.callback(ip, "netns", "del", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", name, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            nodes.append((inside(name), f"{address}:7070", name))
        yield f"{prefix}.1", nodes


class Node:
    """One process; ``peers`` of none is a node alone. What is more are variables of its environment."""

    def __init__(self, python, image, cache, peers=(), address="", prefix=(), token=None, **more):
        words = [image, str(cache), ",".join(peers), address, token or ""]
        self.process = subprocess.Popen(
            [*prefix, python.path, peer_process.__file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"PYTHONPATH": str(Path(__file__).parents[4]), "OMP_NUM_THREADS": "1"}
            | more,
        )

    def ready(self):
        assert self.process.stdout.readline() == "ready\n"

    def begin(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def told(self):
        return json.loads(self.process.stdout.readline())


@contextmanager
def started(nodes):
    """Wait until all are ready, let them begin together, and leave none behind."""
    try:
        for node in nodes:
            node.ready()
        for node in nodes:
            node.begin()
        yield
    finally:
        for node in nodes:
            node.process.kill()
            node.process.stdin.close()
            node.process.wait()
            node.process.stdout.close()


def test_eight_nodes_that_start_together_read_the_registry_about_once(
    registry, warm_commands, tmp_path, record_property, leaves_nothing_behind
):
    _, size, _ = registry
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length")
    with networks(NODES) as (gateway, places), relayed(registry, gateway, RATE) as relay:
        image = f"http://{relay.address}/a/hot:v"
        alone = Node(warm_commands, image, tmp_path / "alone", prefix=places[0][0])
        with started([alone]):
            single = alone.told()
        one_copy = relay.sent_bytes
        peers = [address for _, address, _ in places]
        # One that gives a peer up which is only slow asks the registry once more.
        nodes = [
            Node(
                *(warm_commands, image, tmp_path / f"{i}", peers, address, prefix, str(token)),
                PATIENT="yes",
            )
            for i, (prefix, address, _) in enumerate(places)
        ]
        with started(nodes):
            told = [node.told() for node in nodes]
            for node in nodes:
                node.process.stdin.close()
            gave = [node.told() for node in nodes]
        sent = relay.sent_bytes - one_copy

    assert one_copy >= size > SIZE
    assert {each["sha256"] for each in told} == {single["sha256"]}
    assert sent <= 1.5 * one_copy
    moved = sum(each["bytes"]["registry"] for each in told)
    moved += sum(each["for peers from registry"] for each in gave)
    assert one_copy * 0.9 <= moved <= sent
    served = [each["served"] for each in gave]
    assert sum(served) >= 0.9 * (NODES - 1) * SIZE
    slowest, cpu = max(each["seconds"] for each in told), sum(each["cpu_s"] for each in told)
    record_property("copies_sent", sent / one_copy)
    record_property("slowest_over_one_alone", slowest / single["seconds"])
    record_property("cpu_s_of_a_node_and_of_one_alone", [cpu / NODES, single["cpu_s"]])
    record_property("most_copies_given_by_a_node", max(served) / SIZE)


def test_nodes_that_are_killed_or_cut_off_while_all_start_cost_the_others_no_byte(
    registry, warm_commands, tmp_path, leaves_nothing_behind
):
    with networks(4) as (gateway, places), relayed(registry, gateway, RATE) as relay:
        image = f"http://{relay.address}/a/hot:v"
        token = tmp_path / "token"
        token.write_text("a-token-of-some-length")
        peers = [address for _, address, _ in places]
        nodes = [
            Node(warm_commands, image, tmp_path / f"{i}", peers, address, prefix, str(token))
            for i, (prefix, address, _) in enumerate(places)
        ]
        with started(nodes):
            nodes[0].process.send_signal(signal.SIGKILL)
            # As if its cable were pulled: no answer, no error.
            ip("link", "set", places[1][2], "down")
            told = [node.told() for node in nodes[2:]]

    assert len({each["sha256"] for each in told}) == 1
    assert all(set(each["bytes"]) >= {"peer", "registry"} for each in told)


@pytest.mark.fuse
def test_two_mounts_on_one_machine_share_blocks(registry, tmp_path):
    if not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None:
        pytest.skip("NOT TESTED: needs /dev/fuse and fusermount3")
    peers = free_addresses(2)
    with relayed(registry) as relay:
        processes, roots = [], []
        for number, address in enumerate(peers):
            root = tmp_path / f"mnt{number}"
            root.mkdir()
            options = f"peers={','.join(peers)},serve={address},cache={tmp_path / f'c{number}'}"
            words = ["mount", f"{relay.address}/a/hot:v", str(root), "-o", options]
            shown = CliRunner().invoke(command, [*words, "--log", str(tmp_path / f"log{number}")])
            assert shown.exit_code == 0, shown.output
            processes.append(int(re.search(r"process (\d+)", shown.output)[1]))
            roots.append(root)
        before = relay.sent_bytes
        for root in roots:
            for name, data in registry[2].items():
                assert (root / name).read_bytes() == data
        sent = relay.sent_bytes - before
        for root, process in zip(roots, processes, strict=True):
            CliRunner().invoke(command, ["umount", str(root)], catch_exceptions=False)
            os.waitpid(process, 0)

    assert sent <= 1.1 * registry[1]
    logs = [(tmp_path / f"log{number}").read_text() for number in range(2)]
    given = [int(re.search(r"bytes of peers: .*'served': (\d+)", log)[1]) for log in logs]
    assert sum(given) >= 0.9 * SIZE
