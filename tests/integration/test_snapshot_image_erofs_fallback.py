"""Images where the kernel cannot show them by itself: FUSE does, and the log says why. Runs on any kernel."""

import os

import pytest

from omniload.base.errors import ConfigError
from snapshot.image.mounting import mount
from tests.support.erofs_builders import a_stream
from tests.support.erofs_mounts import LazyMount, needs_erofs, pushed
from tests.support.image_builders import a_member

pytestmark = pytest.mark.fuse

DATA = a_stream(300_000, seed=6)


@pytest.fixture
def image(tmp_path):
    return pushed(tmp_path, [a_member("data", DATA)])


@pytest.fixture
def no_erofs(tmp_path, monkeypatch):
    """Processes of this test find that no EROFS can be mounted: they may not make its probe."""
    folder = tmp_path / "python"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os\nimport pathlib\n"
        "read = pathlib.Path.read_text\n"
        "pathlib.Path.read_text = lambda self, *told, **more: (\n"
        "    'nodev\\ttmpfs\\n' if str(self) == '/proc/filesystems' else read(self, *told, **more)\n"
        ")\n"
        "os.geteuid = lambda: 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")


def as_if_whole(image, folder):
    """Put files in the places of whole blobs: enough to make a mount ask what the kernel can."""
    with LazyMount(image, folder, through="fuse"):
        pass
    layers = folder / "cache/erofs/v2/layers"
    layers.mkdir(parents=True)
    for blob in (folder / "layout/blobs/sha256").iterdir():
        (layers / f"{blob.name}.{'0' * 32}").touch()


@pytest.mark.usefixtures("no_erofs")
def test_auto_is_fuse_on_a_kernel_that_cannot_and_the_log_says_why(image, tmp_path):
    as_if_whole(image, tmp_path)

    with LazyMount(image, tmp_path, through="auto", allow_other=os.geteuid() == 0) as mounted:
        assert mounted.kind.startswith("fuse")
        assert (mounted.root / "data").read_bytes() == DATA

    said = mounted.log.read_text()
    why = f"kernel {os.uname().release} has no EROFS" if os.geteuid() == 0 else "'allow_other'"
    assert "shown through FUSE: " in said
    assert why in said


@pytest.mark.usefixtures("no_erofs")
def test_erofs_is_refused_on_a_kernel_that_cannot_and_the_error_says_why(image, tmp_path):
    why = f"kernel {os.uname().release} has no EROFS; ask for fuse or auto"

    with pytest.raises(ConfigError, match=why):
        mount(LazyMount(image, tmp_path).settings)

    assert not (tmp_path / "cache/erofs").exists()


def test_what_is_put_in_the_place_of_a_blob_is_not_believed(image, tmp_path):
    needs_erofs(tmp_path, filling=False)
    as_if_whole(image, tmp_path)

    with LazyMount(image, tmp_path, through="auto") as mounted:
        assert mounted.kind.startswith("fuse")
        assert (mounted.root / "data").read_bytes() == DATA

    assert "shown through FUSE: some of its layers are not whole here" in mounted.log.read_text()
