"""Settings of Hadoop's client: ours where the user says nothing, the user's where they do."""

import os
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest

from fusefs.stores.remote import arrow
from fusefs.stores.remote.hadoop import (
    CLOSING,
    client_version,
    set_jvm_options,
    site_settings,
    with_client_settings,
    with_jvm_defaults,
)
from omniload.base.errors import ConfigError


def test_a_java_machine_that_starts_fast_is_the_default():
    assert with_jvm_defaults("") == "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
    assert with_jvm_defaults("-Xmx2g -Da=b").split()[:2] == ["-Xmx2g", "-Da=b"]


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ("-XX:+UseG1GC", "-XX:TieredStopAtLevel=1"),
        ("-Xmx1g -XX:+UseZGC -XX:+UseStringDeduplication", "-XX:TieredStopAtLevel=1"),
        ("-XX:+UseStringDeduplication", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"),
        ("-XX:TieredStopAtLevel=4", "-XX:+UseSerialGC"),
        ("-XX:-TieredCompilation", "-XX:+UseSerialGC"),
        ("-Xint -XX:+UseParallelGC", ""),
    ],
)
def test_what_the_user_chose_stays(given, added):
    assert with_jvm_defaults(given) == f"{given} {added}".strip()


def test_defaults_are_added_once():
    once = with_jvm_defaults("-Xmx1g")

    assert with_jvm_defaults(once) == once


def test_the_environment_of_the_process_gets_them(monkeypatch):
    monkeypatch.setenv("LIBHDFS_OPTS", "-Xmx1g")

    set_jvm_options()

    assert os.environ["LIBHDFS_OPTS"] == "-Xmx1g -XX:+UseSerialGC -XX:TieredStopAtLevel=1"


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("hdfs://host:9000/data", "?dfs.checksum.type=CRC32&replication=0"),
        ("hdfs://host/d?user=a%40b", "?user=a%40b&dfs.checksum.type=CRC32&replication=0"),
        ("hdfs://host/d?dfs.checksum.type=CRC32C", "?dfs.checksum.type=CRC32C&replication=0"),
        ("hdfs://host/d?replication=2", "?replication=2&dfs.checksum.type=CRC32"),
        ("viewfs://all", "?dfs.checksum.type=CRC32&replication=0"),
    ],
)
def test_the_url_gets_the_client_settings_it_does_not_name(url, asked):
    assert with_client_settings(url) == url.partition("?")[0] + asked


def test_what_the_site_sets_is_not_set_again():
    asked = with_client_settings("hdfs://host/d", {"dfs.checksum.type", "dfs.replication"})

    assert asked == "hdfs://host/d?replication=0"


def test_a_site_that_cannot_be_read_keeps_its_checksums():
    assert with_client_settings("hdfs://host/d", None) == "hdfs://host/d?replication=0"


def test_a_replication_that_the_url_gives_in_hadoops_words_is_the_one_used():
    asked = with_client_settings("hdfs://host/d?dfs.replication=2", {"dfs.checksum.type"})

    assert asked == "hdfs://host/d?dfs.replication=2&replication=2"


def a_site(folder, **files):
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}-site.xml").write_text(text, encoding="utf-8")
    return str(folder)


def a_property(name, value="1"):
    return f"<property><name>{name}</name><value>{value}</value></property>"


def test_the_settings_of_a_site_are_found_in_the_folders_of_the_class_path(tmp_path):
    first = a_site(
        tmp_path / "a", core=f"<configuration>{a_property('fs.defaultFS')}</configuration>"
    )
    second = a_site(
        tmp_path / "b",
        hdfs=f"""<?xml version="1.0"?>
        <!-- ours --><configuration>
          {a_property("dfs.checksum.type", "CRC32C")} {a_property(" dfs.replication ")}
        </configuration>""",
    )
    jar = tmp_path / "hadoop.jar"
    jar.write_bytes(b"PK")

    found = site_settings(f"{first}:{jar}:{tmp_path / 'none'}::{second}")

    assert found == {"fs.defaultFS", "dfs.checksum.type", "dfs.replication"}


def test_no_class_path_sets_nothing():
    assert site_settings("") == frozenset()


@pytest.mark.parametrize(
    "text",
    [
        "<configuration><property>",
        '<c xmlns:xi="http://www.w3.org/2001/XInclude"><xi:include href="more.xml"/></c>',
    ],
)
def test_a_file_of_which_not_all_can_be_told_leaves_the_site_alone(text, tmp_path):
    assert site_settings(a_site(tmp_path / "conf", hdfs=text)) is None


def without_limits(uri):
    """Return what a client is asked for, but for how long it may wait."""
    parts = urlsplit(uri)
    limits = with_client_settings("hdfs://h", version=None, give_up_after_s=30.0)
    names = set(dict(parse_qsl(urlsplit(limits).query))) - {"dfs.checksum.type", "replication"}
    kept = [pair for pair in parse_qsl(parts.query) if pair[0] not in names]
    return parts._replace(query=urlencode(kept)).geturl()


def test_a_client_is_told_how_long_it_may_wait_unless_the_site_says():
    def settings(**given):
        return dict(parse_qsl(urlsplit(with_client_settings("hdfs://h/d", **given)).query))

    told = settings(give_up_after_s=12.0)

    assert told["ipc.client.rpc-timeout.ms"] == told["dfs.client.socket-timeout"] == "4000"
    assert "ipc.client.rpc-timeout.ms" not in settings()
    assert "ipc.client.rpc-timeout.ms" not in settings(site=None, give_up_after_s=12.0)
    own = settings(site=["ipc.client.rpc-timeout.ms"], give_up_after_s=12.0)
    assert "ipc.client.rpc-timeout.ms" not in own
    assert own["dfs.client.socket-timeout"] == "4000"


def test_a_site_with_checksums_of_its_own_keeps_them_when_a_store_is_opened(tmp_path, monkeypatch):
    site = a_site(
        tmp_path / "c", hdfs=f"<configuration>{a_property('dfs.checksum.type')}</configuration>"
    )
    seen = []

    class Client:
        @staticmethod
        def from_uri(uri):
            seen.append(uri)
            raise ValueError("no such thing")

    monkeypatch.setenv("LIBHDFS_OPTS", "")
    monkeypatch.setenv("CLASSPATH", f"/usr/lib/hadoop.jar:{site}")
    monkeypatch.setattr(arrow.pafs, "FileSystem", Client)

    with pytest.raises(ConfigError):
        arrow.arrow_store("hdfs://host/d")

    assert [without_limits(uri) for uri in seen] == ["hdfs://host/d?replication=0"]


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("hdfs://host/d", "hdfs://host/d?dfs.checksum.type=CRC32&replication=0"),
        ("s3://bucket/d?region=x", "s3://bucket/d?region=x&allow_delayed_open=true"),
        ("gs://bucket/d", "gs://bucket/d"),
    ],
)
def test_what_a_client_is_told_beside_the_url_shows_in_no_message(url, asked, monkeypatch):
    seen = []

    class Client:
        @staticmethod
        def from_uri(uri):
            seen.append(uri)
            raise ValueError("no such thing")

    monkeypatch.setenv("LIBHDFS_OPTS", "")
    monkeypatch.setenv("CLASSPATH", "")
    monkeypatch.setattr(arrow.pafs, "FileSystem", Client)

    with pytest.raises(ConfigError) as caught:
        arrow.arrow_store(url)

    assert [without_limits(uri) for uri in seen] == [asked]
    assert repr(url) in str(caught.value)
    assert ("SerialGC" in os.environ["LIBHDFS_OPTS"]) == url.startswith("hdfs")


@pytest.mark.parametrize(
    ("classpath", "version"),
    [
        ("", None),
        ("/etc/hadoop:/opt/jars/guava-14.0.1.jar", None),
        ("/j/hadoop-client-api-3.3.4.jar:/j/hadoop-client-runtime-3.3.4.jar", (3, 3)),
        ("/j/hadoop-common-2.7.3.jar:/j/hadoop-hdfs-2.7.3.jar", (2, 7)),
        ("/j/hadoop-hdfs-client-3.4.1-tests.jar:/j/hadoop-hdfs-3.4.1.jar", (3, 4)),
        ("/old/hadoop-hdfs-2.7.3.jar:/new/hadoop-client-3.3.4.jar", (2, 7)),
        ("/hadoop-hdfs-3.3.4/share", None),
    ],
)
def test_the_jars_say_which_client_it_is(classpath, version):
    assert client_version(classpath) == version


@pytest.mark.parametrize(
    ("version", "is_told"), [(None, False), ((2, 7), False), ((2, 8), True), ((3, 3), True)]
)
def test_a_client_that_can_asks_again_soon_whether_a_file_is_whole(version, is_told):
    asked = with_client_settings("hdfs://host/d", (), version)

    assert all((f"{name}={value}" in asked) is is_told for name, value in CLOSING.items())


@pytest.mark.parametrize("name", CLOSING)
def test_how_often_a_client_asks_is_the_sites_or_the_users_where_they_say_one_half_of_it(name):
    by_site = with_client_settings("hdfs://host/d", {name}, (3, 3))
    by_user = with_client_settings(f"hdfs://host/d?{name}=7", (), (3, 3))

    assert "locateFollowingBlock" not in by_site
    assert by_user.count("locateFollowingBlock") == 1


def test_a_client_is_no_less_patient_than_it_is_by_itself():
    delay_ms, retries = (int(value) for value in CLOSING.values())

    assert 400 * (2**5 - 1) <= delay_ms * (2**retries - 1) <= 15_000
