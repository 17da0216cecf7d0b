"""State to resume decryption of a TLS connection at a later record; it contains no secret.

RFC 8446 section 5.3 and RFC 5246 section 6.1 number the records of each direction from 0 on after
each change of keys. So a direction resumes from its record number, the count of KeyUpdates, and
the secret that a key log has for the handshake.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kdissect.tls.handshake import RANDOM_SIZE
from kdissect.tls.records import BODY_MAX, TLS_HEADER_SIZE

SESSION_ID_MAX = 32  # RFC 5246 section 7.4.1.2
GENERATION_MAX = 1 << 16  # KeyUpdates of a direction that a resumed connection goes through again


@dataclass(frozen=True, slots=True)
class Session:
    """Facts of a handshake from which, with a key log, the connection's keys follow.

    client_side: the side that sent the ClientHello.
    version, suite: code points.
    """

    client_side: int
    version: int
    suite: int
    client_random: bytes
    server_random: bytes
    session_id: bytes = b""
    is_encrypt_then_mac: bool = False

    def names(self) -> set[bytes]:
        """Values under which a key log may list the session's secrets."""
        return {self.client_random, self.session_id} - {b""}


@dataclass(frozen=True, slots=True)
class RecordPoint:
    """Position at which a direction resumes: before the record `number`.

    generation: KeyUpdates before it (TLS 1.3). skip: bytes from the record's header to the first
    byte of ciphertext that is still needed.
    """

    number: int
    generation: int = 0
    skip: int = 0


@dataclass(frozen=True, slots=True)
class TlsState:
    """A decrypted connection between two runs. points: by side."""

    session: Session
    points: tuple[RecordPoint, RecordPoint]

    def to_json(self) -> dict[str, Any]:
        session = asdict(self.session)
        return {
            "session": {
                name: value.hex() if isinstance(value, bytes) else value
                for name, value in session.items()
            },
            "points": [asdict(point) for point in self.points],
        }

    @staticmethod
    def from_json(saved: Any) -> TlsState:
        """The state that `to_json` gave. Raises ValueError for anything else."""
        try:
            session: dict[str, Any] = {
                name: bytes.fromhex(value) if isinstance(value, str) else int(value)
                for name, value in saved["session"].items()
            }
            one, two = (
                RecordPoint(**{name: int(value) for name, value in point.items()})
                for point in saved["points"]
            )
            state = TlsState(Session(**session), (one, two))
            is_valid = _is_session(state.session) and _is_point(one) and _is_point(two)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"TLS connection: {error}") from None
        if not is_valid:
            raise ValueError("TLS connection: a number or a size is out of range")
        return state


def _is_session(session: Session) -> bool:
    return (
        session.client_side in (0, 1)
        and 0 <= session.version <= 0xFFFF
        and 0 <= session.suite <= 0xFFFF
        and len(session.client_random) == len(session.server_random) == RANDOM_SIZE
        and len(session.session_id) <= SESSION_ID_MAX
    )


def _is_point(point: RecordPoint) -> bool:
    return (
        0 <= point.number < 1 << 63
        and 0 <= point.generation <= GENERATION_MAX
        and 0 <= point.skip <= TLS_HEADER_SIZE + BODY_MAX
    )
