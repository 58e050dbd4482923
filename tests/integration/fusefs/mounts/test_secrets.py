"""A secret in the URL of a mount shows on no way out: a canary, and a table of them all."""

import urllib.request
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from fusefs.cli import command
from fusefs.mounts.lifecycle import MountConfig, start, umount
from fusefs.stores.retry import RetryingStore
from fusefs.stores.url import open_store
from fusefs.tools.export import place_on_mount
from omniload.base.errors import OmniloadError, StateError
from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT
from tests.support.fusefs.s3 import s3_server
from tests.support.ports import free_port

pytestmark = pytest.mark.started_for_real

KEY, SECRET = "KeyCanary42", "SecretCanary43"
CANARIES = (KEY, SECRET)
SHOWN = "s3://***@bucket/x"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        server.client.create_dir("bucket")
        query = f"region=us-east-1&scheme=http&endpoint_override={server.address}"
        yield f"s3://{KEY}:{SECRET}@bucket/x?{query}"


@pytest.mark.fuse
@pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT)
def test_a_mount_shows_no_secret_of_its_url_on_any_way_out(url, tmp_path):
    (tmp_path / "mount").mkdir()
    port = free_port()
    settings = {"store": url, "mountpoint": str(tmp_path / "mount"), "metrics_port": port}
    log, root = tmp_path / "log", tmp_path / "mount"
    daemon = start(MountConfig(**settings), log_path=str(log))
    try:
        (root / "f").write_bytes(b"x" * 10)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as scraped:
            metrics = scraped.read().decode()
        of_daemon = psutil.Process(daemon.pid)
        ways_out = {
            "stats.json": (root / ".omnifs/stats.json").read_text(),
            "metrics": metrics,
            "mount table": Path("/proc/self/mountinfo").read_text(),
            "/proc/mounts": Path("/proc/mounts").read_text(),
            "arguments": " ".join(of_daemon.cmdline()) + of_daemon.name(),
            "environment": " ".join(of_daemon.environ().values()),
            "stat": CliRunner().invoke(command, ["stat", str(root / "f"), "--json"]).output,
        }
        with pytest.raises(
            StateError, match=r"does not show the secrets .* give --store"
        ) as refused:
            place_on_mount(root / "f")
        ways_out["refusal"] = str(refused.value)
    finally:
        umount(str(root))
        daemon.wait(60)
    ways_out["log"] = log.read_text()

    shown = {way: canary for way, said in ways_out.items() for canary in CANARIES if canary in said}
    assert shown == {}
    assert SHOWN in ways_out["stats.json"]


FAILING = {
    "sftp": f"sftp://{KEY}:{SECRET}@127.0.0.1:{{port}}/x",
    "webhdfs": f"webhdfs://{KEY}:{SECRET}@127.0.0.1:{{port}}/x",
    "native": f"hdfs+native://me:{SECRET}@127.0.0.1:{{port}}/x?replication=no",
    "s3": f"s3://{KEY}:{SECRET}@bucket/x?scheme=http&region=r&endpoint_override=127.0.0.1:{{port}}",
    "unknown option": f"s3://{KEY}:{SECRET}@bucket/x?nonsense=1",
    "nobody opens it": f"nonsense://{KEY}:{SECRET}@host/x",
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_store_that_fails_says_so_without_the_secrets_of_its_url(kind):
    url = FAILING[kind].format(port=free_port())

    def ask():
        opened = open_store(url, give_up_after_s=2.0)
        RetryingStore(opened, give_up_after_s=2.0, waits_s=()).stat("f")

    with pytest.raises(OmniloadError) as caught:
        ask()
    done = CliRunner().invoke(command, ["verify", url])

    said = f"{caught.value} {caught.value.args} {done.output} {done.exception}"
    assert [canary for canary in CANARIES if canary in said] == []


def test_a_command_that_mounts_shows_no_secret(url, tmp_path):
    done = CliRunner().invoke(command, ["mount", url, str(tmp_path / "missing")])

    assert [canary for canary in CANARIES if canary in f"{done.output}{done.exception}"] == []
