"""Settings of Hadoop's client: ours where the user says nothing, the user's where they do."""

import os

import pytest

from fusefs.stores import arrow
from fusefs.stores.hadoop import set_jvm_options, with_client_settings, with_jvm_defaults
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
        ("hdfs://host:9000/data", "hdfs://host:9000/data?dfs.checksum.type=CRC32"),
        ("hdfs://host/d?user=a%40b", "hdfs://host/d?user=a%40b&dfs.checksum.type=CRC32"),
        ("hdfs://host/d?dfs.checksum.type=CRC32C", "hdfs://host/d?dfs.checksum.type=CRC32C"),
        ("viewfs://all", "viewfs://all?dfs.checksum.type=CRC32"),
    ],
)
def test_the_url_gets_the_client_settings_it_does_not_name(url, asked):
    assert with_client_settings(url) == asked


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("hdfs://host/d", "hdfs://host/d?dfs.checksum.type=CRC32"),
        ("s3://bucket/d?region=x", "s3://bucket/d?region=x"),
    ],
)
def test_only_hadoops_urls_are_changed_and_messages_show_the_users(url, asked, monkeypatch):
    seen = []

    class Client:
        @staticmethod
        def from_uri(uri):
            seen.append(uri)
            raise ValueError("no such thing")

    monkeypatch.setenv("LIBHDFS_OPTS", "")
    monkeypatch.setattr(arrow.pafs, "FileSystem", Client)

    with pytest.raises(ConfigError) as caught:
        arrow.arrow_store(url)

    assert seen == [asked]
    assert repr(url) in str(caught.value)
    assert ("SerialGC" in os.environ["LIBHDFS_OPTS"]) == url.startswith("hdfs")
