"""The source contract over every kind of shard."""

import pytest

from tests.support.plane.sources.source_contract import SourceContract
from tests.support.plane.sources.source_kinds import KINDS


class TestSourceFormats(SourceContract):
    @pytest.fixture(params=KINDS)
    def kind(self, request):
        return KINDS[request.param]()
