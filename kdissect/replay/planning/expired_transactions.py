"""Transactions that ran out of time in the capture, and the requests that found them ended.

A coordinator aborts a transaction that is open longer than its producer asked for, and refuses what
the producer sends for it then. At the target time runs anew, and coordinators look only every few
seconds: a request that was refused for this would end the transaction well where it comes too
early. So the runner waits until the target has ended the transaction, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import TRANSACTIONS, Step
from kdissect.replay.workload.messages import entries, error_codes, request_of, response_of

_ENDED = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.CONCURRENT_TRANSACTIONS,  # the coordinator aborts it
        ErrorCode.PRODUCER_FENCED,
    }
)
_MS_NS = 1_000_000


def mark_expired(steps: Iterable[Step]) -> None:
    """Set `Step.expired` of steps, which are in order of time."""
    timeout_ns: dict[str, int] = {}
    began_ns: dict[str, int] = {}
    for step in steps:
        if step.step_class != TRANSACTIONS:
            continue
        request, response = request_of(step.exchange), response_of(step.exchange)
        names = () if request is None else _names(request)
        codes = set(error_codes(response.body)) if response is not None else set()
        for name in names:
            if step.exchange.api_key == ApiKey.INIT_PRODUCER_ID:
                assert request is not None
                timeout_ns[name] = request.body["transaction_timeout_ms"] * _MS_NS
                began_ns.pop(name, None)
                continue
            if name in timeout_ns and name in began_ns and codes & _ENDED:
                if step.at_ns - began_ns[name] >= timeout_ns[name]:
                    step.expired = name
            if step.exchange.api_key != ApiKey.END_TXN:
                began_ns.setdefault(name, step.at_ns)
            elif codes == {0}:
                began_ns.pop(name, None)


def _names(request: Message) -> Iterator[str]:
    """Transactional ids of a request; brokers name several in AddPartitionsToTxn v4 (KIP-890)."""
    own = request.body.get("transactional_id") or request.body.get("v3_and_below_transactional_id")
    if own:
        yield own
    for each in entries(request.body.get("transactions")):
        yield each["transactional_id"]
