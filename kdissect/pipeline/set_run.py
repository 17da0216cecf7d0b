"""One call of `dissect`: a run that writes a table set, or adds captures to one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kdissect import __version__
from kdissect.capture.inputs import find_captures
from kdissect.pipeline import local
from kdissect.pipeline.append import (
    AppendPlan,
    ReadAgainError,
    append_plan,
    captures_of,
    count_notes,
    extended,
    late_secrets_note,
    planned_append,
    state_to_save,
    state_unavailable_reason,
)
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import Runner, RunPlan, manifest_inputs, planned
from kdissect.pipeline.step_rows import STATE_KNOWN
from kdissect.pipeline.table_set import absolute, commit, staging
from kdissect.pipeline.table_writer import ParquetSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def dissect_here(
    paths: Sequence[str], options: Options, out: str, spool: str | None = None
) -> None:
    """Dissect captures in this process and write a table set to the new folder `out`.

    Raises CaptureError if an input cannot be used.
    """
    SetRun(None, out, False, spool, time.perf_counter()).over(list(paths), options)


@dataclass(slots=True)
class SetRun:
    """One call of `dissect`: dissects the captures, or adds them to an existing set.

    spark: None for a run in this process. manifest: of the written set; empty if there was nothing
    new to add.
    """

    spark: SparkSession | None
    target: str
    keeps: bool
    spool: str | None
    began: float
    session_start_s: float = 0.0
    manifest: dict[str, Any] = field(default_factory=dict)

    def appending(self, paths: list[str], options: Options, read_again: bool) -> list[str]:
        """Add the captures to the set at `target`; returns notes for the user."""
        notes: list[str] = []
        try:
            append = append_plan(self.target, paths, options, read_again)
            if append is None:
                return self.over(paths, options)
            notes = append.notes
            if append.inputs:
                notes += self.after_set(append)
        except ReadAgainError as error:
            notes = self.over(*extended(self.target, paths, options, str(error)), str(error))
            notes = [f"the captures of {self.target} were read again: {error}", *notes]
        return notes

    def over(self, paths: list[str], options: Options, read_again: str | None = None) -> list[str]:
        """Dissect all of `paths`; returns notes for the user. read_again: the reason if captures of
        an existing set are among them."""
        inputs = find_captures(paths)
        notes: list[str] = []
        if self.keeps:
            inputs, notes = captures_of(inputs)
        with planned(inputs, options, self.spool, self._in_tasks()) as plan:
            reason: str | None = "it was written without --keep-state"
            if self.keeps:
                reason = state_unavailable_reason(options, plan)
            plan = replace(plan, keeps=reason is None)
            return notes + self._done(plan, None, reason, read_again)

    def after_set(self, append: AppendPlan) -> list[str]:
        """Dissect the new captures only; returns notes on what differs. Raises ReadAgainError."""
        with planned_append(append, self.spool, self._in_tasks()) as plan:
            notes = late_secrets_note(self.target, plan, append)
            return notes + self._done(plan, append)

    def _in_tasks(self) -> Runner | None:
        from kdissect.pipeline import spark as on_spark

        return None if self.spark is None else on_spark.in_tasks(self.spark)

    def _done(
        self,
        plan: RunPlan,
        append: AppendPlan | None,
        reason: str | None = None,
        read_again: str | None = None,
    ) -> list[str]:
        """reason: why no state is saved. read_again: as for `over`."""
        from kdissect.pipeline import spark as on_spark

        target = self.target
        with staging(target) as run_id:
            if self.spark is not None and (plan.splits or plan.before):
                summary = on_spark.run(self.spark, plan, absolute(target), run_id)
            else:
                summary = local.staged_run(plan, absolute(target), run_id)
            if reason is None:
                sink = ParquetSink(absolute(target), run_id, "state")
                sink(STATE_KNOWN, state_to_save(plan, summary, append))
                summary.files += sink.close()
            timings = {"session_start_s": self.session_start_s, **summary.timings}
            timings["total_s"] = time.perf_counter() - self.began
            inputs = manifest_inputs(plan, summary.hashes)
            before = append.manifest if append else None
            manifest = new_manifest(plan, inputs, timings, before)
            manifest["state"] = {"missing": reason} if reason else {"counts": summary.counts}
            if append or read_again:
                manifest["append"] = {"read_again": read_again}
            kept = append.final if append else {}
            self.manifest = commit(target, run_id, summary.files, manifest, kept)
        return count_notes(summary.counts) if plan.keeps else []


def new_manifest(
    plan: RunPlan,
    inputs: list[dict[str, Any]],
    timings: dict[str, float],
    before: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The manifest without the counts of rows. before: of the set that the run adds to."""
    totals = {
        "captures": sum(info.source >= 0 for info in plan.captures),
        "packets": sum(info.packet_count for info in plan.captures),
        "bytes": plan.byte_count,
    }
    if before is not None:
        totals = {name: count + before["totals"][name] for name, count in totals.items()}
        inputs = [*before["inputs"], *inputs]
    return {
        "program_version": __version__,
        "options": plan.options.to_json(),
        "inputs": inputs,
        "key_logs": plan.key_log_hashes,
        "totals": totals,
        "timings": {name: round(value, 6) for name, value in timings.items()},
    }
