"""The source contract over files of a format of somebody else's, which a registered reader decodes."""

import sys

import pytest

from omniload.base.settings import registry
from omniload.mix.config import ByteTokenizer
from omniload.mix.sources import RegisteredSource
from tests.support.plane.sources.lab_reader import install, write_frames
from tests.support.plane.sources.source_contract import SourceContract, expected_tokens
from tests.support.plane.sources.source_kinds import SHUFFLE, cut_end


class Frames:
    suffix = ".frames"
    holds = "text"
    tokenizer = ByteTokenizer(type="bytes")

    def write(self, path, texts):
        write_frames(path, texts)

    def config(self, folder):
        return RegisteredSource(
            type="registered",
            reader="frames",
            path="*.frames",
            holds=self.holds,
            options={"frames": 16, "as_ids": self.holds == "tokens"},
            shuffle=SHUFFLE,
        )

    def corrupt(self, path):
        """Have a frame in the middle claim more than there is."""
        data = bytearray(path.read_bytes())
        data[data.index(b"record 20") - len("shard 0 ") - 4] = 0xFF
        path.write_bytes(data)

    def truncate(self, path):
        cut_end(path)


class FramesOfIds(Frames):
    holds, tokenizer = "tokens", None


class TestRegisteredFormat(SourceContract):
    @pytest.fixture(autouse=True)
    def lab(self, tmp_path_factory, monkeypatch):
        folder = tmp_path_factory.mktemp("lab")
        monkeypatch.syspath_prepend(folder)
        install(folder)
        yield
        sys.modules.pop("lab_of_readers", None)
        registry.registered.cache_clear()

    @pytest.fixture(params=[Frames, FramesOfIds])
    def kind(self, request):
        return request.param()


def test_ids_and_texts_of_the_reader_are_told_apart():
    assert expected_tokens("a") == (97, 256)
