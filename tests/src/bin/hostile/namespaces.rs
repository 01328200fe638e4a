//! Attempts to create namespaces, to enter other processes' namespaces, and to mount file systems.

use std::fs::{self, File};
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use serde_json::Value;

use crate::Attempt;
use crate::calls::{At, Tried, address, call, child, close, ended, reached, thread, wait};

pub(crate) const ATTEMPTS: &[(&str, Attempt)] = &[
    ("new-user-namespace", |_| {
        let what = "create a user namespace";
        ended(child(libc::CLONE_NEWUSER, || Ok(())).at(what)?, what)
    }),
    ("new-user-namespace-by-clone3", |_| by_clone3()),
    ("new-namespaces", |_| new_namespaces()),
    ("enter-a-namespace", |_| enter_a_namespace()),
    ("open-namespace-of-supervisor", |to| {
        let path = format!("/proc/{}/ns/mnt", to.pid("supervisor")?);
        File::open(&path).at(&format!("open {path}"))?;
        Ok(format!("opened {path}"))
    }),
    ("mount", |_| mount()),
    ("unmount", |_| unmount()),
    ("mount-by-the-new-calls", |_| {
        close(call(libc::SYS_fsopen, [c"tmpfs".as_ptr() as usize, 0]).at("prepare a mount")?);
        Ok("prepared".into())
    }),
    ("copy-of-the-mounts", |_| {
        const CLONE: usize = 1;
        let here = libc::AT_FDCWD as usize;
        let opened = call(libc::SYS_open_tree, [here, c"/".as_ptr() as usize, CLONE]);
        close(opened.at("copy a mount")?);
        Ok("copied".into())
    }),
    // Sets the root folder to the current root folder.
    ("change-the-root", |_| {
        call(libc::SYS_chroot, [c"/".as_ptr() as usize]).at("change the root folder")?;
        Ok("changed".into())
    }),
    ("pivot-the-root", |_| {
        let root = c"/".as_ptr() as usize;
        reached(
            call(libc::SYS_pivot_root, [root, root]),
            &[Errno::EBUSY, Errno::EINVAL],
            "pivot the root folder",
        )
    }),
];

/// Returns the namespaces of this process, by kind.
pub(crate) fn own() -> Value {
    let entries = fs::read_dir("/proc/self/ns").into_iter().flatten().flatten();
    let one = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        Some((entry.file_name().to_str()?.to_owned(), Value::from(target.to_str()?)))
    };
    entries.filter_map(one).collect::<serde_json::Map<_, _>>().into()
}

fn by_clone3() -> Tried {
    const ARGUMENTS: usize = 8;
    let what = "create a user namespace with clone3";
    let mut arguments = [0_u64; ARGUMENTS];
    arguments[0] = libc::CLONE_NEWUSER as u64;
    arguments[4] = libc::SIGCHLD as u64;
    let pid = call(libc::SYS_clone3, [address(&arguments), size_of_val(&arguments)]).at(what)?;
    if pid == 0 {
        let _ = call(libc::SYS_exit_group, [0]);
    }
    ended(wait(pid).at(what)?, what)
}

/// Tries to create namespaces for a temporary thread.
fn new_namespaces() -> Tried {
    let flags = libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC;
    thread(|| call(libc::SYS_unshare, [flags as usize])).at("create namespaces")?;
    Ok("made".into())
}

/// Tries to enter a namespace that this process is already in.
fn enter_a_namespace() -> Tried {
    let namespace = File::open("/proc/self/ns/uts").at("open its own namespace")?;
    thread(|| call(libc::SYS_setns, [namespace.as_raw_fd() as usize, 0])).at("enter a namespace")?;
    Ok("entered".into())
}

/// Tries to mount a file system of an unknown type. The kernel rejects the unknown type only after the permission
/// check.
fn mount() -> Tried {
    let (kind, place) = (c"bulkhead-no-such-kind".as_ptr() as usize, c"/".as_ptr() as usize);
    reached(call(libc::SYS_mount, [kind, place, kind, 0, 0]), &[Errno::ENODEV], "mount a file system")
}

/// Tries to unmount a path that is not a mount point. The kernel rejects the path only after the permission check.
fn unmount() -> Tried {
    let place = c"/proc/self".as_ptr() as usize;
    reached(call(libc::SYS_umount2, [place, 0]), &[Errno::EINVAL], "unmount a file system")
}
