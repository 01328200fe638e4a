//! Slots for pending jobs. The number of a request contains the index of a slot, so that finding the slot
//! needs no search. A slot keeps the outcome until the handle of the job takes it.
//!
//! The caller must release the lock before dropping values taken from a slot, because dropping them can take
//! the lock: a waker can hold the last reference to a task that owns job handles, and a mapped result returns
//! the lease to the connection.

use std::task::{Context, Poll, Waker};

use tokio::sync::mpsc;

use crate::leases::Lease;
use crate::reply::{JobError, Progress, Reply};

pub(crate) type JobResult = Result<Reply, JobError>;

/// State of a job whose outcome has not arrived.
pub(crate) struct Waiter {
    /// Name of the requested bulkhead. The string is reused in the outcome if the outcome names the same
    /// bulkhead.
    pub(crate) bulkhead: String,
    pub(crate) progress: Option<mpsc::Sender<Progress>>,
    /// Total number of bytes appended to the outbox up to the end of the job's frame.
    pub(crate) frame_end: u64,
    /// Lease whose memory files contain the payload, and possibly the result.
    pub(crate) lease: Option<Box<Lease>>,
    pub(crate) maps_result: bool,
}

enum SlotState {
    Free,
    Waiting(Waiter),
    /// The outcome has arrived and is being processed.
    Processing,
    Done(JobResult),
}

struct Slot {
    /// Number of requests that have used this slot. This is the upper half of a request's number.
    generation: u32,
    state: SlotState,
    /// Waker of the waiting task.
    waker: Option<Waker>,
}

/// Contents of a slot whose handle was dropped.
pub(crate) struct Removed {
    /// The waiter, if the outcome had not arrived.
    pub(crate) waiter: Option<Waiter>,
    _rest: (SlotState, Option<Waker>),
}

/// Slots for the pending jobs of one connection.
#[derive(Default)]
pub(crate) struct Waiters {
    slots: Vec<Slot>,
    free: Vec<u32>,
    waiting: usize,
}

impl Waiters {
    /// Returns the number of jobs without an outcome.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Adds a waiter. Returns the request's number.
    #[inline]
    pub(crate) fn insert(&mut self, waiter: Waiter, waker: Option<Waker>) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, state: SlotState::Free, waker: None });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        (slot.state, slot.waker) = (SlotState::Waiting(waiter), waker);
        self.waiting += 1;
        u64::from(slot.generation) << 32 | u64::from(index)
    }

    #[inline]
    fn slot(&mut self, number: u64) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(number as u32 as usize)?;
        (u64::from(slot.generation) == number >> 32).then_some(slot)
    }

    /// Returns the waiter of a request.
    #[inline]
    pub(crate) fn get(&mut self, number: u64) -> Option<&mut Waiter> {
        match &mut self.slot(number)?.state {
            SlotState::Waiting(waiter) => Some(waiter),
            _ => None,
        }
    }

    /// Takes the waiter of a request whose outcome has arrived. Must be followed by [`Waiters::finish`].
    #[inline]
    pub(crate) fn take(&mut self, number: u64) -> Option<Waiter> {
        let state = &mut self.slot(number)?.state;
        match state {
            SlotState::Waiting(_) => match std::mem::replace(state, SlotState::Processing) {
                SlotState::Waiting(waiter) => Some(waiter),
                _ => None,
            },
            _ => None,
        }
    }

    /// Stores the outcome of a request. Returns the waker of the waiting task, if there is one. If the handle
    /// was dropped, returns the outcome as an error.
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

    /// Returns the outcome of a request, or `Ready(None)` if there is no such request. If the outcome has not
    /// arrived, registers the task's waker and moves the previous waker to `replaced`.
    #[inline]
    pub(crate) fn poll(
        &mut self,
        number: u64,
        cx: &Context<'_>,
        replaced: &mut Option<Waker>,
    ) -> Poll<Option<JobResult>> {
        let Some(slot) = self.slot(number) else { return Poll::Ready(None) };
        if matches!(slot.state, SlotState::Waiting(_) | SlotState::Processing) {
            if !slot.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                *replaced = slot.waker.replace(cx.waker().clone());
            }
            return Poll::Pending;
        }
        let SlotState::Done(result) = std::mem::replace(&mut slot.state, SlotState::Free) else {
            return Poll::Ready(None);
        };
        self.free.push(number as u32);
        Poll::Ready(Some(result))
    }

    /// Removes a request whose handle was dropped.
    pub(crate) fn remove(&mut self, number: u64) -> Option<Removed> {
        let slot = self.slot(number)?;
        let state = std::mem::replace(&mut slot.state, SlotState::Free);
        let waker = slot.waker.take();
        match state {
            SlotState::Free => return None,
            SlotState::Done(_) => {}
            SlotState::Waiting(_) | SlotState::Processing => self.waiting -= 1,
        }
        self.free.push(number as u32);
        Some(match state {
            SlotState::Waiting(waiter) => Removed { waiter: Some(waiter), _rest: (SlotState::Free, waker) },
            other => Removed { waiter: None, _rest: (other, waker) },
        })
    }

    /// Sets the outcome of every pending job to the return value of `result`. The argument of `result` is
    /// `None` for a job whose outcome was being processed when the connection failed. Returns the removed
    /// waiters and the wakers to call.
    pub(crate) fn finish_all(
        &mut self,
        result: impl Fn(Option<&Waiter>) -> JobResult,
    ) -> (Vec<Waiter>, Vec<Waker>) {
        let (mut waiters, mut wakers) = (Vec::new(), Vec::new());
        for slot in &mut self.slots {
            let result = match &slot.state {
                SlotState::Waiting(waiter) => result(Some(waiter)),
                SlotState::Processing => result(None),
                SlotState::Free | SlotState::Done(_) => continue,
            };
            if let SlotState::Waiting(waiter) = std::mem::replace(&mut slot.state, SlotState::Done(result)) {
                waiters.push(waiter);
            }
            wakers.extend(slot.waker.take());
            self.waiting -= 1;
        }
        (waiters, wakers)
    }
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

    fn waiter() -> Waiter {
        let bulkhead = "resize".to_owned();
        Waiter { bulkhead, progress: None, frame_end: 0, lease: None, maps_result: false }
    }

    fn lost() -> JobResult {
        Err(JobError::lost(bulkhead_shared::Executed::No, "test"))
    }

    #[test]
    fn only_last_waiting_task_receives_the_outcome() {
        let mut waiters = Waiters::default();
        let wakers: Vec<Arc<Woken>> = (0..2).map(|_| Arc::default()).collect();
        let tasks: Vec<Waker> = wakers.iter().map(|woken| Waker::from(woken.clone())).collect();
        let number = waiters.insert(waiter(), Some(tasks[0].clone()));
        let mut replaced = None;
        let cx = Context::from_waker(&tasks[0]);
        assert!(waiters.poll(number, &cx, &mut replaced).is_pending() && replaced.is_none());
        let cx = Context::from_waker(&tasks[1]);
        assert!(waiters.poll(number, &cx, &mut replaced).is_pending());
        assert!(replaced.as_ref().unwrap().will_wake(&tasks[0]));

        assert!(waiters.finish(number, lost()).is_err(), "`finish` requires a preceding `take`");
        assert!(waiters.take(number).is_some());
        assert!(waiters.take(number).is_none() && waiters.get(number).is_none());
        assert_eq!(waiters.waiting(), 1);
        waiters.finish(number, lost()).unwrap().unwrap().wake();
        assert_eq!(wakers.iter().map(|woken| woken.0.load(Ordering::SeqCst)).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(waiters.waiting(), 0);
        assert_eq!(waiters.poll(number, &cx, &mut replaced), Poll::Ready(Some(lost())));
        assert_eq!(waiters.poll(number, &cx, &mut replaced), Poll::Ready(None));
        assert!(waiters.remove(number).is_none(), "the slot is freed only once");
    }

    #[test]
    fn reused_slot_rejects_number_of_earlier_request() {
        let mut waiters = Waiters::default();
        let first = waiters.insert(waiter(), None);
        assert!(waiters.remove(first).unwrap().waiter.is_some());
        let second = waiters.insert(waiter(), None);
        assert_eq!(first as u32, second as u32);
        assert!(
            waiters.get(first).is_none() && waiters.take(first).is_none() && waiters.remove(first).is_none()
        );
        // If the handle is dropped while the outcome is being processed, the outcome is discarded, even if
        // another request uses the slot by then.
        assert!(waiters.take(second).is_some());
        assert!(waiters.remove(second).unwrap().waiter.is_none());
        assert!(waiters.finish(second, lost()).is_err());
        let third = waiters.insert(waiter(), None);
        assert!(waiters.finish(second, lost()).is_err());
        assert!(waiters.get(third).is_some());
        assert_eq!(waiters.waiting(), 1);
    }

    #[test]
    fn finish_all_keeps_results_received_earlier() {
        let mut waiters = Waiters::default();
        let task = Waker::from(Arc::<Woken>::default());
        let numbers: Vec<u64> = (0..4).map(|_| waiters.insert(waiter(), Some(task.clone()))).collect();
        waiters.take(numbers[1]);
        let revoked = || Err(JobError::result_revoked());
        waiters.finish(numbers[1], revoked()).unwrap();
        waiters.take(numbers[3]);
        let (left, wakers) = waiters.finish_all(|_| lost());
        assert_eq!((left.len(), wakers.len(), waiters.waiting()), (2, 3, 0));
        let cx = Context::from_waker(&task);
        let result: Vec<_> = numbers.iter().map(|number| waiters.poll(*number, &cx, &mut None)).collect();
        assert_eq!(result, [lost(), revoked(), lost(), lost()].map(|result| Poll::Ready(Some(result))));
    }
}
