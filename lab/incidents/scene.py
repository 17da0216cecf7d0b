"""A scene: an incident made on loopback, its capture, and the truth from the script's clock."""

import gzip
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from lab.incidents.clients import create_topic
from lab.incidents.network import Relay
from tests.broker import record
from tests.broker.kafka_broker import Broker, start_cluster
from tests.builders.captures import pcap_bytes, read_packets
from tests.incidents.recorded import Incident

T = TypeVar("T")
PLAINTEXT = "PLAINTEXT"


def now() -> datetime:
    """The time of the clock that also stamps captured packets."""
    return datetime.now(UTC)


_README = """# Recorded incidents

Each capture shows one incident, or a healthy session to compare with. Apache Kafka 4.3.1 brokers
and real clients (librdkafka, kafka-python) ran on loopback, and tcpdump recorded the brokers'
ports. `python -m lab.incidents record` made all files.

`truth.json` has the kind, subject and time of each incident. The times come from the clock of the
recording script at its action, never from kdissect.
"""


def client(client_id: str) -> str:
    """The subject of incidents of a client on loopback."""
    return f"{client_id} @ 127.0.0.1"


@dataclass
class Scene:
    """Brokers and a recording for one scenario.

    variant: 0 makes the shipped capture; others choose other clients, rates and durations.
    """

    folder: Path
    variant: int = 0
    incidents: list[Incident] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def capture(self) -> Path:
        return self.folder / "capture.pcap"

    def pick(self, *values: T) -> T:
        """The value of this variant."""
        return values[self.variant % len(values)]

    def broker(self, settings: Mapping[str, str] | None = None, **options: Any) -> Broker:
        """A started broker, which stops at the end of the scene."""
        broker = Broker(self.folder / "broker", settings=settings, **options)
        self.stack.callback(broker.stop)
        return broker.start()

    def cluster(self, **options: Any) -> list[Broker]:
        """Three started nodes, which stop at the end of the scene."""
        nodes = start_cluster(self.folder / "cluster", **options)
        for node in nodes:
            self.stack.callback(node.stop)
        return nodes

    def relay(self, **options: Any) -> Relay:
        """A relay in front of a started broker, which advertises the relay's address."""
        relay = Relay(**options)
        self.start_behind(relay)
        return relay

    def start_behind(self, relay: Relay) -> None:
        """Start a broker that advertises the relay's address."""
        self.stack.callback(relay.close)
        broker = self.broker({"advertised.listeners": f"PLAINTEXT://{relay.address}"})
        relay.open(broker.ports[PLAINTEXT])

    @contextmanager
    def orders(
        self, partitions: int = 1, settings: Mapping[str, str] | None = None
    ) -> Iterator[Broker]:
        """Record the packets of a started broker with the topic while the block runs."""
        broker = self.broker(settings)
        create_topic(broker.address, partitions)
        with self.recording(broker.ports[PLAINTEXT]):
            yield broker

    @contextmanager
    def relayed_orders(self, **options: Any) -> Iterator[Relay]:
        """Record the packets of a relay before a broker with the topic while the block runs."""
        relay = self.relay(**options)
        create_topic(relay.address)
        with self.recording(relay.port):
            yield relay

    @contextmanager
    def recording(self, *ports: int) -> Iterator[None]:
        """Record the packets of some ports while the block runs."""
        with record.recording(self.capture, ports):
            yield
        # the recorder connects to another port to see that it captures
        packets = read_packets(self.capture)
        kept = [one for one in packets if {one.source[1], one.target[1]}.intersection(ports)]
        self.capture.write_bytes(pcap_bytes(kept))

    @contextmanager
    def incident(self, kind: str, subject: str) -> Iterator[None]:
        """Add an incident to the truth that begins and ends with the block."""
        start = now()
        yield
        self.happened(kind, subject, start)

    def happened(
        self, kind: str, subject: str, start: datetime, end: datetime | None = None
    ) -> None:
        """Add an incident to the truth; without an end it lasts until now."""
        times = (_text(start), _text(end or now()))
        self.incidents.append(Incident(kind, subject, *times))


Scenario = Callable[[Scene], None]


def _text(time_utc: datetime) -> str:
    return time_utc.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def pause(process: subprocess.Popen[Any] | None, duration_s: float) -> None:
    """Stop a process for some time."""
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    time.sleep(duration_s)
    process.send_signal(signal.SIGCONT)


def wait_until(holds: Callable[[], Any], timeout_s: float = 60) -> None:
    """Wait for a condition; raises TimeoutError."""
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("the scene did not come to its end")
        time.sleep(0.02)


def logged_times(broker: Broker, *texts: str) -> list[datetime]:
    """The times of the lines of a broker's log that have all texts."""
    log = (broker.folder / "server.log").read_text(errors="replace")
    lines = [line for line in log.splitlines() if all(text in line for text in texts)]
    return [datetime.strptime(one[:23], "%Y-%m-%d %H:%M:%S,%f").astimezone() for one in lines]


def write(name: str, made: str, scene: Scene, out: Path) -> None:
    """Write the compressed capture, its truth and its line of the README into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress(scene.capture.read_bytes(), 9, mtime=0)
    (out / f"{name}.pcap.gz").write_bytes(packed)
    path = out / "truth.json"
    truth = json.loads(path.read_text()) if path.exists() else {}
    truth[name] = {"made": made, "incidents": [asdict(one) for one in scene.incidents]}
    ordered = {key: truth[key] for key in sorted(truth)}
    path.write_text(json.dumps(ordered, indent=1) + "\n")
    (out / "README.md").write_text(_readme(ordered))


def _readme(truth: dict[str, Any]) -> str:
    lines = [_README, "| capture | how it was made | true incidents |", "|---|---|---|"]
    for name, row in truth.items():
        kinds = ", ".join(f"`{one['kind']}` of {one['subject']}" for one in row["incidents"])
        lines.append(f"| `{name}` | {' '.join(row['made'].split())} | {kinds or '-'} |")
    return "\n".join(lines) + "\n"
