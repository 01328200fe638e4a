//! Decides what to do with a delivered message, depending on the job's record. `handling` applies the decision, and
//! `outcome` decides what follows an attempt. No I/O happens here.

use std::time::Duration;

use bulkhead_shared::{CrashReason, Executed, Outcome, Verdict};
use bytes::Bytes;

use super::{Message, RETURN_DELAY_MIN, Rules, Terms, Timestamp};
use crate::record::{Delivery, Ending, Phase, Stored};

/// The next step for a delivered message.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// Claim the job, then submit it to the supervisor.
    Claim {
        /// Sequence number that the current record must have, or 0 if there must be no record.
        expects: u64,
        /// Number of attempts, including the new one.
        attempts: u32,
        /// Outcome of the previous attempt.
        previous: Option<Outcome>,
    },
    /// Record an outcome without running the job.
    Decide {
        /// Sequence number that the current record must have, or 0 if there must be no record.
        expects: u64,
        /// Number of counted attempts.
        attempts: u32,
        /// Outcome of the job.
        ending: Ending,
    },
    /// Leave the job to the agent that holds it, and request redelivery of the message after this delay.
    Leave(Duration),
    /// Do nothing, because a later delivery of the message has been returned. A claim with the outdated number of
    /// deliveries would look lost as soon as the message is delivered again.
    Ignore,
    /// Repeat the steps that follow the recording of an outcome: notice, dead letter and acknowledgement.
    Finish {
        /// Outcome of the job.
        ending: Ending,
        /// True if another message with the same ID led to the outcome. The handling of that message stores the dead
        /// letter. An operator might have removed the letter since then.
        is_copy: bool,
    },
}

/// Returns the next step for a delivered message.
pub fn decide(
    message: &Message,
    terms: &Terms,
    rules: &Rules,
    stored: Option<&Stored>,
    now: Timestamp,
) -> Next {
    let Some(Stored { sequence, record }) = stored else {
        return first_run(message, terms, now, 0, 0, None);
    };
    match &record.phase {
        Phase::Decided { ending, stream_sequence } => {
            let is_copy = stream_sequence.is_some_and(|sequence| sequence != message.stream_sequence);
            let is_copy = is_copy && !rules.faults.restores_dead_letters;
            Next::Finish { ending: ending.clone(), is_copy }
        }
        Phase::Returned { delivery: Some(returned), .. } if is_outdated(message, *returned) => Next::Ignore,
        Phase::Returned { previous, .. } => {
            first_run(message, terms, now, *sequence, record.attempts, Some(previous))
        }
        Phase::Claimed { stream_sequence, .. } if *stream_sequence != message.stream_sequence => {
            Next::Leave(rules.host_lost_after)
        }
        Phase::Claimed { delivery, .. } if !is_lost(*delivery, message.delivery, rules) => {
            Next::Leave(rules.ack_wait)
        }
        Phase::Claimed { .. } => {
            let is_repeatable = terms.is_idempotent && record.attempts < rules.attempts_max;
            if is_repeatable && !terms.time_left(message, now).is_zero() {
                let previous = Some(host_lost(terms, record.attempts));
                Next::Claim { expects: *sequence, attempts: record.attempts + 1, previous }
            } else {
                let outcome = host_lost(terms, record.attempts);
                decided(*sequence, record.attempts, outcome)
            }
        }
    }
}

/// Returns the next step for a message whose record cannot be decoded. Such a job must not run, because it may have run
/// already. Before the deadline, another agent might be able to decode the record, for example one of a later version.
/// After the deadline, the record is replaced, unless it contains a final outcome.
pub fn decide_unreadable(
    message: &Message,
    terms: &Terms,
    rules: &Rules,
    (sequence, is_decided): (u64, bool),
    now: Timestamp,
) -> Next {
    if rules.faults.claims_despite_unreadable_record {
        return Next::Claim { expects: sequence, attempts: 1, previous: None };
    }
    let left = terms.time_left(message, now);
    if is_decided {
        return Next::Leave(rules.host_lost_after);
    }
    if !left.is_zero() {
        return Next::Leave(left.min(rules.host_lost_after).max(RETURN_DELAY_MIN));
    }
    let message = "the job's record could not be read".to_owned();
    let verdict = Verdict::Crashed { reason: CrashReason::HostLost, status: None, message };
    decided(sequence, 0, outcome(terms, verdict, 0))
}

/// Maximum distance between an outdated delivery and the delivery that was returned. The numbers of deliveries begin at
/// 1 again if the consumer is created again, and such deliveries must not be ignored for long.
const OUTDATED_MAX: u64 = 16;

/// Returns true if the job was returned after a later delivery of the message.
fn is_outdated(message: &Message, returned: Delivery) -> bool {
    let behind = returned.number.saturating_sub(message.delivery);
    returned.stream_sequence == message.stream_sequence && (1..=OUTDATED_MAX).contains(&behind)
}

/// Returns true if the agent that holds the claim is considered lost. The first redelivery of the message is ignored,
/// because a server outage causes one redelivery of every message, although the agents are alive.
fn is_lost(claimed: u64, delivered: u64, rules: &Rules) -> bool {
    let later = if rules.faults.takes_over_at_first_redelivery { 1 } else { 2 };
    delivered >= claimed + later
}

fn first_run(
    message: &Message,
    terms: &Terms,
    now: Timestamp,
    expects: u64,
    attempts: u32,
    previous: Option<&Outcome>,
) -> Next {
    if terms.time_left(message, now).is_zero() {
        let outcome = previous.cloned().unwrap_or_else(|| too_late(terms));
        return decided(expects, attempts, outcome);
    }
    Next::Claim { expects, attempts: attempts + 1, previous: previous.cloned() }
}

fn decided(expects: u64, attempts: u32, outcome: Outcome) -> Next {
    Next::Decide { expects, attempts, ending: Ending { outcome, payload: Bytes::new() } }
}

/// Returns the outcome of a job whose deadline passed before it ran.
pub fn too_late(terms: &Terms) -> Outcome {
    outcome(terms, Verdict::DeadlineQueued, 0)
}

/// Returns the outcome of a job whose host was lost while the job was running.
pub fn host_lost(terms: &Terms, attempts: u32) -> Outcome {
    let message = "the host was lost before the job ended".to_owned();
    outcome(terms, Verdict::Crashed { reason: CrashReason::HostLost, status: None, message }, attempts)
}

/// Creates the outcome of a job if the supervisor has not reported one.
pub(crate) fn outcome(terms: &Terms, verdict: Verdict, attempts: u32) -> Outcome {
    Outcome {
        retryable: verdict.is_retryable(terms.is_idempotent),
        verdict,
        job: None,
        bulkhead: terms.bulkhead.clone(),
        attempts,
        queued: Duration::ZERO,
        ran: Duration::ZERO,
        worker_pid: None,
        retry_after: None,
        deadline: terms.deadline,
        run_limit: None,
        status: None,
        report: None,
    }
}

/// Returns true if the job may have begun in an attempt with this outcome.
pub(crate) fn may_have_begun(outcome: &Outcome) -> bool {
    outcome.verdict.executed() != Executed::No
}
