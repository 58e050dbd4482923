"""The mount under tools made to break filesystems: fio with checksums, dbench, stress-ng with --verify."""

import pytest

from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT, proven_mount, without

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT),
    pytest.mark.skipif(**without("fio", "dbench", "stress-ng")),
]


@pytest.fixture(scope="module")
def mounted():
    # Files of a few units, so that every path of a striped file is taken by small ones.
    striping = {"unit": 65536, "count": 3}
    with proven_mount(files={"striping": striping, "plain_limit": 65536}) as running:
        yield running


@pytest.fixture
def folder(mounted, request):
    yield mounted.folder(request.node.name.replace("/", "-"))
    mounted.check()


FIO = [
    "fio",
    "--name=j",
    "--directory=.",
    "--ioengine=psync",
    "--verify=crc32c",
    "--verify_fatal=1",
]


@pytest.mark.parametrize("direct", [0, 1])
@pytest.mark.parametrize("kind", ["write", "randwrite", "rw", "randrw"])
def test_fio_reads_back_the_checksums_it_wrote(mounted, folder, kind, direct):
    said = mounted.run(
        *FIO,
        f"--rw={kind}",
        f"--direct={direct}",
        "--bs=4k,64k,16k" if kind == "write" else "--bs=64k",
        "--size=6m",
        "--numjobs=3",
        cwd=folder,
    )

    assert said.count("err= 0") == 3


@pytest.mark.parametrize("direct", [0, 1])
def test_fio_reads_back_small_random_writes_synced_every_few(mounted, folder, direct):
    said = mounted.run(
        *FIO, "--rw=randwrite", f"--direct={direct}", "--bs=4k", "--size=4m", "--io_size=600k",
        "--fsync=3", "--numjobs=2", cwd=folder,
    )  # fmt: skip

    assert said.count("err= 0") == 2


def test_fio_maps_files_and_writes_through_the_mapping(mounted, folder):
    said = mounted.run(
        "fio", "--name=j", "--directory=.", "--ioengine=mmap", "--verify=crc32c", "--rw=randrw",
        "--bs=4k", "--size=2m", "--numjobs=2", cwd=folder,
    )  # fmt: skip

    assert said.count("err= 0") == 2


@pytest.mark.parametrize("seconds", ["1", pytest.param("20", marks=pytest.mark.soak)])
def test_dbench_runs_with_four_clients(mounted, folder, seconds):
    said = mounted.run("dbench", "-t", seconds, "-D", folder, "4")

    assert "Throughput" in said
    assert "4 clients" in said


# What starts together runs together: one of each against the others.
STRESSORS = {
    "names": "dentry dir dirdeep dirmany filename rename touch mknod",
    "attributes": "access chmod chown fstat getdent utime xattr inode-flags handle",
    "data": "hdd iomix seek revio sync-file fallocate fpunch io",
    "copies": "readahead sendfile splice copy-file mmap fault msync",
    "locks": "flock locka lockf lockofd fcntl dup open lease",
    "watches": "chdir dnotify inotify file-ioctl fiemap verity",
}
LEFT_TO_SOAKS = ("attributes", "locks", "watches")
"""Groups of ``make soak`` alone, for their time."""
SIZES = ["--hdd-bytes", "1m", "--iomix-bytes", "1m", "--seek-size", "1m", "--revio-bytes", "1m"]
SIZES += ["--sync-file-bytes", "1m", "--fallocate-bytes", "1m", "--readahead-bytes", "1m"]
SIZES += ["--sendfile-size", "1m", "--dentries", "100", "--dirdeep-inodes", "300", "--mmap-file"]
SIZES += ["--mmap-bytes", "1m", "--rename-ops", "3000"]


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(name, marks=[pytest.mark.soak] if name in LEFT_TO_SOAKS else [])
        for name in STRESSORS
    ],
)
@pytest.mark.parametrize("seconds", ["1", pytest.param("10", marks=pytest.mark.soak)])
def test_stress_ng_finds_nothing_wrong(mounted, folder, group, seconds):
    names = STRESSORS[group].split()
    one_of_each = [word for name in names for word in (f"--{name}", "1")]

    said = mounted.run(
        "stress-ng", "--temp-path", folder, "--verify", "-t", seconds, *SIZES, *one_of_each,
        cwd=folder, timeout=100,
    )  # fmt: skip

    assert "successful run completed" in said
    assert "fail:" not in said
