//! Decides what to do after an attempt, based on the outcome that the supervisor reported. `handling` applies the
//! decision. `delivery` decides whether a delivered message leads to an attempt.

use std::time::Duration;

use bulkhead_shared::outcome::RESULT_TOO_LARGE;
use bulkhead_shared::{Executed, Fault, HandlerFailure, Outcome, RejectReason, Verdict};
use bytes::Bytes;

use super::delivery::{host_lost, may_have_begun, outcome};
use super::{Message, RETURN_DELAY_MAX, RETURN_DELAY_MIN, Rules, Terms, Timestamp};
use crate::record::Ending;

/// Delay before the second attempt to run a job.
const RERUN_DELAY_MIN: Duration = Duration::from_secs(1);
/// Maximum time for which the agent pulls no jobs after a job has exceeded a rate limit that all tenants share.
const RATE_LIMIT_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Maximum value of [`tenant_full_delay`].
const TENANT_FULL_DELAY_MAX: Duration = Duration::from_secs(4);

/// Result of an attempt to run a job.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "each attempt's result is moved only twice")]
pub enum AttemptEnd {
    /// The supervisor reported an outcome.
    Reported(Ending),
    /// The connection to the supervisor failed during the attempt.
    Disconnected {
        /// Whether the job had begun when the connection failed.
        executed: Executed,
    },
}

/// The claim under which the agent attempted to run the job.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// Number of attempts that count towards the limit, including this one.
    pub attempts: u32,
    /// Outcome of the previous attempt.
    pub previous: Option<Outcome>,
}

/// Pause in an agent's work after a supervisor has rejected a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// The rejection concerns only the job or its tenant.
    None,
    /// The supervisor cannot run as many jobs as the agent has permits. The job's permit stays in use for this time.
    Permit(Duration),
    /// The supervisor accepts no jobs at all. The agent pulls no jobs for the bulkhead for this time.
    Pulls(Duration),
}

/// Decision that follows from the outcome of an attempt.
#[derive(Clone, Debug, PartialEq)]
pub enum Consequence {
    /// The outcome is final.
    Decide(Ending),
    /// The job is returned to the queue for another attempt.
    Return {
        /// Number of counted attempts.
        attempts: u32,
        /// Outcome to report if there are no further attempts.
        previous: Outcome,
        /// Delay before the message is redelivered.
        delay: Duration,
        /// Pause before the agent takes another job in place of this one.
        pause: Pause,
    },
}

/// Decides what happens after an attempt. `jitter` is a random number from 0 to 1.
pub fn decide(
    message: &Message,
    terms: &Terms,
    rules: &Rules,
    claim: &Claim,
    end: AttemptEnd,
    now: Timestamp,
    jitter: f64,
) -> Consequence {
    let ending = match end {
        AttemptEnd::Reported(ending) => ending,
        AttemptEnd::Disconnected { executed: Executed::No } => {
            // An unreachable supervisor affects all tenants.
            let rules = Rules { is_isolated: false, ..rules.clone() };
            return not_begun((message, terms, &rules), claim, not_sent(terms), jitter);
        }
        AttemptEnd::Disconnected { .. } => {
            Ending { outcome: host_lost(terms, claim.attempts), payload: Bytes::new() }
        }
    };
    let ending = within_size(terms, rules, ending);
    let has_time = !terms.time_left(message, now).is_zero();
    match &ending.outcome.verdict {
        Verdict::Rejected { reason, .. } if is_returned(*reason) => {
            not_begun((message, terms, rules), claim, ending.outcome, jitter)
        }
        // If the run limit is too short for a worker to begin the job, further attempts would end in the same way.
        Verdict::DeadlineQueued if has_time && !is_run_limit_too_short(&ending.outcome) => {
            not_begun((message, terms, rules), claim, ending.outcome, jitter)
        }
        _ if is_repeated(&ending.outcome) && terms.is_idempotent && has_time => {
            if claim.attempts >= rules.attempts_max {
                return Consequence::Decide(with_history(claim, ending));
            }
            let delay = backoff(RERUN_DELAY_MIN, claim.attempts.into(), jitter);
            let previous = with_history(claim, ending).outcome;
            Consequence::Return { attempts: claim.attempts, previous, delay, pause: Pause::None }
        }
        _ => Consequence::Decide(with_history(claim, ending)),
    }
}

/// Returns true if another host or a later attempt could accept the job.
fn is_returned(reason: RejectReason) -> bool {
    reason.is_retryable() || reason == RejectReason::NotFound
}

/// Returns true if an idempotent job could have a different outcome in another attempt.
fn is_repeated(outcome: &Outcome) -> bool {
    match &outcome.verdict {
        Verdict::Failed(failure) => failure.retryable,
        Verdict::Crashed { .. } | Verdict::DeadlineRunning => true,
        _ => false,
    }
}

/// Returns the decision to requeue a job that has not begun. The attempt is not counted.
fn not_begun(
    (message, terms, rules): (&Message, &Terms, &Rules),
    claim: &Claim,
    reported: Outcome,
    jitter: f64,
) -> Consequence {
    // Each rejection at most doubles the delay. The number of deliveries would be misleading, because it also grows
    // when an agent without a free permit returns the message.
    let is_rejected = |last: &Outcome| matches!(last.verdict, Verdict::Rejected { .. });
    let last_delay =
        claim.previous.as_ref().filter(|last| is_rejected(last)).and_then(|last| last.retry_after);
    let max = last_delay.unwrap_or_default().saturating_mul(2).max(RETURN_DELAY_MIN);
    let growing = backoff(RETURN_DELAY_MIN, message.delivery, jitter).min(max);
    let (delay, pause) = delay_and_pause(growing, rules, &reported, jitter);
    let ending = Ending { outcome: reported, payload: Bytes::new() };
    let mut previous = with_history(claim, ending).outcome;
    previous.deadline = terms.deadline;
    if let Verdict::Rejected { reason: RejectReason::RateLimited | RejectReason::TenantQuota, .. } =
        previous.verdict
    {
        previous.retry_after = previous.retry_after.max(Some(delay));
    }
    let attempts = claim.attempts.saturating_sub(1);
    Consequence::Return { attempts, previous, delay, pause }
}

/// Returns true if the supervisor ended the job before its deadline, because the job's run limit expired too often
/// before a worker began the job.
fn is_run_limit_too_short(outcome: &Outcome) -> bool {
    outcome.run_limit.is_some() && outcome.queued + outcome.ran < outcome.deadline / 2
}

/// Returns the delay before a job that has not begun is delivered again, and the agent's pause.
fn delay_and_pause(growing: Duration, rules: &Rules, reported: &Outcome, jitter: f64) -> (Duration, Pause) {
    use RejectReason::{
        Backpressure, Draining, Evicted, NotFound, Overloaded, QueueFull, QueueTimeout, RateLimited, Shed,
        TenantQuota,
    };
    let asked = reported.retry_after.unwrap_or_default().clamp(RETURN_DELAY_MIN, RETURN_DELAY_MAX);
    let asked = with_jitter(asked, jitter);
    // The delay grows, so that a tenant with many waiting jobs does not keep the agents busy with futile attempts.
    let growing = asked.max(growing);
    let not_ready = match rules.is_isolated {
        // Another host might be ready. This agent keeps the tenant's permit in use, so that the agent does not take
        // other jobs of the tenant.
        true => (with_jitter(RETURN_DELAY_MIN, jitter), Pause::Permit(asked)),
        false => (asked, Pause::Pulls(asked)),
    };
    let reason = match &reported.verdict {
        Verdict::Rejected { reason, .. } => *reason,
        // The job's deadline has passed in the supervisor's queue.
        _ => return not_ready,
    };
    match reason {
        // The pause is shorter than the delay, because a job with a lower cost might be accepted sooner.
        RateLimited if rules.is_rate_limit_shared => (asked, Pause::Pulls(asked.min(RATE_LIMIT_PAUSE_MAX))),
        NotFound | Draining => (asked, Pause::Pulls(asked)),
        // The tenant has used up its own share. Other tenants must not wait, so pulls continue.
        RateLimited | TenantQuota => (growing, Pause::None),
        // Some permits may be reserved for critical jobs or used by other clients. The other permits stay usable.
        Backpressure | QueueFull | QueueTimeout | Shed | Evicted | Overloaded => {
            (asked, Pause::Permit(asked))
        }
        _ => not_ready,
    }
}

fn not_sent(terms: &Terms) -> Outcome {
    let message = "no supervisor could be reached".to_owned();
    outcome(terms, Verdict::Rejected { reason: RejectReason::Unavailable, message }, 0)
}

/// Replaces a result with an error if the result is too large for the server.
fn within_size(terms: &Terms, rules: &Rules, ending: Ending) -> Ending {
    if ending.payload.len() > rules.result_bytes_max { too_large(terms, rules, ending) } else { ending }
}

/// Returns an error in place of a result that the server does not accept.
pub(super) fn too_large(terms: &Terms, rules: &Rules, ending: Ending) -> Ending {
    let (bytes, max) = (ending.payload.len(), rules.result_bytes_max);
    let message = match bytes > max {
        true => format!("the result has {bytes} bytes; the fleet's server accepts at most {max}"),
        false => format!("the result has {bytes} bytes, which is too large for the fleet's server"),
    };
    let failure = HandlerFailure {
        code: RESULT_TOO_LARGE.to_owned(),
        message,
        retryable: false,
        fault: Fault::Dependency,
    };
    let verdict = Verdict::Failed(failure);
    let retryable = verdict.is_retryable(terms.is_idempotent);
    Ending { outcome: Outcome { verdict, retryable, ..ending.outcome }, payload: Bytes::new() }
}

/// Adds the history of earlier attempts. The final outcome must not claim that the job never ran. If the job did not
/// begin in the last attempt but may have begun in an earlier one, the earlier outcome is therefore used.
fn with_history(claim: &Claim, ending: Ending) -> Ending {
    let Some(previous) = &claim.previous else { return ending };
    if !may_have_begun(&ending.outcome) && may_have_begun(previous) {
        return Ending { outcome: previous.clone(), payload: Bytes::new() };
    }
    let attempts = ending.outcome.attempts.saturating_add(previous.attempts);
    Ending { outcome: Outcome { attempts, ..ending.outcome }, payload: ending.payload }
}

/// Returns the delay before a job whose tenant has no free permit is delivered again. The delay grows with the number
/// of deliveries, because the server delivers returned messages before those that have not been delivered yet.
pub fn tenant_full_delay(deliveries: u64, jitter: f64) -> Duration {
    backoff(RETURN_DELAY_MIN, deliveries, jitter).min(TENANT_FULL_DELAY_MAX)
}

/// Returns the delay after the given number of attempts. The delay starts at `first` and doubles with each further
/// attempt, up to a limit.
fn backoff(first: Duration, attempts: u64, jitter: f64) -> Duration {
    let doublings = attempts.saturating_sub(1).min(8) as u32;
    with_jitter((first * 2u32.pow(doublings)).min(RETURN_DELAY_MAX), jitter)
}

/// Adds random jitter of up to a fifth of the delay, so that returned jobs are not all redelivered at once.
fn with_jitter(delay: Duration, jitter: f64) -> Duration {
    delay.mul_f64(1.0 + 0.2 * jitter.clamp(0.0, 1.0))
}
