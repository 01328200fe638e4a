//! The bare fork server: a single-threaded process that receives sockets and forks a child for each. The child replies
//! to one job on the socket and exits. If confinement layers are requested, the server is confined like a template,
//! and each child like a forked worker (`layers.rs`).

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::WaitOptions;

use crate::layers::{self, Layers};
use crate::{JOB_BYTES, KILLS, Result};

/// Runs the server until the peer closes the socket on standard input. `layers` contains the name of the profile, and
/// the folder in which the children's temporary folders are created.
pub fn serve(layers: Option<(&str, &Path)>) -> Result<()> {
    let orders = std::io::stdin().as_fd().try_clone_to_owned()?;
    let mut layers = layers.map(|(profile, folder)| Layers::enter(profile, folder)).transpose()?;
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(&orders, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
        if got.bytes == 0 {
            return Ok(());
        }
        let links = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        for link in links.flatten() {
            match layers::fork()? {
                None => {
                    let entered = layers.as_mut().map_or(Ok(()), Layers::enter_child);
                    std::process::exit(i32::from(entered.and_then(|()| answer(link)).is_err()))
                }
                Some(pid) => {
                    if let Some(layers) = &mut layers {
                        layers.forked(pid);
                    }
                }
            }
        }
        while let Ok(Some((pid, _))) = rustix::process::wait(WaitOptions::NOHANG) {
            if let Some(layers) = &mut layers {
                layers.ended(pid);
            }
        }
    }
}

fn answer(link: OwnedFd) -> std::io::Result<()> {
    let mut link = UnixStream::from(link);
    let mut job = [0; JOB_BYTES];
    link.read_exact(&mut job)?;
    if job[0] == KILLS {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
    }
    link.write_all(&job)
}
