"""Schedules: recorded, faster, without long pauses, without waiting."""

import pytest

from kdissect.replay.model import OptionError, SkipCode, Skipped
from kdissect.replay.planning.plan import Pace, duration_ns, parse_pace, parse_span, schedule
from tests.replay.made import MS, PlanMaker


def steps_at(*at_ms: float) -> PlanMaker:
    maker = PlanMaker()
    for each in at_ms:
        maker.add(0, each)
    return maker


@pytest.mark.parametrize(
    ("pace", "max_gap", "expected"),
    [
        ("recorded", None, [0, 100, 1100, 1200]),
        ("x4", None, [0, 25, 275, 300]),
        ("x0.5", None, [0, 200, 2200, 2400]),
        ("recorded", "300ms", [0, 100, 400, 500]),
        ("x2", "300ms", [0, 50, 350, 400]),
        ("max", None, [0, 0, 0, 0]),
    ],
)
def test_when_steps_are_due(pace: str, max_gap: str | None, expected: list[int]) -> None:
    """Times at recorded pace, faster, and with cut pauses."""
    due = schedule(steps_at(0, 100, 1100, 1200).plan(), parse_pace(pace, max_gap))
    assert due == [each * MS for each in expected]


def test_pauses_of_steps_that_are_not_sent_do_not_count(maker: PlanMaker) -> None:
    """A skipped step does not cut a pause in two that --max-gap would have cut in one."""
    maker.add(0, 0)
    maker.add(0, 500, skipped=Skipped(SkipCode.INTERNAL, "brokers"))
    maker.add(0, 1000)
    due = schedule(maker.plan(), Pace(1.0, 0.6))
    assert due == [0, 0, 600 * MS]


def test_a_duration_ends_with_the_last_step() -> None:
    """From the first to the last step; unknown at full speed."""
    plan = steps_at(50, 100, 1100).plan()
    assert duration_ns(plan, Pace()) == 1050 * MS
    assert duration_ns(plan, parse_pace("max")) is None
    assert duration_ns(PlanMaker().plan(), Pace()) == 0


@pytest.mark.parametrize("text", ["", "x", "x0", "fast", "4x", "x-1", "x1e3", "xinf", "x9999999"])
def test_a_wrong_pace_is_refused(text: str) -> None:
    """Other text raises OptionError."""
    with pytest.raises(OptionError):
        parse_pace(text)


def test_spans_of_time_have_units() -> None:
    """Units from microseconds to hours; other text raises OptionError."""
    assert [parse_span(each) for each in ("250ms", "5s", "2m", "1.5", "1h", "10us")] == [
        0.25, 5, 120, 1.5, 3600, pytest.approx(1e-5),
    ]  # fmt: skip
    for text in ("", "5 x", "-1s", "s", "1e3s"):
        with pytest.raises(OptionError):
            parse_span(text)
