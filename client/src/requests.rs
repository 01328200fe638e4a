//! The jobs under way on one connection: a table of waiters, in which a request's number finds its waiter
//! without a search, and what waits to be written.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bulkhead_shared::client_protocol::{OutcomeMessage, Progress as ProgressMessage, Submit};
use bulkhead_shared::codec;
use bulkhead_shared::connection::{BufferPool, Outbox, Payload};
use bulkhead_shared::frame::{Header, kind};
use bulkhead_shared::worker_protocol::Empty;
use bulkhead_shared::{Executed, RejectReason};
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::job::{Job, JobError, Progress, Reply};

struct Waiter {
    outcome: oneshot::Sender<Result<Reply, JobError>>,
    progress: Option<mpsc::Sender<Progress>>,
}

struct Slot {
    /// Counts the requests that had this slot: half of a request's number.
    generation: u32,
    waiter: Option<Waiter>,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    free: Vec<u32>,
    waiting: usize,
    outbox: Outbox,
    pool: BufferPool,
    is_closed: bool,
    /// Whether the driver has been told that there is something to write.
    is_flush_due: bool,
}

/// One connection's requests.
pub(crate) struct Requests {
    state: Mutex<State>,
    pub(crate) socket: UnixStream,
    pub(crate) flush_due: Notify,
    frame_bytes_max: u32,
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Requests")
    }
}

impl Requests {
    pub(crate) fn new(socket: UnixStream, frame_bytes_max: u32) -> Self {
        Self { state: Mutex::default(), socket, flush_due: Notify::new(), frame_bytes_max }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a job. The first one on an idle connection is written at once; the others wait for the
    /// driver's turn, so that many leave in one write. An error gives the job back if another connection
    /// may take it.
    pub(crate) fn submit(
        self: &Arc<Self>,
        mut job: Job,
        progress: Option<mpsc::Sender<Progress>>,
    ) -> Result<(oneshot::Receiver<Result<Reply, JobError>>, Ticket), SubmitError> {
        let size = job.payload.len() as u64 + 4096;
        if size > u64::from(self.frame_bytes_max) {
            let message =
                format!("{} bytes of payload are more than the supervisor takes", job.payload.len());
            return Err(SubmitError::Refused(job.refused(RejectReason::TooLarge, message)));
        }
        let (sender, outcome) = oneshot::channel();
        let mut state = self.lock();
        if state.is_closed {
            return Err(SubmitError::Closed(Box::new((job, progress))));
        }
        let number = state.enter(Waiter { outcome: sender, progress });
        // Large ones are handed over, not copied.
        let payload = Payload::Owned(std::mem::take(&mut job.payload));
        let submit = Submit {
            bulkhead: &job.bulkhead,
            operation: &job.operation,
            tenant: &job.tenant,
            deadline_us: job.deadline.map_or(0, |limit| micros(limit).max(1)),
            priority: job.priority.code(),
            idempotent: job.is_idempotent.into(),
            cost: job.cost,
        };
        let extension = job.extensions();
        let pushed = state.outbox.push(kind::SUBMIT, number, &submit, extension.as_slice(), payload);
        if pushed.is_err() {
            state.leave(number);
            return Err(SubmitError::Refused(
                job.refused(RejectReason::TooLarge, "the job does not fit in a frame".into()),
            ));
        }
        self.schedule_flush(&mut state);
        Ok((outcome, Ticket { requests: Some(self.clone()), number }))
    }

    fn schedule_flush(&self, state: &mut State) {
        if state.waiting <= 1 {
            let _ = self.try_flush(state);
        }
        if !state.outbox.is_empty() && !std::mem::replace(&mut state.is_flush_due, true) {
            self.flush_due.notify_one();
        }
    }

    fn try_flush(&self, state: &mut State) -> io::Result<bool> {
        let State { outbox, pool, .. } = state;
        outbox.flush(&self.socket, pool)
    }

    /// Writes what waits; returns whether all is written. For the driver.
    pub(crate) fn flush(&self) -> io::Result<bool> {
        let mut state = self.lock();
        state.is_flush_due = false;
        self.try_flush(&mut state)
    }

    fn cancel(&self, number: u64) {
        let mut state = self.lock();
        if state.leave(number).is_some() && !state.is_closed {
            let _ = state.outbox.push(kind::CANCEL, number, &Empty, &[], Payload::NONE);
            let _ = self.try_flush(&mut state);
            self.schedule_flush(&mut state);
        }
    }

    pub(crate) fn buffer(&self, bytes: usize) -> Vec<u8> {
        self.lock().pool.take(bytes)
    }

    /// A frame has come. An error ends the connection.
    pub(crate) fn frame(&self, header: Header, metadata: &[u8], payload: Vec<u8>) -> Result<(), String> {
        match header.kind {
            kind::OUTCOME => {
                let (message, _) =
                    codec::decode::<OutcomeMessage<'_>>(metadata, &[]).map_err(|error| error.to_string())?;
                let Some(waiter) = self.lock().leave(header.number) else { return Ok(()) };
                let outcome = message
                    .to_outcome()
                    .ok_or_else(|| format!("an outcome of an unknown kind ({})", message.outcome))?;
                // Whoever does not wait any more has cancelled.
                let _ = waiter.outcome.send(JobError::from_outcome(outcome, payload));
                Ok(())
            }
            kind::PROGRESS => {
                let (message, _) =
                    codec::decode::<ProgressMessage<'_>>(metadata, &[]).map_err(|error| error.to_string())?;
                let progress = Progress { fraction: message.fraction, text: message.text.to_owned() };
                self.lock().progress(header.number, progress);
                Ok(())
            }
            unknown if header.is_critical() => Err(format!("a frame of the unknown kind {unknown}")),
            _ => Ok(()),
        }
    }

    /// The connection is gone: every waiter is told.
    pub(crate) fn close(&self, message: &str) {
        let mut state = self.lock();
        state.is_closed = true;
        let slots = std::mem::take(&mut state.slots);
        drop(state);
        for waiter in slots.into_iter().filter_map(|slot| slot.waiter) {
            let error = JobError::Disconnected { executed: Executed::Unknown, message: message.to_owned() };
            let _ = waiter.outcome.send(Err(error));
        }
    }
}

/// Why a job was not sent.
pub(crate) enum SubmitError {
    /// It cannot be.
    Refused(JobError),
    /// The connection is closed; here it is again.
    Closed(Box<(Job, Option<mpsc::Sender<Progress>>)>),
}

impl State {
    fn enter(&mut self, waiter: Waiter) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, waiter: None });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.waiter = Some(waiter);
        self.waiting += 1;
        u64::from(slot.generation) << 32 | u64::from(index)
    }

    fn slot(&mut self, number: u64) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(number as u32 as usize)?;
        (u64::from(slot.generation) == number >> 32).then_some(slot)
    }

    fn leave(&mut self, number: u64) -> Option<Waiter> {
        let waiter = self.slot(number)?.waiter.take()?;
        self.free.push(number as u32);
        self.waiting -= 1;
        Some(waiter)
    }

    fn progress(&mut self, number: u64, progress: Progress) {
        let waiter = self.slot(number).and_then(|slot| slot.waiter.as_ref());
        if let Some(sender) = waiter.and_then(|waiter| waiter.progress.as_ref()) {
            let _ = sender.try_send(progress);
        }
    }
}

/// The right to an outcome. Dropped before that has come, it cancels the job.
#[derive(Debug)]
pub(crate) struct Ticket {
    requests: Option<Arc<Requests>>,
    number: u64,
}

impl Ticket {
    pub(crate) fn disarm(&mut self) {
        self.requests = None;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(requests) = self.requests.take() {
            requests.cancel(self.number);
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
