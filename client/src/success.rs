//! Stores the outcome of a successful job in compact form. Builds the [`Outcome`] only on demand, because most callers
//! never read it. `Reply` contains the record, and `JobError` contains all other outcomes.

use std::sync::OnceLock;
use std::time::Duration;

use bulkhead_shared::client_protocol::{OutcomeMessage, outcome_code};
use bulkhead_shared::{JobId, Outcome, Verdict};

#[derive(Clone, Debug, Default)]
pub(crate) struct SuccessRecord {
    bulkhead: String,
    job: Option<JobId>,
    attempts: u32,
    worker_pid: u32,
    queued_us: u64,
    ran_us: u64,
    deadline_us: u64,
    run_limit: Option<Duration>,
    outcome: OnceLock<Box<Outcome>>,
}

impl SuccessRecord {
    /// Creates a record from the message that reports an outcome. Returns `None` unless the outcome is `ok` and has
    /// neither a retry time nor an exit status.
    pub(crate) fn from_message(
        message: &OutcomeMessage<'_>,
        bulkhead: &mut String,
        job: Option<JobId>,
        run_limit: Option<Duration>,
    ) -> Option<Self> {
        let is_plain = message.outcome == outcome_code::OK
            && message.retryable | message.has_retry_after | message.has_status == 0;
        is_plain.then(|| Self {
            bulkhead: std::mem::take(bulkhead),
            job,
            attempts: message.attempts,
            worker_pid: message.worker_pid,
            queued_us: message.queued_us,
            ran_us: message.ran_us,
            deadline_us: message.deadline_us,
            run_limit,
            outcome: OnceLock::new(),
        })
    }

    pub(crate) fn outcome(&self) -> &Outcome {
        self.outcome.get_or_init(|| {
            Box::new(Outcome {
                verdict: Verdict::Ok,
                job: self.job,
                bulkhead: self.bulkhead.clone(),
                attempts: self.attempts,
                queued: Duration::from_micros(self.queued_us),
                ran: Duration::from_micros(self.ran_us),
                worker_pid: (self.worker_pid != 0).then_some(self.worker_pid),
                retryable: false,
                retry_after: None,
                deadline: Duration::from_micros(self.deadline_us),
                run_limit: self.run_limit,
                status: None,
                report: None,
            })
        })
    }
}

impl From<Box<Outcome>> for SuccessRecord {
    fn from(outcome: Box<Outcome>) -> Self {
        Self { outcome: outcome.into(), ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn success_record_reproduces_the_outcome_of_its_message() {
        let message = OutcomeMessage {
            attempts: 2,
            queued_us: 1_500,
            ran_us: 3_000_000,
            deadline_us: 5_000_001,
            worker_pid: 4242,
            ..OutcomeMessage::from_verdict(&Verdict::Ok, "resize")
        };
        let (job, run_limit) = (Some(JobId(7)), Some(Duration::from_millis(9)));
        for worker_pid in [0, message.worker_pid] {
            let message = OutcomeMessage { worker_pid, ..message };
            let success =
                SuccessRecord::from_message(&message, &mut "resize".to_owned(), job, run_limit).unwrap();
            let told = Outcome { job, run_limit, ..message.to_outcome().unwrap() };
            assert_eq!(*success.outcome(), told);
            assert_eq!(*SuccessRecord::from(Box::new(told.clone())).outcome(), told);
        }
        let again = OutcomeMessage { retryable: 1, ..message };
        assert!(SuccessRecord::from_message(&again, &mut String::new(), None, None).is_none());
    }
}
