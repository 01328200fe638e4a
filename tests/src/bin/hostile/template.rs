//! A template (`start.mode = "fork"`) that does what no template does. It speaks with the keeper by itself.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::ExitCode;

use bulkhead_shared::template_protocol::{MESSAGE_BYTES_MAX, ORDER_DESCRIPTORS, Order, Word};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};

use crate::calls::call;

/// Its siblings end by themselves, should nothing else end them.
const LIFETIME_S: u32 = 100;

/// Siblings that it makes.
const SIBLINGS: usize = 50;

/// The worker that the keeper ordered, and how it lies about it.
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
        // Talks without end, and is never ready.
        "talks" => loop {
            say(Word::Status("and so on"))?;
        },
        // Sends messages that are longer than any, and one that is empty.
        "shouts" => {
            say(Word::Ready)?;
            next_order()?;
            rustix::net::send(keeper(), &[], SendFlags::NOSIGNAL)?;
            loop {
                rustix::net::send(keeper(), &[b'S'; 64 * 1024], SendFlags::NOSIGNAL)?;
            }
        }
        // Forks without being asked, and not when it is.
        "forks-unasked" => {
            say(Word::Ready)?;
            for _ in 0..SIBLINGS {
                if fork_sibling()? == 0 {
                    sleep();
                }
            }
            next_order()?;
            sleep()
        }
        // Has a grandchild say that it is the worker.
        "names-a-grandchild" => {
            say(Word::Ready)?;
            let worker = next_order()?;
            if fork_child()? == 0 {
                say(Word::Born { worker })?;
            }
            sleep()
        }
        // Has one say that it is a worker which was not ordered.
        "invents-a-worker" => {
            say(Word::Ready)?;
            let worker = next_order()?;
            if fork_sibling()? == 0 {
                say(Word::Born { worker: worker + 1_000_000 })?;
            }
            sleep()
        }
        // Has two say that they are the same.
        "has-twins" => {
            say(Word::Ready)?;
            let worker = next_order()?;
            for _ in 0..2 {
                if fork_sibling()? == 0 {
                    say(Word::Born { worker })?;
                    sleep();
                }
            }
            sleep()
        }
        // Never forks what was ordered, has the keeper told of deaths, and talks faster than that can listen.
        "floods" => {
            say(Word::Ready)?;
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
                        say(Word::NotForked { worker: worker + 1_000_000, errno: 0, step: "" })?;
                    },
                    _ => {}
                }
            }
            sleep()
        }
        // Keeps what it is given for each worker, all of which end at once.
        "keeps-descriptors" => {
            say(Word::Ready)?;
            let mut kept = Vec::new();
            loop {
                let (worker, descriptors) = next_order_with_descriptors()?;
                kept.push(descriptors);
                if fork_sibling()? == 0 {
                    say(Word::Born { worker })?;
                    return Ok(());
                }
            }
        }
        // Says that it has forked, and has not.
        "lies" => {
            say(Word::Ready)?;
            let worker = next_order()?;
            say(Word::Forked { worker, pid: 1 })?;
            say(Word::Forked { worker, pid: u32::MAX })?;
            sleep()
        }
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

fn keeper() -> BorrowedFd<'static> {
    const LINK: i32 = 3;
    // SAFETY: a worker of this program is started with that descriptor, and nothing closes it.
    #[expect(unsafe_code, reason = "a descriptor crosses from the parent process")]
    unsafe {
        BorrowedFd::borrow_raw(LINK)
    }
}

fn say(word: Word<'_>) -> io::Result<()> {
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    let length = word.encode(&mut bytes);
    rustix::net::send(keeper(), &bytes[..length], SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Waits for the next worker that is to be forked.
fn next_order() -> io::Result<u64> {
    next_order_with_descriptors().map(|(worker, _)| worker)
}

fn next_order_with_descriptors() -> io::Result<(u64, Vec<OwnedFd>)> {
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ORDER_DESCRIPTORS))];
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut bytes)];
        let length = rustix::net::recvmsg(keeper(), slices, &mut control, RecvFlags::empty())?.bytes;
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let descriptors = rights.flatten().collect();
        match Order::decode(&bytes[..length]) {
            Some(Order::Fork { worker, .. }) => return Ok((worker, descriptors)),
            Some(Order::Remove { .. }) => {}
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
