"""The head of a tree reads back, and one that cannot be what was written is refused."""

import json

import pytest

from omniload.base.errors import StateError
from snapshot.env.key.keys import key_of
from snapshot.env.node.tree import TreeHead, decode_head, encode_head

DOCUMENT = {"version": 1, "command": ["true"]}
HEAD = TreeHead(key_of(DOCUMENT), DOCUMENT, ["modules", "scripts"], [0, 1], 7)


def test_a_head_reads_back_with_its_version_and_without():
    old = json.dumps(HEAD._asdict())

    assert decode_head(encode_head(HEAD).encode()) == HEAD
    assert decode_head(old.encode()) == HEAD


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"key": "0" * 64},
        {"document": []},
        {"targets": "ab"},
        {"used": [2]},
        {"used": [True]},
        {"raw_bytes": -1},
        {"more": 1},
    ],
)
def test_a_head_that_was_altered_is_refused(change):
    text = json.dumps({**json.loads(encode_head(HEAD)), **change})

    with pytest.raises(StateError, match="head of a tree"):
        decode_head(text.encode())


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_what_is_no_head_is_refused(text):
    with pytest.raises(StateError, match="head of a tree"):
        decode_head(text)
