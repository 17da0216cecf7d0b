"""What clients do that a release does not take, against the brokers' own request logs."""

import re
from collections import Counter
from pathlib import Path

import pytest

import kdissect
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.releases import find_release, spoken_versions
from kdissect.readiness.assessment import BREAKS, DISPENSABLE_APIS, OK, UNKNOWN
from kdissect.readiness.software import java_releases
from tests.material import CAPTURES, needs_material
from tests.truth.request_log import read_lines

# how the servers of these recordings call themselves
SERVERS = r"\d+|broker-\d+-.*|raft-client-\d+|(AddPartitionsManager|Persister)-client-\d+|Network.*"

pytestmark = needs_material

VERDICTS = {
    ("old_clients/java_0_8_2_2", "4.0"): {BREAKS: 3, UNKNOWN: 0, OK: 1},
    ("old_clients/java_0_10_2_2", "4.0"): {BREAKS: 6, UNKNOWN: 0, OK: 1},
    ("old_clients/java_0_10_2_2", "3.9"): {BREAKS: 0, UNKNOWN: 0, OK: 7},
    ("old_clients/java_2_0_1", "4.3"): {BREAKS: 0, UNKNOWN: 0, OK: 9},
    ("sasl/sasl_handshake_v0", "4.1"): {BREAKS: 2, UNKNOWN: 0, OK: 0},
    ("zookeeper/zk_1_1_1", "4.0"): {BREAKS: 0, UNKNOWN: 1, OK: 7},
    ("zookeeper/zk_3_9_1_ibp_2_4", "4.0"): {BREAKS: 0, UNKNOWN: 0, OK: 3},
    ("version_sweep/sweep_4_3_1", "4.0"): {BREAKS: 0, UNKNOWN: 0, OK: 24},
    ("other_clients/librdkafka", "2.4"): {BREAKS: 3, UNKNOWN: 0, OK: 6},
    ("other_clients/librdkafka", "3.9"): {BREAKS: 0, UNKNOWN: 2, OK: 7},
    ("share_streams/share", "4.0"): {BREAKS: 4, UNKNOWN: 0, OK: 1},
    ("share_streams/share", "4.3"): {BREAKS: 0, UNKNOWN: 0, OK: 5},
    ("transactions/transactions", "4.0"): {BREAKS: 0, UNKNOWN: 0, OK: 16},
}


# Java clients that do not give their name, with the releases that behave as they do
UNNAMED = {
    ("old_clients/java_0_8_2_2", "java-"): ["0.8.2.2"],
    ("old_clients/java_0_10_2_2", "java-"): ["0.10.2.2"],
    ("old_clients/java_0_10_2_2", "old1-"): ["0.10.2.2"],
    ("sasl/sasl_handshake_v0", "sasl-v0-"): ["0.10.2.2"],
    ("zookeeper/zk_1_1_1", "old2-"): ["1.1.0", "1.1.1"],
    ("zookeeper/zk_1_1_1", "oldtx-"): ["1.0.0", "1.0.2", "1.1.0", "1.1.1"],
    ("old_clients/java_2_0_1", "old1-"): ["2.0.0", "2.0.1"],
    ("old_clients/java_2_0_1", "oldadmin-"): ["2.0.0", "2.0.1"],
    ("tls/tls13", "aio-c0"): [],
    ("other_clients/kafka_python", "kp-c0"): [],
    ("other_clients/librdkafka", "rd-c0"): [],
}


@pytest.mark.parametrize(("name", "client_id"), UNNAMED, ids=str)
def test_java_clients_by_their_behaviour(name: str, client_id: str) -> None:
    """Logged requests of a Java client fit its own release, and no other."""
    broker = "1.1.1" if "zk" in name else "4.3.1" if "tls" in name or "other" in name else "3.9.1"
    offered = spoken_versions(broker)
    requests = set()
    for row in read_lines(CAPTURES / f"{name}.requests.jsonl.gz"):
        if (row["client_id"] or "").startswith(client_id) and not row["forwarded"]:
            requests.add((row["api_key"], row["api_version"]))
    asked = [api_version for api_key, api_version in requests if api_key == ApiKey.API_VERSIONS]
    uses = [
        {"api_key": key, "api_version": version, "offered_lasts": [offered[key].last]}
        for key, version in requests
    ]
    assert java_releases(max(asked, default=None), True, uses) == UNNAMED[name, client_id]


def logged(path: Path, release: str) -> Counter[tuple[str | None, int, int]]:
    """Requests of clients that the release does not take, as the broker logged them."""
    taken = spoken_versions(release)
    found: Counter[tuple[str | None, int, int]] = Counter()
    for row in read_lines(path):
        key, api_version, client_id = row["api_key"], row["api_version"], row["client_id"]
        if re.fullmatch(SERVERS, client_id or "") or key in DISPENSABLE_APIS:
            continue
        if key not in taken or api_version < taken[key].first:
            found[client_id, key, api_version] += 1
    return found


@pytest.mark.parametrize(("name", "target"), VERDICTS, ids=str)
def test_findings_are_the_logged_requests(name: str, target: str) -> None:
    """The findings are the logged requests, and the verdicts fit the recorded clients."""
    document = kdissect.read(CAPTURES / f"{name}.pcap").readiness(target)
    found: Counter[tuple[str | None, int, int]] = Counter()
    for client in document["clients"]:
        for each in client["findings"]:
            if each["setting"] is not None:
                continue  # the release takes it where that is set
            place = (client["client_id"], each["api_key"], each["api_version"])
            found[place] += each["request_count"]
    assert found == logged(CAPTURES / f"{name}.requests.jsonl.gz", find_release(target))
    assert document["counts"] == VERDICTS[name, target]
    assert not any(re.fullmatch(SERVERS, each["client_id"]) for each in document["clients"])
