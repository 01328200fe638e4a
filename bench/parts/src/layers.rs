//! Confines the fork server of the bench like a template, and its children like workers. Uses as few system calls as
//! possible and verifies nothing, so the real keeper can be compared with the bare cost. The server gets namespaces,
//! Landlock rules and a seccomp filter. Each child gets a session, Landlock rules, a temporary folder and a seccomp
//! filter.
#![expect(unsafe_code, reason = "fork, unshare, prctl and seccomp have no safe wrapper")]

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use bulkhead_linux::landlock::{self, HandledAccess};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::process::{Pid, Signal};

use crate::Result;

const PLACE: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// All file access rights in version 6 of the Landlock ABI.
const FILES: u64 = (1 << 16) - 1;
/// All scopes in version 6 of the Landlock ABI.
const SCOPES: u64 = 3;
const WITHHELD: HandledAccess = HandledAccess { files: FILES, network: 0, scopes: SCOPES };

/// ABI version to pass to `restrict_self`. With version 0, no flags are set, so that denied actions are still written
/// to the Landlock audit log.
const NO_VERSION: u32 = 0;

/// Top-level folders to which the Landlock rules grant access. Workers that the supervisor forks can access the same
/// folders.
const FOLDERS: [&str; 12] =
    ["/bin", "/dev", "/etc", "/home", "/lib", "/lib64", "/opt", "/proc", "/root", "/sbin", "/usr", "/var"];

pub(crate) struct Layers {
    folder: OwnedFd,
    given: Vec<OwnedFd>,
    /// Names of the forked processes' temporary folders, indexed by PID.
    folders: HashMap<Pid, String>,
    next: u64,
}

/// Forks this process. Returns `None` in the child.
pub(crate) fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: this process has one thread.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(Pid::from_raw(pid)),
    }
}

impl Layers {
    /// Forks the server into a new PID namespace and confines the child. Returns only in the child.
    pub(crate) fn enter(profile: &str, folder: &Path) -> Result<Self> {
        let namespaces = match profile {
            "strict" => {
                libc::CLONE_NEWNS
                    | libc::CLONE_NEWPID
                    | libc::CLONE_NEWNET
                    | libc::CLONE_NEWIPC
                    | libc::CLONE_NEWUTS
            }
            _ => libc::CLONE_NEWNS | libc::CLONE_NEWPID,
        };
        let user = if rustix::process::geteuid().is_root() { 0 } else { libc::CLONE_NEWUSER };
        // SAFETY: the argument of `unshare` is a plain number, and this process has one thread.
        check(unsafe { libc::unshare(namespaces | user) }.into())?;
        if let Some(pid) = fork()? {
            rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty())?;
            std::process::exit(0);
        }
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        let given = FOLDERS.iter().filter_map(|path| rustix::fs::open(*path, PLACE, Mode::empty()).ok());
        let folder = rustix::fs::open(folder, PLACE | OFlags::DIRECTORY, Mode::empty())?;
        let layers = Self { folder, given: given.collect(), folders: HashMap::new(), next: 0 };
        rustix::thread::set_no_new_privs(true)?;
        layers.restrict(&layers.folder)?;
        // Allows all other calls.
        filter(&[libc::SYS_bpf, libc::SYS_mount, libc::SYS_ptrace, libc::SYS_unshare])?;
        Ok(layers)
    }

    /// Confines a forked process.
    pub(crate) fn enter_child(&mut self) -> io::Result<()> {
        rustix::process::setsid()?;
        rustix::process::set_child_subreaper(Some(Pid::INIT))?;
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // SAFETY: with this option, all arguments of `prctl` are plain numbers.
        check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }.into())?;
        let name = self.next.to_string();
        rustix::fs::mkdirat(&self.folder, &name, Mode::RWXU)?;
        let folder = rustix::fs::openat(&self.folder, &name, PLACE | OFlags::DIRECTORY, Mode::empty())?;
        self.restrict(&folder)?;
        filter(&[libc::SYS_clone3, libc::SYS_seccomp])
    }

    fn restrict(&self, folder: &OwnedFd) -> io::Result<()> {
        let ruleset = landlock::create_ruleset(WITHHELD)?;
        for place in self.given.iter().chain([folder]) {
            landlock::add_path_rule(ruleset.as_fd(), place.as_fd(), FILES)?;
        }
        Ok(landlock::restrict_self(ruleset.as_fd(), NO_VERSION)?)
    }

    pub(crate) fn forked(&mut self, pid: Pid) {
        self.folders.insert(pid, self.next.to_string());
        self.next += 1;
    }

    /// Removes a process's temporary folder.
    pub(crate) fn ended(&mut self, pid: Pid) {
        if let Some(name) = self.folders.remove(&pid) {
            // The removal fails if the process could not confine itself and therefore has no temporary folder.
            let _ = rustix::fs::unlinkat(&self.folder, name, AtFlags::REMOVEDIR);
        }
    }
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Installs a seccomp filter that rejects the given system calls.
fn filter(refused: &[libc::c_long]) -> io::Result<()> {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut steps = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for (at, call) in refused.iter().enumerate() {
        let to_refusal = (refused.len() - at) as u8;
        steps.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, to_refusal, 0, *call as u32));
    }
    let refusal = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    steps.push(step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW));
    steps.push(step(libc::BPF_RET | libc::BPF_K, 0, 0, refusal));
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the kernel copies the program, whose length is part of the argument, and does not write to the
    // memory of this process.
    check(unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &program) })
}
