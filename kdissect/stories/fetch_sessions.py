"""Rows of `fetch_sessions`: the range of epochs in which a session requests a partition (KIP-227).

An incremental Fetch lists only new, changed or forgotten partitions. It requests all partitions
whose rows have its session id and an epoch range that includes its epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from kdissect.stories.fetch_messages import Ask
from kdissect.tables.schemas import FETCH_SESSIONS, Row, table_of_rows

KNOWN, _UNKNOWN = "known", "unknown"
_PLACE = ("broker", "session_id", "topic", "partition")
_CHANGE = ("order", "epoch", "time_ns", "exchange_id", "client_id")


@dataclass(slots=True)
class _OpenSession:
    """An open session; stays: requested partitions -> their row."""

    state: str
    last_epoch: int
    last_ns: int
    stays: dict[tuple[str, int], Row]

    def end(self) -> None:
        """Set the end of all partitions that are still requested."""
        for row in self.stays.values():
            row["last_epoch"], row["last_time"] = self.last_epoch, self.last_ns
        self.stays.clear()


def fetch_sessions_table(events: pa.Table) -> pa.Table:
    """`fetch_sessions` from FETCH_EVENT in order of time."""
    rows: list[Row] = []
    sessions: dict[tuple[str, int], _OpenSession] = {}
    columns = (events[name].to_pylist() for name in (*_PLACE, *_CHANGE))
    for broker, session_id, topic, partition, *change in zip(*columns, strict=True):
        key, place = (broker, session_id), (topic, partition)
        ask, epoch, time_ns, exchange_id, client_id = change
        session = sessions.get(key)
        if ask == Ask.START or session is None:
            if session is not None:
                session.end()
            state = KNOWN if ask == Ask.START else _UNKNOWN
            session = sessions[key] = _OpenSession(state, epoch, time_ns, {})
        if ask == Ask.CLOSE:
            sessions.pop(key).end()
            continue
        if ask == Ask.FORGET:
            row = session.stays.pop(place, None)
            if row is not None:
                row["last_epoch"], row["last_time"] = epoch - 1, time_ns
                row["end_exchange_id"] = exchange_id
        if epoch >= session.last_epoch:
            session.last_epoch, session.last_ns = epoch, time_ns
        if ask == Ask.ADD and place not in session.stays:
            ip, _, port = broker.rpartition(" ")
            row = {
                "broker_ip": ip,
                "broker_port": int(port),
                "session_id": session_id,
                "client_id": client_id,
                "state": session.state,
                "topic": topic,
                "partition": partition,
                "first_epoch": epoch,
                "first_time": time_ns,
                "exchange_id": exchange_id,
                "end_exchange_id": None,
            }
            session.stays[place] = row
            rows.append(row)
    for session in sessions.values():
        session.end()
    return table_of_rows(FETCH_SESSIONS, rows)
