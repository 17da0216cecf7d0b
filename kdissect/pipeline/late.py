"""Which rows a topic's name or id told later would change: what the rows so far were told by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kdissect.pipeline.facts import Facts

_PARTS = {"late_ids": "ids", "late_names": "names", "late_users": "users"}


@dataclass(slots=True)
class Late:
    """ids: topic ids in messages whose name nothing told. names: topics of records that came by
    name, whose id is that of the name, if it has one. users: names that connections authenticated
    by SCRAM with, which may be those of delegation tokens."""

    ids: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    users: set[str] = field(default_factory=set)

    def add_users(self, connections: pa.Table) -> None:
        """Those of rows of `connections`."""
        is_scram = pc.fill_null(pc.starts_with(connections["sasl_mechanism"], "SCRAM"), False)
        told = connections["principal"].filter(is_scram).unique().to_pylist()
        self.users.update(user.removeprefix("User:") for user in told if user is not None)

    def merge(self, other: Late) -> None:
        self.ids |= other.ids
        self.names |= other.names
        self.users |= other.users

    def to_json(self) -> dict[str, Any]:
        return {name: sorted(getattr(self, part)) for name, part in _PARTS.items()}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Late:
        return Late(**{part: set(document.get(name, ())) for name, part in _PARTS.items()})

    def changed(self, before: Facts, after: Facts) -> str | None:
        """What rows written with the facts `before` would say otherwise with those `after`."""
        old, new = before.names_by_id(), after.names_by_id()
        if any(old.get(ident) != new.get(ident) for ident in self.ids):
            return "the names of topics that were known by id alone"
        if any(new.get(ident) != name for ident, name in old.items()):
            return "other names of known topics"
        old, new = before.ids_by_name(), after.ids_by_name()
        if any(old.get(name) != new.get(name) for name in self.names):
            return "the ids of topics that were known by name alone"
        if any(before.owners.get(user) != after.owners.get(user) for user in self.users):
            return "the owners of delegation tokens"
        return None
