//! Starts workers, from the order to the running program. This includes the fork, the exchange of messages with the
//! child, and the check of the child's confinement.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use bulkhead_linux::rlimits::OPEN_FILES;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use super::templates::Template;
use super::templates::namespaces::TemplateNamespace;
use super::temporary::parent_folder;
use super::{Child, EXIT, EventLoop, LISTENER, Stage, deregister, id_maps, observe, register, register_each};
use crate::confine::cgroup::Leaf;
use crate::protocol::confinement::{
    CgroupLimits, Identity, Layers, Namespaces, Observed, Seccomp, TemporaryFiles,
};
use crate::protocol::{ReportMessage, SpawnOrder};
use crate::spawn::{self, ChildConnections, Job, Prepared, PreparedConfinement, Progress, SpawnError};
use crate::wait;

/// A forked child: the PID, the pidfd, the connections to the child, and the part of the confinement that is known
/// before `/proc` is read.
type Forked = (u32, OwnedFd, ChildConnections, Observed);

/// Creates the socket between the keeper and a template. The first descriptor is the keeper's end, which
/// receives the credentials of each sender and accepts no descriptors.
fn template_socket() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = crate::protocol::socket::pair()?;
    rustix::net::sockopt::set_socket_passcred(&ours, true)?;
    // Ignores errors, because older kernels do not have this socket option.
    let _ = bulkhead_linux::scm_rights::refuse_descriptors(&ours);
    Ok((ours, theirs))
}

/// Raises the process limit of a worker's control group to allow for processes that do not belong to the worker. These
/// are the first process of the PID namespace, and the process that a template is forking.
fn with_own_processes(limits: CgroupLimits, namespaces: Namespaces, is_template: bool) -> CgroupLimits {
    let own = u64::from(namespaces.pid) + u64::from(is_template);
    CgroupLimits { pids: limits.pids.map(|pids| pids.saturating_add(own)), ..limits }
}

impl EventLoop {
    /// Starts a worker or a template.
    pub(super) fn spawn(
        &mut self,
        order: &SpawnOrder<'_>,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<(), SpawnError> {
        self.hung_paths.check(&self.forker, order)?;
        let mut template = None;
        if order.is_template {
            let pair = template_socket().map_err(|error| SpawnError::from_io("descriptors", &error));
            let (ours, theirs) = pair?;
            descriptors.insert(0, theirs);
            template = Some(Template::new(ours));
        }
        let layers = order.confinement.layers;
        let folder = match layers.temporary {
            TemporaryFiles::Folder => Some(self.create_folder(order.worker, layers.identity)?),
            // The keeper remains the owner of the folder. Only the file system mounted over it belongs to the worker.
            TemporaryFiles::MountedTmpfs(_) => Some(self.create_folder(order.worker, None)?),
            TemporaryFiles::None | TemporaryFiles::PrivateTmp(_) => None,
        };
        let forked = self.fork_in_group(order, descriptors, folder.as_deref());
        let ((pid, pidfd, mut connections, observed), leaf) = match forked {
            Ok(forked) => forked,
            Err(error) => {
                folder.into_iter().for_each(|folder| self.folders.remove(folder));
                return Err(error);
            }
        };
        let (worker, rlimits) = (order.worker, order.rlimits.clone());
        let child = Child {
            status: connections.status.take(),
            namespace: connections.init_socket.take().map(TemplateNamespace::new),
            // A worker without confinement executes its program without waiting for the keeper's permission.
            is_confined: layers == Layers::default(),
            folder,
            leaf,
            template,
            ..Child::new(worker, pid, pidfd, Stage::Starting(connections), layers, rlimits, observed)
        };
        let registered = register_each(&self.poll, pid, child.report_descriptors());
        self.insert(pid, child);
        if let Err(error) = registered {
            self.finish_start(pid, Some(SpawnError::from_io("descriptors", &error)));
        }
        Ok(())
    }

    /// Forks a child. If the order contains control group limits, the child starts in a new control group.
    fn fork_in_group(
        &mut self,
        order: &SpawnOrder<'_>,
        descriptors: Vec<OwnedFd>,
        folder: Option<&Path>,
    ) -> Result<(Forked, Option<Leaf>), SpawnError> {
        let Layers { cgroup, namespaces, .. } = order.confinement.layers;
        let limits = cgroup.map(|limits| with_own_processes(limits, namespaces, order.is_template));
        let leaf = limits.map(|limits| self.groups.create(order.worker, &limits)).transpose()?;
        match self.fork_child(order, descriptors, folder, leaf.as_ref()) {
            Ok(forked) => Ok((forked, leaf)),
            Err(error) => {
                leaf.into_iter().for_each(|leaf| self.groups.remove(leaf));
                Err(error)
            }
        }
    }

    fn create_folder(&mut self, worker: u64, identity: Option<Identity>) -> Result<PathBuf, SpawnError> {
        self.folders.create(worker, identity).map_err(|error| {
            SpawnError::from_io(&format!("temporary directory in {}", parent_folder().display()), &error)
        })
    }

    fn fork_child(
        &mut self,
        order: &SpawnOrder<'_>,
        descriptors: Vec<OwnedFd>,
        folder: Option<&Path>,
        leaf: Option<&Leaf>,
    ) -> Result<Forked, SpawnError> {
        let confinement = PreparedConfinement::prepare(
            order,
            folder,
            &mut self.filters,
            self.subordinate_namespace.clone(),
        )?;
        let observed = Observed { landlock: confinement.landlock(), ..Observed::default() };
        let cgroup = leaf.map(|leaf| leaf.fd().try_clone_to_owned()).transpose();
        let cgroup = cgroup.map_err(|error| SpawnError::from_io("cgroup", &error))?;
        let (prepared, connections) = Prepared::new(order, folder, descriptors, confinement, cgroup)?;
        let step = spawn::fork_step(order.confinement.layers.namespaces);
        let in_fork = |error: io::Error| SpawnError::from_io(step, &error);
        let pid = self.forker.fork(Job::Worker(prepared)).map_err(in_fork)?;
        match self.register_child(pid, &connections.progress) {
            Ok(pidfd) => Ok((pid, pidfd, connections, observed)),
            Err(error) => {
                wait::kill_child(pid);
                Err(in_fork(error))
            }
        }
    }

    fn register_child(&self, pid: u32, progress: &OwnedFd) -> io::Result<OwnedFd> {
        let number = Pid::from_raw(pid as i32).ok_or(Errno::SRCH)?;
        let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
        register(&self.poll, progress, pid as usize)?;
        register(&self.poll, &pidfd, pid as usize | EXIT)?;
        Ok(pidfd)
    }

    /// Handles messages from a starting child, and performs the actions for which the child is waiting. When the start
    /// has succeeded or failed, reports the result.
    pub(super) fn advance_start(&mut self, pid: u32) {
        while let Some(Child { stage: Stage::Starting(connections), layers, .. }) = self.children.get(&pid) {
            let failure = match spawn::read_progress(&connections.progress) {
                Progress::Pending => return,
                Progress::WaitsForIdMaps => match id_maps::write(pid, layers.identity) {
                    Ok(()) => {
                        spawn::let_continue(&connections.progress);
                        continue;
                    }
                    Err(error) => Some(SpawnError::from_io("user namespace", &error)),
                },
                Progress::Confined { pid: process, listener } => {
                    match self.check_confinement(pid, process, listener) {
                        Ok(()) => continue,
                        Err(failure) => Some(failure),
                    }
                }
                Progress::Failed(failure) => Some(connections.describe(&failure)),
                Progress::Executed => None,
            };
            self.finish_start(pid, failure);
        }
    }

    /// Handles a child's message that its confinement is complete. If the confinement matches the order, lets the child
    /// execute its program.
    pub(super) fn check_confinement(
        &mut self,
        pid: u32,
        process: u32,
        listener: Option<OwnedFd>,
    ) -> Result<(), SpawnError> {
        let Some(child) = self.children.get_mut(&pid) else { return Ok(()) };
        let failed = |error: io::Error| SpawnError::from_io("confinement check in /proc", &error);
        child.process = process;
        if let Some(namespace) = &mut child.namespace {
            namespace.template = Some(observe::namespace_pids(process).map_err(failed)?.inner);
        }
        child.observed.namespaces = self.own_status.differing_namespaces(process).map_err(failed)?;
        // These descriptors are open in addition to the worker's own descriptors: the child's end of the
        // progress socket, the listener, and the files counted in `extra_descriptors`.
        let executable = match &child.stage {
            Stage::Starting(connections) => connections.extra_descriptors,
            Stage::Running | Stage::Failed | Stage::Ended | Stage::Abandoned => 0,
        };
        let closing = 1 + u32::from(listener.is_some()) + executable;
        let open = observe::open_descriptors(process).map_err(failed)?;
        child.observed.descriptors = open.saturating_sub(closing);
        child.observed.cgroup =
            child.leaf.as_ref().is_some_and(|leaf| observe::is_in_cgroup(process, leaf.path()));
        let filters = observe::read_status(process, &mut child.observed).map_err(failed)?;
        let limit = observe::limit_mismatch(process, &child.rlimits, OPEN_FILES).map_err(failed)?;
        // Filters that the keeper has inherited from the supervisor are not counted as filters of the worker.
        let lacks_filter =
            child.layers.seccomp != Seccomp::Off && filters != 0 && filters <= self.own_status.filter_count;
        let filter = lacks_filter.then_some("Seccomp_filters");
        if let Some(what) = child.observed.mismatch(&child.layers).or(limit).or(filter) {
            let step = format!("confinement check: {what} differs from the requested value");
            return Err(SpawnError::new(&step, Errno::PERM));
        }
        if let Some(listener) = listener {
            register(&self.poll, &listener, pid as usize | LISTENER).map_err(failed)?;
            child.listener = Some(listener);
        }
        child.is_confined = true;
        if let Stage::Starting(connections) = &child.stage {
            spawn::let_continue(&connections.progress);
        }
        Ok(())
    }

    /// Completes the start of a child that has either executed its program or failed.
    pub(super) fn finish_start(&mut self, pid: u32, failure: Option<SpawnError>) {
        let Some(child) = self.children.get_mut(&pid) else { return };
        let stage = if failure.is_some() { Stage::Failed } else { Stage::Running };
        if let Stage::Starting(connections) = std::mem::replace(&mut child.stage, stage) {
            deregister(&self.poll, &connections.progress);
        }
        let worker = child.worker;
        if let Some(failure) = failure {
            self.kill(pid);
            return self.report_failure(worker, &failure);
        }
        if !child.is_confined {
            // The child was killed before it was allowed to execute its program. The exit is reported next.
            self.kill(pid);
        } else if let Some(what) = child.recheck_confinement() {
            child.stage = Stage::Failed;
            self.kill(pid);
            let step = format!(
                "confinement check: {what} differs from the requested value after the program has started"
            );
            return self.report_failure(worker, &SpawnError::new(&step, Errno::PERM));
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
                self.report_failure(worker, &SpawnError::from_io("descriptors", &error));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::socket::Outbox;

    #[test]
    fn process_limit_excludes_processes_of_the_keeper() {
        let limits = CgroupLimits { memory_bytes: Some(1), pids: Some(1), cpu_millicores: None };
        let pids = |pid, is_template| {
            let namespaces = Namespaces { pid, ..Namespaces::default() };
            with_own_processes(limits, namespaces, is_template).pids
        };
        assert_eq!(pids(false, false), Some(1));
        assert_eq!(pids(true, false), Some(2));
        assert_eq!(pids(true, true), Some(3));
        let unlimited = CgroupLimits { pids: None, ..limits };
        assert_eq!(with_own_processes(unlimited, Namespaces::default(), true), unlimited);
    }

    #[test]
    fn template_cannot_pass_descriptors() {
        let (ours, theirs) = template_socket().unwrap();
        if bulkhead_linux::scm_rights::refuse_descriptors(&ours).is_err() {
            return;
        }
        let mut outbox = Outbox::default();
        outbox.push(vec![b'R'], vec![std::fs::File::open("/dev/null").unwrap().into()]);
        assert_eq!(outbox.flush(&theirs).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
