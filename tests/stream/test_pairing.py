"""The pairing kernel against its plain definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kdissect.stream import pairing, pairing_reference
from kdissect.stream.evidence import Asked
from kdissect.stream.framing import EXPECTS, SILENT, TOKEN
from kdissect.stream.pairing_reference import Request, Response

ids = st.one_of(st.integers(0, 4), st.integers(2**32 - 2, 2**32 - 1), st.integers(0, 40))
kinds = st.sampled_from((EXPECTS, EXPECTS, EXPECTS, SILENT, TOKEN))
steps = st.integers(0, 600_000_000)


@st.composite
def connections(draw: st.DrawFn) -> tuple[list[Request], list[Response], bool, bool]:
    time = 0
    requests, responses = [], []
    for _ in range(draw(st.integers(0, 14))):
        time += draw(steps)
        requests.append(Request(draw(ids), time, draw(kinds)))
    time = draw(steps) - 300_000_000
    for _ in range(draw(st.integers(0, 14))):
        time += draw(steps)
        kind = draw(st.sampled_from((EXPECTS, EXPECTS, TOKEN)))
        responses.append(Response(draw(ids), time, kind))
    return requests, responses, draw(st.booleans()), draw(st.booleans())


def kernel(
    many: list[tuple[list[Request], list[Response], bool, bool]],
) -> list[tuple[list[int], list[int], list[int]]]:
    requests = [request for connection in many for request in connection[0]]
    responses = [response for connection in many for response in connection[1]]
    starts = np.cumsum([0] + [len(connection[0]) for connection in many])
    answers = np.cumsum([0] + [len(connection[1]) for connection in many])
    asked = Asked(
        np.array([request.correlation_id for request in requests], np.int64),
        np.array([request.time_ns for request in requests], np.int64),
        np.array([request.kind for request in requests], np.int64),
    )
    answer_of, request_of = np.empty(len(requests), np.int64), np.empty(len(responses), np.int64)
    status, came = np.empty(len(requests), np.uint8), np.empty(len(responses), np.uint8)
    pairing.pair(
        asked, starts,
        np.array([response.correlation_id for response in responses], np.int64),
        np.array([response.kind for response in responses], np.int64),
        np.array([response.time_ns for response in responses], np.int64), answers,
        np.array([connection[2] for connection in many], np.uint8),
        np.array([connection[3] for connection in many], np.uint8),
        answer_of, request_of, status, came,
    )  # fmt: skip
    for answer, row in enumerate(request_of):
        assert row < 0 or answer_of[row] == answer
    found = []
    for number in range(len(many)):
        mine, theirs = slice(*starts[number : number + 2]), slice(*answers[number : number + 2])
        base = answers[number]
        found.append(
            (
                [int(row - base) if row >= 0 else -1 for row in answer_of[mine]],
                [int(one) for one in status[mine]],
                [int(one) for one in came[theirs]],
            )
        )
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(connections(), max_size=3))
def test_kernel_and_definition_agree(
    many: list[tuple[list[Request], list[Response], bool, bool]],
) -> None:
    """Repeating and wrapping ids, tokens, acks=0, clocks that differ, any order."""
    assert kernel(many) == [tuple(pairing_reference.pair(*connection)) for connection in many]


def test_linear_for_ids_that_never_change() -> None:
    """100 000 requests with one id, answered at the end, and as many second answers."""
    requests = [Request(0, number, EXPECTS) for number in range(100_000)]
    responses = [Response(0, 1_000_000, EXPECTS)] * 200_000
    answer_of, _, came = kernel([(requests, responses, False, False)])[0]
    assert answer_of == list(range(100_000))
    assert came[100_000:] == [pairing.SECOND] * 100_000
