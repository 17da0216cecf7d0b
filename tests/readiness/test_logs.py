"""What clients do that a release does not take, against the brokers' own request logs."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest

import kdissect
from kdissect.protocol.releases import find_release, spoken_versions
from kdissect.readiness.assessment import BREAKS, DISPENSABLE_APIS, OK, UNKNOWN, assess
from tests.conftest import ROOT

CAPTURES = ROOT.parent / "shared" / "captures"
# how the servers of these recordings call themselves
SERVERS = r"\d+|broker-\d+-.*|raft-client-\d+|(AddPartitionsManager|Persister)-client-\d+|Network.*"

pytestmark = pytest.mark.skipif(
    not CAPTURES.exists(), reason="no recorded captures with request logs beside the project"
)

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
    ("share_streams/share", "4.0"): {BREAKS: 4, UNKNOWN: 0, OK: 1},
    ("share_streams/share", "4.3"): {BREAKS: 0, UNKNOWN: 0, OK: 5},
    ("transactions/transactions", "4.0"): {BREAKS: 0, UNKNOWN: 0, OK: 16},
}


def logged(path: Path, release: str) -> Counter[tuple[str | None, int, int]]:
    """Requests of clients that the release does not take, as the broker logged them."""
    taken = spoken_versions(release)
    found: Counter[tuple[str | None, int, int]] = Counter()
    with gzip.open(path, "rt") as stream:
        for line in stream:
            row = json.loads(line)
            key, api_version, client_id = row["api_key"], row["api_version"], row["client_id"]
            if re.fullmatch(SERVERS, client_id or "") or key in DISPENSABLE_APIS:
                continue
            if key not in taken or api_version < taken[key].first:
                found[client_id, key, api_version] += 1
    return found


@pytest.mark.parametrize(("name", "target"), VERDICTS, ids=str)
def test_a_recording(name: str, target: str) -> None:
    """The findings are the requests in the log, and the verdicts what the recording is made of."""
    document = assess(kdissect.read(CAPTURES / f"{name}.pcap"), target)
    found: Counter[tuple[str | None, int, int]] = Counter()
    for client in document["clients"]:
        for each in client["findings"]:
            place = (client["client_id"], each["api_key"], each["api_version"])
            found[place] += each["request_count"]
    assert found == logged(CAPTURES / f"{name}.requests.jsonl.gz", find_release(target))
    assert document["counts"] == VERDICTS[name, target]
    assert not any(re.fullmatch(SERVERS, each["client_id"]) for each in document["clients"])
