//! A template (`start.mode = "fork"`), implemented without the SDK, that violates the keeper's protocol.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::ExitCode;

use bulkhead_shared::template_protocol::{
    FORK_DESCRIPTORS, MESSAGE_BYTES_MAX, TemplateMessage, TemplateOrder,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};

use crate::calls::call;

/// Time after which a forked sibling process exits on its own, in seconds.
const LIFETIME_S: u32 = 100;

/// Number of sibling processes that the template forks.
const SIBLINGS: usize = 50;

/// Runs a template that misbehaves. `how` names the kind of misbehaviour.
pub(crate) fn run(how: &str) -> ExitCode {
    match play(how) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{how}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn play(how: &str) -> io::Result<()> {
    match how {
        // Sends status messages forever and never becomes ready.
        "talks" => loop {
            say(TemplateMessage::Status("and so on"))?;
        },
        // Sends an empty message, then oversized messages forever.
        "shouts" => {
            say(TemplateMessage::Ready)?;
            next_order()?;
            rustix::net::send(keeper(), &[], SendFlags::NOSIGNAL)?;
            loop {
                rustix::net::send(keeper(), &[b'S'; 64 * 1024], SendFlags::NOSIGNAL)?;
            }
        }
        // Forks without an order, and ignores orders.
        "forks-unasked" => {
            say(TemplateMessage::Ready)?;
            for _ in 0..SIBLINGS {
                if fork_sibling()? == 0 {
                    sleep();
                }
            }
            next_order()?;
            sleep()
        }
        // Reports a grandchild as the worker.
        "names-a-grandchild" => {
            say(TemplateMessage::Ready)?;
            let worker = next_order()?;
            if fork_child()? == 0 {
                say(TemplateMessage::Started { worker })?;
            }
            sleep()
        }
        // Reports a worker that was not ordered.
        "invents-a-worker" => {
            say(TemplateMessage::Ready)?;
            let worker = next_order()?;
            if fork_sibling()? == 0 {
                say(TemplateMessage::Started { worker: worker + 1_000_000 })?;
            }
            sleep()
        }
        // Two siblings claim to be the same worker.
        "has-twins" => {
            say(TemplateMessage::Ready)?;
            let worker = next_order()?;
            for _ in 0..2 {
                if fork_sibling()? == 0 {
                    say(TemplateMessage::Started { worker })?;
                    sleep();
                }
            }
            sleep()
        }
        // Never forks the ordered worker. Creates processes that die and must be reaped by the keeper, and
        // floods the keeper with messages.
        "floods" => {
            say(TemplateMessage::Ready)?;
            let worker = next_order()?;
            for number in 0..4 {
                match (fork_sibling()?, number) {
                    (0, 0) => loop {
                        if fork_sibling()? == 0 {
                            std::process::exit(0);
                        }
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    },
                    (0, _) => loop {
                        say(TemplateMessage::ForkFailed { worker: worker + 1_000_000, errno: 0, step: "" })?;
                    },
                    _ => {}
                }
            }
            sleep()
        }
        // Keeps the descriptors of each worker. The workers exit immediately.
        "keeps-descriptors" => {
            say(TemplateMessage::Ready)?;
            let mut kept = Vec::new();
            loop {
                let (worker, descriptors) = next_order_with_descriptors()?;
                kept.push(descriptors);
                if fork_sibling()? == 0 {
                    say(TemplateMessage::Started { worker })?;
                    return Ok(());
                }
            }
        }
        // Reports forks that never happened.
        "lies" => {
            say(TemplateMessage::Ready)?;
            let worker = next_order()?;
            say(TemplateMessage::Forked { worker, pid: 1 })?;
            say(TemplateMessage::Forked { worker, pid: u32::MAX })?;
            sleep()
        }
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

fn keeper() -> BorrowedFd<'static> {
    const LINK: i32 = 3;
    // SAFETY: the keeper starts a template with this descriptor, and nothing closes it.
    #[expect(unsafe_code, reason = "the descriptor is inherited from the parent process")]
    unsafe {
        BorrowedFd::borrow_raw(LINK)
    }
}

fn say(word: TemplateMessage<'_>) -> io::Result<()> {
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    let length = word.encode(&mut bytes);
    rustix::net::send(keeper(), &bytes[..length], SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Waits for an order to fork a worker. Returns the worker's spawn number.
fn next_order() -> io::Result<u64> {
    next_order_with_descriptors().map(|(worker, _)| worker)
}

fn next_order_with_descriptors() -> io::Result<(u64, Vec<OwnedFd>)> {
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FORK_DESCRIPTORS))];
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut bytes)];
        let length = rustix::net::recvmsg(keeper(), slices, &mut control, RecvFlags::empty())?.bytes;
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let descriptors = rights.flatten().collect();
        match TemplateOrder::decode(&bytes[..length]) {
            Some(TemplateOrder::Fork { worker, .. }) => return Ok((worker, descriptors)),
            Some(TemplateOrder::Remove { .. }) => {}
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

fn fork_sibling() -> io::Result<usize> {
    fork(libc::CLONE_PARENT | libc::SIGCHLD)
}

fn fork_child() -> io::Result<usize> {
    fork(libc::SIGCHLD)
}

fn fork(flags: libc::c_int) -> io::Result<usize> {
    call(libc::SYS_clone, [flags as usize, 0, 0, 0, 0]).map_err(Into::into)
}

fn sleep() -> ! {
    std::thread::sleep(std::time::Duration::from_secs(LIFETIME_S.into()));
    std::process::exit(0)
}
