//! The worker's end of the link: the inherited descriptor, the handshake, reading and writing.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use bulkhead_shared::client_protocol::{Hello, PROTOCOL_VERSION, Refused, role};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::connection::{BufferPool, Inbox, Item, Outbox, Payload, Received, Scratch};
use bulkhead_shared::frame::{MAGIC, kind};
use bulkhead_shared::limits::IN_FLIGHT_CEILING;
use bulkhead_shared::memory_files::receive_with_files;
use bulkhead_shared::worker_protocol::{WorkerWelcome, capability, welcome_capability};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, FdFlags};

use crate::journal::{Claims, Journal};
use crate::ownership::{self, kill_self};
use crate::seal::Seal;

/// Maximum number of bytes per read. Small, because a worker gets few jobs at once.
const READ_BYTES: usize = 64 * 1024;

/// Takes ownership of the descriptor that the supervisor named in the environment variable `variable`.
/// Returns `None` if there is none, for example because the program was started by hand.
pub(crate) fn inherited(variable: &str) -> Option<OwnedFd> {
    let number: RawFd = std::env::var(variable).ok()?.parse().ok().filter(|number| *number > 2)?;
    // SAFETY: `BorrowedFd` demands an open descriptor. The number is only passed to `fcntl`, which fails if
    // it is not open. The number comes from this process's environment, is used once, and names nothing else
    // this early in `main`.
    #[expect(unsafe_code, reason = "a descriptor crosses from the parent process")]
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    // Children must not inherit the descriptor.
    rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC).ok()?;
    // SAFETY: the descriptor is open, and the supervisor passed it to this process for this use.
    #[expect(unsafe_code, reason = "a descriptor crosses from the parent process")]
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

pub(crate) fn is_socket(descriptor: &OwnedFd) -> bool {
    rustix::net::sockopt::socket_type(descriptor).is_ok()
}

/// Contents of the supervisor's welcome.
pub(crate) struct Welcome {
    /// Filter to install before the first job.
    pub(crate) seal: Option<Seal>,
    pub(crate) threads_max: usize,
    pub(crate) heartbeat_ms: u32,
    /// Location for the time of the last heartbeat, if the supervisor reads it there instead of expecting
    /// frames.
    pub(crate) heartbeat_time: Option<&'static AtomicU64>,
    pub(crate) result_bytes_max: u64,
}

/// Returns the maximum number of handler threads for `max_in_flight`. At least one thread is kept, and the
/// ceiling bounds the number of threads whatever the supervisor sends.
pub(crate) fn threads_max(max_in_flight: u32) -> usize {
    max_in_flight.clamp(1, IN_FLIGHT_CEILING) as usize
}

/// The receiving half.
pub(crate) struct Reader {
    pub(crate) inbox: Inbox,
    pub(crate) scratch: Scratch,
    pub(crate) pool: BufferPool,
}

impl Reader {
    pub(crate) fn new() -> Self {
        let scratch = Scratch::with_read_bytes(READ_BYTES);
        Self { inbox: Inbox::default(), scratch, pool: BufferPool::default() }
    }
}

/// Sends the hello and waits for the welcome. Frames behind the welcome stay in the inbox. Errors are
/// messages for people.
pub(crate) fn handshake(link: &OwnedFd, reader: &mut Reader, writer: &Writer) -> Result<Welcome, String> {
    let hello = Hello {
        version_min: PROTOCOL_VERSION,
        version_max: PROTOCOL_VERSION,
        role: role::WORKER,
        frame_bytes_max: u32::MAX,
        capabilities: capability::DISPATCH_THREAD
            | capability::RESIZE
            | capability::PREFETCH
            | capability::JOURNAL_HEARTBEATS
            | capability::MEMORY_FILES,
        name: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
    };
    writer.send(kind::HELLO, MAGIC, &hello);
    let (mut files, mut has_journal) = (Vec::new(), false);
    loop {
        wait(link, PollFlags::IN);
        let (received, mut batch) = reader
            .inbox
            .receive_by(&mut reader.scratch, |buffer| receive_with_files(link, buffer, &mut files))
            .map_err(|error| error.to_string())?;
        while let Some(item) = batch.next().map_err(|error| error.to_string())? {
            let Item::Frame { header, metadata, .. } = item else { continue };
            match header.kind {
                kind::WORKER_WELCOME => {
                    let (welcome, extensions) =
                        codec::decode::<WorkerWelcome<'_>>(metadata, &[]).map_err(|e| e.to_string())?;
                    let seal = extensions.get(tag::SEAL).map(Seal::read).transpose()?;
                    batch.keep_rest();
                    // The supervisor relies on the journal from here on.
                    let mut heartbeat_time = None;
                    if has_journal {
                        let file = files
                            .pop()
                            .ok_or("the journal's descriptor did not arrive: raise `rlimits.nofile`")?;
                        let journal = Journal::map(file).map_err(|error| format!("the journal: {error}"))?;
                        let is_read = welcome.capabilities & welcome_capability::JOURNAL_HEARTBEATS != 0;
                        heartbeat_time = is_read.then(|| journal.heartbeat_time());
                        writer.set_journal(journal);
                    }
                    return Ok(Welcome {
                        seal,
                        threads_max: threads_max(welcome.max_in_flight),
                        heartbeat_ms: welcome.heartbeat_ms,
                        heartbeat_time,
                        result_bytes_max: welcome.result_bytes_max,
                    });
                }
                kind::JOURNAL => has_journal = true,
                kind::REFUSED => {
                    let (refused, _) =
                        codec::decode::<Refused<'_>>(metadata, &[]).map_err(|e| e.to_string())?;
                    return Err(refused.message.to_owned());
                }
                _ => {}
            }
        }
        if received == Received::Closed {
            return Err("the supervisor closed the link before sending a welcome".into());
        }
    }
}

fn wait(link: &OwnedFd, flags: PollFlags) {
    // The next read or write reports any error.
    let _ = poll(&mut [PollFd::new(link, flags)], None);
}

fn identity(link: &OwnedFd) -> rustix::io::Result<(u64, u64)> {
    rustix::fs::fstat(link).map(|found| (found.st_dev, found.st_ino))
}

/// Ends a worker that can no longer use its link.
pub(crate) fn end_without_link(error: rustix::io::Errno) -> ! {
    match error {
        // The supervisor is gone.
        Errno::PIPE | Errno::CONNRESET => kill_self(),
        Errno::BADF | Errno::NOTSOCK | Errno::INVAL | Errno::PERM | Errno::NOTCONN => {
            ownership::exit_with_message(&format!(
                "code in this worker closed or replaced the worker's link to the supervisor, or another \
                 descriptor that the code did not open ({error}); the worker ends here. Close only \
                 descriptors that you opened\n"
            ))
        }
        error => ownership::exit_with_message(&format!(
            "the worker's link to the supervisor cannot be used ({error}); the worker ends here\n"
        )),
    }
}

/// The sending half, shared by all threads.
pub(crate) struct Writer {
    link: OwnedFd,
    /// Device and inode of the link.
    identity: (u64, u64),
    unsent: Mutex<Unsent>,
}

/// Unsent frames.
#[derive(Default)]
struct Unsent {
    outbox: Outbox,
    pool: BufferPool,
    /// Journal in which replies survive this process until they are sent.
    journal: Option<Journal>,
}

impl Unsent {
    /// Returns true if nothing is left to send. An error on the link ends the worker.
    fn flush(&mut self, link: &OwnedFd) -> bool {
        let is_sent = self
            .outbox
            .flush(link, &mut self.pool)
            .unwrap_or_else(|error| end_without_link(Errno::from_io_error(&error).unwrap_or(Errno::IO)));
        if is_sent && let Some(journal) = &mut self.journal {
            journal.clear();
        }
        is_sent
    }
}

impl Writer {
    pub(crate) fn new(link: &OwnedFd) -> io::Result<Self> {
        Ok(Self { link: link.try_clone()?, identity: identity(link)?, unsent: Mutex::default() })
    }

    /// Ends the worker if one of its descriptors of the link, `other` or the writer's, now refers to another
    /// file.
    pub(crate) fn check_link(&self, other: &OwnedFd) {
        for link in [&self.link, other] {
            match identity(link) {
                Ok(found) if found == self.identity => {}
                Ok(_) => end_without_link(Errno::NOTSOCK),
                Err(error) => end_without_link(error),
            }
        }
    }

    /// Sets the journal that stores later replies until they are sent.
    pub(crate) fn set_journal(&self, journal: Journal) {
        if let Some(mut unsent) = self.lock() {
            unsent.journal = Some(journal);
        }
    }

    /// Returns the counters of begun and recalled jobs. `None` without a journal; the supervisor must not
    /// prefetch then.
    pub(crate) fn claims(&self) -> Option<Claims> {
        self.lock()?.journal.as_ref().map(Journal::claims)
    }

    /// Returns `None` in a process that a handler forked, because another thread may have held the lock, and
    /// the link belongs to the worker.
    fn lock(&self) -> Option<MutexGuard<'_, Unsent>> {
        ownership::is_worker().then(|| self.unsent.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Appends a frame, to be sent by the next flush.
    pub(crate) fn push(&self, kind: u8, number: u64, message: &impl bincode::Encode, payload: Payload<'_>) {
        self.push_reply(kind, number, message, &[], payload);
    }

    /// Appends a frame with extensions, each a tag and its bytes. For the reply of a job, returns true if
    /// the next job can begin before the reply is sent. With a journal, this requires that the reply is in
    /// the journal, because only then does the reply survive this process.
    pub(crate) fn push_reply(
        &self,
        kind: u8,
        number: u64,
        message: &impl bincode::Encode,
        extensions: &[(u16, &[u8])],
        payload: Payload<'_>,
    ) -> bool {
        // Texts of handlers were truncated before, so the metadata fits.
        let Some(mut unsent) = self.lock() else { return true };
        let Unsent { outbox, pool, journal } = &mut *unsent;
        let before = outbox.waiting_bytes();
        let _ = outbox.push_pooled(kind, number, message, extensions, payload, pool);
        let Some(journal) = journal else { return true };
        let frame = || outbox.tail_bytes(outbox.waiting_bytes() - before);
        matches!(kind, kind::RESULT | kind::FAILED) && frame().is_some_and(|frame| journal.append(frame))
    }

    /// Sends all queued frames. Blocks until the supervisor has taken them.
    pub(crate) fn flush(&self) {
        let Some(mut unsent) = self.lock() else { return };
        while !unsent.flush(&self.link) {
            wait(&self.link, PollFlags::OUT);
        }
    }

    pub(crate) fn send(&self, kind: u8, number: u64, message: &impl bincode::Encode) {
        self.push(kind, number, message, Payload::NONE);
        self.flush();
    }

    /// Appends a frame and sends what the socket takes. Does nothing and returns false if another thread is
    /// writing; its bytes prove liveness as well as a heartbeat would.
    pub(crate) fn try_send(&self, kind: u8, message: &impl bincode::Encode) -> bool {
        let Some(mut unsent) = self.try_lock() else { return false };
        let is_pushed = unsent.outbox.push(kind, 0, message, &[], Payload::NONE).is_ok();
        unsent.flush(&self.link);
        is_pushed
    }

    /// Sends queued frames as far as the socket takes them. Returns true if nothing is left, or if another
    /// thread is sending.
    pub(crate) fn try_flush(&self) -> bool {
        let Some(mut unsent) = self.try_lock() else { return true };
        unsent.flush(&self.link)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, Unsent>> {
        match self.unsent.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
