//! Hostile clients and workers, and the busy loops that replace them in half of the rounds (`attacks.rs`). The
//! comparison with busy loops shows how much an attack costs beyond the processor time that any busy process takes.
//! Most of these programs run until they are killed.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use bulkhead_shared::client_protocol::{Hello, Submit, role};
use bulkhead_shared::codec;
use bulkhead_shared::frame::{HEADER_BYTES, Header, MAGIC, kind};
use bulkhead_shared::worker_protocol::{Empty, LINK_VARIABLE, Status};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::Result;

/// Pins this process to the first processor.
pub(crate) fn pin() -> Result<()> {
    let mut processors = rustix::thread::CpuSet::new();
    processors.set(0);
    Ok(rustix::thread::sched_setaffinity(None, &processors)?)
}

/// Keeps one processor busy instead of attacking.
pub(crate) fn spin() -> ! {
    loop {
        std::hint::spin_loop();
    }
}

/// Runs a hostile process that is not a worker. Returns only on an error.
///
/// - `descriptors`: passes descriptors that are slow to close, which the supervisor does not accept.
/// - `announcements`: announces payloads of 1 MiB on 600 connections, but sends only two bytes of each payload.
/// - `loud`: exits and leaves a process that floods standard error. Runs as the program of an `exec` job, not as a
///   client.
/// - `unknown`, `unknown-many`: submits jobs to a nonexistent bulkhead, over one or 200 connections.
/// - `readyz`: requests `/readyz` from the admin socket, which is in the same folder as the jobs socket.
pub(crate) fn client(kind: &str, socket: &Path) -> Result<()> {
    match kind {
        "descriptors" => loop {
            // The supervisor accepts no descriptors and closes the connection.
            let Ok(socket) = connect(socket) else { continue };
            for _ in 0..8 {
                let (held, _peer) = slow_to_close()?;
                if send_descriptor(socket.as_fd(), &[0], held.as_fd()).is_err() {
                    break;
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        },
        "announcements" => loop {
            let mut held = Vec::new();
            for _ in 0..600 {
                let Ok(mut socket) = connect(socket) else { continue };
                let mut frame = submit("open", 1)?;
                let metadata_bytes = u32::try_from(frame.len() - HEADER_BYTES)?;
                frame[..4].copy_from_slice(&(metadata_bytes + (1 << 20)).to_le_bytes());
                frame.extend(*b"xx");
                if socket.write_all(&frame).is_ok() {
                    held.push(socket);
                }
            }
            std::thread::sleep(Duration::from_millis(500));
        },
        "loud" => Err(Command::new("sh").args(["-c", "yes >&2 & sleep .1; exit 0"]).exec().into()),
        "unknown" => flood(socket, 1),
        "unknown-many" => flood(socket, 200),
        "readyz" => loop {
            let Ok(mut admin) = UnixStream::connect(socket.with_file_name("admin.sock")) else { continue };
            let _ = admin.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            let mut answer = Vec::new();
            let _ = admin.read_to_end(&mut answer);
        },
        other => Err(format!("unknown attack '{other}'").into()),
    }
}

/// Submits jobs to a nonexistent bulkhead as fast as possible, over `connections` connections.
fn flood(path: &Path, connections: usize) -> Result<()> {
    let burst: Vec<u8> =
        (0..64).map(|number| submit("missing", number)).collect::<Result<Vec<_>>>()?.concat();
    let mut sockets = Vec::new();
    let mut answers = vec![0; 1 << 16];
    loop {
        while sockets.len() < connections {
            let socket = connect(path)?;
            socket.set_nonblocking(true)?;
            // The second value is the number of bytes of the current burst that have been sent.
            sockets.push((socket, 0));
        }
        sockets.retain_mut(|(socket, at)| {
            while socket.read(&mut answers).is_ok_and(|count| count == answers.len()) {}
            match socket.write(&burst[*at..]) {
                Ok(count) => {
                    *at = (*at + count) % burst.len();
                    true
                }
                Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
            }
        });
    }
}

/// Runs a hostile worker, which follows the protocol only until the worker has reported that it is ready.
///
/// - `spin`: keeps one processor busy, for comparison with the attacks.
/// - `frames`: floods the supervisor with heartbeats, status messages and frames of an unknown kind.
/// - `descriptors`: passes descriptors that are slow to close.
/// - `idle`: does not attack and runs no jobs. Returns when the supervisor closes the link.
pub(crate) fn worker(kind: &str) -> Result<()> {
    let number = std::env::var(LINK_VARIABLE)?.parse()?;
    #[expect(unsafe_code, reason = "the descriptor was inherited for this purpose")]
    // SAFETY: the supervisor passed this descriptor to this process, and no other code uses it.
    let mut link = UnixStream::from(unsafe { OwnedFd::from_raw_fd(number) });
    link.write_all(&hello(role::WORKER)?)?;
    let mut welcome = [0; 4096];
    let _ = link.read(&mut welcome)?;
    link.write_all(&frame(self::kind::READY, 0, &Empty)?)?;
    if kind == "idle" {
        // Reads and ignores everything that the supervisor sends.
        while link.read(&mut welcome)? > 0 {}
        return Ok(());
    }
    match kind {
        "spin" => spin(),
        "frames" => {
            let mut burst = frame(self::kind::HEARTBEAT, 0, &Empty)?;
            burst.extend(frame(self::kind::STATUS, 0, &Status { text: "still here" })?);
            burst.extend(frame(200, 0, &Empty)?);
            let burst = burst.repeat(100);
            loop {
                link.write_all(&burst)?;
            }
        }
        "descriptors" => loop {
            let (held, _peer) = slow_to_close()?;
            // Sends a descriptor with each heartbeat.
            if send_descriptor(link.as_fd(), &frame(self::kind::HEARTBEAT, 0, &Empty)?, held.as_fd()).is_err()
            {
                std::thread::sleep(Duration::from_millis(1));
            }
        },
        other => Err(format!("unknown attack '{other}'").into()),
    }
}

/// Returns both ends of a TCP connection. The first end has unsent data, and the second end is never read. Closing the
/// last descriptor of the first end therefore takes seconds.
fn slow_to_close() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let held = TcpStream::connect(listener.local_addr()?)?;
    let (peer, _) = listener.accept()?;
    rustix::net::sockopt::set_socket_linger(&held, Some(Duration::from_secs(2)))?;
    held.set_nonblocking(true)?;
    while (&held).write(&[0; 1 << 16]).is_ok() {}
    Ok((held, peer))
}

fn send_descriptor(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: BorrowedFd<'_>) -> Result<()> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err("the message has no space for a descriptor".into());
    }
    sendmsg(socket, &[std::io::IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn connect(path: &Path) -> Result<UnixStream> {
    let mut socket = UnixStream::connect(path)?;
    socket.write_all(&hello(role::CLIENT)?)?;
    Ok(socket)
}

fn frame<M: bincode::Encode>(kind: u8, number: u64, message: &M) -> Result<Vec<u8>> {
    let mut metadata = Vec::new();
    codec::encode(message, &[], &mut metadata)?;
    let metadata_length = u16::try_from(metadata.len())?;
    let header = Header { length: metadata_length.into(), kind, flags: 0, metadata_length, number };
    Ok([header.encode().as_slice(), &metadata].concat())
}

fn hello(role: u8) -> Result<Vec<u8>> {
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        role,
        frame_bytes_max: u32::MAX,
        capabilities: 0,
        name: "attacker",
        version: "0",
    };
    frame(kind::HELLO, MAGIC, &hello)
}

fn submit(bulkhead: &str, number: u64) -> Result<Vec<u8>> {
    let submit =
        Submit { bulkhead, operation: "", tenant: "", deadline_us: 0, priority: 1, idempotent: 0, cost: 0 };
    frame(kind::SUBMIT, number, &submit)
}
