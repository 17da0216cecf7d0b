"""The run's own traffic, written as a capture, dissects to the sent and received messages."""

from pathlib import Path

import kdissect
from kdissect.replay.model import Attempt
from kdissect.replay.output.files import write_capture
from kdissect.replay.running.runner import RunResult
from kdissect.replay.target.connection import LinkRecord
from tests.builders.messages import exchange
from tests.replay.made import HEARTBEAT, MS, PlanMaker


def test_the_runs_messages_are_dissected_from_its_capture(maker: PlanMaker, tmp_path: Path) -> None:
    """IPv4 and IPv6, one answer missing, one request sent twice, one longer than a packet."""
    for number in range(4):
        maker.add(number % 2, number)
    plan = maker.plan()
    links = [
        LinkRecord(("127.0.0.1", 40000), ("127.0.0.1", 9092), 0, 100 * MS),
        LinkRecord(("::1", 40000), ("::1", 9092), 0),
    ]
    sent, answer = exchange(90, HEARTBEAT, 4, {}, {})
    links[0].attempts.append(Attempt(sent, 5 * MS, answer, 6 * MS))
    for number in range(len(plan.steps)):
        name = "m" * (100_000 if number == 2 else 10)
        asked, answered = {"group_id": "g", "member_id": name}, {"error_code": number}
        sent, answer = exchange(number, HEARTBEAT, 4, asked, answered)
        attempt = Attempt(sent, (10 + number) * MS)
        if number != 3:
            attempt.answer = answer
            attempt.answered_ns = (20 + number) * MS
        links[number % 2].attempts.append(attempt)
    result = RunResult([], links, 1_700_000_000 * 10**9)
    path = tmp_path / "replay.pcapng"
    write_capture(result, path)
    tables = kdissect.read(path)
    rows = tables.exchanges.to_pandas().sort_values("request_time")
    assert list(rows.correlation_id) == [90, 0, 1, 2, 3]
    assert list(rows.api_name.unique()) == ["Heartbeat"]
    assert rows.response_time.notna().tolist() == [True, True, True, True, False]
    assert len(tables.connections.to_pandas()) == 2
    assert not len(tables.anomalies.to_pandas()), tables.anomalies.to_pandas().T
