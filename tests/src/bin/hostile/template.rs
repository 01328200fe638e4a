//! A template (`start.mode = "fork"`) that does what no template does. It speaks with the keeper by itself.

use std::io;
use std::os::fd::BorrowedFd;
use std::process::ExitCode;

use bulkhead_shared::template_protocol::{MESSAGE_BYTES_MAX, Order, Word};
use rustix::net::{RecvFlags, SendFlags};

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

/// Waits for the next worker that is to be forked. The descriptors that come along are left to the kernel.
fn next_order() -> io::Result<u64> {
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    loop {
        let (length, _) = rustix::net::recv(keeper(), &mut bytes, RecvFlags::empty())?;
        match Order::decode(&bytes[..length]) {
            Some(Order::Fork { worker, .. }) => return Ok(worker),
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
