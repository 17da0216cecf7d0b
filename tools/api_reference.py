"""Writes `docs/cli.md` and `docs/python.md`: every verb with its options, every public name.

python -m tools.api_reference [--check]

The texts are the help texts of the command line and the docstrings of the package.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer

import kdissect
from kdissect.cli import app

DOCS = Path(__file__).parent.parent / "docs"

CLI_HEAD = """# Command line

Every verb with its arguments and options, as `kdissect VERB --help` prints them. Each verb has a
page with examples. This page is made by `python -m tools.api_reference`.
"""

PYTHON_HEAD = """# Python

The public names of the package `kdissect`, with their signatures and docstrings.
`kdissect.report.build`, `kdissect.diff.compare` and `kdissect.readiness.assess` are on the pages of
their verbs. This page is made by `python -m tools.api_reference`.
"""

# Headings of a docstring's sections, in Google's style.
_SECTION = re.compile(r"(Args|Returns|Raises|Yields):$")
# A line that explains parameters or attributes: `name: meaning`.
_ITEM = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.+)")


def command_line_page() -> str:
    """The page of the command line."""
    parts = [CLI_HEAD]
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        parts += [f"## {name}\n", f"{_one_line(command.help)} ([page]({name}.md))\n"]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        options = [each for each in command.params if each.param_type_name == "option"]
        usage = " ".join(["kdissect", name, "[OPTIONS]", *(each.metavar for each in arguments)])
        parts += [f"```\n{usage}\n```\n", "| | meaning | default |\n|---|---|---|"]
        rows = [(each.metavar, each.help, "") for each in arguments]
        rows += [(_spelling(each), each.help, _default(each)) for each in options]
        for row in rows:
            spelling, meaning, default = (_one_line(cell).replace("|", r"\|") for cell in row)
            parts.append(f"| `{spelling}` | {meaning} | {default} |")
        parts.append("")
        lines = str(getattr(command, "examples_text", "")).splitlines()
        if examples := [line.strip() for line in lines if "kdissect" in line]:
            parts += ["```", *examples, "```\n"]
    return "\n".join(parts).rstrip() + "\n"


def python_page() -> str:
    """The page of the package's public names."""
    parts = [PYTHON_HEAD]
    for name in kdissect.__all__:
        if name == "__version__":
            continue
        value = getattr(kdissect, name)
        parts += [f"## {name}\n", *_documentation(f"kdissect.{name}", value)]
        if inspect.isclass(value) and not issubclass(value, Exception):
            for member_name, member in _members(value):
                parts += [f"### {name}.{member_name}\n"]
                parts += _documentation(f"{name}.{member_name}", member)
    return "\n".join(parts).rstrip() + "\n"


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class that have a docstring, in their order."""
    for name, member in vars(kind).items():
        member = getattr(member, "__func__", member)
        is_shown = inspect.isfunction(member) or isinstance(member, property)
        if is_shown and not name.startswith("_") and member.__doc__:
            yield name, member


def _documentation(name: str, value: Any) -> Iterator[str]:
    """Signature and docstring of a function, method, property or class."""
    if inspect.isfunction(value):
        signature = str(inspect.signature(value)).replace("'", "")
        yield f"```python\n{name}{signature}\n```\n"
    elif isinstance(value, property):
        yield f"```python\n{name}  # property\n```\n"
    yield _with_lists(inspect.getdoc(value) or "") + "\n"


def _with_lists(docstring: str) -> str:
    """A docstring with its `name: meaning` lines as a Markdown list."""
    lines: list[str] = []
    for line in docstring.splitlines():
        if item := _ITEM.match(line.strip()):
            if lines and lines[-1] and not lines[-1].startswith("- "):
                lines.append("")
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif _SECTION.match(line):
            lines += [f"**{line[:-1]}**", ""]
        else:
            lines.append(line.strip())
    return "\n".join(lines)


def _spelling(option: Any) -> str:
    """All names of an option with its value: `--payload full/keys/hash/none`."""
    names = ", ".join([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return names
    kind = option.type_descriptor.annotation
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return f"{names} {'/'.join(str(each.value) for each in kind)}"
    return f"{names} {option.metavar or 'VALUE'}"


def _default(option: Any) -> str:
    if option.required:
        return "required"
    default = option.default.value if isinstance(option.default, Enum) else option.default
    return f"`{default}`" if default and isinstance(default, str | int | float) else ""


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def main() -> None:
    for name, text in (("cli.md", command_line_page()), ("python.md", python_page())):
        path = DOCS / name
        if "--check" not in sys.argv[1:]:
            path.write_text(text, "utf-8")
        elif not path.exists() or path.read_text("utf-8") != text:
            raise SystemExit(f"docs/{name} is out of date: run python -m tools.api_reference")


if __name__ == "__main__":
    main()
