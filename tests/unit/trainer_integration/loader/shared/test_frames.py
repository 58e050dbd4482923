"""Messages of a group."""

import socket

import pytest

from omniload.base.errors import IntegrityError
from trainer_integration.loader.shared.frames import Frame, Kind, Wire, packed


@pytest.fixture
def ends():
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def test_messages_come_as_they_were_sent(ends):
    sent = [
        Frame(Kind.BATCH, 1 << 31, b"x" * 70_000, (5, 1 << 20)),
        Frame(Kind.DROP, 2),
        Frame(Kind.ASK, 3, b"\0key"),
    ]
    wire = Wire(ends[1])
    for frame in sent:
        ends[0].sendall(packed(frame))

    assert [wire.receive(0) for _ in sent] == sent
    assert wire.receive(0) is None


def test_the_end_of_the_other_side_is_told(ends):
    ends[0].sendall(packed(Frame(Kind.DROP, 2))[:-1])
    ends[0].shutdown(socket.SHUT_WR)

    with pytest.raises(EOFError, match="closed the connection"):
        Wire(ends[1]).receive(0)


@pytest.mark.parametrize(
    ("at", "byte"), [(0, 99), (9, 0x7F), (13, 0x7F)], ids=["kind", "slots", "size"]
)
def test_a_message_out_of_range_is_refused(ends, at, byte):
    data = bytearray(packed(Frame(Kind.DROP, 2)))
    data[at] = byte
    ends[0].sendall(data)

    with pytest.raises(IntegrityError, match="one release of omniload"):
        Wire(ends[1]).receive(0)
