//! Parts of an upgrade that both supervisors need: the link between them, whether this supervisor accepts
//! connections, and the order in which the two processes exit. `upgrade` implements the predecessor's side,
//! `take_over` the successor's.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bulkhead_linux::packets::{self, Outbox, Received};
use bulkhead_linux::wait::wait_until_readable;
use bulkhead_plane::command::{Command, CommandSendError, CommandSender};
use bulkhead_plane::handover::{
    BulkheadState, Frame, MESSAGE_BYTES_MAX, Nothing, TenantState, die_on_request, encode, kind,
};
use bulkhead_shared::codec::Message;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, watch};

/// Maximum time, in addition to `drain_timeout`, that a supervisor waits at the end of an upgrade for its predecessor
/// or successor to exit.
const END_TIMEOUT: Duration = Duration::from_secs(70);

/// Maximum time to wait for space in the socket that links two supervisors during an upgrade.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time to wait for space in the queue of commands to the data plane.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends a command to the data plane. Waits if the queue is full, because the loss of a command would change the
/// outcome of the upgrade. An error means that the data plane is stuck or has stopped.
pub(super) async fn send_command(commands: &CommandSender, command: Command) -> Result<(), CommandSendError> {
    commands.send_within(command, COMMAND_TIMEOUT).await
}

/// Options for upgrades, including the program to start as a successor, and the predecessor if this supervisor is
/// itself a successor.
pub struct HandoverOptions {
    /// Program to start as the successor, or the reason why this supervisor cannot be upgraded.
    pub program: Result<SuccessorProgram, String>,
    /// Predecessor from which this supervisor takes over. `None` if this supervisor was not started by an upgrade.
    pub predecessor: Option<Predecessor>,
    /// Soft resource limits of this process before the supervisor raised them, by resource number.
    pub soft_limits: Vec<(u32, u64)>,
    /// State that makes the main process of the service exit last.
    pub end: Arc<ProcessEnd>,
}

/// Program and arguments for starting a successor, taken from the command line of this supervisor.
#[derive(Clone, Debug)]
pub struct SuccessorProgram {
    /// Path of the program.
    pub path: PathBuf,
    /// All arguments, starting with the program's name.
    pub arguments: Vec<OsString>,
}

/// The predecessor, from which this supervisor takes over in an upgrade.
pub struct Predecessor {
    /// Descriptor of the link over which the predecessor and the successor exchange messages.
    pub link: OwnedFd,
    /// Process ID of the predecessor.
    pub pid: u32,
    /// True if the upgrade must not be aborted when a bulkhead fails to start.
    pub is_forced: bool,
    /// Operators' decisions about bulkheads.
    pub bulkheads: Vec<BulkheadState>,
    /// Operators' decisions about tenants.
    pub tenants: Vec<TenantState>,
    /// Descriptor that becomes readable when the predecessor and its keepers have exited.
    pub lifeline: OwnedFd,
    /// This supervisor's end of the transfer socket, over which the data planes hand over connections and permits.
    pub transfer: OwnedFd,
    /// Listener of the jobs socket.
    pub jobs: UnixListener,
}

/// Delays the exit of the service's main process at the end of an upgrade until the predecessor or successor has
/// exited.
#[derive(Debug, Default)]
pub struct ProcessEnd {
    /// Descriptor that becomes readable when the predecessor or successor has exited. `None` if this process does not
    /// have to wait before it exits.
    awaited: Mutex<Option<OwnedFd>>,
    has_failed: AtomicBool,
}

impl ProcessEnd {
    fn lock(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wait_for(&self, other: Option<OwnedFd>) {
        *self.lock() = other;
    }

    /// Records a failure that this process must report through its exit status.
    pub(super) fn fail(&self) {
        self.has_failed.store(true, Ordering::SeqCst);
    }

    /// If this process must exit last in an upgrade, waits until the predecessor or successor has exited. Returns true
    /// if that process has exited.
    pub fn wait(&self, drain_timeout: Duration) -> bool {
        let Some(other) = self.lock().take() else { return false };
        let has_exited = wait_until_readable(&other, drain_timeout + END_TIMEOUT).unwrap_or(false);
        if !has_exited {
            tracing::warn!("upgrade: the other supervisor did not exit in time");
        }
        has_exited
    }

    /// Returns true if this process must report a failure to the service manager.
    pub fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }
}

/// Number of stop requests received so far. If a signal is sent to both supervisors in an upgrade, for example by a
/// terminal or by a service manager with `KillMode=control-group`, each one receives the signal and also a STOP message
/// from the other. These two count as one request.
#[derive(Debug, Default)]
struct StopRequests {
    signals: u32,
    messages: u32,
}

impl StopRequests {
    /// Returns true if the stop request that has just arrived has an effect. If a signal and a STOP message both arrive
    /// during an upgrade, the supervisor ignores the later one.
    fn has_effect(&self) -> bool {
        (self.signals, self.messages) != (1, 1)
    }
}

/// Upgrade state of the control plane.
pub(super) struct Handover {
    pub(super) program: Result<SuccessorProgram, String>,
    pub(super) soft_limits: Vec<(u32, u64)>,
    pub(super) end: Arc<ProcessEnd>,
    /// Lock on the folder for crash reports.
    pub(super) crashes_lock: Option<OwnedFd>,
    /// TCP listeners, each with a name and an address.
    pub(super) tcp: Vec<(&'static str, String, OwnedFd)>,
    /// True while this supervisor accepts connections.
    listening: watch::Sender<bool>,
    /// True once this supervisor has begun to stop.
    stopping: watch::Sender<bool>,
    /// True if the service manager considers this process the main process.
    is_main: AtomicBool,
    /// True once an upgrade has begun. Reset to false if the upgrade fails.
    is_upgrading: AtomicBool,
    /// True while the predecessor is running.
    has_predecessor: AtomicBool,
    /// Notified when every bulkhead has started.
    pub(super) started: Notify,
    /// Link to the predecessor or successor. Set during an upgrade once both supervisors are running.
    other: Mutex<Option<Arc<Link>>>,
    /// Numbers of stop signals and STOP messages received so far.
    stops: Mutex<StopRequests>,
}

impl Handover {
    pub(super) fn new(
        options: HandoverOptions,
        crashes_lock: Option<OwnedFd>,
        tcp: Vec<(&'static str, String, OwnedFd)>,
    ) -> (Self, Option<Predecessor>) {
        let HandoverOptions { program, predecessor, soft_limits, end } = options;
        let is_first = predecessor.is_none();
        let handover = Self {
            program,
            soft_limits,
            end,
            crashes_lock,
            tcp,
            listening: watch::Sender::new(is_first),
            stopping: watch::Sender::new(false),
            is_main: AtomicBool::new(is_first),
            is_upgrading: AtomicBool::new(false),
            has_predecessor: AtomicBool::new(!is_first),
            started: Notify::new(),
            other: Mutex::default(),
            stops: Mutex::default(),
        };
        (handover, predecessor)
    }

    // Listeners.

    /// Returns true if this supervisor accepts connections. Returns false while its predecessor or successor accepts
    /// them during an upgrade.
    pub(super) fn is_listening(&self) -> bool {
        *self.listening.borrow()
    }

    pub(super) fn set_listening(&self, is_listening: bool) {
        self.listening.send_replace(is_listening);
    }

    /// Returns a receiver that is notified when [`Handover::is_listening`] changes.
    pub(super) fn watch_listening(&self) -> watch::Receiver<bool> {
        self.listening.subscribe()
    }

    // The service manager.

    pub(super) fn is_main(&self) -> bool {
        self.is_main.load(Ordering::SeqCst)
    }

    pub(super) fn set_main(&self, is_main: bool) {
        self.is_main.store(is_main, Ordering::SeqCst);
    }

    // Upgrades.

    /// Begins an upgrade. Returns false if an upgrade is already in progress.
    pub(super) fn begin(&self) -> bool {
        !self.has_predecessor.load(Ordering::SeqCst) && !self.is_upgrading.swap(true, Ordering::SeqCst)
    }

    pub(super) fn end_upgrade(&self) {
        self.is_upgrading.store(false, Ordering::SeqCst);
    }

    /// Returns true from the beginning of an upgrade until the upgrade can no longer fail. Operators' commands are
    /// refused during this time, because their effects would be lost if the predecessor resumed serving.
    pub(super) fn is_upgrading(&self) -> bool {
        let can_fail = self.has_predecessor.load(Ordering::SeqCst) && !self.is_main();
        can_fail || self.is_upgrading.load(Ordering::SeqCst)
    }

    /// Returns true if the predecessor would resume serving after this supervisor exits. Returns false if this
    /// supervisor was asked to stop, because the predecessor then stops too.
    pub(super) fn is_on_probation(&self) -> bool {
        self.has_predecessor.load(Ordering::SeqCst) && !self.is_main() && !self.is_stopping()
    }

    pub(super) fn predecessor_ended(&self) {
        self.has_predecessor.store(false, Ordering::SeqCst);
    }

    // Stopping.

    /// Sets the link over which the predecessor or successor is notified when this supervisor stops. Also sends a
    /// notification of each stop signal that has already arrived.
    pub(super) fn set_other(&self, link: Option<Arc<Link>>) {
        let mut other = self.other.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *other, link);
        if let (None, Some(link)) = (before, &*other) {
            let signals = self.stops.lock().unwrap_or_else(PoisonError::into_inner).signals;
            (0..signals).for_each(|_| send_stop(link));
        }
    }

    fn stop_requested(&self, record: impl FnOnce(&mut StopRequests)) -> bool {
        self.stopping.send_replace(true);
        let mut stops = self.stops.lock().unwrap_or_else(PoisonError::into_inner);
        record(&mut stops);
        stops.has_effect()
    }

    /// Records a stop signal and, during an upgrade, forwards it to the predecessor or successor. Returns false if the
    /// signal must be ignored because a STOP message has already requested the same stop.
    pub(super) fn signalled(&self) -> bool {
        // Locked first, so that `set_other` does not send a second message about this signal.
        let other = self.other.lock().unwrap_or_else(PoisonError::into_inner);
        let has_effect = self.stop_requested(|stops| stops.signals += 1);
        other.as_deref().into_iter().for_each(send_stop);
        has_effect
    }

    /// Records a STOP message from the predecessor or successor. Returns false if the message must be ignored because a
    /// signal has already requested the same stop.
    pub(super) fn stop_received(&self) -> bool {
        self.stop_requested(|stops| stops.messages += 1)
    }

    /// Returns true if this supervisor has begun to stop.
    pub(super) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Waits until this supervisor begins to stop.
    pub(super) async fn stopping(&self) {
        let _ = self.stopping.subscribe().wait_for(|is_stopping| *is_stopping).await;
    }
}

fn send_stop(link: &Link) {
    if let Err(error) = link.send_now(kind::STOP) {
        tracing::warn!("upgrade: failed to tell the other supervisor to stop: {error}");
    }
}

/// Link between the predecessor and the successor during an upgrade.
#[derive(Debug)]
pub(super) struct Link(AsyncFd<OwnedFd>);

/// Message received from the predecessor or successor during an upgrade.
pub(super) struct Incoming {
    bytes: Vec<u8>,
    pub(super) kind: u8,
}

impl Incoming {
    /// Decodes the metadata of the message.
    pub(super) fn message<'a, M: Message<'a>>(&'a self) -> io::Result<M> {
        let frame = Frame::decode(&self.bytes).map_err(invalid)?;
        frame.message().map_err(invalid)
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Registers a descriptor with the runtime.
#[expect(
    deprecated,
    reason = "the replacement is unsafe, and the owned descriptor stays open for as long as it is registered"
)]
pub(super) fn register(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(descriptor)
}

/// Waits until a process has exited, as reported by a pidfd or by a pipe that the process holds open.
pub(super) async fn wait_for_end(descriptor: &AsyncFd<OwnedFd>) {
    // An error means that this process's runtime is shutting down.
    if descriptor.readable().await.is_err() {
        std::future::pending::<()>().await;
    }
}

impl Link {
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self(register(socket)?))
    }

    pub(super) async fn send<'a>(
        &self,
        kind: u8,
        message: &impl Message<'a>,
        descriptor: Option<OwnedFd>,
    ) -> io::Result<()> {
        die_on_request("send", kind);
        let mut outbox = Outbox::default();
        outbox.push(encode(kind, message, &[]).map_err(invalid)?, descriptor.into_iter().collect());
        self.flush(&mut outbox, SEND_TIMEOUT).await
    }

    async fn flush(&self, outbox: &mut Outbox, timeout: Duration) -> io::Result<()> {
        let stuck = |_| io::Error::new(io::ErrorKind::TimedOut, "the other supervisor is not responding");
        while !outbox.flush(self.0.get_ref())? {
            tokio::time::timeout(timeout, self.0.writable()).await.map_err(stuck)??.clear_ready();
        }
        Ok(())
    }

    /// Sends a message that consists only of its kind. Returns an error if the socket's buffer is full.
    pub(super) fn send_now(&self, kind: u8) -> io::Result<()> {
        die_on_request("send", kind);
        let mut outbox = Outbox::default();
        outbox.push(encode(kind, &Nothing {}, &[]).map_err(invalid)?, Vec::new());
        if outbox.flush(self.0.get_ref())? { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    /// Receives the next message, ignoring messages of kinds that this version does not know. Returns `None` if the
    /// sender has exited. The future can be dropped without losing a message.
    pub(super) async fn receive(&self) -> io::Result<Option<Incoming>> {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        loop {
            let received = packets::receive(self.0.get_ref(), &mut bytes)?;
            let length = match received {
                Received::Message(length, _) => length,
                Received::Nothing => {
                    self.0.readable().await?.clear_ready();
                    continue;
                }
                Received::Closed => return Ok(None),
            };
            bytes.truncate(length);
            let kind = Frame::decode(&bytes).map_err(invalid)?.kind;
            die_on_request("receive", kind);
            return Ok(Some(Incoming { bytes, kind }));
        }
    }
}

#[cfg(test)]
mod tests {
    use bulkhead_plane::handover::HandoverCommand;

    use super::*;

    fn handover() -> Handover {
        let options = HandoverOptions {
            program: Err(String::new()),
            predecessor: None,
            soft_limits: Vec::new(),
            end: Arc::default(),
        };
        Handover::new(options, None, Vec::new()).0
    }

    #[tokio::test]
    async fn sending_fails_if_the_other_supervisor_does_not_read() {
        let (here, _there) = packets::pair(1024).unwrap();
        let link = Link::new(here).unwrap();
        let mut outbox = Outbox::default();
        let error = loop {
            outbox.push(vec![0; 1024], Vec::new());
            if let Err(error) = link.flush(&mut outbox, Duration::from_millis(10)).await {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn command_waits_for_space_in_the_queue() {
        let poll = mio::Poll::new().unwrap();
        let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).unwrap());
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let commands = CommandSender::new(sender, waker);
        commands.send(Command::Summarise).unwrap();
        let command = Command::Handover(Box::new(HandoverCommand::PredecessorEnded));
        // The sender runs first and finds a full queue.
        let (sent, first) = tokio::join!(send_command(&commands, command), async { receiver.try_recv() });
        assert!(matches!(first, Ok(Command::Summarise)));
        sent.unwrap();
        assert!(matches!(receiver.try_recv(), Ok(Command::Handover(_))));
    }

    #[tokio::test]
    async fn early_stop_signal_is_passed_on_once() {
        let (here, there) = packets::pair(1024).unwrap();
        let (here, there) = (Arc::new(Link::new(here).unwrap()), Link::new(there).unwrap());
        let handover = handover();
        assert!(handover.signalled());
        handover.set_other(Some(here.clone()));
        assert!(handover.signalled());
        handover.set_other(None);
        drop(here);
        for _ in 0..2 {
            assert_eq!(there.receive().await.unwrap().map(|message| message.kind), Some(kind::STOP));
        }
        assert!(there.receive().await.unwrap().is_none());
    }

    #[test]
    fn new_program_is_on_probation_until_main_or_stopping() {
        let successor = || {
            let handover = handover();
            assert!(!handover.is_on_probation());
            handover.set_main(false);
            handover.has_predecessor.store(true, Ordering::SeqCst);
            assert!(handover.is_on_probation());
            handover
        };
        let handover = successor();
        handover.set_main(true);
        assert!(!handover.is_on_probation());
        let handover = successor();
        handover.signalled();
        assert!(!handover.is_on_probation());
    }
}
