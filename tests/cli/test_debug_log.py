"""`--debug`: a log on stderr that a person can attach to a defect report."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import typer

from kdissect import __version__
from kdissect.cli import app, debug_log
from kdissect.step_log import logged_step
from tests.processes import Run

CAPTURE = "captures/sarama.pcap.gz"


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Takes the handler of `--debug` away again: it writes to the stderr of one test."""
    package = logging.getLogger("kdissect")
    before = logging.root.handlers[:], logging.root.level, package.level
    yield
    logging.root.handlers[:], level, package_level = before
    logging.root.setLevel(level)
    package.setLevel(package_level)
    logging.captureWarnings(False)


def test_every_verb_has_the_option() -> None:
    """Each command has `--debug`, with the same help."""
    group: Any = typer.main.get_command(app)
    helps = {
        name: [option.help for option in command.params if "--debug" in option.opts]
        for name, command in group.commands.items()
    }
    assert len(helps) > 10
    assert {tuple(texts) for texts in helps.values()} == {
        ("Log versions, options, steps and errors to stderr, without secrets.",)
    }


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        (["show", CAPTURE, "--api", "Metadata"], "kdissect.step_log: read captures took"),
        (["sql", CAPTURE, "select count(*) from exchanges"], "kdissect.step_log: query took"),
        (["replay", CAPTURE, "--dry-run"], "kdissect.step_log: load workload took"),
        (["definitions", "Fetch"], "definitions api: 'Fetch'"),
    ],
)
def test_stdout_and_exit_code_stay(kdissect: Run, arguments: list[str], step: str) -> None:
    """The log goes to stderr only, and names versions and steps."""
    plain, logged = kdissect(*arguments), kdissect(*arguments, "--debug")
    assert (logged.returncode, logged.stdout) == (plain.returncode, plain.stdout)
    assert plain.returncode == 0
    assert f"kdissect {__version__}, Python" in logged.stderr
    assert f"pyarrow {pyarrow.__version__}" in logged.stderr
    assert step in logged.stderr
    assert " debug " not in plain.stderr


def test_a_mistake_has_its_traceback(kdissect: Run) -> None:
    """The line for the user and exit code 2 stay; the log adds the traceback."""
    done = kdissect("show", "missing.pcap", "--debug")
    assert done.returncode == 2
    assert "\nkdissect: missing.pcap: no such file or directory\n" in done.stderr
    assert "kdissect.errors.CaptureError: missing.pcap" in done.stderr


def test_secrets_stay_out(kdissect: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Passwords, users, settings of unknown form and credentials in URLs are hidden."""
    secret = "hunter2-secret"
    monkeypatch.setenv("KDISSECT_SASL_PASSWORD", secret)
    monkeypatch.setenv("KDISSECT_TLS_KEY_PASSWORD", secret)
    monkeypatch.setenv("KDISSECT_SASL_TOKEN", "12345")
    replay = kdissect(
        "replay", CAPTURE, "--dry-run", "--sasl", "PLAIN", "--sasl-user", secret,
        "--debug",
    )  # fmt: skip
    assert replay.returncode == 0
    assert "--sasl-user: [hidden]" in replay.stderr
    assert "KDISSECT_TLS_KEY_PASSWORD=[hidden]" in replay.stderr
    assert "KDISSECT_SASL_TOKEN=[hidden]" in replay.stderr
    settings = ["spark.driver.memory=4g", "spark.x.password=77", f"spark.driver.options={secret}"]
    dissect = kdissect(
        "dissect", "missing.pcap", "--out", str(tmp_path / "out"), "--debug",
        *(text for setting in settings for text in ("--conf", setting)),
    )  # fmt: skip
    assert dissect.returncode == 2
    assert "spark.driver.memory=4g spark.x.password=[hidden] spark.driver.options=[hidden]" in (
        dissect.stderr
    )
    assert secret not in replay.stderr + dissect.stderr
    url = f"s3://key:{secret}@bucket/x?signature={secret}"
    assert debug_log.without_credentials(url) == "s3://[hidden]@bucket/x?[hidden]"


def test_a_line_is_safe_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters of a message are escaped, as in every output."""
    debug_log.start(True)
    logging.getLogger("kdissect.x").warning("topic \x1b[31m")
    assert "warning kdissect.x: topic \\x1b[31m\n" in capsys.readouterr().err


def test_a_step_that_fails_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A step has its counts and how it ended."""
    with caplog.at_level(logging.DEBUG, "kdissect"):
        with logged_step("scan", splits=3) as counts:
            counts["packets"] = 1200
        with pytest.raises(ValueError), logged_step("decode"):
            raise ValueError
    scan, decode = caplog.messages
    assert scan.startswith("scan took ")
    assert scan.endswith(" s, splits 3, packets 1,200")
    assert decode.startswith("decode failed after ")
