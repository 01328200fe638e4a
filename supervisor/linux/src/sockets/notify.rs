//! Sends messages to the service manager, as `sd_notify(3)` does. The supervisor's control plane and the fleet's agent
//! use it. The address of the service manager is in the environment variable `NOTIFY_SOCKET`.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Connects to the service manager. Returns `None` if there is none.
///
/// # Errors
///
/// Fails if the address is invalid, or if nothing receives messages there.
pub fn connect() -> io::Result<Option<UnixDatagram>> {
    std::env::var_os("NOTIFY_SOCKET").map(|address| connect_to(&address)).transpose()
}

/// Sends a message to the service manager. Does nothing without a service manager. Each line has the form `NAME=VALUE`.
///
/// # Errors
///
/// Fails if the service manager cannot receive the message.
pub fn notify(message: &str) -> io::Result<()> {
    match connect()? {
        Some(socket) => socket.send(message.as_bytes()).map(drop),
        None => Ok(()),
    }
}

/// Connects to `address`, which is a path, or an abstract name after `@`.
fn connect_to(address: &OsStr) -> io::Result<UnixDatagram> {
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(address),
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address?)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_a_path_or_an_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify.sock");
        let name = format!("bulkhead-notify-{}", std::process::id());
        let abstract_address = SocketAddr::from_abstract_name(&name).unwrap();
        for (receiver, address) in [
            (UnixDatagram::bind(&path).unwrap(), path.into_os_string()),
            (UnixDatagram::bind_addr(&abstract_address).unwrap(), format!("@{name}").into()),
        ] {
            connect_to(&address).unwrap().send(b"READY=1").unwrap();
            let mut buffer = [0; 16];
            let count = receiver.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..count], b"READY=1");
        }
        assert!(connect_to(OsStr::new("/nonexistent")).is_err());
    }
}
