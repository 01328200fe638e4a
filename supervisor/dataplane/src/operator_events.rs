//! Converts operator events from policy to events of the admin API, and chooses their severity. `wiring/reports.rs` and
//! `wiring/commands.rs` send the events through `reporter`. The control plane formats the events as text.

use bulkhead_api::{EventKind, Severity, Text, millis};
use bulkhead_policy::{BreakerState, Death, JobOutcome, JobView, KillReason, OperatorEvent, Transition};
use bulkhead_shared::Verdict;

use super::JobData;

/// Returns the event for a job that crashed, or that was still running at its deadline.
pub(super) fn failed_job_event(answer: &JobOutcome<Box<JobData>>) -> Option<EventKind> {
    let JobOutcome { job, record, verdict, .. } = answer;
    if !matches!(verdict, Verdict::DeadlineRunning | Verdict::Crashed { .. }) {
        return None;
    }
    let job = job.map(|id| id.to_string());
    let (operation, tenant) = (record.operation.to_string(), record.tenant.to_string());
    let trace_id = record.trace_id().map(|id| id.to_string());
    let (pid, payload_bytes) = (answer.worker_pid, record.payload_bytes as u64);
    Some(if *verdict == Verdict::DeadlineRunning {
        EventKind::JobTimeout {
            job,
            operation,
            tenant,
            trace_id,
            pid,
            payload_bytes,
            timeout_ms: millis(answer.deadline),
            run_limit_ms: answer.run_limit.map(millis),
            actual_duration_ms: millis(answer.queued + answer.ran),
        }
    } else {
        EventKind::JobCrashed {
            job,
            operation,
            tenant,
            trace_id,
            pid,
            payload_bytes,
            reason: verdict.reason().map(|reason| reason.to_owned().into()),
            message: verdict.message().map(str::to_owned),
            attempts: record.earlier_attempts + answer.attempts,
        }
    })
}

/// Returns the event about a job cancelled by an operator.
pub(super) fn job_cancelled_event(view: &JobView<'_, Box<JobData>>) -> EventKind {
    let record = view.record;
    EventKind::JobCancelled {
        job: view.id.to_string(),
        operation: record.operation.to_string(),
        tenant: record.tenant.to_string(),
        trace_id: record.trace_id().map(str::to_owned),
        pid: view.worker_pid,
        state: view.progress.into(),
    }
}

/// Returns an event if an operator's command has forced a breaker open or released it. Returns `None` if the command
/// changed nothing.
pub(super) fn forced_breaker_event(was_open: bool, is_open: bool) -> Option<(Severity, EventKind)> {
    let (closed, forced) = (BreakerState::Closed.into(), BreakerState::ForcedOpen.into());
    let (calls, failure_rate, slow_rate) = (None, None, None);
    Some(match (was_open, is_open) {
        (false, true) => {
            let what = EventKind::BreakerOpened { from: closed, to: forced, calls, failure_rate, slow_rate };
            (Severity::Warning, what)
        }
        (true, false) => {
            let what = EventKind::BreakerClosed { from: forced, to: closed, calls, failure_rate, slow_rate };
            (Severity::Info, what)
        }
        _ => return None,
    })
}

/// Returns the exit status of a process, or the signal that killed it.
fn exit_of(death: Death) -> (Option<i32>, Option<Text>) {
    match death {
        Death::Exit(code) => (Some(code), None),
        Death::Signal(signal) => (None, Some(bulkhead_linux::signals::name(signal).into())),
        // In each of these cases, the process was killed with SIGKILL.
        Death::Violation(_) | Death::Oom | Death::TmpFull => (None, Some("SIGKILL".into())),
    }
}

/// Converts an operator event from policy. If the event is about a job, `job_names` contains the job's operation
/// and tenant.
pub(super) fn describe(note: OperatorEvent, job_names: Option<(String, String)>) -> (Severity, EventKind) {
    use Severity::{Critical, Info, Warning};
    let (operation, job_tenant) = job_names.unzip();
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
        OperatorEvent::WorkerExited { worker, slot, pid, ending, uptime, served, in_flight } => {
            let is_fine = ending.killed.is_some() || ending.is_clean() && in_flight == 0;
            let (exit_code, signal) = exit_of(ending.death);
            let what = EventKind::WorkerExited {
                pid,
                slot,
                generation: worker.generation,
                exit_code,
                signal,
                killed: ending.killed.map(|reason| reason.describe()),
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
            let again_in_ms = retry_in.map(millis);
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
        // Not critical, because an operator has deliberately forced the breaker open.
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

/// Rounds a fraction to three decimal places.
fn rounded(share: f64) -> f64 {
    (share * 1e3).round() / 1e3
}
