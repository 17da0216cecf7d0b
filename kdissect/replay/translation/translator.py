"""The capture's requests in the target's terms: ids, names, sessions, epochs and offsets.

Theory of operation
-------------------
Requests are decoded, fields that hold ids (`field_kinds`) are changed, and the request is encoded
again. If nothing changes, the captured bytes go out with another correlation id. The `IdMap` is
learnt from answers: the captured response and the target's answer to the same request are read side
by side, and where the one has X, the other has Y. Later requests with X are sent with Y.

Keys of an `IdMap` are the capture's (names before renames), so a capture is replayed to its own
cluster and to another one in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kdissect.codec.message import decode_message, encode_message
from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.protocol.releases import taken
from kdissect.replay.model import DELETE_EXISTING, DroppedField, SkipCode, Skipped, Step
from kdissect.replay.translation import answers, nodes, requests, unready
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.reencode import reencoded
from kdissect.replay.translation.requests import Untranslatable
from kdissect.replay.translation.unready import Place
from kdissect.replay.workload.messages import DELETING_APIS


class Translator:
    """From the capture's ids to the target's, and back from answers. One for a run.

    It does not wait: the run calls it in the order in which things happen. Before the first request
    it gets `learn_versions`, `learn_metadata` and `learn_log_starts`.
    """

    def __init__(self, ids: IdMap) -> None:
        self.ids = ids
        self._dropped: dict[int, list[DroppedField]] = {}  # step -> fields its request lacks
        self._kept: frozenset[tuple[str, str]] = frozenset()
        for step in ids.plan.steps:
            if step.skipped is None:
                answers.from_capture(ids, step.exchange)

    # -- what the run learns by itself ---------------------------------------------------------

    def learn_versions(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        """api_key -> (min, max) that the target speaks."""
        self.ids.target.ranges = taken(ranges)

    def learn_metadata(self, body: Mapping[str, Any]) -> None:
        """A Metadata response of the target."""
        self.ids.target.learn_metadata(body)

    def learn_log_starts(self, starts: Mapping[tuple[str, int], int]) -> None:
        """The target's earliest offsets, by (its name of the topic, partition)."""
        for (name, partition), start in starts.items():
            self.ids.offsets.target_starts((self.ids.captured_topic_name(name), partition), start)

    def learn_coordinator(self, key_type: int, key: str, node_id: int) -> None:
        self.ids.learn_coordinator(key_type, key, node_id)

    def keep(self, names: Iterable[tuple[str, str]]) -> None:
        """Protect topics and groups that the target had before the run from deletion.

        names: (kind, the target's name) of each.
        """
        self._kept = frozenset(names)

    def api_version(self, step: Step) -> int:
        return self.ids.api_version(step)

    # -- routing --------------------------------------------------------------------------------

    def wants_metadata(self, step: Step) -> list[str]:
        """The target's names of topics that `step` needs and nothing is known of."""
        return [name for name in self.topics(step) if not self.ids.target.is_known(name)]

    def topics(self, step: Step) -> list[str]:
        """The target's names of the topics that `step` needs."""
        return [self.ids.topic(name) for name in nodes.topics_of(step)]

    def coordinators(self, step: Step) -> list[tuple[int, str]]:
        """(key type, the target's name) of groups and transactions whose coordinators it needs."""
        return nodes.coordinators_of(self.ids, step)

    def coordinator_keys(self) -> list[tuple[int, str]]:
        """Those that the plan needs.

        The replay looks them up before it begins, so that a fresh target creates __consumer_offsets
        and __transaction_state before the first request.
        """
        steps = [step for step in self.ids.plan.steps if step.skipped is None]
        return list(dict.fromkeys(key for step in steps for key in self.coordinators(step)))

    def name(self, kind: str, captured: str) -> str:
        """The target's name of a captured "topic", "group" or transaction ("txn")."""
        ids = self.ids
        rename = {"topic": ids.topic, "group": ids.group, "txn": ids.transactional_id}[kind]
        return rename(captured)

    def nodes(self, step: Step) -> list[int | None]:
        """The nodes that get the request, or a part of it. None: the bootstrap address."""
        return nodes.nodes_of(self.ids, step)

    def parts(self, step: Step, frame: bytes) -> list[tuple[int | None, bytes]]:
        """(node, frame) of each part of a frame that `request` returned."""
        return nodes.parts_of(self.ids, step, frame)

    def merged(self, step: Step, responses: list[bytes]) -> bytes:
        """The answers to all parts as one frame."""
        return nodes.merged(self.ids, step, responses)

    # -- requests -------------------------------------------------------------------------------

    def request(self, step: Step) -> bytes | Skipped:
        """The frame to send, with the target's ids; to be called just before sending."""
        exchange = step.exchange
        if exchange.request is None:
            return Skipped(SkipCode.NOT_CAPTURED, exchange.request_missing)
        refused = self._refused(step) or self._protected(step)
        if refused is not None:
            return refused
        try:
            return self._translated(step, exchange.request)
        except Untranslatable as cause:
            return Skipped(SkipCode.NOT_TRANSLATABLE, str(cause))
        except EncodeError as error:
            return Skipped(SkipCode.NOT_TRANSLATABLE, f"cannot be encoded: {error}")

    def _translated(self, step: Step, frame: bytes) -> bytes:
        """The frame to send. Raises Untranslatable, EncodeError."""
        exchange = step.exchange
        try:
            request = decode_message(frame, side="request")
        except (DecodeError, ValueError):
            # ApiVersions in a version that has no definition: brokers answer it with an error
            return frame
        is_changed = requests.translate(self.ids, step, request)
        version = self.ids.api_version(step)
        if version != exchange.api_version:
            request, self._dropped[step.number] = reencoded(self.ids, request, version)
            is_changed = True
        return encode_message(request) if is_changed else frame

    def member_heartbeat(self, last: Step) -> bytes:
        """A heartbeat by the state of a member at the target.

        last: its JoinGroup (then it is a Heartbeat v1), or the last answered heartbeat of a member
        whose partitions the broker assigns.
        """
        return encode_message(requests.member_heartbeat(self.ids, last))

    def member_join(self, join: Step) -> bytes:
        """The request with which a member joined, with its id at the target."""
        request = decode_message(join.exchange.request or b"", side="request")
        requests.member_join(self.ids, join, request)
        return encode_message(request)

    def learn_member(self, last: Step, answer: bytes) -> int:
        message = self.ids.answer_of(last, answer)
        if message is None:
            return ErrorCode.UNKNOWN_SERVER_ERROR
        if message.body["error_code"] == 0:
            answers.member_followed(self.ids, last, message, is_again=False)
        return int(message.body["error_code"])

    def dropped_fields(self, step: Step) -> Sequence[DroppedField]:
        return self._dropped.get(step.number, ())

    def _refused(self, step: Step) -> Skipped | None:
        """A version that the target does not speak: a client would fail at once."""
        exchange = step.exchange
        ranges = self.ids.target.ranges
        if not ranges or exchange.api_key == ApiKey.API_VERSIONS:
            return None
        offered = ranges.get(exchange.api_key)
        if offered is None:
            reason = f"the target does not offer {step.api_name}"
        elif offered[0] <= self.ids.api_version(step) <= offered[1]:
            return None
        else:
            reason = (
                f"the target speaks {step.api_name} v{offered[0]} to v{offered[1]}, "
                f"captured is v{exchange.api_version}"
            )
        if exchange.response is None and exchange.expects_response:
            return Skipped(SkipCode.API_VERSION, f"{reason}; it was not answered in the capture")
        return Skipped(SkipCode.API_VERSION, reason, is_finding=True)

    def _protected(self, step: Step) -> Skipped | None:
        """A request that would delete something of `keep`, also if it names other things too."""
        if not self._kept or step.exchange.api_key not in DELETING_APIS:
            return None
        for resource, _ in step.accesses:
            if resource[0] not in ("topic", "group"):
                continue
            kind, name = resource[0], self.name(*resource)
            if (kind, name) in self._kept:
                reason = f"{kind} {name} was there before: needs --allow {DELETE_EXISTING}"
                return Skipped(SkipCode.NOT_ALLOWED, reason)
        return None

    # -- answers --------------------------------------------------------------------------------

    def unready(self, step: Step, response: bytes) -> dict[Place, str]:
        """What is not ready at the target by an answer -> the reason to send the request again."""
        captured = step.exchange.response
        if captured is None or response[4:] == captured[4:]:
            return {}
        answer = self.ids.answer_of(step, response)
        return {} if answer is None else unready.unready(self.ids, step, answer)

    def not_final(self, step: Step, response: bytes) -> None:
        """Learn from an answer after which the request is sent again."""
        answer = self.ids.answer_of(step, response)
        if answer is not None:
            unready.note_not_final(self.ids, step, answer)

    def learn(self, step: Step, response: bytes) -> None:
        """Learn the target's ids and offsets from a final answer."""
        if not answers.teaches(step):
            return
        answer = self.ids.answer_of(step, response)
        if answer is None:
            self.failed(step)
            return
        answers.from_answer(self.ids, step, answer)

    def failed(self, step: Step) -> None:
        """No answer to a step came, or it was not sent."""
        answers.from_failure(self.ids, step)
