//! Turns what policy notes into the events that operators see. No text is rendered here: an event is a
//! kind and its fields, and another thread makes a line of it.

use std::time::Duration;

use bulkhead_policy::{Answer, BreakerState, Death, Note, Transition};
use bulkhead_shared::Verdict;
use serde_json::{Value, json};

use super::reporter::Fields;
use super::slab::{BulkheadIndex, CompartmentIndex};
use super::{DataPlane, JobData};
use crate::command::Severity;
use crate::notices::Milestone;

impl DataPlane {
    pub(super) fn note(&mut self, compartment: CompartmentIndex, note: Note) {
        self.count_note(compartment, &note);
        if self.reporter.is_quiet && matches!(note, Note::Draining | Note::Resumed | Note::Breaker(_)) {
            return;
        }
        if self.compartments[compartment].is_replay {
            return self.note_replay(compartment, note);
        }
        let dead = match &note {
            Note::WorkerExited { pid, .. } => Some(*pid),
            Note::JobRetried { worker_pid, .. } => *worker_pid,
            _ => None,
        };
        let job = match &note {
            Note::JobRetried { job, .. } | Note::JobQuarantined { job, .. } => Some(*job),
            _ => None,
        };
        let (severity, kind, mut fields) = describe(note);
        if let Some(cargo) = job.and_then(|job| self.compartments[compartment].policy.cargo_mut(job)) {
            fields.push(("operation", json!(cargo.operation)));
            fields.push(("tenant", json!(cargo.tenant)));
        } else if let Some((_, operation, tenant)) =
            self.reporter.last_crashed.as_ref().filter(|(id, ..)| Some(*id) == job)
        {
            fields.push(("operation", json!(operation)));
            fields.push(("tenant", json!(tenant)));
        }
        fields.extend(self.reporter.report_about(dead));
        self.event(severity, kind, Some(compartment), fields);
        if !self.started {
            self.check_started();
        }
    }

    /// Something went wrong in the supervisor itself.
    pub(super) fn note_trouble(&mut self, what: &str, detail: &str) {
        let fields = vec![("what", json!(what)), ("detail", json!(detail))];
        self.event(Severity::Critical, "supervisor_trouble", None, fields);
    }

    /// An event of a compartment, or of the supervisor itself. If the compartment is one tenant's, it says whose.
    pub(super) fn event(
        &mut self,
        severity: Severity,
        kind: &'static str,
        compartment: Option<CompartmentIndex>,
        mut fields: Fields,
    ) {
        let Some(compartment) = compartment else { return self.reporter.event(severity, kind, None, fields) };
        if let Some(tenant) = &self.compartments[compartment].tenant
            && !fields.iter().any(|(name, _)| *name == "tenant")
        {
            fields.push(("tenant", json!(&**tenant)));
        }
        let bulkhead = self.owner(compartment).name.clone();
        self.reporter.event(severity, kind, Some(bulkhead), fields);
    }

    /// An event of a bulkhead as a whole.
    pub(super) fn bulkhead_event(
        &mut self,
        severity: Severity,
        kind: &'static str,
        bulkhead: BulkheadIndex,
        fields: Fields,
    ) {
        let bulkhead = self.bulkheads[bulkhead].name.clone();
        self.reporter.event(severity, kind, Some(bulkhead), fields);
    }

    pub(super) fn check_started(&mut self) {
        if !self.started && self.compartments.values().all(|c| c.is_replay || c.policy.has_settled()) {
            self.started = true;
            self.reporter.states_have_changed();
            self.reporter.notices.milestone(Milestone::Started);
        }
    }

    /// The events that belong to a job's end.
    pub(super) fn note_answer(&mut self, compartment: CompartmentIndex, answer: &Answer<Box<JobData>>) {
        let Answer { job, cargo, verdict, .. } = answer;
        let kind = match verdict {
            Verdict::DeadlineRunning => "job_timeout",
            Verdict::Crashed { .. } => "job_crashed",
            _ => return,
        };
        let mut fields = vec![
            ("job", json!(job.map(|id| id.to_string()))),
            ("operation", json!(cargo.operation)),
            ("tenant", json!(cargo.tenant)),
            ("trace_id", json!(cargo.trace_id())),
            ("pid", json!(answer.worker_pid)),
            ("payload_bytes", json!(cargo.payload_bytes)),
        ];
        if *verdict == Verdict::DeadlineRunning {
            fields.push(("timeout_ms", millis(answer.deadline)));
            fields.push(("actual_duration_ms", millis(answer.queued + answer.ran)));
        } else {
            fields.push(("reason", json!(verdict.reason())));
            fields.push(("message", json!(verdict.message())));
            fields.push(("attempts", json!(answer.attempts)));
            fields.extend(self.reporter.report_about(answer.worker_pid));
        }
        self.event(Severity::Warning, kind, Some(compartment), fields);
    }
}

fn millis(duration: Duration) -> Value {
    json!((duration.as_secs_f64() * 1e6).round() / 1e3)
}

fn death_fields(death: Death) -> [(&'static str, Value); 2] {
    match death {
        Death::Exit(code) => [("exit_code", json!(code)), ("signal", Value::Null)],
        Death::Signal(signal) => {
            [("exit_code", Value::Null), ("signal", json!(bulkhead_linux::signals::name(signal)))]
        }
        // All are killed.
        Death::Violation(_) | Death::Oom | Death::Overfull => {
            [("exit_code", Value::Null), ("signal", json!("SIGKILL"))]
        }
    }
}

fn describe(note: Note) -> (Severity, &'static str, Fields) {
    use Severity::{Critical, Info, Warning};
    match note {
        Note::WorkerStarted { worker, slot, pid } => (
            Info,
            "worker_started",
            vec![("pid", json!(pid)), ("slot", json!(slot)), ("generation", json!(worker.generation))],
        ),
        Note::WorkerReady { worker, pid, after } => (
            Info,
            "worker_ready",
            vec![("pid", json!(pid)), ("generation", json!(worker.generation)), ("after_ms", millis(after))],
        ),
        Note::WorkerNotStarted { slot, message } => {
            (Critical, "worker_not_started", vec![("slot", json!(slot)), ("message", json!(message))])
        }
        Note::WorkerExited { worker, slot, pid, death, killed, uptime, served, in_flight } => {
            let is_fine = killed.is_some() || death == Death::Exit(0) && in_flight == 0;
            let mut fields =
                vec![("pid", json!(pid)), ("slot", json!(slot)), ("generation", json!(worker.generation))];
            fields.extend(death_fields(death));
            fields.push(("killed", json!(killed.map(|reason| reason.describe()))));
            fields.push(("uptime_ms", millis(uptime)));
            fields.push(("served", json!(served)));
            fields.push(("in_flight", json!(in_flight)));
            (if is_fine { Info } else { Warning }, "worker_exited", fields)
        }
        Note::WorkerKilled { pid, reason } => {
            let kind = match reason {
                bulkhead_policy::KillReason::Hung => "worker_hung",
                _ => "worker_killed",
            };
            (Warning, kind, vec![("pid", json!(pid)), ("reason", json!(reason.describe()))])
        }
        Note::WorkerRecycled { pid, reason } => {
            (Info, "worker_recycled", vec![("pid", json!(pid)), ("reason", json!(reason.name()))])
        }
        Note::ReplacementFailed { slot, message, again_in } => {
            let fields = vec![
                ("slot", json!(slot)),
                ("message", json!(message)),
                ("serves_on", json!(true)),
                ("again_in_ms", millis(again_in)),
            ];
            (Critical, "replacement_failed", fields)
        }
        Note::RestartBackoff { slot, delay } => {
            (Warning, "restart_backoff", vec![("slot", json!(slot)), ("delay_ms", millis(delay))])
        }
        Note::BulkheadFailed { message, .. } => {
            (Critical, "bulkhead_failed", vec![("message", json!(message))])
        }
        Note::JobRetried { job, attempts, crash, worker_pid } => {
            let fields = vec![
                ("job", json!(job.to_string())),
                ("attempts", json!(attempts)),
                ("pid", json!(worker_pid)),
                ("reason", json!(crash.reason())),
                ("message", json!(crash.message())),
            ];
            (Warning, "job_retried", fields)
        }
        Note::JobQuarantined { job, digest } => {
            let digest = digest.to_string();
            (Warning, "job_quarantined", vec![("job", json!(job.to_string())), ("digest", json!(digest))])
        }
        Note::Breaker(transition) => breaker_event(&transition),
        Note::QueuePressure { queued, capacity } => {
            let percent = json!(100 * queued / capacity.max(1));
            let fields = vec![("queued", json!(queued)), ("queue_capacity", json!(capacity))];
            (Warning, "queue_pressure", [fields, vec![("percent", percent)]].concat())
        }
        Note::TenantThrottled { tenant, retry_after } => {
            let fields = vec![("tenant", json!(&*tenant)), ("retry_after_ms", millis(retry_after))];
            (Warning, "tenant_throttled", fields)
        }
        Note::TenantEvictions { tenant, share } => {
            (Warning, "tenant_evictions", vec![("tenant", json!(&*tenant)), ("share", rounded(share))])
        }
        Note::Draining => (Info, "draining", Vec::new()),
        Note::Resumed => (Info, "resumed", Vec::new()),
    }
}

fn breaker_event(transition: &Transition) -> (Severity, &'static str, Fields) {
    let (severity, kind) = match transition.to {
        BreakerState::Open => (Severity::Critical, "breaker_opened"),
        // By an operator.
        BreakerState::ForcedOpen => (Severity::Warning, "breaker_opened"),
        BreakerState::HalfOpen => (Severity::Info, "breaker_half_open"),
        BreakerState::Closed => (Severity::Info, "breaker_closed"),
    };
    let fields = vec![
        ("from", json!(transition.from.name())),
        ("to", json!(transition.to.name())),
        ("calls", json!(transition.calls)),
        ("failure_rate", rounded(transition.failure_rate)),
        ("slow_rate", rounded(transition.slow_rate)),
    ];
    (severity, kind, fields)
}

/// A share, to three digits.
fn rounded(share: f64) -> Value {
    json!((share * 1e3).round() / 1e3)
}
