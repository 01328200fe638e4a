//! Converts notes of policy to events for operators. No text is formatted here, because an event is a value that
//! another thread renders.

use bulkhead_api::{CrashId, EventKind, Severity, Text, millis};
use bulkhead_plane::command::Event;
use bulkhead_plane::notices::Milestone;
use bulkhead_policy::{BreakerState, Death, JobOutcome, KillReason, OperatorEvent, Transition};
use bulkhead_shared::{JobId, Verdict};

use super::slab::{BulkheadIndex, CompartmentIndex};
use super::{DataPlane, JobData};

impl DataPlane {
    pub(super) fn note(&mut self, compartment: CompartmentIndex, note: OperatorEvent) {
        self.count_note(compartment, &note);
        if self.reporter.is_quiet
            && matches!(note, OperatorEvent::Draining | OperatorEvent::Resumed | OperatorEvent::Breaker(_))
        {
            return;
        }
        if self.compartments[compartment].is_replay {
            return self.note_replay(compartment, note);
        }
        let dead = match &note {
            OperatorEvent::WorkerExited { pid, .. } => Some(*pid),
            OperatorEvent::JobRetried { worker_pid, .. } => *worker_pid,
            _ => None,
        };
        let whose = match &note {
            OperatorEvent::JobRetried { job, .. } | OperatorEvent::JobQuarantined { job, .. } => {
                self.whose(compartment, *job)
            }
            _ => None,
        };
        let (severity, what) = describe(note, whose);
        let report = self.reporter.report_about(dead);
        self.event_reported(severity, Some(compartment), what, report);
        if !self.started {
            self.check_started();
        }
    }

    /// Returns the operation and tenant of a job that has just lost its worker or has just crashed.
    fn whose(&mut self, compartment: CompartmentIndex, job: JobId) -> Option<(String, String)> {
        if let Some(record) = self.compartments[compartment].policy.record_mut(job) {
            return Some((record.operation.to_string(), record.tenant.to_string()));
        }
        let (_, operation, tenant) = self.reporter.last_crashed.as_ref().filter(|(id, ..)| *id == job)?;
        Some((operation.to_string(), tenant.to_string()))
    }

    /// Reports a problem of the supervisor itself.
    pub(super) fn note_trouble(&mut self, what: &str, detail: &str) {
        let trouble = EventKind::SupervisorTrouble { what: what.to_owned(), detail: detail.to_owned() };
        self.event(Severity::Critical, None, trouble);
    }

    /// Reports an event of a compartment, or of the supervisor if `compartment` is `None`. The event names the tenant
    /// if the compartment serves a single tenant.
    pub(super) fn event(
        &mut self,
        severity: Severity,
        compartment: Option<CompartmentIndex>,
        what: EventKind,
    ) {
        self.event_reported(severity, compartment, what, None);
    }

    /// Reports an event with a crash report.
    fn event_reported(
        &mut self,
        severity: Severity,
        compartment: Option<CompartmentIndex>,
        what: EventKind,
        report: Option<CrashId>,
    ) {
        let bulkhead = compartment.map(|compartment| self.owner(compartment).name.clone());
        let tenant = compartment.and_then(|compartment| self.compartments[compartment].tenant.clone());
        self.reporter.event(Event { tenant, report, ..Event::new(severity, bulkhead, what) });
    }

    /// Reports an event of a whole bulkhead.
    pub(super) fn bulkhead_event(&mut self, severity: Severity, bulkhead: BulkheadIndex, what: EventKind) {
        let bulkhead = self.bulkheads[bulkhead].name.clone();
        self.reporter.event(Event::new(severity, Some(bulkhead), what));
    }

    pub(super) fn check_started(&mut self) {
        if !self.started && self.compartments.values().all(|c| c.is_replay || c.policy.has_settled()) {
            self.started = true;
            self.reporter.states_have_changed();
            self.reporter.notices.send_milestone(Milestone::Started);
        }
    }

    /// Reports the event for the end of a job, if the job crashed or exceeded its deadline while running.
    pub(super) fn note_answer(&mut self, compartment: CompartmentIndex, answer: &JobOutcome<Box<JobData>>) {
        let JobOutcome { job, record, verdict, .. } = answer;
        if !matches!(verdict, Verdict::DeadlineRunning | Verdict::Crashed { .. }) {
            return;
        }
        let job = job.map(|id| id.to_string());
        let (operation, tenant) = (record.operation.to_string(), record.tenant.to_string());
        let trace_id = record.trace_id().map(|id| id.to_string());
        let (pid, payload_bytes) = (answer.worker_pid, record.payload_bytes as u64);
        let (what, report) = if *verdict == Verdict::DeadlineRunning {
            let (timeout_ms, actual_duration_ms) =
                (millis(answer.deadline), millis(answer.queued + answer.ran));
            let what = EventKind::JobTimeout {
                job,
                operation,
                tenant,
                trace_id,
                pid,
                payload_bytes,
                timeout_ms,
                run_limit_ms: answer.run_limit.map(millis),
                actual_duration_ms,
            };
            (what, None)
        } else {
            let reason = verdict.reason().map(|reason| reason.to_owned().into());
            let message = verdict.message().map(str::to_owned);
            let attempts = answer.attempts;
            let what = EventKind::JobCrashed {
                job,
                operation,
                tenant,
                trace_id,
                pid,
                payload_bytes,
                reason,
                message,
                attempts,
            };
            (what, self.reporter.report_about(pid))
        };
        self.event_reported(Severity::Warning, Some(compartment), what, report);
    }
}

/// Returns the exit status or the signal.
fn end_of(death: Death) -> (Option<i32>, Option<Text>) {
    match death {
        Death::Exit(code) => (Some(code), None),
        Death::Signal(signal) => (None, Some(bulkhead_linux::signals::name(signal).into())),
        // The process is killed in all of these cases.
        Death::Violation(_) | Death::Oom | Death::TmpFull => (None, Some("SIGKILL".into())),
    }
}

/// Converts a note to an event. `whose` contains the operation and tenant of the note's job.
fn describe(note: OperatorEvent, whose: Option<(String, String)>) -> (Severity, EventKind) {
    use Severity::{Critical, Info, Warning};
    let (operation, job_tenant) = whose.unzip();
    match note {
        OperatorEvent::WorkerStarted { worker, slot, pid } => {
            (Info, EventKind::WorkerStarted { pid, slot, generation: worker.generation })
        }
        OperatorEvent::WorkerReady { worker, pid, after } => {
            (Info, EventKind::WorkerReady { pid, generation: worker.generation, after_ms: millis(after) })
        }
        OperatorEvent::WorkerNotStarted { slot, message } => {
            (Critical, EventKind::WorkerNotStarted { slot, message })
        }
        OperatorEvent::WorkerExited { worker, slot, pid, death, killed, uptime, served, in_flight } => {
            let is_fine = killed.is_some() || death == Death::Exit(0) && in_flight == 0;
            let (exit_code, signal) = end_of(death);
            let what = EventKind::WorkerExited {
                pid,
                slot,
                generation: worker.generation,
                exit_code,
                signal,
                killed: killed.map(|reason| reason.describe()),
                uptime_ms: millis(uptime),
                served,
                in_flight,
            };
            (if is_fine { Info } else { Warning }, what)
        }
        OperatorEvent::WorkerKilled { pid, reason } => {
            let (is_hung, reason) = (reason == KillReason::Hung, reason.describe());
            (
                Warning,
                if is_hung {
                    EventKind::WorkerHung { pid, reason }
                } else {
                    EventKind::WorkerKilled { pid, reason }
                },
            )
        }
        OperatorEvent::SpareTookOver { worker, slot, pid } => {
            (Info, EventKind::SpareTookOver { pid, slot, generation: worker.generation })
        }
        OperatorEvent::WorkerRecycled { pid, reason } => {
            (Info, EventKind::WorkerRecycled { pid, reason: reason.name().into() })
        }
        OperatorEvent::ReplacementFailed { slot, message, retry_in } => {
            let again_in_ms = millis(retry_in);
            (Critical, EventKind::ReplacementFailed { slot, message, serves_on: true, again_in_ms })
        }
        OperatorEvent::RestartBackoff { slot, delay } => {
            (Warning, EventKind::RestartBackoff { slot, delay_ms: millis(delay) })
        }
        OperatorEvent::BulkheadFailed { message, .. } => (Critical, EventKind::BulkheadFailed { message }),
        OperatorEvent::JobRetried { job, attempts, crash, worker_pid } => {
            let what = EventKind::JobRetried {
                job: job.to_string(),
                attempts,
                pid: worker_pid,
                reason: crash.reason().map(|reason| reason.to_owned().into()),
                message: crash.message().map(str::to_owned),
                operation,
                tenant: job_tenant,
            };
            (Warning, what)
        }
        OperatorEvent::JobQuarantined { job, digest } => {
            let (job, digest) = (job.to_string(), digest.to_string());
            (Warning, EventKind::JobQuarantined { job, digest, operation, tenant: job_tenant })
        }
        OperatorEvent::Breaker(transition) => breaker_event(&transition),
        OperatorEvent::QueuePressure { queued, capacity } => {
            let percent = 100 * queued / capacity.max(1);
            (Warning, EventKind::QueuePressure { queued, queue_capacity: capacity, percent })
        }
        OperatorEvent::TenantThrottled { tenant, retry_after } => {
            let tenant = tenant.map(|tenant| tenant.as_ref().to_owned());
            let limit = format!("rate_limit per {}", if tenant.is_some() { "tenant" } else { "bulkhead" });
            (Warning, EventKind::TenantThrottled { limit, retry_after_ms: millis(retry_after), tenant })
        }
        OperatorEvent::LimitAdapted { from, to, latency, limits } => {
            let (latency_ms, target_ms) = (millis(latency), millis(limits.target));
            let mode = limits.mode.name().into();
            (
                Info,
                EventKind::LimitAdapted {
                    from,
                    to,
                    latency_ms,
                    target_ms,
                    min: limits.min,
                    max: limits.max,
                    mode,
                },
            )
        }
        OperatorEvent::TenantEvictions { tenant, share } => {
            let tenant = tenant.as_ref().to_owned();
            (Warning, EventKind::TenantEvictions { tenant, share: rounded(share) })
        }
        OperatorEvent::Draining => (Info, EventKind::Draining { drain_timeout_ms: None }),
        OperatorEvent::Resumed => (Info, EventKind::Resumed {}),
    }
}

fn breaker_event(transition: &Transition) -> (Severity, EventKind) {
    let (from, to, calls) = (transition.from.into(), transition.to.into(), Some(transition.calls));
    let [failure_rate, slow_rate] =
        [transition.failure_rate, transition.slow_rate].map(|rate| Some(rounded(rate)));
    let severity = match transition.to {
        BreakerState::Open => Severity::Critical,
        // An operator has ordered this.
        BreakerState::ForcedOpen => Severity::Warning,
        BreakerState::HalfOpen | BreakerState::Closed => Severity::Info,
    };
    let what = match transition.to {
        BreakerState::Open | BreakerState::ForcedOpen => {
            EventKind::BreakerOpened { from, to, calls, failure_rate, slow_rate }
        }
        BreakerState::HalfOpen => EventKind::BreakerHalfOpen { from, to, calls, failure_rate, slow_rate },
        BreakerState::Closed => EventKind::BreakerClosed { from, to, calls, failure_rate, slow_rate },
    };
    (severity, what)
}

/// Rounds a share to three decimals.
fn rounded(share: f64) -> f64 {
    (share * 1e3).round() / 1e3
}
