//! Runs the echo process of the bare chain, which stands in for a worker. Sends back all bytes of one connection
//! unchanged, and knows nothing about jobs or frames. The connection is accepted on a socket or passed as standard
//! input. Several measurements of the bench start this process.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::Path;

use crate::{READ_BYTES, Result};

/// Sends back all bytes that arrive on a connection.
pub fn echo(socket: Option<&Path>) -> Result<()> {
    let mut stream = match socket {
        Some(socket) => std::os::unix::net::UnixListener::bind(socket)?.accept()?.0,
        None => std::io::stdin().as_fd().try_clone_to_owned()?.into(),
    };
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            count => stream.write_all(&buffer[..count])?,
        }
    }
}
