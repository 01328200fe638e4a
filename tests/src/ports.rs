//! TCP ports for programs that must be given a port number.

use std::net::{Ipv4Addr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Mutex;

/// Lowest port that [`free_port`] returns.
const FIRST: u16 = 10_000;

/// Locks that reserve the ports that this process has handed out.
static LOCKS: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());

/// Returns a TCP port on 127.0.0.1 that stays free for this test's programs, even while such a program restarts.
///
/// The port is outside the range from which the kernel chooses the ports of connections and of listeners on port 0.
/// A socket in the abstract namespace reserves the port for this process among all test programs on this machine.
pub fn free_port() -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").expect("Linux");
    let end = range.split_whitespace().next().and_then(|first| first.parse().ok()).expect("two ports");
    let mut locks = LOCKS.lock().expect("no thread panics with the lock");
    for port in FIRST..end {
        let name = format!("bulkhead-test-port-{port}");
        let name = SocketAddr::from_abstract_name(name).expect("a short name");
        let Ok(lock) = UnixListener::bind_addr(&name) else { continue };
        locks.push(lock);
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between {FIRST} and {end}, the start of net.ipv4.ip_local_port_range");
}
