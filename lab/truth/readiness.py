"""Compares verdicts of `kdissect readiness` with the known releases of recorded clients.

The manifest of each recording names the clients and their releases. Each pattern of client ids here
gives the verdict for the target. Kafka's own jars show the versions of a release. A client that
worked on a recorded 4.3.1 broker works on every release from 4.0 on that has its APIs.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from kdissect import Tables
from kdissect.readiness.assessment import BREAKS, OK, UNKNOWN
from lab.truth.section import RIGHT, UNDECIDED, WRONG, Judged, Section

DEPENDS = "depends"  # on a setting of the target's brokers

_ALL = {".*": OK}
# (capture, target) to patterns of client ids, the first that matches, with the truth.
TRUTHS: dict[tuple[str, str], dict[str, str]] = {
    ("admin/admin", "4.0"): _ALL,
    ("cluster/cluster", "4.0"): {"share-[123]|ss-admin": BREAKS, ".*": OK},
    ("java_latest/java_latest", "3.9"): {"new-.*|bad-instance": DEPENDS, ".*": OK},
    ("java_latest/java_latest", "4.0"): _ALL,
    ("old_clients/java_0_8_2_2", "3.9"): _ALL,
    ("old_clients/java_0_8_2_2", "4.0"): {"java-.*": BREAKS, ".*": OK},
    ("old_clients/java_0_10_2_2", "3.9"): _ALL,
    ("old_clients/java_0_10_2_2", "4.0"): {"(java|old[12])-.*": BREAKS, ".*": OK},
    ("old_clients/java_2_0_1", "4.0"): _ALL,
    ("old_clients/java_2_0_1", "4.3"): _ALL,
    ("other_clients/kafka_python", "4.0"): _ALL,
    ("other_clients/librdkafka", "3.9"): {"rd-c[01]": DEPENDS, ".*": OK},
    ("other_clients/librdkafka", "4.0"): _ALL,
    ("other_clients/sarama", "4.0"): _ALL,
    ("perf/perf_tshark", "4.0"): _ALL,
    ("sasl/sasl", "4.0"): _ALL,
    ("sasl/sasl_handshake_v0", "4.1"): {".*": BREAKS},
    ("shapes/drop1pct", "4.0"): _ALL,
    ("shapes/ipv6", "4.0"): _ALL,
    ("shapes/midstream", "4.0"): _ALL,
    ("share_streams/share", "4.0"): {"share-[123]|ss-admin": BREAKS, ".*": OK},
    ("share_streams/share", "4.1"): {"share-[123]": DEPENDS, ".*": OK},
    ("share_streams/share", "4.3"): _ALL,
    ("share_streams/streams", "4.0"): {
        r"wc-streams-\d-StreamThread-1-consumer|ss-admin": BREAKS,
        ".*": OK,
    },
    ("tls/tls12", "4.0"): _ALL,
    ("tls/tls13", "4.0"): _ALL,
    ("transactions/transactions", "4.0"): _ALL,
    ("version_sweep/sweep_4_3_1", "4.0"): _ALL,
    ("zookeeper/zk_1_1_1", "4.0"): {"oldadmin-.*": BREAKS, ".*": OK},
    ("zookeeper/zk_3_9_1_ibp_2_4", "4.0"): _ALL,
}


def judge(truth: str, verdict: str) -> str:
    """Return whether a verdict is right; `unknown` is right where the truth depends on a
    setting."""
    if verdict == UNKNOWN:
        return RIGHT if truth == DEPENDS else UNDECIDED
    return RIGHT if verdict == truth else WRONG


def sources(captures: Path) -> Iterable[tuple[str, Path]]:
    """Each capture and target."""
    return ((f"{name} for {target}", captures / f"{name}.pcap") for name, target in TRUTHS)


def compare(source: str, tables: Tables, _: Path) -> Judged:
    """The clients of a capture by the verdict on them."""
    name, _, target = source.partition(" for ")
    counts, wrong = Counter[str](), []
    for client in tables.readiness(target)["clients"]:
        client_id = client["client_id"] or ""
        truth = next(
            truth
            for pattern, truth in TRUTHS[name, target].items()
            if re.fullmatch(pattern, client_id)
        )
        outcome = judge(truth, client["verdict"])
        if outcome == WRONG:
            wrong.append(f"{client_id}: {client['verdict']}, and it is {truth}")
        else:
            counts[outcome] += 1
    return counts, wrong


SECTION = Section(
    "Readiness",
    "The verdict on each client beside what the recording's manifest says it is. Right: `ok` or "
    "`breaks` as it is, and `unknown` where a setting of the target decides.",
    compare,
    sources,
)
