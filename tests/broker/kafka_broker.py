"""A real Apache Kafka broker for tests: jars from Maven Central, KRaft, loopback, free ports.

`jars()` fetches a release once into a cache outside the checkout; `Broker` formats a folder,
starts one process (broker and controller), waits until it serves, and ends it by its pid. Where
Maven, Java or the network are missing `Unavailable` says which; fixtures turn it into a skip.
"""

import base64
import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

LATEST, BEFORE = "4.3.1", "3.9.1"
POMS = Path(__file__).parent / "poms"
START_S, STOP_S = 60, 20
_FETCH_S = 420
_HEAP = ["-Xmx400m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]

_LOG4J2 = """status=error
appender.file.type=File
appender.file.name=file
appender.file.fileName={log}
appender.file.layout.type=PatternLayout
appender.file.layout.pattern=%d %p %c - %m%n
rootLogger.level=info
rootLogger.appenderRef.file.ref=file
"""
_LOG4J2_REQUESTS = """logger.requests.name=kafka.request.logger
logger.requests.level={level}
"""
_LOG4J = """log4j.rootLogger=INFO, file
log4j.appender.file=org.apache.log4j.FileAppender
log4j.appender.file.File={log}
log4j.appender.file.layout=org.apache.log4j.PatternLayout
log4j.appender.file.layout.ConversionPattern=%d %p %c - %m%n
"""


# what the brokers of the shipped captures had set, and answers show
AS_RECORDED = {
    "num.partitions": "3",
    "log.segment.bytes": "67108864",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "group.consumer.heartbeat.interval.ms": "300",
    "group.share.min.heartbeat.interval.ms": "200",
    "group.share.heartbeat.interval.ms": "400",
    "group.streams.min.heartbeat.interval.ms": "200",
    "group.streams.heartbeat.interval.ms": "400",
}


class Unavailable(Exception):
    """No broker can start here; the text names the missing part."""


def cache() -> Path:
    """The folder of jars: $KDISSECT_BROKERS, else ~/.cache/kdissect-brokers."""
    chosen = os.environ.get("KDISSECT_BROKERS")
    return Path(chosen) if chosen else Path.home() / ".cache" / "kdissect-brokers"


def jars(kafka_version: str) -> Path:
    """The folder with all jars of a release, fetched by Maven the first time."""
    folder = cache() / kafka_version
    if (folder / ".complete").exists():
        return folder
    maven = shutil.which("mvn")
    if maven is None:
        raise Unavailable("Maven (mvn) is not installed, and the broker's jars are not cached")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f"{kafka_version}-", dir=folder.parent))
    command = [maven, "-q", "-B", "-f", str(POMS / f"kafka-{kafka_version}.pom.xml")]
    command += ["dependency:copy-dependencies", f"-DoutputDirectory={fresh}"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S, check=False)
        if run.returncode:
            reason = (run.stdout + run.stderr).strip().splitlines() or ["no message"]
            raise Unavailable(f"Maven cannot fetch Kafka {kafka_version}: {reason[0][:300]}")
        (fresh / ".complete").touch()
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"Maven did not fetch Kafka {kafka_version} in {_FETCH_S} s") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def java() -> str:
    """The java command, from JAVA_HOME or the path."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if not found or not os.access(found, os.X_OK):
        raise Unavailable("Java 17 or newer is not installed")
    return found


def plugin(name: str, kafka_version: str) -> Path:
    """The folder with the compiled class of ``java/NAME.java``."""
    folder = cache() / f"{kafka_version}-{name}"
    if not (folder / f"{name}.class").exists():
        compiler = shutil.which("javac")
        if compiler is None:
            raise Unavailable("javac is not installed")
        source = Path(__file__).parent / "java" / f"{name}.java"
        classes = f"{jars(kafka_version)}/*"
        command = [compiler, "-cp", classes, "-d", str(folder), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=START_S)
    return folder


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface without a listener.

    They are drawn from below the ephemeral range: of that one a client of another test may get
    the port for its end of a connection before the broker listens.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(12_000, 32_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            ports += [port] if port not in ports else []
    return ports


def _uuid() -> str:
    """As Kafka writes them; no dash in front, which command lines would take for an option."""
    return "k" + base64.urlsafe_b64encode(uuid4().bytes).decode()[:21]


class Broker:
    """One broker process, with statement or start() / stop().

    settings: further lines of server.properties, in which "{address}" is its own. scram: user ->
    password, made while formatting.
    node_id, voters: of a node of a cluster (see `start_cluster`).
    request_log: a level; from "debug" on, server.log has a line per request with its times
    (releases from 4.0 on).
    listeners: further listeners, name -> security protocol (all on 127.0.0.1, ports in `ports`).
    plugins: classes of ``java/`` in its class path. An empty setting leaves that of tests out.
    """

    def __init__(
        self,
        folder: Path,
        kafka_version: str = LATEST,
        *,
        settings: Mapping[str, str] | None = None,
        listeners: Mapping[str, str] | None = None,
        scram: Mapping[str, str] | None = None,
        cluster_id: str | None = None,
        port: int | None = None,
        node_id: int = 1,
        voters: str = "",
        request_log: str = "",
        plugins: Sequence[str] = (),
    ) -> None:
        self.folder, self.kafka_version = folder, kafka_version
        self.cluster_id = cluster_id or _uuid()
        self.settings, self.scram = dict(settings or {}), dict(scram or {})
        self.protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **(listeners or {})}
        names = list(self.protocols)
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        if port is not None:
            self.ports["PLAINTEXT"] = port
        self.node_id, self.voters = node_id, voters
        self.request_log, self.plugins = request_log, plugins
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port of the plain listener."""
        return self.address_of("PLAINTEXT")

    def address_of(self, listener: str) -> str:
        return f"127.0.0.1:{self.ports[listener]}"

    def __enter__(self) -> "Broker":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _properties(self) -> dict[str, str]:
        quorum = f"127.0.0.1:{self.ports['CONTROLLER']}"
        where = {name: f"{name}://{self.address_of(name)}" for name in self.protocols}
        lines = {
            "process.roles": "broker,controller",
            "node.id": str(self.node_id),
            "listeners": ",".join(where.values()),
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": ",".join(
                f"{name}:{protocol}" for name, protocol in self.protocols.items()
            ),
            "log.dirs": str(self.folder / "data"),
            "num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "share.coordinator.state.topic.num.partitions": "4",
            "group.initial.rebalance.delay.ms": "300",
            "log.cleaner.dedupe.buffer.size": "2097152",
            # captured records may be older than the retention of their topic
            "log.initial.task.delay.ms": "3600000",
        }
        if self._is_old:  # no directory ids of controllers (KIP-853)
            named = [each.rsplit(":", 1)[0] for each in self.voters.split(",") if each]
            lines["controller.quorum.voters"] = ",".join(named) or f"{self.node_id}@{quorum}"
        elif self.voters:
            controllers = [each.split("@")[1].rsplit(":", 1)[0] for each in self.voters.split(",")]
            lines["controller.quorum.bootstrap.servers"] = ",".join(controllers)
        else:
            lines["controller.quorum.bootstrap.servers"] = quorum
        settings = {
            name: value.replace("{address}", self.address) for name, value in self.settings.items()
        }
        return {name: value for name, value in (lines | settings).items() if value}

    @property
    def _is_old(self) -> bool:
        return int(self.kafka_version.split(".")[0]) < 4

    def _java(self, *options: str) -> list[str]:
        config = self.folder / "log4j.properties"
        text = _LOG4J if self._is_old else _LOG4J2
        if self.request_log:
            text += _LOG4J2_REQUESTS
        config.write_text(text.format(log=self.folder / "server.log", level=self.request_log))
        logging = (
            f"-Dlog4j.configuration=file:{config}"
            if self._is_old
            else f"-Dlog4j2.configurationFile={config}"
        )
        folders = [plugin(name, self.kafka_version) for name in self.plugins]
        classes = os.pathsep.join([f"{jars(self.kafka_version)}/*", *map(str, folders)])
        unpacked = self.folder / "tmp"  # native libraries: of this broker, and gone with it
        unpacked.mkdir(exist_ok=True)
        return [
            java(), *_HEAP, logging, f"-Djava.io.tmpdir={unpacked}", "-cp", classes, *options,
        ]  # fmt: skip

    def start(self) -> "Broker":
        """Format the folder the first time, start, wait until the broker serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        properties = self.folder / "server.properties"
        properties.write_text("".join(f"{k}={v}\n" for k, v in self._properties().items()))
        if not (self.folder / "data" / "meta.properties").exists():
            self._format(properties)
        starts_before = self._starts()
        with open(self.folder / "console.log", "ab") as console:
            self.process = subprocess.Popen(
                self._java("kafka.Kafka", str(properties)),
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait(starts_before)
        except BaseException:
            self.stop()
            raise
        return self

    def _format(self, properties: Path) -> None:
        command = self._java("kafka.tools.StorageTool", "format", "-t", self.cluster_id)
        command += ["-c", str(properties), *self._quorum()]
        for user, password in self.scram.items():
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
                command += ["--add-scram", f"{mechanism}=[name={user},password={password}]"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
        if run.returncode:
            raise Unavailable(f"Kafka {self.kafka_version} cannot format: {run.stderr[-400:]}")

    def _quorum(self) -> list[str]:
        if self._is_old:
            return []
        return ["--initial-controllers", self.voters] if self.voters else ["--standalone"]

    def _starts(self) -> int:
        """How often the log says that this broker serves."""
        log = self.folder / "server.log"
        return log.read_text(errors="replace").count("Kafka Server started") if log.exists() else 0

    def _wait(self, starts_before: int) -> None:
        end = time.monotonic() + START_S
        assert self.process is not None
        while time.monotonic() < end:
            if self.process.poll() is not None:
                console = (self.folder / "console.log").read_text(errors="replace")[-600:]
                raise Unavailable(f"Kafka {self.kafka_version} ended while starting: {console}")
            if self._starts() > starts_before:
                return
            time.sleep(0.05)
        raise Unavailable(f"Kafka {self.kafka_version} did not serve within {START_S} s")

    def stop(self) -> None:
        """End in order; by force where that takes too long."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process = None

    def kill(self) -> None:
        """End at once, as a power cut does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(STOP_S)
            self.process = None


StartBroker = Callable[..., Broker]


def start_cluster(
    folder: Path, count: int = 3, advertised: Sequence[int] = (), **options: Any
) -> list[Broker]:
    """Nodes of one cluster, each broker and controller, all started; stop each of them.

    They start together, because none serves without a majority of the controllers. advertised: a
    port of the plain listener for each, of a proxy. options: as for `Broker`. Topics of Kafka's own
    are on one node each, chosen by the cluster.
    """
    nodes = [Broker(folder / f"node-{n}", node_id=n, **options) for n in range(1, count + 1)]
    for node, port in zip(nodes, advertised, strict=False):
        node.settings["advertised.listeners"] = f"PLAINTEXT://127.0.0.1:{port}"
    voters = ",".join(
        f"{one.node_id}@127.0.0.1:{one.ports['CONTROLLER']}:{_uuid()}" for one in nodes
    )
    for one in nodes:
        one.voters, one.cluster_id = voters, nodes[0].cluster_id
    try:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(Broker.start, nodes))
    except BaseException:
        for one in nodes:
            one.stop()
        raise
    return nodes
