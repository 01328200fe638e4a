//! Wake-ups from in-process clients. A client signals after it has closed a connection, written to a connection that
//! the data plane had drained, or read from a full connection. A signal makes a system call only if the data plane is
//! sleeping on another thread.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use bulkhead_shared::in_process;

use super::slab::SessionId;

#[derive(Default)]
struct ReadySet {
    /// Sessions whose clients have signaled activity on their connections.
    sessions: Vec<SessionId>,
    /// Thread or task to wake when a client signals activity. `None` while the data plane is awake, because the data
    /// plane checks `sessions` before it goes to sleep.
    parked: Option<Parked>,
}

/// A thread or task that is sleeping.
enum Parked {
    Thread(Arc<mio::Waker>),
    Task(Waker),
}

/// Receiver of activity signals from in-process clients.
pub(super) struct InProcessWaker {
    ready: Arc<Mutex<ReadySet>>,
    waker: Arc<mio::Waker>,
    /// True if an in-process client has ever connected.
    is_used: bool,
    /// Buffer into which the contents of `ReadySet::sessions` are moved. Kept to reuse its memory.
    buffer: Vec<SessionId>,
}

fn lock(ready: &Mutex<ReadySet>) -> MutexGuard<'_, ReadySet> {
    ready.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waker that an in-process client uses to signal activity on its connection.
struct SessionWaker {
    session: SessionId,
    ready: Arc<Mutex<ReadySet>>,
}

impl Wake for SessionWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut ready = lock(&self.ready);
        if ready.sessions.last() != Some(&self.session) {
            ready.sessions.push(self.session);
        }
        let parked = ready.parked.take();
        drop(ready);
        match parked {
            Some(Parked::Thread(waker)) => {
                // Fails only if the data plane is gone.
                let _ = waker.wake();
            }
            Some(Parked::Task(waker)) => waker.wake(),
            None => {}
        }
    }
}

impl InProcessWaker {
    pub(super) fn new(waker: Arc<mio::Waker>) -> Self {
        Self { ready: Arc::default(), waker, is_used: false, buffer: Vec::new() }
    }

    /// Registers a waker for a client's connection. The waker signals immediately if the client has already
    /// written to the connection or closed it.
    pub(super) fn register_session(&mut self, session: SessionId, end: &in_process::Endpoint) {
        self.is_used = true;
        end.watch(&Waker::from(Arc::new(SessionWaker { session, ready: self.ready.clone() })));
    }

    /// Returns true if the thread can sleep. If so, the next signal from a client wakes the thread.
    pub(super) fn prepare_sleep(&self) -> bool {
        if !self.is_used {
            return true;
        }
        let mut ready = lock(&self.ready);
        if ready.sessions.is_empty() {
            ready.parked = Some(Parked::Thread(self.waker.clone()));
        }
        ready.sessions.is_empty()
    }

    /// Returns `Ready` if a client has signaled activity. Otherwise, arranges that the next signal wakes the task to
    /// which `context` belongs.
    pub(super) fn poll_ready(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut ready = lock(&self.ready);
        if !ready.sessions.is_empty() {
            return Poll::Ready(());
        }
        if matches!(&ready.parked, Some(Parked::Task(known)) if known.will_wake(context.waker())) {
            return Poll::Pending;
        }
        let unwanted = ready.parked.replace(Parked::Task(context.waker().clone()));
        // Releases the lock before dropping the old waker. The last waker of a task can own clients, and clients signal
        // when they are dropped.
        drop(ready);
        drop(unwanted);
        Poll::Pending
    }

    /// Calls `handle` for each client that has signaled activity since the last call.
    pub(super) fn drain(&mut self, handle: impl FnMut(SessionId)) {
        if !self.is_used {
            return;
        }
        std::mem::swap(&mut self.buffer, &mut lock(&self.ready).sessions);
        self.buffer.drain(..).for_each(handle);
    }

    /// Marks the data plane as awake, so that activity of clients does not cause another wake-up.
    pub(super) fn unpark(&self) {
        if self.is_used {
            let unwanted = lock(&self.ready).parked.take();
            drop(unwanted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::{SessionIndex, SlabIndex};

    fn bell() -> (mio::Poll, InProcessWaker) {
        let poll = mio::Poll::new().unwrap();
        let waker = mio::Waker::new(poll.registry(), mio::Token(1)).unwrap();
        (poll, InProcessWaker::new(Arc::new(waker)))
    }

    fn is_woken(poll: &mut mio::Poll) -> bool {
        let mut events = mio::Events::with_capacity(4);
        poll.poll(&mut events, Some(std::time::Duration::ZERO)).unwrap();
        !events.is_empty()
    }

    #[test]
    fn client_wakes_data_plane_only_while_it_sleeps() {
        let (mut poll, mut bell) = bell();
        let (here, there) = in_process::pair();
        let session = SessionId { index: SessionIndex::from_number(3), epoch: 7 };
        bell.register_session(session, &here);
        assert!(bell.prepare_sleep());
        there.write(b"a").unwrap();
        assert!(is_woken(&mut poll));
        assert!(!bell.prepare_sleep(), "the data plane must not sleep after a signal");
        assert_eq!(std::mem::take(&mut lock(&bell.ready).sessions), [session]);
        // The first byte has not been read yet, so the client does not signal again.
        there.write(b"b").unwrap();
        assert!(bell.prepare_sleep());
        bell.unpark();
        here.read(&mut [0; 10], &mut Vec::new()).unwrap();
        there.write(b"c").unwrap();
        assert!(!is_woken(&mut poll) && !bell.prepare_sleep());
    }

    #[test]
    fn data_plane_stays_awake_if_input_precedes_registration() {
        let (_poll, mut bell) = bell();
        let (here, there) = in_process::pair();
        there.write(b"a").unwrap();
        drop(there);
        bell.register_session(SessionId::default(), &here);
        assert!(!bell.prepare_sleep());
    }
}
