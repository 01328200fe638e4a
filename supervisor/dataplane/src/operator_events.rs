//! Converts notes of policy to events for operators. No text is formatted here, because an event is a value that
//! another thread renders.

use bulkhead_api::{Severity, Text, What, millis};
use bulkhead_policy::{Answer, BreakerState, Death, KillReason, Note, Transition};
use bulkhead_shared::Verdict;

use super::JobData;

/// Returns the event for the end of a job, if the job crashed or exceeded its deadline while running.
pub(super) fn failed_job_event(answer: &Answer<Box<JobData>>) -> Option<What> {
    let Answer { job, cargo, verdict, .. } = answer;
    if !matches!(verdict, Verdict::DeadlineRunning | Verdict::Crashed { .. }) {
        return None;
    }
    let job = job.map(|id| id.to_string());
    let (operation, tenant) = (cargo.operation.to_string(), cargo.tenant.to_string());
    let trace_id = cargo.trace_id().map(|id| id.to_string());
    let (pid, payload_bytes) = (answer.worker_pid, cargo.payload_bytes as u64);
    Some(if *verdict == Verdict::DeadlineRunning {
        What::JobTimeout {
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
        What::JobCrashed {
            job,
            operation,
            tenant,
            trace_id,
            pid,
            payload_bytes,
            reason: verdict.reason().map(|reason| reason.to_owned().into()),
            message: verdict.message().map(str::to_owned),
            attempts: answer.attempts,
        }
    })
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
pub(super) fn describe(note: Note, job_names: Option<(String, String)>) -> (Severity, What) {
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
