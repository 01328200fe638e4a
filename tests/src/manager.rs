//! A stand-in for systemd. Passes `NOTIFY_SOCKET` to the supervisor, handles `MAINPID` and `BARRIER` notifications, and
//! restarts the service as systemd does with `Restart=on-failure` and `KillMode=mixed`.

use std::collections::BTreeSet;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tempfile::TempDir;

use crate::{
    FOLDER_VARIABLE, PATIENCE, is_alive, kill_pid, processes_of, processes_with, programs, threads, wait_for,
    write_config,
};

/// A service run by a stand-in for systemd. Dropping this value kills the service's processes.
pub struct Manager {
    /// Folder with the configuration, the sockets and the log.
    pub folder: TempDir,
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    main: u32,
    /// True once a stop has been requested. The main process is then not restarted.
    is_stopping: bool,
    /// Exit status of the main process, or `None` if the service has not stopped yet.
    ended: Option<WaitStatus>,
    restarts: u32,
    is_ready: bool,
    /// PIDs of the processes that have sent notifications.
    notifiers: Vec<u32>,
    /// True if the next new main process must die before its notification is handled.
    kills_next_main: bool,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Manager {
    /// Starts a service like [`Manager::start`]. The service sends its notifications to an abstract address.
    pub fn start_with_abstract_address(folder: TempDir, bulkheads: &str) -> Self {
        let name = folder.path().display().to_string();
        let address = SocketAddr::from_abstract_name(&name).expect("a short name");
        let socket = UnixDatagram::bind_addr(&address).expect("an unused name");
        write_config(folder.path(), "", bulkheads);
        Self::start_with_socket(folder, socket, &[("NOTIFY_SOCKET", &format!("@{name}"))])
    }

    /// Starts a service, and waits until it is ready. `folder` can contain files that the configuration refers to.
    pub fn start(
        folder: TempDir,
        supervisor_keys: &str,
        bulkheads: &str,
        variables: &[(&str, &str)],
    ) -> Self {
        write_config(folder.path(), supervisor_keys, bulkheads);
        let socket = UnixDatagram::bind(folder.path().join("notify.sock")).expect("a writable folder");
        Self::start_with_socket(folder, socket, variables)
    }

    fn start_with_socket(folder: TempDir, socket: UnixDatagram, variables: &[(&str, &str)]) -> Self {
        socket.set_nonblocking(true).expect("an open socket");
        set_socket_passcred(&socket, true).expect("an open socket");
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let service = Service { folder: folder.path().to_owned(), variables: variables.collect() };
        let state = Arc::new(Mutex::new(State { main: service.spawn(), ..State::default() }));
        let shared = state.clone();
        let thread = std::thread::spawn(move || service.watch(&socket, &shared));
        let manager = Self { folder, state, thread: Some(thread) };
        wait_for("the service is ready", || lock(&manager.state).is_ready.then_some(()));
        manager
    }

    /// Returns the PID of the main process.
    pub fn main(&self) -> u32 {
        lock(&self.state).main
    }

    /// Returns true if the process `pid` has sent a notification.
    pub fn has_notified(&self, pid: u32) -> bool {
        lock(&self.state).notifiers.contains(&pid)
    }

    /// Kills the next process that a `MAINPID` notification names, before the notification is handled.
    pub fn kill_next_main(&self) {
        lock(&self.state).kills_next_main = true;
    }

    /// Returns the number of restarts after a failure.
    pub fn restarts(&self) -> u32 {
        lock(&self.state).restarts
    }

    /// Returns the path of the jobs socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("jobs.sock")
    }

    /// Replaces the configuration file.
    pub fn configure(&self, supervisor_keys: &str, bulkheads: &str) {
        write_config(self.folder.path(), supervisor_keys, bulkheads);
    }

    /// Returns a `bulkhead` command that connects to the service.
    pub fn command(&self) -> Command {
        let mut command = Command::new(programs().join("bulkhead"));
        command.arg("--socket").arg(self.socket());
        command.arg("--admin").arg(self.folder.path().join("admin.sock"));
        command
    }

    /// Returns the log to which all of the service's processes write.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Returns the PIDs of the running supervisors. Keepers are not included.
    pub fn supervisors(&self) -> Vec<u32> {
        processes_with(&self.folder.path().join("workers.toml").display().to_string())
    }

    /// Returns the PIDs of all processes of the service: supervisors, keepers, and workers whose working directory is
    /// the service's folder.
    pub fn processes(&self) -> Vec<u32> {
        processes_of(self.folder.path())
    }

    /// Sends a signal to the main process.
    pub fn signal(&self, signal: Signal) {
        kill_pid(self.main(), signal);
    }

    /// Stops the service with SIGTERM, waits until it has stopped, and returns the exit status of the main process.
    pub fn stop(&self) -> WaitStatus {
        self.begin_stop();
        self.ended()
    }

    /// Sends SIGTERM to the main process, without waiting for the service to stop.
    pub fn begin_stop(&self) {
        lock(&self.state).is_stopping = true;
        self.signal(Signal::SIGTERM);
    }

    /// Waits until the service has stopped, and returns the exit status of the main process.
    pub fn ended(&self) -> WaitStatus {
        wait_for("the service stops", || lock(&self.state).ended)
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the log of the service:\n{}", self.log());
        }
        lock(&self.state).is_stopping = true;
        let Some(thread) = self.thread.take() else { return };
        let began = Instant::now();
        // Repeats the search, because a process that is about to execute a program briefly has no arguments.
        while !thread.is_finished() && began.elapsed() < PATIENCE {
            self.supervisors().into_iter().for_each(|pid| kill_pid(pid, Signal::SIGKILL));
            std::thread::park_timeout(Duration::from_millis(10));
        }
        // Joins the thread only if the thread has finished. Joining a thread that has missed the exit of the main
        // process would block the test.
        if thread.is_finished() {
            let _ = thread.join();
        }
    }
}

struct Service {
    folder: PathBuf,
    variables: Vec<(String, String)>,
}

impl Service {
    fn spawn(&self) -> u32 {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.folder.join("log"));
        let child = Command::new(programs().join("bulkhead-supervisor"))
            .arg("--config")
            .arg(self.folder.join("workers.toml"))
            .env("NOTIFY_SOCKET", self.folder.join("notify.sock"))
            .env(FOLDER_VARIABLE, &self.folder)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.expect("a writable folder"))
            .spawn();
        child.expect("the supervisor's program runs").id()
    }

    /// Handles notifications and the exit of the main process until the service has stopped.
    fn watch(&self, socket: &UnixDatagram, state: &Mutex<State>) {
        loop {
            while let Some((text, sender)) = receive(socket) {
                let mut state = lock(state);
                state.notifiers.extend(sender);
                for line in text.lines() {
                    if let Some(pid) = line.strip_prefix("MAINPID=").and_then(|pid| pid.parse().ok()) {
                        if std::mem::take(&mut state.kills_next_main) {
                            kill_pid(pid, Signal::SIGKILL);
                            wait_for("the new main process has died", || (!is_alive(pid)).then_some(()));
                        }
                        // systemd ignores processes that have exited.
                        state.main = if is_alive(pid) { pid } else { state.main };
                    }
                    state.is_ready |= line == "READY=1";
                }
            }
            let main = lock(state).main;
            let status = waitpid(Pid::from_raw(main as i32), Some(WaitPidFlag::WNOHANG));
            match status {
                Ok(WaitStatus::StillAlive) => {}
                Ok(status) if self.main_ended(state, main, status) => return,
                _ => {}
            }
            std::thread::park_timeout(Duration::from_millis(2));
        }
    }

    /// Handles the exit of the main process. Kills the service's remaining processes and, after a failure, starts the
    /// service again. Returns true if the service has stopped.
    fn main_ended(&self, state: &Mutex<State>, main: u32, status: WaitStatus) -> bool {
        // Another process may have just become the main process.
        if lock(state).main != main {
            return false;
        }
        let marker = self.folder.join("workers.toml").display().to_string();
        // An exiting process no longer has arguments, but still holds its locks.
        let mut killed = BTreeSet::new();
        wait_for("the service's other processes have exited", || {
            let rest = processes_with(&marker);
            rest.iter().for_each(|pid| kill_pid(*pid, Signal::SIGKILL));
            killed.extend(rest);
            killed.iter().all(|pid| !is_alive(*pid) && threads(*pid) <= 1).then_some(())
        });
        let mut state = lock(state);
        if state.is_stopping || matches!(status, WaitStatus::Exited(_, 0)) {
            state.ended = Some(status);
            return true;
        }
        state.restarts += 1;
        state.main = self.spawn();
        false
    }
}

/// Receives a notification, and returns its text and the sender's PID. Closes any received descriptors, which answers a
/// `BARRIER=1` request.
fn receive(socket: &UnixDatagram) -> Option<(String, Option<u32>)> {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1), ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut slices, &mut ancillary, flags).ok()?;
    let mut sender = None;
    for message in ancillary.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(descriptors) => {
                descriptors.for_each(|descriptor: OwnedFd| drop(descriptor));
            }
            RecvAncillaryMessage::ScmCredentials(credentials) => {
                sender = u32::try_from(credentials.pid.as_raw_pid()).ok();
            }
            _ => {}
        }
    }
    Some((String::from_utf8_lossy(&bytes[..received.bytes]).into_owned(), sender))
}
