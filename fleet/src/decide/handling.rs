//! Decides the steps for one delivered message, from the first read of the ledger to the acknowledgement. `delivery`
//! and `outcome` contain the decision tables. `runner` performs each requested action, and passes the result back. This
//! module performs no I/O and does not read the clock.

use std::time::Duration;

use bulkhead_shared::{Executed, Outcome, Verdict};

use super::delivery::{self, Next};
use super::outcome::{self, AttemptEnd, Claim, Consequence, Pause};
use super::{Message, Rules, Terms, Timestamp};
use crate::record::{Delivery, Ending, Phase, ReadError, Record, Stored};

/// Delay before the first retry of a failed request to the server.
const REPEAT_DELAY_MIN: Duration = Duration::from_millis(100);
/// Maximum delay between retries of a failed request to the server.
const REPEAT_DELAY_MAX: Duration = Duration::from_secs(2);

/// A write to the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct Write {
    /// Sequence number that the current record must have, or 0 if there must be no record. `None` is used only with
    /// an injected fault.
    pub expects: Option<u64>,
    /// The record to write.
    pub record: Record,
}

/// An action that the agent must perform.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Reads the record of the job. The result is [`Event::Read`].
    Read,
    /// Writes a record. The result is [`Event::Written`].
    Write(Write),
    /// Submits the job to the supervisor, with the time that remains until the deadline. The result is
    /// [`Event::Ended`].
    Submit(Duration),
    /// Publishes the notice that the job has an outcome. If `is_dead` is true, also stores a dead letter. The result
    /// is [`Event::Announced`].
    Announce {
        /// Outcome of the job.
        ending: Ending,
        /// True if a dead letter is stored for the job.
        is_dead: bool,
        /// Sequence number of the record that contains the outcome. Identifies the job among all jobs that ever had the
        /// same ID.
        record: u64,
    },
    /// Acknowledges the message and waits for the server to confirm this. The result is [`Event::Acknowledged`].
    Acknowledge,
}

/// The agent's next step in handling a message.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "each job has only about seven steps, and a step is moved only once"
)]
pub enum Step {
    /// Perform the action after this delay.
    Do(Action, Duration),
    /// The message needs no further handling.
    Done(Conclusion),
}

/// The result of handling a message.
#[derive(Clone, Debug, PartialEq)]
pub enum Conclusion {
    /// The outcome of the job has been recorded, and the message has been acknowledged.
    Decided,
    /// The outcome of the job had already been recorded.
    Repeated,
    /// The job was returned to the queue. The server redelivers the message after the delay.
    Returned {
        /// Delay before the next delivery.
        delay: Duration,
        /// Pause before the agent takes another job in place of this one.
        pause: Pause,
    },
    /// Another agent holds the job or has returned it. If a delay is given, the server has been asked to redeliver the
    /// message after this delay.
    Left(Option<Duration>),
    /// Another agent took over the job during the attempt, so the outcome of the attempt was discarded.
    Fenced,
}

/// The result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteResult {
    /// The record was stored with this sequence number.
    Stored(u64),
    /// The current record has this sequence number instead of the expected one (error 10071).
    Conflict(u64),
    /// Another write to the same record is pending (error 10164).
    Pending,
    /// The record exceeds one of the server's size limits and was not stored.
    TooLarge,
    /// The server did not respond, or returned another error. The record may have been stored.
    Unknown,
}

/// The result of a requested action.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The record, which may be stale.
    Read(Result<Option<Stored>, ReadError>),
    /// The result of a write.
    Written(WriteResult),
    /// The attempt has ended.
    Ended(AttemptEnd),
    /// False if the job needs a dead letter that could not be stored.
    Announced(bool),
    /// The attempt to acknowledge the message has succeeded or failed.
    Acknowledged,
}

/// The step to take after a successful write.
#[derive(Clone, Debug, PartialEq)]
enum Purpose {
    Claim(Claim),
    Decide(Ending),
    Return { delay: Duration, pause: Pause },
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    Reading,
    /// The write is repeated until it is known whether the server has stored or refused the record.
    Writing {
        write: Write,
        purpose: Purpose,
        is_own: bool,
    },
    /// The read is repeated until the record is at least as new as the record that caused the conflict.
    Confirming {
        write: Write,
        purpose: Purpose,
        is_own: bool,
        conflict: u64,
    },
    Running {
        claim: Claim,
        sequence: u64,
    },
    Announcing {
        ending: Ending,
        is_dead: bool,
        record: u64,
        conclusion: Conclusion,
    },
    Acknowledging(Conclusion),
    /// Used only if the fault `acknowledges_before_record` is injected.
    AcknowledgingEarly {
        ending: Ending,
        attempts: u32,
        sequence: u64,
    },
    Over,
}

/// State machine that handles one delivered message. Requests one action at a time.
#[derive(Clone, Debug)]
pub struct Handling {
    message: Message,
    terms: Terms,
    rules: Rules,
    agent: String,
    nonce: String,
    /// Delay before the next delivery if the agent cannot run the job, or `None` if it can.
    return_delay: Option<Duration>,
    /// Number of writes so far. Makes the nonce of each write unique.
    writes: u32,
    /// Number of consecutive failures of the current request.
    failures: u32,
    jitter: f64,
    state: State,
}

impl Handling {
    /// Starts handling a message and returns the first step. `nonce` must be different every time that an agent
    /// handles a message. `jitter` is a random number from 0 to 1.
    pub fn begin(
        message: Message,
        terms: Terms,
        rules: Rules,
        agent: String,
        nonce: String,
        jitter: f64,
    ) -> (Self, Step) {
        let (return_delay, state) = (None, State::Reading);
        let own =
            Self { message, terms, rules, agent, nonce, return_delay, writes: 0, failures: 0, jitter, state };
        (own, Step::Do(Action::Read, Duration::ZERO))
    }

    /// Starts handling a message whose job the agent cannot run. If no other agent holds the job, the job is returned
    /// and delivered again after `delay`.
    ///
    /// On every delivery except the first, the ledger must show the return before the message is redelivered. Without
    /// that record, the early redelivery would look like the loss of another agent whose claim was not visible yet.
    pub fn begin_without_permit(
        message: Message,
        terms: Terms,
        rules: Rules,
        agent: String,
        nonce: String,
        delay: Duration,
    ) -> (Self, Step) {
        let (own, step) = Self::begin(message, terms, rules, agent, nonce, 0.0);
        (Self { return_delay: Some(delay), ..own }, step)
    }

    /// Returns true if the supervisor may be running the job at the moment.
    pub fn is_running(&self) -> bool {
        matches!(self.state, State::Running { .. })
    }

    /// Sets the maximum size of a result, in bytes, which can change while a job is running.
    pub fn set_result_bytes_max(&mut self, bytes: usize) {
        self.rules.result_bytes_max = bytes;
    }

    /// Applies the result of the current action and returns the next step.
    pub fn apply(&mut self, event: Event, now: Timestamp) -> Step {
        match (std::mem::replace(&mut self.state, State::Over), event) {
            (State::Reading, Event::Read(Ok(stored))) => {
                let stored = stored.as_ref();
                let next = delivery::decide(&self.message, &self.terms, &self.rules, stored, now);
                self.delivered(next, stored)
            }
            (State::Reading, Event::Read(Err(ReadError::Unreadable { sequence, is_decided, .. }))) => {
                let record = (sequence, is_decided);
                let next = delivery::decide_unreadable(&self.message, &self.terms, &self.rules, record, now);
                self.delivered(next, None)
            }
            (State::Reading, Event::Read(Err(ReadError::Failed(_)))) => {
                self.state = State::Reading;
                Step::Do(Action::Read, self.repeat_delay())
            }
            (State::Writing { write, purpose, is_own }, Event::Written(result)) => {
                self.written(write, purpose, is_own, result, now)
            }
            (State::Confirming { write, purpose, is_own, conflict }, Event::Read(read)) => {
                self.confirmed(write, purpose, is_own, conflict, read, now)
            }
            (State::Running { claim, sequence }, Event::Ended(end)) => self.ended(claim, sequence, end, now),
            (State::Announcing { conclusion, .. }, Event::Announced(true)) => {
                self.state = State::Acknowledging(conclusion);
                Step::Do(Action::Acknowledge, Duration::ZERO)
            }
            (State::Announcing { ending, is_dead, record, conclusion }, Event::Announced(false)) => {
                let delay = self.repeat_delay();
                self.announce((ending, is_dead), record, conclusion, delay)
            }
            (State::Acknowledging(conclusion), Event::Acknowledged) => Step::Done(conclusion),
            (State::AcknowledgingEarly { ending, attempts, sequence }, Event::Acknowledged) => {
                self.record_ending(ending, attempts, sequence)
            }
            (state, event) => unreachable!("{event:?} in {state:?}"),
        }
    }

    fn delivered(&mut self, next: Next, stored: Option<&Stored>) -> Step {
        self.failures = 0;
        match next {
            Next::Claim { expects, attempts, previous } => {
                if let Some(delay) = self.return_delay {
                    let previous = previous.unwrap_or_else(|| delivery::too_late(&self.terms));
                    let purpose = Purpose::Return { delay, pause: Pause::None };
                    return self.write(Some(expects), attempts - 1, self.returned(previous), purpose, false);
                }
                let phase = Phase::Claimed {
                    stream_sequence: self.message.stream_sequence,
                    delivery: self.message.delivery,
                    previous: previous.clone(),
                };
                let expects = (!self.rules.faults.claims_without_expectation).then_some(expects);
                self.write(expects, attempts, phase, Purpose::Claim(Claim { attempts, previous }), false)
            }
            Next::Decide { expects, attempts, ending } => {
                let phase = self.decided(ending.clone());
                self.write(Some(expects), attempts, phase, Purpose::Decide(ending), false)
            }
            Next::Leave(delay) => Step::Done(Conclusion::Left(Some(delay))),
            Next::Ignore => Step::Done(Conclusion::Left(None)),
            Next::Finish { ending, is_copy } => {
                let record = stored.map_or(0, |stored| stored.sequence);
                let is_dead = is_dead(&ending) && !is_copy;
                self.announce((ending, is_dead), record, Conclusion::Repeated, Duration::ZERO)
            }
        }
    }

    fn write(
        &mut self,
        expects: Option<u64>,
        attempts: u32,
        phase: Phase,
        purpose: Purpose,
        is_own: bool,
    ) -> Step {
        self.writes += 1;
        self.failures = 0;
        let nonce = format!("{}.{}", self.nonce, self.writes);
        let write = Write { expects, record: Record { nonce, agent: self.agent.clone(), attempts, phase } };
        self.state = State::Writing { write: write.clone(), purpose, is_own };
        Step::Do(Action::Write(write), Duration::ZERO)
    }

    fn written(
        &mut self,
        write: Write,
        purpose: Purpose,
        is_own: bool,
        result: WriteResult,
        now: Timestamp,
    ) -> Step {
        match result {
            WriteResult::Stored(sequence) => self.stored(purpose, sequence, now),
            WriteResult::Conflict(conflict) => {
                self.state = State::Confirming { write, purpose, is_own, conflict };
                Step::Do(Action::Read, Duration::ZERO)
            }
            WriteResult::Pending if self.rules.faults.mistakes_pending_write_for_refusal => {
                Step::Done(refused(is_own))
            }
            WriteResult::TooLarge => self.too_large(write, purpose, is_own),
            WriteResult::Pending | WriteResult::Unknown => self.repeat(write, purpose, is_own),
        }
    }

    /// Records an error in place of a result that the server does not accept.
    fn too_large(&mut self, write: Write, purpose: Purpose, is_own: bool) -> Step {
        match purpose {
            Purpose::Decide(ending) if !ending.payload.is_empty() => {
                let ending = outcome::too_large(&self.terms, &self.rules, ending);
                let phase = self.decided(ending.clone());
                self.write(write.expects, write.record.attempts, phase, Purpose::Decide(ending), is_own)
            }
            purpose => self.repeat(write, purpose, is_own),
        }
    }

    fn repeat(&mut self, write: Write, purpose: Purpose, is_own: bool) -> Step {
        let step = Step::Do(Action::Write(write.clone()), self.repeat_delay());
        self.state = State::Writing { write, purpose, is_own };
        step
    }

    /// Determines who wrote the record that caused a conflict. Ignores records that are older than the conflict,
    /// because direct reads can be stale.
    fn confirmed(
        &mut self,
        write: Write,
        purpose: Purpose,
        is_own: bool,
        conflict: u64,
        read: Result<Option<Stored>, ReadError>,
        now: Timestamp,
    ) -> Step {
        match read {
            Ok(Some(stored)) if stored.sequence >= conflict => {
                if stored.record.nonce == write.record.nonce {
                    return self.stored(purpose, stored.sequence, now);
                }
                // An earlier write of this agent stored the result, although the server reported that the result was
                // too large.
                if is_own
                    && let Phase::Decided { ending, .. } = stored.record.phase
                    && stored.record.nonce.starts_with(&format!("{}.", self.nonce))
                {
                    return self.announce_own(ending, stored.sequence);
                }
                Step::Done(refused(is_own))
            }
            Err(ReadError::Unreadable { sequence, .. }) if sequence >= conflict => {
                Step::Done(refused(is_own))
            }
            // The record has expired.
            Ok(None) if conflict == 0 => Step::Done(refused(is_own)),
            _ => {
                let delay = self.repeat_delay();
                self.state = State::Confirming { write, purpose, is_own, conflict };
                Step::Do(Action::Read, delay)
            }
        }
    }

    fn stored(&mut self, purpose: Purpose, sequence: u64, now: Timestamp) -> Step {
        self.failures = 0;
        match purpose {
            Purpose::Claim(claim) => {
                let left = self.terms.time_left(&self.message, now);
                if left.is_zero() {
                    let outcome = delivery::too_late(&self.terms);
                    let ending = Ending { outcome, payload: bytes::Bytes::new() };
                    return self.ended(claim, sequence, AttemptEnd::Reported(ending), now);
                }
                self.state = State::Running { claim, sequence };
                Step::Do(Action::Submit(left), Duration::ZERO)
            }
            Purpose::Decide(ending) => self.announce_own(ending, sequence),
            Purpose::Return { delay, pause } => Step::Done(Conclusion::Returned { delay, pause }),
        }
    }

    fn ended(&mut self, claim: Claim, sequence: u64, end: AttemptEnd, now: Timestamp) -> Step {
        let consequence =
            outcome::decide(&self.message, &self.terms, &self.rules, &claim, end, now, self.jitter);
        match consequence {
            Consequence::Decide(ending) if self.rules.faults.acknowledges_before_record => {
                self.state = State::AcknowledgingEarly { ending, attempts: claim.attempts, sequence };
                Step::Do(Action::Acknowledge, Duration::ZERO)
            }
            Consequence::Decide(ending) => self.record_ending(ending, claim.attempts, sequence),
            Consequence::Return { attempts, previous, delay, pause } => {
                let phase = self.returned(previous);
                self.write(Some(sequence), attempts, phase, Purpose::Return { delay, pause }, true)
            }
        }
    }

    /// Replaces this agent's claim on the job with the outcome of the attempt.
    fn record_ending(&mut self, ending: Ending, attempts: u32, sequence: u64) -> Step {
        let phase = self.decided(ending.clone());
        self.write(Some(sequence), attempts, phase, Purpose::Decide(ending), true)
    }

    fn returned(&self, previous: Outcome) -> Phase {
        let (stream_sequence, number) = (self.message.stream_sequence, self.message.delivery);
        Phase::Returned { previous, delivery: Some(Delivery { stream_sequence, number }) }
    }

    fn decided(&self, ending: Ending) -> Phase {
        Phase::Decided { ending, stream_sequence: Some(self.message.stream_sequence) }
    }

    /// Announces an outcome that this message has led to.
    fn announce_own(&mut self, ending: Ending, record: u64) -> Step {
        let is_dead = is_dead(&ending);
        self.announce((ending, is_dead), record, Conclusion::Decided, Duration::ZERO)
    }

    fn announce(
        &mut self,
        (ending, is_dead): (Ending, bool),
        record: u64,
        conclusion: Conclusion,
        delay: Duration,
    ) -> Step {
        let action = Action::Announce { is_dead, ending: ending.clone(), record };
        self.state = State::Announcing { ending, is_dead, record, conclusion };
        Step::Do(action, delay)
    }

    fn repeat_delay(&mut self) -> Duration {
        let delay = REPEAT_DELAY_MIN * 2u32.pow(self.failures.min(5));
        self.failures = self.failures.saturating_add(1);
        delay.min(REPEAT_DELAY_MAX)
    }
}

/// Returns the conclusion after the server has refused a write. `is_own` is true if the write contained the outcome
/// of this agent's attempt.
fn refused(is_own: bool) -> Conclusion {
    if is_own { Conclusion::Fenced } else { Conclusion::Left(None) }
}

/// Returns true if a job that ended with this outcome needs a dead letter.
fn is_dead(ending: &Ending) -> bool {
    !matches!(ending.outcome.verdict, Verdict::Ok | Verdict::Cancelled { .. })
}

impl AttemptEnd {
    /// Result of an attempt in which the job was not sent to the supervisor.
    pub const NOT_SENT: Self = Self::Disconnected { executed: Executed::No };
}
