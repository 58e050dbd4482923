"""What is measured of shares of images: bytes that hang on the images, not on the ranks of a job."""

from benchmarks.planner.image_shares import figures_of
from omniload.plan.place_tree import ClientPlaceTree


def test_a_batch_grows_with_its_images_and_not_with_the_ranks_of_the_job():
    alone, *_ = figures_of(ClientPlaceTree.of(dp=8), 4)
    many, *seconds = figures_of(ClientPlaceTree.of(dp=8, pp=8, tp=8), 4)

    assert many < 2 * alone
    assert min(seconds) > 0
