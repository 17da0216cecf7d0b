"""Compares verdicts of `kdissect readiness` with the known releases of recorded clients.

The manifest of each recording names the clients and their releases. Each pattern of client ids here
gives the verdict for the target. Kafka's own jars show the versions of a release. A client that
worked on a recorded 4.3.1 broker works on every release from 4.0 on that has its APIs.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import kdissect
from kdissect.readiness.assessment import BREAKS, OK, UNKNOWN, assess
from tools.truth.loss import LOST, without_packets

DEPENDS = "depends"  # on a setting of the target's brokers
RIGHT, WRONG, UNDECIDED = "right", "wrong", "not decided"

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


def section(captures: Path) -> str:
    """The section of the page."""
    lines, notes = [], []
    totals = {0.0: Counter[str](), LOST: Counter[str]()}
    for (name, target), truths in TRUTHS.items():
        path = captures / f"{name}.pcap"
        key_log = path.with_suffix(".keylog")
        cells = [name, target]
        for share, total in totals.items():
            counts = Counter[str]()
            with without_packets(path, share) as capture:
                tables = kdissect.read(capture, keylog=key_log if key_log.is_file() else ())
                clients = assess(tables, target)["clients"]
            for client in clients:
                client_id = client["client_id"] or ""
                truth = next(truths[each] for each in truths if re.fullmatch(each, client_id))
                outcome = judge(truth, client["verdict"])
                counts[outcome] += 1
                if outcome == WRONG:
                    notes.append(f"{name} {client_id}: {client['verdict']}, and it is {truth}")
            total.update(counts)
            cells += [str(counts[each]) for each in (RIGHT, WRONG, UNDECIDED)]
        lines.append(f"| {' | '.join(cells)} |")
    whole, lossy = totals.values()
    return "\n".join(
        [
            "## Readiness",
            "",
            "The verdict on each client beside what the recording's manifest says it is. Right: "
            "`ok` or `breaks` as it is, and `unknown` where a setting of the target decides. The "
            "same with 2 % of the packets removed.",
            f"{whole[RIGHT]} clients right, {whole[WRONG]} wrong, {whole[UNDECIDED]} not decided; "
            f"with loss {lossy[RIGHT]}, {lossy[WRONG]} and {lossy[UNDECIDED]}"
            + (f": {'; '.join(notes)}" if notes else "")
            + ".",
            "",
            "| capture | target | right | wrong | not decided | with loss: right | wrong | "
            "not decided |",
            "|---|---|---:|---:|---:|---:|---:|---:|",
            *lines,
        ]
    )
