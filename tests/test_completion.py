"""Shell completion: a script for each shell, at its place, and its answers in bash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kdissect.cli import completion

INSTALLED = {
    "bash": ".bash_completions/kdissect.sh",
    "zsh": ".zfunc/_kdissect",
    "fish": ".config/fish/completions/kdissect.fish",
}
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("shell", "says"),
    [
        ("bash", "complete -o default -F _kdissect_completion kdissect"),
        ("zsh", "#compdef kdissect"),
        ("fish", "complete --command kdissect"),
    ],
)
def test_a_script(shell: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each shell gets its own, whatever shell this is."""
    assert completion.serve(["--show-completion", shell])
    script = capsys.readouterr().out
    assert says in script
    assert f"_KDISSECT_COMPLETE=complete_{shell}" in script


@pytest.mark.parametrize("shell", INSTALLED)
def test_an_installation(shell: str, tmp_path: Path) -> None:
    """It goes where the shell finds it, below the user's own folder."""
    done = subprocess.run(
        ["kdissect", "--install-completion", shell],
        env={**os.environ, "PATH": PATH, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (tmp_path / INSTALLED[shell]).exists(), done.stdout
    assert str(tmp_path / INSTALLED[shell]) in done.stdout


def test_an_unknown_shell() -> None:
    """One that has no completion is named in an error of usage."""
    with pytest.raises(typer.BadParameter, match="tcsh"):
        completion.serve(["--show-completion", "tcsh"])
    assert not completion.serve(["show", "x.pcap"])


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("kdissect de", ["definitions"]), ("kdissect dissect --payload h", ["hash"])],
)
def test_bash_completes(typed: str, offered: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The script works in bash: verbs, and values of options."""
    completion.serve(["--show-completion", "bash"])
    words = typed.split()
    asked = (
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _kdissect_completion kdissect; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{capsys.readouterr().out}\n{asked}"],
        env={**os.environ, "PATH": PATH},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == offered
