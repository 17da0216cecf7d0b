"""Shell completion for a named shell.

Typer's --show-completion and --install-completion serve the current shell and ignore a name after
them: `--show-completion zsh` in bash would print bash's script.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer

SHOW, INSTALL = "--show-completion", "--install-completion"
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
PROGRAM, VARIABLE = "kdissect", "_KDISSECT_COMPLETE"


def serve(arguments: Sequence[str]) -> bool:
    """Serve one of these options with a shell's name; returns whether the arguments are that.

    Raises BadParameter for a shell without completion.
    """
    if len(arguments) != 2 or arguments[0] not in (SHOW, INSTALL):
        return False
    option, shell = arguments
    if shell not in SHELLS:
        raise typer.BadParameter(f"{shell!r} is none of {', '.join(SHELLS)}", param_hint=option)
    from typer.completion import get_completion_script, install

    if option == SHOW:
        script = get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell)
        typer.echo(script)
    else:
        _, path = install(shell=shell, prog_name=PROGRAM, complete_var=VARIABLE)
        typer.echo(f"{shell} completion installed in {path}; a new terminal has it")
    return True
