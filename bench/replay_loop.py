"""Measures a replay against a server that answers at once.

    bench/replay_loop.py --connections 100 --requests 200000 --pace max --loop
    bench/replay_loop.py --connections 1000 --requests 60000 --seconds 20 --pace recorded
    bench/replay_loop.py --source capture.pcap --pace max

Without --source the requests are made: Heartbeats of 40 bytes, each sent when the one before it on
its connection was answered (`--pipeline N`: N of them in flight). With it, all classes of a capture
are sent, and the server has the captured answers in the terms of a cluster with other ids.
Everything is done: planning, translation, learning, comparison, results; with --loop, nothing but
sending and receiving. Prints requests a second, the lag, and the CPU time of each part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.answers import Answers  # noqa: E402
from kdissect.codec.message import Message, encode_message  # noqa: E402
from kdissect.replay.model import (  # noqa: E402
    WRITING_CLASSES,
    Connection,
    DroppedField,
    Exchange,
    PlanOptions,
    ReplayPlan,
    Skipped,
    Step,
    Workload,
    WorkloadFacts,
)
from kdissect.replay.output.results import Span, judgement_of  # noqa: E402
from kdissect.replay.planning.plan import make_plan  # noqa: E402
from kdissect.replay.planning.schedule import parse_pace  # noqa: E402
from kdissect.replay.running.replay import SessionOptions, replay  # noqa: E402
from kdissect.replay.running.result import RunOptions, RunResult  # noqa: E402
from kdissect.replay.running.runner import Runner  # noqa: E402
from kdissect.replay.target.cluster import Target  # noqa: E402
from kdissect.replay.workload.source import load_workload  # noqa: E402

HEARTBEAT, HEARTBEAT_VERSION = 12, 4
SEED = 8


@dataclass
class Clock:
    """CPU seconds of this process by what was done."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.process_time)

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] = now - self._last
        self._last = now


class CorrelationOnly:
    """The cheapest translation there is."""

    def wants_metadata(self, step: Step) -> list[str]:
        return []

    def target_node(self, step: Step) -> int | None:
        return 1

    def is_split(self, step: Step) -> bool:
        return False

    def request(self, step: Step, correlation_id: int) -> bytes | Skipped:
        frame = step.exchange.request
        assert frame is not None
        return frame[:4] + correlation_id.to_bytes(4, "big") + frame[8:]

    def api_version(self, step: Step) -> int:
        return HEARTBEAT_VERSION

    def dropped_fields(self, step: Step) -> Sequence[DroppedField]:
        return ()

    def retry(self, step: Step, response: bytes) -> str:
        return ""

    def learn(self, step: Step, response: bytes) -> None: ...

    def failed(self, step: Step) -> None: ...


def made_plan(
    connection_count: int, request_count: int, seconds: float, in_flight: int
) -> ReplayPlan:
    """Requests at random times, evenly over connections and time, each answered at once."""
    rng = random.Random(SEED)
    answer = encode_message(Message(HEARTBEAT, HEARTBEAT_VERSION, "response", {}, {}))
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
            number, owner, len(script), HEARTBEAT, HEARTBEAT_VERSION, 0, "bench", frame, answer,
            at_ns, at_ns, at_ns, at_ns,
        )  # fmt: skip
        connections[owner].exchanges.append(exchange)
        after = (script[-in_flight],) if len(script) >= in_flight else ()
        steps.append(
            Step(number, owner, exchange, "Heartbeat", "groups", at_ns, True, depends_on=after)
        )
        script.append(number)
    workload = Workload("made", "capture", connections, WorkloadFacts())
    return ReplayPlan(workload, PlanOptions(), steps, scripts)


@contextmanager
def null_server(*options: str) -> Iterator[int]:
    """A process of its own; its port."""
    command = [sys.executable, "-m", "bench.null_server", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def answering_server(workload: Workload) -> Iterator[int]:
    """The same, with a workload's answers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers"
        path.write_bytes(pickle.dumps(Answers(workload)))
        with null_server("--answers", str(path)) as port:
            yield port


async def play(plan: ReplayPlan, port: int, pace: str) -> RunResult:
    """The loop alone."""
    target = Target("127.0.0.1", port)
    await target.probe()
    options = RunOptions(parse_pace(pace))
    return await Runner(plan, CorrelationOnly(), None, target, options).run()  # type: ignore[arg-type]


def of_made(
    connections: int, requests: int, seconds: float, pipeline: int, pace: str, is_whole: bool
) -> dict[str, Any]:
    """Figures of made requests: the loop alone, or all of a replay."""
    clock = Clock()
    plan = made_plan(connections, requests, seconds, pipeline)
    with null_server() as port:
        clock = Clock()
        if is_whole:
            return _whole(plan, port, pace, clock)
        result = asyncio.run(play(plan, port, pace))
    clock.seconds["send"] = result.send_cpu_ns / 1e9
    return _figures(result, clock)


def of_source(source: str, pace: str) -> dict[str, Any]:
    """Figures of a whole replay."""
    clock = Clock()
    workload = load_workload(source)
    clock.lap("load")
    options = PlanOptions(frozenset(WRITING_CLASSES), wait_for_data=pace != "recorded")
    plan = make_plan(workload, options)
    clock.lap("plan")
    with answering_server(workload) as port:
        clock.lap("")  # the server's answers
        return _whole(plan, port, pace, clock)


def _whole(plan: ReplayPlan, port: int, pace: str, clock: Clock) -> dict[str, Any]:
    parts = SessionOptions(run=RunOptions(parse_pace(pace)))
    results = asyncio.run(replay(plan, Target("127.0.0.1", port), parts))
    clock.lap("replay")
    results.by_api()
    results.groups()
    clock.lap("results")
    seconds = clock.seconds
    seconds.pop("", None)
    seconds["send"] = results.run.send_cpu_ns / 1e9
    seconds["judge"] = results.run.judge_cpu_ns / 1e9
    seconds["prepare"] = seconds.pop("replay") - seconds["send"] - seconds["judge"]
    figures = _figures(results.run, clock)
    found = Counter(judgement_of(each).verdict.value for each in results.outcomes)
    return {**figures, "verdicts": dict(found)}


def _figures(result: RunResult, clock: Clock) -> dict[str, Any]:
    sent = [each for each in result.outcomes if each.sent is not None]
    lag = Span.of(each.lag_ns for each in sent)
    own = Span.of(ns for ns in result.own_lag_ns if ns >= 0)
    count = max(len(sent), 1)
    return {
        "sent": len(sent),
        "answered": sum(each.answer is not None for each in sent),
        "ended": result.ended,
        "elapsed_s": round(result.elapsed_ns / 1e9, 3),
        "requests_per_s": round(len(sent) / (result.elapsed_ns / 1e9)),
        "judged_per_s": round(len(sent) / ((result.elapsed_ns + result.judge_cpu_ns) / 1e9)),
        "cpu_us_per_request": {
            name: round(seconds * 1e6 / count, 1) for name, seconds in clock.seconds.items()
        },
        "lag_ms": [round((ns or 0) / 1e6, 3) for ns in (lag.p50, lag.p99, lag.max)],
        "own_lag_ms": [round((ns or 0) / 1e6, 3) for ns in (own.p50, own.p99, own.max)],
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--pace", default="max")
    parser.add_argument("--source")
    parser.add_argument("--loop", action="store_true", help="sending and receiving alone")
    given = parser.parse_args()
    if given.source:
        print(json.dumps(of_source(given.source, given.pace)))
    else:
        made = (given.connections, given.requests, given.seconds, given.pipeline, given.pace)
        print(json.dumps(of_made(*made, not given.loop)))


if __name__ == "__main__":
    main()
