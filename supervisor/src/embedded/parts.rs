//! Provides the wakers for a future that combines several parts. `local` owns the combined future, and polls only the
//! parts whose wakers were called. A wake-up during a poll does not reach the runtime, because `local` then checks all
//! parts again. This module neither owns nor polls the combined future.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// State of a future that combines several parts. The wakers of all parts share this state.
#[derive(Default)]
pub(super) struct CombinedWaker {
    /// True while the combined future is being polled. Wake-ups during this time need not reach the runtime, because
    /// the poll checks all parts again before it returns.
    is_polled: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl CombinedWaker {
    /// Marks the beginning of a poll of the combined future, and stores the waker of the runtime.
    pub(super) fn enter(&self, context: &Context<'_>) {
        let mut waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = waker.as_ref().is_some_and(|known| known.will_wake(context.waker()));
        let unwanted = if is_known { None } else { waker.replace(context.waker().clone()) };
        // The old waker is dropped after the lock is released. Dropping a task's last waker can drop the task, and the
        // task can then wake a part, which needs the lock.
        drop(waker);
        drop(unwanted);
        self.is_polled.store(true, Ordering::SeqCst);
    }

    /// Marks the end of a poll. The caller must then check again whether any part was woken, because wake-ups during
    /// the poll did not reach the runtime.
    pub(super) fn leave(&self) {
        self.is_polled.store(false, Ordering::SeqCst);
    }

    fn wake(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).clone();
        waker.into_iter().for_each(Waker::wake);
    }
}

struct PartSignal {
    combined: Arc<CombinedWaker>,
    is_woken: AtomicBool,
}

impl Wake for PartSignal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_woken.swap(true, Ordering::SeqCst) && !self.combined.is_polled.load(Ordering::SeqCst) {
            self.combined.wake();
        }
    }
}

pub(super) struct PartWaker {
    signal: Arc<PartSignal>,
    waker: Waker,
}

impl PartWaker {
    /// Creates a waker for one part of the combined future. The part is initially marked as woken, so that it is polled
    /// at least once.
    pub(super) fn new(combined: &Arc<CombinedWaker>) -> Self {
        let signal = Arc::new(PartSignal { combined: combined.clone(), is_woken: AtomicBool::new(true) });
        Self { waker: signal.clone().into(), signal }
    }

    pub(super) fn is_woken(&self) -> bool {
        self.signal.is_woken.load(Ordering::SeqCst)
    }

    /// Polls the part's future if the part's waker has been called since the last poll. Otherwise returns `None`.
    pub(super) fn poll<F: Future + ?Sized>(&self, future: Pin<&mut F>) -> Option<Poll<F::Output>> {
        if !self.signal.is_woken.swap(false, Ordering::SeqCst) {
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

    /// The combined future polls only parts that have been woken. Waking a part also wakes the combined future, unless
    /// a poll of the combined future is in progress.
    #[test]
    fn combined_future_polls_only_woken_parts() {
        let (combined, outer) = (Arc::<CombinedWaker>::default(), Arc::<Counts>::default());
        let waker: Waker = outer.clone().into();
        let part = PartWaker::new(&combined);
        let mut future = pin!(poll_fn(|_| Poll::<()>::Pending));
        combined.enter(&Context::from_waker(&waker));
        assert_eq!(part.poll(future.as_mut()), Some(Poll::Pending));
        assert_eq!(part.poll(future.as_mut()), None);
        part.waker.wake_by_ref();
        assert!(part.is_woken() && outer.0.load(Ordering::SeqCst) == 0, "the task polls the part anyway");
        assert_eq!(part.poll(future.as_mut()), Some(Poll::Pending));
        combined.leave();
        part.waker.wake_by_ref();
        part.waker.wake_by_ref();
        assert_eq!(outer.0.load(Ordering::SeqCst), 1);
        assert!(part.is_woken());
    }
}
