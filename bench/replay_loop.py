"""What the replay's loop alone can do: a made workload against a server that answers at once.

    bench/replay_loop.py --connections 100 --requests 200000 --pace max
    bench/replay_loop.py --connections 1000 --requests 60000 --seconds 20 --pace recorded
    bench/replay_loop.py --source capture.pcap --pace max      the real translation, all classes

Made requests are Heartbeats of 40 bytes, each sent when the one before it on its connection was
answered (`--pipeline N`: N of them in flight). Prints requests a second, CPU time, and the lag.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kdissect.replay.model import (
    WRITING_CLASSES,
    Connection,
    Exchange,
    Plan,
    PlanOptions,
    Skipped,
    Step,
    TranslateOptions,
    Workload,
    WorkloadFacts,
)
from kdissect.replay.pace import parse_pace
from kdissect.replay.played import RunOptions, RunResult
from kdissect.replay.results import Span
from kdissect.replay.run import Runner
from kdissect.replay.target import Target
from kdissect.wire.message import Message, encode_message

HEARTBEAT, HEARTBEAT_VERSION = 12, 4
SEED = 8


class CorrelationOnly:
    """The cheapest translation there is."""

    def wants_metadata(self, step: Step) -> list[str]:
        return []

    def target_node(self, step: Step) -> int | None:
        return 1

    def request(self, step: Step, correlation_id: int) -> bytes | Skipped:
        frame = step.exchange.request
        assert frame is not None
        return frame[:4] + correlation_id.to_bytes(4, "big") + frame[8:]

    def api_version(self, step: Step) -> int:
        return HEARTBEAT_VERSION

    def retry(self, step: Step, response: bytes) -> str:
        return ""

    def learn(self, step: Step, response: bytes) -> None: ...

    def failed(self, step: Step) -> None: ...


def made_plan(connection_count: int, request_count: int, seconds: float, in_flight: int) -> Plan:
    """Requests at random times, evenly over connections and time."""
    rng = random.Random(SEED)
    frame = encode_message(
        Message(
            HEARTBEAT,
            HEARTBEAT_VERSION,
            "request",
            {"correlation_id": 0, "client_id": "bench"},
            {"group_id": "group", "generation_id": 1, "member_id": "member"},
        )
    )
    connections = [
        Connection(n, n, ("10.0.0.1", 1024 + n), ("10.0.0.2", 9092), 0, int(seconds * 1e9))
        for n in range(connection_count)
    ]
    times = sorted(
        (int(rng.random() * seconds * 1e9), number % connection_count)
        for number in range(request_count)
    )
    steps: list[Step] = []
    scripts: list[list[int]] = [[] for _ in connections]
    for number, (at_ns, owner) in enumerate(times):
        script = scripts[owner]
        exchange = Exchange(
            number, owner, len(script), HEARTBEAT, HEARTBEAT_VERSION, 0, "bench", frame, b"",
            at_ns, at_ns, at_ns, at_ns,
        )  # fmt: skip
        connections[owner].exchanges.append(exchange)
        after = (script[-in_flight],) if len(script) >= in_flight else ()
        steps.append(
            Step(number, owner, exchange, "Heartbeat", "groups", at_ns, True, depends_on=after)
        )
        script.append(number)
    workload = Workload("made", "capture", connections, WorkloadFacts())
    return Plan(workload, PlanOptions(), steps, scripts)


@contextmanager
def null_server() -> Iterator[int]:
    """A process of its own; its port."""
    command = [sys.executable, str(Path(__file__).with_name("null_server.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def play(plan: Plan, port: int, pace: str, translated: bool) -> RunResult:
    target = Target("127.0.0.1", port)
    await target.probe()
    translation: Any = CorrelationOnly()
    if translated:
        from kdissect.replay.translate import Translator

        translation = Translator(plan, TranslateOptions())
        translation.learn_versions(target.versions)
        translation.learn_metadata(target.metadata)
    return await Runner(plan, translation, None, target, RunOptions(parse_pace(pace))).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--pace", default="max")
    parser.add_argument("--source")
    given = parser.parse_args()
    if given.source:
        from kdissect.replay.plan import make_plan
        from kdissect.replay.source import load_workload

        options = PlanOptions(allow=frozenset(WRITING_CLASSES))
        plan = make_plan(load_workload(given.source), options)
    else:
        plan = made_plan(given.connections, given.requests, given.seconds, given.pipeline)
    with null_server() as port:
        cpu = time.process_time()
        result = asyncio.run(play(plan, port, given.pace, bool(given.source)))
        cpu = time.process_time() - cpu
    sent = [each for each in result.outcomes if each.sent is not None]
    lag = Span.of(each.lag_ns for each in sent)
    own = Span.of(ns for ns in result.own_lag_ns if ns >= 0)
    print(
        json.dumps(
            {
                "sent": len(sent),
                "answered": sum(each.answer is not None for each in sent),
                "ended": result.ended,
                "elapsed_s": round(result.elapsed_ns / 1e9, 3),
                "requests_per_s": round(len(sent) / (result.elapsed_ns / 1e9)),
                "cpu_us_per_request": round(cpu * 1e6 / max(len(sent), 1), 1),
                "lag_ms": [round((ns or 0) / 1e6, 3) for ns in (lag.p50, lag.p99, lag.max)],
                "own_lag_ms": [round((ns or 0) / 1e6, 3) for ns in (own.p50, own.p99, own.max)],
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            }
        )
    )


if __name__ == "__main__":
    main()
