//! Tries namespaces in a child, step by step: one after another it goes into new ones, and says how it went.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::null;

use bulkhead_linux::errno::check;
use bulkhead_linux::fork::fork_unheard;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::StatVfsMountFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::child::{self, Refused};
use super::{Ability, explain};

/// No step takes nearly as long.
const PATIENCE: Timespec = Timespec { tv_sec: 3, tv_nsec: 0 };

type Step = fn() -> Result<(), Errno>;

const NEEDS_USER_NAMESPACES: &str = "see `user namespace`, or run as root with CAP_SYS_ADMIN";

/// What the child does, in this order: `/proc` is to be mounted while the old one can still be seen, as
/// the kernel demands, and the change of roots comes last.
const STEPS: [(&str, Step, &str); 9] = [
    (
        "user namespace",
        || unshare(libc::CLONE_NEWUSER),
        "allow them with sysctl: user.max_user_namespaces, kernel.unprivileged_userns_clone = 1, \
         kernel.apparmor_restrict_unprivileged_userns = 0; or run outside of the container",
    ),
    ("network namespace", || unshare(libc::CLONE_NEWNET), NEEDS_USER_NAMESPACES),
    ("ipc namespace", || unshare(libc::CLONE_NEWIPC), NEEDS_USER_NAMESPACES),
    ("uts namespace", || unshare(libc::CLONE_NEWUTS), NEEDS_USER_NAMESPACES),
    ("pid namespace", || unshare(libc::CLONE_NEWPID), NEEDS_USER_NAMESPACES),
    ("mount namespace", mount_namespace, NEEDS_USER_NAMESPACES),
    (
        "mount_setattr",
        mount_setattr,
        "run a kernel of 5.12 or later, and allow it in the filter of the container",
    ),
    (
        "own /proc",
        own_proc,
        "run where nothing covers parts of /proc: not in a container, or in one without masks",
    ),
    ("pivot_root", pivot, NEEDS_USER_NAMESPACES),
];

/// The steps behind this one mount something, which no other namespace may see.
const MOUNT_NAMESPACE: usize = 5;

/// Bytes of one message of the child: the error's number, or zero.
const MESSAGE_BYTES: usize = 4;

pub(super) fn probe() -> Vec<Ability> {
    let results = run().unwrap_or_else(|errno| vec![Err(explain(errno)); STEPS.len()]);
    let rows = STEPS.iter().zip(results);
    rows.map(|((layer, _, what_to_do), result)| Ability::of(layer, result.map(|()| None), what_to_do))
        .collect()
}

fn run() -> Result<Vec<Result<(), String>>, Errno> {
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    // SAFETY: the child, a copy of this thread alone, makes nothing but raw calls, and exits.
    let pid = match unsafe { fork_unheard() }? {
        0 => {
            // If we are killed before it asks for a signal then, it hears the end of this.
            drop(ours);
            child(&theirs)
        }
        pid => pid,
    };
    drop(theirs);
    let mut results: Vec<_> = (0..STEPS.len()).map_while(|step| hear(&ours, step, pid)).collect();
    results.resize(STEPS.len(), Err("the process that tries it does not answer".to_owned()));
    // SAFETY: the child has not been waited for, so that the number is its own; its children go with it.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL);
    }
    Ok(results)
}

/// How a step of the child went. `None`: it does not say.
fn hear(socket: &OwnedFd, step: usize, pid: libc::pid_t) -> Option<Result<(), String>> {
    let mut message = [0; MESSAGE_BYTES];
    let mut events = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| poll(&mut events, Some(&PATIENCE)));
    if ready != Ok(1) || recv(socket, &mut message[..], RecvFlags::empty()).ok()?.0 != MESSAGE_BYTES {
        return None;
    }
    let result = match i32::from_ne_bytes(message) {
        0 => Ok(()),
        errno => Err(explain(Errno::from_raw_os_error(errno))),
    };
    if step == 0 {
        // Some systems let any user make such a namespace, and none use it.
        let mapped = result.and_then(|()| map(pid));
        let _ = send(socket, &[0], SendFlags::NOSIGNAL); // If it is gone, the next step will tell.
        return Some(mapped);
    }
    Some(result)
}

/// Makes our own user the root of the child's namespace, as the keeper does it.
fn map(pid: libc::pid_t) -> Result<(), String> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let files = [
        ("setgroups", "deny".to_owned()),
        ("gid_map", format!("0 {gid} 1")),
        ("uid_map", format!("0 {uid} 1")),
    ];
    for (file, text) in files {
        let path = format!("/proc/{pid}/{file}");
        std::fs::write(path, text).map_err(|error| format!("failed to write its {file}: {error}"))?;
    }
    Ok(())
}

fn child(socket: &OwnedFd) -> ! {
    die_with_parent();
    let mut mounts = Ok(());
    for (number, (_, step, _)) in STEPS.iter().enumerate() {
        let result = if number > MOUNT_NAMESPACE { mounts.and_then(|()| step()) } else { step() };
        if number == MOUNT_NAMESPACE {
            mounts = result;
        }
        let errno = result.err().map_or(0, Errno::raw_os_error);
        let _ = send(socket, &errno.to_ne_bytes(), SendFlags::NOSIGNAL); // Silence tells as well.
        if number == 0 {
            let _ = recv(socket, &mut [0][..], RecvFlags::empty());
        }
    }
    exit(0)
}

fn exit(code: i32) -> ! {
    // SAFETY: ends the process, without a thing being run that the parent registered.
    unsafe { libc::_exit(code) }
}

fn die_with_parent() {
    // SAFETY: sets a flag of this process.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

fn unshare(flag: libc::c_int) -> Result<(), Errno> {
    // SAFETY: the process has one thread, and does not share what it leaves.
    check(unsafe { libc::unshare(flag) })
}

fn mount_namespace() -> Result<(), Errno> {
    unshare(libc::CLONE_NEWNS)?;
    // SAFETY: the texts end with NUL. Nothing that is mounted from here on is seen outside.
    check(unsafe { libc::mount(null(), c"/".as_ptr(), null(), libc::MS_REC | libc::MS_PRIVATE, null()) })
}

/// Has the root only read, and looks whether it is.
fn mount_setattr() -> Result<(), Errno> {
    let attributes =
        libc::mount_attr { attr_set: libc::MOUNT_ATTR_RDONLY, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let (pointer, size) = (&raw const attributes, size_of::<libc::mount_attr>());
    // SAFETY: the text ends with NUL, and the pointer is to a local of the size that is told.
    check(unsafe {
        libc::syscall(libc::SYS_mount_setattr, libc::AT_FDCWD, c"/".as_ptr(), 0, pointer, size)
    })?;
    let is_read_only = rustix::fs::statvfs(c"/")?.f_flag.contains(StatVfsMountFlags::RDONLY);
    if is_read_only { Ok(()) } else { Err(Errno::PERM) }
}

/// The first process of a pid namespace mounts a `/proc` that shows what is in there.
fn own_proc() -> Result<(), Errno> {
    let tried = child::tried(|| {
        die_with_parent();
        Ok(mount_at_proc(c"proc")?)
    });
    tried.map_err(|refused| match refused {
        Refused::Errno(errno) => errno,
        Refused::Untrue => Errno::PERM,
    })
}

fn mount_at_proc(kind: &CStr) -> Result<(), Errno> {
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // SAFETY: the texts end with NUL.
    check(unsafe { libc::mount(kind.as_ptr(), c"/proc".as_ptr(), kind.as_ptr(), flags, null()) })
}

/// Makes an empty file system the root and lets go of the old one. Where it is mounted does not matter,
/// and this folder there always is.
fn pivot() -> Result<(), Errno> {
    mount_at_proc(c"tmpfs")?;
    let here = c".".as_ptr();
    // SAFETY: the texts end with NUL; this process opens no file any more.
    unsafe {
        check(libc::chdir(c"/proc".as_ptr()))?;
        check(libc::syscall(libc::SYS_pivot_root, here, here))?;
        check(libc::umount2(here, libc::MNT_DETACH))
    }
}
