"""What is known about differences, by place and values: likely causes, and changes of releases.

`causes.toml` has words beside a difference, with the settings of the target that decide it. A cause
also says whether a difference may follow from an earlier one on the same topic, partition, group or
transaction (`findings`). `release_changes.toml` has what a Kafka release changes (`releases`).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kdissect.protocol.releases import release_number
from kdissect.replay.fields import path_pattern, told
from kdissect.replay.model import Difference


@dataclass(frozen=True, slots=True)
class Cause:
    """One entry of a table, which explains the fields. Sets that are empty fit anything."""

    paths: tuple[str, ...]
    text: str
    apis: frozenset[str]
    keys: frozenset[str]
    captured: frozenset[str]
    answered: frozenset[str]
    settings: tuple[str, ...] = ()
    follows: bool = False
    needs_releases: bool = False
    since: tuple[int, ...] = ()
    kip: str = ""

    def fits(self, api_name: str, one: Difference, *, is_downgrade: bool = False) -> bool:
        """is_downgrade: the target is of the older release, so the values change places."""
        values = one.captured, one.answered
        captured, answered = reversed(values) if is_downgrade else values
        return (
            (not self.apis or api_name in self.apis)
            and (not self.keys or not self.keys.isdisjoint(one.keys))
            and (not self.captured or told(captured) in self.captured)
            and (not self.answered or told(answered) in self.answered)
            and path_pattern(self.paths).fullmatch(one.place) is not None
        )


@cache
def causes() -> tuple[Cause, ...]:
    """The causes of `causes.toml`, in order."""
    return _table("causes.toml", "cause")


@cache
def changes() -> tuple[Cause, ...]:
    """The changes of `release_changes.toml`, in order."""
    return _table("release_changes.toml", "change")


def _table(name: str, rows: str) -> tuple[Cause, ...]:
    text = files(__package__).joinpath(name).read_text("utf-8")
    return tuple(map(_cause, tomllib.loads(text)[rows]))


def _cause(row: dict[str, Any]) -> Cause:
    path = row["path"]
    names = ("apis", "keys", "captured", "answered")
    values = {name: frozenset(map(told, row.get(name, ()))) for name in names}
    return Cause(
        (path,) if isinstance(path, str) else tuple(path),
        row["text"],
        settings=tuple(row.get("settings", ())),
        follows=row.get("follows", False),
        needs_releases=row.get("releases", False),
        since=release_number(row["since"]) if "since" in row else (),
        kip=row.get("kip", ""),
        **values,
    )
