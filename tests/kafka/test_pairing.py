"""The pairing kernel against an oracle that searches lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kdissect.capture.scratch import MEMORY
from kdissect.kafka import pairing
from kdissect.kafka.assembly import ANOMALY, PairStatus
from kdissect.kafka.exchanges import Frames
from kdissect.kafka.frame_tables import EXPECTS, FRAME, SILENT, TOKEN
from tests.oracles import pairing as oracle
from tests.oracles.pairing import Request, Response

ids = st.one_of(st.integers(0, 4), st.integers(2**32 - 2, 2**32 - 1), st.integers(0, 40))
kinds = st.sampled_from((EXPECTS, EXPECTS, EXPECTS, SILENT, TOKEN))
steps = st.integers(0, 600_000_000)
places = st.sampled_from((0, 1, 1, 2))  # in the capture; clocks may step back


@st.composite
def connections(draw: st.DrawFn) -> tuple[list[Request], list[Response], bool]:
    time = 0
    requests, responses = [], []
    for _ in range(draw(st.integers(0, 14))):
        time += draw(steps)
        requests.append(Request(draw(ids), time, draw(kinds), draw(places)))
    time = draw(steps) - 300_000_000
    for _ in range(draw(st.integers(0, 14))):
        time += draw(steps)
        kind = draw(st.sampled_from((EXPECTS, EXPECTS, TOKEN)))
        is_behind = draw(st.sampled_from((False, False, True)))
        responses.append(Response(draw(ids), time, kind, is_behind, draw(places)))
    return requests, responses, draw(st.booleans())


def kernel(
    many: list[tuple[list[Request], list[Response], bool]],
) -> list[tuple[list[int], list[int], list[int], list[bool]]]:
    requests = [request for connection in many for request in connection[0]]
    responses = [response for connection in many for response in connection[1]]
    starts = np.cumsum([0] + [len(connection[0]) for connection in many])
    answers = np.cumsum([0] + [len(connection[1]) for connection in many])
    pending, answer_rows = np.zeros(len(requests), FRAME), np.zeros(len(responses), FRAME)
    pending["partner"] = answer_rows["partner"] = -1
    for row, request in zip(pending, requests, strict=True):
        row["correlation"], row["time"] = request.correlation_id, request.time_ns
        row["kind"], row["first"] = request.kind, request.place
    for row, response in zip(answer_rows, responses, strict=True):
        row["correlation"], row["time"] = response.correlation_id, response.time_ns
        row["kind"], row["before"] = response.kind, response.is_behind_break
        row["first"] = response.place
    buckets = pairing.buckets_for(starts, MEMORY)
    for part in buckets:
        part[:] = 7
    is_closed = np.array([connection[2] for connection in many], np.uint8)
    none, nothing = np.zeros(0, ANOMALY), np.zeros(0, np.int64)
    asking = Frames(pending, starts, none, nothing)
    answering = Frames(answer_rows, answers, none, nothing)
    pairing.pair(asking, answering, is_closed, buckets)
    answer_of, status, is_lost = (pending[name] for name in ("partner", "outcome", "is_lost"))
    request_of, came = answer_rows["partner"], answer_rows["outcome"]
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
                [bool(one) for one in is_lost[mine]],
            )
        )
    return found


@given(st.lists(connections(), max_size=3))
def test_the_kernel_pairs_as_the_oracle(
    many: list[tuple[list[Request], list[Response], bool]],
) -> None:
    """Repeating and wrapping ids, tokens, acks=0, clocks that differ, breaks, any order."""
    assert kernel(many) == [tuple(oracle.pair(*connection)) for connection in many]


def test_linear_for_ids_that_never_change() -> None:
    """100,000 requests with one ID, all responses at the end, and as many second ones."""
    requests = [Request(0, number, EXPECTS) for number in range(100_000)]
    responses = [Response(0, 1_000_000, EXPECTS)] * 200_000
    answer_of, _, came, _ = kernel([(requests, responses, False)])[0]
    assert answer_of == list(range(100_000))
    assert came[100_000:] == [pairing.SECOND] * 100_000


def test_linear_for_ids_that_never_change_behind_breaks() -> None:
    """100,000 requests with one ID, each response after a gap, cost linear work."""
    requests = [Request(0, 10 * number, EXPECTS) for number in range(100_000)]
    responses = [Response(0, 20 * number + 5, EXPECTS, True) for number in range(50_000)]
    answer_of, status, came, is_lost = kernel([(requests, responses, False)])[0]
    assert came == [pairing.IN_ORDER] * 50_000
    assert [row for row, answer in enumerate(answer_of) if answer >= 0] == list(
        range(0, 100_000, 2)
    )
    assert is_lost == [row % 2 == 1 and row < 99_999 for row in range(100_000)]
    assert status[1] == PairStatus.RESPONSE_MISSING


def test_a_response_behind_a_break_answers_the_youngest_request_with_its_id() -> None:
    """Ids that begin again (re-authentication): the first answer was lost."""
    pending = ((5, 0), (6, 10), (5, 20))
    requests = [Request(number, time, EXPECTS) for number, time in pending]
    late = [Response(5, 25, EXPECTS, True)]
    assert kernel([(requests, late, False)])[0][0] == [-1, -1, 0]
    in_order = [Response(5, 25, EXPECTS, False)]
    assert kernel([(requests, in_order, False)])[0][0] == [0, -1, -1]


def test_requests_before_a_break_wait_no_longer() -> None:
    """The answers to 5 and 6 were in the break; the next answer with id 5 is another request's."""
    requests = [Request(5, 0, EXPECTS), Request(6, 1, EXPECTS), Request(7, 2, EXPECTS)]
    told = [Response(7, 10, EXPECTS, True), Response(5, 20, EXPECTS, False)]
    answer_of, status, came, is_lost = kernel([(requests, told, True)])[0]
    assert answer_of == [-1, -1, 0]
    assert is_lost == [True, True, False]
    assert status[:2] == [PairStatus.RESPONSE_MISSING] * 2
    assert came == [pairing.IN_ORDER, pairing.UNASKED]


def test_a_token_answers_the_token_before_it() -> None:
    """Lock step: the answer to the first was lost, or the first itself."""
    both = [Request(-1, 0, TOKEN), Request(-1, 20, TOKEN)]
    assert kernel([(both, [Response(-1, 30, TOKEN, True)], False)])[0][0] == [-1, 0]
    second = [Request(9, 0, EXPECTS), Request(-1, 20, TOKEN)]
    told = [Response(9, 5, EXPECTS), Response(-1, 10, TOKEN)]
    answer_of, _, came, _ = kernel([(second, told, False)])[0]
    assert (answer_of, came) == ([0, -1], [pairing.IN_ORDER, pairing.UNASKED])
