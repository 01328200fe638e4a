//! Descriptors that clients and workers send: the kernel refuses them, or the supervisor closes them without blocking.
//! Closing the socket used in these tests takes ten minutes, which is longer than any test waits.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use bulkhead_client::blocking::Client;
use bulkhead_shared::client_protocol::{Hello, role};
use bulkhead_shared::codec;
use bulkhead_shared::frame::{Header, MAGIC, kind};
use bulkhead_tests::{
    PATIENCE, Supervisor, descriptors, heavy, outcome, programs, refuses_descriptors, wait_for,
};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Number of consecutive attacks, chosen to exceed the number of threads that can block in `close`.
const ROUNDS: usize = 8;

fn hello() -> Vec<u8> {
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        role: role::CLIENT,
        frame_bytes_max: u32::MAX,
        capabilities: 0,
        name: "hostile",
        version: "0",
    };
    let mut metadata = Vec::new();
    codec::encode(&hello, &[], &mut metadata).unwrap();
    let (length, metadata_length) = (metadata.len() as u32, metadata.len() as u16);
    let header = Header { length, kind: kind::HELLO, flags: 0, metadata_length, number: MAGIC };
    [&header.encode()[..], &metadata].concat()
}

/// Returns a socket and the listener at the other end. Closing the socket blocks, because the socket has unsent data.
fn lingering() -> (TcpStream, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(600))).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    (socket, listener)
}

fn send(to: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    assert!(rights.push(SendAncillaryMessage::ScmRights(descriptors)));
    sendmsg(to, &[IoSlice::new(bytes)], &mut rights, SendFlags::empty())
}

/// Sends the supervisor a socket whose last `close` blocks. This process closes its own copy after the delivery.
fn pass(to: &UnixStream, bytes: &[u8], is_older: bool) -> TcpListener {
    let (socket, listener) = lingering();
    let (to, length, bytes) = (to.try_clone().unwrap(), bytes.len(), bytes.to_vec());
    let (sender, receiver) = mpsc::channel();
    // `drop(socket)` blocks until `listener` is dropped if the supervisor did not receive the socket or has already
    // closed it.
    std::thread::spawn(move || {
        let sent = send(&to, &bytes, &[socket.as_fd()]);
        drop(to);
        let _ = sender.send(sent);
        drop(socket);
    });
    match receiver.recv_timeout(PATIENCE).unwrap() {
        Ok(sent) => assert!(
            is_older && sent == length,
            "the kernel delivered a descriptor although it can refuse them"
        ),
        Err(error) => assert!(!is_older && error == Errno::PERM, "{error}"),
    }
    listener
}

fn dial(path: &Path) -> UnixStream {
    bulkhead_tests::dial(path).unwrap()
}

fn is_well(supervisor: &Supervisor, client: &Client) {
    let reply = client.job("honest", "ping").deadline(PATIENCE).send();
    assert_eq!(outcome(&reply), "ok");
    assert_eq!(supervisor.try_get("/healthz").unwrap().0, 200);
}

const BULKHEADS: &str = "[bulkhead.honest]\ncommand = [\"MISBEHAVE\"]\n";

/// Runs a test on a simulated older kernel and, if this machine's kernel can refuse descriptors, also on the real
/// kernel.
fn on_both(bulkheads: &str, test: impl Fn(&Supervisor, bool)) {
    if refuses_descriptors() {
        test(&Supervisor::start(bulkheads), false);
    }
    test(&Supervisor::start_on_older_kernel(bulkheads), true);
}

#[test]
fn lingering_socket_from_client_does_not_block_supervisor() {
    let _turn = heavy();
    on_both(BULKHEADS, |supervisor, is_older| {
        let path = supervisor.socket();
        let client = Client::connect(&path).unwrap();
        is_well(supervisor, &client);
        let before = descriptors(supervisor.pid());
        let mut listeners = Vec::new();
        for _ in 0..ROUNDS {
            // Sends one socket with the hello of an open connection, and one with the last bytes of a connection that
            // then closes. The supervisor might never read these last bytes.
            let mut first = dial(&path);
            listeners.push(pass(&first, &hello(), is_older));
            let last = dial(&path);
            listeners.push(pass(&last, &hello(), is_older));
            drop(last);
            is_well(supervisor, &client);
            if is_older {
                let mut told = Vec::new();
                let _ = first.read_to_end(&mut told);
                let told = String::from_utf8_lossy(&told);
                assert!(told.contains("sent descriptors"), "{told}");
            }
        }
        wait_for("the supervisor has no more descriptors than before", || {
            (descriptors(supervisor.pid()) <= before + 4).then_some(())
        });
        is_well(supervisor, &client);
    });
}

#[test]
fn descriptors_from_clients_are_closed() {
    let _turn = heavy();
    let supervisor = Supervisor::start_on_older_kernel(BULKHEADS);
    let client = Client::connect(supervisor.socket()).unwrap();
    is_well(&supervisor, &client);
    let before = descriptors(supervisor.pid());
    let null = std::fs::File::open("/dev/null").unwrap();
    for _ in 0..20 {
        let sockets: Vec<_> = (0..10).map(|_| dial(&supervisor.socket())).collect();
        for socket in &sockets {
            for _ in 0..2 {
                let _ = send(socket, &hello(), &[null.as_fd(); 253]);
            }
        }
        is_well(&supervisor, &client);
    }
    wait_for("the supervisor has no more descriptors than before", || {
        (descriptors(supervisor.pid()) <= before).then_some(())
    });
}

#[test]
fn lingering_socket_from_worker_does_not_block_supervisor() {
    let _turn = heavy();
    let hostile = programs().join("hostile");
    let bulkheads = format!(
        "[bulkhead.hostile]\ncommand = [{hostile:?}]\nsandbox = {{ profile = \"none\" }}\n\
         restart = {{ backoff = \"1ms\", backoff_max = \"1ms\", max = 1000 }}\n\
         {BULKHEADS}sandbox = {{ profile = \"none\" }}\n"
    );
    on_both(&bulkheads, |supervisor, is_older| {
        let client = Client::connect(supervisor.socket()).unwrap();
        for _ in 0..ROUNDS {
            let job = client.job("hostile", "{}").operation("pass-lingering-socket").deadline(PATIENCE);
            let ended = job.send();
            match &ended {
                Ok(reply) => {
                    let told = String::from_utf8_lossy(reply.payload()).into_owned();
                    assert!(!is_older && told.contains("EPERM"), "{told}");
                }
                Err(_) => assert!(is_older && outcome(&ended) == "crashed/protocol", "{}", outcome(&ended)),
            }
            is_well(supervisor, &client);
        }
    });
}
