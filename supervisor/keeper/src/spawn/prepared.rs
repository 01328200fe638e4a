//! Everything that the child of a worker needs, prepared before the fork.

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;

use bulkhead_shared::worker_protocol::PROGRAM_VARIABLE;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;

use super::confinement::PreparedConfinement;
use super::mounts::covers::Covers;
use super::mounts::root::PrivateRoot;
use super::progress::{self, StepFailure};
use super::{LINK_FD, SpawnError, steps};
use crate::protocol::confinement::TemporaryFiles;
use crate::protocol::socket;
use crate::protocol::{Rlimit, SPAWN_DESCRIPTORS, SpawnOrder};

/// Variable that names the folder for temporary files.
const TMPDIR_VARIABLE: &str = "TMPDIR=";

/// Variable that names the user's home folder. A worker's only home is the folder for temporary files.
const HOME_VARIABLE: &str = "HOME=";

/// Folder for temporary files in a private root folder.
const PRIVATE_TMP: &str = "/tmp";

/// Everything that a worker's child needs, prepared before the fork.
pub(crate) struct Prepared {
    pub(super) program: CString,
    pub(super) directory: CString,
    pub(super) arguments: Vec<CString>,
    pub(super) environment: Vec<CString>,
    pub(super) rlimits: Vec<Rlimit>,
    pub(super) link: OwnedFd,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
    pub(super) progress: OwnedFd,
    /// The keeper's end of `progress`, of which the child has a copy.
    pub(super) keeper_end: RawFd,
    /// Control group in which the child starts.
    pub(super) cgroup: Option<OwnedFd>,
    /// Pipe on which the first process of a pid namespace reports how the worker ended.
    pub(super) status: Option<OwnedFd>,
    /// Socket on which the first process of a template's namespace reports exits and receives orders to kill.
    pub(super) init_socket: Option<OwnedFd>,
    pub(super) confinement: PreparedConfinement,
}

/// The program of a worker, as ordered.
pub(crate) struct Program {
    pub(crate) program: CString,
    pub(crate) directory: CString,
    pub(crate) arguments: Vec<CString>,
    pub(crate) environment: Vec<CString>,
    pub(crate) rlimits: Vec<Rlimit>,
}

impl Program {
    /// Converts an order. Sets `TMPDIR` and `HOME` to the temporary folder, if there is one.
    pub(crate) fn new(order: &SpawnOrder<'_>, temporary: Option<&Path>) -> Result<Self, SpawnError> {
        let texts = |list: &[&str]| list.iter().map(|item| c_string(item)).collect::<Result<Vec<_>, _>>();
        let mut environment = texts(&order.environment)?;
        let has_private_tmp = matches!(order.confinement.layers.temporary, TemporaryFiles::PrivateTmp(_));
        let home = temporary.or(has_private_tmp.then_some(Path::new(PRIVATE_TMP)));
        for (variable, folder) in [(TMPDIR_VARIABLE, temporary), (HOME_VARIABLE, home)] {
            let has_own = order.environment.iter().any(|one| one.starts_with(variable));
            if let Some(folder) = folder.filter(|_| !has_own) {
                environment.push(c_string(&format!("{variable}{}", folder.display()))?);
            }
        }
        Ok(Self {
            program: c_string(order.program)?,
            directory: c_string(order.directory)?,
            arguments: texts(&order.arguments)?,
            environment,
            rlimits: order.rlimits.clone(),
        })
    }
}

fn c_string(text: &str) -> Result<CString, SpawnError> {
    CString::new(text).map_err(|_| SpawnError::new("order", Errno::INVAL))
}

/// The keeper's ends of the connections to a child.
pub(crate) struct ChildConnections {
    /// Progress of the child: see `progress`.
    pub(crate) progress: OwnedFd,
    /// Status pipe of the first process of a pid namespace.
    pub(crate) status: Option<OwnedFd>,
    /// Socket of the first process of a pid namespace with a template.
    pub(crate) init_socket: Option<OwnedFd>,
    /// Describe failed steps.
    root: Option<Arc<PrivateRoot>>,
    covers: Option<Arc<Covers>>,
    /// Number of the child's descriptors in addition to those of every worker and the progress socket.
    pub(crate) extra_descriptors: u32,
}

impl ChildConnections {
    /// Describes the failure of a child.
    pub(crate) fn describe(&self, failure: &StepFailure) -> SpawnError {
        let step = steps::describe(failure, self.root.as_deref(), self.covers.as_deref());
        SpawnError { step, errno: Errno::from_raw_os_error(failure.errno) }
    }
}

impl Prepared {
    /// Combines everything that the child needs.
    pub(crate) fn new(
        program: Program,
        descriptors: Vec<OwnedFd>,
        confinement: PreparedConfinement,
        cgroup: Option<OwnedFd>,
        is_template: bool,
    ) -> Result<(Box<Self>, ChildConnections), SpawnError> {
        let has_low_number = descriptors.iter().any(|descriptor| descriptor.as_raw_fd() <= LINK_FD);
        let descriptors: [OwnedFd; SPAWN_DESCRIPTORS] =
            descriptors.try_into().map_err(|_| SpawnError::new("descriptors", Errno::MFILE))?;
        if has_low_number {
            return Err(SpawnError::new("descriptors", Errno::BADF));
        }
        let [link, stdout, stderr] = descriptors;
        let (ours, progress) = progress::pair().map_err(|errno| SpawnError::new("fork", errno))?;
        let has_first = confinement.layers.namespaces.pid;
        let init_socket = (has_first && is_template).then(socket::pair).transpose();
        let (init_socket_ours, init_socket) =
            init_socket.map_err(|error| SpawnError::from_io("fork", &error))?.unzip();
        let status = (has_first && !is_template).then(|| {
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)
                .map_err(|errno| SpawnError::new("fork", errno))
        });
        let (status_ours, status) = status.transpose()?.unzip();
        let (root, covers) = (confinement.root(), confinement.covers());
        let expected = [confinement.executable.is_some(), confinement.hosted_file.is_some()];
        let extra_descriptors = expected.into_iter().map(u32::from).sum();
        let Program { program, directory, arguments, mut environment, rlimits } = program;
        if let Some(hosted_file) = &confinement.hosted_file {
            environment.push(c_string(&format!("{PROGRAM_VARIABLE}={}", hosted_file.as_raw_fd()))?);
        }
        let prepared = Self {
            program,
            directory,
            arguments,
            environment,
            rlimits,
            link,
            stdout,
            stderr,
            progress,
            keeper_end: ours.as_raw_fd(),
            cgroup,
            status,
            init_socket,
            confinement,
        };
        let connections = ChildConnections {
            progress: ours,
            status: status_ours,
            init_socket: init_socket_ours,
            root,
            covers,
            extra_descriptors,
        };
        Ok((Box::new(prepared), connections))
    }
}
