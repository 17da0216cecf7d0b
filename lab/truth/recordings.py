"""One workload recorded many times from one real broker: recordings that are alike.

A series is a workload and its recordings, one after the other. A first run of the workload, not
recorded, warms the broker up. Other work of the machine changes latencies from minute to minute, so
broker, clients and recorder run before it. The recordings lie under ``out/recordings``, a table set
each, with the load average after each. Recording them needs what `tests.broker` needs, and root.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from confluent_kafka.admin import AdminClient

import kdissect
from lab.incidents.clients import LIBRDKAFKA, create_topic, member, producing, running
from tests.broker.kafka_broker import Broker
from tests.broker.record import recording

WARM_S = 5.0
REAL_TIME_PRIORITY = 10
FOLDER = Path(__file__).resolve().parents[2] / "out" / "recordings"
PARTITIONS = 6
MEMBER = {
    "auto_offset_reset": "latest",
    "heartbeat_interval_ms": 300,
    "enable_auto_commit": False,
    "fetch_wait_max_ms": 100,
}


class Series(NamedTuple):
    """A workload and the number of its recordings.

    seconds: of each recording. pause_s: of a producer between two records. is_real_time: whether
    broker, clients and recorder run before all other processes of the machine.
    """

    name: str
    recording_count: int
    seconds: float
    producers: int
    consumers: int
    admins: int
    pause_s: float
    is_real_time: bool = True


FIRST = Series("first", 30, 15.0, 12, 6, 4, 0.03)
SECOND = Series("second", 12, 10.0, 8, 3, 2, 0.1)
BUSY = Series("busy", 12, 20.0, 12, 6, 4, 0.03, is_real_time=False)


def record(series: Series) -> None:
    """Record those of a series that do not exist yet."""
    missing = [path for path in paths(series) if not path.exists()]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        with scheduled(series.is_real_time):
            broker = stack.enter_context(Broker(Path(folder, "broker")))
            create_topic(broker.address, PARTITIONS)
            run_clients(series, broker.address, WARM_S)
        for path in missing:
            capture = Path(folder, f"{path.name}.pcap")
            with scheduled(series.is_real_time), recording(capture, [broker.ports["PLAINTEXT"]]):
                run_clients(series, broker.address, series.seconds)
            kdissect.read(capture).write(path)
            path.with_suffix(".load").write_text(f"{os.getloadavg()[0]}\n")


@contextmanager
def scheduled(is_real_time: bool = True) -> Iterator[None]:
    """Run the block, and the processes that it starts, before all others of the machine."""
    if is_real_time:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REAL_TIME_PRIORITY))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def run_clients(series: Series, address: str, seconds: float) -> None:
    """Producers, members of a group and administrators, each a client of its own."""
    with ExitStack() as stack:
        for number in range(series.producers):
            name = f"producer-{number}"
            stack.enter_context(producing(LIBRDKAFKA, address, name, 1 / series.pause_s))
        for number in range(series.consumers):
            stack.enter_context(member(address, "billing", f"consumer-{number}", **MEMBER))
        for number in range(series.admins):
            admin = AdminClient({"bootstrap.servers": address, "client.id": f"admin-{number}"})
            stack.enter_context(running(partial(_administer, admin), 0.1))
        time.sleep(seconds)


def _administer(admin: AdminClient) -> None:
    admin.list_topics(timeout=20)
    admin.list_consumer_groups(request_timeout=20).result(20)


def paths(series: Series) -> list[Path]:
    """The table sets of a series, recorded or not."""
    return [FOLDER / f"{series.name}-{number:02d}" for number in range(series.recording_count)]


def loads(series: Series) -> list[float]:
    """The load average of the machine after each recording."""
    return [float(path.with_suffix(".load").read_text()) for path in paths(series)]


if __name__ == "__main__":
    for series in (FIRST, SECOND, BUSY):
        record(series)
