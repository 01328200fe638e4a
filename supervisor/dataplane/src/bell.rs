//! Wake-ups from in-process clients. A client signals in three cases: after writing to a connection that the data
//! plane had read completely, after closing a connection, and after reading from a connection that was full. A signal
//! makes a system call only if the data plane sleeps on another thread.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use bulkhead_shared::in_process;

use super::client_end::ClientEnd;
use super::sessions::Session;
use super::slab::SessionId;
use super::{DataPlane, Endpoint};

#[derive(Default)]
struct Rung {
    /// Clients that have signalled.
    by: Vec<SessionId>,
    /// Thread or task to wake. `None` while the data plane is awake, because the data plane checks `by` before
    /// sleeping.
    sleeper: Option<Sleeper>,
}

/// A sleeping thread or task.
enum Sleeper {
    Thread(Arc<mio::Waker>),
    Task(Waker),
}

/// Receiver of the clients' signals.
pub(super) struct Bell {
    rung: Arc<Mutex<Rung>>,
    waker: Arc<mio::Waker>,
    /// True if an in-process client has ever connected.
    is_used: bool,
    /// Reused buffer for the contents of `Rung::by`.
    heard: Vec<SessionId>,
}

fn lock(rung: &Mutex<Rung>) -> MutexGuard<'_, Rung> {
    rung.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waker of a client.
struct Rope {
    session: SessionId,
    rung: Arc<Mutex<Rung>>,
}

impl Wake for Rope {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut rung = lock(&self.rung);
        if rung.by.last() != Some(&self.session) {
            rung.by.push(self.session);
        }
        let sleeper = rung.sleeper.take();
        drop(rung);
        match sleeper {
            Some(Sleeper::Thread(waker)) => {
                // Waking fails only if the data plane has ended.
                let _ = waker.wake();
            }
            Some(Sleeper::Task(waker)) => waker.wake(),
            None => {}
        }
    }
}

impl Bell {
    pub(super) fn new(waker: Arc<mio::Waker>) -> Self {
        Self { rung: Arc::default(), waker, is_used: false, heard: Vec::new() }
    }

    /// Registers the waker of a client. A client that has already written, or closed the connection, signals at once.
    pub(super) fn give_rope(&mut self, session: SessionId, end: &in_process::Endpoint) {
        self.is_used = true;
        end.watch(&Waker::from(Arc::new(Rope { session, rung: self.rung.clone() })));
    }

    /// Returns true if the thread can sleep, and arranges that clients wake it.
    pub(super) fn may_sleep(&self) -> bool {
        if !self.is_used {
            return true;
        }
        let mut rung = lock(&self.rung);
        if rung.by.is_empty() {
            rung.sleeper = Some(Sleeper::Thread(self.waker.clone()));
        }
        rung.by.is_empty()
    }

    /// Returns ready if a client has signalled. Otherwise registers the task to be woken.
    pub(super) fn poll_rung(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut rung = lock(&self.rung);
        if !rung.by.is_empty() {
            return Poll::Ready(());
        }
        if matches!(&rung.sleeper, Some(Sleeper::Task(known)) if known.will_wake(context.waker())) {
            return Poll::Pending;
        }
        let unwanted = rung.sleeper.replace(Sleeper::Task(context.waker().clone()));
        // Dropped without the lock, because the last waker of a task can own clients, which signal when they are
        // dropped.
        drop(rung);
        drop(unwanted);
        Poll::Pending
    }

    /// Marks the data plane as awake.
    pub(super) fn rise(&self) {
        if self.is_used {
            let unwanted = lock(&self.rung).sleeper.take();
            drop(unwanted);
        }
    }
}

impl DataPlane {
    /// Schedules reads and writes for the clients that have signalled.
    pub(super) fn hear_bell(&mut self) {
        if !self.bell.is_used {
            return;
        }
        let mut heard = std::mem::take(&mut self.bell.heard);
        std::mem::swap(&mut heard, &mut lock(&self.bell.rung).by);
        for session in heard.drain(..) {
            let Some(found) = self.sessions.of_mut(session) else { continue };
            let Session { end: ClientEnd::InProcess(end), outbox, standing, .. } = found else { continue };
            standing.is_read_closed |= end.is_closed();
            if !outbox.is_empty() {
                self.mark_dirty(Endpoint::Session(session.index));
            }
            self.sessions.want_read(session.index);
        }
        self.bell.heard = heard;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::{SessionIndex, SlabIndex};

    fn bell() -> (mio::Poll, Bell) {
        let poll = mio::Poll::new().unwrap();
        let waker = mio::Waker::new(poll.registry(), mio::Token(1)).unwrap();
        (poll, Bell::new(Arc::new(waker)))
    }

    fn is_woken(poll: &mut mio::Poll) -> bool {
        let mut events = mio::Events::with_capacity(4);
        poll.poll(&mut events, Some(std::time::Duration::ZERO)).unwrap();
        !events.is_empty()
    }

    #[test]
    fn one_that_sleeps_is_woken_and_one_that_is_awake_is_not() {
        let (mut poll, mut bell) = bell();
        let (here, there) = in_process::pair();
        let session = SessionId { index: SessionIndex::from_number(3), epoch: 7 };
        bell.give_rope(session, &here);
        assert!(bell.may_sleep());
        there.write(b"a").unwrap();
        assert!(is_woken(&mut poll));
        assert!(!bell.may_sleep(), "there is something to hear");
        assert_eq!(std::mem::take(&mut lock(&bell.rung).by), [session]);
        // The first byte is still unread, so the client does not signal again.
        there.write(b"b").unwrap();
        assert!(bell.may_sleep());
        bell.rise();
        here.read(&mut [0; 10], &mut Vec::new()).unwrap();
        there.write(b"c").unwrap();
        assert!(!is_woken(&mut poll) && !bell.may_sleep());
    }

    #[test]
    fn what_came_before_the_rope_is_heard() {
        let (_poll, mut bell) = bell();
        let (here, there) = in_process::pair();
        there.write(b"a").unwrap();
        drop(there);
        bell.give_rope(SessionId::default(), &here);
        assert!(!bell.may_sleep());
    }
}
