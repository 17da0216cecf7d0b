"""The capture's requests in the target's terms: ids, names, sessions, epochs and offsets.

Theory of operation
-------------------
Requests are decoded, fields that hold ids (`fields.toml`) are changed, and the request is encoded
again. If nothing changes, the captured bytes go out with another correlation id. The `IdMap` is
learnt from answers: the captured response and the target's answer to the same request are read side
by side, and where the one has X, the other has Y. Later requests with X are sent with Y.

Keys of an `IdMap` are the capture's (names before renames), so a capture is replayed to its own
cluster and to another one in the same way.
"""

from __future__ import annotations

from kdissect.codec.message import decode_message, encode_message
from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import DELETE_EXISTING, DroppedField, SkipCode, Skipped, Step
from kdissect.replay.translation import answers, requests, unready
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.reencode import reencoded
from kdissect.replay.translation.requests import Untranslatable
from kdissect.replay.translation.unready import Place
from kdissect.replay.workload.messages import DELETING_APIS


class Translator:
    """From the capture's ids to the target's, and back from answers. One for a run.

    It does not wait: the run calls it in the order in which things happen. dropped: step -> fields
    that its request lacks in the version that it is sent in.
    """

    def __init__(self, ids: IdMap) -> None:
        self.ids = ids
        self.dropped: dict[int, list[DroppedField]] = {}
        for step in ids.plan.steps:
            if step.skipped is None:
                answers.from_capture(ids, step.exchange)

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
        try:
            request = decode_message(frame, side="request")
        except (DecodeError, ValueError):
            # ApiVersions in a version that has no definition: brokers answer it with an error
            return frame
        is_changed = requests.translate(self.ids, step, request)
        version = self.ids.api_version(step)
        if version != step.exchange.api_version:
            request, self.dropped[step.number] = reencoded(self.ids, request, version)
            is_changed = True
        return encode_message(request) if is_changed else frame

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
        """A request that would delete something of `kept`, also if it names other things too."""
        if step.exchange.api_key not in DELETING_APIS:
            return None
        for kind in ("topic", "group"):
            for name in (self.ids.name(kind, captured) for captured in step.named(kind)):
                if (kind, name) in self.ids.kept:
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
        return {} if answer is None else unready.unready(self.ids, step, answer.body)

    def not_final(self, step: Step, response: bytes) -> None:
        """Learn from an answer after which the request is sent again."""
        answer = self.ids.answer_of(step, response)
        if answer is not None:
            unready.note_not_final(self.ids, step, answer.body)

    def learn(self, step: Step, response: bytes) -> None:
        """Learn the target's ids and offsets from a final answer."""
        answers.from_answer(self.ids, step, response)

    def failed(self, step: Step) -> None:
        """No answer to a step came, or it was not sent."""
        answers.from_failure(self.ids, step)

    # -- members of groups, for requests of the replay's own --------------------------------------

    def member_heartbeat(self, last: Step) -> bytes:
        """A heartbeat by the state of a member at the target.

        last: its JoinGroup (then it is a Heartbeat v1), or the last answered heartbeat of a member
        whose partitions the broker assigns.
        """
        return encode_message(requests.member_heartbeat(self.ids, last))

    def member_join(self, join: Step) -> bytes:
        """The request with which a member joined, with its id at the target."""
        return encode_message(requests.member_join(self.ids, join))

    def learn_member(self, last: Step, answer: bytes) -> int:
        """Learn from the answer to a member's heartbeat; return its error code."""
        message = self.ids.answer_of(last, answer)
        if message is None:
            return ErrorCode.UNKNOWN_SERVER_ERROR
        if message.body["error_code"] == 0:
            answers.member_followed(self.ids, last, message.body, is_again=False)
        return int(message.body["error_code"])
