//! Starts workers, from the order to the running program. This includes the fork, the exchange with the child
//! on the way, and the read-back of the child's confinement.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use bulkhead_linux::rlimits::OPEN_FILES;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use super::nests::Nest;
use super::templates::Template;
use super::{Child, END, FORKS, LISTENER, NEST, Process, STATUS, Stage, deregister, register};
use crate::confine::cgroup::Leaf;
use crate::confinement::{Identity, Layers, Observed, Seccomp, TemporaryFiles};
use crate::spawn::{self, Barriers, Ends, Job, Prepared, Progress, Refusal};
use crate::{ReportMessage, SpawnOrder, id_maps, observe, wait};

/// Creates the socket between keeper and template. The keeper's end comes first. It never blocks, receives
/// the sender's credentials, and accepts no descriptors.
fn template_socket() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = crate::socket::pair()?;
    rustix::net::sockopt::set_socket_passcred(&ours, true)?;
    // Older kernels do not support this.
    let _ = bulkhead_linux::scm_rights::refuse_descriptors(&ours);
    Ok((ours, theirs))
}

impl Process {
    pub(super) fn spawn(
        &mut self,
        order: &SpawnOrder<'_>,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<(), Refusal> {
        let template = order.is_template.then(template_socket).transpose();
        let template = template.map_err(|error| Refusal::of("descriptors", &error))?.map(|(ours, theirs)| {
            descriptors.insert(0, theirs);
            Template::new(ours)
        });
        let layers = order.confinement.layers;
        let folder = match layers.temporary {
            TemporaryFiles::Folder => Some(self.make_folder(order.worker, layers.identity)?),
            // The folder stays the keeper's. Only the file system mounted over it belongs to the worker.
            TemporaryFiles::MountedTmpfs(_) => Some(self.make_folder(order.worker, None)?),
            TemporaryFiles::None | TemporaryFiles::PrivateTmp(_) => None,
        };
        let leaf = layers.cgroup.map(|limits| self.groups.create(order.worker, &limits)).transpose();
        let started = leaf.and_then(|leaf| {
            let started = self.start_in(order, descriptors, folder.as_deref(), leaf.as_ref());
            match started {
                Ok(started) => Ok((started, leaf)),
                Err(refusal) => {
                    leaf.into_iter().for_each(|leaf| self.groups.remove(leaf));
                    Err(refusal)
                }
            }
        });
        match started {
            Ok(((pid, pidfd, mut ends, observed), leaf)) => {
                let status = ends.status.take();
                // If this fails, the status is read when the first process has ended.
                let told = status.as_ref().map(|status| register(&self.poll, status, pid as usize | STATUS));
                debug_assert!(told.is_none_or(|told| told.is_ok()));
                let nest = ends.nest.take().map(Nest::new);
                let told = nest.as_ref().map(|nest| register(&self.poll, nest.socket(), pid as usize | NEST));
                debug_assert!(told.is_none_or(|told| told.is_ok()));
                let heard =
                    template.as_ref().map(|it| register(&self.poll, it.socket(), pid as usize | FORKS));
                debug_assert!(heard.is_none_or(|heard| heard.is_ok()));
                let child = Child {
                    worker: order.worker,
                    pidfd,
                    stage: Stage::Starting(ends),
                    layers,
                    rlimits: order.rlimits.clone(),
                    // A worker without confinement does not wait for permission.
                    is_confined: layers == Layers::default(),
                    process: pid,
                    listener: None,
                    violation: None,
                    folder,
                    leaf,
                    observed,
                    status,
                    template,
                    nest,
                    home: None,
                };
                self.insert(pid, child);
                Ok(())
            }
            Err(refusal) => {
                folder.into_iter().for_each(|folder| self.folders.remove(folder));
                Err(refusal)
            }
        }
    }

    pub(super) fn make_folder(
        &mut self,
        worker: u64,
        identity: Option<Identity>,
    ) -> Result<PathBuf, Refusal> {
        self.folders.create(worker, identity).map_err(|error| {
            Refusal::of(&format!("temporary folder in {}", std::env::temp_dir().display()), &error)
        })
    }

    pub(super) fn start_in(
        &mut self,
        order: &SpawnOrder<'_>,
        descriptors: Vec<OwnedFd>,
        folder: Option<&Path>,
        leaf: Option<&Leaf>,
    ) -> Result<(u32, OwnedFd, Ends, Observed), Refusal> {
        let barriers = Barriers::prepare(order, folder, &mut self.filters, self.namespace.clone())?;
        let observed = Observed { landlock: barriers.landlock(), ..Observed::default() };
        let program = spawn::Program::new(order, folder)?;
        let cgroup = leaf.map(|leaf| leaf.fd().try_clone_to_owned()).transpose();
        let cgroup = cgroup.map_err(|error| Refusal::of("cgroup", &error))?;
        let (prepared, ends) = Prepared::new(program, descriptors, barriers, cgroup, order.is_template)?;
        let step = spawn::fork_step(order.confinement.layers.namespaces);
        let in_fork = |error: io::Error| Refusal::of(step, &error);
        let pid = self.forker.fork(Job::Worker(prepared)).map_err(in_fork)?;
        match self.watch(pid, &ends.progress) {
            Ok(pidfd) => Ok((pid, pidfd, ends, observed)),
            Err(error) => {
                wait::kill_child(pid);
                Err(in_fork(error))
            }
        }
    }

    pub(super) fn watch(&self, pid: u32, progress: &OwnedFd) -> io::Result<OwnedFd> {
        let number = Pid::from_raw(pid as i32).ok_or(Errno::SRCH)?;
        let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
        register(&self.poll, progress, pid as usize)?;
        register(&self.poll, &pidfd, pid as usize | END)?;
        Ok(pidfd)
    }

    /// Reads messages of a starting child, does what the child waits for, and reports the result of the
    /// start.
    pub(super) fn look_at_start(&mut self, pid: u32) {
        while let Some(Child { stage: Stage::Starting(ends), layers, .. }) = self.children.get(&pid) {
            let refusal = match spawn::read_progress(&ends.progress) {
                Progress::Underway => return,
                Progress::WantsMap => match id_maps::write(pid, layers.identity) {
                    Ok(()) => {
                        spawn::go_on(&ends.progress);
                        continue;
                    }
                    Err(error) => Some(Refusal::of("user namespace", &error)),
                },
                Progress::Ready { pid: process, listener } => match self.confined(pid, process, listener) {
                    Ok(()) => continue,
                    Err(refusal) => Some(refusal),
                },
                Progress::Failed(failure) => Some(ends.refusal(&failure)),
                Progress::Executed => None,
            };
            self.started(pid, refusal);
        }
    }

    /// Handles a child's report that it is confined. If the confinement is as ordered, the child may execute
    /// its program.
    pub(super) fn confined(
        &mut self,
        pid: u32,
        process: u32,
        listener: Option<OwnedFd>,
    ) -> Result<(), Refusal> {
        let Some(child) = self.children.get_mut(&pid) else { return Ok(()) };
        let failed = |error: io::Error| Refusal::of("read-back from /proc", &error);
        child.process = process;
        if let Some(nest) = &mut child.nest {
            nest.template = Some(observe::namespace_pids(process).map_err(failed)?.inner);
        }
        child.observed.namespaces = self.own_status.differing_namespaces(process).map_err(failed)?;
        // Open in addition to the worker's descriptors: the child's end of the progress socket, the listener,
        // and the descriptors in `beside`.
        let executable = match &child.stage {
            Stage::Starting(ends) => ends.beside,
            Stage::Running | Stage::Failed | Stage::Ended => 0,
        };
        let closing = 1 + u32::from(listener.is_some()) + executable;
        let open = observe::open_descriptors(process).map_err(failed)?;
        child.observed.descriptors = open.saturating_sub(closing);
        child.observed.cgroup =
            child.leaf.as_ref().is_some_and(|leaf| observe::is_in_cgroup(process, leaf.path()));
        let filters = observe::read_status(process, &mut child.observed).map_err(failed)?;
        let limit = observe::limit_mismatch(process, &child.rlimits, OPEN_FILES).map_err(failed)?;
        // The supervisor can be under a filter itself, which does not count here.
        let is_bare =
            child.layers.seccomp != Seccomp::Off && filters != 0 && filters <= self.own_status.filter_count;
        let filter = is_bare.then_some("Seccomp_filters");
        if let Some(what) = child.observed.mismatch(&child.layers).or(limit).or(filter) {
            let step = format!("read-back from /proc: {what} is not as ordered");
            return Err(Refusal::new(&step, Errno::PERM));
        }
        if let Some(listener) = listener {
            register(&self.poll, &listener, pid as usize | LISTENER).map_err(failed)?;
            child.listener = Some(listener);
        }
        child.is_confined = true;
        if let Stage::Starting(ends) = &child.stage {
            spawn::go_on(&ends.progress);
        }
        Ok(())
    }

    /// Handles a child that has executed its program or has failed.
    pub(super) fn started(&mut self, pid: u32, refusal: Option<Refusal>) {
        let Some(child) = self.children.get_mut(&pid) else { return };
        let stage = if refusal.is_some() { Stage::Failed } else { Stage::Running };
        if let Stage::Starting(ends) = std::mem::replace(&mut child.stage, stage) {
            deregister(&self.poll, &ends.progress);
        }
        let worker = child.worker;
        if let Some(refusal) = refusal {
            self.kill(pid);
            return self.report_failure(worker, &refusal);
        }
        if !child.is_confined {
            // The child was killed on the way, because it never got permission to continue. Its end is
            // reported next.
            self.kill(pid);
        } else if let Some(what) = child.look_again() {
            child.stage = Stage::Failed;
            self.kill(pid);
            let step = format!("read-back from /proc: {what} is not as ordered once the program runs");
            return self.report_failure(worker, &Refusal::new(&step, Errno::PERM));
        }
        let Some(child) = self.children.get_mut(&pid) else { return };
        let (process, observed) = (child.process, child.observed);
        // The message carries a duplicate of the pidfd. The duplicate is closed as soon as the message is
        // sent, because the kernel then holds another reference.
        match child.pidfd.try_clone() {
            Ok(pidfd) => self.report(&ReportMessage::Spawned { worker, pid: process, observed }, Some(pidfd)),
            Err(error) => {
                child.stage = Stage::Failed;
                self.kill(pid);
                self.report_failure(worker, &Refusal::of("descriptors", &error));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::Outbox;

    #[test]
    fn a_template_passes_no_descriptors_to_the_keeper() {
        let (ours, theirs) = template_socket().unwrap();
        if bulkhead_linux::scm_rights::refuse_descriptors(&ours).is_err() {
            return;
        }
        let mut outbox = Outbox::default();
        outbox.push(vec![b'R'], vec![std::fs::File::open("/dev/null").unwrap().into()]);
        assert_eq!(outbox.flush(&theirs).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
