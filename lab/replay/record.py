"""Recordings of today's clients on a broker, with what the broker held at the end."""

import argparse
import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.replay.clients.python_session import session as kafka_python
from lab.replay.runs import target
from tests.broker.kafka_broker import BEFORE, LATEST, cache, jars, java
from tests.broker.record import recording
from tests.broker.sessions import read_back, whole_session

CLIENTS = Path(__file__).with_name("clients")
FOLDER = Path("out/recordings")
# with an address, because a broker behind a proxy has to have one, and answers show it
SETTINGS = {"num.partitions": "3", "advertised.listeners": "PLAINTEXT://{address}"}
_WAIT_S, _BUILD_S = 120, 600


def java_session(kafka_version: str) -> Callable[[str], None]:
    def session(address: str) -> None:
        _call([java(), "-cp", f"{jars(kafka_version)}/*", str(CLIENTS / "Session.java"), address])

    return session


def kafkajs(address: str) -> None:
    folder = cache() / "kafkajs"
    if not (folder / "node_modules").exists():
        shutil.copytree(CLIENTS / "kafkajs", folder, dirs_exist_ok=True)
        _call(["npm", "install", "--silent", "--prefix", str(folder)], _BUILD_S)
    shutil.copy(CLIENTS / "kafkajs" / "session.js", folder)
    _call(["node", str(folder / "session.js"), address])


def franz_go(address: str) -> None:
    program, source = cache() / "franz-go-session", CLIENTS / "franz_go"
    if not program.exists() or program.stat().st_mtime < (source / "session.go").stat().st_mtime:
        _call(["go", "build", "-C", str(source), "-o", str(program), "."], _BUILD_S)
    _call([str(program), address])


SESSIONS: dict[str, Callable[[str], None]] = {
    "java_4_3_1": java_session(LATEST),
    "java_3_9_1": java_session(BEFORE),
    "librdkafka": whole_session,
    "kafka_python": kafka_python,
    "franz_go": franz_go,
    "kafkajs": kafkajs,
}


def _call(command: list[str], timeout_s: float = _WAIT_S) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {(done.stdout + done.stderr)[-2000:]}")


def state(address: str) -> dict[str, Any]:
    """What a broker holds, by independent clients: records of each partition, committed offsets.

    Each log is its count of records and a digest of keys, values and headers in their order.
    """
    from confluent_kafka import ConsumerGroupTopicPartitions
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": address})
    names = [name for name in admin.list_topics(timeout=20).topics if not name.startswith("__")]
    logs = {
        f"{topic}-{number}": [len(log), hashlib.sha256(repr(log).encode()).hexdigest()[:16]]
        for (topic, number), log in sorted(read_back(address, sorted(names)).items())
    }
    commits = {}
    for group in sorted(each.group_id for each in admin.list_consumer_groups().result().valid):
        wanted = [ConsumerGroupTopicPartitions(group)]
        found = admin.list_consumer_group_offsets(wanted)[group].result().topic_partitions
        for each in sorted(found, key=lambda one: (one.topic, one.partition)):
            commits[f"{group} {each.topic}-{each.partition}"] = each.offset
    return {"logs": logs, "commits": commits}


def difference(recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What a broker holds otherwise than the recorded one; a line each."""
    return [
        f"{kind} {name}: recorded {recorded[kind].get(name)}, found {found[kind].get(name)}"
        for kind in ("logs", "commits")
        for name in sorted(recorded[kind].keys() | found[kind].keys())
        if recorded[kind].get(name) != found[kind].get(name)
    ]


def record(name: str, kafka_version: str, folder: Path) -> Path:
    """Record a session on a fresh broker; returns the capture. Its state is in NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_on_{kafka_version.replace('.', '_')}.pcap"
    with target(kafka_version, settings=SETTINGS) as (broker,):
        with recording(path, [broker.ports["PLAINTEXT"]]):
            SESSIONS[name](broker.address)
        held = state(broker.address)
    about = {"kafka_version": kafka_version, "settings": SETTINGS, **held}
    path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
    return path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=f"{', '.join(SESSIONS)}")
    parser.add_argument("--release", default=BEFORE)
    parser.add_argument("--folder", type=Path, default=FOLDER)


def main(given: argparse.Namespace) -> int:
    """Return the count of clients that failed."""
    failed = 0
    for name in given.names or SESSIONS:
        began = time.monotonic()
        try:
            path = record(name, given.release, given.folder)
        except Exception as error:  # the others are still worth their recordings
            failed += 1
            print(f"{name}: {error}", flush=True)
            continue
        print(f"{path}: {path.stat().st_size} bytes, {time.monotonic() - began:.1f} s", flush=True)
    return failed
