"""The replay benchmark on a small capture, and its section of the page."""

from pathlib import Path

import pytest

from bench import replay_loop, report, suite
from tests.bench.test_measure import MACHINE

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("is_whole", [False, True], ids=["the loop alone", "all of a replay"])
@pytest.mark.parametrize("pace", ["max", "recorded"])
def test_a_replay_of_made_requests_has_no_difference(pace: str, is_whole: bool) -> None:
    """Every request is answered; a whole replay finds no difference."""
    found = replay_loop.of_made(20, 200, 0.3, 1, pace, is_whole)
    assert (found["sent"], found["answered"], found["ended"]) == (200, 200, "")
    assert found["requests_per_s"] >= found["judged_per_s"] > 0
    assert found.get("verdicts", {"same": 200}) == {"same": 200}
    assert found["cpu_us_per_request"]["send"] > 0


@pytest.mark.heavy
def test_a_captured_workload() -> None:
    """Against a server with its answers, in the terms of another cluster."""
    found = replay_loop.of_source(str(ROOT / "captures" / "librdkafka.pcap"), "max")
    assert found["ended"] == ""
    assert found["sent"] > 200
    assert set(found["cpu_us_per_request"]) == set(report.REPLAY_STEPS)
    assert found["verdicts"]["same"] + found["verdicts"]["tolerated"] > 200


def test_the_section_has_ratios_goals_and_costs() -> None:
    """The section has the ratios with their goals, and the cost of each step."""
    made = replay_loop.of_made(10, 50, 0.1, 1, "max", True)
    paced = {**made, "lag_ms": [0.5, 4.0, 9.0]}
    names = ("loop", "small", "pipelined", "captured", "paced")
    rows = {
        name: {"title": name, **suite._replayed([paced if name == "paced" else made])}
        for name in names
    }
    result = {"rows": rows, "rounds": 1, "command": "x", "machine": MACHINE}
    page = report.text({"replay": result})
    assert "| replay of 1000 connections: lag behind the schedule, p99, ms | 4.0 | at most" in page
    assert "| paced | 50 |" in page
    assert "0.5 / 4.0 / 9.0 | 50 same |" in page
    assert "| translation, sending, receiving, learning |" in page
