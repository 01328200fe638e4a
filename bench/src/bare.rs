//! Contains the relay and the client of the bare chain, which shows the cost of the sockets alone. The chain has no
//! policy, no deadlines and no checks, and its framing only matches replies to requests. `chains` starts the processes,
//! and the echo process is in `../parts/src/echo.rs`.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::rc::Rc;

use bulkhead_bench_parts::READ_BYTES;
use rustix::process::{Resource, Rlimit};
use tokio::io::AsyncWriteExt;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, oneshot};

use crate::Result;
use crate::processes::Process;

/// Maximum number of bytes per read when there are many echo processes. Small, because each echo process receives few
/// requests.
const SPREAD_BYTES: usize = 8 * 1024;

/// Size of the header before each payload, in bytes. The header contains the length of the payload and the
/// request number.
const HEADER_BYTES: usize = 12;

/// Forwards bytes between one client and the echo process.
pub(crate) fn relay(socket: &Path, echo: &Path) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (near, _) = UnixListener::bind(socket)?.accept().await?;
        let far = connect(echo).await?;
        let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
        tokio::select! {
            result = forward(near_in, far_out) => result,
            result = forward(far_in, near_out) => result,
        }
    })?;
    Ok(())
}

/// Forwards the requests of one client to `echoes` echo processes, and the replies to the client. The first bytes of
/// a payload select the echo process. All bytes available for one destination are sent in a single write.
pub(crate) fn spread(socket: &Path, echoes: usize) -> Result<()> {
    let most = rustix::process::getrlimit(Resource::Nofile).maximum;
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let listener = UnixListener::bind(socket)?;
        let (mut processes, mut far, answers) = (Vec::new(), Vec::new(), Rc::new(Unsent::default()));
        for _ in 0..echoes {
            let (process, socket) = Process::echo()?;
            socket.set_nonblocking(true)?;
            let (far_in, far_out) = UnixStream::from_std(socket)?.into_split();
            tokio::task::spawn_local(collect(far_in, answers.clone()));
            processes.push(process);
            far.push(far_out);
        }
        let (near_in, near_out) = listener.accept().await?.0.into_split();
        tokio::select! {
            result = distribute(near_in, &mut far) => result?,
            result = answers.write_to(near_out) => result?,
        }
        Ok(())
    })
}

/// Bytes that have not been written yet.
#[derive(Default)]
struct Unsent {
    bytes: RefCell<Vec<u8>>,
    due: Notify,
}

impl Unsent {
    async fn write_to(&self, mut to: OwnedWriteHalf) -> io::Result<()> {
        loop {
            self.due.notified().await;
            let bytes = self.bytes.take();
            to.write_all(&bytes).await?;
        }
    }
}

async fn collect(from: OwnedReadHalf, answers: Rc<Unsent>) -> io::Result<()> {
    let mut buffer = vec![0; SPREAD_BYTES];
    loop {
        from.readable().await?;
        match from.try_read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                answers.bytes.borrow_mut().extend_from_slice(&buffer[..count]);
                answers.due.notify_one();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

async fn distribute(from: OwnedReadHalf, far: &mut [OwnedWriteHalf]) -> io::Result<()> {
    let mut buffer = vec![0; READ_BYTES];
    let (mut held, mut unsent, mut touched) = (Vec::new(), vec![Vec::new(); far.len()], Vec::new());
    loop {
        from.readable().await?;
        match from.try_read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => held.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        }
        let mut at = 0;
        while let Some((length, rest)) = held[at..].split_first_chunk::<4>()
            && let Some(frame) = held[at..].get(..HEADER_BYTES + u32::from_le_bytes(*length) as usize)
            && let Some(number) = rest.get(8..).and_then(|payload| payload.first_chunk::<4>())
        {
            let to = u32::from_le_bytes(*number) as usize % far.len();
            if unsent[to].is_empty() {
                touched.push(to);
            }
            unsent[to].extend_from_slice(frame);
            at += frame.len();
        }
        held.drain(..at);
        for to in touched.drain(..) {
            far[to].write_all(&unsent[to]).await?;
            unsent[to].clear();
        }
    }
}

/// Connects to a socket. If no process listens on the socket yet, waits until one does.
async fn connect(socket: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(socket).await {
            // The socket exists, but no process is listening on it yet.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => tokio::task::yield_now().await,
            other => {
                return other
                    .map_err(|error| io::Error::other(format!("failed to connect to {socket:?}: {error}")));
            }
        }
    }
}

async fn forward(from: OwnedReadHalf, mut to: OwnedWriteHalf) -> io::Result<()> {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        from.readable().await?;
        match from.try_read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => to.write_all(&buffer[..count]).await?,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// Client of the bare chain. Each caller waits for the reply to its own request. All pending requests are sent in a
/// single write.
#[derive(Clone)]
pub(crate) struct Client(Rc<Shared>);

struct Shared {
    stream: UnixStream,
    unsent: RefCell<Vec<u8>>,
    is_due: Cell<bool>,
    due: Notify,
    waiters: RefCell<Waiters>,
}

#[derive(Default)]
struct Waiters {
    slots: Vec<Option<oneshot::Sender<Vec<u8>>>>,
    free: VecDeque<usize>,
}

impl Client {
    /// Connects to the relay. Must be called within a `LocalSet`.
    pub(crate) async fn connect(socket: &Path) -> Result<Self> {
        let client = Self(Rc::new(Shared {
            stream: connect(socket).await?,
            unsent: RefCell::default(),
            is_due: Cell::new(false),
            due: Notify::new(),
            waiters: RefCell::default(),
        }));
        tokio::task::spawn_local(write(client.0.clone()));
        tokio::task::spawn_local(read(client.0.clone()));
        Ok(client)
    }

    /// Sends a request and returns the reply.
    pub(crate) async fn call(&self, payload: &[u8]) -> Result<Vec<u8>> {
        let (sender, answer) = oneshot::channel();
        let number = self.0.waiters.borrow_mut().insert(sender);
        let length = u32::try_from(payload.len())?;
        {
            let mut unsent = self.0.unsent.borrow_mut();
            unsent.extend_from_slice(&length.to_le_bytes());
            unsent.extend_from_slice(&(number as u64).to_le_bytes());
            unsent.extend_from_slice(payload);
        }
        if !self.0.is_due.replace(true) {
            self.0.due.notify_one();
        }
        Ok(answer.await?)
    }
}

impl Waiters {
    fn insert(&mut self, waiter: oneshot::Sender<Vec<u8>>) -> usize {
        match self.free.pop_back() {
            Some(number) => {
                self.slots[number] = Some(waiter);
                number
            }
            None => {
                self.slots.push(Some(waiter));
                self.slots.len() - 1
            }
        }
    }

    fn remove(&mut self, number: usize) -> Option<oneshot::Sender<Vec<u8>>> {
        let waiter = self.slots.get_mut(number)?.take()?;
        self.free.push_back(number);
        Some(waiter)
    }
}

async fn write(shared: Rc<Shared>) -> io::Result<()> {
    let mut sending = Vec::new();
    loop {
        shared.due.notified().await;
        shared.is_due.set(false);
        std::mem::swap(&mut sending, &mut *shared.unsent.borrow_mut());
        let mut rest = &sending[..];
        while !rest.is_empty() {
            match shared.stream.try_write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => shared.stream.writable().await?,
                Err(error) => return Err(error),
            }
        }
        sending.clear();
    }
}

async fn read(shared: Rc<Shared>) -> io::Result<()> {
    let mut buffer = vec![0; READ_BYTES];
    let mut held: Vec<u8> = Vec::new();
    loop {
        shared.stream.readable().await?;
        match shared.stream.try_read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                held.extend_from_slice(&buffer[..count]);
                let taken = deliver(&held, &mut shared.waiters.borrow_mut());
                held.drain(..taken);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// Delivers all complete replies. Returns the total size of these replies in bytes.
fn deliver(held: &[u8], waiters: &mut Waiters) -> usize {
    let mut at = 0;
    while let Some((length, rest)) = held[at..].split_first_chunk::<4>()
        && let Some((number, rest)) = rest.split_first_chunk::<8>()
        && let Some(payload) = rest.get(..u32::from_le_bytes(*length) as usize)
    {
        if let Some(waiter) = waiters.remove(u64::from_le_bytes(*number) as usize) {
            // Sending fails only if the caller has dropped the receiver.
            let _ = waiter.send(payload.to_vec());
        }
        at += HEADER_BYTES + payload.len();
    }
    at
}
