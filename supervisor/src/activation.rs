//! Takes over listening sockets that the service manager passes (socket activation, `sd_listen_fds(3)`). The name of a
//! socket (`FileDescriptorName=` in systemd) determines which configured socket the passed socket replaces.
//! `supervisor` calls this module once at the start. `listeners` opens the remaining sockets.

use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;

use bulkhead_linux::listener::{InheritedListener, inherit};

/// Listening sockets passed in by the service manager. The supervisor binds the remaining sockets itself.
#[derive(Debug, Default)]
pub(crate) struct ActivatedSockets {
    pub(crate) jobs: Option<UnixListener>,
    pub(crate) admin: Option<UnixListener>,
    pub(crate) http: Option<TcpListener>,
    pub(crate) jobs_http: Option<TcpListener>,
}

impl ActivatedSockets {
    /// Takes over the sockets passed in by the service manager. Must be called once, before other code can open
    /// descriptors with the same numbers.
    ///
    /// Fails if a name is unknown or occurs twice, or if a socket is of the wrong kind.
    pub(crate) fn take() -> io::Result<Self> {
        let mut sockets = Self::default();
        for (number, name) in sd_notify::listen_fds_with_names()? {
            sockets.add(&name, inherit(number)?).map_err(io::Error::other)?;
        }
        Ok(sockets)
    }

    fn add(&mut self, name: &str, listener: InheritedListener) -> Result<(), String> {
        let is_second = match (name, listener) {
            ("jobs", InheritedListener::Unix(listener)) => self.jobs.replace(listener).is_some(),
            ("admin", InheritedListener::Unix(listener)) => self.admin.replace(listener).is_some(),
            ("http", InheritedListener::Tcp(listener)) => self.http.replace(listener).is_some(),
            ("jobs_http", InheritedListener::Tcp(listener)) => self.jobs_http.replace(listener).is_some(),
            ("jobs" | "admin", _) => return Err(format!("`{name}` must be a Unix socket")),
            ("http" | "jobs_http", _) => return Err(format!("`{name}` must be a TCP socket")),
            _ => {
                return Err(format!(
                    "`{name}` is not the name of a socket: set FileDescriptorName= in the socket unit to jobs, \
                     admin, http or jobs_http"
                ));
            }
        };
        if is_second {
            Err(format!(
                "there are two sockets named `{name}`: give each socket unit a different FileDescriptorName="
            ))
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_selected_by_name_and_kind() {
        let folder = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(folder.path().join("s")).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let unix = || InheritedListener::Unix(unix.try_clone().unwrap());
        let tcp = || InheritedListener::Tcp(tcp.try_clone().unwrap());
        let mut sockets = ActivatedSockets::default();
        for (name, listener) in [("jobs", unix()), ("admin", unix()), ("http", tcp()), ("jobs_http", tcp())] {
            sockets.add(name, listener).unwrap();
        }
        for (name, listener, expected) in [
            ("jobs", unix(), "two sockets named `jobs`"),
            ("admin", tcp(), "must be a Unix socket"),
            ("http", unix(), "must be a TCP socket"),
            ("bulkhead.socket", unix(), "set FileDescriptorName= in the socket unit to jobs, admin"),
        ] {
            let error = sockets.add(name, listener).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
