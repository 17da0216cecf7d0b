"""Recorded incidents: kdissect finds each one, with its subject and time, and nothing else."""

from tests.cases import cases
from tests.conftest import CAPTURES
from tests.incidents.recorded import judge, truths

RECORDED = CAPTURES / "incidents"
# Other recordings have incidents of the same kinds, on the same evidence.
REPEATED = {
    *("advertised_silent", "idle_reset", "password_wrong_scram", "plaintext_to_tls", "node_killed"),
    *("retries_duplicate_plain", "responses_delayed", "controlled_shutdown"),
    *("port_refuses", "certificate_expires"),
}


@cases("name", truths(RECORDED), heavy=REPEATED)
def test_recorded_incident(name: str) -> None:
    """The findings above `info` equal the truth that the recording script wrote."""
    assert judge(RECORDED, name).faults == []
