"""Outputs of a finished replay: their contents, with hostile text escaped."""

import json
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

import pytest
from rich.console import Console

from kdissect.errors import CaptureError
from kdissect.replay import model
from kdissect.replay.comparison.kinds import RULE, kinds_of
from kdissect.replay.comparison.normal_form import Keyed, compare
from kdissect.replay.output import console
from kdissect.replay.output.baseline import read_baseline
from kdissect.replay.output.console import print_plan, print_results, wide_console
from kdissect.replay.output.files import write_html, write_junit
from kdissect.replay.output.rows import Results, parse_fail_on, summary_row, write_json_lines
from kdissect.replay.output.text import dropped_notes, release_lines, texts_of
from kdissect.replay.planning.plan import Pace
from kdissect.replay.running.runner import RunResult
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import LinkRecord
from tests.replay.made import MS, PlanMaker

HOSTILE = "<script>alert(1)</script>]]>&\"'\x1b[31m\x00\ud800[bold]"
FAILED = model.Difference("topics[].error_code", ("orders",), HOSTILE, "3", note=HOSTILE)
ALLOWED = model.Difference("throttle_time_ms", (), 0, 5, rule="throttle")


def made(fail_on: str = "different,error", ended: str = "") -> Results:
    """One outcome of each verdict."""
    maker = PlanMaker()
    for number in range(5):
        maker.add(0, number)
    plan = maker.plan()
    plan.workload.source = HOSTILE
    for step in plan.steps:
        step.exchange.client_id = HOSTILE
    judgements = [
        model.Judgement(model.Verdict.SAME),
        model.Judgement(model.Verdict.TOLERATED, [ALLOWED]),
        model.Judgement(model.Verdict.DIFFERENT, [FAILED, ALLOWED]),
        model.Judgement(model.Verdict.ERROR, reason=HOSTILE),
        model.Judgement(model.Verdict.SKIPPED, reason="not allowed"),
    ]
    outcomes = []
    for step, judgement in zip(plan.steps, judgements, strict=True):
        outcome = model.Outcome(step, judgement=judgement)
        if judgement.verdict is model.Verdict.SKIPPED:
            outcome.skipped = model.Skipped(model.SkipCode.NOT_ALLOWED, "not allowed")
        else:
            outcome.sent, outcome.sent_ns, outcome.api_version = b"1234567890", MS, 4
        if judgement.verdict in (
            model.Verdict.SAME,
            model.Verdict.TOLERATED,
            model.Verdict.DIFFERENT,
        ):
            outcome.answer, outcome.answered_ns = b"1234", 3 * MS
        outcomes.append(outcome)
    link = LinkRecord(("127.0.0.1", 1), ("127.0.0.1", 2), 0)
    start_ns = 1_700_000_000 * 10**9
    run = RunResult(outcomes, [link], start_ns, elapsed_ns=10 * MS, ended=ended)
    results = Results(plan, run, Target("h", 1), Pace(), parse_fail_on([fail_on]))
    results.kinds = kinds_of(outcomes)
    return results


class Written(NamedTuple):
    """All outputs of a replay. rows: of the JSON lines."""

    console: str
    html: str
    suites: Element
    rows: list[dict[str, Any]]


def written(results: Results, folder: Path) -> Written:
    out = StringIO()
    print_results(results, Console(file=out, width=200))
    write_html(results, folder / "r.html")
    write_junit(results, folder / "r.xml")
    write_json_lines(results, folder / "r.jsonl")
    suites = ElementTree.parse(folder / "r.xml").getroot()
    lines = (folder / "r.jsonl").read_text().splitlines()
    return Written(
        out.getvalue(), (folder / "r.html").read_text(), suites, list(map(json.loads, lines))
    )


def test_junit_has_a_suite_for_each_api(tmp_path: Path) -> None:
    """A suite for the run and one per API; hostile text is escaped, what XML cannot hold is not
    there."""
    root = written(made(), tmp_path).suites
    counts = {"tests": "6", "failures": "1", "errors": "1", "skipped": "1"}
    assert root.attrib | {"time": ""} == {"name": "kdissect replay", "time": "", **counts}
    run, suite = root
    assert (run.get("name"), suite.get("name")) == ("replay", "Heartbeat")
    kinds = [[child.tag for child in case] for case in suite]
    assert kinds == [[], ["system-out"], ["failure"], ["error"], ["skipped"]]
    failure = suite[2][0]
    assert failure.get("message", "").startswith("topics[orders].error_code: captured <script>")
    assert "tolerated by throttle" in (failure.text or "")
    assert {case.get("classname") for case in suite} == {"kdissect.replay.Heartbeat"}


def test_junit_follows_fail_on(tmp_path: Path) -> None:
    """What does not fail the job does not fail its report; a run that ended early does."""
    root = written(made("none", ended="the target is gone"), tmp_path).suites
    assert (root.get("failures"), root.get("errors")) == ("0", "1")
    assert root[0][1][0].get("message") == "the target is gone"


def test_html_runs_and_loads_nothing(tmp_path: Path) -> None:
    """Nothing is run, nothing loaded, nothing of the capture is markup."""
    text = written(made(), tmp_path).html
    assert "<script" not in text
    assert "\x1b" not in text
    assert "&lt;script&gt;" in text
    assert "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text


def test_findings_name_what_follows_them(tmp_path: Path) -> None:
    """With the errors and the counts of the exchanges that follow."""
    results = made()
    results.kinds[0].followers = Counter({("Fetch", "OFFSET_OUT_OF_RANGE"): 54})
    then = "then 54 exchanges on the same topic, partition, group or transaction: 54 Fetch"
    outputs = written(results, tmp_path)
    assert f"{then} OFFSET_OUT_OF_RANGE" in outputs.html
    assert f"    {then} OFFSET_OUT_OF_RANGE" in outputs.console
    [kind] = outputs.rows[-1]["kinds"]
    follower = {"api_name": "Fetch", "what": "OFFSET_OUT_OF_RANGE", "exchanges": 54}
    assert kind["followers"] == [follower]


def test_secrets_are_hidden() -> None:
    """Of configs by their name and by the broker's word, of other fields by their own name."""
    for name, is_sensitive, hidden in (
        ("ssl.keystore.password", False, True),
        ("some.plugin", True, True),
        ("retention.ms", False, False),
    ):
        trees = [
            {"configs": Keyed({name: {"name": name, "value": value, "is_sensitive": is_sensitive}})}
            for value in ("sesame", "open")
        ]
        [found] = compare(*trees, lambda one, _: one)
        texts = ("[redacted]", "[redacted]") if hidden else ("sesame", "open")
        assert texts_of(found) == texts
    [found] = compare({"hmac": b"sesame"}, {"hmac": None}, lambda one, _: one)
    assert texts_of(found) == ("[redacted]", "null")
    config = {"name": "sasl.jaas.config", "value": "sesame"}
    one = model.Difference("results[].configs[]", ("b", "sasl.jaas.config"), config, model.ABSENT)
    assert texts_of(one) == ("{name=sasl.jaas.config, value=[redacted]}", "absent")


def test_json_lines_have_one_line_for_each_exchange(tmp_path: Path) -> None:
    """A line for the run, one per exchange, one with the counts; ids are strings."""
    rows = written(made(), tmp_path).rows
    assert [row["type"] for row in rows] == ["run", *["exchange"] * 5, "summary"]
    assert rows[0]["format_version"] == 1
    verdicts = ["same", "tolerated", "different", "error", "skipped"]
    assert [row["verdict"] for row in rows[1:-1]] == verdicts
    assert rows[1]["exchange_id"] == "1000"
    assert rows[1]["latency_us"] == 2000
    assert rows[3]["differences"][0]["path"] == "topics[orders].error_code"
    assert rows[5]["skipped"] == "not_allowed"
    assert rows[-1]["verdicts"]["different"] == 1
    assert rows[-1]["exit_code"] == 1


def test_names_of_a_capture_do_not_steer_the_terminal() -> None:
    """Control characters and markup of the capture do not reach the terminal."""
    console = Console(file=StringIO(), width=200, force_terminal=True)
    results = made()
    print_plan(results.plan, Pace(), console)
    print_results(results, console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "\x1b[31m<" not in text
    assert "alert(1)</script>]]>&\"'\\x1b[31m" in text
    assert "Heartbeat topics[orders].error_code: <script>" in text


def test_exit_code_follows_findings_and_the_end() -> None:
    """The exit code follows the findings, `--fail-on` and how the run ended."""
    assert made().exit_code == 1
    assert made("none").exit_code == 0
    assert made("skipped").exit_code == 1
    assert made("none", ended="gone").exit_code == 3
    interrupted = made(ended="interrupted")
    interrupted.run.is_interrupted = True
    assert interrupted.exit_code == 130
    with pytest.raises(model.OptionError, match="verdicts are"):
        parse_fail_on(["everything"])


def test_a_run_is_a_baseline(tmp_path: Path) -> None:
    """What an accepted run has is tolerated, in whichever exchange; a new value is not."""
    results = made()
    finding = model.Difference("end state", ("log t-0",), "5", "4")
    results.findings.append(finding)
    write_json_lines(results, tmp_path / "r.jsonl")
    baseline = read_baseline(str(tmp_path / "r.jsonl"))
    again = made()
    baseline.accept(again.outcomes)
    assert [outcome.judgement.verdict.value for outcome in again.outcomes] == [
        "same", "tolerated", "tolerated", "tolerated", "skipped",
    ]  # fmt: skip
    assert baseline.new([finding]) == []
    fresh = made()
    fresh.outcomes[0].judgement = model.Judgement(model.Verdict.DIFFERENT, [FAILED])
    fresh.outcomes[2].judgement = model.Judgement(
        model.Verdict.DIFFERENT, [replace(FAILED, answered="4")]
    )
    baseline.accept(fresh.outcomes)
    assert summary_row(fresh)["verdicts"]["different"] == 1
    assert baseline.new([replace(finding, answered="3")])
    fresh.outcomes[1].judgement = model.Judgement(  # as ALLOWED, where its rule does not hold
        model.Verdict.DIFFERENT, [replace(ALLOWED, rule="")]
    )
    baseline.accept(fresh.outcomes)
    assert fresh.outcomes[1].judgement.verdict is model.Verdict.DIFFERENT


RECORDS = "responses[].partitions[].records[]"


@pytest.mark.parametrize(
    ("place", "value", "other"),
    [
        (f"{RECORDS}.value", b"a" * 200, b"a" * 199 + b"b"),
        (
            f"{RECORDS}.headers",
            *([{"key": "k", "value": bytes(199) + end}] for end in (b"a", b"b")),
        ),
        ("members[].metadata", bytes(200), bytes(199) + b"b"),
        ("configs[].value", "a" * 300, "a" * 299 + "b"),
        ("topics[].isr_nodes", list(range(200)), [*range(199), 7]),
        ("resources[]", *({"acls": [{"principal": name}]} for name in ("User:a", "User:*"))),
    ],
)
def test_a_baseline_tells_long_values_apart(
    tmp_path: Path, place: str, value: Any, other: Any
) -> None:
    """Their texts are cut, but have a checksum of the whole value. Secrets have none."""
    one = model.Difference(place, (), None, value)
    texts = [texts_of(replace(one, answered=each))[1] for each in (value, other)]
    assert max(map(len, texts)) < 260
    results = made()
    results.outcomes[2].judgement = model.Judgement(model.Verdict.DIFFERENT, [one])
    write_json_lines(results, tmp_path / "r.jsonl")
    baseline = read_baseline(str(tmp_path / "r.jsonl"))
    for answered, verdict in ((value, model.Verdict.TOLERATED), (other, model.Verdict.DIFFERENT)):
        new = [replace(one, answered=answered)]
        results.outcomes[2].judgement = model.Judgement(model.Verdict.DIFFERENT, new)
        baseline.accept(results.outcomes)
        assert results.outcomes[2].judgement.verdict is verdict
    assert texts_of(replace(one, is_secret=True)) == ("null", "[redacted]")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"b\.jsonl"),
        ("{}", r"b\.jsonl"),
        ("[]", r"b\.jsonl"),
        ('{"type": "run", "format_version": 1}', r"b\.jsonl"),
        ('{"type": "run", "format_version": 2}', "kept by another kdissect"),
    ],
)
def test_files_that_are_no_baseline(tmp_path: Path, text: str, says: str) -> None:
    """CaptureError names the file, or the version."""
    path = tmp_path / "b.jsonl"
    path.write_text(text)
    with pytest.raises(CaptureError, match=says):
        read_baseline(str(path))
    with pytest.raises(CaptureError, match="missing"):
        read_baseline(str(tmp_path / "missing"))


def test_percentiles_of_latencies() -> None:
    """Of exchanges with a latency in both clusters."""
    results = made()
    for number, outcome in enumerate(results.outcomes[:3], 1):
        outcome.step.exchange.response_time_ns = outcome.step.exchange.request_end_time_ns + MS
        outcome.answered_ns = outcome.sent_ns + number * MS
    [api] = summary_row(results)["apis"]
    names = ("count", "p50_us", "p95_us", "p99_us", "max_us")
    assert tuple(api["latency"][name] for name in names) == (3, 2000, 3000, 3000, 3000)
    lag = summary_row(results)["own_lag"]
    assert tuple(lag[name] for name in names) == (0, None, None, None, None)


def test_dropped_fields_are_in_every_output(tmp_path: Path) -> None:
    """Also of an exchange that is the same otherwise."""
    results = made()
    for outcome, value in zip(results.outcomes, (True, True, 7), strict=False):
        outcome.api_version = 2
        field = model.Difference("groups[].require_stable", ("1",), value, model.ABSENT)
        outcome.dropped = [field]
    results.notes = dropped_notes(results.outcomes)
    note = (
        "Heartbeat v4 was sent as v2, which has no groups[].require_stable; "
        "left out: 2 x true, 1 x 7"
    )
    assert results.notes == [note]
    outputs = written(results, tmp_path)
    assert note in outputs.console
    assert note in outputs.html
    assert outputs.rows[0]["notes"] == [note]
    assert [row["dropped"] for row in outputs.rows[1:-1]] == [
        [{"path": "groups[1].require_stable", "value": text}] for text in ("true", "true", "7")
    ] + [[], []]
    cases = outputs.suites[1]
    told = ["v2 has no groups[1].require_stable" in "".join(case.itertext()) for case in cases]
    assert told == [True, True, True, False, False]


def test_findings_about_the_whole_run_are_in_every_output(tmp_path: Path) -> None:
    """A slower API fails the run only if --fail-on names latency; hostile names stay text."""
    finding = model.Difference("latency", (HOSTILE,), "1 ms", "501 ms", note="p = 0.0001")
    for fail_on, code in (("none", 0), ("latency", 1)):
        results = made(fail_on)
        results.findings.append(finding)
        assert results.exit_code == code
        outputs = written(results, tmp_path)
        suites = outputs.suites
        assert suites.get("failures") == str(code)
        assert len(suites.findall(".//failure")) == code
        assert int(suites.get("tests", 0)) == len(suites.findall(".//testcase"))
        [row] = outputs.rows[-1]["findings"]
        assert (row["found"], row["fails"]) == ("501 ms", bool(code))
        assert "<script>alert" not in outputs.html
        assert "1 ms -> 501 ms (p = 0.0001)" in outputs.console
        assert "\x1b[31m" not in outputs.console


def test_lines_are_not_cut_where_output_is_piped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal and without $COLUMNS a line is as long as its text; with it, it wraps."""
    monkeypatch.delenv("COLUMNS", raising=False)
    results = made()
    results.notes.append("word " * 100)
    print_results(results, wide_console())
    assert "word " * 99 in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    print_results(results, wide_console())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_a_run_without_output_prints_its_state(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line on stderr after each pause, with the text made safe; nothing with --quiet."""
    monkeypatch.setattr(console, "QUIET_S", 0.02)
    with console.progress(shown=True) as watch:
        watch("resetting \x1b[31m")
        said = ""
        while "\n" not in said:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert "kdissect: resetting \\x1b[31m" in said.splitlines()
    with console.progress(shown=False):
        time.sleep(0.1)
    assert not capsys.readouterr().err


def test_changes_of_a_release_are_told_apart(tmp_path: Path) -> None:
    """Once, in a section of their own, and they fail no run."""
    results = made("different")
    change = model.Difference(
        "results[].configs[].value", ("topic t", "message.timestamp.after.max.ms"), "1", "2",
        RULE, "another default (KIP-1030)",
    )  # fmt: skip
    for outcome in results.outcomes[:3]:
        outcome.judgement = model.Judgement(model.Verdict.TOLERATED, [change])
    results.kinds, results.releases = [], ("3.9", "4.3")
    assert results.exit_code == 0
    line = (
        "Heartbeat results[topic t].configs[message.timestamp.after.max.ms].value: 1 -> 2: "
        "another default (KIP-1030), 3 places"
    )
    outputs = written(results, tmp_path)
    assert "Changes of this release (Kafka 3.9 -> Kafka 4.3), by design:" in outputs.console
    assert f"{line}\n" in outputs.console
    error = outputs.console.index("error 1: <script>")
    assert error < outputs.console.index("Changes of this release")
    assert outputs.console[error:].splitlines()[0].endswith(" (Heartbeat)")
    assert outputs.html.index("<h2>Errors</h2>") < outputs.html.index("Changes of this release")
    assert "Changes of this release" in outputs.html
    assert outputs.suites.get("failures") == "0"
    cases = outputs.suites.findall(".//testcase")
    assert int(outputs.suites.get("tests", 0)) == len(cases)
    assert outputs.rows[-1]["release_changes"][0]["count"] == 3


def test_a_change_of_several_configs_names_all() -> None:
    """They are told once, and its path has the first one's name."""
    results = made()
    results.outcomes[2].judgement = model.Judgement(
        model.Verdict.TOLERATED,
        [
            model.Difference(
                "results[].configs[]", (broker, name), "x", model.ABSENT, RULE, "no ZooKeeper"
            )
            for broker, name in (("1", "zookeeper.connect"), ("2", "zookeeper.connect"),
                                 ("1", "zookeeper.set.acl"))
        ],
    )  # fmt: skip
    [line] = release_lines(summary_row(results)["release_changes"])
    assert line.endswith("no ZooKeeper, 3 places: zookeeper.connect, zookeeper.set.acl")
