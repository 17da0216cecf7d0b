"""Makes a plan of a workload: steps to send, skipped requests with reasons, and dependencies.

Steps are in the order of captured times. `refusals` has what the captured broker refused without
effect, `ordering` which steps wait for each other, `pauses` for how long after them.
"""

from __future__ import annotations

from kdissect.codec.message import Message
from kdissect.pipeline.filters import fits
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import (
    DELETE_EXISTING,
    PRODUCE,
    READ,
    TRANSACTIONS,
    WRITING_CLASSES,
    Exchange,
    Mode,
    PlanOptions,
    ReplayPlan,
    SkipCode,
    Skipped,
    Step,
    Workload,
    WorkloadFacts,
)
from kdissect.replay.planning.dependencies import ResourceAccesses
from kdissect.replay.planning.ordering import Ordering
from kdissect.replay.planning.pauses import mark_pauses
from kdissect.replay.planning.refusals import refusal, without_refused
from kdissect.replay.workload import messages as api
from kdissect.replay.workload.messages import request_of
from kdissect.text import plural

# resources that brokers know from the metadata log
_METADATA = frozenset({"topic", "topics", "config", "acls", "tokens", "quotas", "scram", "cluster"})
_CREATING_APIS = frozenset({ApiKey.METADATA, ApiKey.CREATE_TOPICS, ApiKey.CREATE_PARTITIONS})


def make_plan(workload: Workload, options: PlanOptions | None = None) -> ReplayPlan:
    """The plan of a workload. Raises ValueError for a class that --allow does not know."""
    options = options or PlanOptions()
    for name in options.allow:
        if name not in (*WRITING_CLASSES, DELETE_EXISTING):
            raise ValueError(
                f"allow: {name!r} is none of {', '.join((*WRITING_CLASSES, DELETE_EXISTING))}"
            )
    times = _times(workload)
    order = sorted(
        workload.exchanges(),
        key=lambda each: (times[each.connection][each.index], each.connection, each.index),
    )
    lanes: list[list[int]] = [[] for _ in workload.connections]
    start_ns = times[order[0].connection][order[0].index] if order else 0
    steps = []
    accesses = ResourceAccesses(workload.facts)
    refused = 0
    for number, captured in enumerate(order):
        exchange, count = without_refused(captured)
        refused += count
        at_ns = times[exchange.connection][exchange.index] - start_ns
        step = _step(number, exchange, at_ns, options)
        if step.skipped is None:
            principal = workload.connections[exchange.connection].principal
            step.skipped = refusal(exchange, principal, options.principal)
        if not exchange.internal_reason:
            step.accesses = accesses.of(exchange)
        if step.skipped is None and not (
            (workload.chosen is None or step.exchange.exchange_id in workload.chosen)
            and _is_chosen(step, options)
        ):
            step.skipped = Skipped(SkipCode.FILTERED, "the options choose other requests")
        if step.skipped is None:
            step.creates = _creates(step, workload.facts)
            step.changes_metadata = any(
                resource[0] in _METADATA and mode in (Mode.WRITE, Mode.COMMUTING_WRITE)
                for resource, mode in step.accesses
            )
        steps.append(step)
        lanes[exchange.connection].append(number)
    plan = ReplayPlan(workload, options, steps, lanes)
    if refused:
        plan.notes.append(
            f"left out of Produce requests: {plural(refused, 'batch', 'batches')} that the "
            "captured broker refused without effect, and that clients sent again"
        )
    Ordering(plan, accesses, start_ns).run()
    mark_pauses(steps)
    return plan


def _creates(step: Step, facts: WorkloadFacts) -> bool:
    """Return whether the target has new partitions after a step, as far as the capture shows it."""
    if step.exchange.api_key not in _CREATING_APIS:
        return False
    topics = [facts.topics.get(name[1]) for name, mode in step.accesses
              if name[0] == "topic" and mode is Mode.WRITE]  # fmt: skip
    return any(topic is not None and topic.first_time_ns >= 0 for topic in topics)


def _times(workload: Workload) -> list[list[int]]:
    """When each request was sent, never before the one ahead of it on its connection."""
    send_times = []
    for connection in workload.connections:
        last = 0
        times = []
        for exchange in connection.exchanges:
            last = max(last, exchange.request_time_ns)
            times.append(last)
        send_times.append(times)
    return send_times


def _step(number: int, exchange: Exchange, at_ns: int, options: PlanOptions) -> Step:
    request = request_of(exchange)
    name = _class(exchange, request)
    return Step(
        number=number,
        connection=exchange.connection,
        exchange=exchange,
        api_name=api.api_name(exchange.api_key),
        step_class=name,
        at_ns=at_ns,
        expects_response=exchange.expects_response,
        blocks=exchange.api_key in api.BLOCKING_APIS,
        skipped=_skip(exchange, request, name, options),
    )


def _class(exchange: Exchange, request: Message | None) -> str:
    name = api.step_class(exchange.api_key)
    if request is None:
        return name
    if exchange.api_key == ApiKey.INIT_PRODUCER_ID and request.body["transactional_id"] is None:
        return PRODUCE  # the id of an idempotent producer
    if exchange.api_key == ApiKey.PRODUCE and request.body.get("transactional_id") is not None:
        return TRANSACTIONS
    return name


def _skip(
    exchange: Exchange, request: Message | None, name: str, options: PlanOptions
) -> Skipped | None:
    if exchange.internal_reason:
        return Skipped(SkipCode.INTERNAL, exchange.internal_reason)
    if exchange.api_key == api.NO_API:
        if exchange.request is None and exchange.request_missing:
            return Skipped(SkipCode.NOT_CAPTURED, exchange.request_missing)
        return Skipped(SkipCode.TARGET_OWN, "SASL tokens are the target's own")
    if exchange.api_key in api.TARGET_OWN_APIS:
        return Skipped(SkipCode.TARGET_OWN, "authentication is the target's own")
    if exchange.request is None:
        return Skipped(SkipCode.NOT_CAPTURED, exchange.request_missing)
    if request is None and exchange.api_key != ApiKey.API_VERSIONS:
        if catalog.has_version(exchange.api_key, exchange.api_version):
            return Skipped(SkipCode.NOT_CAPTURED, "the request cannot be decoded")
        where = f"{api.api_name(exchange.api_key)} v{exchange.api_version}"
        return Skipped(SkipCode.UNKNOWN_API, f"nothing is known of {where}")
    if name != READ:
        if name == TRANSACTIONS and exchange.api_key == ApiKey.PRODUCE:
            missing = [each for each in (PRODUCE, TRANSACTIONS) if each not in options.allow]
        else:
            missing = [name] if name not in options.allow else []
        if missing:
            return Skipped(SkipCode.NOT_ALLOWED, f"needs --allow {','.join(missing)}")
    return None


def _is_chosen(step: Step, options: PlanOptions) -> bool:
    """Return whether the options' filters keep a step; what names no topic or group passes
    those."""
    if options.apis and step.exchange.api_key not in options.apis:
        return False
    if options.client_ids and not fits(step.exchange.client_id, options.client_ids):
        return False
    for kinds, wanted in ((("topic", "log"), options.topics), (("group",), options.groups)):
        if wanted:
            named = {resource[1] for resource, _ in step.accesses if resource[0] in kinds}
            if named and not any(fits(name, wanted) for name in named):
                return False
    return True
