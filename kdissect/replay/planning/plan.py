"""Makes a plan of a workload: steps to send, skipped requests with reasons, and dependencies.

Steps are in the order of captured times. `skips` has the requests that are not sent, `resources`
what each of them reads and changes, `ordering` which steps wait for each other, and `timeouts` what
has to run out of time before.
"""

from __future__ import annotations

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import (
    DELETE_EXISTING,
    PRODUCE,
    TRANSACTIONS,
    WRITING_CLASSES,
    Exchange,
    Mode,
    PlanOptions,
    ReplayPlan,
    Resource,
    SkipCode,
    Skipped,
    Step,
    Workload,
    WorkloadFacts,
)
from kdissect.replay.planning.ordering import order_steps
from kdissect.replay.planning.resources import ResourceAccesses
from kdissect.replay.planning.skips import is_chosen, skip_of, without_refused
from kdissect.replay.planning.timeouts import mark_timeouts
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
    plan = ReplayPlan(workload, options, [], lanes)
    accesses = ResourceAccesses(workload.facts)
    refused = 0
    for number, captured in enumerate(order):
        exchange, count = without_refused(captured)
        refused += count
        at_ns = times[exchange.connection][exchange.index] - start_ns
        plan.steps.append(_step(plan, number, exchange, at_ns, accesses))
        lanes[exchange.connection].append(number)
    if refused:
        plan.notes.append(
            f"left out of Produce requests: {plural(refused, 'batch', 'batches')} that the "
            "captured broker refused without effect, and that clients sent again"
        )
    order_steps(plan, start_ns)
    mark_timeouts(plan.steps)
    return plan


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


def _step(
    plan: ReplayPlan, number: int, exchange: Exchange, at_ns: int, accesses: ResourceAccesses
) -> Step:
    workload, step_class = plan.workload, _class_of(exchange)
    principal = workload.connections[exchange.connection].principal
    found = () if exchange.internal_reason else accesses.of(exchange)
    skipped = skip_of(exchange, step_class, principal, plan.options)
    is_selected = workload.chosen is None or exchange.exchange_id in workload.chosen
    if skipped is None and not (is_selected and is_chosen(exchange, found, plan.options)):
        skipped = Skipped(SkipCode.FILTERED, "the options choose other requests")
    changed = [each for each, mode in found if mode in (Mode.WRITE, Mode.COMMUTING_WRITE)]
    return Step(
        number=number,
        connection=exchange.connection,
        exchange=exchange,
        api_name=api.api_name(exchange.api_key),
        step_class=step_class,
        at_ns=at_ns,
        expects_response=exchange.expects_response,
        blocks=exchange.api_key in api.BLOCKING_APIS,
        creates=skipped is None and _creates(exchange, changed, workload.facts),
        changes_metadata=skipped is None and any(each[0] in _METADATA for each in changed),
        skipped=skipped,
        accesses=found,
    )


def _class_of(exchange: Exchange) -> str:
    name, request = api.step_class(exchange.api_key), request_of(exchange)
    if request is None:
        return name
    if exchange.api_key == ApiKey.INIT_PRODUCER_ID and request.body["transactional_id"] is None:
        return PRODUCE  # the id of an idempotent producer
    if exchange.api_key == ApiKey.PRODUCE and request.body.get("transactional_id") is not None:
        return TRANSACTIONS
    return name


def _creates(exchange: Exchange, changed: list[Resource], facts: WorkloadFacts) -> bool:
    """Return whether the target has new partitions after a step, as far as the capture shows it."""
    if exchange.api_key not in _CREATING_APIS:
        return False
    topics = [facts.topics.get(each[1]) for each in changed if each[0] == "topic"]
    return any(topic is not None and topic.first_time_ns >= 0 for topic in topics)
