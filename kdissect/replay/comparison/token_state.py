"""Finds times of delegation tokens that contradict each other (KIP-48).

A token lives as long as the captured one, and never longer than its maximum. A description has the
times that the answers to CreateDelegationToken, RenewDelegationToken and ExpireDelegationToken
gave, and the id that the first of them gave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import decoded, entries, response_of

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_SLACK_MS = 1_000
_ISSUE, _EXPIRY, _MAX = _TIMES = ("issue_timestamp", "expiry_timestamp", "max_timestamp")
_APIS = frozenset(
    {
        ApiKey.CREATE_DELEGATION_TOKEN, ApiKey.RENEW_DELEGATION_TOKEN,
        ApiKey.EXPIRE_DELEGATION_TOKEN, ApiKey.DESCRIBE_DELEGATION_TOKEN,
    }
)  # fmt: skip


class TokenState:
    """Tokens of a run, by their HMAC: the times that answers gave, by field."""

    def __init__(self, ids: IdMap) -> None:
        self._answers: list[tuple[Outcome, Body, bytes]] = []  # with the HMAC
        self._times: dict[bytes, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._token_ids: dict[bytes, str] = {}

    def collect(self, outcome: Outcome) -> None:
        api_key, version = outcome.step.exchange.api_key, outcome.api_version
        if api_key not in _APIS:
            return
        request = decoded(outcome.sent or b"", "request", api_key, version)
        answer = decoded(outcome.answer or b"", "response", api_key, version)
        if request is None or answer is None or answer.body["error_code"]:
            return
        hmac = answer.body.get("hmac") or request.body.get("hmac") or b""
        self._answers.append((outcome, answer.body, hmac))
        if "token_id" in answer.body:
            self._token_ids[hmac] = answer.body["token_id"]
        for name in _TIMES:
            if f"{name}_ms" in answer.body:
                self._times[hmac][name].add(answer.body[f"{name}_ms"])

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        for outcome, answer, hmac in self._answers:
            path, most = f"{_EXPIRY}_ms", max(self._times[hmac][_MAX], default=-1)
            if 0 <= most < answer.get(path, -1):
                note = "the token's maximum, as the answer that made it says"
                add(outcome, path, f"at most {most}", answer[path], note)
            if f"{_MAX}_ms" in answer:
                _check_lifetime(outcome, answer, add)
            for at, token in enumerate(entries(answer.get("tokens"))):
                token_id = self._token_ids.get(token["hmac"], token["token_id"])
                if token["token_id"] != token_id:
                    note = "as the answer that made it"
                    add(outcome, f"tokens[{at}].token_id", token_id, token["token_id"], note)
                for name, times in self._times.get(token["hmac"], {}).items():
                    if _ISSUE in self._times[token["hmac"]] and token[name] not in times:
                        wanted = " or ".join(map(str, sorted(times)))
                        note = "as the answers that made and renewed it"
                        add(outcome, f"tokens[{at}].{name}", wanted, token[name], note)


def _check_lifetime(outcome: Outcome, answer: Body, add: Add) -> None:
    captured = response_of(outcome.step.exchange)
    if captured is None or captured.body["error_code"]:
        return
    for name in (_EXPIRY, _MAX):
        wanted, found = (
            body[f"{name}_ms"] - body[f"{_ISSUE}_ms"] for body in (captured.body, answer)
        )
        if abs(wanted - found) > _SLACK_MS:
            path, note = f"{name}_ms", "after the token's issue, as in the capture"
            add(outcome, path, f"{wanted} ms", f"{found} ms", note)
