//! Combines several futures into one. A part is polled only after a call of its waker. If one part wakes
//! another during a poll, the other part is polled in the same pass, without going through the runtime.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// The combined future, shared by the wakers of all parts.
#[derive(Default)]
pub(super) struct Whole {
    /// True while the combined future is polled. Every poll checks all parts again before returning.
    is_polled: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Whole {
    /// Marks the beginning of a poll and stores the runtime's waker.
    pub(super) fn enter(&self, context: &Context<'_>) {
        let mut waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = waker.as_ref().is_some_and(|known| known.will_wake(context.waker()));
        let unwanted = if is_known { None } else { waker.replace(context.waker().clone()) };
        // Dropped after the lock is released: dropping the last waker of a task can drop the task, which may
        // call `wake` here.
        drop(waker);
        drop(unwanted);
        self.is_polled.store(true, Ordering::SeqCst);
    }

    /// Marks the end of a poll. The caller must check the parts once more after this call, because a wake-up
    /// before it did not reach the runtime.
    pub(super) fn leave(&self) {
        self.is_polled.store(false, Ordering::SeqCst);
    }

    fn wake(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).clone();
        waker.into_iter().for_each(Waker::wake);
    }
}

struct Alarm {
    whole: Arc<Whole>,
    has_rung: AtomicBool,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.has_rung.swap(true, Ordering::SeqCst) && !self.whole.is_polled.load(Ordering::SeqCst) {
            self.whole.wake();
        }
    }
}

/// The waker of one part.
pub(super) struct Part {
    alarm: Arc<Alarm>,
    waker: Waker,
}

impl Part {
    /// Creates a part that is woken already, so that it gets a first poll.
    pub(super) fn new(whole: &Arc<Whole>) -> Self {
        let alarm = Arc::new(Alarm { whole: whole.clone(), has_rung: AtomicBool::new(true) });
        Self { waker: alarm.clone().into(), alarm }
    }

    pub(super) fn is_woken(&self) -> bool {
        self.alarm.has_rung.load(Ordering::SeqCst)
    }

    /// Polls the future if its waker was called. Otherwise returns `None`.
    pub(super) fn poll<F: Future + ?Sized>(&self, future: Pin<&mut F>) -> Option<Poll<F::Output>> {
        if !self.alarm.has_rung.swap(false, Ordering::SeqCst) {
            return None;
        }
        Some(future.poll(&mut Context::from_waker(&self.waker)))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Counts(AtomicUsize);

    impl Wake for Counts {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// A part that was not woken is not polled.
    #[test]
    fn woken_part_is_polled_and_wakes_a_sleeping_whole() {
        let (whole, outer) = (Arc::<Whole>::default(), Arc::<Counts>::default());
        let waker: Waker = outer.clone().into();
        let part = Part::new(&whole);
        let mut future = pin!(poll_fn(|_| Poll::<()>::Pending));
        whole.enter(&Context::from_waker(&waker));
        assert_eq!(part.poll(future.as_mut()), Some(Poll::Pending));
        assert_eq!(part.poll(future.as_mut()), None);
        part.waker.wake_by_ref();
        assert!(part.is_woken() && outer.0.load(Ordering::SeqCst) == 0, "the whole will look");
        assert_eq!(part.poll(future.as_mut()), Some(Poll::Pending));
        whole.leave();
        part.waker.wake_by_ref();
        part.waker.wake_by_ref();
        assert_eq!(outer.0.load(Ordering::SeqCst), 1);
        assert!(part.is_woken());
    }
}
