"""The block store compared with a dictionary: it may forget blocks, but never lies or exceeds its limit."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from snapshot.image.block.store import BlockStore
from snapshot.oci.digest import digest_of

CAPACITY = 2000
BLOCKS = st.builds(lambda n, size: bytes([n]) * size, st.integers(0, 9), st.integers(1, 700))


class BlockStoreModel(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="omniload-test-"))
        self.stores = [BlockStore(self.folder, CAPACITY), BlockStore(self.folder, CAPACITY)]
        self.put_once = {}

    def teardown(self):
        shutil.rmtree(self.folder)

    @rule(data=BLOCKS, which=st.integers(0, 1))
    def put(self, data, which):
        digest = digest_of(data)
        self.put_once[digest] = data

        assert self.stores[which].put_all({digest: data})

        assert self.stores[1 - which].get(digest) == data

    @rule(data=st.data(), which=st.integers(0, 1))
    def get(self, data, which):
        if self.put_once:
            digest = data.draw(st.sampled_from(sorted(self.put_once)))
            assert self.stores[which].get(digest) in {None, self.put_once[digest]}

    @rule(data=st.data(), piece=st.binary(max_size=5))
    def damage(self, data, piece):
        files = sorted(self.folder.glob("??/*"))
        if files:
            path = data.draw(st.sampled_from(files))
            path.write_bytes(piece)

    @rule(left=st.binary(max_size=30))
    def crash(self, left):
        """Leave the possible remains of a crash: half a file, and a wrong counter."""
        (self.folder / "new" / "half").write_bytes(left)
        (self.folder / "lock").write_bytes(left)
        self.stores = [BlockStore(self.folder, CAPACITY), BlockStore(self.folder, CAPACITY)]

    @invariant()
    def cap_holds(self):
        assert self.stores[0].used_bytes <= CAPACITY


TestBlockStoreModel = BlockStoreModel.TestCase
TestBlockStoreModel.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
