//! Owns the worker's end of the link to the supervisor, including the inherited descriptor and the handshake. All
//! threads of the worker send their frames through `Writer`. `pool` reads and handles the frames that arrive. The
//! process exits if the link breaks.

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

/// Size of the read buffer for the link, in bytes. Kept small because a worker receives few jobs at once.
const READ_BYTES: usize = 64 * 1024;

/// Takes ownership of the descriptor whose number the supervisor passed in the environment variable `variable`. Returns
/// `None` if there is no such descriptor, for example because the program was started by hand.
pub(crate) fn inherited(variable: &str) -> Option<OwnedFd> {
    let number: RawFd = std::env::var(variable).ok()?.parse().ok().filter(|number| *number > 2)?;
    // SAFETY: `BorrowedFd` requires an open descriptor. The number is only passed to `fcntl`, which fails if
    // the descriptor is not open. The number comes from this process's environment and is used once, and
    // nothing else in this process uses this descriptor so early in `main`.
    #[expect(unsafe_code, reason = "the descriptor is inherited from the parent process")]
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    // Children must not inherit the descriptor.
    rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC).ok()?;
    // SAFETY: the descriptor is open, and the supervisor passed it to this process for this use.
    #[expect(unsafe_code, reason = "the descriptor is inherited from the parent process")]
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

pub(crate) fn is_socket(descriptor: &OwnedFd) -> bool {
    rustix::net::sockopt::socket_type(descriptor).is_ok()
}

/// Contents of the supervisor's welcome.
pub(crate) struct Welcome {
    /// Seccomp filter that must be installed before the first job.
    pub(crate) seal: Option<Seal>,
    pub(crate) threads_max: usize,
    pub(crate) heartbeat_ms: u32,
    /// Location in the journal where the worker stores its last heartbeat time. `None` if the supervisor expects
    /// heartbeat frames.
    pub(crate) heartbeat_time: Option<&'static AtomicU64>,
    pub(crate) journal_file: Option<OwnedFd>,
    pub(crate) result_bytes_max: u64,
}

/// Returns the maximum number of handler threads for a given `max_in_flight`. The result is between one and
/// [`IN_FLIGHT_CEILING`].
pub(crate) fn threads_max(max_in_flight: u32) -> usize {
    max_in_flight.clamp(1, IN_FLIGHT_CEILING) as usize
}

/// The receiving half of the link.
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

/// Sends the hello and waits for the welcome. Leaves frames that arrive together with the welcome in the reader.
/// Returns errors as human-readable messages.
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
            | capability::MEMORY_FILES
            | capability::CRASH_RECORDS,
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
                    // After the welcome, the supervisor relies on the journal.
                    let (mut heartbeat_time, mut journal_file) = (None, None);
                    if has_journal {
                        let file = files
                            .pop()
                            .ok_or("the journal's descriptor did not arrive: raise `rlimits.nofile`")?;
                        let journal = Journal::map(&file)
                            .map_err(|error| format!("failed to map the journal: {error}"))?;
                        let is_read = welcome.capabilities & welcome_capability::JOURNAL_HEARTBEATS != 0;
                        heartbeat_time = is_read.then(|| journal.heartbeat_time());
                        writer.set_journal(journal);
                        journal_file = Some(file);
                    }
                    return Ok(Welcome {
                        seal,
                        threads_max: threads_max(welcome.max_in_flight),
                        heartbeat_ms: welcome.heartbeat_ms,
                        heartbeat_time,
                        journal_file,
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
    // Ignores errors, because the next read or write reports them.
    let _ = poll(&mut [PollFd::new(link, flags)], None);
}

fn identity(link: &OwnedFd) -> rustix::io::Result<(u64, u64)> {
    rustix::fs::fstat(link).map(|found| (found.st_dev, found.st_ino))
}

/// Exits after an error on the link.
pub(crate) fn end_without_link(error: rustix::io::Errno) -> ! {
    match error {
        // The supervisor is gone.
        Errno::PIPE | Errno::CONNRESET => kill_self(),
        Errno::BADF | Errno::NOTSOCK | Errno::INVAL | Errno::PERM | Errno::NOTCONN => {
            ownership::exit_with_message(&format!(
                "code in this worker closed or replaced the worker's link to the supervisor, or another \
                 descriptor that the code did not open ({error}); the worker exits. Close only \
                 descriptors that you opened\n"
            ))
        }
        error => ownership::exit_with_message(&format!(
            "the worker's link to the supervisor is unusable ({error}); exiting\n"
        )),
    }
}

/// The sending half of the link, shared by all threads.
pub(crate) struct Writer {
    link: OwnedFd,
    /// Device and inode number of the link's socket.
    identity: (u64, u64),
    unsent: Mutex<Unsent>,
}

/// Frames that have not been sent yet.
#[derive(Default)]
struct Unsent {
    outbox: Outbox,
    pool: BufferPool,
    /// Journal that stores unsent replies, so that they are not lost if this process dies.
    journal: Option<Journal>,
}

impl Unsent {
    /// Sends as many queued bytes as the link accepts. Returns true if all bytes were sent. On an error, the
    /// process exits.
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

    /// Exits if `other` or the writer's descriptor no longer refers to the link's socket.
    pub(crate) fn check_link(&self, other: &OwnedFd) {
        for link in [&self.link, other] {
            match identity(link) {
                Ok(found) if found == self.identity => {}
                Ok(_) => end_without_link(Errno::NOTSOCK),
                Err(error) => end_without_link(error),
            }
        }
    }

    /// Sets the journal that stores replies until they are sent.
    pub(crate) fn set_journal(&self, journal: Journal) {
        if let Some(mut unsent) = self.lock() {
            unsent.journal = Some(journal);
        }
    }

    /// Returns the counters of begun and recalled jobs, or `None` if there is no journal. Without a journal, the
    /// supervisor must not prefetch jobs.
    pub(crate) fn claims(&self) -> Option<Claims> {
        self.lock()?.journal.as_ref().map(Journal::claims)
    }

    /// Locks the queue of unsent frames. Returns `None` in a process that a handler forked, because such a
    /// process must not use the link, and because another thread may have held the lock during the fork.
    fn lock(&self) -> Option<MutexGuard<'_, Unsent>> {
        ownership::is_worker().then(|| self.unsent.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Queues a frame. The next flush sends the frame.
    pub(crate) fn push(&self, kind: u8, number: u64, message: &impl bincode::Encode, payload: Payload<'_>) {
        self.push_reply(kind, number, message, &[], payload);
    }

    /// Queues a frame with extensions, which are pairs of a tag and a value. Returns true if the next job may begin
    /// before the frame is sent. If there is a journal, this requires that the frame is a reply and is stored in the
    /// journal, because the next job could terminate this process.
    pub(crate) fn push_reply(
        &self,
        kind: u8,
        number: u64,
        message: &impl bincode::Encode,
        extensions: &[(u16, &[u8])],
        payload: Payload<'_>,
    ) -> bool {
        // Strings from handlers are already truncated, so the metadata always fits.
        let Some(mut unsent) = self.lock() else { return true };
        let Unsent { outbox, pool, journal } = &mut *unsent;
        let before = outbox.waiting_bytes();
        let _ = outbox.push_pooled(kind, number, message, extensions, payload, pool);
        let Some(journal) = journal else { return true };
        let frame = || outbox.tail_bytes(outbox.waiting_bytes() - before);
        matches!(kind, kind::RESULT | kind::FAILED) && frame().is_some_and(|frame| journal.append(frame))
    }

    /// Sends all queued frames. Blocks until the link has accepted them.
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

    /// Queues a frame and sends as many bytes as the link accepts. Does nothing and returns false if another
    /// thread is writing. A heartbeat is not needed in this case, because any bytes on the link show that the
    /// worker is alive.
    pub(crate) fn try_send(&self, kind: u8, message: &impl bincode::Encode) -> bool {
        let Some(mut unsent) = self.try_lock() else { return false };
        let is_pushed = unsent.outbox.push(kind, 0, message, &[], Payload::NONE).is_ok();
        unsent.flush(&self.link);
        is_pushed
    }

    /// Sends as many queued bytes as the link accepts. Returns true if no bytes are left or another thread is
    /// already sending.
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
