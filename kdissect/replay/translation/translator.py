"""The capture's requests in the target's terms: ids, names, sessions, epochs and offsets.

Theory of operation
-------------------
Requests are decoded, their meaningful fields (`field_kinds`) changed, and encoded again; where
nothing has to change the captured bytes go out with another correlation id. What stands for what is
learnt from answers: the captured response and the target's answer to the same request are read side
by side, and what the one calls X the other calls Y. Later requests that say X are sent with Y.

Keys of what is learnt are always the capture's (names before renames), so that a capture replayed
on its own cluster, and one replayed elsewhere, go the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdissect.codec.message import encode_message
from kdissect.errors import EncodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.releases import taken
from kdissect.replay.model import (
    DroppedField,
    ReplayPlan,
    SkipCode,
    Skipped,
    Step,
    TranslateOptions,
)
from kdissect.replay.translation import answers as learning
from kdissect.replay.translation import node_split, requests, routing, shortcuts
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.reencode import reencoded
from kdissect.replay.translation.requests import Untranslatable
from kdissect.replay.translation.shortcuts import Pair, patched
from kdissect.replay.workload.messages import request_of, response_of

_TOLD_MAX = 256


class Translator(IdMap):
    """`model.Translation`. One for a run; not thread-safe."""

    def __init__(self, plan: ReplayPlan, options: TranslateOptions | None = None) -> None:
        super().__init__(plan, options)
        self._last_pair: tuple[bytes, Pair | None] = (b"", None)
        # what has told something, and the target's `changes` after that
        self._known: dict[tuple[str, ...], int] = {}  # by topics whose leaders are known
        self._told: dict[tuple[bytes, bytes], int] = {}  # by Metadata of both sides
        self.is_quick = True  # by forms, where they are known
        self._needs: list[tuple[str, ...]] = []
        known: dict[tuple[str, ...], tuple[str, ...]] = {}
        for step in plan.steps:
            needs: tuple[str, ...] = ()
            if step.skipped is None:
                learning.from_capture(self, step.exchange)
                needs = routing.needs(self, step.exchange)
            self._needs.append(known.setdefault(needs, needs))

    # -- what the runner tells ------------------------------------------------------------------

    def learn_versions(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        self.target.ranges = taken(ranges)

    def learn_metadata(self, body: Mapping[str, Any]) -> None:
        self.target.learn_metadata(body)

    def learn_log_starts(self, starts: Mapping[tuple[str, int], int]) -> None:
        old_names = {new: old for old, new in self.renames["topic"].items()}
        for (name, partition), start in starts.items():
            self.offsets.target_starts((old_names.get(name, name), partition), start)

    # -- where to -------------------------------------------------------------------------------

    def wants_metadata(self, step: Step) -> list[str]:
        needs = self._needs[step.number]
        if not needs or self._known.get(needs) == self.target.changes:
            return []
        wanted = routing.wants_metadata(self, needs)
        if not wanted:
            self._known[needs] = self.target.changes
        return wanted

    def target_node(self, step: Step) -> int | None:
        return routing.target_node(self, step)

    def is_split(self, step: Step) -> bool:
        return node_split.is_split(self, step)

    def parts(self, step: Step, frame: bytes) -> list[tuple[int, bytes]]:
        return node_split.parts(self, step, frame)

    def merged(self, step: Step, answers: list[bytes]) -> bytes:
        return node_split.merged(self, step, answers)

    def coordinator_keys(self) -> list[tuple[int, str]]:
        """(key type, target's name) of the coordinators that the plan will need."""
        return routing.coordinator_keys(self)

    # -- requests -------------------------------------------------------------------------------

    def request(self, step: Step, correlation_id: int) -> bytes | Skipped:
        exchange = step.exchange
        frame = exchange.request
        if frame is None:
            return Skipped(SkipCode.NOT_CAPTURED, exchange.request_missing)
        refused = self._refused(step)
        if refused is not None:
            return refused
        try:
            if self.is_quick:
                quick = patched(self, step, frame, correlation_id)
                if quick is not None:
                    return quick
            request = request_of(exchange)
            if request is None:  # ApiVersions in a version that nobody knows, answered for that
                return _numbered(frame, correlation_id)
            is_changed = requests.translate(self, step, request)
            version = self.api_version(step)
            if version != exchange.api_version:
                request, self.dropped[step.number] = reencoded(self, request, version)
                is_changed = True
            if not is_changed:
                return _numbered(frame, correlation_id)
            request.header["correlation_id"] = correlation_id
            return encode_message(request)
        except Untranslatable as cause:
            return Skipped(SkipCode.NOT_TRANSLATABLE, str(cause))
        except EncodeError as error:
            return Skipped(SkipCode.NOT_TRANSLATABLE, f"cannot be encoded: {error}")

    def dropped_fields(self, step: Step) -> Sequence[DroppedField]:
        return self.dropped.get(step.number, ())

    def _refused(self, step: Step) -> Skipped | None:
        """A version that the target does not speak: what a client would notice at once."""
        exchange = step.exchange
        if not self.target.ranges or exchange.api_key == ApiKey.API_VERSIONS:
            return None
        known = self.target.ranges.get(exchange.api_key)
        if known is None:
            reason = f"the target does not offer {step.api_name}"
        elif known[0] <= self.api_version(step) <= known[1]:
            return None
        else:
            reason = (
                f"the target speaks {step.api_name} v{known[0]} to v{known[1]}, "
                f"captured is v{exchange.api_version}"
            )
        captured = response_of(exchange)
        if captured is None and exchange.expects_response:
            return Skipped(SkipCode.API_VERSION, f"{reason}; it was not answered in the capture")
        return Skipped(SkipCode.API_VERSION, reason, is_finding=True)

    # -- answers --------------------------------------------------------------------------------

    def retry(self, step: Step, response: bytes) -> str:
        captured = step.exchange.response
        if captured is None or response[4:] == captured[4:]:
            return ""
        pair = self._pair(step, response)
        if pair is not None and shortcuts.is_final(self, step, pair):
            return ""
        answer = self.answer_of(step, response)
        if answer is None:
            return ""
        return learning.retry(self, step, answer)

    def _pair(self, step: Step, response: bytes) -> Pair | None:
        if self._last_pair[0] is not response:
            self._last_pair = (
                response,
                shortcuts.pair_of(self, step, response) if self.is_quick else None,
            )
        return self._last_pair[1]

    def learn(self, step: Step, response: bytes) -> None:
        if not learning.teaches(step):
            return
        if self.produced_again:
            self.produced_again.get(step.connection, set()).discard(step.number)
        if step.exchange.api_key == ApiKey.METADATA and self.is_quick:
            self._learn_metadata(step, response)
            return
        pair = self._pair(step, response)
        if pair is not None and shortcuts.learnt(self, step, pair):
            return
        answer = self.answer_of(step, response)
        if answer is None:
            self.failed(step)
        else:
            learning.from_answer(self, step, answer)

    def _learn_metadata(self, step: Step, response: bytes) -> None:
        """Clients ask again and again: the same answer tells nothing while nothing else did."""
        told = (step.exchange.response or b"")[4:], response[4:]
        if self._told.get(told) == self.target.changes:
            return
        answer = self.answer_of(step, response)
        if answer is None:
            self.failed(step)
            return
        learning.from_answer(self, step, answer)
        if len(self._told) >= _TOLD_MAX:
            self._told.clear()
        self._told[told] = self.target.changes

    def failed(self, step: Step) -> None:
        if self.produced_again:
            self.produced_again.get(step.connection, set()).discard(step.number)
        learning.from_failure(self, step)


def _numbered(frame: bytes, correlation_id: int) -> bytes:
    return frame[:4] + correlation_id.to_bytes(4, "big", signed=True) + frame[8:]
