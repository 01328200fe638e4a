//! Cleans up after programs that run jobs. The host is a child subreaper: when a program dies, its remaining
//! descendants become children of the host. The kernel makes such orphans children of the host's first
//! thread, while a program is a child of the thread that started it. The first thread therefore starts no
//! processes and waits only for its own children (`__WNOTHREAD`). If the first thread has no children, no
//! exited program has left a process behind. The kernel lists the children of a thread in `/proc`, so the
//! first thread is woken only if there are orphans.
//!
//! During a program's `output_grace` period, its orphans must survive the cleanup after other programs. Each program is
//! the leader of a separate session, which descendants can leave only by starting another session. The session of an
//! orphan therefore identifies the program. Descendants in other sessions are recorded when a program exits and during
//! each cleanup.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use bulkhead_linux::process_tree::{
    ProcessIdentity, identity_of, kill_descendants, list_descendants, read_proc_file,
};
use bulkhead_linux::wait::{has_ended, is_child_of_thread, thread_has_children, wait4};
use rustix::fs::{Stat, stat};
use rustix::io::Errno;

/// Maximum time to wait for killed processes. A process that survives SIGKILL for this long is stuck in the kernel,
/// so a longer wait would not help.
const REAP_TIMEOUT: Duration = Duration::from_secs(2);

/// Flags that restrict `wait4` to the calling thread's children and make it return immediately.
const CALLING_THREAD: i32 = libc::WNOHANG | libc::__WNOTHREAD;

/// Maximum number of processes to name in a message.
const NAMED_MAX: usize = 4;

/// Maximum number of processes to search for an open file or pipe.
const SEARCHED_MAX: usize = 256;

/// Maximum number of descriptors to check in each process.
const DESCRIPTORS_MAX: usize = 1024;

/// Registry of all programs whose jobs have not ended, and a channel to the thread that kills orphans.
pub(super) struct Orphans {
    programs: Mutex<Programs>,
    /// Lock that prevents a new program from being killed before it is registered. Threads that start a program hold it
    /// for reading, and the thread that kills unregistered processes holds it for writing.
    starting: RwLock<()>,
    /// `/proc` file that lists the children of the first thread, including dead children. `None` if the kernel does
    /// not provide this file.
    children: Option<File>,
    requests: SyncSender<SyncSender<()>>,
}

#[derive(Default)]
struct Programs {
    /// Children of the host that survived SIGKILL, for example because they run as another user. The host no longer
    /// waits for these children.
    unkillable: Vec<ProcessIdentity>,
    /// Programs whose jobs have not ended, by PID, which is also the session ID. The value is true once the program's
    /// orphans have been recorded.
    unfinished: HashMap<u32, bool>,
    /// For each process or session outside the programs' sessions, the PIDs of the programs that are possible
    /// ancestors.
    owners: HashMap<Key, Vec<u32>>,
    /// PIDs of programs whose orphans are being killed.
    cleanups: Vec<u32>,
}

/// Either the PID and start time of a process, or a session ID and `None`.
type Key = (u32, Option<u64>);

fn keys(found: ProcessIdentity) -> [Key; 2] {
    [(found.session, None), (found.pid, Some(found.started))]
}

impl Programs {
    /// Returns the programs that are possible ancestors of a process, or `None` if the process is not recorded.
    fn known_owners(&self, found: ProcessIdentity) -> Option<Vec<u32>> {
        if self.unfinished.contains_key(&found.session) {
            return Some(vec![found.session]);
        }
        if self.cleanups.contains(&found.session) {
            return Some(Vec::new());
        }
        keys(found).iter().find_map(|key| self.owners.get(key)).cloned()
    }

    /// Returns the programs that a child of the host may descend from.
    fn owners_of_child(&mut self, child: u32) -> Vec<u32> {
        if self.unfinished.contains_key(&child) {
            return vec![child];
        }
        // Such a process belongs to an earlier program.
        if self.is_unkillable(child) {
            return Vec::new();
        }
        // A process that no longer exists needs no owner. The children of such a process are checked
        // separately.
        let Some(found) = identity_of(child) else { return Vec::new() };
        self.known_owners(found).unwrap_or_else(|| {
            let owners = self.possible_owners(found);
            self.record(found, &owners);
            owners
        })
    }

    /// Returns the programs that an unrecorded orphan may descend from. These are all exited programs whose orphans are
    /// not recorded yet, or else all running programs. If there are neither, the orphan has changed its session during
    /// a program's `output_grace` period. While a program is being cleaned up, an orphan that can belong to this program
    /// gets no owner, because the program's orphans must not survive.
    fn possible_owners(&self, found: ProcessIdentity) -> Vec<u32> {
        let is_older = |program: u32| identity_of(program).is_some_and(|it| it.started <= found.started);
        let older = |with: bool| {
            let programs = self.unfinished.iter().filter(move |(_, is_recorded)| **is_recorded == with);
            programs.map(|(&program, _)| program).filter(|&it| is_older(it))
        };
        let (ended, running): (Vec<u32>, Vec<u32>) = older(false).partition(|&it| has_ended(it));
        if !ended.is_empty() || !self.cleanups.is_empty() {
            return ended;
        }
        if running.is_empty() { older(true).collect() } else { running }
    }

    fn record(&mut self, found: ProcessIdentity, owners: &[u32]) {
        for key in keys(found).into_iter().filter(|_| !owners.is_empty()) {
            self.owners.entry(key).or_insert_with(|| owners.to_vec());
        }
    }

    fn is_protected(&mut self, child: u32) -> bool {
        self.owners_of_child(child).iter().any(|owner| self.unfinished.contains_key(owner))
    }

    fn is_unkillable(&self, child: u32) -> bool {
        self.unkillable.iter().any(|process| process.pid == child)
    }

    /// Records the unprotected children that are still alive after the time limit.
    fn record_unkillable(&mut self) {
        for (found, child) in list_descendants().unwrap_or_default() {
            if found.pid == child && !self.is_unkillable(child) && !self.is_protected(child) {
                self.unkillable.push(found);
            }
        }
    }

    /// Records the programs that are possible ancestors of each descendant of the host. Returns an error if `/proc`
    /// cannot be read.
    fn record_all(&mut self) -> io::Result<()> {
        for (found, child) in list_descendants()? {
            let owners = self.known_owners(found).unwrap_or_else(|| self.owners_of_child(child));
            self.record(found, &owners);
        }
        Ok(())
    }
}

impl Orphans {
    /// Returns an empty registry, and the receiver of the requests that [`Orphans::serve`] handles. Must be called
    /// on the first thread of the process.
    pub(super) fn new() -> (Self, Receiver<SyncSender<()>>) {
        let (requests, received) = sync_channel(0);
        let children = File::open("/proc/thread-self/children").ok();
        (Self { programs: Mutex::default(), starting: RwLock::default(), children, requests }, received)
    }

    /// Starts a program and registers its PID. An unregistered process counts as an orphan.
    pub(super) fn start<P>(
        &self,
        start: impl FnOnce() -> io::Result<P>,
        number: impl FnOnce(&P) -> u32,
    ) -> io::Result<P> {
        let _starting = self.starting.read().unwrap_or_else(PoisonError::into_inner);
        let program = start()?;
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        programs.unfinished.insert(number(&program), false);
        Ok(program)
    }

    /// Prevents the orphans of an exited program from being killed until [`Orphans::unprotect`] is called.
    /// Must be called before the program is reaped, so that the PID has not been reused.
    pub(super) fn protect(&self, number: u32) {
        let has_children = self.has_children();
        let starting = has_children.then(|| self.starting.write().unwrap_or_else(PoisonError::into_inner));
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        if has_children {
            // If `/proc` cannot be read, only orphans in the program's session are known.
            let _ = programs.record_all();
        }
        programs.unfinished.insert(number, true);
        drop((programs, starting));
    }

    /// Returns true if the exited program has left orphans. Must be called before [`Orphans::unprotect`].
    pub(super) fn has_orphans(&self, number: u32) -> bool {
        // Reaps orphans that have already died.
        self.reap();
        self.has_children() && !self.orphans_of(number).is_empty()
    }

    /// Returns the PIDs of a program's orphans. Returns an empty list if `/proc` cannot be read.
    fn orphans_of(&self, number: u32) -> Vec<u32> {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left = list_descendants().unwrap_or_default();
        left.retain(|(_, child)| *child != number && programs.owners_of_child(*child).contains(&number));
        left.into_iter().map(|(found, _)| found.pid).collect()
    }

    /// Returns human-readable names of a program's orphans that have the file or pipe `file` open.
    pub(super) fn holders(&self, number: u32, file: &Stat) -> Vec<String> {
        let is_same =
            |place: PathBuf| stat(place).is_ok_and(|at| (at.st_dev, at.st_ino) == (file.st_dev, file.st_ino));
        let holds = |pid: &u32| {
            let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            descriptors.take(DESCRIPTORS_MAX).any(|entry| is_same(entry.path()))
        };
        let name = |pid: u32| {
            let name = read_proc_file(&format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("{} (pid {pid})", name.trim_end().escape_default())
        };
        let mut holders: Vec<u32> = self.orphans_of(number).into_iter().take(SEARCHED_MAX).collect();
        holders.retain(holds);
        let more = holders.len().saturating_sub(NAMED_MAX);
        let named = holders.into_iter().take(NAMED_MAX).map(name);
        named.chain((more > 0).then(|| format!("{more} more"))).collect()
    }

    /// Allows the next cleanup to kill a program and its orphans. Must be called before the program is reaped, and must
    /// be followed by [`Orphans::finish_cleanup`].
    pub(super) fn unprotect(&self, number: u32) {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        programs.unfinished.remove(&number);
        programs.cleanups.push(number);
    }

    /// Kills and reaps the orphans of a program that has been reaped. Must be called on the thread that started the
    /// program, because a process that the program created with `CLONE_PARENT` is a child of that thread.
    pub(super) fn finish_cleanup(&self, number: u32) {
        if thread_has_children() {
            self.reap_here(is_child_of_thread);
        }
        self.reap();
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = programs.cleanups.iter().position(|&it| it == number) {
            programs.cleanups.swap_remove(at);
        }
    }

    /// Returns true if the first thread has children, or if this is unknown. The kernel reparents the
    /// children of an exiting program to the first thread before the exit becomes visible.
    fn has_children(&self) -> bool {
        self.children.as_ref().is_none_or(|children| !matches!(children.read_at(&mut [0], 0), Ok(0)))
    }

    /// Kills and reaps all processes that exited programs have left behind. Waits until the cleanup is complete.
    fn reap(&self) {
        if !self.has_children() {
            return;
        }
        let (done, wait) = sync_channel(0);
        // Sending cannot fail, because the receiver lives as long as the process.
        if self.requests.send(done).is_ok() {
            let _ = wait.recv();
        }
    }

    /// Serves requests from [`Orphans::reap`]. Must be called on the first thread of the process.
    pub(super) fn serve(&self, requests: &Receiver<SyncSender<()>>) {
        while let Ok(done) = requests.recv() {
            self.reap_here(|_| false);
            let _ = done.send(());
        }
    }

    /// Kills and reaps unprotected children of the calling thread, and children for which `is_unprotected` returns true.
    fn reap_here(&self, is_unprotected: impl Fn(u32) -> bool) {
        let until = Instant::now() + REAP_TIMEOUT;
        loop {
            match wait4(-1, CALLING_THREAD) {
                Ok((0, ..)) if Instant::now() < until => {
                    let starting = self.starting.write().unwrap_or_else(PoisonError::into_inner);
                    let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
                    let has_protected = programs.unfinished.values().any(|is_recorded| *is_recorded);
                    // An error means that `/proc` cannot be read; the next iteration tries again.
                    let _ = if has_protected { programs.record_all() } else { Ok(()) };
                    let is_spared = |child| {
                        programs.is_unkillable(child)
                            || !is_unprotected(child) && programs.is_protected(child)
                    };
                    let killed = kill_descendants(is_spared);
                    drop((programs, starting));
                    if matches!(killed, Ok(0)) {
                        while wait4(-1, CALLING_THREAD).is_ok_and(|(pid, ..)| pid != 0) {}
                        break;
                    }
                    std::thread::sleep(Duration::from_micros(500));
                }
                Ok((0, ..)) => {
                    self.programs.lock().unwrap_or_else(PoisonError::into_inner).record_unkillable();
                    break;
                }
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let Programs { unfinished, owners, unkillable, .. } = &mut *programs;
        unkillable.retain(|process| identity_of(process.pid) == Some(*process));
        owners.retain(|_, owners| owners.iter().any(|owner| unfinished.contains_key(owner)));
    }
}
