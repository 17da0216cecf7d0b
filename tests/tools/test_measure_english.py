"""The measure of the English: which words and sentences of a text it counts."""

from pathlib import Path

import pytest

from tools.measure_english import docstring_sentences, report, sentences

PAGE = Path("page.md")


def test_code_headings_and_cells_are_not_sentences() -> None:
    """They count as fragments, or not at all: they would lower the mean length of sentences."""
    code = "```\ntold told\n```\n"
    text = f"# A heading\n\nOne `kdissect show` here. kdissect has two.\n\n{code}| a | b |\n"
    found = [(each.text, each.is_fragment) for each in sentences(PAGE, text)]
    assert found == [
        ("A heading", True),
        ("One Code here.", False),
        ("kdissect has two.", False),
        ("a", True),
        ("b", True),
    ]


def test_the_line_of_a_sentence_is_that_of_its_paragraph() -> None:
    """A sentence has the first line of its paragraph or list item."""
    text = "First line,\nsecond line.\n\n- item one.\n- item two.\n"
    assert [each.line for each in sentences(PAGE, text)] == [1, 4, 5]


def test_docstrings_of_modules_classes_and_functions(tmp_path: Path) -> None:
    """Lines that explain a name are items of their own."""
    module = tmp_path / "module.py"
    function = 'def f():\n    """Returns x.\n\n    a: first.\n    b, c: rest.\n    """\n'
    module.write_text(f'"""Module."""\n\n\n{function}')
    found = [each.text for each in docstring_sentences(module)]
    assert found == ["Module.", "Returns x.", "first.", "rest."]


def test_help_texts_are_measured(tmp_path: Path) -> None:
    """Texts of arguments named `help` count with the docstrings; other texts do not."""
    module = tmp_path / "module.py"
    module.write_text('option("--x", metavar="A file.", help="The file " "to read.")')
    assert [each.text for each in docstring_sentences(module)] == ["The file to read."]


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("The table has a row for each request.", True),
        ("The table tells the time.", False),
        ("This is what is left of the capture.", False),
        (f"{'word ' * 41}end.", False),
        (f"{'word ' * 24}end. " * 3, False),
    ],
    ids=["plain", "tell", "what-is", "long-sentence", "long-mean"],
)
def test_a_text_beyond_a_limit_fails(
    text: str, passes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that passes a limit fails, and the table has a line for its kind."""
    assert report("pages", list(sentences(PAGE, text)), shows_offenders=True) == (not passes)
    assert "pages" in capsys.readouterr().out
