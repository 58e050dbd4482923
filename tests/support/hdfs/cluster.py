"""A real HDFS on loopback for tests: one NameNode and some DataNodes, in a folder of its own.

Jars and libhdfs come from ``fetch.sh``, once, into ``OMNILOAD_HDFS_CACHE`` (default
``~/.cache/omniload/hdfs``). By hand::

    python -m tests.support.hdfs.cluster 3      # starts three DataNodes, waits for Ctrl-C
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.ports import free_port

CACHE = Path(os.environ.get("OMNILOAD_HDFS_CACHE", "~/.cache/omniload/hdfs")).expanduser()
ROOT = Path(__file__).resolve().parents[3]
JAVA_HOME = Path(os.environ.get("JAVA_HOME", "/usr/lib/jvm/java-17-openjdk-amd64"))
# Hadoop 2.7 uses packages that Java 17 has closed.
OPENS = [
    *(f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in ("lang", "nio", "net")),
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
]
QUICK_START = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto"]
"""Options for machines that live for seconds: thorough compilation would cost more than it saves."""
ARCHIVE = CACHE / "classes.jsa"
"""Classes in the form in which a Java machine has loaded them: half of a start goes to loading them from jars."""
NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_AS_CLIENT = """
import sys
from pyarrow.fs import FileSystem

files, root = FileSystem.from_uri(sys.argv[1])
with files.open_output_stream(f"{root}/a") as file:
    file.write(bytes(100_000))
with files.open_input_stream(f"{root}/a") as file:
    assert file.read() == bytes(100_000)
files.get_file_info(f"{root}/a")
files.move(f"{root}/a", f"{root}/b")
files.delete_file(f"{root}/b")
"""
_TRIES = 5
"""Starts of a data node when another process takes its port."""
RELAY_HOST = "127.0.0.2"
"""Host of the relays. They use the ports of the data nodes, which listen at 127.0.0.1."""


def why_not() -> str | None:
    """Return what is missing for a real HDFS, or None if it can be started."""
    if not (JAVA_HOME / "bin/java").exists():
        return f"no JDK 17 at {JAVA_HOME}; set JAVA_HOME"
    if shutil.which("gcc") is None:
        return "no gcc to build libhdfs with"
    return None


def fetched() -> Path:
    """Return the folder of jars and libhdfs, filling it the first time (minutes)."""
    if not ((CACHE / "jars/complete").exists() and (CACHE / "lib/libhdfs.so").exists()):
        script = Path(__file__).with_name("fetch.sh")
        environment = {**os.environ, "JAVA_HOME": str(JAVA_HOME)}
        subprocess.run([script, CACHE], check=True, env=environment)
    return CACHE


def _jars() -> str:
    return ":".join(sorted(str(jar) for jar in (CACHE / "jars").glob("*.jar")))


@dataclass
class Cluster:
    """A running HDFS."""

    folder: Path
    port: int
    http_port: int
    stream_rate: float | None = None
    """Most bytes per second of a connection to a data node, each direction; None for no limit."""
    notes_classes: bool = False
    """Whether its Java machines record the classes that they load, instead of taking classes from the archive."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[int, int] = field(default_factory=dict)
    """Ports of the data nodes."""

    @property
    def url(self) -> str:
        return f"hdfs://127.0.0.1:{self.port}"

    @property
    def webhdfs_url(self) -> str:
        return f"webhdfs://127.0.0.1:{self.http_port}"

    @property
    def classpath(self) -> str:
        # Jars come first, because an archive of their classes is only used for a class path that begins with them.
        return f"{_jars()}:{self.folder}/conf:{self.folder}/web"

    def client_environment(self) -> Mapping[str, str]:
        """Return the variables that pyarrow.fs.HadoopFileSystem needs before its first use."""
        return {
            "JAVA_HOME": str(JAVA_HOME),
            "ARROW_LIBHDFS_DIR": str(CACHE / "lib"),
            "CLASSPATH": self.classpath,
            "LIBHDFS_OPTS": " ".join(["-Xmx512m", *QUICK_START, *self.archiving("client"), *OPENS]),
        }

    def archiving(self, name: str) -> list[str]:
        """Return the options that make a Java machine take its classes from the archive, or record them for one."""
        if self.notes_classes:
            return [f"-XX:DumpLoadedClassList={self.folder}/{name}.classes"]
        # An archive of another Java is ignored, without any message, because commands are read from the same output.
        quietly = ["-Xlog:disable", "-Xlog:all=error:stderr"]
        return [f"-XX:SharedArchiveFile={ARCHIVE}", *quietly]

    def java(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        main = NAMENODE if name.startswith("namenode") else DATANODE
        command = [
            f"{JAVA_HOME}/bin/java",
            "-Xmx256m",
            *QUICK_START,
            *self.archiving(name),
            *OPENS,
            "-cp",
            self.classpath,
            main,
        ]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log)
        self.processes[name] = process
        return process

    def start_namenode(self) -> None:
        self.java("namenode")

    def start_datanode(self, number: int) -> None:
        settings = {"dfs.datanode.data.dir": f"file://{self.folder}/data{number}"}
        ports = {key: free_port() for key in ("address", "http.address", "ipc.address")}
        self.ports[number] = ports["address"]
        settings |= {f"dfs.datanode.{key}": f"127.0.0.1:{port}" for key, port in ports.items()}
        if self.stream_rate is not None:
            # The name node gives this name of the data node to clients, so they find the relay there.
            settings["dfs.datanode.hostname"] = RELAY_HOST
            self.start_relay(number, ports["address"])
        (self.folder / f"data{number}").mkdir(exist_ok=True)
        pairs = [part for key, value in settings.items() for part in ("-D", f"{key}={value}")]
        self.java(f"datanode{number}", *pairs)

    def start_relay(self, number: int, port: int) -> None:
        """Limit the rate of connections to a data node by a relay: same port, another address of loopback."""
        here = [RELAY_HOST, str(port), "127.0.0.1", str(port), str(self.stream_rate)]
        command = [sys.executable, "-m", "tests.support.hdfs.throttle", *here]
        if (before := self.processes.pop(f"relay{number}", None)) is not None:
            before.kill()
            before.communicate()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        self.processes[f"relay{number}"] = process
        assert process.stdout is not None
        if process.stdout.readline() != b"up\n":
            raise RuntimeError(f"the relay at {RELAY_HOST}:{port} did not start")

    def live_datanodes(self) -> int:
        """Return the number of live data nodes; a restarted one counts at its new address."""
        query = "jmx?qry=Hadoop:service=NameNode,name=NameNodeInfo"
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.http_port}/{query}", timeout=30
            ) as r:
                beans = json.load(r)["beans"]
        except OSError:
            return 0
        live = json.loads(beans[0]["LiveNodes"]).values() if beans else ()
        there = {int(node["xferaddr"].rpartition(":")[2]) for node in live}
        return len(there & {*self.ports.values()})

    def wait(self, datanodes: int, *, timeout_s: float = 240) -> None:
        end, tries = time.monotonic() + timeout_s, _TRIES
        pause = threading.Event()
        while self.live_datanodes() < datanodes:
            for name, process in list(self.processes.items()):
                if process.poll() is not None and not name.startswith("relay"):
                    log = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                    if name.startswith("datanode") and "BindException" in log and tries:
                        tries -= 1
                        self.start_datanode(int(name.removeprefix("datanode")))
                        continue
                    raise RuntimeError(f"{name} ended with {process.returncode}:\n{log}")
            if time.monotonic() > end:
                raise TimeoutError(f"{datanodes} data nodes not up; see {self.folder}/*.log")
            pause.wait(0.2)

    def stop_process(self, name: str, sig: int = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            process.send_signal(sig)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def mend(self) -> None:
        """Start stopped nodes again; a data node finds its blocks."""
        if "namenode" not in self.processes:
            self.start_namenode()
        for number in tuple(self.ports):
            if f"datanode{number}" not in self.processes:
                self.start_datanode(number)
        self.wait(len(self.ports))

    def stop(self) -> None:
        for name in list(self.processes):
            self.stop_process(name, signal.SIGKILL)


def _write_configuration(cluster: Cluster, replication: int) -> None:
    folder = cluster.folder
    (folder / "conf").mkdir()
    for app in ("hdfs", "datanode"):
        (folder / f"web/webapps/{app}/WEB-INF").mkdir(parents=True)
        (folder / f"web/webapps/{app}/WEB-INF/web.xml").write_text(
            '<web-app version="2.4" xmlns="http://java.sun.com/xml/ns/j2ee"/>'
        )
    (folder / "web/webapps/static").mkdir()
    (folder / "conf/log4j.properties").write_text(
        "log4j.rootLogger=WARN,c\nlog4j.appender.c=org.apache.log4j.ConsoleAppender\n"
        # As in Hadoop's own file, because the standard output of a client belongs to the command.
        "log4j.appender.c.target=System.err\n"
        "log4j.appender.c.layout=org.apache.log4j.PatternLayout\n"
        "log4j.appender.c.layout.ConversionPattern=%d %p %c{1}: %m%n\n"
    )
    core = {"fs.defaultFS": cluster.url, "hadoop.tmp.dir": f"{folder}/work"}
    # A client that meets a dead name node must answer within the timeout of a test.
    core |= {"ipc.client.connect.max.retries": 1, "ipc.client.connect.timeout": 2000}
    hdfs = {
        "dfs.namenode.name.dir": f"file://{folder}/name",
        "dfs.replication": replication,
        "dfs.namenode.http-address": f"127.0.0.1:{cluster.http_port}",
        "dfs.webhdfs.enabled": "true",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.namenode.safemode.extension": 0,
        "dfs.namenode.fs-limits.min-block-size": 4096,
        "dfs.blockreport.initialDelay": 0,
        "dfs.datanode.max.transfer.threads": 4096,
        "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
        "dfs.client.retry.policy.enabled": "false",
        "dfs.client.use.datanode.hostname": str(cluster.stream_rate is not None).lower(),
    }
    for name, settings in (("core", core), ("hdfs", hdfs)):
        properties = "".join(
            f"<property><name>{key}</name><value>{value}</value></property>"
            for key, value in settings.items()
        )
        text = f"<configuration>{properties}</configuration>"
        (folder / f"conf/{name}-site.xml").write_text(text)


def _format(cluster: Cluster) -> None:
    """Format the empty folder of a name node; the folder is cached, because this needs a start of a Java machine."""
    kept, made = CACHE / "formatted", cluster.folder / "name"
    if kept.exists():
        shutil.copytree(kept, made)
        return
    formatting = cluster.java("namenode-format", "-format", "-force", "-nonInteractive")
    if formatting.wait(timeout=120):
        log = (cluster.folder / "namenode-format.log").read_text(errors="replace")
        raise RuntimeError(log[-2000:])
    del cluster.processes["namenode-format"]
    copy = Path(tempfile.mkdtemp(prefix="formatting-", dir=CACHE))
    shutil.copytree(made, copy, dirs_exist_ok=True)
    try:
        copy.rename(kept)
    except OSError:  # another process was faster
        shutil.rmtree(copy)


@contextmanager
def hdfs_cluster(
    datanodes: int = 1,
    *,
    replication: int | None = None,
    stream_rate: float | None = None,
    above: Path | None = None,
) -> Iterator[Cluster]:
    """Start a fresh HDFS, and stop and remove it at the end.

    Args:
        datanodes: Number of data nodes.
        replication: Copies of a block; by default one per data node, three at most.
        stream_rate: Most bytes per second of a connection between a client and a data node.
        above: Directory for its folder; by default that of temporary files.
    """
    fetched()
    _archive()
    with _started(datanodes, replication, stream_rate, above) as cluster:
        yield cluster


def _archive() -> None:
    """Make the archive of classes if it is missing: the classes that a cluster and a client load."""
    if ARCHIVE.exists():
        return
    with _started(1, notes_classes=True) as cluster:
        environment = {**os.environ, **cluster.client_environment()}
        command = [sys.executable, "-c", _AS_CLIENT, f"{cluster.url}/client"]
        subprocess.run(command, env=environment, check=True, timeout=120)
        for name in list(cluster.processes):
            cluster.stop_process(name)
        lists = [path.read_text().splitlines() for path in cluster.folder.glob("*.classes")]
        classes = [line for lines in lists for line in lines if not line.startswith("#")]
        with tempfile.NamedTemporaryFile("w", suffix=".classes", dir=CACHE) as listed:
            listed.write("\n".join(dict.fromkeys(classes)))
            listed.flush()
            made = f"{listed.name}.jsa"
            command = [f"{JAVA_HOME}/bin/java", "-Xshare:dump", *QUICK_START, "-cp", _jars()]
            command += [f"-XX:SharedClassListFile={listed.name}", f"-XX:SharedArchiveFile={made}"]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
        Path(made).rename(ARCHIVE)


@contextmanager
def _started(
    datanodes: int,
    replication: int | None = None,
    stream_rate: float | None = None,
    above: Path | None = None,
    *,
    notes_classes: bool = False,
) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="omniload-hdfs-", dir=above))
    cluster = Cluster(folder, free_port(), free_port(), stream_rate, notes_classes)
    try:
        _write_configuration(cluster, replication or min(datanodes, 3))
        _format(cluster)
        cluster.start_namenode()
        for number in range(datanodes):
            cluster.start_datanode(number)
        cluster.wait(datanodes)
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    with hdfs_cluster(int(sys.argv[1]) if len(sys.argv) > 1 else 1) as running:
        sys.stdout.write(f"{running.url} {running.webhdfs_url}\n")
        for key, value in running.client_environment().items():
            sys.stdout.write(f"export {key}='{value}'\n")
        sys.stdout.flush()
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
