"""Members, generations and assignments of groups: the capture's and the target's."""

from __future__ import annotations

from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange
from kdissect.replay.workload.messages import entries, request_of

Body = dict[str, Any]
Partitions = list[Body] | None  # TopicPartitions of a heartbeat, with the ids of their side


class Groups:
    """Keys are the capture's groups, members, generations and epochs; values the target's."""

    def __init__(self) -> None:
        self._members: dict[tuple[str, str], str] = {}
        self._generations: dict[tuple[str, int], int] = {}
        self._leaders: dict[tuple[str, int], tuple[str, str]] = {}  # captured, target
        self._assignments: dict[tuple[str, int], list[Body]] = {}
        self._epochs: dict[tuple[str, str, int], int] = {}
        self._last_epoch: dict[tuple[str, str], tuple[int, int]] = {}
        self._owned: dict[tuple[str, str], tuple[Partitions, Partitions]] = {}
        self._endpoint_epochs: dict[tuple[str, int], int] = {}

    # -- from the capture -----------------------------------------------------------------------

    def capture_tells(self, exchange: Exchange) -> None:
        """Remember the assignments that the captured leaders made."""
        if exchange.api_key != ApiKey.SYNC_GROUP:
            return
        request = request_of(exchange)
        if request is not None and request.body["assignments"]:
            key = (request.body["group_id"], request.body["generation_id"])
            self._assignments[key] = request.body["assignments"]

    # -- to the target --------------------------------------------------------------------------

    def member(self, group: str, captured: str) -> str:
        """The target's id of a member. Without one from an answer, the client chose the id itself
        (KIP-1082), and it stays as captured."""
        return self._members.get((group, captured), captured)

    def knows_member(self, group: str, captured: str) -> bool:
        return (group, captured) in self._members

    def generation(self, group: str, member: str, captured: int) -> int:
        """The target's generation of a classic group, or epoch of a member.

        Values up to 0 that no answer returned have a meaning of their own (0: join, -1: leave), and
        stay.
        """
        if captured <= 0 and (group, captured) not in self._generations:
            return captured
        last = self._last_epoch.get((group, member))
        if last is not None:
            # A client sends the epoch of its last response, so the replay does as well.
            if captured == last[0]:
                return last[1]
            return self._epochs.get((group, member, captured), captured)
        return self._generations.get((group, captured), captured)

    def assignments(
        self, group: str, generation: int, member: str, given: list[Body]
    ) -> list[Body]:
        """The assignments for this member's SyncGroup, with the capture's member ids.

        They are the captured leader's if the member leads the group at the target, else none.
        """
        leaders = self._leaders.get((group, generation))
        if leaders is None:
            return given
        captured_leader, target_leader = leaders
        mine = self.member(group, member)
        if mine == target_leader:
            return given or self._assignments.get((group, generation), [])
        return [] if member != captured_leader or mine != target_leader else given

    def owned(self, group: str, member: str, captured: Partitions) -> tuple[bool, Partitions]:
        """The partitions that a member's heartbeat reports as owned: (True, partitions).

        If the captured member reports its captured assignment, these are the assignment from the
        target. Otherwise (False, None): the field stays as captured.
        """
        held = self._owned.get((group, member))
        if held is None or captured is None:
            return False, None
        if _as_set(held[0]) == _as_set(captured):
            return True, held[1]
        return False, None

    def endpoint_epoch(self, group: str, captured: int) -> int:
        """The target's endpoint information epoch of a streams group (KIP-1071)."""
        return self._endpoint_epochs.get((group, captured), captured)

    # -- from the target ------------------------------------------------------------------------

    def joined(self, request: Body, captured: Body | None, answer: Body) -> None:
        """A JoinGroup of a classic group was answered."""
        if captured is None:
            return
        group = request["group_id"]
        if captured["member_id"] and answer["member_id"]:
            self._members[group, captured["member_id"]] = answer["member_id"]
        if captured["error_code"] == 0 and answer["error_code"] == 0:
            generation = captured["generation_id"]
            self._generations[group, generation] = answer["generation_id"]
            self._leaders[group, generation] = (captured["leader"], answer["leader"])
            named = {
                each["group_instance_id"]: each["member_id"]
                for each in entries(answer["members"])
                if each.get("group_instance_id")
            }
            for each in entries(captured["members"]):
                found = named.get(each.get("group_instance_id"))
                if found:
                    self._members[group, each["member_id"]] = found

    def heartbeat(self, request: Body, captured: Body | None, answer: Body) -> None:
        """A heartbeat of a consumer, share or streams group was answered."""
        if captured is None or answer["error_code"] != 0 or captured["error_code"] != 0:
            return
        group = request["group_id"]
        member = captured["member_id"] or request["member_id"]
        if answer["member_id"] and member:
            self._members[group, member] = answer["member_id"]
        self._epochs[group, member, captured["member_epoch"]] = answer["member_epoch"]
        self._last_epoch[group, member] = (captured["member_epoch"], answer["member_epoch"])
        if "endpoint_information_epoch" in captured:
            epoch = captured["endpoint_information_epoch"]
            self._endpoint_epochs[group, epoch] = answer["endpoint_information_epoch"]
        was, now = self._owned.get((group, member), (None, None))
        if captured.get("assignment") is not None:
            was = captured["assignment"]["topic_partitions"]
        if answer.get("assignment") is not None:
            now = answer["assignment"]["topic_partitions"]
        if was is not None and now is not None:
            self._owned[group, member] = (was, now)

    def leads(self, group: str, generation: int) -> tuple[str, str] | None:
        """(captured, target) member ids of the leaders of a captured generation."""
        return self._leaders.get((group, generation))


def _as_set(value: Partitions) -> set[tuple[Any, int]]:
    return {(each["topic_id"], number) for each in entries(value) for number in each["partitions"]}
