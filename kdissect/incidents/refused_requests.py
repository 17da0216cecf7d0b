"""`refused_requests`: responses with an error that does not pass."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import Evidence
from kdissect.incidents.incident import Incident, Kind
from kdissect.incidents.request_errors import api_errors, error_incident, is_passing

KIND = Kind("refused_requests", "API", "requests were refused for good", "errors")


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the errors of each API with which trying again does not help."""
    for row in api_errors(evidence):
        if not is_passing(row):
            then = "Trying again does not help."
            yield error_incident(evidence, KIND, {**row, "lost_ms": None}, then)
