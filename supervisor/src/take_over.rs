//! The first part of an upgrade in the new program, which receives the predecessor's state and descriptors before
//! anything else is started. Refuses the upgrade if `socket`, `admin`, `http`, `jobs_http` or `crash_dir` has changed.
//! `bulkhead_control::control::take_over` continues once the supervisor runs.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use bulkhead_config::defaults::{ADMIN_MODE, FOLDER_MODE};
use bulkhead_config::{Config, SupervisorConfig, Token};
use bulkhead_control::control::RunMode;
use bulkhead_control::control::handover::Predecessor;
use bulkhead_control::sockets::{BoundSocket, InheritedSockets, Sockets};
use bulkhead_linux::packets::{self, Outbox, Received};
use bulkhead_linux::wait::wait_until_readable;
use bulkhead_plane::handover::{
    BulkheadState, Failed, Frame, FrameError, Hello, InheritedName, MESSAGE_BYTES_MAX, State, TenantState,
    VERSION, WorkerId, die_on_request, encode, inherited, kind,
};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::listeners::Listeners;

/// Maximum time to wait for the predecessor's messages.
const STATE_TIMEOUT: Duration = Duration::from_secs(10);

/// Resources whose soft limits a supervisor raises for itself.
const RAISED: [Resource; 4] = [Resource::Nofile, Resource::Fsize, Resource::As, Resource::Data];

/// Link to the predecessor during an upgrade. The link uses an inherited descriptor.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl Link {
    /// Takes ownership of the inherited descriptor. Must be called on the first thread, before any other code has
    /// opened a descriptor.
    ///
    /// Returns an error if the descriptor is not open.
    #[expect(unsafe_code, reason = "the descriptor's number was passed on the command line")]
    pub fn inherit(number: RawFd) -> io::Result<Self> {
        if !Path::new(&format!("/proc/self/fd/{number}")).exists() {
            return Err(io::Error::other(format!(
                "descriptor {number} is not open; this option is for `bulkhead upgrade` only"
            )));
        }
        // SAFETY: the descriptor is open, was inherited for this purpose, and no other code in this process knows it.
        let link = unsafe { OwnedFd::from_raw_fd(number) };
        fcntl_setfd(&link, FdFlags::CLOEXEC)?;
        Ok(Self(link))
    }

    /// Duplicates the link's descriptor. Returns an error if `dup(2)` fails.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }

    /// Tells the predecessor why this program is about to exit.
    pub fn fail(&self, message: &str) {
        die_on_request("send", kind::FAILED);
        // If sending fails, the predecessor still notices the exit.
        let _ = encode(kind::FAILED, &Failed { message }, &[]).map(|bytes| self.send(bytes));
    }

    fn send(&self, bytes: Vec<u8>) -> io::Result<()> {
        let mut outbox = Outbox::default();
        outbox.push(bytes, Vec::new());
        outbox.flush(&self.0).map(drop)
    }

    /// Sends HELLO to the predecessor, and receives the predecessor's state. The predecessor then waits until
    /// all bulkheads in `config` have started.
    pub fn take_over(&self, config: &Config) -> io::Result<TakeOver> {
        die_on_request("send", kind::HELLO);
        let start_limit =
            config.bulkheads.iter().map(|bulkhead| bulkhead.start.ready).max().unwrap_or_default();
        let hello = Hello {
            oldest: VERSION,
            newest: VERSION,
            program: env!("CARGO_PKG_VERSION"),
            start_limit_ms: u64::try_from(start_limit.as_millis()).unwrap_or(u64::MAX),
        };
        self.send(encode(kind::HELLO, &hello, &[]).map_err(invalid)?)?;
        let end = Instant::now() + STATE_TIMEOUT;
        let mut found = TakeOver::default();
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if !wait_until_readable(&self.0, left)? {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the previous supervisor is not responding",
                ));
            }
            let (length, descriptors) = match packets::receive(&self.0, &mut buffer)? {
                Received::Message(length, descriptors) => (length, descriptors),
                Received::Nothing => continue,
                Received::Closed => return Err(io::Error::other("the previous supervisor has exited")),
            };
            let frame = Frame::decode(&buffer[..length]).map_err(invalid)?;
            die_on_request("receive", frame.kind);
            match frame.kind {
                kind::INHERITED => {
                    let InheritedName { name, place } = frame.message().map_err(invalid)?;
                    let descriptor = descriptors.into_iter().next();
                    let descriptor = descriptor.ok_or(FrameError::NoDescriptor).map_err(invalid)?;
                    let entry = (place.to_owned(), descriptor);
                    found.descriptors.insert(name.to_owned(), entry);
                }
                kind::BULKHEAD => found.bulkheads.push(frame.message().map_err(invalid)?),
                kind::TENANT => found.tenants.push(frame.message().map_err(invalid)?),
                kind::WORKER_ID => {
                    let WorkerId { bulkhead, id } = frame.message().map_err(invalid)?;
                    found.permanent_ids.insert(bulkhead.to_owned(), id);
                }
                kind::STATE => {
                    found.state = Some(frame.message().map_err(invalid)?);
                    return Ok(found);
                }
                _ => frame.skip().map_err(invalid)?,
            }
        }
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// State that a supervisor takes over from its predecessor.
#[derive(Debug, Default)]
pub struct TakeOver {
    /// Inherited descriptors, by name. Each entry also contains the address or path that belongs to the descriptor, if
    /// any.
    descriptors: BTreeMap<String, (String, OwnedFd)>,
    bulkheads: Vec<BulkheadState>,
    tenants: Vec<TenantState>,
    /// Permanent user IDs, by bulkhead name. All workers of such a bulkhead use the same ID.
    pub(crate) permanent_ids: BTreeMap<String, u32>,
    state: Option<State>,
}

impl TakeOver {
    fn take(&mut self, name: &str) -> Option<(String, OwnedFd)> {
        self.descriptors.remove(name)
    }

    /// Removes and returns the descriptor for a configuration key. Fails if the predecessor used another value for this
    /// key than `now`, which is the value in this supervisor's configuration (`None` if the key is not set).
    fn take_same(&mut self, name: &str, key: &str, now: Option<&str>) -> io::Result<Option<OwnedFd>> {
        let before = self.take(name);
        let is_same = before.as_ref().map(|(place, _)| place.as_str()) == now;
        if !is_same {
            let value =
                |value: Option<&str>| value.map_or_else(|| "not set".to_owned(), |it| format!("\"{it}\""));
            return Err(io::Error::other(format!(
                "`{key}` in [supervisor] is {} in the configuration file, but {} in the running supervisor: an upgrade \
                 cannot change this key; restore the value, or restart the service",
                value(now),
                value(before.as_ref().map(|(place, _)| place.as_str())),
            )));
        }
        Ok(before.map(|(_, descriptor)| descriptor))
    }

    /// Removes and returns the write end of this process's lifeline, which stays open while this process or one of the
    /// keepers is running.
    pub(crate) fn own_lifeline(&mut self) -> Option<OwnedFd> {
        self.take(inherited::SUCCESSOR_LIFELINE).map(|(_, lifeline)| lifeline)
    }

    /// Restores the soft limits that were in force before the predecessor raised its limits. Workers must inherit the
    /// original limits.
    pub(crate) fn restore_limits(&self) {
        for (number, soft) in self.state.iter().flat_map(|state| &state.soft_limits) {
            if let Some(resource) = RAISED.into_iter().find(|resource| *resource as u32 == *number) {
                let current = Some(*soft).filter(|soft| *soft != u64::MAX);
                // The call fails only if the value exceeds the hard limit, which has not changed.
                let _ = setrlimit(resource, Rlimit { current, maximum: getrlimit(resource).maximum });
            }
        }
    }

    /// Removes and returns the descriptor that holds the lock on the folder for crash reports.
    pub(crate) fn crashes_lock(&mut self, config: &SupervisorConfig) -> io::Result<Option<OwnedFd>> {
        let folder = config.crash_dir.as_ref().map(|folder| folder.display().to_string());
        self.take_same(inherited::CRASHES_LOCK, "crash_dir", folder.as_deref())
    }

    /// Returns the listening sockets that the predecessor has passed and still serves.
    pub(crate) fn listeners(
        mut self,
        link: Link,
        config: &SupervisorConfig,
    ) -> io::Result<(Listeners, Predecessor)> {
        let missing = || io::Error::other("the previous supervisor did not pass all descriptors");
        let path = |path: &Path| path.display().to_string();
        let jobs_lock = self.take_same(inherited::JOBS_LOCK, "socket", Some(&path(&config.socket)))?;
        let admin_lock = self.take_same(inherited::ADMIN_LOCK, "admin", Some(&path(&config.admin)))?;
        let address = config.http.as_ref().map(|http| http.address.to_string());
        let http = self.take_same(inherited::HTTP, "http", address.as_deref())?;
        let address = config.jobs_http.map(|address| address.to_string());
        let jobs_http = self.take_same(inherited::JOBS_HTTP, "jobs_http", address.as_deref())?;
        let (_, jobs) = self.take(inherited::JOBS).ok_or_else(missing)?;
        let (_, admin) = self.take(inherited::ADMIN).ok_or_else(missing)?;
        let (_, lifeline) = self.take(inherited::LIFELINE).ok_or_else(missing)?;
        let (_, transfer) = self.take(inherited::TRANSFER).ok_or_else(missing)?;
        let state = self.state.ok_or_else(missing)?;
        let (jobs, admin) = (UnixListener::from(jobs), UnixListener::from(admin));
        let modes = (config.socket_mode, config.folder_mode);
        let jobs_lock = jobs_lock.ok_or_else(missing)?;
        let admin_lock = admin_lock.ok_or_else(missing)?;
        let inherited = InheritedSockets::from_names(&state.activated);
        let listener = (jobs.try_clone()?, inherited.jobs);
        let bound_jobs = BoundSocket::take_over(&config.socket, modes, listener, jobs_lock);
        let modes = (ADMIN_MODE, FOLDER_MODE);
        let listener = (admin.try_clone()?, inherited.admin);
        let bound_admin = BoundSocket::take_over(&config.admin, modes, listener, admin_lock);
        let sockets = Sockets { jobs: bound_jobs.into(), admin: bound_admin.into() }.into();
        let http = match (http, &config.http) {
            (Some(socket), Some(http)) => {
                let read = Token::read(&http.token_file);
                let token = read.map_err(|(why, help)| io::Error::other(format!("{why}; {help}")))?;
                Some((socket.into(), token))
            }
            _ => None,
        };
        let listeners = Listeners {
            // The data plane gets the listener of the jobs socket when the supervisor begins to serve.
            jobs: None,
            mode: RunMode::Standalone { admin, sockets },
            http,
            jobs_http: jobs_http.map(Into::into),
            inherited,
        };
        let predecessor = Predecessor {
            link: link.0,
            pid: state.pid,
            is_forced: state.is_forced,
            bulkheads: self.bulkheads,
            tenants: self.tenants,
            lifeline,
            transfer,
            jobs,
        };
        Ok((listeners, predecessor))
    }
}

/// Returns the resource numbers and current values of the soft limits that a supervisor raises.
pub(crate) fn soft_limits() -> Vec<(u32, u64)> {
    RAISED.map(|resource| (resource as u32, getrlimit(resource).current.unwrap_or(u64::MAX))).into()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn upgrade_error_names_the_changed_key() {
        let mut found = TakeOver::default();
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        found.descriptors.insert("http".to_owned(), ("127.0.0.1:1".to_owned(), null()));
        let error = found.take_same("http", "http", None).unwrap_err().to_string();
        assert!(
            error.contains("`http` in [supervisor] is not set") && error.contains("\"127.0.0.1:1\""),
            "{error}"
        );
        found.descriptors.insert("http".to_owned(), ("127.0.0.1:1".to_owned(), null()));
        assert!(found.take_same("http", "http", Some("127.0.0.1:1")).unwrap().is_some());
        assert!(found.take_same("http", "http", None).unwrap().is_none());
    }

    #[test]
    fn inheriting_a_closed_descriptor_fails() {
        let error = Link::inherit(1_000_000).unwrap_err().to_string();
        assert!(error.contains("not open"), "{error}");
    }
}
