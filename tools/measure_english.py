"""Measures the English of the pages and docstrings, and fails if it passes a limit.

    python -m tools.measure_english [--offenders] [PATH ...]

Without a path it measures README.md and the other pages of the project's folder, `docs/` and the
docstrings of `kdissect/`, `tools/` and `bench/`. `make lint` runs it. Limits for each kind of file:

- "tell", "tells" and "told": at most 0.3 in 1,000 words
- clauses "what is ..." (was, are, were): at most 0.5 in 1,000 words
- mean length of a sentence: at most 18 words
- longest sentence: at most 40 words

Code is not prose: the script leaves out fenced and indented blocks, and counts an inline code span
or a link as the words that a reader sees (a span as one word). A sentence ends at a full stop, a
question mark or the end of its paragraph, list item or table cell. Headings, list items and cells
without a full stop are mostly names, so they count for the rates and for the longest sentence but
not for the mean: short fragments would hide long sentences.

Pages in `reports/` hold output of programs and are not measured. `docs/cli.md`, `docs/python.md`
and `docs/replay-rules.md` are made from help texts, docstrings and the rules of the comparison. The
script measures these at their source: docstrings and help texts (`help="..."`) in modules, `why`
and `text` in TOML files.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
KINDS = {".md": "pages", ".py": "docstrings", ".toml": "rules"}
FOLDERS = ("docs", "kdissect", "tools", "bench")
GENERATED = {"cli.md", "python.md", "replay-rules.md"}

TELL_PER_1000_MAX = 0.3
WHAT_IS_PER_1000_MAX = 0.5
SENTENCE_WORDS_MEAN_MAX = 18.0
SENTENCE_WORDS_MAX = 40

_TELL = re.compile(r"\b(?:tell|tells|told)\b", re.IGNORECASE)
_WHAT_IS = re.compile(r"\bwhat (?:is|was|are|were)\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z0-9][\w'’.,/-]*")
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=[\"'(*_`A-Z0-9]|kdissect\b)")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|etc)\.\s")
_FENCE = re.compile(r"^\s*```")
# An item of a list; in docstrings also a line that explains a name: `buf, pos: where to read`.
_ITEM = re.compile(r"^\s*(?:[-*+]\s+|\d+\.\s+|[a-z_]\w*(?:, [a-z_]\w*)*: )")


@dataclass(frozen=True)
class Sentence:
    """A sentence of a page or docstring, or a fragment: a heading, a cell, a list item of names."""

    path: Path
    line: int
    text: str
    is_fragment: bool

    @property
    def word_count(self) -> int:
        return len(_WORD.findall(self.text))


@dataclass(frozen=True)
class Block:
    """Text that a sentence cannot leave: a paragraph, a heading, a list item, a table cell."""

    line: int
    text: str
    is_name: bool


def markdown_blocks(text: str, first_line: int = 1) -> Iterator[Block]:
    """Blocks of prose of a Markdown text; `first_line` is the number of its first line."""
    lines: list[str] = []
    start = first_line
    in_code = False

    def paragraph() -> Iterator[Block]:
        if lines:
            yield Block(start, " ".join(lines), False)
            lines.clear()

    for number, line in enumerate(text.splitlines(), first_line):
        if _FENCE.match(line):
            yield from paragraph()
            in_code = not in_code
            continue
        if in_code or (not lines and line.startswith("    ") and not _ITEM.match(line)):
            continue
        stripped = line.strip()
        if not stripped or stripped.startswith(("#", "|")):
            yield from paragraph()
            if stripped.startswith("#"):
                yield Block(number, stripped.lstrip("# "), True)
            elif stripped.startswith("|") and not re.fullmatch(r"[|:\s-]+", stripped):
                for cell in re.split(r"(?<!\\)\|", stripped.strip("|")):
                    yield Block(number, cell.strip(), True)
            continue
        if _ITEM.match(line):
            yield from paragraph()
        if not lines:
            start = number
        lines.append(_ITEM.sub("", line).strip())
    yield from paragraph()


def seen_text(text: str) -> str:
    """The words that a reader sees: links without addresses, a code span as one word."""
    text = re.sub(r"<!--.*?-->", "", text)
    text = re.sub(r"``[^`]+``|`[^`]*`", "Code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return _ABBREVIATION.sub(" ", text)


def sentences(path: Path, text: str, first_line: int = 1) -> Iterator[Sentence]:
    """Sentences and fragments of a Markdown text or a docstring."""
    for block in markdown_blocks(text, first_line):
        for part in _SENTENCE_END.split(seen_text(block.text)):
            is_fragment = block.is_name or not re.search(r"[.!?:][)\"'*_]*$", part.strip())
            if _WORD.search(part):
                yield Sentence(path, block.line, part.strip(), is_fragment)


def page_sentences(path: Path) -> Iterator[Sentence]:
    """Sentences of a Markdown page."""
    return sentences(path, path.read_text("utf-8"))


def docstring_sentences(path: Path) -> Iterator[Sentence]:
    """Sentences of a module's docstrings, and of its help texts: arguments `help="..."`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "help":
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield from sentences(path, node.value.value, node.value.lineno)
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(node, clean=False):
            head, _, rest = text.partition("\n")
            first_line = node.body[0].lineno
            yield from sentences(path, f"{head.strip()}\n{textwrap.dedent(rest)}", first_line)


def rule_sentences(path: Path) -> Iterator[Sentence]:
    """Sentences of the explanations in a TOML file of rules."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if text := re.match(r'(?:why|text) = "(.*)"', line):
            yield from sentences(path, text[1], number)


def measured_files(paths: list[Path]) -> Iterator[Path]:
    """Pages, modules and rules that the arguments name; folders are searched."""
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.suffix in KINDS and file.name not in GENERATED:
                    yield file
        else:
            yield path


def report(kind: str, measured: list[Sentence], shows_offenders: bool) -> bool:
    """Prints the figures of one kind of file; True if a limit is passed."""
    word_count = max(sum(each.word_count for each in measured), 1)
    full = [each.word_count for each in measured if not each.is_fragment]
    telling = [each for each in measured if _TELL.search(each.text)]
    what_is = [each for each in measured if _WHAT_IS.search(each.text)]
    long = [each for each in measured if each.word_count > SENTENCE_WORDS_MAX]
    tell_rate = 1000 * sum(len(_TELL.findall(each.text)) for each in telling) / word_count
    what_is_rate = 1000 * sum(len(_WHAT_IS.findall(each.text)) for each in what_is) / word_count
    mean = sum(full) / max(len(full), 1)
    passed = [
        tell_rate > TELL_PER_1000_MAX,
        what_is_rate > WHAT_IS_PER_1000_MAX,
        mean > SENTENCE_WORDS_MEAN_MAX,
        bool(long),
    ]
    print(
        f"{kind:<12}{word_count:>8,}{len(full):>11,}{tell_rate:>8.2f}{what_is_rate:>10.2f}"
        f"{mean:>7.1f}{max((each.word_count for each in measured), default=0):>9}{len(long):>10}"
    )
    if shows_offenders:
        for exceeds, label, offenders in zip(
            passed,
            ("tell", "what is", "", f"over {SENTENCE_WORDS_MAX} words"),
            (telling, what_is, [], long),
            strict=True,
        ):
            for each in offenders if exceeds else ():
                shown = os.path.relpath(each.path)
                print(f"  {shown}:{each.line}: {label}: {each.text[:160]}")
    return any(passed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--offenders", action="store_true", help="list sentences that pass a limit")
    arguments = parser.parse_args()
    default = [*sorted(ROOT.glob("*.md")), *(ROOT / name for name in FOLDERS)]
    readers = {".md": page_sentences, ".py": docstring_sentences, ".toml": rule_sentences}
    kinds: dict[str, list[Sentence]] = {kind: [] for kind in KINDS.values()}
    for path in measured_files(arguments.paths or default):
        kinds[KINDS[path.suffix]] += readers[path.suffix](path)
    print("kind           words  sentences    tell   what is   mean  longest  too long")
    failed = [report(kind, found, arguments.offenders) for kind, found in kinds.items() if found]
    raise SystemExit(any(failed))


if __name__ == "__main__":
    main()
