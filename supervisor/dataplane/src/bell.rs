//! How clients of the application that this is in are heard: each rings when it has written to a connection that was
//! read to its end, has closed it, or has read what there was no room behind. A system call is made for that only if
//! the thread of the data plane sleeps, and none if its thread is the one that rings.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use bulkhead_shared::in_process;

use super::client_end::ClientEnd;
use super::sessions::Session;
use super::slab::SessionId;
use super::{DataPlane, Endpoint};

#[derive(Default)]
struct Rung {
    /// Who has.
    by: Vec<SessionId>,
    /// Who is to be woken. None while the data plane is awake: it will look.
    sleeper: Option<Sleeper>,
}

/// What sleeps.
enum Sleeper {
    Thread(Arc<mio::Waker>),
    Task(Waker),
}

/// The one bell of a data plane.
pub(super) struct Bell {
    rung: Arc<Mutex<Rung>>,
    waker: Arc<mio::Waker>,
    /// Whether there ever was a client that rings.
    is_used: bool,
    /// Those that rang, taken out.
    heard: Vec<SessionId>,
}

fn lock(rung: &Mutex<Rung>) -> MutexGuard<'_, Rung> {
    rung.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one client rings by.
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
                // An error would be that of a data plane that has ended.
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

    /// Has this client ring from now on, also for what it has done already.
    pub(super) fn give_rope(&mut self, session: SessionId, end: &in_process::End) {
        self.is_used = true;
        end.watch(&Waker::from(Arc::new(Rope { session, rung: self.rung.clone() })));
    }

    /// Whether the thread may sleep: from then on a ring wakes it.
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

    /// Ready when a client has rung; until then a ring wakes this task.
    pub(super) fn poll_rung(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut rung = lock(&self.rung);
        if !rung.by.is_empty() {
            return Poll::Ready(());
        }
        if matches!(&rung.sleeper, Some(Sleeper::Task(known)) if known.will_wake(context.waker())) {
            return Poll::Pending;
        }
        let unwanted = rung.sleeper.replace(Sleeper::Task(context.waker().clone()));
        // Without the lock: with the last waker of a task, clients of its own may go, which ring.
        drop(rung);
        drop(unwanted);
        Poll::Pending
    }

    /// The data plane is awake.
    pub(super) fn rise(&self) {
        if self.is_used {
            let unwanted = lock(&self.rung).sleeper.take();
            drop(unwanted);
        }
    }
}

impl DataPlane {
    /// Clients that have rung are to be read, and written to.
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
        // It has left something unread, so that nothing more is to be said.
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
