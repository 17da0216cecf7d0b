"""Makes a plan of a workload: steps to send, skipped requests with reasons, dependencies, times.

Steps are in the order of captured times. `resources` has what each of them reads and changes,
`ordering` which steps wait for each other, and what has to run out of time before.

Skipped are traffic among brokers and controllers, logins, writing classes that `--allow` does not
name, requests that were not captured whole, and those that the user's filters leave out.

Besides, a client repeats a request that its broker refused with "not yet" or "not here". A target
that is ready would take the first attempt as well, and so have everything twice: all later offsets
of a partition would differ. So the replay leaves out writes that were refused as a whole; the
translation leaves out the refused batches of a Produce that has others. It also leaves out requests
that were refused to a principal which the replay has not: the target may permit them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

from kdissect.kafka.assembly import NO_API
from kdissect.pipeline.filters import fits
from kdissect.pipeline.selection import duration_ms
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay import model
from kdissect.replay.model import Exchange, ReplayPlan, SkipCode, Skipped, Step
from kdissect.replay.planning.ordering import order_steps
from kdissect.replay.planning.resources import ResourceAccesses, class_of
from kdissect.replay.workload import messages
from kdissect.replay.workload.messages import are_refusals, errors, response_body

# The principal of the client must not do that.
_NOT_PERMITTED = messages.codes(
    "TOPIC_AUTHORIZATION_FAILED GROUP_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED "
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED DELEGATION_TOKEN_REQUEST_NOT_ALLOWED "
    "DELEGATION_TOKEN_AUTHORIZATION_FAILED"
)


def make_plan(workload: model.Workload, options: model.PlanOptions | None = None) -> ReplayPlan:
    options = options or model.PlanOptions()
    timed = [
        (at_ns, exchange)
        for connection in workload.connections
        # a request is never sent before the one ahead of it
        for at_ns, exchange in zip(
            accumulate((each.request_time_ns for each in connection.exchanges), max),
            connection.exchanges,
            strict=True,
        )
    ]
    timed.sort(key=itemgetter(0))
    start_ns = timed[0][0] if timed else 0
    plan = ReplayPlan(workload, options, [], [[] for _ in workload.connections])
    accesses = ResourceAccesses(workload)
    for number, (at_ns, exchange) in enumerate(timed):
        step_class = class_of(exchange)
        found = () if exchange.internal_reason else accesses.of(exchange)
        step = Step(
            number=number,
            connection=exchange.connection,
            exchange=exchange,
            api_name=messages.api_name(exchange.api_key),
            step_class=step_class,
            at_ns=at_ns - start_ns,
            expects_response=exchange.expects_response,
            accesses=found,
        )
        step.skipped = (
            _not_a_clients(exchange)
            or _not_allowed(step, options)
            or _refused(step, plan)
            or _filtered(step, plan)
        )
        plan.steps.append(step)
        plan.lanes[exchange.connection].append(number)
    order_steps(plan, start_ns)
    return plan


# -- requests that are not sent -------------------------------------------------------------------


def _not_a_clients(exchange: Exchange) -> Skipped | None:
    """A request that no client could send, or that is not there."""
    if exchange.internal_reason:
        return Skipped(SkipCode.INTERNAL, exchange.internal_reason)
    if exchange.api_key == NO_API:
        if exchange.request is None and exchange.request_missing:
            return Skipped(SkipCode.NOT_CAPTURED, exchange.request_missing)
        return Skipped(SkipCode.TARGET_OWN, "SASL tokens are the target's own")
    if exchange.api_key in messages.TARGET_OWN_APIS:
        return Skipped(SkipCode.TARGET_OWN, "authentication is the target's own")
    if exchange.request is None:
        return Skipped(SkipCode.NOT_CAPTURED, exchange.request_missing)
    if messages.request_of(exchange) is None and exchange.api_key != ApiKey.API_VERSIONS:
        if catalog.has_version(exchange.api_key, exchange.api_version):
            return Skipped(SkipCode.NOT_CAPTURED, "the request cannot be decoded")
        where = f"{messages.api_name(exchange.api_key)} v{exchange.api_version}"
        return Skipped(SkipCode.UNKNOWN_API, f"nothing is known of {where}")
    return None


def _not_allowed(step: Step, options: model.PlanOptions) -> Skipped | None:
    needed = [] if step.step_class == model.READ else [step.step_class]
    if step.step_class == model.TRANSACTIONS and step.exchange.api_key == ApiKey.PRODUCE:
        needed = [model.PRODUCE, model.TRANSACTIONS]
    missing = ",".join(each for each in needed if each not in options.allow)
    return Skipped(SkipCode.NOT_ALLOWED, f"needs --allow {missing}") if missing else None


def _refused(step: Step, plan: ReplayPlan) -> Skipped | None:
    """A request that the captured broker refused without effect, or to another principal."""
    response = response_body(step.exchange)
    is_write = step.step_class != model.READ
    if is_write and are_refusals(step.exchange.api_key, set(messages.error_codes(response))):
        reason = "the captured broker was not ready, and the client asked again"
        return Skipped(SkipCode.NOT_READY, reason)
    principal, own = plan.workload.connections[step.connection].principal, plan.options.principal
    if not principal or own in ("", principal):
        return None
    # those of elements, without those of fields: a created topic may lack its configs (KIP-525)
    found = {code for around, name, code in errors(response) if around[1:] and name == "error_code"}
    found = found or {response.get("error_code", 0)}
    if not found <= _NOT_PERMITTED:
        return None
    reason = f"the captured broker refused it to {principal}, and the replay is {own}"
    return Skipped(SkipCode.OTHER_PRINCIPAL, reason)


def _filtered(step: Step, plan: ReplayPlan) -> Skipped | None:
    """A request that the user's selection leaves out; one that names no topic or group passes
    those filters."""
    chosen, exchange = plan.options.selection, step.exchange
    host, port = plan.workload.connections[step.connection].client
    client = [exchange.client_id or "", host, f"{host}:{port}", f"[{host}]:{port}"]
    is_left_out = (
        (chosen.apis and exchange.api_key not in chosen.apis)
        or not _fits(client, chosen.clients)
        or not _fits([*step.named("topic"), *step.named("log")], chosen.topics)
        or not _fits(step.named("group"), chosen.groups)
    )
    reason = "the options choose other requests"
    return Skipped(SkipCode.FILTERED, reason) if is_left_out else None


def _fits(names: list[str], wanted: tuple[str, ...]) -> bool:
    return not wanted or not names or any(fits(name, wanted) for name in names)


# -- when steps are due ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    """speed: 1 as recorded, 4 four times as fast, inf without waiting.

    max_gap_s: no pause of the replay between two requests is longer; None: as recorded.
    """

    speed: float = 1.0
    max_gap_s: float | None = None

    @property
    def is_max(self) -> bool:
        return math.isinf(self.speed)

    def __str__(self) -> str:
        if self.is_max:
            return "max"
        name = "recorded" if self.speed == 1 else f"x{self.speed:g}"
        return name if self.max_gap_s is None else f"{name}, pauses up to {self.max_gap_s:g} s"


def parse_pace(text: str, max_gap: str | None = None) -> Pace:
    """``recorded``, ``max``, ``x4``, ``x0.5``; `max_gap` as in `parse_span`. Raises OptionError."""
    gap = None if max_gap is None else parse_span(max_gap)
    if text == "recorded":
        return Pace(1.0, gap)
    if text == "max":
        return Pace(math.inf, gap)
    found = re.fullmatch(r"x(\d+(?:\.\d+)?)", text)
    if not found or not 0 < float(found[1]) <= 1e6:
        raise model.OptionError(f"pace {text!r} is none of recorded, max, x2, x0.5 and the like")
    return Pace(float(found[1]), gap)


def parse_span(text: str) -> float:
    """Seconds of ``250ms``, ``5s``, ``2m``, ``1.5``. Raises OptionError."""
    bare = text.strip()
    try:
        return duration_ms(f"{bare}s" if bare[-1:].isdigit() else bare) / 1000
    except ValueError:
        raise model.OptionError(f"{text!r} is no span of time such as 250ms, 5s or 2m") from None


def schedule(plan: ReplayPlan, pace: Pace) -> list[int]:
    """When each step is due, ns since the run's start: at pace max at once, like steps that are not
    sent."""
    max_gap_ns = math.inf if pace.max_gap_s is None else pace.max_gap_s * 1e9
    due = [0] * len(plan.steps)
    now, before_ns = 0.0, -1
    for step in plan.steps:
        if step.skipped is None:
            if before_ns >= 0:
                now += min((step.at_ns - before_ns) / pace.speed, max_gap_ns)
            before_ns, due[step.number] = step.at_ns, int(now)
    return due


def duration_ns(plan: ReplayPlan, pace: Pace) -> int | None:
    """From the first to the last request of the replay; None if nothing is timed."""
    if pace.is_max:
        return None
    return max(schedule(plan, pace), default=0)
