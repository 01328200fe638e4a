//! Attempts to misuse the link to the supervisor.

use std::fs::File;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bulkhead_shared::codec;
use bulkhead_shared::frame::{Header, kind};
use bulkhead_shared::worker_protocol::{LINK_VARIABLE, Status};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::Attempt;
use crate::calls::{At, Refused, Tried};

pub(crate) const ATTEMPTS: &[(&str, Attempt)] = &[
    ("pass-descriptors", |_| pass_descriptors()),
    ("pass-lingering-socket", |_| pass_lingering_socket()),
    ("urgent-data", |_| urgent_data()),
    ("garbage-on-the-link", |_| garbage_on_the_link()),
    ("garbage-in-the-journal", |_| garbage_in_the_journal()),
];

fn link() -> Result<BorrowedFd<'static>, Refused> {
    let number = std::env::var(LINK_VARIABLE).ok().and_then(|text| text.parse().ok());
    let number = number.ok_or_else(|| Refused::because("NOTARGET", "find the link"))?;
    #[expect(unsafe_code, reason = "the link belongs to the SDK, which does not lend it")]
    // SAFETY: the SDK keeps the descriptor open while jobs run.
    Ok(unsafe { BorrowedFd::borrow_raw(number) })
}

/// Encodes a frame without a payload.
pub(crate) fn frame(kind: u8, number: u64, message: &impl bincode::Encode) -> Result<Vec<u8>, Refused> {
    let mut metadata = Vec::new();
    let encoded = codec::encode(message, &[], &mut metadata);
    encoded.map_err(|error| Refused::because("OTHER", error.to_string()))?;
    let length = metadata.len();
    let header = Header { length: length as u32, kind, flags: 0, metadata_length: length as u16, number };
    Ok([&header.encode()[..], &metadata].concat())
}

/// Sends file descriptors over the link, together with a valid frame.
fn pass_descriptors() -> Tried {
    /// Number of descriptors per message, close to the maximum that the kernel allows.
    const DESCRIPTORS: usize = 250;
    const TIMES: usize = 2;
    let what = "pass descriptors to the supervisor";
    let frame = frame(kind::STATUS, 0, &Status { text: "hello" })?;
    let files: Vec<File> = (0..DESCRIPTORS).map_while(|_| File::open("/dev/null").ok()).collect();
    let descriptors: Vec<_> = files.iter().map(File::as_fd).collect();
    for _ in 0..TIMES {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        rights.push(SendAncillaryMessage::ScmRights(&descriptors));
        sendmsg(link()?, &[IoSlice::new(&frame)], &mut rights, SendFlags::empty()).at(what)?;
    }
    Ok(format!("passed {}", TIMES * descriptors.len()))
}

/// Sends urgent data with `send` and with `sendmsg`. Uses a new pair of sockets if possible, because urgent data can
/// block the reader of the link.
fn urgent_data() -> Tried {
    let what = "send urgent data";
    let pair = UnixStream::pair();
    let socket = match &pair {
        Ok((socket, _)) => socket.as_fd(),
        Err(_) => link()?,
    };
    let mut nothing = SendAncillaryBuffer::default();
    let sent = rustix::net::send(socket, b"!", SendFlags::OOB).at(what);
    let sent_by_message = sendmsg(socket, &[IoSlice::new(b"!")], &mut nothing, SendFlags::OOB).at(what);
    sent.or(sent_by_message).map(|_| "sent".into())
}

/// Passes a TCP socket over the link. Closing the last descriptor of this socket would take ten minutes.
fn pass_lingering_socket() -> Tried {
    let link = link()?;
    let listener = TcpListener::bind("127.0.0.1:0").at("listen")?;
    let address = listener.local_addr().at("listen")?;
    let mut socket = TcpStream::connect(address).at("connect")?;
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(600))).at("linger")?;
    socket.set_nonblocking(true).at("fill the socket")?;
    while socket.write(&[0; 1 << 16]).is_ok() {}
    // The listener stays open but never reads, so that data stays unsent.
    std::mem::forget(listener);
    let frame = frame(kind::STATUS, 0, &Status { text: "hello" })?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let descriptors = [socket.as_fd()];
    rights.push(SendAncillaryMessage::ScmRights(&descriptors));
    let sent = sendmsg(link, &[IoSlice::new(&frame)], &mut rights, SendFlags::empty()).at("pass the socket");
    if sent.is_err() {
        // This process still holds the socket and must not close it.
        std::mem::forget(socket);
    }
    sent.map(|_| "passed".into())
}

/// Writes garbage to the link, and waits until the supervisor kills this worker.
fn garbage_on_the_link() -> Tried {
    let garbage = [0xa5_u8; 64 << 10];
    rustix::io::write(link()?, &garbage).at("write garbage")?;
    loop {
        std::thread::park();
    }
}

/// Overwrites the whole journal with garbage and then dies. The supervisor reads a worker's journal after the
/// worker's death.
fn garbage_in_the_journal() -> Tried {
    let maps = std::fs::read_to_string("/proc/self/maps").at("read its own memory map")?;
    let line = maps.lines().find(|line| line.contains("memfd:journal"));
    let range = line.and_then(|line| line.split(' ').next()?.split_once('-'));
    let number = |text: &str| usize::from_str_radix(text, 16).ok();
    let (begin, end) = range
        .and_then(|(begin, end)| number(begin).zip(number(end)))
        .ok_or_else(|| Refused::because("NOTARGET", "find the journal"))?;
    #[expect(unsafe_code, reason = "the journal belongs to the SDK, which does not lend it")]
    // SAFETY: the range stays mapped for writing, and its contents are no longer needed here.
    unsafe {
        std::ptr::write_bytes(begin as *mut u8, 0xa5, end - begin);
    }
    std::process::abort();
}
