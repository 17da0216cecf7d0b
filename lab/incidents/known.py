"""Captures that were not recorded as incidents, and the incidents that they truly contain."""

from collections.abc import Iterator
from pathlib import Path

# Capture -> kinds above `info` that its README and its manifest account for.
KNOWN: dict[str, frozenset[str]] = {
    # A node is killed and starts again, another one stops and starts again.
    "cluster": frozenset(("broker_unreachable",)),
    # Broker 2 stops and starts again; in zk_1_1_1 it stops at the end, too.
    "zk_1_1_1": frozenset(("broker_unreachable",)),
    "zk_3_9_1_ibp_2_4": frozenset(("broker_unreachable",)),
    # Hand-made: HTTP and TLS on a plaintext port.
    "odd_conversations": frozenset(("tls_failure",)),
    # Failed logins of each mechanism.
    "sasl": frozenset(("login_failures",)),
    # One per cent of its packets was removed.
    "drop1pct": frozenset(("capture_loss",)),
    # Its snap length cut each longer packet.
    "snap128": frozenset(("capture_loss",)),
    # It ends within a packet.
    "cut": frozenset(("capture_unread",)),
}
# A rotated capture is read whole.
_PARTS = ("rotated_",)


def healthy_captures(folders: list[Path]) -> Iterator[Path]:
    """Captures of folders, with those of `KNOWN`, without recorded incidents."""
    for folder in folders:
        for path in sorted(folder.rglob("*.pcap*")):
            is_part = path.name.startswith(_PARTS)
            if not is_part and "incidents" not in path.parts:
                yield path


def known_kinds(path: Path) -> frozenset[str]:
    """Kinds above `info` that a capture truly contains."""
    return KNOWN.get(path.name.split(".")[0], frozenset())
