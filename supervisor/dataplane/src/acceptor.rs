//! Admission of clients: the listener of the jobs socket, which can be replaced, and the access rules.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use bulkhead_api::What;
use bulkhead_plane::access::Access;
use bulkhead_policy::Time;
use mio::unix::SourceFd;
use mio::{Interest, Poll};

use super::rejections::RejectionReports;
use super::time_budget::TimeBudget;
use super::{DataPlane, LISTENER};
use crate::descriptors::Intake;

pub(super) struct Acceptor {
    /// `None` in an embedded supervisor, whose clients are in the same process.
    pub(super) listener: Option<UnixListener>,
    pub(super) intake: Intake,
    pub(super) access: Access,
    pub(super) rejections: RejectionReports,
    /// True if connections may be waiting to be accepted.
    pub(super) accept_pending: bool,
    /// True if the listener is deregistered. While the time budget is used up, each new connection would otherwise
    /// wake the data plane.
    is_deregistered: bool,
    /// Time budget for accepting connections.
    pub(super) budget: TimeBudget,
    /// Start of the current delay. There have been waiting connections ever since.
    delayed_since: Option<Time>,
    /// Number of connections accepted since `delayed_since`.
    accepted: u64,
    delay_told_at: Option<Time>,
}

/// Minimum delay that causes an event.
const DELAY_MIN: Duration = Duration::from_secs(1);
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);

/// Reciprocal of the processor share for accepting connections.
const ACCEPT_PART: i64 = 8;

impl Acceptor {
    pub(super) fn new(poll: &Poll, listener: Option<UnixListener>, access: Access) -> io::Result<Self> {
        listener.as_ref().map_or(Ok(()), |listener| register(poll, listener))?;
        let (intake, rejections) = (Intake::new()?, RejectionReports::default());
        Ok(Self {
            listener,
            intake,
            access,
            rejections,
            accept_pending: false,
            is_deregistered: false,
            budget: TimeBudget::one_in(ACCEPT_PART),
            delayed_since: None,
            accepted: 0,
            delay_told_at: None,
        })
    }

    /// Returns the earliest time to accept connections, if any may be waiting.
    pub(super) fn accept_at(&self) -> Option<Time> {
        self.accept_pending.then(|| self.budget.resume_at())
    }

    pub(super) fn count_accepted(&mut self) {
        self.accepted += 1;
    }

    /// Records that no connection is waiting, or that none can be accepted.
    pub(super) fn backlog_accepted(&mut self) {
        self.accept_pending = false;
        (self.delayed_since, self.accepted) = (None, 0);
    }

    /// Records that connections may be waiting while the time budget is used up. Returns an event if an event is due.
    pub(super) fn delayed(&mut self, now: Time) -> Option<What> {
        let delay = now.since(*self.delayed_since.get_or_insert(now));
        let is_due = self.delay_told_at.is_none_or(|at| now.since(at) >= REPEAT_INTERVAL);
        if delay < DELAY_MIN || !is_due {
            return None;
        }
        self.delay_told_at = Some(now);
        let for_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        Some(What::ClientsDelayed { for_ms, accepted: self.accepted })
    }

    /// Returns true if there is time to accept a connection. Otherwise deregisters the listener.
    pub(super) fn can_accept(&mut self, poll: &Poll, now: Time) -> bool {
        let may = self.budget.has_time(now);
        if !may && !self.is_deregistered {
            let listener = self.listener.as_ref().map(AsRawFd::as_raw_fd);
            self.is_deregistered =
                listener.is_some_and(|listener| poll.registry().deregister(&mut SourceFd(&listener)).is_ok());
        }
        may
    }

    /// Registers the listener again, because no connection is waiting. A connection that has arrived in the meantime
    /// is reported at once. Errors are those of `epoll_ctl(2)`.
    pub(super) fn resume_listening(&mut self, poll: &Poll) -> io::Result<()> {
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

impl DataPlane {
    /// Replaces the listener. The file of the previous socket is gone, so no client can connect there.
    pub(super) fn replace_listener(&mut self, listener: UnixListener) {
        if let Err(error) = register(&self.poll, &listener) {
            return self.report_trouble("the jobs socket cannot be listened to", &error.to_string());
        }
        if let Some(before) = self.acceptor.listener.replace(listener) {
            let _ = self.poll.registry().deregister(&mut SourceFd(&before.as_raw_fd()));
        }
        (self.acceptor.accept_pending, self.acceptor.is_deregistered) = (true, false);
    }
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixStream};
    use std::time::{Duration, Instant};

    use mio::Events;

    use super::*;

    /// The report follows when there is time to accept connections again.
    #[test]
    fn reports_connections_that_arrived_while_not_accepting() {
        let address = SocketAddr::from_abstract_name(format!("entrance-{}", std::process::id())).unwrap();
        let mut poll = Poll::new().unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let config = "[supervisor]\nsocket = \"jobs.sock\"\n[bulkhead.a]\ncommand = [\"/bin/true\"]\n";
        let config = bulkhead_config::parse(config, std::path::Path::new("/workers.toml")).unwrap();
        let mut acceptor = Acceptor::new(&poll, Some(listener), Access::new(&config, 0)).unwrap();
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
        assert!(!is_announced(&mut poll), "there is no time for it");
        let later = now + Duration::from_secs(1);
        for _ in 0..2 {
            assert!(acceptor.can_accept(&poll, later));
            acceptor.listener.as_ref().unwrap().accept().unwrap();
        }
        // This connection arrives between the last accept and the registration.
        crowd.push(UnixStream::connect_addr(&address).unwrap());
        acceptor.resume_listening(&poll).unwrap();
        assert!(is_announced(&mut poll));
    }
}
