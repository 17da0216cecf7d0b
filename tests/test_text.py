"""Numbers and names as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.text import byte_size, duration, share, unread, visible


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "–"),
        (0, "0 ms"),
        (0.0421, "0.042 ms"),
        (0.421, "0.42 ms"),
        (12.34, "12.3 ms"),
        (999.4, "999 ms"),
        (1234, "1.23 s"),
        (119_000, "119 s"),
        (125_000, "2 min 5 s"),
        (7_500_000, "2 h 5 min"),
        (200_000_000, "2 d 7 h"),
    ],
)
def test_durations(ms: float | None, text: str) -> None:
    """Units from milliseconds to days."""
    assert duration(ms) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (12_345_678, "12.3 MB"), (3e12, "3.00 TB")],
)
def test_bytes(value: float, text: str) -> None:
    """Units from bytes to terabytes."""
    assert byte_size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (0.1234, "12.3 %"),
        (1e-6, "below 0.01 %"),
        (0.99999, "above 99.9 %"),
    ],
)
def test_shares(value: float, text: str) -> None:
    """Percentages: a small one is not shown as 0, nor a large one as 100."""
    assert share(value) == text


@given(st.text())
def test_shown_text_hides_nothing(text: str) -> None:
    """Each unprintable character is escaped; others stay."""
    shown = visible(text)
    assert all(character.isprintable() for character in shown)
    if text.isprintable():
        assert shown == text


def test_long_text_says_that_it_is_cut() -> None:
    """The full length follows the cut."""
    assert visible("x" * 32_767, 10) == "xxxxxxxxxx… (32,767 characters)"


def test_unread_connections_are_counted() -> None:
    """TLS and other protocols, and nothing where all was Kafka."""
    assert unread({"kafka": 5, "none": 2}) is None
    line = unread({"kafka": 5, "tls": 30, "http": 1, "other": 1_200})
    assert line is not None
    assert line.startswith("not read: 30 TLS connections not decrypted: any Kafka requests")
    assert line.endswith("1,201 connections without known Kafka traffic (1 http, 1,200 other)")
