"""The prompt of `kdissect sql`: queries over lines, errors, completion, history."""

import io
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kdissect
from kdissect.sql.prompt import FIRST, NEXT, Prompt, completions
from tests.conftest import ROOT

VIEWS = {"exchanges": ["exchange_id", "api_name"], "topics": ["topic", "topic_id"]}


def dialogue(tables: kdissect.Tables, *lines: str | type[BaseException]) -> tuple[list[str], str]:
    """The prompts that the dialogue printed, and its output."""
    asked: list[str] = []
    given = iter(lines)

    def read_line(prompt: str) -> str:
        asked.append(prompt)
        line = next(given, EOFError)
        if isinstance(line, str):
            return line
        raise line

    out = io.StringIO()
    with tables.database() as database:
        Prompt(database, read_line, out).run()
    return asked, out.getvalue()


def test_a_query_ends_with_a_semicolon(librdkafka: kdissect.Tables) -> None:
    """The prompt reads lines until a semicolon, then prints the result."""
    asked, said = dialogue(
        librdkafka, "select count(*) as n", "  from exchanges;", ".quit", "never"
    )
    assert asked == [FIRST, NEXT, FIRST]
    assert said.splitlines()[1:] == ["  n", "---", "319"]


def test_errors_and_interrupts_end_nothing(librdkafka: kdissect.Tables) -> None:
    """Wrong SQL, SQL that writes, Ctrl-C within a query: the next one is answered."""
    _, said = dialogue(
        librdkafka, "select nothing from exchanges;", "drop table exchanges;", "select 1",
        KeyboardInterrupt, "", "select 42 as answer;",
    )  # fmt: skip
    lines = said.splitlines()
    assert any("nothing" in line for line in lines)
    assert any("this is DROP" in line for line in lines)
    assert lines[-4:] == ["answer", "------", "    42", ""]


def test_only_the_first_rows(librdkafka: kdissect.Tables) -> None:
    """And a line that says so."""
    _, said = dialogue(librdkafka, "select * from range(100000);")
    assert len(said.splitlines()) == 1 + 2 + 100 + 1 + 1
    assert "... the first 100 rows" in said
    assert "... the first" not in dialogue(librdkafka, "select * from range(100);")[1]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("exch", ["exchange_id", "exchanges"]),
        ("TOP", ["topic", "topic_id", "topics"]),
        ("topics.", ["topics.topic", "topics.topic_id"]),
        ("exchanges.ap", ["exchanges.api_name"]),
        ("gro", ["group by all"]),
        ("zzz", []),
    ],
)
def test_tab_completes_keywords_views_and_columns(text: str, found: list[str]) -> None:
    """Keywords, views and their columns."""
    assert completions(text, VIEWS) == found


def test_on_a_terminal(captures: Path, tmp_path: Path) -> None:
    """Without a query it is a prompt; Tab completes, and the history is the user's alone."""
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "kdissect", "sql", str(captures / "librdkafka.pcap")]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment, cwd=ROOT
    ) as process:
        os.close(follower)
        shown = b""

        def until(text: bytes) -> None:
            nonlocal shown
            end = time.monotonic() + 120
            while text not in shown:
                assert time.monotonic() < end, shown
                if select.select([leader], [], [], 1)[0]:
                    shown += os.read(leader, 1 << 16)

        until(FIRST.encode())
        os.write(leader, b"select 300 + 19 as n from group_ev\t limit 1;\n")
        until(b"319")
        os.write(leader, b".quit\n")
        assert process.wait(120) == 0
    os.close(leader)
    history = tmp_path / "kdissect" / "sql_history"
    assert "from group_events limit 1;" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
