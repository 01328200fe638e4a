//! Handles the frames that a connection receives from the supervisor. Delivers outcomes and progress to the waiting
//! callers, and updates leases. `connection` reads the frames, and the parent module sends requests.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::task::Waker;

use bulkhead_shared::client_protocol::{
    OutcomeMessage, Progress as ProgressMessage, Refused, decode_run_limit, outcome_code,
};
use bulkhead_shared::codec::{self, Extensions, tag};
use bulkhead_shared::frame::{Header, kind};
use bulkhead_shared::memory_files::LeaseRef;
use bulkhead_shared::{JobId, Outcome};

use super::{Requests, State};
use crate::leases::LeaseOwner;
use crate::mapped::MappedResult;
use crate::reply::{JobError, Progress, Reply};
use crate::success::SuccessRecord;
use crate::waiters::{JobResult, Waiter};

/// Maximum number of outcomes that are delivered before the lock is released.
const OUTCOMES_PER_LOCK_MAX: usize = 64;

/// Handler for the frames from one read. Delivers up to [`OUTCOMES_PER_LOCK_MAX`] outcomes while holding the lock, then
/// releases the lock and wakes the waiting tasks.
pub(crate) struct Frames<'r> {
    requests: &'r Arc<Requests>,
    state: Option<MutexGuard<'r, State>>,
    wakers: Vec<Waker>,
}

impl<'r> Frames<'r> {
    pub(crate) fn new(requests: &'r Arc<Requests>) -> Self {
        Self { requests, state: None, wakers: Vec::new() }
    }

    /// Handles a frame. The caller must close the connection if this returns an error.
    pub(crate) fn handle(&mut self, header: Header, metadata: &[u8], payload: Vec<u8>) -> Result<(), String> {
        if header.kind != kind::OUTCOME {
            self.wake();
            return self.requests.other_frame(header, metadata);
        }
        self.outcome(header.number, metadata, payload)?;
        if self.wakers.len() >= OUTCOMES_PER_LOCK_MAX {
            self.wake();
        }
        Ok(())
    }

    /// Returns a buffer for the payload of an announced outcome, or `None` if the job was cancelled.
    pub(crate) fn buffer_for(&mut self, header: Header) -> Option<Vec<u8>> {
        let state = &mut **self.state.get_or_insert_with(|| self.requests.lock());
        state.large_outcome = state.waiters.get(header.number)?.submit_number;
        Some(state.pool.take(header.payload_length()))
    }

    fn outcome(&mut self, number: u64, metadata: &[u8], payload: Vec<u8>) -> Result<(), String> {
        let (message, extensions) = decode_with::<OutcomeMessage<'_>>(metadata)?;
        let state = self.state.get_or_insert_with(|| self.requests.lock());
        // A job without a waiter was cancelled, so the outcome is ignored.
        let Some(mut waiter) = state.waiters.take(number) else { return Ok(()) };
        state.backlog_outcomes += u64::from(waiter.submit_number <= state.backlog_submits);
        if let Some(buffer) = waiter.buffer.take() {
            state.pool.put(buffer);
        }
        let bulkhead = std::mem::take(&mut waiter.bulkhead);
        let may_have_run = waiter.may_have_run;
        let corrected = |result: JobResult| match result {
            Err(error) if may_have_run => Err(error.after_loss()),
            result => result,
        };
        if waiter.lease.is_none() && extensions.get(tag::LEASE).is_none() {
            let result = job_result(&message, bulkhead, &extensions, payload);
            let result = state.waiters.finish(number, corrected(result));
            self.requests.notify_if_idle(state);
            if let Ok(waker) = result {
                self.wakers.extend(waker);
            }
            return Ok(());
        }
        // Releases the lock, because the next call can copy a large result and acquires the lock itself when
        // needed.
        self.state = None;
        let result = self.requests.finish_leased_job(waiter, &message, (bulkhead, &extensions), payload)?;
        let state = self.state.insert(self.requests.lock());
        let result = state.waiters.finish(number, corrected(result));
        self.requests.notify_if_idle(state);
        match result {
            Ok(waker) => self.wakers.extend(waker),
            // Releases the lock, because dropping a mapped result returns the lease, which acquires the lock.
            Err(result) => {
                self.state = None;
                drop(result);
            }
        }
        Ok(())
    }

    fn wake(&mut self) {
        self.state = None;
        self.wakers.drain(..).for_each(Waker::wake);
    }
}

impl Drop for Frames<'_> {
    fn drop(&mut self) {
        self.wake();
    }
}

fn job_result(
    message: &OutcomeMessage<'_>,
    bulkhead: String,
    extensions: &Extensions<'_>,
    payload: Vec<u8>,
) -> JobResult {
    // Reuses the string if possible, because the outcome usually names the requested bulkhead.
    let mut bulkhead = if bulkhead == message.bulkhead { bulkhead } else { message.bulkhead.to_owned() };
    let job = extensions.get(tag::JOB).and_then(JobId::from_bytes);
    let run_limit = extensions.get(tag::RUN_LIMIT).and_then(decode_run_limit);
    if let Some(success) = SuccessRecord::from_message(message, &mut bulkhead, job, run_limit) {
        return Ok(Reply { payload, success, mapped: None });
    }
    match message.to_outcome_with_bulkhead(bulkhead) {
        Some(outcome) => {
            let report = extensions.get(tag::CRASH_REPORT).and_then(|id| std::str::from_utf8(id).ok());
            let report = report.map(str::to_owned);
            JobError::from_outcome(Box::new(Outcome { job, run_limit, report, ..outcome }), payload)
        }
        None => Err(JobError::unknown_outcome(message)),
    }
}

impl Requests {
    /// Handles a frame that concerns a lease.
    fn lease_frame(&self, header: Header, metadata: &[u8]) -> Result<(), String> {
        let mut state = self.lock();
        match header.kind {
            kind::LEASED => {
                let lease_ref = decode::<LeaseRef>(metadata)?;
                let is_usable = state.leases.receive(header.number, lease_ref) == Some(true);
                let reply = if is_usable { kind::LEASE_TAKEN } else { kind::LEASE_RETURNED };
                state.push_empty(reply, lease_ref.lease);
            }
            kind::LEASE_REFUSED => state.leases.refused(header.number),
            _ => {
                if let Some(number) = state.leases.recall(header.number) {
                    state.push_empty(kind::LEASE_RETURNED, number);
                }
            }
        }
        self.expects_files.store(state.leases.expects_lease(), Ordering::SeqCst);
        let _ = self.try_flush(&mut state);
        if !state.outbox.is_empty() {
            self.schedule_flush(&mut state);
        }
        Ok(())
    }

    /// Returns a result that the worker has written to a memory file. The result is either mapped or copied.
    fn result_in_file(self: &Arc<Self>, waiter: &mut Waiter, lease_ref: &[u8]) -> Result<FileResult, String> {
        let lease_ref = LeaseRef::from_bytes(lease_ref);
        let lease = waiter.lease.take().filter(|lease| {
            lease_ref
                .is_some_and(|found| found.lease == lease.number && found.bytes <= lease.result.len() as u64)
        });
        let (Some(lease), Some(lease_ref)) = (lease, lease_ref) else {
            return Err(
                "the supervisor reported a result in a memory file that this client does not have".into()
            );
        };
        let bytes = lease_ref.bytes as usize;
        if !lease.is_whole() {
            waiter.lease = Some(lease);
            return Ok(FileResult::Revoked);
        }
        if waiter.maps_result {
            self.lock().mapped_results += 1;
            let requests: Arc<dyn LeaseOwner> = self.clone();
            let requests = Arc::downgrade(&requests);
            return Ok(FileResult::Mapped(MappedResult { lease: Some(lease), bytes, requests }));
        }
        let mut copy = self.lock().pool.take(bytes);
        copy.clear();
        lease.result.copy_to(bytes, &mut copy);
        let is_whole = lease.is_whole();
        waiter.lease = Some(lease);
        Ok(if is_whole { FileResult::Copied(copy) } else { FileResult::Revoked })
    }

    /// Returns the outcome of a job that used a lease or whose result is in a memory file.
    fn finish_leased_job(
        self: &Arc<Self>,
        mut waiter: Waiter,
        message: &OutcomeMessage<'_>,
        (bulkhead, extensions): (String, &Extensions<'_>),
        mut payload: Vec<u8>,
    ) -> Result<JobResult, String> {
        let (mut mapped, mut is_revoked) = (None, false);
        if let Some(lease_ref) = extensions.get(tag::LEASE) {
            match self.result_in_file(&mut waiter, lease_ref)? {
                FileResult::Copied(copy) => payload = copy,
                FileResult::Mapped(result) => mapped = Some(Arc::new(result)),
                FileResult::Revoked => is_revoked = true,
            }
        }
        if let Some(lease) = waiter.lease.take() {
            // Reuses the lease only if the worker has replied. Otherwise the worker may still be using the
            // files.
            let is_answered = matches!(message.outcome, outcome_code::OK | outcome_code::FAILED);
            if is_answered { self.reuse_lease(*lease) } else { self.return_lease(*lease) }
        }
        let mut result = job_result(message, bulkhead, extensions, payload);
        if is_revoked && !matches!(result, Err(JobError::Disconnected { .. })) {
            result = Err(JobError::result_revoked());
        }
        if let (Ok(reply), Some(_)) = (&mut result, &mapped) {
            reply.mapped = mapped;
        }
        Ok(result)
    }

    fn other_frame(&self, header: Header, metadata: &[u8]) -> Result<(), String> {
        match header.kind {
            kind::LEASED | kind::LEASE_ENDED | kind::LEASE_REFUSED => self.lease_frame(header, metadata),
            kind::PROGRESS => {
                let message = decode::<ProgressMessage<'_>>(metadata)?;
                // The handler can report an invalid fraction, such as NaN.
                let fraction = if message.fraction.is_nan() { 0.0 } else { message.fraction.clamp(0.0, 1.0) };
                let progress = Progress { fraction, text: message.text.to_owned() };
                let of = |waiter: &mut Waiter| waiter.progress.clone();
                let sender = self.lock().waiters.get(header.number).and_then(of);
                // Sends the report without holding the lock, because the woken task may drop jobs, which
                // acquires the lock.
                if let Some(sender) = sender {
                    let _ = sender.try_send(progress);
                }
                Ok(())
            }
            kind::GOAWAY => {
                self.go_away(header.number);
                Ok(())
            }
            kind::REFUSED => {
                let message = decode::<Refused<'_>>(metadata)?.message;
                Err(format!("the supervisor ended the connection: {message}"))
            }
            unknown if header.is_critical() => Err(format!(
                "the supervisor sent a critical frame of unknown kind {unknown}: update this program"
            )),
            _ => Ok(()),
        }
    }
}

/// A job's result that arrived in a memory file.
enum FileResult {
    Copied(Vec<u8>),
    Mapped(MappedResult),
    /// The supervisor revoked the file before the result was read.
    Revoked,
}

fn decode<'m, M: codec::Message<'m>>(metadata: &'m [u8]) -> Result<M, String> {
    decode_with(metadata).map(|(message, _)| message)
}

fn decode_with<'m, M: codec::Message<'m>>(metadata: &'m [u8]) -> Result<(M, Extensions<'m>), String> {
    let malformed = |error| format!("the supervisor sent a message that cannot be read: {error}");
    codec::decode::<M>(metadata, &[tag::LEASE]).map_err(malformed)
}
