"""Rate of decoding messages to Arrow columns, beside kio (objects) and generated Python (tuples).

    python -m bench.bench_body [--megabytes 8] [--runs 5]

Each case repeats one message to a batch of that many megabytes (5000 messages at least). kdissect
decodes headers, bodies and marks and makes the Arrow columns; `kernel` is the column kernel alone,
and the ratios are its. The peers decode bodies alone, of a fortieth of the batch. Runs are
interleaved, medians printed; the peers' objects are dropped at once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from uuid import UUID

import numpy as np
from kio.serial import entity_reader

from bench.generated import generate
from kdissect.codec import message_codec
from kdissect.codec.column_buffers import give_back, take_builders
from kdissect.codec.message_columns import _run as run_programs
from kdissect.codec.message_columns import decode_columns
from kdissect.protocol import catalog
from kdissect.protocol.column_plan import plan as plan_of


@dataclass(frozen=True)
class Case:
    name: str
    key: int
    side: str
    api_version: int
    body: dict[str, Any]


def cases() -> list[Case]:
    partitions = [{"partition": at, "fetch_offset": 10**6 + at, "partition_max_bytes": 2**20,
                   "current_leader_epoch": 3} for at in range(4)]  # fmt: skip
    asked = {"max_wait_ms": 500, "min_bytes": 1, "max_bytes": 2**25,
             "topics": [{"topic": "orders-eu", "partitions": partitions}]}  # fmt: skip
    old = [{name: one[name] for name in ("partition", "fetch_offset", "partition_max_bytes")}
           for one in partitions]  # fmt: skip
    members = [{"partition_index": at, "leader_id": at % 3, "leader_epoch": 7,
                "replica_nodes": [0, 1, 2], "isr_nodes": [0, 1, 2]} for at in range(6)]  # fmt: skip
    topics = [{"name": f"topic-number-{at:03d}", "topic_id": UUID(int=at + 1),
               "partitions": members} for at in range(30)]  # fmt: skip
    brokers = [{"node_id": at, "host": f"broker-{at}.example.org", "port": 9092, "rack": "a"}
               for at in range(3)]  # fmt: skip
    keys = [{"api_key": at, "min_version": 0, "max_version": 9} for at in range(60)]
    commits = [{"partition_index": at, "committed_offset": 5000 + at, "committed_leader_epoch": 1,
                "committed_metadata": ""} for at in range(6)]  # fmt: skip
    fetched = [{"partition_index": at, "high_watermark": 10**7, "last_stable_offset": 10**7,
                "records": bytes(3000)} for at in range(4)]  # fmt: skip
    return [
        Case("Fetch request v4", 1, "request", 4,
             {**asked, "topics": [{"topic": "orders-eu", "partitions": old}]}),
        Case("Fetch request v12", 1, "request", 12, asked),
        Case("Metadata response v12", 3, "response", 12,
             {"brokers": brokers, "cluster_id": "bW9ja2VkLWNsdXN0ZXI", "topics": topics}),
        Case("ApiVersions response v3", 18, "response", 3, {"api_keys": keys}),
        Case("OffsetCommit request v8", 8, "request", 8,
             {"group_id": "billing", "member_id": "consumer-1-7b1c",
              "topics": [{"name": "orders-eu", "partitions": commits}]}),
        Case("Fetch response v11, records", 1, "response", 11,
             {"responses": [{"topic": "orders-eu", "partitions": fetched}]}),
    ]  # fmt: skip


def frame_of(case: Case) -> tuple[bytes, int]:
    """The frame, and where its body starts."""
    api = catalog.api(case.key)
    if case.side == "request":
        definition = catalog.REQUEST_HEADER
        header_version = api.request_header_version(case.api_version)
        header = {"request_api_key": case.key, "request_api_version": case.api_version,
                  "correlation_id": 7, "client_id": "consumer-1"}  # fmt: skip
    else:
        definition = catalog.RESPONSE_HEADER
        header_version = api.response_header_version(case.api_version)
        header = {"correlation_id": 7}
    head = message_codec.encode(definition, header_version, header)
    return head + message_codec.encode(api.side(case.side), case.api_version, case.body), len(head)


def kio_reader(case: Case) -> Callable[[Any], Any]:
    api = catalog.api(case.key)
    folder = "".join("_" + c.lower() if c.isupper() else c for c in api.name).strip("_")
    module = import_module(f"kio.schema.{folder}.v{case.api_version}.{case.side}")
    reader: Callable[[Any], Any] = entity_reader(
        getattr(module, f"{api.name}{case.side.capitalize()}")
    )
    return reader


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    ours = f"{'message':30}{'bytes':>7}{'batch':>8}{'k msg/s':>9}{'MB/s':>7}"
    print(ours + f"{'kernel':>9}{'kio':>7}{'ratio':>7}{'python':>8}{'ratio':>7}")
    for case in cases():
        frame, body_start = frame_of(case)
        count = max(5000, (options.megabytes << 20) // len(frame))
        end = np.arange(1, count + 1, dtype=np.int64) * len(frame)
        start = end - len(frame)
        buf = np.frombuffer(frame * count, np.uint8)
        versions = np.full(count, case.api_version, np.int16)
        reader = kio_reader(case)
        body = frame[body_start:]
        written = generate(catalog.api(case.key).side(case.side), case.api_version)
        assert written(body, 0)[1] == len(body)
        programs = plan_of(case.key, case.side)
        kernel, ours, theirs, plain = [], [], [], []
        columns = decode_columns(case.key, case.side, buf, start, end, versions)
        assert not columns.status.any()
        assert not columns.surplus.any()
        del columns
        peer_count = max(20, count // 40)
        for _ in range(options.runs):
            builders = take_builders(programs)
            began = time.perf_counter()
            run_programs(builders, buf, start, end, versions)
            kernel.append(count / (time.perf_counter() - began))
            give_back(builders)
            began = time.perf_counter()
            decode_columns(case.key, case.side, buf, start, end, versions)
            ours.append(count / (time.perf_counter() - began))
            began = time.perf_counter()
            for _ in range(peer_count):
                reader(body, 0)
            theirs.append(peer_count / (time.perf_counter() - began))
            began = time.perf_counter()
            for _ in range(peer_count):
                written(body, 0)
            plain.append(peer_count / (time.perf_counter() - began))
        alone, rate, peer, python = map(statistics.median, (kernel, ours, theirs, plain))
        print(
            f"{case.name:30}{len(frame):7}{count:8}{rate / 1e3:9.0f}{rate * len(frame) / 1e6:7.0f}"
            f"{alone / 1e3:9.0f}{peer / 1e3:7.1f}{alone / peer:7.1f}"
            f"{python / 1e3:8.1f}{alone / python:7.1f}"
        )


if __name__ == "__main__":
    main()
