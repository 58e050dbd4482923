"""Images for the layer store, in a layout that acts as the registry."""

import tarfile

from snapshot.engines.podman.images import ServedImage
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import index_layer
from snapshot.oci.layout import OciLayout
from snapshot.oci.reference import Reference
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, an_image, zran_friendly

__all__ = ["BIG", "LOWER", "NAME", "UPPER", "FakeOpener", "a_served_image"]

NAME = Reference.parse("r.example/a:v")
BIG = zran_friendly(2_500_000)
LOWER = a_tar(
    a_member("tmp/", kind=tarfile.DIRTYPE, mode=0o1777),
    a_member("bin", BIG, mode=0o4755, xattrs={"user.x": b"v"}),
    a_member("gone", b"old"),
)
UPPER = a_tar(
    a_member(".wh.gone"),
    a_member("tmp/new", b"fresh"),
    a_member("link", kind=tarfile.SYMTYPE, linkname="bin"),
)


def a_served_image(folder, *, reference=NAME, tars=(LOWER, UPPER), left_out=(), command=("run",)):
    """Return an image of uncompressed layers; layers in ``left_out`` have no index."""
    store = OciLayout.create(folder / "layout")
    layers = [(a_layer(store, tar, "tar"), tar) for tar in tars]
    tag = reference.tag or "v"
    image = an_image(store, layers, tag, command)
    indexes = tuple(
        None if place in left_out else index_layer(store, layer, IndexCache(folder / "indexes"))
        for place, (layer, _) in enumerate(layers)
    )
    return ServedImage(reference=reference, store=store, image=image, indexes=indexes)


class FakeOpener:
    """Opens images as a script says and records the requests."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def __call__(self, reference, digest=None):
        self.asked.append((str(reference), digest))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer
