"""Recordings with the broker's own log: the times of each request, and the rebalances of groups.

Members of groups join and leave while producers pause, so that polls wait for data and for other
members. Quiet recordings run before other processes of the machine: otherwise the times of the
capture and of the log differ by more than a poll's limit. Busy ones share it with processes that
never pause. They lie under ``out/recordings``, a capture with ``server.log`` and ``machine.json``;
recording them needs what `tests.broker` needs, and root.
"""

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from lab.incidents.clients import TOPIC, consumer, create_topic, producer
from lab.replay.runs import busy
from lab.truth.recordings import FIRST, FOLDER, PARTITIONS, run_clients, scheduled
from tests.broker.kafka_broker import Broker
from tests.broker.record import recording

COUNT = 3
SECONDS = 12.0
MEMBERS = 4
GROUPS = {"billing": "range", "audit": "cooperative-sticky"}
BUSY_PROCESSES = 4
Workload = Callable[[str, random.Random], None]
Key = tuple[int, int, int]  # client port, correlation id, API key
_REQUEST = "Completed request:"
_TIME_SIZE = len("2026-01-01 00:00:00,000")


def record(out: Path, workload: Workload, seed: int, is_busy: bool = False) -> None:
    """One recording as ``capture.pcap`` with ``server.log`` and ``machine.json``."""
    with tempfile.TemporaryDirectory() as folder:
        capture = Path(folder, "capture.pcap")
        with (
            scheduled(not is_busy),
            Broker(Path(folder, "broker"), request_log="debug") as broker,
            recording(capture, [broker.ports["PLAINTEXT"]]),
            busy(BUSY_PROCESSES if is_busy else 0),
        ):
            create_topic(broker.address, PARTITIONS)
            workload(broker.address, random.Random(seed))
            assert broker.process is not None
            machine = {"load": os.getloadavg()[0], "waited_s": _waited_s(broker.process.pid)}
        out.mkdir(parents=True)
        shutil.copy(capture, out)
        shutil.copy(Path(folder, "broker", "server.log"), out)
        Path(out, "machine.json").write_text(json.dumps(machine))


def _waited_s(pid: int) -> float:
    """How long the threads of a process could run, and had no processor."""
    stats = (path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(waited_ns) for _, waited_ns, _ in stats) / 1e9


def run_groups(address: str, dice: random.Random) -> None:
    """Members of two groups join and leave while a producer pauses."""
    end = time.monotonic() + SECONDS
    runs: list[Callable[[], None]] = [partial(_produce, address, end, dice.random())]
    for group in GROUPS:
        for number in range(MEMBERS):
            joins = 0.0 if number == 0 else dice.uniform(0.5, SECONDS / 2)
            leaves = SECONDS if number < 2 else dice.uniform(SECONDS / 2, SECONDS)
            runs.append(partial(_consume, address, group, number, joins, leaves))
    run_all(runs)


def run_many(address: str, _: random.Random) -> None:
    """Producers, members of a group and administrators."""
    run_clients(FIRST, address, SECONDS)


def run_pipelines(address: str, _: random.Random) -> None:
    """Producers with many requests in flight, some of them without acknowledgement."""
    end = time.monotonic() + SECONDS
    run_all([partial(_pipeline, address, end, acks) for acks in ("all", "1", "0")])


def run_transactions(address: str, dice: random.Random) -> None:
    """Transactional producers commit and abort."""
    end = time.monotonic() + SECONDS
    run_all([partial(_transact, address, end, number, dice.random()) for number in range(4)])


WORKLOADS: dict[str, Workload] = {
    "groups": run_groups,
    "many": run_many,
    "pipelines": run_pipelines,
    "transactions": run_transactions,
}


def run_all(runs: Iterable[Callable[[], None]]) -> None:
    """Run each in a thread of its own until all end."""
    threads = [Thread(target=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _pipeline(address: str, end: float, acks: str) -> None:
    one = producer(address, client_id=f"acks-{acks}", acks=acks, batch_num_messages=10)
    while time.monotonic() < end:
        for _ in range(200):
            one.produce(TOPIC, value=b"x" * 2000)
        one.flush(20)
        time.sleep(0.05)


def _transact(address: str, end: float, number: int, pause: float) -> None:
    one = producer(address, transactional_id=f"tx-{number}")
    one.init_transactions(60)
    count = 0
    while time.monotonic() < end:
        one.begin_transaction()
        for _ in range(1 + count % 5):
            one.produce(TOPIC, value=b"x" * 500)
        if count % 4:
            one.commit_transaction(60)
        else:
            one.abort_transaction(60)
        time.sleep(pause / 10)
        count += 1


def _produce(address: str, end: float, pause: float) -> None:
    one = producer(address, client_id="producer")
    number = 0
    while time.monotonic() < end:
        one.produce(TOPIC, value=b"x" * (1 + number % 900))
        one.flush(20)
        time.sleep(pause * (number % 5) / 5)
        number += 1


def _consume(address: str, group: str, number: int, joins: float, leaves: float) -> None:
    time.sleep(joins)
    one = consumer(
        address,
        client_id=f"{group}-{number}",
        group_id=group,
        auto_offset_reset="latest",
        partition_assignment_strategy=GROUPS[group],
        heartbeat_interval_ms=300,
        session_timeout_ms=6000,
        fetch_wait_max_ms=200 + 100 * number,
    )
    one.subscribe([TOPIC])
    end = time.monotonic() + leaves - joins
    while time.monotonic() < end:
        one.poll(0.1)
    one.close()


def made(count: int = COUNT) -> list[Path]:
    """The folders of `count` recordings of groups; those that do not exist are recorded."""
    paths = [FOLDER / f"logged-{number}" for number in range(count)]
    for number, path in enumerate(paths):
        if not path.exists():
            record(path, run_groups, number)
    return paths


def made_of_each(is_busy: bool) -> list[Path]:
    """The folders of one recording of each workload; those that do not exist are recorded."""
    machine = "busy" if is_busy else "quiet"
    paths = []
    for number, (name, workload) in enumerate(WORKLOADS.items()):
        paths.append(FOLDER / f"{name}-{machine}")
        if not paths[-1].exists():
            record(paths[-1], workload, number, is_busy)
    return paths


def read_requests(log: Path) -> Iterator[tuple[Key, float, dict[str, Any]]]:
    """The requests of a ``server.log``: the time of the line in ms since 1970, and its values."""
    for line in log.read_text(errors="replace").splitlines():
        head, _, values = line.partition(_REQUEST)
        if values:
            row = json.loads(values)
            header = row["requestHeader"]
            port = int(row["connection"].split("-")[1].rpartition(":")[2])
            time_of_line = datetime.fromisoformat(head[:_TIME_SIZE]).replace(tzinfo=UTC)
            key = (port, header["correlationId"], header["requestApiKey"])
            yield key, time_of_line.timestamp() * 1000, row
