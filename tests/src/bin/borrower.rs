//! A worker that implements the protocol without the SDK. A job's operation determines how the worker uses or misuses
//! memory files.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use bulkhead_shared::client_protocol::{Hello, role};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::connection::{BufferPool, Inbox, Item, Outbox, Payload, Received, Scratch};
use bulkhead_shared::frame::{MAGIC, kind};
use bulkhead_shared::memory_files::{LeaseRef, receive_with_files};
use bulkhead_shared::worker_protocol::{Empty, Job, LINK_VARIABLE, capability};

/// Payload files and result files of all leases, by lease number.
type Lent = HashMap<u64, (File, File)>;

struct Worker {
    socket: UnixStream,
    lent: Lent,
    takes: bool,
}

fn main() {
    let takes = std::env::args().nth(1).as_deref() != Some("never-takes");
    let fd = std::env::var(LINK_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(-1);
    // SAFETY: the supervisor passed this descriptor, and nothing else in this process uses it.
    #[expect(unsafe_code, reason = "takes over an inherited descriptor")]
    let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    let mut worker = Worker { socket, lent: Lent::new(), takes };
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        role: role::WORKER,
        frame_bytes_max: u32::MAX,
        capabilities: capability::MEMORY_FILES,
        name: "borrower",
        version: "0",
    };
    worker.send(kind::HELLO, MAGIC, &hello, None, b"");
    worker.serve();
}

impl Worker {
    fn send(
        &self,
        kind: u8,
        number: u64,
        message: &impl bincode::Encode,
        named: Option<LeaseRef>,
        payload: &[u8],
    ) {
        let named = named.map(LeaseRef::to_bytes);
        let named = named.as_ref().map(|named| (tag::LEASE, &named[..]));
        let mut outbox = Outbox::default();
        outbox
            .push(kind, number, message, named.as_slice(), Payload::Copied(payload))
            .expect("the message fits into a frame");
        while matches!(outbox.flush(&self.socket, &mut BufferPool::default()), Ok(false)) {
            std::thread::yield_now();
        }
    }

    fn serve(&mut self) {
        let (mut inbox, mut scratch) = (Inbox::default(), Scratch::default());
        let mut files = Vec::new();
        let reader = self.socket.try_clone().expect("a descriptor");
        loop {
            let mut poll = [rustix::event::PollFd::new(&reader, rustix::event::PollFlags::IN)];
            let _ = rustix::event::poll(&mut poll, None);
            let read =
                inbox.receive_by(&mut scratch, |buffer| receive_with_files(&reader, buffer, &mut files));
            let (received, mut batch) = read.expect("the link is read");
            while let Some(item) = batch.next().expect("frames") {
                match item {
                    Item::Frame { header, metadata, payload } => match header.kind {
                        kind::WORKER_WELCOME => self.send(kind::READY, 0, &Empty, None, b""),
                        kind::FILES => {
                            let mut came = files.drain(..).map(File::from);
                            let pair = (
                                came.next().expect("the payload file"),
                                came.next().expect("the result file"),
                            );
                            drop(came);
                            self.lent.insert(header.number, pair);
                            if self.takes {
                                self.send(kind::FILES_TAKEN, header.number, &Empty, None, b"");
                            }
                        }
                        kind::JOB => self.job(header.number, metadata, payload),
                        kind::DRAIN => std::process::exit(0),
                        _ => {}
                    },
                    Item::Announced { .. } => batch.accept(Vec::new()),
                    Item::Large { header, metadata, payload } => self.job(header.number, &metadata, &payload),
                }
            }
            if received == Received::Closed {
                return;
            }
        }
    }

    fn job(&self, job: u64, metadata: &[u8], bytes: &[u8]) {
        let (order, extensions) = codec::decode::<Job<'_>>(metadata, &[tag::LEASE]).expect("a job");
        let Some(named) = extensions.get(tag::LEASE).and_then(LeaseRef::from_bytes) else {
            return self.send(
                kind::RESULT,
                job,
                &Empty,
                None,
                if order.operation == "where" { b"bytes" } else { bytes },
            );
        };
        let (payload, result) = &self.lent[&named.lease];
        let size = result.metadata().expect("a file").len();
        match order.operation {
            "where" => self.send(kind::RESULT, job, &Empty, None, b"file"),
            // Returns the names of forbidden operations that succeeded.
            "attack" => {
                let path = format!("/proc/self/fd/{}", payload.as_raw_fd());
                let tries = [
                    ("write", payload.write_at(b"mine", 0).is_ok()),
                    ("reopen", OpenOptions::new().write(true).open(path).is_ok()),
                    ("shrink", result.set_len(0).is_ok()),
                    ("grow", result.set_len(size * 2).is_ok()),
                    ("seal", rustix::fs::fcntl_add_seals(result, rustix::fs::SealFlags::WRITE).is_ok()),
                ];
                let done: Vec<_> =
                    tries.into_iter().filter(|(_, is_done)| *is_done).map(|(name, _)| name).collect();
                self.send(kind::RESULT, job, &Empty, None, format!("done: {}", done.join(" ")).as_bytes());
            }
            // Sends a correct result, but continues to write to the result file.
            "scribble" => {
                result.write_all_at(&vec![1; named.bytes as usize], 0).expect("the result file is writable");
                self.send(kind::RESULT, job, &Empty, Some(named), b"");
                (0..200).for_each(|n| {
                    let _ = result.write_all_at(&vec![n; size as usize], 0);
                });
            }
            "lie-lease" => {
                let named = LeaseRef { lease: named.lease + 1, ..named };
                self.send(kind::RESULT, job, &Empty, Some(named), b"");
            }
            "lie-both" => self.send(kind::RESULT, job, &Empty, Some(named), b"here"),
            "lie-bytes" => {
                let named = LeaseRef { bytes: size + 1, ..named };
                self.send(kind::RESULT, job, &Empty, Some(named), b"");
            }
            _ => {
                let mut bytes = vec![0; named.bytes as usize];
                payload.read_exact_at(&mut bytes, 0).expect("the payload file has the announced length");
                result.write_all_at(&bytes, 0).expect("the result file is writable");
                self.send(kind::RESULT, job, &Empty, Some(named), b"");
            }
        }
    }
}
