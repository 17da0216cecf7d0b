"""Control runs: their order, their separate names, and the differences that they excuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kdissect.cli import app
from kdissect.replay.model import OptionError, PlanOptions, ReplayPlan
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.running.control_runs import plan_runs
from kdissect.replay.running.session import SessionOptions
from kdissect.replay.target.cluster import Target
from kdissect.replay.workload.source import load_workload
from tests.conftest import CAPTURES
from tests.replay.made import METADATA, FakeBroker, PlanMaker, answering

SOURCE = CAPTURES / "librdkafka.pcap"
TARGET, REFERENCE = Target("127.0.0.1", 1), Target("127.0.0.1", 2)
EVERYTHING = frozenset({"produce", "groups", "transactions", "admin"})


def plan_of_capture() -> ReplayPlan:
    return make_plan(load_workload([str(SOURCE)]), PlanOptions(allow=EVERYTHING))


@pytest.mark.parametrize(
    ("count", "expected"), [(2, "A B A"), (3, "A A B A"), (4, "A A B A A"), (0, "B")]
)
def test_the_run_is_between_its_control_runs(count: int, expected: str) -> None:
    """Half of the control runs come before the run that counts."""
    options = SessionOptions(control_runs=count, reset="true")
    planned = plan_runs(PlanMaker().plan(), TARGET, None, options)
    assert " ".join("A" if each.is_control else "B" for each in planned) == expected
    assert {each.target for each in planned} == {TARGET}
    assert len({each.name for each in planned}) == len(planned)


def test_control_runs_go_to_the_reference() -> None:
    """With --against the control runs have that target."""
    planned = plan_runs(PlanMaker().plan(), TARGET, REFERENCE, SessionOptions(control_runs=2))
    assert [each.target for each in planned] == [REFERENCE, TARGET, REFERENCE]


def test_each_run_writes_to_names_of_its_own() -> None:
    """Topics, groups and transactional ids have a suffix for each run, after other renames."""
    plan = plan_of_capture()
    renames = {("topic", "orders"): "sales"}
    options = SessionOptions(renames=renames, control_runs=2, makes_topics=True)
    planned = plan_runs(plan, TARGET, None, options)
    names = [run.options.renames for run in planned]
    assert {kind for kind, _ in names[0]} >= {"topic", "group"}
    for run, renamed in zip(planned, names, strict=True):
        assert all(new.endswith(run.suffix) for (_, old), new in renamed.items() if old != "orders")
    every = [new for renamed in names for new in renamed.values() if new != "sales"]
    assert len(every) == len(set(every))


def test_runs_that_cannot_be_kept_apart_are_refused() -> None:
    """Nothing creates the topics that the plan writes to: the text names both ways out."""
    plan = make_plan(load_workload([str(SOURCE)]), PlanOptions(allow=frozenset({"produce"})))
    with pytest.raises(OptionError, match="--create-topics, or --reset"):
        plan_runs(plan, TARGET, None, SessionOptions(control_runs=2))
    assert plan_runs(plan, TARGET, None, SessionOptions(control_runs=2, makes_topics=True))


def play(server: FakeBroker, lines: Path, *options: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Metadata requests of the capture to a fake broker that is its own reference."""
    address = f"127.0.0.1:{server.port}"
    done = CliRunner().invoke(
        app,
        ["replay", str(SOURCE), "--to", address, "--against", address, "--api", "Metadata",
         "--pace", "max", "--control-runs", "2", "--json", str(lines), *options],
    )  # fmt: skip
    return (
        done.exit_code,
        done.output,
        [json.loads(text) for text in lines.read_text().split("\n")[:-1]],
    )


class Changing:
    """Answers Metadata by the number of the run, which --reset appends to a file."""

    def __init__(self, log: Path, failing_run: int = 0) -> None:
        self.log, self.failing_run = log, failing_run
        self.reset = f"echo $KDISSECT_RUN >> {log}"

    def body_of(self, api_key: int, request: dict[str, Any]) -> dict[str, Any] | None:
        if api_key != METADATA or not request["topics"]:
            return None
        run = len(self.log.read_text().splitlines())
        code = 3 if run == self.failing_run else 0
        told = {"error_code": code, "is_internal": run == 1, "partitions": []}
        return {"topics": [{"name": each["name"], **told} for each in request["topics"]]}


def test_differences_between_control_runs_are_no_findings(tmp_path: Path) -> None:
    """is_internal is true in one control run only: the run is not blamed, and the notes say so."""
    answer = Changing(tmp_path / "resets")
    with FakeBroker(answering(answer.body_of)).running() as server:
        code, output, rows = play(server, tmp_path / "r.jsonl", "--reset", answer.reset)
    assert code == 0, output
    assert answer.log.read_text().splitlines() == [
        "control run 1 of 2", "the run", "control run 2 of 2",
    ]  # fmt: skip
    assert any(
        "control runs differ from each other in Metadata" in each for each in rows[0]["notes"]
    )
    assert rows[0]["compared_with"] == "the answers of another target"


def test_an_error_of_the_run_alone_is_a_finding(tmp_path: Path) -> None:
    """Only the run between the control runs answers UNKNOWN_TOPIC_OR_PARTITION."""
    answer = Changing(tmp_path / "resets", failing_run=2)
    with FakeBroker(answering(answer.body_of)).running() as server:
        code, output, rows = play(server, tmp_path / "r.jsonl", "--reset", answer.reset)
    assert code == 1, output
    found = {each["path"] for row in rows[1:-1] for each in row["differences"] if not each["rule"]}
    assert any(path.endswith("error_code") for path in found)


def test_a_reset_that_fails_ends_the_replay(tmp_path: Path) -> None:
    """Exit code 3, and one line has the command's last words."""
    with FakeBroker().running() as server:
        code, output, rows = play(
            server, tmp_path / "r.jsonl", "--quiet", "--reset", "echo no snapshot >&2; exit 7"
        )
    assert code == 3
    assert "--reset ended with exit code 7 before control run 1 of 2: no snapshot" in output
    assert len(output.splitlines()) == 1
    assert rows[-1]["exit_code"] == 3
