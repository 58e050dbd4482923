"""Files of ranks: what tiktoken reads of them, and what is wrong with others."""

import base64
from pathlib import Path

import pytest
from tiktoken.load import load_tiktoken_bpe

from omniload.base.errors import ConfigError
from omniload.source.byte_pairs.ranks import parse_ranks
from tests.support.plane.ranks import ranks_of, trained, write_ranks

BYTES = {bytes([i]): i for i in range(256)}


def test_ranks_are_those_that_tiktoken_reads(tmp_path):
    path = write_ranks(tmp_path / "own.tiktoken", ranks_of(trained()))

    assert parse_ranks(path.read_bytes(), path) == load_tiktoken_bpe(str(path))


def a_line(token, rank):
    return b"%s %s\n" % (base64.b64encode(token), rank)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (a_line(b"th", b"7"), r"line 257: rank 7 is that of line 8 too"),
        (a_line(b"a", b"256"), r"line 257: token b'a' is that of line 98 too"),
        (a_line(b"th", b"-1"), r"line 257: holds b'dGg= -1', not a token in base 64 and a rank"),
        (a_line(b"th", b"2147483648"), r"line 257: .* a rank from 0 to 2147483647"),
        (a_line(b"", b"256"), r"line 257: holds b' 256'"),
        (b"dGg\n", r"line 257: holds b'dGg'"),
        (b"d*Gg 256\n", r"line 257: holds b'd\*Gg 256'"),
        (b'{"version": "1.0"}\n', r"line 257: holds"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path, more, said):
    data = write_ranks(tmp_path / "bytes", BYTES).read_bytes()

    with pytest.raises(ConfigError, match=f"^own: {said}"):
        parse_ranks(data + more, Path("own"))


def test_a_file_without_a_token_for_every_byte_is_refused(tmp_path):
    lines = write_ranks(tmp_path / "bytes", BYTES).read_bytes().splitlines(keepends=True)

    with pytest.raises(ConfigError, match=r"has 200 tokens, and none for byte 200 and 55 others"):
        parse_ranks(b"".join(lines[:200]), Path("own"))
