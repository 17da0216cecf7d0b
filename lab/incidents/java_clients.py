"""Apache Kafka's Java clients for scenes, by the program `JavaClient.java`."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from lab.incidents.clients import TOPIC
from lab.incidents.scene import now, wait_until
from tests.broker.kafka_broker import LATEST, jars, java

SOURCE = Path(__file__).with_name("JavaClient.java")
_START_S, _STOP_S = 60, 15


@cache
def _classes() -> Path:
    """A folder with the compiled program."""
    folder = Path(tempfile.mkdtemp(prefix="java-client-"))
    command = [f"{java()}c", "-d", str(folder), "-cp", f"{jars(LATEST)}/*", str(SOURCE)]
    subprocess.run(command, check=True, timeout=_START_S)
    return folder


@dataclass
class JavaClient:
    """A running program. printed: each line of its output, with the time of its arrival."""

    process: subprocess.Popen[str]
    printed: list[tuple[str, datetime]] = field(default_factory=list)

    def time_of(self, text: str) -> datetime:
        """Wait for a line that begins with a text; returns its time."""
        wait_until(lambda: self._find(text), _START_S)
        return self._find(text)[0]

    def _find(self, text: str) -> list[datetime]:
        return [time for line, time in self.printed if line.startswith(text)]

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append((line.rstrip(), now()))


def java_client(
    verb: str,
    address: str,
    client_id: str,
    app: dict[str, int] | None = None,
    topic: str = TOPIC,
    **config: Any,
) -> JavaClient:
    """Start a producer or a consumer, and wait until it works. app: see `JavaClient.java`."""
    names = {"bootstrap.servers": address, "client.id": client_id}
    names |= {name.replace("_", "."): str(value) for name, value in config.items()}
    names |= {f"app.{name}": str(value) for name, value in (app or {}).items()}
    command = [java(), "-XX:TieredStopAtLevel=1", "-Xmx128m", "-XX:+UseSerialGC"]
    command += ["-cp", f"{_classes()}:{jars(LATEST)}/*", "JavaClient", verb, topic]
    command += [f"{name}={value}" for name, value in names.items()]
    client = JavaClient(
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
    )
    Thread(target=client.read, daemon=True).start()
    client.time_of("started")
    return client


@contextmanager
def java_running(*client: Any, **config: Any) -> Iterator[JavaClient]:
    """A `java_client` that runs while the block runs, and closes at its end."""
    running = java_client(*client, **config)
    try:
        yield running
    finally:
        running.process.terminate()
        try:
            running.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            running.process.kill()


PRODUCE, CONSUME = "produce", "consume"
