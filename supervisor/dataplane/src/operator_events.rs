//! Converts notes of policy to events for operators. No text is formatted here, because an event is a value that
//! another thread renders.

use bulkhead_api::{CrashId, Severity, Text, What, millis};
use bulkhead_plane::command::Event;
use bulkhead_plane::notices::Milestone;
use bulkhead_policy::{Answer, BreakerState, Death, KillReason, Note, Transition};
use bulkhead_shared::{JobId, Verdict};

use super::slab::{BulkheadIndex, CompartmentIndex};
use super::{DataPlane, JobData};

impl DataPlane {
    pub(super) fn report_note(&mut self, compartment: CompartmentIndex, note: Note) {
        self.count_note(compartment, &note);
        if self.reporter.is_quiet && matches!(note, Note::Draining | Note::Resumed | Note::Breaker(_)) {
            return;
        }
        if self.compartments[compartment].is_replay {
            return self.handle_replay_note(compartment, note);
        }
        let dead = match &note {
            Note::WorkerExited { pid, .. } => Some(*pid),
            Note::JobRetried { worker_pid, .. } => *worker_pid,
            _ => None,
        };
        let job_names = match &note {
            Note::JobRetried { job, .. } | Note::JobQuarantined { job, .. } => {
                self.job_names(compartment, *job)
            }
            _ => None,
        };
        let (severity, what) = describe(note, job_names);
        let report = self.reporter.report_about(dead);
        self.event_with_report(severity, Some(compartment), what, report);
        if !self.has_started {
            self.check_started();
        }
    }

    /// Returns the operation and tenant of a job that has just lost its worker or has just crashed.
    fn job_names(&mut self, compartment: CompartmentIndex, job: JobId) -> Option<(String, String)> {
        if let Some(cargo) = self.compartments[compartment].policy.cargo_mut(job) {
            return Some((cargo.operation.to_string(), cargo.tenant.to_string()));
        }
        let (_, operation, tenant) = self.reporter.last_crashed.as_ref().filter(|(id, ..)| *id == job)?;
        Some((operation.to_string(), tenant.to_string()))
    }

    /// Reports a problem of the supervisor itself.
    pub(super) fn report_trouble(&mut self, what: &str, detail: &str) {
        let trouble = What::SupervisorTrouble { what: what.to_owned(), detail: detail.to_owned() };
        self.event(Severity::Critical, None, trouble);
    }

    /// Reports an event of a compartment, or of the supervisor if `compartment` is `None`. The event names the tenant
    /// if the compartment serves a single tenant.
    pub(super) fn event(&mut self, severity: Severity, compartment: Option<CompartmentIndex>, what: What) {
        self.event_with_report(severity, compartment, what, None);
    }

    /// Reports an event with a crash report.
    fn event_with_report(
        &mut self,
        severity: Severity,
        compartment: Option<CompartmentIndex>,
        what: What,
        report: Option<CrashId>,
    ) {
        let bulkhead = compartment.map(|compartment| self.owner(compartment).name.clone());
        let tenant = compartment.and_then(|compartment| self.compartments[compartment].tenant.clone());
        self.reporter.event(Event { tenant, report, ..Event::new(severity, bulkhead, what) });
    }

    /// Reports an event of a whole bulkhead.
    pub(super) fn bulkhead_event(&mut self, severity: Severity, bulkhead: BulkheadIndex, what: What) {
        let bulkhead = self.bulkheads[bulkhead].name.clone();
        self.reporter.event(Event::new(severity, Some(bulkhead), what));
    }

    pub(super) fn check_started(&mut self) {
        if !self.has_started && self.compartments.values().all(|c| c.is_replay || c.policy.has_settled()) {
            self.has_started = true;
            self.reporter.states_have_changed();
            self.reporter.notices.milestone(Milestone::Started);
        }
    }

    /// Reports the event for the end of a job, if the job crashed or exceeded its deadline while running.
    pub(super) fn report_failed_job(&mut self, compartment: CompartmentIndex, answer: &Answer<Box<JobData>>) {
        let Answer { job, cargo, verdict, .. } = answer;
        if !matches!(verdict, Verdict::DeadlineRunning | Verdict::Crashed { .. }) {
            return;
        }
        let job = job.map(|id| id.to_string());
        let (operation, tenant) = (cargo.operation.to_string(), cargo.tenant.to_string());
        let trace_id = cargo.trace_id().map(|id| id.to_string());
        let (pid, payload_bytes) = (answer.worker_pid, cargo.payload_bytes as u64);
        let (what, report) = if *verdict == Verdict::DeadlineRunning {
            let (timeout_ms, actual_duration_ms) =
                (millis(answer.deadline), millis(answer.queued + answer.ran));
            let what = What::JobTimeout {
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
            let what = What::JobCrashed {
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
        self.event_with_report(Severity::Warning, Some(compartment), what, report);
    }
}

/// Returns the exit status or the signal.
fn exit_of(death: Death) -> (Option<i32>, Option<Text>) {
    match death {
        Death::Exit(code) => (Some(code), None),
        Death::Signal(signal) => (None, Some(bulkhead_linux::signals::name(signal).into())),
        // The process is killed in all of these cases.
        Death::Violation(_) | Death::Oom | Death::Overfull => (None, Some("SIGKILL".into())),
    }
}

/// Converts a note to an event. `job_names` contains the operation and tenant of the note's job.
fn describe(note: Note, job_names: Option<(String, String)>) -> (Severity, What) {
    use Severity::{Critical, Info, Warning};
    let (operation, job_tenant) = job_names.unzip();
    match note {
        Note::WorkerStarted { worker, slot, pid } => {
            (Info, What::WorkerStarted { pid, slot, generation: worker.generation })
        }
        Note::WorkerReady { worker, pid, after } => {
            (Info, What::WorkerReady { pid, generation: worker.generation, after_ms: millis(after) })
        }
        Note::WorkerNotStarted { slot, message } => (Critical, What::WorkerNotStarted { slot, message }),
        Note::WorkerExited { worker, slot, pid, death, killed, uptime, served, in_flight } => {
            let is_fine = killed.is_some() || death == Death::Exit(0) && in_flight == 0;
            let (exit_code, signal) = exit_of(death);
            let what = What::WorkerExited {
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
        Note::WorkerKilled { pid, reason } => {
            let (is_hung, reason) = (reason == KillReason::Hung, reason.describe());
            (
                Warning,
                if is_hung { What::WorkerHung { pid, reason } } else { What::WorkerKilled { pid, reason } },
            )
        }
        Note::SpareTookOver { worker, slot, pid } => {
            (Info, What::SpareTookOver { pid, slot, generation: worker.generation })
        }
        Note::WorkerRecycled { pid, reason } => {
            (Info, What::WorkerRecycled { pid, reason: reason.name().into() })
        }
        Note::ReplacementFailed { slot, message, again_in } => {
            let again_in_ms = millis(again_in);
            (Critical, What::ReplacementFailed { slot, message, serves_on: true, again_in_ms })
        }
        Note::RestartBackoff { slot, delay } => {
            (Warning, What::RestartBackoff { slot, delay_ms: millis(delay) })
        }
        Note::BulkheadFailed { message, .. } => (Critical, What::BulkheadFailed { message }),
        Note::JobRetried { job, attempts, crash, worker_pid } => {
            let what = What::JobRetried {
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
        Note::JobQuarantined { job, digest } => {
            let (job, digest) = (job.to_string(), digest.to_string());
            (Warning, What::JobQuarantined { job, digest, operation, tenant: job_tenant })
        }
        Note::Breaker(transition) => breaker_event(&transition),
        Note::QueuePressure { queued, capacity } => {
            let percent = 100 * queued / capacity.max(1);
            (Warning, What::QueuePressure { queued, queue_capacity: capacity, percent })
        }
        Note::TenantThrottled { tenant, retry_after } => {
            let tenant = tenant.map(|tenant| tenant.as_ref().to_owned());
            let limit = format!("rate_limit per {}", if tenant.is_some() { "tenant" } else { "bulkhead" });
            (Warning, What::TenantThrottled { limit, retry_after_ms: millis(retry_after), tenant })
        }
        Note::LimitAdapted { from, to, latency, numbers } => {
            let (latency_ms, target_ms) = (millis(latency), millis(numbers.target));
            let mode = numbers.mode.name().into();
            (
                Info,
                What::LimitAdapted {
                    from,
                    to,
                    latency_ms,
                    target_ms,
                    min: numbers.min,
                    max: numbers.max,
                    mode,
                },
            )
        }
        Note::TenantEvictions { tenant, share } => {
            let tenant = tenant.as_ref().to_owned();
            (Warning, What::TenantEvictions { tenant, share: rounded(share) })
        }
        Note::Draining => (Info, What::Draining { drain_timeout_ms: None }),
        Note::Resumed => (Info, What::Resumed {}),
    }
}

fn breaker_event(transition: &Transition) -> (Severity, What) {
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
            What::BreakerOpened { from, to, calls, failure_rate, slow_rate }
        }
        BreakerState::HalfOpen => What::BreakerHalfOpen { from, to, calls, failure_rate, slow_rate },
        BreakerState::Closed => What::BreakerClosed { from, to, calls, failure_rate, slow_rate },
    };
    (severity, what)
}

/// Rounds a share to three decimals.
fn rounded(share: f64) -> f64 {
    (share * 1e3).round() / 1e3
}
