//! Tests each row of the decision tables.

use std::time::Duration;

use bulkhead_shared::{CrashReason, Executed, Fault, HandlerFailure, Outcome, RejectReason, Verdict};
use bytes::Bytes;

use super::delivery::{self, Next, host_lost, too_late};
use super::outcome::{self, AttemptEnd, Claim, Consequence, Pause};
use super::*;
use crate::record::{Delivery, Ending, Phase, ReadError, Record, Stored};

const ACK_WAIT: Duration = Duration::from_secs(10);
const HOST_LOST_AFTER: Duration = Duration::from_secs(20);
const PUBLISHED: Duration = Duration::from_secs(1_000_000);
/// A time before the deadline.
const IN_TIME: Duration = Duration::from_secs(1_000_010);
/// A time after the deadline.
const LATE: Duration = Duration::from_secs(1_000_060);

fn rules() -> Rules {
    let (ack_wait, host_lost_after) = (ACK_WAIT, HOST_LOST_AFTER);
    Rules {
        ack_wait,
        host_lost_after,
        attempts_max: 3,
        result_bytes_max: 100,
        is_rate_limit_shared: false,
        is_isolated: false,
        faults: Faults::default(),
    }
}

fn terms(is_idempotent: bool) -> Terms {
    Terms { bulkhead: "b".into(), deadline: Duration::from_secs(60), is_idempotent }
}

fn message(delivery: u64) -> Message {
    Message { stream_sequence: 7, delivery, published: PUBLISHED }
}

fn verdict(verdict: Verdict) -> Outcome {
    delivery::outcome(&terms(false), verdict, 1)
}

fn crashed() -> Outcome {
    verdict(Verdict::Crashed { reason: CrashReason::Signal, status: Some(9), message: String::new() })
}

fn rejected(reason: RejectReason) -> Outcome {
    verdict(Verdict::rejected(reason))
}

fn failed(retryable: bool) -> Outcome {
    let (code, message) = ("c".to_owned(), "m".to_owned());
    verdict(Verdict::Failed(HandlerFailure { code, message, retryable, fault: Fault::Dependency }))
}

fn ending(outcome: Outcome) -> Ending {
    Ending { outcome, payload: Bytes::new() }
}

fn stored(phase: Phase) -> Stored {
    let record = Record { nonce: "n".into(), agent: "other".into(), attempts: 1, phase };
    Stored { sequence: 42, record }
}

fn claimed(stream_sequence: u64, delivery: u64) -> Stored {
    stored(Phase::Claimed { stream_sequence, delivery, previous: None })
}

/// Returns the phase of a job that has crashed and was returned after the given delivery.
fn returned(number: u64) -> Phase {
    Phase::Returned { previous: crashed(), delivery: Some(Delivery { stream_sequence: 7, number }) }
}

fn read_failed() -> Result<Option<Stored>, ReadError> {
    Err(ReadError::Failed(String::new()))
}

fn unreadable(sequence: u64) -> Result<Option<Stored>, ReadError> {
    Err(ReadError::Unreadable { sequence, is_decided: false, message: String::new() })
}

/// Returns the decision for delivery number `delivered` of a message.
fn on(delivered: u64, is_idempotent: bool, stored: Option<&Stored>, now: Duration) -> Next {
    delivery::decide(&message(delivered), &terms(is_idempotent), &rules(), stored, now)
}

#[test]
fn new_job_is_claimed() {
    let next = on(1, false, None, IN_TIME);
    assert_eq!(next, Next::Claim { expects: 0, attempts: 1, previous: None });
}

#[test]
fn returned_job_is_claimed_with_its_history() {
    let record = stored(returned(2));
    let next = on(3, false, Some(&record), IN_TIME);
    assert_eq!(next, Next::Claim { expects: 42, attempts: 2, previous: Some(crashed()) });
}

#[test]
fn outdated_delivery_of_a_returned_job_is_ignored() {
    for now in [IN_TIME, LATE] {
        assert_eq!(on(2, false, Some(&stored(returned(3))), now), Next::Ignore);
    }
    let next = on(2, false, Some(&stored(returned(120))), IN_TIME);
    assert!(matches!(next, Next::Claim { .. }), "deliveries of a new consumer begin at 1: {next:?}");
    let mut copy = message(2);
    copy.stream_sequence = 8;
    let next = delivery::decide(&copy, &terms(false), &rules(), Some(&stored(returned(3))), IN_TIME);
    assert!(matches!(next, Next::Claim { .. }), "{next:?}");
}

#[test]
fn expired_job_ends_as_deadline_exceeded() {
    let decided = ending(too_late(&terms(false)));
    assert_eq!(on(1, false, None, LATE), Next::Decide { expects: 0, attempts: 0, ending: decided });
}

#[test]
fn expired_returned_job_keeps_its_last_outcome() {
    let record = stored(returned(2));
    let next = on(2, true, Some(&record), LATE);
    assert_eq!(next, Next::Decide { expects: 42, attempts: 1, ending: ending(crashed()) });
}

#[test]
fn claim_survives_the_first_redelivery() {
    for is_idempotent in [false, true] {
        assert_eq!(on(5, is_idempotent, Some(&claimed(7, 4)), IN_TIME), Next::Leave(ACK_WAIT));
        assert_eq!(on(5, is_idempotent, Some(&claimed(7, 4)), LATE), Next::Leave(ACK_WAIT));
    }
}

#[test]
fn lost_claim_on_idempotent_job_is_taken_over() {
    let next = on(6, true, Some(&claimed(7, 4)), IN_TIME);
    let previous = Some(host_lost(&terms(true), 1));
    assert_eq!(next, Next::Claim { expects: 42, attempts: 2, previous });
}

#[test]
fn lost_claim_with_no_attempts_left_ends_as_host_lost() {
    let lost = |is_idempotent| ending(host_lost(&terms(is_idempotent), 1));
    let decide = |ending| Next::Decide { expects: 42, attempts: 1, ending };
    assert_eq!(on(6, false, Some(&claimed(7, 4)), IN_TIME), decide(lost(false)));
    assert_eq!(on(6, true, Some(&claimed(7, 4)), LATE), decide(lost(true)));
    let mut spent = claimed(7, 4);
    spent.record.attempts = 3;
    let next = on(6, true, Some(&spent), IN_TIME);
    assert!(matches!(next, Next::Decide { attempts: 3, .. }), "{next:?}");
    assert_eq!(lost(false).outcome.verdict.executed(), Executed::Unknown);
}

#[test]
fn duplicate_message_waits_for_the_original() {
    assert_eq!(on(9, true, Some(&claimed(6, 1)), IN_TIME), Next::Leave(HOST_LOST_AFTER));
}

#[test]
fn decided_job_is_announced_again_but_not_run() {
    // The message has the sequence number 7. Records of earlier versions contain no sequence number.
    for (stream_sequence, is_copy) in [(None, false), (Some(7), false), (Some(6), true)] {
        let record = stored(Phase::Decided { ending: ending(crashed()), stream_sequence });
        for now in [IN_TIME, LATE] {
            assert_eq!(on(2, true, Some(&record), now), Next::Finish { ending: ending(crashed()), is_copy });
        }
    }
}

/// Returns the decision after an attempt that ended with this outcome.
fn after(is_idempotent: bool, attempts: u32, outcome: Outcome, now: Duration) -> Consequence {
    let claim = Claim { attempts, previous: None };
    let end = AttemptEnd::Reported(ending(outcome));
    outcome::decide(&message(1), &terms(is_idempotent), &rules(), &claim, end, now, 0.0)
}

#[test]
fn ok_and_cancelled_are_final() {
    for end in [Verdict::Ok, Verdict::Cancelled { executed: Executed::Yes }] {
        let outcome = verdict(end);
        assert_eq!(after(true, 1, outcome.clone(), IN_TIME), Consequence::Decide(ending(outcome)));
    }
}

#[test]
fn result_too_large_for_the_server_fails() {
    let claim = Claim { attempts: 1, previous: None };
    let end = Ending { outcome: verdict(Verdict::Ok), payload: vec![0; 101].into() };
    let end = AttemptEnd::Reported(end);
    let consequence = outcome::decide(&message(1), &terms(true), &rules(), &claim, end, IN_TIME, 0.0);
    let Consequence::Decide(ending) = consequence else { panic!("{consequence:?}") };
    assert_eq!(ending.outcome.verdict.reason(), Some("result_too_large"));
    assert!(ending.payload.is_empty() && !ending.outcome.retryable);
}

#[test]
fn rejected_attempt_is_returned_without_being_counted() {
    for reason in RejectReason::ALL {
        let consequence = after(false, 1, rejected(reason), IN_TIME);
        let is_returned = reason.is_retryable() || reason == RejectReason::NotFound;
        match consequence {
            Consequence::Return { attempts: 0, delay, .. } if is_returned => {
                assert_eq!(delay, RETURN_DELAY_MIN);
            }
            Consequence::Decide(_) if !is_returned => {}
            other => panic!("{reason}: {other:?}"),
        }
    }
}

#[test]
fn return_delay_follows_retry_after() {
    let outcome = Outcome { retry_after: Some(Duration::from_secs(3)), ..rejected(RejectReason::QueueFull) };
    let claim = Claim { attempts: 1, previous: None };
    let end = AttemptEnd::Reported(ending(outcome));
    let consequence = outcome::decide(&message(1), &terms(false), &rules(), &claim, end, IN_TIME, 1.0);
    let Consequence::Return { delay, .. } = consequence else { panic!("{consequence:?}") };
    assert_eq!(delay, Duration::from_millis(3600));
}

/// Returns the delay in seconds and the pause after the supervisor has rejected a job and asked to retry in 20 s.
fn delays(reason: RejectReason, delivery: u64, is_rate_limit_shared: bool) -> (u64, Pause) {
    let outcome = Outcome { retry_after: Some(Duration::from_secs(20)), ..rejected(reason) };
    let claim = Claim { attempts: 1, previous: Some(rejected(reason)) };
    let rules = Rules { is_rate_limit_shared, ..rules() };
    let end = AttemptEnd::Reported(ending(outcome));
    let consequence = outcome::decide(&message(delivery), &terms(false), &rules, &claim, end, IN_TIME, 0.0);
    let Consequence::Return { delay, pause, .. } = consequence else { panic!("{consequence:?}") };
    (delay.as_secs(), pause)
}

#[test]
fn only_rejections_of_all_jobs_pause_pulls() {
    use RejectReason::{CircuitOpen, Draining, RateLimited, TenantQuota, Unavailable};
    let asked = Duration::from_secs(20);
    for reason in RejectReason::ALL.into_iter().filter(|reason| reason.is_retryable()) {
        let pause = match reason {
            RateLimited | TenantQuota => Pause::None,
            CircuitOpen | Draining | Unavailable => Pause::Pulls(asked),
            _ => Pause::Permit(asked),
        };
        assert_eq!(delays(reason, 1, false), (20, pause), "{reason}");
    }
    assert_eq!(delays(RateLimited, 1, true), (20, Pause::Pulls(Duration::from_secs(1))));
    assert_eq!(delays(TenantQuota, 1, true), (20, Pause::None));
}

#[test]
fn rejection_of_an_isolated_tenant_does_not_pause_pulls() {
    use RejectReason::{CircuitOpen, Draining, NotFound, RateLimited, TenantQuota, Unavailable};
    let rules = Rules { is_isolated: true, ..rules() };
    let decide = |end| {
        let claim = Claim { attempts: 1, previous: None };
        let decided = outcome::decide(&message(8), &terms(false), &rules, &claim, end, IN_TIME, 0.0);
        let Consequence::Return { delay, pause, .. } = decided else { panic!("{decided:?}") };
        (delay, pause)
    };
    let asked = Duration::from_secs(20);
    let reported =
        |outcome| decide(AttemptEnd::Reported(ending(Outcome { retry_after: Some(asked), ..outcome })));
    for reason in RejectReason::ALL.into_iter().filter(|reason| reason.is_retryable()) {
        let expected = match reason {
            // Another host might have started the tenant's workers, so the job is delivered again soon.
            Unavailable | CircuitOpen => (RETURN_DELAY_MIN, Pause::Permit(asked)),
            RateLimited | TenantQuota => (asked, Pause::None),
            Draining => (asked, Pause::Pulls(asked)),
            _ => (asked, Pause::Permit(asked)),
        };
        assert_eq!(reported(rejected(reason)), expected, "{reason}");
    }
    assert_eq!(reported(rejected(NotFound)), (asked, Pause::Pulls(asked)));
    assert_eq!(reported(verdict(Verdict::DeadlineQueued)), (RETURN_DELAY_MIN, Pause::Permit(asked)));
    assert_eq!(decide(AttemptEnd::NOT_SENT), (RETURN_DELAY_MIN, Pause::Pulls(RETURN_DELAY_MIN)));
}

#[test]
fn retry_delay_grows_for_jobs_above_their_tenants_share() {
    let reported = Outcome { retry_after: Some(RETURN_DELAY_MIN), ..rejected(RejectReason::RateLimited) };
    let mut previous = None;
    let mut delays = (1..=12).map(|delivery| {
        let claim = Claim { attempts: 1, previous: previous.take() };
        let end = AttemptEnd::Reported(ending(reported.clone()));
        let decided = outcome::decide(&message(delivery), &terms(false), &rules(), &claim, end, IN_TIME, 0.0);
        let Consequence::Return { delay, pause: Pause::None, previous: last, .. } = decided else {
            panic!("{decided:?}")
        };
        previous = Some(last);
        delay.as_millis()
    });
    let expected = [250, 500, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000];
    assert!(delays.by_ref().take(10).eq(expected));
}

#[test]
fn deliveries_without_a_rejection_do_not_lengthen_the_delay() {
    let end = AttemptEnd::Reported(ending(rejected(RejectReason::TenantQuota)));
    let last = |delay| Some(Outcome { retry_after: Some(delay), ..rejected(RejectReason::TenantQuota) });
    let cases = [
        (None, RETURN_DELAY_MIN),
        (Some(verdict(Verdict::DeadlineQueued)), RETURN_DELAY_MIN),
        (last(RETURN_DELAY_MIN), 2 * RETURN_DELAY_MIN),
    ];
    for (previous, expected) in cases {
        let claim = Claim { attempts: 1, previous };
        let decided =
            outcome::decide(&message(1000), &terms(false), &rules(), &claim, end.clone(), IN_TIME, 0.0);
        let Consequence::Return { delay, .. } = decided else { panic!("{decided:?}") };
        assert_eq!(delay, expected);
    }
}

#[test]
fn job_that_expires_in_supervisor_queue_is_returned() {
    let outcome = verdict(Verdict::DeadlineQueued);
    let returned = after(false, 1, outcome.clone(), IN_TIME);
    assert!(matches!(returned, Consequence::Return { attempts: 0, .. }), "{returned:?}");
    assert_eq!(after(false, 1, outcome.clone(), LATE), Consequence::Decide(ending(outcome)));
}

#[test]
fn only_idempotent_jobs_run_again() {
    for outcome in [failed(true), crashed(), verdict(Verdict::DeadlineRunning)] {
        let again = after(true, 1, outcome.clone(), IN_TIME);
        let Consequence::Return { attempts: 1, previous, delay, pause } = again else { panic!("{again:?}") };
        assert_eq!((previous, delay, pause), (outcome.clone(), Duration::from_secs(1), Pause::None));
        let is_final = Consequence::Decide(ending(outcome.clone()));
        assert_eq!(after(false, 1, outcome.clone(), IN_TIME), is_final);
        assert_eq!(after(true, 3, outcome.clone(), IN_TIME), is_final, "no attempts left");
        assert_eq!(after(true, 1, outcome, LATE), is_final, "no time left");
    }
    assert_eq!(after(true, 1, failed(false), IN_TIME), Consequence::Decide(ending(failed(false))));
}

#[test]
fn disconnect_before_sending_is_not_counted_as_attempt() {
    let claim = Claim { attempts: 1, previous: None };
    let end = AttemptEnd::NOT_SENT;
    let consequence = outcome::decide(&message(1), &terms(false), &rules(), &claim, end, IN_TIME, 0.0);
    let Consequence::Return { attempts: 0, pause, .. } = consequence else { panic!("{consequence:?}") };
    assert_eq!(pause, Pause::Pulls(RETURN_DELAY_MIN));
}

#[test]
fn disconnect_after_sending_is_host_lost_unless_idempotent() {
    for (is_idempotent, executed) in
        [(false, Executed::Unknown), (false, Executed::Yes), (true, Executed::Unknown)]
    {
        let claim = Claim { attempts: 1, previous: None };
        let end = AttemptEnd::Disconnected { executed };
        let terms = terms(is_idempotent);
        let consequence = outcome::decide(&message(1), &terms, &rules(), &claim, end, IN_TIME, 0.0);
        match consequence {
            Consequence::Decide(ending) if !is_idempotent => assert_eq!(ending.outcome, host_lost(&terms, 1)),
            Consequence::Return { attempts: 1, .. } if is_idempotent => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn later_rejection_keeps_outcome_from_earlier_run() {
    let claim = Claim { attempts: 2, previous: Some(crashed()) };
    let decide = |outcome| {
        let end = AttemptEnd::Reported(ending(outcome));
        outcome::decide(&message(1), &terms(true), &rules(), &claim, end, IN_TIME, 0.0)
    };
    assert_eq!(decide(rejected(RejectReason::Quarantined)), Consequence::Decide(ending(crashed())));
    let returned = decide(rejected(RejectReason::QueueFull));
    assert!(matches!(&returned, Consequence::Return { attempts: 1, previous, .. } if *previous == crashed()));
}

/// Returns the state machine for a job that was submitted under a claim with sequence number 1.
fn submitted() -> Handling {
    let (mut handling, step) =
        Handling::begin(message(1), terms(false), rules(), "a".into(), "nonce".into(), 0.0);
    assert_eq!(step, Step::Do(Action::Read, Duration::ZERO));
    let step = handling.apply(Event::Read(Ok(None)), IN_TIME);
    assert!(matches!(step, Step::Do(Action::Write(Write { expects: Some(0), .. }), _)), "{step:?}");
    let step = handling.apply(Event::Written(WriteResult::Stored(1)), IN_TIME);
    assert_eq!(step, Step::Do(Action::Submit(Duration::from_secs(50)), Duration::ZERO));
    handling
}

/// Ends the attempt to run a submitted job, and returns the write that records the outcome.
fn outcome_write(handling: &mut Handling) -> Write {
    let end = AttemptEnd::Reported(ending(verdict(Verdict::Ok)));
    let step = handling.apply(Event::Ended(end), IN_TIME);
    let Step::Do(Action::Write(write), _) = step else { panic!("{step:?}") };
    write
}

#[test]
fn outcome_is_recorded_before_the_acknowledgement() {
    let mut handling = submitted();
    let write = outcome_write(&mut handling);
    assert_eq!(write.expects, Some(1));
    let step = handling.apply(Event::Written(WriteResult::Stored(2)), IN_TIME);
    assert!(matches!(step, Step::Do(Action::Announce { is_dead: false, .. }, _)), "{step:?}");
    let step = handling.apply(Event::Announced(true), IN_TIME);
    assert_eq!(step, Step::Do(Action::Acknowledge, Duration::ZERO));
    assert_eq!(handling.apply(Event::Acknowledged, IN_TIME), Step::Done(Conclusion::Decided));
}

#[test]
fn write_without_a_response_is_repeated_unchanged() {
    let mut handling = submitted();
    let write = outcome_write(&mut handling);
    for result in [WriteResult::Unknown, WriteResult::Pending, WriteResult::Unknown] {
        let step = handling.apply(Event::Written(result), IN_TIME);
        assert!(matches!(&step, Step::Do(Action::Write(again), _) if *again == write), "{step:?}");
    }
}

/// Returns the state machine for a job that has returned a result of 100 bytes, and the write that contains the result.
fn result_write() -> (Handling, Write) {
    let mut handling = submitted();
    let end = Ending { outcome: verdict(Verdict::Ok), payload: vec![0; 100].into() };
    let step = handling.apply(Event::Ended(AttemptEnd::Reported(end)), IN_TIME);
    let Step::Do(Action::Write(write), _) = step else { panic!("{step:?}") };
    (handling, write)
}

/// Returns the reason of the outcome in a write. Panics if the outcome has a payload.
fn reason_without_payload(write: &Write) -> Option<&str> {
    let Phase::Decided { ending, .. } = &write.record.phase else { panic!("{write:?}") };
    assert!(ending.payload.is_empty());
    ending.outcome.verdict.reason()
}

#[test]
fn result_refused_by_the_server_is_replaced() {
    let (mut handling, first) = result_write();
    let step = handling.apply(Event::Written(WriteResult::TooLarge), IN_TIME);
    let Step::Do(Action::Write(second), Duration::ZERO) = step else { panic!("{step:?}") };
    assert_eq!(reason_without_payload(&second), Some("result_too_large"));
    assert_eq!(second.expects, first.expects);
    assert_ne!(second.record.nonce, first.record.nonce, "the server may have stored the first write");
    let step = handling.apply(Event::Written(WriteResult::Stored(2)), IN_TIME);
    assert!(matches!(step, Step::Do(Action::Announce { is_dead: true, .. }, _)), "{step:?}");
}

#[test]
fn refused_record_without_a_result_is_written_again() {
    let mut handling = submitted();
    let write = outcome_write(&mut handling);
    let step = handling.apply(Event::Written(WriteResult::TooLarge), IN_TIME);
    assert!(matches!(&step, Step::Do(Action::Write(again), _) if *again == write), "{step:?}");
}

#[test]
fn current_size_limit_applies_to_the_result() {
    let mut handling = submitted();
    handling.set_result_bytes_max(99);
    let end = Ending { outcome: verdict(Verdict::Ok), payload: vec![0; 100].into() };
    let step = handling.apply(Event::Ended(AttemptEnd::Reported(end)), IN_TIME);
    let Step::Do(Action::Write(write), _) = step else { panic!("{step:?}") };
    assert_eq!(reason_without_payload(&write), Some("result_too_large"));
}

#[test]
fn conflict_with_own_record_counts_as_success() {
    let mut handling = submitted();
    let write = outcome_write(&mut handling);
    let step = handling.apply(Event::Written(WriteResult::Conflict(5)), IN_TIME);
    assert_eq!(step, Step::Do(Action::Read, Duration::ZERO));
    let own = Stored { sequence: 5, record: write.record };
    let step = handling.apply(Event::Read(Ok(Some(own))), IN_TIME);
    assert!(matches!(step, Step::Do(Action::Announce { .. }, _)), "{step:?}");
}

#[test]
fn conflict_with_another_agents_record_discards_the_outcome() {
    let mut handling = submitted();
    outcome_write(&mut handling);
    handling.apply(Event::Written(WriteResult::Conflict(42)), IN_TIME);
    let step = handling.apply(Event::Read(Ok(Some(claimed(7, 4)))), IN_TIME);
    assert_eq!(step, Step::Done(Conclusion::Fenced));
}

#[test]
fn unreadable_record_leaves_the_job_until_its_deadline() {
    let on = |is_decided, now| {
        delivery::decide_unreadable(&message(3), &terms(true), &rules(), (42, is_decided), now)
    };
    assert_eq!(on(false, IN_TIME), Next::Leave(HOST_LOST_AFTER));
    assert_eq!(on(false, LATE - Duration::from_secs(3)), Next::Leave(Duration::from_secs(3)));
    assert_eq!(on(false, LATE - Duration::from_nanos(1)), Next::Leave(RETURN_DELAY_MIN));
    let Next::Decide { expects: 42, ending, .. } = on(false, LATE) else { panic!("{:?}", on(false, LATE)) };
    assert_eq!(ending.outcome.verdict.executed(), Executed::Unknown);
    for now in [IN_TIME, LATE] {
        assert_eq!(on(true, now), Next::Leave(HOST_LOST_AFTER));
    }
}

#[test]
fn conflict_with_an_unreadable_record_discards_the_outcome() {
    let mut handling = submitted();
    outcome_write(&mut handling);
    handling.apply(Event::Written(WriteResult::Conflict(42)), IN_TIME);
    assert_eq!(handling.apply(Event::Read(unreadable(42)), IN_TIME), Step::Done(Conclusion::Fenced));
}

#[test]
fn stale_read_after_a_conflict_is_repeated() {
    let mut handling = submitted();
    outcome_write(&mut handling);
    handling.apply(Event::Written(WriteResult::Conflict(43)), IN_TIME);
    for stale in [Ok(None), Ok(Some(claimed(7, 4))), read_failed(), unreadable(41)] {
        let step = handling.apply(Event::Read(stale), IN_TIME);
        assert!(matches!(step, Step::Do(Action::Read, _)), "{step:?}");
    }
}

#[test]
fn refused_claim_leaves_the_job_to_its_holder() {
    let (mut handling, _) =
        Handling::begin(message(1), terms(false), rules(), "a".into(), "nonce".into(), 0.0);
    handling.apply(Event::Read(Ok(None)), IN_TIME);
    handling.apply(Event::Written(WriteResult::Conflict(42)), IN_TIME);
    let step = handling.apply(Event::Read(Ok(Some(claimed(7, 1)))), IN_TIME);
    assert_eq!(step, Step::Done(Conclusion::Left(None)));
}

#[test]
fn job_without_a_permit_is_returned_unless_claimed() {
    const DELAY: Duration = Duration::from_secs(3);
    let begin = || {
        let (message, terms) = (message(2), terms(false));
        Handling::begin_without_permit(message, terms, rules(), "a".into(), "nonce".into(), DELAY).0
    };
    let mut handling = begin();
    let step = handling.apply(Event::Read(Ok(None)), IN_TIME);
    let Step::Do(Action::Write(write), _) = step else { panic!("{step:?}") };
    assert_eq!((write.expects, write.record.attempts), (Some(0), 0));
    let delivery = Some(Delivery { stream_sequence: 7, number: 2 });
    assert_eq!(write.record.phase, Phase::Returned { previous: too_late(&terms(false)), delivery });
    let refused = {
        let mut handling = handling.clone();
        handling.apply(Event::Written(WriteResult::Conflict(42)), IN_TIME);
        handling.apply(Event::Read(Ok(Some(claimed(7, 1)))), IN_TIME)
    };
    assert_eq!(refused, Step::Done(Conclusion::Left(None)));
    let returned = handling.apply(Event::Written(WriteResult::Stored(1)), IN_TIME);
    assert_eq!(returned, Step::Done(Conclusion::Returned { delay: DELAY, pause: Pause::None }));
    let step = begin().apply(Event::Read(Ok(Some(claimed(7, 1)))), IN_TIME);
    assert_eq!(step, Step::Done(Conclusion::Left(Some(ACK_WAIT))));
}

#[test]
fn dead_letter_is_stored_before_the_acknowledgement() {
    let mut handling = submitted();
    let end = AttemptEnd::Reported(ending(crashed()));
    handling.apply(Event::Ended(end), IN_TIME);
    let step = handling.apply(Event::Written(WriteResult::Stored(2)), IN_TIME);
    assert!(matches!(step, Step::Do(Action::Announce { is_dead: true, record: 2, .. }, _)), "{step:?}");
    let step = handling.apply(Event::Announced(false), IN_TIME);
    assert!(matches!(step, Step::Do(Action::Announce { is_dead: true, record: 2, .. }, _)), "{step:?}");
    assert_eq!(
        handling.apply(Event::Announced(true), IN_TIME),
        Step::Do(Action::Acknowledge, Duration::ZERO)
    );
}

#[test]
fn repeated_dead_letter_names_the_same_record() {
    let step = announced_again(7);
    assert!(matches!(step, Step::Do(Action::Announce { is_dead: true, record: 42, .. }, _)), "{step:?}");
}

#[test]
fn copy_of_a_decided_job_stores_no_dead_letter() {
    let step = announced_again(6);
    assert!(matches!(step, Step::Do(Action::Announce { is_dead: false, .. }, _)), "{step:?}");
}

/// Returns the step for a job that has crashed, after two attempts to announce the outcome have failed. The outcome was
/// recorded for the message with the given sequence number.
fn announced_again(stream_sequence: u64) -> Step {
    let (mut handling, _) =
        Handling::begin(message(2), terms(false), rules(), "a".into(), "nonce".into(), 0.0);
    let phase = Phase::Decided { ending: ending(crashed()), stream_sequence: Some(stream_sequence) };
    handling.apply(Event::Read(Ok(Some(stored(phase)))), IN_TIME);
    handling.apply(Event::Announced(false), IN_TIME);
    handling.apply(Event::Announced(false), IN_TIME)
}

#[test]
fn job_whose_deadline_passes_during_the_claim_does_not_run() {
    let (mut handling, _) =
        Handling::begin(message(1), terms(false), rules(), "a".into(), "nonce".into(), 0.0);
    handling.apply(Event::Read(Ok(None)), IN_TIME);
    let step = handling.apply(Event::Written(WriteResult::Stored(1)), LATE);
    let Step::Do(Action::Write(write), _) = step else { panic!("{step:?}") };
    assert!(matches!(write.record.phase, Phase::Decided { ending, stream_sequence: Some(7) }
            if ending.outcome.verdict == Verdict::DeadlineQueued));
}
