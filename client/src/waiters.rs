//! Keeps one connection's pending jobs in slots. A request's number contains the index of its slot, so that finding the
//! slot needs no search. A slot holds the job until its outcome is taken, so that the job can be sent again over
//! another connection. `requests` owns the slots and their lock, and sends the frames.
//!
//! The caller must release the lock before dropping values taken from a slot, because dropping them can
//! acquire the lock: a waker can hold the last reference to a task that owns job handles, and a mapped result
//! returns the lease to the connection.

use std::task::{Context, Poll, Waker};

use tokio::sync::mpsc;

use crate::job_request::JobRequest;
use crate::leases::Lease;
use crate::reply::{JobError, Progress, Reply};

pub(crate) type JobResult = Result<Reply, JobError>;

/// State of a job whose outcome is pending or being processed.
#[derive(Default)]
pub(crate) struct Waiter {
    /// Name of the requested bulkhead. Set when the outcome arrives, unless the job may be retried. An outcome from
    /// the same bulkhead reuses the string.
    pub(crate) bulkhead: String,
    /// Buffer of a large payload. Set when the outcome arrives, so that the client can reuse the buffer. Not set if
    /// the job may be retried.
    pub(crate) buffer: Option<Vec<u8>>,
    pub(crate) progress: Option<mpsc::Sender<Progress>>,
    /// Position of the end of the job's frame in the connection's outgoing byte stream.
    pub(crate) frame_end: u64,
    /// Position of the job among all jobs submitted over the connection, starting with 1.
    pub(crate) submit_number: u64,
    /// Lease whose memory files hold the payload, and possibly the result.
    pub(crate) lease: Option<Box<Lease>>,
    pub(crate) maps_result: bool,
    /// True if the caller has requested cancellation. A cancelled job is not sent again.
    pub(crate) is_cancelled: bool,
    /// True if the job had been sent over an earlier connection that was then lost.
    pub(crate) may_have_run: bool,
}

#[derive(Default)]
enum SlotState<M> {
    #[default]
    Free,
    Waiting(Waiter),
    /// The outcome has arrived and is being processed.
    Processing,
    /// The job is being sent over another connection. If the caller requests cancellation in the meantime, `cancel`
    /// contains the `unless_begun` argument of that request.
    Moving {
        cancel: Option<bool>,
    },
    /// The job has been sent over another connection.
    Moved(M),
    Done(JobResult),
}

struct Slot<M> {
    /// Number of requests that have used this slot. Forms the upper half of each request number.
    generation: u32,
    state: SlotState<M>,
    /// Waker of the task that waits for the outcome.
    waker: Option<Waker>,
    /// The job, kept until the outcome is taken. The task that takes the outcome drops the job, because freeing
    /// memory is faster on the thread that allocated it.
    request: JobRequest,
}

/// Value of `frame_end` for a job that is waiting for another connection. Such a job has no frame in an outbox.
const DETACHED: u64 = u64::MAX;

impl Waiter {
    /// Returns true if the job is waiting to be sent over another connection.
    pub(crate) fn is_detached(&self) -> bool {
        self.frame_end == DETACHED
    }
}

/// Contents removed from a slot after the job's handle was dropped.
pub(crate) struct Removed<M> {
    /// The waiter. `None` if the outcome had already arrived when the job was removed.
    pub(crate) waiter: Option<Waiter>,
    pub(crate) request: JobRequest,
    _rest: (SlotState<M>, Option<Waker>),
}

/// Values that a poll has taken from a slot, to be dropped after the lock is released.
#[derive(Default)]
pub(crate) struct Taken {
    /// The job, if the poll has released the slot.
    pub(crate) request: Option<JobRequest>,
    /// The replaced waker.
    pub(crate) waker: Option<Waker>,
}

/// Result of polling for an outcome.
#[derive(Debug)]
pub(crate) enum Polled<M> {
    Outcome(JobResult),
    /// The job has been sent over another connection.
    Moved(M),
    /// There is no request with this number.
    Missing,
}

/// Decision about a pending job whose connection is lost or being replaced.
pub(crate) enum Decision {
    /// The job stays on this connection, because the supervisor has accepted it.
    Stays,
    /// The job will be sent again over another connection.
    SentAgain,
    Ends(JobError),
}

/// Wakers of jobs that have ended, and values to drop after the lock is released.
#[derive(Default)]
pub(crate) struct Ended {
    /// Request numbers and waiters of the jobs.
    pub(crate) waiters: Vec<(u64, Waiter)>,
    wakers: Vec<Waker>,
}

impl Ended {
    /// Wakes the tasks that are waiting for the jobs.
    pub(crate) fn wake(self) {
        self.wakers.into_iter().for_each(Waker::wake);
    }
}

/// Slots for the pending jobs of one connection. `M` is the type of the pending outcome of a job that has moved to
/// another connection.
pub(crate) struct Waiters<M> {
    slots: Vec<Slot<M>>,
    free: Vec<u32>,
    waiting: usize,
}

impl<M> Default for Waiters<M> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), waiting: 0 }
    }
}

impl<M> Waiters<M> {
    /// Returns the number of jobs without an outcome.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Adds a job. Returns the request number.
    #[inline]
    pub(crate) fn insert(&mut self, request: JobRequest, waiter: Waiter, waker: Option<Waker>) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            let (state, request) = (SlotState::Free, JobRequest::default());
            self.slots.push(Slot { generation: 0, state, waker: None, request });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        (slot.state, slot.waker, slot.request) = (SlotState::Waiting(waiter), waker, request);
        self.waiting += 1;
        u64::from(slot.generation) << 32 | u64::from(index)
    }

    #[inline]
    fn slot(&mut self, number: u64) -> Option<&mut Slot<M>> {
        let slot = self.slots.get_mut(number as u32 as usize)?;
        (u64::from(slot.generation) == number >> 32).then_some(slot)
    }

    /// Returns the waiter of a request.
    #[inline]
    pub(crate) fn get(&mut self, number: u64) -> Option<&mut Waiter> {
        self.get_with_request(number).map(|(waiter, _)| waiter)
    }

    /// Returns the waiter and the job of a request.
    #[inline]
    pub(crate) fn get_with_request(&mut self, number: u64) -> Option<(&mut Waiter, &mut JobRequest)> {
        let slot = self.slot(number)?;
        match &mut slot.state {
            SlotState::Waiting(waiter) => Some((waiter, &mut slot.request)),
            _ => None,
        }
    }

    /// Takes the waiter of a request whose outcome has arrived. Also takes those parts of the job that the outcome
    /// can reuse. Must be followed by [`Waiters::finish`].
    #[inline]
    pub(crate) fn take(&mut self, number: u64) -> Option<Waiter> {
        let slot = self.slot(number)?;
        match &mut slot.state {
            SlotState::Waiting(_) => match std::mem::replace(&mut slot.state, SlotState::Processing) {
                SlotState::Waiting(mut waiter) => {
                    // Does not change the request of a job that may be retried, because a retry sends the whole job.
                    if !slot.request.retries {
                        waiter.bulkhead = std::mem::take(&mut slot.request.bulkhead);
                        waiter.buffer = slot.request.payload.take_large();
                    }
                    Some(waiter)
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// Stores the outcome of a request. Returns the waker of the task that waits for the outcome, if there is one. If
    /// the handle was dropped, returns the outcome in `Err`.
    #[inline]
    pub(crate) fn finish(&mut self, number: u64, result: JobResult) -> Result<Option<Waker>, Box<JobResult>> {
        match self.slot(number) {
            Some(slot) if matches!(slot.state, SlotState::Processing) => {
                slot.state = SlotState::Done(result);
                let waker = slot.waker.take();
                self.waiting -= 1;
                Ok(waker)
            }
            _ => Err(Box::new(result)),
        }
    }

    /// Polls for the outcome of a request. If the outcome has not arrived, registers the task's waker.
    #[inline]
    pub(crate) fn poll(&mut self, number: u64, cx: &Context<'_>, taken: &mut Taken) -> Poll<Polled<M>> {
        let Some(slot) = self.slot(number) else { return Poll::Ready(Polled::Missing) };
        if matches!(slot.state, SlotState::Waiting(_) | SlotState::Processing | SlotState::Moving { .. }) {
            if !slot.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                taken.waker = slot.waker.replace(cx.waker().clone());
            }
            return Poll::Pending;
        }
        let polled = match std::mem::take(&mut slot.state) {
            SlotState::Done(result) => Polled::Outcome(result),
            SlotState::Moved(pending) => Polled::Moved(pending),
            _ => return Poll::Ready(Polled::Missing),
        };
        taken.request = Some(std::mem::take(&mut slot.request));
        self.free.push(number as u32);
        Poll::Ready(polled)
    }

    /// Removes a request whose handle was dropped.
    pub(crate) fn remove(&mut self, number: u64) -> Option<Removed<M>> {
        let slot = self.slot(number)?;
        let state = std::mem::take(&mut slot.state);
        let (waker, request) = (slot.waker.take(), std::mem::take(&mut slot.request));
        match state {
            SlotState::Free => return None,
            SlotState::Done(_) | SlotState::Moved(_) => {}
            SlotState::Waiting(_) | SlotState::Processing | SlotState::Moving { .. } => self.waiting -= 1,
        }
        self.free.push(number as u32);
        Some(match state {
            SlotState::Waiting(waiter) => {
                Removed { waiter: Some(waiter), request, _rest: (SlotState::Free, waker) }
            }
            other => Removed { waiter: None, request, _rest: (other, waker) },
        })
    }

    /// Records the cancellation of a job that has been moved, or is being moved, to another connection. If the move
    /// is complete, returns the pending outcome on the other connection.
    pub(crate) fn cancel_elsewhere(&mut self, number: u64, unless_begun: bool) -> Option<&M> {
        match &mut self.slot(number)?.state {
            SlotState::Moved(pending) => Some(pending),
            SlotState::Moving { cancel } => {
                // An unconditional cancellation takes precedence.
                *cancel = Some(unless_begun && *cancel != Some(false));
                None
            }
            _ => None,
        }
    }

    // Methods that remove jobs from the connection.

    /// Decides what happens to each waiting job. `decide` gets `None` for a job whose outcome was being processed
    /// when the connection failed. Returns the numbers of the jobs to send again, in the order in which they were
    /// first sent.
    pub(crate) fn detach(
        &mut self,
        mut decide: impl FnMut(Option<(&mut Waiter, &mut JobRequest)>) -> Decision,
    ) -> (Vec<u64>, Ended) {
        let (mut again, mut ended) = (Vec::new(), Ended::default());
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let number = u64::from(slot.generation) << 32 | index as u64;
            let decided = match &mut slot.state {
                SlotState::Waiting(waiter) => decide(Some((waiter, &mut slot.request))),
                SlotState::Processing => decide(None),
                _ => continue,
            };
            match (decided, &mut slot.state) {
                (Decision::Ends(error), state) => {
                    if let SlotState::Waiting(waiter) = std::mem::replace(state, SlotState::Done(Err(error)))
                    {
                        ended.waiters.push((number, waiter));
                    }
                    ended.wakers.extend(slot.waker.take());
                    self.waiting -= 1;
                }
                (Decision::SentAgain, SlotState::Waiting(waiter)) => {
                    again.push((waiter.frame_end, number));
                    waiter.frame_end = DETACHED;
                    let lease = waiter.lease.take();
                    ended.waiters.push((number, Waiter { lease, ..Waiter::default() }));
                }
                _ => {}
            }
        }
        again.sort_unstable();
        (again.into_iter().map(|(_, number)| number).collect(), ended)
    }

    /// Ends a cancelled job that is waiting for another connection. Does nothing if `unless_begun` is true and the
    /// job may have begun.
    pub(crate) fn end_detached(&mut self, number: u64, unless_begun: bool) -> Ended {
        let mut ended = Ended::default();
        let Some((_, request)) = self.get_with_request(number) else { return ended };
        let Some(error) = request.cancelled(unless_begun) else { return ended };
        self.waiting -= 1;
        if let Some(slot) = self.slot(number) {
            if let SlotState::Waiting(waiter) =
                std::mem::replace(&mut slot.state, SlotState::Done(Err(error)))
            {
                ended.waiters.push((number, waiter));
            }
            ended.wakers.extend(slot.waker.take());
        }
        ended
    }

    /// Removes a job from its slot to send the job over another connection. Must be followed by
    /// [`Waiters::end_move`].
    pub(crate) fn begin_move(&mut self, number: u64) -> Option<(JobRequest, Option<mpsc::Sender<Progress>>)> {
        let slot = self.slot(number)?;
        let SlotState::Waiting(waiter) = &mut slot.state else { return None };
        let progress = waiter.progress.take();
        slot.state = SlotState::Moving { cancel: None };
        Some((std::mem::take(&mut slot.request), progress))
    }

    /// Completes the move to another connection that [`Waiters::begin_move`] started.
    pub(crate) fn end_move(&mut self, number: u64, moved: Move<M>) -> MoveEnd<M> {
        let slot = match self.slot(number) {
            Some(slot) if matches!(slot.state, SlotState::Moving { .. }) => slot,
            _ => return MoveEnd { _dropped: Some(moved), waker: None, cancel: None },
        };
        let SlotState::Moving { cancel } = std::mem::take(&mut slot.state) else {
            unreachable!("checked above")
        };
        slot.state = match moved {
            Move::PutBack(request, progress) => {
                match cancel.and_then(|unless_begun| request.cancelled(unless_begun)) {
                    Some(error) => SlotState::Done(Err(error)),
                    None => {
                        slot.request = *request;
                        let waiter = Waiter { progress, frame_end: DETACHED, ..Waiter::default() };
                        slot.state = SlotState::Waiting(waiter);
                        return MoveEnd { _dropped: None, waker: None, cancel: None };
                    }
                }
            }
            Move::Sent(pending) => SlotState::Moved(pending),
            Move::Ended(error) => SlotState::Done(Err(error)),
        };
        let waker = slot.waker.take();
        self.waiting -= 1;
        MoveEnd { _dropped: None, waker, cancel }
    }
}

/// Result of trying to send a job over another connection.
pub(crate) enum Move<M> {
    Sent(M),
    Ended(JobError),
    /// The job could not be sent and stays in its slot.
    PutBack(Box<JobRequest>, Option<mpsc::Sender<Progress>>),
}

/// Waker to call and values to drop after the lock is released.
pub(crate) struct MoveEnd<M> {
    /// Result of the move, if the handle was dropped while the job was being moved.
    _dropped: Option<Move<M>>,
    pub(crate) waker: Option<Waker>,
    /// `unless_begun` argument of a cancellation requested during the move. The caller must apply it to the job on
    /// the new connection.
    pub(crate) cancel: Option<bool>,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn insert(waiters: &mut Waiters<()>, waker: Option<Waker>) -> u64 {
        let request = JobRequest::new("resize".to_owned(), b"picture".to_vec());
        waiters.insert(request, Waiter::default(), waker)
    }

    fn lost() -> JobResult {
        Err(JobError::lost(bulkhead_shared::Executed::No, "test"))
    }

    fn outcome(waiters: &mut Waiters<()>, number: u64, cx: &Context<'_>) -> Option<JobResult> {
        match waiters.poll(number, cx, &mut Taken::default()) {
            Poll::Ready(Polled::Outcome(result)) => Some(result),
            Poll::Ready(Polled::Missing) => None,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn outcome_wakes_only_the_last_polling_task() {
        let mut waiters = Waiters::<()>::default();
        let wakers: Vec<Arc<Woken>> = (0..2).map(|_| Arc::default()).collect();
        let tasks: Vec<Waker> = wakers.iter().map(|woken| Waker::from(woken.clone())).collect();
        let number = insert(&mut waiters, Some(tasks[0].clone()));
        let mut taken = Taken::default();
        let cx = Context::from_waker(&tasks[0]);
        assert!(waiters.poll(number, &cx, &mut taken).is_pending() && taken.waker.is_none());
        let cx = Context::from_waker(&tasks[1]);
        assert!(waiters.poll(number, &cx, &mut taken).is_pending());
        assert!(taken.waker.as_ref().unwrap().will_wake(&tasks[0]));

        assert!(waiters.finish(number, lost()).is_err(), "`finish` requires a preceding `take`");
        assert!(waiters.take(number).is_some());
        assert!(waiters.take(number).is_none() && waiters.get(number).is_none());
        assert_eq!(waiters.waiting(), 1);
        waiters.finish(number, lost()).unwrap().unwrap().wake();
        assert_eq!(wakers.iter().map(|woken| woken.0.load(Ordering::SeqCst)).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(waiters.waiting(), 0);
        assert_eq!(outcome(&mut waiters, number, &cx), Some(lost()));
        assert_eq!(outcome(&mut waiters, number, &cx), None);
        assert!(waiters.remove(number).is_none(), "the slot is freed only once");
    }

    #[test]
    fn reused_slot_rejects_an_earlier_request_number() {
        let mut waiters = Waiters::<()>::default();
        let first = insert(&mut waiters, None);
        assert!(waiters.remove(first).unwrap().waiter.is_some());
        let second = insert(&mut waiters, None);
        assert_eq!(first as u32, second as u32);
        assert!(
            waiters.get(first).is_none() && waiters.take(first).is_none() && waiters.remove(first).is_none()
        );
        // If the handle is dropped while the outcome is being processed, the outcome is discarded, even if
        // another request uses the slot by then.
        assert!(waiters.take(second).is_some());
        assert!(waiters.remove(second).unwrap().waiter.is_none());
        assert!(waiters.finish(second, lost()).is_err());
        let third = insert(&mut waiters, None);
        assert!(waiters.finish(second, lost()).is_err());
        assert!(waiters.get(third).is_some());
        assert_eq!(waiters.waiting(), 1);
    }

    #[test]
    fn results_received_before_detaching_are_kept() {
        let mut waiters = Waiters::<()>::default();
        let task = Waker::from(Arc::<Woken>::default());
        let numbers: Vec<u64> = (0..4).map(|_| insert(&mut waiters, Some(task.clone()))).collect();
        waiters.take(numbers[1]);
        let revoked = || Err(JobError::result_revoked());
        waiters.finish(numbers[1], revoked()).unwrap();
        waiters.take(numbers[3]);
        let (again, ended) = waiters.detach(|_| Decision::Ends(lost().unwrap_err()));
        assert_eq!((again.len(), ended.waiters.len(), ended.wakers.len()), (0, 2, 3));
        assert_eq!(waiters.waiting(), 0);
        let cx = Context::from_waker(&task);
        let result: Vec<_> = numbers.iter().map(|number| outcome(&mut waiters, *number, &cx)).collect();
        assert_eq!(result, [lost(), revoked(), lost(), lost()].map(Some));
    }

    #[test]
    fn detached_jobs_are_sent_again_in_order_of_submission() {
        let mut waiters = Waiters::<()>::default();
        let numbers: Vec<u64> = (0..3).map(|_| insert(&mut waiters, None)).collect();
        for (number, frame_end) in numbers.iter().zip([30, 10, 20]) {
            waiters.get(*number).unwrap().frame_end = frame_end;
        }
        let (again, _) = waiters.detach(|_| Decision::SentAgain);
        assert_eq!(again, [numbers[1], numbers[2], numbers[0]]);
        assert_eq!(waiters.waiting(), 3, "a detached job still waits for an outcome");
    }

    #[test]
    fn cancellation_during_a_move_is_not_lost() {
        let mut waiters = Waiters::<()>::default();
        let cx = Context::from_waker(Waker::noop());
        for unless_begun in [false, true] {
            let number = insert(&mut waiters, None);
            let (request, progress) = waiters.begin_move(number).unwrap();
            assert!(waiters.begin_move(number).is_none(), "a job is moved only once");
            assert!(waiters.cancel_elsewhere(number, unless_begun).is_none());
            waiters.end_move(number, Move::PutBack(Box::new(request), progress));
            let error = outcome(&mut waiters, number, &cx).unwrap().unwrap_err();
            assert!(matches!(error, JobError::Cancelled(_)), "{error}");
        }
        // The handle was dropped during the move, and its slot is used by another job.
        let number = insert(&mut waiters, None);
        let (request, progress) = waiters.begin_move(number).unwrap();
        waiters.remove(number).unwrap();
        let other = insert(&mut waiters, None);
        waiters.end_move(number, Move::PutBack(Box::new(request), progress));
        assert_eq!(other as u32, number as u32);
        assert!(waiters.get(other).is_some() && waiters.get(number).is_none());
        assert_eq!(waiters.waiting(), 1);
    }
}
