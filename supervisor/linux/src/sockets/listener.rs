//! Closes and takes over listening sockets that this program shares with another program. The control plane's `tcp`
//! closes listeners, and the supervisor's `activation` takes them over. No function here accepts connections.
//!
//! [`stop_new_connections`] closes a TCP listener without losing connections. If a listener is only closed, the kernel
//! resets all connections in its queue. One of them may have arrived between the last `accept` and the close, from a
//! client that has already sent a request. [`has_handshakes`] finds connections that are about to arrive. [`inherit`]
//! takes over a listener that a service manager has opened.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;

use libc::{BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET};
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::net::{AddressFamily, SocketType, sockopt};
use socket2::{SockFilter, SockRef};

/// An inherited listener, by address family.
#[derive(Debug)]
pub enum InheritedListener {
    /// A Unix socket.
    Unix(UnixListener),
    /// An IPv4 or IPv6 socket.
    Tcp(TcpListener),
}

/// Takes over an inherited listening socket. Programs that are started later do not inherit the descriptor. Call this
/// at most once per descriptor number, before any other code in this process can have opened a descriptor with that
/// number.
///
/// # Errors
///
/// Fails if the descriptor is not open, or is not a listening stream socket.
#[expect(unsafe_code, reason = "the descriptor's number was passed by the service manager")]
pub fn inherit(number: RawFd) -> io::Result<InheritedListener> {
    let unusable = |problem: &str| io::Error::other(format!("descriptor {number} {problem}"));
    if number < 0 {
        return Err(unusable("is not open"));
    }
    // SAFETY: the descriptor is only queried. If the number is not open, the call fails.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = fcntl_getfd(borrowed).map_err(|_| unusable("is not open"))?;
    let is_listening = sockopt::socket_type(borrowed) == Ok(SocketType::STREAM)
        && sockopt::socket_acceptconn(borrowed) == Ok(true);
    if !is_listening {
        return Err(unusable("is not a listening stream socket"));
    }
    let family = sockopt::socket_domain(borrowed)?;
    fcntl_setfd(borrowed, flags | FdFlags::CLOEXEC)?;
    // SAFETY: the descriptor is open, was inherited for this purpose, and no other code in this process knows of
    // it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    match family {
        AddressFamily::UNIX => Ok(InheritedListener::Unix(descriptor.into())),
        AddressFamily::INET | AddressFamily::INET6 => Ok(InheritedListener::Tcp(descriptor.into())),
        _ => Err(unusable("is neither a Unix socket nor a TCP socket")),
    }
}

/// Offset of the flags in a TCP header. A segment that opens a connection has `SYN` set and `ACK` clear.
const TCP_FLAGS_OFFSET: u32 = 13;
const SYN: u32 = 0x02;
const ACK: u32 = 0x10;

/// Makes a listener drop packets that open a new connection. Handshakes that have already begun can still complete.
///
/// A client that connects after this call retries after a second, and then reaches the next program that listens on the
/// address, or is refused. During a restart, other proxies drop such packets with the machine's packet filter, but a
/// filter on the socket needs no privileges.
///
/// Fails if `setsockopt(2)` with `SO_ATTACH_FILTER` fails.
pub fn stop_new_connections(listener: &impl AsFd) -> io::Result<()> {
    let instruction = |code: u32, k, unless| SockFilter::new(code as u16, 0, unless, k);
    let filter = [
        instruction(BPF_LD | BPF_B | BPF_ABS, TCP_FLAGS_OFFSET, 0),
        instruction(BPF_ALU | BPF_AND | BPF_K, SYN | ACK, 0),
        instruction(BPF_JMP | BPF_JEQ | BPF_K, SYN, 1),
        instruction(BPF_RET | BPF_K, 0, 0),
        instruction(BPF_RET | BPF_K, u32::MAX, 0),
    ];
    SockRef::from(listener).attach_filter(&filter)
}

/// Returns true if a client has begun a handshake with a TCP listener and has not completed it. Such a connection
/// cannot be accepted yet, and is reset if the listener closes. Returns false if the kernel's list of connections
/// cannot be read.
pub fn has_handshakes(listener: &impl AsFd) -> bool {
    let address = rustix::net::getsockname(listener).ok().and_then(|address| address.try_into().ok());
    let Some(port) = address.map(|address: SocketAddr| address.port()) else { return false };
    let is_handshake = |line: io::Result<String>| line.is_ok_and(|line| is_handshake_with(&line, port));
    // An IPv6 listener can also have IPv4 clients. Their connections are in the kernel's list of IPv6 connections.
    ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"]
        .iter()
        .filter_map(|path| File::open(path).ok())
        .any(|file| BufReader::new(file).lines().any(is_handshake))
}

/// Checks a line of the kernel's list of connections. The fields are a number, the local address, the remote address,
/// and the state. All are hexadecimal.
fn is_handshake_with(line: &str, port: u16) -> bool {
    const SYN_RECV: &str = "03";
    let mut fields = line.split_whitespace().skip(1);
    let (local, state) = (fields.next(), fields.nth(1));
    let local_port = local.and_then(|local| local.rsplit(':').next());
    state == Some(SYN_RECV) && local_port.is_some_and(|hex| u16::from_str_radix(hex, 16) == Ok(port))
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::TcpStream;
    use std::os::fd::IntoRawFd;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use socket2::{Domain, Socket, Type};

    use super::*;

    const CONNECT_TIMEOUT: Duration = Duration::from_millis(100);

    /// Maximum time to serve all clients. The clients normally finish shortly after [`CONNECT_TIMEOUT`].
    const SERVE_TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn stopped_listener_accepts_only_pending_connections() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                eprintln!("NOT RUN: this machine does not have the address {address}");
                continue;
            };
            let address = listener.local_addr().unwrap();
            let _before = TcpStream::connect(address).unwrap();
            stop_new_connections(&listener).unwrap();
            let error = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{address}");
            assert!(listener.accept().is_ok(), "{address}");
            listener.set_nonblocking(true).unwrap();
            assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "{address}");
        }
    }

    #[test]
    fn handshake_is_found_until_connection_can_be_accepted() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                eprintln!("NOT RUN: this machine does not have the address {address}");
                continue;
            };
            let address = listener.local_addr().unwrap();
            let client = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
            client.set_nonblocking(true).unwrap();
            // The filter drops the listener's response to the client's first packet.
            client.attach_filter(&[SockFilter::new((BPF_RET | BPF_K) as u16, 0, 0, 0)]).unwrap();
            assert!(!has_handshakes(&listener), "{address}");
            client.connect(&address.into()).unwrap_err();
            assert!(has_handshakes(&listener), "{address}");
            stop_new_connections(&listener).unwrap();
            assert!(has_handshakes(&listener), "{address}");
            client.detach_filter().unwrap();
            // The kernel resends the listener's response after a second.
            let _accepted = listener.accept().unwrap();
            assert!(!has_handshakes(&listener), "{address}");
        }
    }

    /// Clients continue to connect while the listener is being stopped. Each client that has connected must receive a
    /// reply.
    #[test]
    fn stopped_listener_serves_all_established_connections() {
        for round in 0..30 {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            listener.set_nonblocking(true).unwrap();
            // Each client connects repeatedly until a connection attempt fails.
            let client = move || {
                while let Ok(mut socket) = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
                    let answered = socket.read_exact(&mut [0]).map_err(|error| error.kind());
                    assert_eq!(answered, Ok(()), "round {round}");
                }
            };
            let clients: Vec<_> = (0..4).map(|_| std::thread::spawn(client)).collect();
            let answer = |within, is_over: &dyn Fn() -> bool| {
                let end = Instant::now() + within;
                while Instant::now() < end && !is_over() {
                    // The client checks that it receives the reply. A client that is delayed may have given up while
                    // the connection was being established, and then the write fails.
                    listener.accept().into_iter().for_each(|(mut socket, _)| drop(socket.write_all(b"x")));
                }
            };
            answer(CONNECT_TIMEOUT / 20, &|| false);
            stop_new_connections(&listener).unwrap();
            answer(SERVE_TIMEOUT, &|| clients.iter().all(std::thread::JoinHandle::is_finished));
            drop(listener);
            clients.into_iter().for_each(|client| client.join().unwrap());
        }
    }

    #[test]
    fn inherit_rejects_sockets_that_do_not_listen() {
        let folder = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(folder.path().join("s")).unwrap().into_raw_fd();
        assert!(matches!(inherit(unix), Ok(InheritedListener::Unix(_))));
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap().into_raw_fd();
        assert!(matches!(inherit(tcp), Ok(InheritedListener::Tcp(_))));
        let (connected, _peer) = UnixStream::pair().unwrap();
        let (read, _write) = rustix::pipe::pipe().unwrap();
        for number in [connected.into_raw_fd(), read.into_raw_fd()] {
            let error = inherit(number).unwrap_err().to_string();
            assert_eq!(error, format!("descriptor {number} is not a listening stream socket"));
        }
        assert_eq!(inherit(-1).unwrap_err().to_string(), "descriptor -1 is not open");
    }
}
