"""Real captures: the counts of their manifests, the same frames from damaged copies, accounts."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from kdissect.capture.inputs import find_captures
from kdissect.capture.mapped_files import Sources
from kdissect.capture.scan import scan
from kdissect.capture.segments import SegmentBatch
from kdissect.kafka.assemble import assemble
from kdissect.kafka.assembly import Anomaly, Assembly, PairStatus, Protocol
from tests.capture.scanned import planned
from tests.material import CAPTURES, needs_material

pytestmark = needs_material

WHOLE = (
    "admin/admin", "cluster/cluster", "java_latest/java_latest", "odd/odd_conversations",
    "old_clients/java_0_10_2_2", "old_clients/java_0_8_2_2", "old_clients/java_2_0_1",
    "other_clients/kafka_python", "other_clients/librdkafka", "other_clients/sarama",
    "perf/perf_small", "perf/perf_tshark", "sasl/sasl", "sasl/sasl_handshake_v0", "shapes/ipv6",
    "share_streams/share", "share_streams/streams", "transactions/transactions",
    "version_sweep/sweep_4_3_1", "zookeeper/zk_1_1_1", "zookeeper/zk_3_9_1_ibp_2_4",
)  # fmt: skip
# Requests that the manifests count apart: an unknown version and an unknown api key.
NOT_COUNTED = {"odd/odd_conversations": (2, 1)}
DAMAGED = ("seqwrap", "reordered", "duplicated", "midstream", "drop1pct", "snap128")
SOME = ("java_latest/java_latest", "share_streams/streams", "zookeeper/zk_1_1_1")


@cache
def assembled(name: str) -> tuple[SegmentBatch, Sources, Assembly]:
    plan = planned(find_captures([CAPTURES / f"{name}.pcap"]))
    (split,) = plan.splits
    sources = plan.sources()
    batch = scan(split, sources, plan.fragments).batch
    return batch, sources, assemble(batch, sources)


def frames(assembly: Assembly) -> set[tuple[int, int, int, int, int]]:
    """Whole frames by endpoints' ports, direction, correlation id, size and last byte's time."""
    found = set()
    ends = assembly.endpoints[assembly.connections["endpoints"]]
    for row in assembly.exchanges:
        ports = ends[row["connection"]]
        for direction, side in enumerate((row["request"], row["response"])):
            if side["is_whole"]:
                found.add(
                    (
                        int(ports["port_a"]) << 16 | int(ports["port_b"]),
                        direction,
                        int(row["correlation_id"]),
                        int(side["size"]),
                        int(side["end_time_ns"]),
                    )
                )
    return found


def check_accounts(assembly: Assembly) -> None:
    counts = assembly.connections["direction"]
    is_kafka = assembly.connections["protocol"] == Protocol.KAFKA
    framed, unframed = counts["framed_byte_count"], counts["unframed_byte_count"]
    assert (counts["byte_count"] == framed + unframed).all()
    assert (framed[~is_kafka] == 0).all()
    anomalies = assembly.anomalies
    for kind, column in (
        (Anomaly.UNFRAMED_BYTES, unframed),
        (Anomaly.GAP, counts["missing_byte_count"]),
    ):
        told = np.zeros(column.shape, np.int64)
        rows = anomalies[anomalies["kind"] == kind]
        np.add.at(told, (rows["connection"], rows["direction"]), rows["byte_count"])
        assert (told[is_kafka] == column[is_kafka]).all(), kind
        assert (told[~is_kafka] == 0).all(), kind


@pytest.mark.parametrize("name", WHOLE)
def test_the_counts_of_the_manifest(name: str) -> None:
    """Requests, responses, unanswered ones by API, acks=0 and SASL tokens."""
    check: dict[str, Any] = json.loads((CAPTURES / f"{name}.json").read_text())["check"]
    _, _, assembly = assembled(name)
    rows = assembly.exchanges
    is_token = rows["is_sasl_token"] != 0
    more = NOT_COUNTED.get(name, (0, 0))
    requests = rows[(rows["request"]["size"] >= 0) & ~is_token]
    answered = (rows["response"]["size"] >= 0) & (rows["response"]["is_whole"] != 0) & ~is_token
    assert len(requests) == check["requests"] + more[0]
    assert answered.sum() == check["responses"] + more[1]
    assert (rows["status"] == PairStatus.NO_RESPONSE_EXPECTED).sum() == check["acks0_produce"]
    assert is_token.sum() == check["raw_sasl_tokens"]
    assert not (rows["status"] == PairStatus.REQUEST_MISSING).any()
    assert len(assembly.connections) == check["connections"]
    open_ = (requests["response"]["is_whole"] == 0) & (
        requests["status"] != PairStatus.NO_RESPONSE_EXPECTED
    )
    by_api: dict[str, int] = {}
    for row in requests[open_]:
        key = f"{row['api_key']} v{row['api_version']}"
        by_api[key] = by_api.get(key, 0) + 1
    by_api.pop("999 v0", None)
    assert by_api == check["unanswered"]["by_api"]
    check_accounts(assembly)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_copies_give_the_same_frames(name: str) -> None:
    """What a copy of librdkafka.pcap still holds is found, and nothing else."""
    original = assembled("other_clients/librdkafka")[2]
    _, _, assembly = assembled(f"shapes/{name}")
    check_accounts(assembly)
    true, found = frames(original), frames(assembly)
    if name != "reordered":  # times there are those of other packets
        assert not found - true
    if name in ("seqwrap", "duplicated"):
        assert found == true
    counts = (len(found), len(true))
    if name == "reordered":
        assert counts[0] == counts[1]


@pytest.mark.parametrize(("share", "least"), [(0.001, 0.999), (0.01, 0.995), (0.05, 0.98)])
@pytest.mark.parametrize("name", SOME)
def test_random_loss_costs_only_the_frames_it_hits(name: str, share: float, least: float) -> None:
    """Nearly all frames without a lost byte are found, and no frame is made up."""
    batch, memory, whole = assembled(name)
    keep = np.random.default_rng(7).random(len(batch.segments)) >= share
    compare_with_the_rest(batch, memory, whole, keep, least)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("start", [0.2, 0.4, 0.7])
def test_a_capture_may_start_in_the_middle(name: str, start: float) -> None:
    """A capture that starts late gives nearly all frames after its start."""
    batch, memory, whole = assembled(name)
    keep = np.arange(len(batch.segments)) >= len(batch.segments) * start
    compare_with_the_rest(batch, memory, whole, keep, 0.98)


@pytest.mark.parametrize(("direction", "least"), [(0, 0.98), (1, 0.95)])
@pytest.mark.parametrize("name", SOME)
def test_one_direction_alone_is_framed(name: str, direction: int, least: float) -> None:
    """Requests alone, or responses alone, are framed with one per cent of loss."""
    batch, memory, whole = assembled(name)
    client = np.zeros(len(batch.endpoints), np.int64)
    client[whole.connections["endpoints"]] = whole.connections["client_side"]
    keep = batch.segments["side"] == (client[batch.segments["endpoints"]] ^ direction)
    keep &= np.random.default_rng(3).random(len(batch.segments)) >= 0.01
    compare_with_the_rest(batch, memory, whole, keep, least, direction)


def compare_with_the_rest(
    batch: SegmentBatch, memory: Sources, whole: Assembly, keep: Any, least: float, only: int = -1
) -> None:
    """Assemble the kept segments; at least that share of intact frames appears, and no other."""
    kept = batch.segments[keep]
    assembly = assemble(SegmentBatch(batch.endpoints, kept), memory)
    check_accounts(assembly)
    rows = np.sort(kept[["pos", "captured"]][kept["captured"] > 0], order="pos")
    starts, ends = rows["pos"], rows["pos"] + rows["captured"]

    def is_there(pos: int, length: int) -> bool:
        at = int(np.searchsorted(starts, pos, "right")) - 1
        return at >= 0 and bool(pos + length <= ends[at])

    truth, found = places(whole), places(assembly)
    intact = {
        key
        for key, extents in truth.items()
        if (only < 0 or key[0] == only)
        and is_there(extents[0][0] - 4, 4)
        and all(is_there(*extent) for extent in extents)
    }
    assert len(intact & set(found)) >= least * len(intact), (len(intact), len(found))
    # A retransmitted frame may lie in its second copy: compare by id and size then.
    ids = {(key[0], key[1], key[3]) for key in truth}
    assert not [key for key in set(found) - set(truth) if (key[0], key[1], key[3]) not in ids]


def places(assembly: Assembly) -> dict[tuple[int, int, int, int], list[tuple[int, int]]]:
    """Whole frames: (direction, size, first place, correlation id) to the extents of the bytes."""
    found = {}
    for row in assembly.exchanges:
        for direction, side in enumerate((row["request"], row["response"])):
            if side["is_whole"] and side["size"] > 0:
                part = assembly.extents[side["extent_start"] :][: side["extent_count"]]
                extents = [(int(x["pos"]), int(x["length"])) for x in part]
                key = (direction, int(side["size"]), extents[0][0], int(row["correlation_id"]))
                found[key] = extents
    return found
