//! Prepares, before the fork, everything that a forked child needs to become a worker. Builds the environment and reads
//! the files in `env_files`, because the child makes only system calls. `starts` calls this in the keeper, and `child`
//! uses the result.

use std::ffi::CString;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bulkhead_linux::secret_file::{self, SecretFileError};
use bulkhead_shared::worker_protocol::PROGRAM_VARIABLE;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use zeroize::{Zeroize as _, Zeroizing};

use super::confinement::PreparedConfinement;
use super::mounts::covers::Covers;
use super::mounts::root::PrivateRoot;
use super::progress;
use super::{LINK_FD, SpawnError};
use crate::confine::paths;
use crate::protocol::confinement::TemporaryFiles;
use crate::protocol::socket;
use crate::protocol::{Rlimit, SPAWN_DESCRIPTORS, SpawnOrder};

/// Environment variable that names the folder for temporary files.
const TMPDIR_VARIABLE: &str = "TMPDIR=";

/// Environment variable that names the user's home folder. Set to the worker's temporary folder.
const HOME_VARIABLE: &str = "HOME=";

/// Folder for temporary files in a private root folder.
const PRIVATE_TMP: &str = "/tmp";

pub(crate) struct Prepared {
    pub(super) program: CString,
    pub(super) directory: CString,
    pub(super) arguments: Vec<CString>,
    pub(super) environment: Environment,
    pub(super) rlimits: Vec<Rlimit>,
    pub(super) link: OwnedFd,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
    pub(super) progress: OwnedFd,
    /// The keeper's end of the `progress` socket. The child has a copy of this descriptor and must close it.
    pub(super) keeper_end: RawFd,
    /// Control group in which the child starts.
    pub(super) cgroup: Option<OwnedFd>,
    /// Pipe on which the first process of a PID namespace reports how the worker exited.
    pub(super) status: Option<OwnedFd>,
    /// Socket on which the first process of a template's namespace reports exits. The keeper uses the same socket to
    /// order kills.
    pub(super) init_socket: Option<OwnedFd>,
    pub(super) confinement: PreparedConfinement,
}

/// Environment of a worker, as `NAME=value`. The memory is erased when the value is dropped, because variables can
/// contain secrets. Children that are forked later contain copies of the keeper's memory.
pub(super) struct Environment(Vec<CString>);

impl Deref for Environment {
    type Target = [CString];

    fn deref(&self) -> &[CString] {
        &self.0
    }
}

impl Drop for Environment {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|variable| variable.into_bytes_with_nul().zeroize());
    }
}

fn c_string(text: &str) -> Result<CString, SpawnError> {
    CString::new(text).map_err(|_| SpawnError::new("order", Errno::INVAL))
}

fn c_strings(texts: &[&str]) -> Result<Vec<CString>, SpawnError> {
    texts.iter().map(|text| c_string(text)).collect()
}

/// The keeper's ends of its connections to a child. Also contains data that is needed to describe a failure of the
/// child.
pub(crate) struct ChildConnections {
    /// Socket on which the starting child sends messages; see the `progress` module.
    pub(crate) progress: OwnedFd,
    /// Status pipe from the first process of the worker's PID namespace.
    pub(crate) status: Option<OwnedFd>,
    /// Socket to the first process of the template's PID namespace.
    pub(crate) init_socket: Option<OwnedFd>,
    /// The private root folder, used to find the path of a mount that failed.
    pub(super) root: Option<Arc<PrivateRoot>>,
    pub(super) covers: Option<Arc<Covers>>,
    pub(super) program: PathBuf,
    pub(super) directory: PathBuf,
    /// Number of descriptors that the child has in addition to the progress socket and those that every worker has.
    pub(crate) extra_descriptors: u32,
}

/// Reads the value of an environment variable from a file. If the path leads through a folder in `write`, the file must
/// be inside such a folder, because the worker could replace it with a link to another user's file.
fn variable_from_file(name: &str, path: &str, write: &[&Path]) -> Result<CString, SpawnError> {
    let unreadable = |errno| SpawnError::new(&format!("env_files.{name}: read {path}"), errno);
    let is_fixed = paths::is_fixed(Path::new(path), write);
    let opened =
        (!is_fixed).then(|| paths::open_inside(Path::new(path), write)).transpose().map_err(unreadable)?;
    let place = opened.as_ref().map(|file| format!("/proc/self/fd/{}", file.as_raw_fd()));
    let value = secret_file::read_variable(Path::new(place.as_deref().unwrap_or(path))).map_err(|error| {
        let step = match &error {
            SecretFileError::Unreadable(_) => format!("env_files.{name}: read {path}"),
            error => format!("env_files.{name}: {path} {error} ({})", error.help()),
        };
        SpawnError::new(&step, error.errno())
    })?;
    // Allocates the exact size, because a reallocation would leave a copy of the secret value in freed memory.
    let mut variable = Zeroizing::new(Vec::with_capacity(name.len() + value.len() + 2));
    for part in [name.as_bytes(), b"=", &value, b"\0"] {
        variable.extend_from_slice(part);
    }
    CString::from_vec_with_nul(std::mem::take(&mut *variable))
        .map_err(|_| SpawnError::new(&format!("env_files.{name}"), Errno::INVAL))
}

/// Builds the environment that a spawn order asks for. If the worker has a temporary folder, also sets `TMPDIR` and
/// `HOME`, unless the order sets them. With a private `/tmp`, sets only `HOME`.
fn environment(order: &SpawnOrder<'_>, temporary: Option<&Path>) -> Result<Environment, SpawnError> {
    let mut environment = Environment(c_strings(&order.environment)?);
    let write: Vec<&Path> = order.confinement.write.iter().map(Path::new).collect();
    for (name, path) in &order.environment_files {
        environment.0.push(variable_from_file(name, path, &write)?);
    }
    let has_private_tmp = matches!(order.confinement.layers.temporary, TemporaryFiles::PrivateTmp(_));
    let home = temporary.or(has_private_tmp.then_some(Path::new(PRIVATE_TMP)));
    for (variable, folder) in [(TMPDIR_VARIABLE, temporary), (HOME_VARIABLE, home)] {
        let is_own = |entry: &CString| entry.as_bytes().starts_with(variable.as_bytes());
        let has_own = environment.iter().any(is_own);
        if let Some(folder) = folder.filter(|_| !has_own) {
            environment.0.push(c_string(&format!("{variable}{}", folder.display()))?);
        }
    }
    Ok(environment)
}

/// Returns the descriptors of the link, standard output and standard error.
fn standard_descriptors(descriptors: Vec<OwnedFd>) -> Result<[OwnedFd; SPAWN_DESCRIPTORS], SpawnError> {
    if descriptors.iter().any(|descriptor| descriptor.as_raw_fd() <= LINK_FD) {
        return Err(SpawnError::new("descriptors", Errno::BADF));
    }
    descriptors.try_into().map_err(|_| SpawnError::new("descriptors", Errno::MFILE))
}

impl Prepared {
    /// Prepares everything that the child needs. `temporary` is the temporary folder of the worker.
    pub(crate) fn new(
        order: &SpawnOrder<'_>,
        temporary: Option<&Path>,
        descriptors: Vec<OwnedFd>,
        confinement: PreparedConfinement,
        cgroup: Option<OwnedFd>,
    ) -> Result<(Box<Self>, ChildConnections), SpawnError> {
        let [link, stdout, stderr] = standard_descriptors(descriptors)?;
        let fork_error = |errno| SpawnError::new("fork", errno);
        let (ours, progress) = progress::pair().map_err(fork_error)?;
        let has_pid_namespace = confinement.layers.namespaces.pid;
        let sockets = (has_pid_namespace && order.is_template).then(socket::pair).transpose();
        let (init_socket_ours, init_socket) =
            sockets.map_err(|error| SpawnError::from_io("fork", &error))?.unzip();
        let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
        let status = (has_pid_namespace && !order.is_template).then(pipe).transpose();
        let (status_ours, status) = status.map_err(fork_error)?.unzip();
        let mut environment = environment(order, temporary)?;
        if let Some(hosted_file) = &confinement.hosted_file {
            environment.0.push(c_string(&format!("{PROGRAM_VARIABLE}={}", hosted_file.as_raw_fd()))?);
        }
        let connections = ChildConnections {
            status: status_ours,
            init_socket: init_socket_ours,
            root: confinement.root(),
            covers: confinement.covers(),
            program: order.program.into(),
            directory: order.directory.into(),
            extra_descriptors: u32::from(confinement.executable.is_some())
                + u32::from(confinement.hosted_file.is_some()),
            progress: ours,
        };
        let prepared = Self {
            program: c_string(order.program)?,
            directory: c_string(order.directory)?,
            arguments: c_strings(&order.arguments)?,
            environment,
            rlimits: order.rlimits.clone(),
            link,
            stdout,
            stderr,
            progress,
            keeper_end: connections.progress.as_raw_fd(),
            cgroup,
            status,
            init_socket,
            confinement,
        };
        Ok((Box::new(prepared), connections))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn secret_that_the_worker_can_replace_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("work")).unwrap();
        for name in ["secret", "work/own"] {
            std::fs::write(path(name), "sesame\n").unwrap();
            std::fs::set_permissions(path(name), std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        std::os::unix::fs::symlink(path("secret"), path("work/link")).unwrap();
        std::os::unix::fs::symlink(folder.path(), path("work/inner")).unwrap();
        let read =
            |name: &str, write: &[&Path]| variable_from_file("NAME", path(name).to_str().unwrap(), write);
        let (work, inner) = (path("work"), path("work/inner"));
        for name in ["secret", "work/own"] {
            assert_eq!(read(name, &[&work]).unwrap().to_bytes(), b"NAME=sesame");
        }
        for (name, write) in [("work/link", &[&*work][..]), ("work/inner/secret", &[&inner, &work])] {
            let error = read(name, write).unwrap_err();
            assert!(error.errno == Errno::XDEV && error.step.contains("env_files.NAME"), "{}", error.step);
        }
        assert_eq!(read("work/missing", &[&work]).unwrap_err().errno, Errno::NOENT);
    }
}
