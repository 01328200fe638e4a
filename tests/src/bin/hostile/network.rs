//! Attempts to use sockets of all kinds.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use bulkhead_shared::client_protocol::{Hello, role};
use bulkhead_shared::frame::{Header, MAGIC, kind};
use rustix::net::{
    AddressFamily, Protocol, SendFlags, SocketAddrUnix, SocketFlags, SocketType, ipproto, sendto, socketpair,
};

use crate::calls::{At, Refused, Tried, call, close};
use crate::link::frame;
use crate::{Attempt, Targets};

pub(crate) const ATTEMPTS: &[(&str, Attempt)] = &[
    ("connect-by-tcp", |to| {
        TcpStream::connect(to.text("tcp")?).at("connect over TCP")?;
        Ok("connected".into())
    }),
    ("listen-on-tcp", |_| {
        let listener = TcpListener::bind("127.0.0.1:0").at("listen on TCP")?;
        Ok(format!("listens at {:?}", listener.local_addr()))
    }),
    ("listen-on-any-port", |_| {
        let socket = tcp_socket("127.0.0.1:0", None)?;
        rustix::net::listen(&socket, 1).at("listen on a port that the kernel chooses")?;
        Ok("listens".into())
    }),
    ("connect-by-mptcp", |to| {
        let target = address(to)?;
        let socket = tcp_socket(to.text("tcp")?, Some(ipproto::MPTCP))?;
        rustix::net::connect(&socket, &target).at("connect over Multipath TCP")?;
        Ok("connected".into())
    }),
    ("connect-by-fast-open", |to| {
        const FAST_OPEN: SendFlags = SendFlags::from_bits_retain(libc::MSG_FASTOPEN as u32);
        let target = address(to)?;
        let socket = tcp_socket(to.text("tcp")?, None)?;
        sendto(&socket, b"x", FAST_OPEN, &target).at("connect with TCP Fast Open")?;
        Ok("connected".into())
    }),
    ("send-by-udp", |to| {
        let target = to.text("udp")?;
        let sent = UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.send_to(b"x", target));
        sent.at("send over UDP")?;
        Ok("sent".into())
    }),
    ("connect-to-abstract-socket", |to| {
        let name = SocketAddr::from_abstract_name(to.text("abstract")?).at("make an address")?;
        UnixStream::connect_addr(&name).at("connect to an abstract Unix socket")?;
        Ok("connected".into())
    }),
    ("take-an-abstract-name", |to| take_an_abstract_name(to.text("abstract")?)),
    ("connect-to-path-socket", |to| {
        UnixStream::connect(to.text("unix")?).at("connect to a Unix socket by its path")?;
        Ok("connected".into())
    }),
    ("send-to-path-socket", send_to_path_socket),
    ("submit-jobs", |to| submit_jobs(to.text("jobs")?)),
    ("administer", |to| administer(to.text("admin")?)),
    ("pair-of-sockets", |_| {
        UnixStream::pair().at("make a pair of sockets")?;
        Ok("made".into())
    }),
    ("raw-socket", |_| socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP, "a raw socket")),
    ("packet-socket", |_| socket(libc::AF_PACKET, libc::SOCK_RAW, 0, "a packet socket")),
    ("routing-socket", |_| socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE, "a routing socket")),
    ("netfilter-socket", |_| {
        socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER, "a netfilter socket")
    }),
    ("virtual-machine-socket", |_| socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0, "a vsock socket")),
    ("cryptography-socket", |_| socket(libc::AF_ALG, libc::SOCK_SEQPACKET, 0, "an AF_ALG socket")),
];

/// Maximum time to wait for a server to reply or close the connection.
const PATIENCE: Duration = Duration::from_secs(5);

fn address(to: &Targets) -> Result<std::net::SocketAddr, Refused> {
    to.text("tcp")?.parse().map_err(|_| Refused::because("NOTARGET", "parse the address"))
}

/// Creates a TCP socket for the address family of the address.
fn tcp_socket(address: &str, protocol: Option<Protocol>) -> Result<OwnedFd, Refused> {
    let family = if address.starts_with('[') { AddressFamily::INET6 } else { AddressFamily::INET };
    rustix::net::socket(family, SocketType::STREAM, protocol).at("make a stream socket")
}

fn socket(family: i32, kind: i32, protocol: i32, what: &str) -> Tried {
    let what = format!("make {what}");
    let made = call(libc::SYS_socket, [family as usize, kind as usize, protocol as usize]).at(&what)?;
    close(made);
    Ok(what)
}

/// Binds a listening socket to an unused abstract socket name. If that fails, binds one end of a socket pair instead.
fn take_an_abstract_name(like: &str) -> Tried {
    let what = "take an abstract name";
    let name = format!("{like}-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).at(what)?;
    if UnixListener::bind_addr(&address).is_ok() {
        return Ok("listens".into());
    }
    let (end, _other) = UnixStream::pair().at(what)?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).at(what)?;
    rustix::net::bind(&end, &address).at(what)?;
    Ok("holds it".into())
}

/// Sends a datagram from one end of a socket pair. Creating a pair needs no `socket` call, and a datagram can be sent
/// to any path.
fn send_to_path_socket(to: &Targets) -> Tried {
    let pair = socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let (socket, _other) = pair.at("make a pair of datagram sockets")?;
    let path = SocketAddrUnix::new(to.text("datagram")?).at("make an address")?;
    sendto(&socket, b"x", SendFlags::empty(), &path).at("send to a Unix socket by its path")?;
    Ok("sent".into())
}

/// Sends a request to the supervisor and returns the reply. The reply is empty if the supervisor closes the connection.
fn ask_supervisor(path: &str, question: &[u8]) -> Result<Vec<u8>, Refused> {
    const ENOUGH: usize = 1024;
    let what = "be served by the supervisor";
    let mut socket = UnixStream::connect(path).at(what)?;
    socket.set_read_timeout(Some(PATIENCE)).at(what)?;
    // The supervisor may already have replied and closed the connection.
    let _ = socket.write_all(question);
    let mut answer = vec![0; ENOUGH];
    let count = socket.read(&mut answer).at(what)?;
    answer.truncate(count);
    Ok(answer)
}

fn submit_jobs(path: &str) -> Tried {
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        role: role::CLIENT,
        frame_bytes_max: u32::MAX,
        capabilities: 0,
        name: "hostile",
        version: "0",
    };
    let what = "be welcomed as a client";
    let answer = ask_supervisor(path, &frame(kind::HELLO, MAGIC, &hello)?)?;
    match answer.first_chunk().map(|header| Header::decode(header).kind) {
        Some(kind::REFUSED) | None => Err(Refused::because("FORBIDDEN", what)),
        Some(other) => Ok(format!("the supervisor replied with a frame of kind {other}")),
    }
}

fn administer(path: &str) -> Tried {
    let question = b"GET /v1/bulkheads HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let answer = ask_supervisor(path, question)?;
    let answer = String::from_utf8_lossy(&answer);
    match answer.split(' ').nth(1) {
        Some("403") | None => Err(Refused::because("FORBIDDEN", "list the bulkheads")),
        Some(status) => Ok(format!("the supervisor replied {status}")),
    }
}
