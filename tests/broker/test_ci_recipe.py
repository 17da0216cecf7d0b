"""The CI recipe of examples/ci, as a user runs it: a broker from Maven, a shipped capture."""

import socket
import sys
from pathlib import Path

import pytest

from tests.broker import kafka_broker
from tests.broker.replaying import ROOT
from tests.processes import Done, run

pytestmark = pytest.mark.broker
SCRIPT = ROOT / "examples" / "ci" / "replay-against-candidate.sh"


def recipe(out: Path, *options: str, **env: str) -> Done:
    try:
        jars = kafka_broker.jars(kafka_broker.LATEST)
        kafka_broker.java()
    except kafka_broker.Unavailable as error:
        pytest.skip(f"no broker: {error}")
    port, controller_port = kafka_broker.free_ports(2)
    settings = {
        "KDISSECT": f"{sys.executable} -m kdissect",
        "KAFKA_VERSION": kafka_broker.LATEST,
        "KAFKA_JARS": str(jars),
        "OUT": str(out),
        "PORT": str(port),
        "CONTROLLER_PORT": str(controller_port),
        **env,
    }
    done = run("bash", SCRIPT, *options, **settings)
    with pytest.raises(ConnectionRefusedError):  # its broker has ended
        socket.create_connection(("127.0.0.1", port))
    return done


def test_the_recipe_passes_without_a_difference(tmp_path: Path) -> None:
    """The shipped capture on the broker it was made with passes, and leaves its reports."""
    done = recipe(tmp_path, str(ROOT / "captures" / "sarama.pcap.gz"), "--pace", "x4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'failures="0" errors="0"' in (tmp_path / "replay.xml").read_text()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"replay.xml", "replay.jsonl", "replay.html"}


@pytest.mark.heavy
def test_a_difference_fails(tmp_path: Path) -> None:
    """A candidate broker with another default fails the job, which names the setting."""
    properties = tmp_path / "broker.properties"
    recorded = (ROOT / "examples" / "ci" / "broker.properties").read_text()
    properties.write_text(recorded.replace("segment.bytes=67108864", "segment.bytes=33554432"))
    done = recipe(
        tmp_path,
        str(ROOT / "captures" / "sarama.pcap.gz"),
        "--pace",
        "x4",
        BROKER_PROPERTIES=str(properties),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    text = (tmp_path / "replay.xml").read_text()
    assert "captured 67108864, answered 33554432" in text
