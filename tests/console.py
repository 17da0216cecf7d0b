"""Commands with their output in documents: ```console blocks, run and compared, or written anew.

    python -m tests.console docs/sql.md    # writes the outputs into the page

Commands run where `captures/` is the project's and `tables/` is the table set of
`captures/librdkafka.pcap`; `tables-NAME/` that of another capture, `captures/NAME.*`.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "librdkafka"
TERMINAL = {"COLUMNS": "100", "TERM": "dumb"}

QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
JOIN = re.compile(r" (\||&&) ")
EXIT_CODE = '; echo "exit $?"'
SHELL = re.compile(r"[|<>;&*\\\n]")
COMPILES = re.compile(r"^kdissect compiles its kernels .*\n", re.MULTILINE)  # the first one to run

_BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)
_COMMAND = re.compile(r"^\$ ", re.MULTILINE)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a page with the output that the page shows."""
    for block in _BLOCK.findall(text):
        for part in _COMMAND.split(block)[1:]:
            lines = part.splitlines(keepends=True)
            count = 1
            while lines[count - 1].endswith("\\\n"):
                count += 1
            yield "".join(lines[:count]), "".join(lines[count:])


def prepare(folder: Path, text: str) -> None:
    """Create the files that a page's commands name."""
    (folder / "captures").symlink_to(ROOT / "captures")
    named = " ".join(command for command, _ in commands(text))
    for name in sorted(set(re.findall(r"\btables(?:-(\w+))?/", named))):
        dissected(name or DEFAULT).write(folder / (f"tables-{name}" if name else "tables"))


@cache
def dissected(name: str) -> Any:
    """The tables of a shipped capture, made once for all pages, with the path that pages use."""
    import kdissect

    with contextlib.chdir(ROOT):
        (capture,) = Path("captures").glob(f"{name}.pcap*")
        return kdissect.read(capture)


def run(command: str, folder: Path) -> str:
    """What a command prints, stdout and stderr in their order."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # `kdissect` is this one
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | TERMINAL | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=120,
        check=False,
    )
    return COMPILES.sub("", done.stdout)


def run_here(command: str, folder: Path) -> str:
    """The same in this process, which has loaded everything; the part after a pipe runs in a shell.

    A command that needs more of a shell than a pipe, a second command or its exit code, that fails
    by a defect, or that writes to stderr before a pipe, is run as `run` does.
    """
    line = command.strip()
    has_code = line.endswith(EXIT_CODE)
    first, *joined = JOIN.split(line.removesuffix(EXIT_CODE), maxsplit=1)
    join, rest = joined or ("", "")
    try:
        program, *arguments = shlex.split(first)
    except ValueError:  # the join was inside of quotes
        return run(command, folder)
    needs_shell = SHELL.search(QUOTED.sub("", first)) or "$" in first
    if program != "kdissect" or needs_shell or (join and has_code):
        return run(command, folder)
    from typer.testing import CliRunner

    from kdissect.cli import _exit_code, app
    from kdissect.errors import Error

    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, arguments, env=TERMINAL)
    code, errors = done.exit_code, io.StringIO()
    if isinstance(done.exception, Error):  # the program prints it after the command
        with contextlib.redirect_stderr(errors):
            code = _exit_code(done.exception)
    elif code > 1 or not isinstance(done.exception, SystemExit | None):
        return run(command, folder)
    output = COMPILES.sub("", done.output + errors.getvalue())
    if join == "|" and (done.stderr or errors.getvalue()):
        return run(command, folder)
    if not join:
        return output + (f"exit {code}\n" if has_code else "")
    if join == "&&":
        return output + ("" if code else run(rest, folder))
    return subprocess.run(
        ["bash", "-c", rest.replace("${PIPESTATUS[0]}", str(code))],
        cwd=folder,
        input=done.stdout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout


def rewritten(text: str, folder: Path) -> str:
    """The page with the outputs that its commands have now."""

    def block(found: re.Match[str]) -> str:
        inside = f"```console\n{found[0]}```"
        return "".join(f"$ {command}{run(command, folder)}" for command, _ in commands(inside))

    return _BLOCK.sub(block, text)


def main() -> None:
    for name in sys.argv[1:]:
        page = Path(name)
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder), page.read_text())
            page.write_text(rewritten(page.read_text(), Path(folder)))


if __name__ == "__main__":
    main()
