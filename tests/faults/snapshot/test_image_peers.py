"""Peers that are slow, silent, dead, full or lying cost time at most, and never wrong bytes."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import urllib3

from omniload.base.clock import FakeClock
from snapshot.image.block.store import BlockStore
from snapshot.image.peer import node
from snapshot.image.peer.node import BlockShare, PeerServer
from snapshot.image.peer.peer_tier import HeldBlocks, PeerPatience, PeerTier
from snapshot.image.peer.protocol import (
    MAX_REQUEST_BYTES,
    WAITING,
    block_frame,
    ranking,
    region_of,
    request_body,
)
from tests.support.snapshot.peer_builders import (
    BLOCKS,
    HandTier,
    fetched,
    free_addresses,
    nodes_of,
    peer_by_hand,
    peer_index,
    peer_refs,
)

TOKEN = "a-token-of-some-length"
LONG_S = 60.0
OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return peer_index(tmp_path_factory.mktemp("layer"))


@pytest.fixture
def tier_of():
    made = []

    def build(*members, me="nobody", **changes):
        # Of a peer that is well, as all are whose silence is not what a test is about.
        clock = changes.pop("clock", None)
        patience = PeerPatience(**{"connect_s": LONG_S, "silent_s": LONG_S, **changes})
        made.append(PeerTier(members, me, patience=patience, clock=clock))
        return made[-1]

    yield build
    for tier in made:
        tier.close()


@pytest.fixture
def server_of(index):
    made = []

    def build(*numbers, registry=None, **changes):
        held = HeldBlocks(None)
        for number in numbers:
            held.recent.put(index.digest(number), BLOCKS[number], len(BLOCKS[number]))
        tiers = {"registry": registry} if registry is not None else {}
        share = BlockShare(held, tiers, [index])
        made.append((PeerServer(share, **changes), share))
        return made[-1][0]

    yield build
    for server, share in made:
        server.close()
        share.close()


def post(server, body, path="/v2/blocks", **headers):
    with urllib3.PoolManager() as pool:
        url = f"http://127.0.0.1:{server.server_address[1]}{path}"
        answer = pool.request(
            "POST", url, body=body, headers=headers, retries=False, timeout=LONG_S
        )
        return answer.status, answer.data


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


# What a server refuses.


@pytest.mark.parametrize("given", [None, "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", "\xff\xfe"])
def test_a_server_with_a_token_hands_nothing_to_those_who_lack_it(index, server_of, given):
    server = server_of(0, token=TOKEN)
    body = request_body(index.blob_digest, [(0, index.digest(0))])
    headers = {"Authorization": given} if given is not None else {}

    status, said = post(server, body, **headers)

    assert (status, b"token" in said) == (401, True)
    assert post(server, body, Authorization=f"Bearer {TOKEN}")[0] == 200


@pytest.mark.parametrize(
    ("body", "path", "status"),
    [
        (b"{}", "/v2/blocks", 400),
        (b"x" * (MAX_REQUEST_BYTES + 1), "/v2/blocks", 413),
        (b"{}", "/../etc/passwd", 404),
        (b"{}", "/v2/blocks/", 404),
    ],
    ids=["no request", "too large", "a path", "another path"],
)
def test_a_server_refuses_what_is_no_request_and_serves_on(index, server_of, body, path, status):
    server = server_of(0)

    assert post(server, body, path)[0] == status

    good = request_body(index.blob_digest, [(0, index.digest(0))])
    assert post(server, good) == (200, block_frame(1 << 20) + BLOCKS[0])


def test_a_server_has_no_other_methods(server_of):
    with urllib3.PoolManager() as pool:
        url = f"http://127.0.0.1:{server_of(0).server_address[1]}/v2/blocks"
        assert pool.request("GET", url, retries=False).status == 501


def test_connections_beyond_the_limit_are_sent_away_and_those_within_are_served(index, server_of):
    gate = threading.Event()
    registry = HandTier(gate=gate)
    server = server_of(registry=registry, connections=1)
    body = request_body(index.blob_digest, [(0, index.digest(0))])
    first = []
    holding = threading.Thread(target=lambda: first.append(post(server, body)))
    holding.start()
    assert registry.arrived.acquire(timeout=LONG_S)

    assert post(server, body)[0] == 503

    gate.set()
    holding.join()
    assert first[0][0] == 200
    assert first[0][1].endswith(BLOCKS[0])


def test_a_block_altered_on_disk_is_not_handed_out(index, tmp_path):
    disk = BlockStore(tmp_path / "blocks", 64 << 20)
    disk.put_all({index.digest(0): BLOCKS[0]})
    value = index.digest(0).partition(":")[2]
    (tmp_path / "blocks" / value[:2] / value).write_bytes(b"\0" + BLOCKS[0][1:])
    share = BlockShare(HeldBlocks(disk), {}, [index])
    server = PeerServer(share)
    try:
        body = request_body(index.blob_digest, [(0, index.digest(0))])
        assert post(server, body) == (200, b"N\0\0\0\0")
    finally:
        server.close()
        share.close()


# What a receiver bears.


def test_blocks_come_from_a_peer_that_has_them_and_waiting_is_for_those_it_gets(
    index, server_of, tier_of
):
    registry = HandTier()
    server = server_of(0, 1, registry=registry)
    tier = tier_of(f"127.0.0.1:{server.server_address[1]}")

    found, moved = tier.fetch(index, peer_refs(index))

    assert [found[index.digest(number)] for number in range(10)] == BLOCKS
    assert moved == sum(map(len, BLOCKS)) == server.served_bytes
    assert registry.numbers == list(range(2, 10))


def lying(connection, over):
    """Send a block of the right size with other bytes."""
    connection.sendall(OK + chunk(block_frame(1 << 20) + bytes(1 << 20)) + b"0\r\n\r\n")


def boasting(connection, over):
    """Announce a block of four gigabytes."""
    connection.sendall(OK + chunk(block_frame((1 << 32) - 1)))


def babbling(connection, over):
    connection.sendall(OK + chunk(b"nonsense" * 100))


def refusing(connection, over):
    connection.sendall(b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno")


def sending_away(connection, over):
    connection.sendall(
        b"HTTP/1.1 302 There\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"
    )


def hanging_up(connection, over):
    """Say nothing at all."""


def breaking_off(connection, over):
    connection.sendall(OK + b"100005\r\n" + block_frame(1 << 20) + bytes(1000))


def silent(connection, over):
    assert over.wait(LONG_S)


def ever_waiting(connection, over):
    """Be well, and never have anything."""
    connection.sendall(OK)
    while not over.wait(0.02):
        try:
            connection.sendall(chunk(WAITING))
        except OSError:
            return


def trickling(connection, over):
    """Send a block of zeroes, byte by byte."""
    connection.sendall(OK + b"100005\r\n" + block_frame(1 << 20))
    while not over.wait(0.02):
        try:
            connection.sendall(b"\0")
        except OSError:
            return


@pytest.mark.parametrize(
    ("answer", "is_left_alone"),
    [
        (lying, True),
        (boasting, True),
        (babbling, True),
        (refusing, True),
        (sending_away, True),
        (hanging_up, True),
        (breaking_off, True),
        (silent, True),
        (ever_waiting, False),
        (trickling, False),
    ],
)
def test_a_bad_peer_gives_nothing_and_the_next_one_is_asked(
    index, server_of, tier_of, answer, is_left_alone
):
    good = f"127.0.0.1:{server_of(*range(10)).server_address[1]}"
    # Short is what it is given up by alone: on a busy machine everything else may come late, and one that is left alone
    # for a second would be asked again.
    total_s, clock = (LONG_S, FakeClock()) if is_left_alone else (0.6, None)
    with peer_by_hand(answer) as (bad, sent):
        alone_s = 0.3 if answer is silent else LONG_S
        alone = tier_of(bad, silent_s=alone_s, total_s=total_s, clock=clock)
        assert alone.fetch(index, peer_refs(index, (0,)))[0] == {}
        while not sent:  # one that is silent may have read nothing yet
            threading.Event().wait(0.01)
        assert len(sent) in (1, 2)  # a connection that broke off before an answer is tried again
        before = len(sent)
        alone.fetch(index, peer_refs(index, (0,)))
        while not is_left_alone and len(sent) == before:  # it may have read nothing yet
            threading.Event().wait(0.01)
        assert (len(sent) == before) == is_left_alone
        # A node that ranks after both asks the bad one first, or the good one; both give right bytes.
        for silent_s in (2.0, 8.0, LONG_S) if answer is silent else (LONG_S,):
            both = tier_of(bad, good, silent_s=silent_s, total_s=total_s, clock=clock)
            found, _ = both.fetch(index, peer_refs(index, range(4)))
            if len(found) == 4:  # a busy machine may keep the good one silent for as long
                break
        if is_left_alone:
            assert list(found.values()) == BLOCKS[:4]
        right = {ref.digest: BLOCKS[ref.number] for ref in peer_refs(index, range(4))}
        assert found.items() <= right.items()


def test_a_peer_that_is_slow_but_says_so_is_waited_for(index, server_of, tier_of, monkeypatch):
    monkeypatch.setattr(node, "_SAY_SO_S", 0.1)
    for silent_s in (1.5, 6.0, 24.0):
        registry, found = HandTier(gate=threading.Event()), []
        server = server_of(registry=registry)
        tier = tier_of(f"127.0.0.1:{server.server_address[1]}", silent_s=silent_s, total_s=LONG_S)

        def read(tier=tier, found=found):
            found.append(tier.fetch(index, peer_refs(index, (0,)))[0])

        reader = threading.Thread(target=read)
        reader.start()
        assert registry.arrived.acquire(timeout=LONG_S)
        reader.join(silent_s + 1.0)  # longer than silence is borne
        has_waited = reader.is_alive()
        registry.gate.set()
        reader.join()
        if has_waited and found != [{}]:  # a busy machine may keep it from saying so for as long
            break

    assert has_waited
    assert found == [{index.digest(0): BLOCKS[0]}]


# Nodes together.


def test_nodes_that_start_together_ask_the_registry_once(tmp_path, index):
    registry = HandTier()
    addresses = free_addresses(6)
    with nodes_of(tmp_path, index, registry, addresses) as nodes:
        results = []
        readers = [
            threading.Thread(
                target=lambda node=node: results.append(fetched(node, index, peer_refs(index)))
            )
            for node in nodes.values()
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        numbers = [node.numbers() for node in nodes.values()]

    assert registry.numbers == list(range(10))
    assert len(results) == 6
    for found, _ in results:
        assert [found[index.digest(number)] for number in range(10)] == BLOCKS
    size = sum(map(len, BLOCKS))
    own = sum(moved.get("registry", 0) for _, moved in results)
    assert own + sum(n["for peers from registry"] for n in numbers) == size
    # Every node but the home of a block got it from a peer; on a busy machine one that keeps silent
    # for seconds is given up, and what it sends then comes twice.
    assert 5 * size <= sum(n["served"] for n in numbers) <= 6 * size


def test_a_home_that_is_dead_is_replaced_by_one_node_and_not_by_all(tmp_path, index):
    registry = HandTier()
    addresses = free_addresses(5)
    home = ranking(addresses, region_of(peer_refs(index)[0]))[0]
    up = set(addresses) - {home}
    with nodes_of(tmp_path, index, registry, addresses, up=up) as nodes:
        for node in nodes.values():
            found, _ = fetched(node, index, peer_refs(index))
            assert [found[index.digest(number)] for number in range(10)] == BLOCKS

    assert registry.numbers == list(range(10))


def test_full_disks_cost_no_read_and_the_registry_is_still_asked_once(tmp_path, index, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    registry = HandTier()
    with nodes_of(tmp_path, index, registry, free_addresses(4)) as nodes:
        monkeypatch.setattr(BlockStore, "_write", full)
        for node in nodes.values():
            found, _ = fetched(node, index, peer_refs(index))
            assert [found[index.digest(number)] for number in range(10)] == BLOCKS

    assert registry.numbers == list(range(10))


HALF = """
import json, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
head = sys.stdin.buffer.readline()
connection, _ = listener.accept()
connection.recv(65536)
connection.sendall(bytes.fromhex(json.loads(head)))
print("half", flush=True)
sys.stdin.buffer.read()
"""


def test_a_peer_killed_in_mid_transfer_costs_only_the_rest_of_it(index, server_of, tier_of):
    """One block is whole, of the next a part is on its way: the first is kept, the second fetched anew."""
    said = OK + chunk(block_frame(1 << 20) + BLOCKS[0])
    said += b"100005\r\n" + block_frame(1 << 20) + BLOCKS[1][:5000]
    command = [sys.executable, "-c", HALF]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        port = int(process.stdout.readline())
        tier, registry = tier_of(f"127.0.0.1:{port}", clock=FakeClock()), HandTier()
        process.stdin.write(json.dumps(said.hex()).encode() + b"\n")
        process.stdin.flush()
        results = []
        reader = threading.Thread(
            target=lambda: results.append(tier.fetch(index, peer_refs(index, (0, 1))))
        )
        reader.start()
        assert process.stdout.readline() == b"half\n"

        process.send_signal(signal.SIGKILL)
        reader.join()

    assert process.returncode == -signal.SIGKILL
    ((found, moved),) = results
    assert (found, moved) == ({index.digest(0): BLOCKS[0]}, 1 << 20)
    assert tier.fetch(index, peer_refs(index, (1,))) == ({}, 0)  # left alone now
    assert registry.fetch(index, peer_refs(index, (1,)))[0] == {index.digest(1): BLOCKS[1]}
