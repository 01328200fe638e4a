//! Defines the socket operations that connections need for both Unix sockets and TCP. A socket can move to the runtime
//! of another thread, and its first bytes can be read without consuming them. The parent module chooses the thread that
//! serves a connection. Sockets are bound in `sockets.rs` and `listeners.rs`.

use std::io;
use std::net;
use std::os::unix;

use rustix::net::RecvFlags;
use tokio::io::{AsyncRead, AsyncWrite, Interest};
use tokio::net::{TcpStream, UnixStream};

/// A stream socket that can be moved to another runtime.
pub(in crate::control) trait Socket:
    AsyncRead + AsyncWrite + Unpin + Send + Sync + Sized + 'static
{
    /// The standard library's type for this kind of socket. A socket of that type is not registered with any runtime.
    type Std: Send + 'static;

    fn into_std_socket(self) -> io::Result<Self::Std>;

    fn from_std_socket(socket: Self::Std) -> io::Result<Self>;

    /// Waits for data and reads it without consuming it.
    fn peek(&self, bytes: &mut [u8]) -> impl Future<Output = io::Result<usize>> + Send;
}

impl Socket for UnixStream {
    type Std = unix::net::UnixStream;

    fn into_std_socket(self) -> io::Result<Self::Std> {
        self.into_std()
    }

    fn from_std_socket(socket: Self::Std) -> io::Result<Self> {
        Self::from_std(socket)
    }

    async fn peek(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let peek = || Ok(rustix::net::recv(self, &mut *bytes, RecvFlags::PEEK)?.0);
        self.async_io(Interest::READABLE, peek).await
    }
}

impl Socket for TcpStream {
    type Std = net::TcpStream;

    fn into_std_socket(self) -> io::Result<Self::Std> {
        self.into_std()
    }

    fn from_std_socket(socket: Self::Std) -> io::Result<Self> {
        Self::from_std(socket)
    }

    async fn peek(&self, bytes: &mut [u8]) -> io::Result<usize> {
        Self::peek(self, bytes).await
    }
}
