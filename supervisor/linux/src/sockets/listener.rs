//! Closes a TCP listener without losing connections. When a listener is closed, the kernel resets all
//! connections in its queue. This includes a connection that arrived between the last `accept` and the close,
//! whose client can already have sent its request.

use std::io;
use std::os::fd::AsFd;

use libc::{BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET};
use socket2::{SockFilter, SockRef};

/// Offset of the flags in a TCP header. A segment that opens a connection has `SYN` without `ACK`.
const TCP_FLAGS_OFFSET: u32 = 13;
const SYN: u32 = 0x02;
const ACK: u32 = 0x10;

/// Makes a listener drop packets that open a new connection. Connections whose handshake has begun are still
/// established.
///
/// A client that connects after this call retries after a second. The retry reaches the next program that
/// listens on the address, or is refused. Proxies use the packet filter of the whole machine for this when
/// they restart. This function attaches a filter to the socket instead.
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

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    const CONNECT_TIMEOUT: Duration = Duration::from_millis(100);

    #[test]
    fn stopped_listener_accepts_only_earlier_connections() {
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

    /// Clients connect repeatedly while the listener stops. Each established connection must get a reply.
    #[test]
    fn stopped_listener_serves_all_established_connections() {
        for round in 0..30 {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            listener.set_nonblocking(true).unwrap();
            // Connects until a connection is no longer accepted.
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
                    listener.accept().into_iter().for_each(|(mut socket, _)| socket.write_all(b"x").unwrap());
                }
            };
            answer(CONNECT_TIMEOUT / 20, &|| false);
            stop_new_connections(&listener).unwrap();
            answer(20 * CONNECT_TIMEOUT, &|| clients.iter().all(std::thread::JoinHandle::is_finished));
            drop(listener);
            clients.into_iter().for_each(|client| client.join().unwrap());
        }
    }
}
