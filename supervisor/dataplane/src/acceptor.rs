//! Accepts connections on the jobs socket within a time budget, so that clients cannot occupy the data plane by
//! connecting. The listener can be replaced at runtime. `wiring/sessions.rs` calls this module, identifies each client,
//! and opens or rejects the session.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use bulkhead_api::EventKind;
use bulkhead_policy::Time;
use mio::unix::SourceFd;
use mio::{Interest, Poll};

use super::LISTENER;
use super::time_budget::TimeBudget;

/// Minimum time for which connections must be delayed before an event reports the delay.
const DELAY_MIN: Duration = Duration::from_secs(1);
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);

/// The data plane spends at most `1 / ACCEPT_PART` of one processor's time on accepting connections.
const ACCEPT_PART: i64 = 8;

pub(super) struct Acceptor {
    /// Listener of the jobs socket. `None` in an embedded supervisor, whose clients are in the same process.
    listener: Option<UnixListener>,
    /// True if there might be connections to accept.
    is_pending: bool,
    /// True if the listener is not registered with the event loop. The listener is deregistered while the time budget
    /// is used up, so that new connections do not wake the data plane.
    is_deregistered: bool,
    /// True if the last attempt to accept a connection failed. The attempt must be repeated, because the event loop
    /// does not report the same connection again.
    needs_retry: bool,
    budget: TimeBudget,
    /// Time at which the current delay began, or `None` if no connection is delayed.
    delayed_since: Option<Time>,
    /// Number of connections that were accepted since the current delay began.
    accepted: u64,
    delay_reported_at: Option<Time>,
}

impl Acceptor {
    pub(super) fn new(poll: &Poll, listener: Option<UnixListener>) -> io::Result<Self> {
        listener.as_ref().map_or(Ok(()), |listener| register(poll, listener))?;
        Ok(Self {
            listener,
            is_pending: false,
            is_deregistered: false,
            needs_retry: false,
            budget: TimeBudget::one_in(ACCEPT_PART),
            delayed_since: None,
            accepted: 0,
            delay_reported_at: None,
        })
    }

    /// Replaces the listener. The previous listener is no longer needed, because its socket file is gone and clients
    /// cannot reach it.
    pub(super) fn replace_listener(&mut self, poll: &Poll, listener: UnixListener) -> io::Result<()> {
        register(poll, &listener)?;
        if let Some(before) = self.listener.replace(listener) {
            let _ = poll.registry().deregister(&mut SourceFd(&before.as_raw_fd()));
        }
        (self.is_pending, self.is_deregistered) = (true, false);
        Ok(())
    }

    /// Returns a duplicate of the listener, or the error from `dup(2)`.
    pub(super) fn duplicate(&self) -> io::Result<Option<UnixListener>> {
        self.listener.as_ref().map(UnixListener::try_clone).transpose()
    }

    /// Stops accepting connections. Connections that are waiting on the listener can be accepted by another supervisor
    /// that shares the listener.
    pub(super) fn stop_listening(&mut self, poll: &Poll) {
        if let Some(listener) = self.listener.take() {
            let _ = poll.registry().deregister(&mut SourceFd(&listener.as_raw_fd()));
        }
        (self.is_deregistered, self.needs_retry) = (false, false);
        self.backlog_accepted();
    }

    /// Records that the event loop has reported waiting connections.
    pub(super) fn arrived(&mut self) {
        self.is_pending = true;
    }

    pub(super) fn is_pending(&self) -> bool {
        self.is_pending
    }

    /// Returns true if accepting connections has failed and must be retried.
    pub(super) fn needs_checks(&self) -> bool {
        self.needs_retry
    }

    /// Returns the time from which the time budget allows a waiting connection to be accepted. Returns `None` if no
    /// connection is waiting.
    pub(super) fn accept_at(&self) -> Option<Time> {
        self.is_pending.then(|| self.budget.resume_at())
    }

    /// Returns true if the time budget allows another connection to be accepted. If not, deregisters the listener from
    /// the event loop.
    pub(super) fn can_accept(&mut self, poll: &Poll, now: Time) -> bool {
        let has_time = self.budget.has_time(now);
        if !has_time && !self.is_deregistered {
            let listener = self.listener.as_ref().map(AsRawFd::as_raw_fd);
            self.is_deregistered =
                listener.is_some_and(|listener| poll.registry().deregister(&mut SourceFd(&listener)).is_ok());
        }
        has_time
    }

    /// Accepts a connection. Returns `None` if no connection is waiting, or if the call was interrupted. Fails with an
    /// error from `accept(2)`, most often because this process has no free descriptors, or from `epoll_ctl(2)`.
    pub(super) fn accept(&mut self, poll: &Poll) -> io::Result<Option<UnixStream>> {
        self.needs_retry = false;
        let Some(listener) = &self.listener else {
            self.backlog_accepted();
            return Ok(None);
        };
        let error = match listener.accept() {
            Ok((socket, _)) => {
                self.accepted += 1;
                return Ok(Some(socket));
            }
            Err(error) => error,
        };
        if error.kind() == io::ErrorKind::Interrupted {
            return Ok(None);
        }
        self.backlog_accepted();
        let error = self.resume_listening(poll).err().unwrap_or(error);
        if error.kind() == io::ErrorKind::WouldBlock {
            return Ok(None);
        }
        self.needs_retry = true;
        Err(error)
    }

    /// Subtracts the time since `began` from the time budget.
    pub(super) fn charge(&mut self, began: Instant) {
        self.budget.charge(began);
    }

    /// Records that there is currently no connection to accept. Also called if accepting a connection failed.
    fn backlog_accepted(&mut self) {
        self.is_pending = false;
        (self.delayed_since, self.accepted) = (None, 0);
    }

    /// Records that connections might be waiting, but cannot be accepted because the time budget is used up. Returns an
    /// event if the delay must be reported now.
    pub(super) fn delayed(&mut self, now: Time) -> Option<EventKind> {
        let delay = now.since(*self.delayed_since.get_or_insert(now));
        let is_due = self.delay_reported_at.is_none_or(|at| now.since(at) >= REPEAT_INTERVAL);
        if delay < DELAY_MIN || !is_due {
            return None;
        }
        self.delay_reported_at = Some(now);
        let for_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        Some(EventKind::ClientsDelayed { for_ms, accepted: self.accepted })
    }

    /// Registers the listener with the event loop again if it is deregistered. If a connection has already arrived, the
    /// event loop reports it immediately.
    fn resume_listening(&mut self, poll: &Poll) -> io::Result<()> {
        if self.is_deregistered
            && let Some(listener) = &self.listener
        {
            register(poll, listener)?;
            self.is_deregistered = false;
        }
        Ok(())
    }
}

/// Registers a listener with the event loop.
fn register(poll: &Poll, listener: &UnixListener) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    poll.registry().register(&mut SourceFd(&listener.as_raw_fd()), LISTENER, Interest::READABLE)
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixStream};

    use mio::Events;

    use super::*;

    /// Checks that the event loop reports a connection that arrives after the last call to `accept(2)` and before the
    /// listener is registered again.
    #[test]
    fn reports_connection_that_arrives_before_registration() {
        let address = SocketAddr::from_abstract_name(format!("entrance-{}", std::process::id())).unwrap();
        let mut poll = Poll::new().unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let mut acceptor = Acceptor::new(&poll, Some(listener)).unwrap();
        let mut events = Events::with_capacity(8);
        let mut is_announced = |poll: &mut Poll| {
            poll.poll(&mut events, Some(Duration::ZERO)).unwrap();
            !events.is_empty()
        };
        let now = Time::ZERO + Duration::from_secs(1);
        let mut crowd = vec![UnixStream::connect_addr(&address).unwrap()];
        assert!(is_announced(&mut poll));
        while acceptor.can_accept(&poll, now) {
            acceptor.budget.charge(Instant::now().checked_sub(Duration::from_millis(1)).unwrap());
        }
        crowd.push(UnixStream::connect_addr(&address).unwrap());
        assert!(!is_announced(&mut poll), "the listener must not be registered while the budget is used up");
        let later = now + Duration::from_secs(1);
        for _ in 0..2 {
            assert!(acceptor.can_accept(&poll, later));
            acceptor.listener.as_ref().unwrap().accept().unwrap();
        }
        // This connection arrives between the last accept and the registration of the listener.
        crowd.push(UnixStream::connect_addr(&address).unwrap());
        acceptor.resume_listening(&poll).unwrap();
        assert!(is_announced(&mut poll));
    }

    #[test]
    fn reports_delays_of_one_second_at_intervals() {
        let poll = Poll::new().unwrap();
        let mut acceptor = Acceptor::new(&poll, None).unwrap();
        let at = |ms| Time::ZERO + Duration::from_millis(ms);
        assert!(acceptor.delayed(at(1000)).is_none() && acceptor.delayed(at(1999)).is_none());
        let delayed = acceptor.delayed(at(2000));
        assert!(matches!(delayed, Some(EventKind::ClientsDelayed { for_ms: 1000, accepted: 0 })));
        assert!(acceptor.delayed(at(11_999)).is_none());
        assert!(acceptor.delayed(at(12_000)).is_some());
        acceptor.backlog_accepted();
        assert!(acceptor.delayed(at(22_000)).is_none(), "the acceptor must treat this as a new delay");
    }
}
