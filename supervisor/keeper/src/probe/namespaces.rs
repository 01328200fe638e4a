//! Tries each kind of namespace in a child process, so that `probe` can report the kinds that this machine supports.
//! The child enters one new namespace after another and reports each result. Namespaces of workers are created in
//! `spawn`.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::null;

use bulkhead_linux::errno::check;
use bulkhead_linux::fork::fork_without_sigchld;
use bulkhead_linux::wait::wait_for_exit_code;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::StatVfsMountFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::child::{self, TrialError};
use super::error_text;
use crate::protocol::LayerSupport;

/// Maximum time to wait for the result of a step, which normally takes milliseconds.
const STEP_TIMEOUT: Timespec = Timespec { tv_sec: 3, tv_nsec: 0 };

type Step = fn() -> Result<(), Errno>;

const NEEDS_USER_NAMESPACES: &str = "see the advice for `user namespace`, or run as root with CAP_SYS_ADMIN";

/// Steps of the child process in order, each with the name of its layer and advice. The new `/proc` is mounted early,
/// because the kernel allows this only while the old `/proc` is still visible. `pivot_root` comes last.
const STEPS: [(&str, Step, &str); 9] = [
    (
        "user namespace",
        || unshare(libc::CLONE_NEWUSER),
        "allow user namespaces with sysctl: user.max_user_namespaces, kernel.unprivileged_userns_clone = 1, \
         kernel.apparmor_restrict_unprivileged_userns = 0; or run outside the container",
    ),
    ("network namespace", || unshare(libc::CLONE_NEWNET), NEEDS_USER_NAMESPACES),
    ("ipc namespace", || unshare(libc::CLONE_NEWIPC), NEEDS_USER_NAMESPACES),
    ("uts namespace", || unshare(libc::CLONE_NEWUTS), NEEDS_USER_NAMESPACES),
    ("pid namespace", || unshare(libc::CLONE_NEWPID), NEEDS_USER_NAMESPACES),
    ("mount namespace", mount_namespace, NEEDS_USER_NAMESPACES),
    (
        "mount_setattr",
        mount_setattr,
        "run kernel 5.12 or later, and allow mount_setattr in the container's seccomp filter",
    ),
    ("own /proc", private_proc, "run outside a container, or in a container without masked paths in /proc"),
    ("pivot_root", pivot_root, NEEDS_USER_NAMESPACES),
];

/// Index of the step that creates the mount namespace. Later steps mount file systems that must not be visible
/// outside this namespace.
const MOUNT_NAMESPACE: usize = 5;

/// Size in bytes of the child's message after each step. The message is the error number, or zero on success.
const MESSAGE_BYTES: usize = 4;

pub(super) fn probe() -> Vec<LayerSupport> {
    let results = run_steps().unwrap_or_else(|errno| vec![Err(error_text(errno)); STEPS.len()]);
    let rows = STEPS.iter().zip(results);
    rows.map(|((layer, _, what_to_do), result)| LayerSupport::of(layer, result.map(|()| None), what_to_do))
        .collect()
}

fn run_steps() -> Result<Vec<Result<(), String>>, Errno> {
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    // SAFETY: the child is a copy of only this thread. It makes only raw system calls, and exits.
    let pid = match unsafe { fork_without_sigchld() }? {
        0 => {
            // If the parent is killed before the child has requested a parent-death signal, the child sees
            // the end of file. This requires that the child closes its copy of the parent's end.
            drop(ours);
            child(&theirs)
        }
        pid => pid,
    };
    drop(theirs);
    let mut results: Vec<_> = (0..STEPS.len()).map_while(|step| receive_result(&ours, step, pid)).collect();
    results.resize(STEPS.len(), Err("the probing process did not respond".to_owned()));
    // SAFETY: the child has not been waited for, so the PID still belongs to it. Its children die with it.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    wait_for_exit_code(pid)?;
    Ok(results)
}

/// Receives the result of a step. Returns `None` if the child does not reply.
fn receive_result(socket: &OwnedFd, step: usize, pid: libc::pid_t) -> Option<Result<(), String>> {
    let mut message = [0; MESSAGE_BYTES];
    let mut events = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| poll(&mut events, Some(&STEP_TIMEOUT)));
    if ready != Ok(1) || recv(socket, &mut message[..], RecvFlags::empty()).ok()?.0 != MESSAGE_BYTES {
        return None;
    }
    let result = match i32::from_ne_bytes(message) {
        0 => Ok(()),
        errno => Err(error_text(Errno::from_raw_os_error(errno))),
    };
    if step == 0 {
        // Mapping IDs is tested too, because some systems let any user create a user namespace but not map IDs in it.
        let mapped = result.and_then(|()| write_id_maps(pid));
        let _ = send(socket, &[0], SendFlags::NOSIGNAL); // If the child is gone, the next step fails.
        return Some(mapped);
    }
    Some(result)
}

/// Maps this process's user to root in the child's namespace. Writes the same files as the keeper writes for workers.
fn write_id_maps(pid: libc::pid_t) -> Result<(), String> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let files = [
        ("setgroups", "deny".to_owned()),
        ("gid_map", format!("0 {gid} 1")),
        ("uid_map", format!("0 {uid} 1")),
    ];
    for (file, text) in files {
        let path = format!("/proc/{pid}/{file}");
        std::fs::write(path, text)
            .map_err(|error| format!("failed to write {file} of the probing process: {error}"))?;
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
        let _ = send(socket, &errno.to_ne_bytes(), SendFlags::NOSIGNAL); // If this fails, the parent times out.
        if number == 0 {
            let _ = recv(socket, &mut [0][..], RecvFlags::empty());
        }
    }
    exit(0)
}

fn exit(code: i32) -> ! {
    // SAFETY: exits without running the parent's exit handlers.
    unsafe { libc::_exit(code) }
}

fn die_with_parent() {
    // SAFETY: sets a flag of this process.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

fn unshare(flag: libc::c_int) -> Result<(), Errno> {
    // SAFETY: the process has one thread, and shares no state that the call changes.
    check(unsafe { libc::unshare(flag) })
}

fn mount_namespace() -> Result<(), Errno> {
    unshare(libc::CLONE_NEWNS)?;
    // SAFETY: the strings are NUL-terminated. Later mounts are not visible outside.
    check(unsafe { libc::mount(null(), c"/".as_ptr(), null(), libc::MS_REC | libc::MS_PRIVATE, null()) })
}

/// Makes the root file system read-only, and checks that it is read-only.
fn mount_setattr() -> Result<(), Errno> {
    let attributes =
        libc::mount_attr { attr_set: libc::MOUNT_ATTR_RDONLY, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let (pointer, size) = (&raw const attributes, size_of::<libc::mount_attr>());
    // SAFETY: the string is NUL-terminated, and the pointer refers to a local variable of the given size.
    check(unsafe {
        libc::syscall(libc::SYS_mount_setattr, libc::AT_FDCWD, c"/".as_ptr(), 0, pointer, size)
    })?;
    let is_read_only = rustix::fs::statvfs(c"/")?.f_flag.contains(StatVfsMountFlags::RDONLY);
    if is_read_only { Ok(()) } else { Err(Errno::PERM) }
}

/// Mounts a `/proc` for the new PID namespace, in the first process of this namespace.
fn private_proc() -> Result<(), Errno> {
    let tried = child::run_trial(|| {
        die_with_parent();
        Ok(mount_at_proc(c"proc")?)
    });
    tried.map_err(|refused| match refused {
        TrialError::Errno(errno) => errno,
        TrialError::NotEnforced => Errno::PERM,
    })
}

fn mount_at_proc(kind: &CStr) -> Result<(), Errno> {
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // SAFETY: the strings are NUL-terminated.
    check(unsafe { libc::mount(kind.as_ptr(), c"/proc".as_ptr(), kind.as_ptr(), flags, null()) })
}

/// Makes an empty file system the root and detaches the old root. The empty file system is first mounted at
/// `/proc`, because every system has this folder.
fn pivot_root() -> Result<(), Errno> {
    mount_at_proc(c"tmpfs")?;
    let here = c".".as_ptr();
    // SAFETY: the strings are NUL-terminated. This process opens no file afterwards.
    unsafe {
        check(libc::chdir(c"/proc".as_ptr()))?;
        check(libc::syscall(libc::SYS_pivot_root, here, here))?;
        check(libc::umount2(here, libc::MNT_DETACH))
    }
}
