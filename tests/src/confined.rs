//! Test supervisors with confined workers. This module prepares a folder of programs that any user can execute, opens
//! targets to attack, and collects the results of attempts.

use std::any::Any;
use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use bulkhead_api::{Text, Worker};
use bulkhead_client::blocking::Client;
use bulkhead_client::{JobError, Reply};
use bulkhead_shared::{CrashReason, Verdict};
use serde_json::{Value, json};

use crate::attempts::Expected;
pub use crate::machine::{has_layers, has_program, is_root};
use crate::subuid::User;
use crate::{PATIENCE, Supervisor, programs, wait_for};

/// The user `nobody`, which owns no files and has no privileges.
pub const NOBODY: u32 = 65534;

/// Configuration key with a range of UIDs that this machine does not use, for workers that run as separate users.
pub const WORKER_UIDS: &str = "worker_uids = \"1879048192-1879048447\"\n";

/// Programs that are copied to a folder that is accessible to every user.
const PROGRAMS: [&str; 5] = ["bulkhead-supervisor", "bulkhead-worker", "bulkhead", "hostile", "filtered"];

/// Mode of a file that another user owns. Even without confinement, only the owner and root can read the file.
const SECRET_MODE: u32 = 0o600;

/// Layers of confinement that the `strict` profile needs.
pub const STRICT_LAYERS: &[&str] = &[
    "landlock scopes",
    "seccomp notify",
    "user namespace",
    "network namespace",
    "ipc namespace",
    "uts namespace",
    "pid namespace",
    "mount namespace",
    "own /proc",
    "pivot_root",
];

/// Layers of confinement that the `default` profile needs to produce the expected results.
pub const DEFAULT_LAYERS: &[&str] = &["landlock scopes", "seccomp notify"];

/// Parameters for starting a supervisor.
#[derive(Clone, Copy, Default)]
pub struct Setup<'s> {
    /// Additional keys for the `[supervisor]` table, in TOML syntax.
    pub supervisor: &'s str,
    /// Configuration of the bulkheads, in TOML syntax. `HOSTILE` stands for the path of the hostile worker, and `PLACE`
    /// for the path of the supervisor's folder.
    pub bulkheads: &'s str,
    /// UID of the user that the supervisor runs as, or `None` for the user that runs the test.
    pub user: Option<u32>,
    /// Alternative to `user`: a test user, with or without subordinate IDs, that runs the supervisor.
    pub user_with_ids: Option<User>,
    /// Layers of confinement that the supervisor must treat as missing.
    pub without: &'s str,
    /// Rules for the `filtered` program. Each rule makes one system call fail or do nothing in the supervisor and its
    /// descendants.
    pub filter: &'s [&'s str],
}

/// A running supervisor, with the targets that its workers attack.
pub struct Place {
    /// The supervisor.
    pub supervisor: Supervisor,
    /// Open sockets for workers to attack.
    _sockets: Vec<Box<dyn Any + Send + Sync>>,
    /// Shared memory for workers to attack.
    _shared: tempfile::NamedTempFile,
    targets: Value,
}

impl Setup<'_> {
    /// Starts the supervisor, and waits until every bulkhead has started or failed to start.
    pub fn start(self) -> Place {
        let mut place = self.launch();
        let supervisor = &mut place.supervisor;
        wait_for("the supervisor is ready", || {
            if let Some(status) = supervisor.child.try_wait().expect("our own child") {
                panic!("the supervisor exited with {status}:\n{}", supervisor.log());
            }
            (supervisor.try_get("/readyz")?.0 == 200).then_some(())
        });
        place.targets["supervisor"] = place.supervisor.pid().into();
        place.targets["keeper"] = place.supervisor.keeper().into();
        place
    }

    /// Starts the supervisor without waiting until it is ready.
    pub fn launch(self) -> Place {
        let ground = Ground::prepare(&format!(
            "[supervisor]\nsocket = \"jobs.sock\"\nadmin = \"admin.sock\"\n{}\n{}",
            self.supervisor, self.bulkheads
        ));
        let path = ground.path().to_owned();
        let log = fs::File::create(path.join("log")).expect("a writable folder");
        let program = path.join("bin/bulkhead-supervisor");
        let mut command = match self.filter {
            _ if self.user_with_ids.is_some() => {
                let user = self.user_with_ids.expect("the guard has checked it");
                own(&path, user.uid);
                let mut command = user.command(&path, &[]);
                command.arg(program);
                command
            }
            [] => Command::new(program),
            rules => {
                let mut command = Command::new(path.join("bin/filtered"));
                command.args(rules).arg("--").arg(program);
                command
            }
        };
        command.arg("--config").arg(path.join("workers.toml")).env("TMPDIR", path.join("tmp"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        if !self.without.is_empty() {
            command.env("BULKHEAD_WITHOUT", self.without);
        }
        if let Some(user) = self.user {
            own(&path, user);
            command.uid(user).gid(user).env("HOME", &path);
        }
        let child = command.spawn().expect("the supervisor's program runs");
        let Ground { folder, sockets, shared, targets } = ground;
        Place { supervisor: Supervisor { child, folder }, _sockets: sockets, _shared: shared, targets }
    }
}

/// A folder that contains programs, a configuration and targets to attack. No supervisor is running yet.
pub struct Ground {
    folder: tempfile::TempDir,
    sockets: Vec<Box<dyn Any + Send + Sync>>,
    shared: tempfile::NamedTempFile,
    /// Targets that already exist before the supervisor starts.
    pub targets: Value,
}

impl Ground {
    /// Creates the folder, with `config` as the contents of `workers.toml`. In `config`, `HOSTILE` is replaced with the
    /// path of the hostile worker, and `PLACE` with the path of the folder.
    pub fn prepare(config: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path();
        let mut targets = furnish(path);
        let (sockets, addresses) = listeners(path);
        merge(&mut targets, addresses);
        let shared = shared_memory();
        targets["shared"] = text(shared.path()).into();
        let config = config.replace("HOSTILE", text(&path.join("bin/hostile")));
        fs::write(path.join("workers.toml"), config.replace("PLACE", text(path))).expect("a writable folder");
        Self { folder, sockets, shared, targets }
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("an ordinary path")
}

fn merge(into: &mut Value, other: Value) {
    let Value::Object(other) = other else { return };
    other.into_iter().for_each(|(name, value)| into[name] = value);
}

fn folder(path: PathBuf, mode: u32) -> PathBuf {
    fs::create_dir_all(&path).expect("a writable folder");
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("our own folder");
    path
}

fn file(path: PathBuf, mode: u32) -> PathBuf {
    fs::write(&path, "something").expect("a writable folder");
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("our own file");
    path
}

/// Creates the programs, folders and files below `place`. `work` is the working folder. `read` and `write` are the
/// folders for the keys of the same names. Only the owner can access `neighbour`. Every user can write to `outside`.
/// `tmp` is the supervisor's temporary folder.
fn furnish(place: &Path) -> Value {
    folder(place.to_owned(), 0o755);
    let bin = folder(place.join("bin"), 0o755);
    for name in PROGRAMS {
        let (from, to) = (programs().join(name), bin.join(name));
        if fs::hard_link(&from, &to).is_err() {
            fs::copy(&from, &to).expect("a program can be copied");
        }
    }
    folder(place.join("work"), 0o755);
    folder(place.join("tmp"), 0o1777);
    let readable = file(folder(place.join("read"), 0o755).join("file"), 0o644);
    let secret = file(folder(place.join("neighbour"), 0o700).join("secret"), SECRET_MODE);
    let (writable, outside) = (folder(place.join("write"), 0o777), folder(place.join("outside"), 0o777));
    json!({
        "readable": text(&readable),
        "secret": text(&secret),
        "writable": text(&writable),
        "outside": text(&outside),
        "configuration": text(&place.join("workers.toml")),
        "jobs": text(&place.join("jobs.sock")),
        "admin": text(&place.join("admin.sock")),
    })
}

/// Changes the owner of all files and folders except the programs.
fn own(place: &Path, user: u32) {
    let names = [
        "",
        "workers.toml",
        "log",
        "work",
        "tmp",
        "read",
        "read/file",
        "neighbour",
        "neighbour/secret",
        "write",
    ];
    for name in names {
        std::os::unix::fs::chown(place.join(name), Some(user), Some(user)).expect("root can change owners");
    }
}

/// Creates shared memory in the same way as `shm_open`. All users can read it.
fn shared_memory() -> tempfile::NamedTempFile {
    let shared = tempfile::NamedTempFile::new_in("/dev/shm").expect("shared memory");
    fs::set_permissions(shared.path(), fs::Permissions::from_mode(0o644)).expect("our own file");
    shared
}

/// Opens sockets in this process, which is not confined. Returns the sockets together with their addresses.
fn listeners(place: &Path) -> (Vec<Box<dyn Any + Send + Sync>>, Value) {
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
    let udp = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let (by_path, datagrams) = (place.join("outside/stream"), place.join("outside/datagram"));
    let unix = UnixListener::bind(&by_path).expect("a socket");
    let datagram = UnixDatagram::bind(&datagrams).expect("a socket");
    for path in [&by_path, &datagrams] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("our own socket");
    }
    let name = format!("bulkhead-test-{}", text(place));
    let address = SocketAddr::from_abstract_name(&name).expect("a name");
    let hidden = UnixListener::bind_addr(&address).expect("a socket");
    let addresses = json!({
        "tcp": tcp.local_addr().expect("an address").to_string(),
        "udp": udp.local_addr().expect("an address").to_string(),
        "unix": text(&by_path),
        "datagram": text(&datagrams),
        "abstract": name,
    });
    (vec![Box::new(tcp), Box::new(udp), Box::new(unix), Box::new(datagram), Box::new(hidden)], addresses)
}

impl Place {
    /// Returns the path of the supervisor's folder.
    pub fn path(&self) -> &Path {
        self.supervisor.folder.path()
    }

    /// Returns a client that is connected to the supervisor.
    pub fn client(&self) -> Client {
        Client::connect(self.supervisor.socket()).expect("the jobs socket answers")
    }

    /// Returns the targets of the attempts. The `sibling` target is the only worker of the bulkhead with the given
    /// name.
    pub fn targets(&self, sibling: &str) -> Value {
        let mut targets = self.targets.clone();
        targets["sibling"] = self.worker(sibling).into();
        targets
    }

    /// Runs an attempt in a worker of this bulkhead.
    pub fn attempt(&self, client: &Client, bulkhead: &str, name: &str, targets: &Value) -> Ended {
        Ended::of(client.job(bulkhead, targets.to_string()).operation(name).deadline(PATIENCE).send())
    }

    /// Returns the PID of a bulkhead's only worker.
    pub fn worker(&self, bulkhead: &str) -> u32 {
        wait_for("a worker is running", || self.supervisor.worker_pids(bulkhead).first().copied())
    }

    /// Waits until a bulkhead has failed, and returns the reason.
    pub fn failure(&self, bulkhead: &str) -> String {
        wait_for(&format!("{bulkhead} has failed"), || {
            let state = self.supervisor.state(bulkhead);
            (state.state.as_str() == "failed").then(|| state.detail.unwrap_or_default())
        })
    }

    /// Runs an operation in a worker of this bulkhead, and returns the result as text.
    pub fn ask(&self, bulkhead: &str, operation: &str) -> String {
        let reply = self.client().job(bulkhead, "").operation(operation).deadline(PATIENCE).send();
        let reply = reply.unwrap_or_else(|error| panic!("{bulkhead} did not complete {operation}: {error}"));
        String::from_utf8_lossy(reply.payload()).into_owned()
    }

    /// Returns the confinement of each worker of a bulkhead, according to the snapshot.
    pub fn confinement(&self, bulkhead: &str) -> Vec<Confinement> {
        self.supervisor.state(bulkhead).workers.iter().filter_map(Confinement::of).collect()
    }
}

/// The part of the snapshot that describes a worker's confinement. Only the tests of confinement read this part.
#[derive(Debug)]
pub struct Confinement {
    /// PID of the worker.
    pub pid: u32,
    /// Name of the profile that is configured for the worker.
    pub profile: String,
    /// True if the worker cannot gain privileges by executing a program.
    pub no_new_privs: bool,
    /// True if a seccomp filter is active.
    pub is_filtered: bool,
    /// Effective UID, as seen from outside all user namespaces.
    pub uid: u64,
    /// Namespaces that the worker does not share with the supervisor.
    pub namespaces: Vec<String>,
    /// ABI version of Landlock.
    pub landlock: Option<u64>,
    /// True if the worker has any capability.
    pub has_capabilities: bool,
    /// Missing layers of the profile.
    pub missing: Vec<String>,
    /// True if the number of processes is limited separately for each worker.
    pub has_process_bound: bool,
}

/// Entry in the snapshot's `missing` list for a missing limit on the number of processes. All other entries are layers.
const PROCESS_BOUND: &str = "nproc";

impl Confinement {
    fn of(worker: &Worker) -> Option<Self> {
        let part = worker.confinement.clone().unwrap_or_default();
        let texts = |all: &[Text]| -> Vec<String> { all.iter().map(|text| text.to_string()).collect() };
        let is_bound = |missing: &String| missing == PROCESS_BOUND;
        let missing = texts(&part.missing);
        Some(Self {
            pid: worker.pid?,
            profile: part.profile.into_owned(),
            no_new_privs: part.no_new_privs,
            is_filtered: part.seccomp == "filter",
            uid: part.uid.map_or(u64::MAX, u64::from),
            namespaces: texts(&part.namespaces),
            landlock: part.landlock.map(u64::from),
            has_capabilities: part.capabilities.is_empty()
                || part.capabilities.bytes().any(|digit| digit != b'0' && digit != b'x'),
            has_process_bound: !missing.iter().any(is_bound),
            missing: missing.into_iter().filter(|missing| !is_bound(missing)).collect(),
        })
    }
}

/// Result of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The attempt succeeded. Contains a description of the result.
    Succeeded(String),
    /// The attempt was refused. Contains the error and the attempted action.
    Refused(String, String),
    /// The worker was killed because the attempt is a violation. Contains the supervisor's message.
    Violation(String),
    /// The attempt ended in any other way. Contains a description of the outcome.
    Otherwise(String),
}

impl Ended {
    /// Converts the result of the job that ran the attempt.
    pub fn of(result: Result<Reply, JobError>) -> Self {
        let error = match result {
            Ok(reply) => return Self::told(reply.payload()),
            Err(error) => error,
        };
        match error.outcome().map(|outcome| outcome.verdict.clone()) {
            Some(Verdict::Crashed { reason: CrashReason::Violation, message, .. }) => {
                Self::Violation(message)
            }
            Some(verdict) => Self::Otherwise(format!(
                "{}/{}: {}",
                verdict.name(),
                verdict.reason().unwrap_or_default(),
                verdict.message().unwrap_or_default()
            )),
            None => Self::Otherwise(error.to_string()),
        }
    }

    fn told(payload: &[u8]) -> Self {
        let told: Value = serde_json::from_slice(payload).unwrap_or_default();
        let what = told["what"].as_str().unwrap_or_default().to_owned();
        match (&told["succeeded"], told["errno"].as_str()) {
            (Value::Bool(true), _) => Self::Succeeded(what),
            (Value::Bool(false), Some(errno)) => Self::Refused(errno.to_owned(), what),
            _ => Self::Otherwise(format!("answered {}", String::from_utf8_lossy(payload))),
        }
    }

    /// Returns true if the worker did not receive a target for the attempt.
    pub fn had_no_target(&self) -> bool {
        matches!(self, Self::Refused(errno, _) if errno == "NOTARGET")
    }

    /// Returns true if this is the expected result.
    pub fn is(&self, expected: Expected) -> bool {
        match (expected, self) {
            (Expected::Succeeds, Self::Succeeded(_)) => true,
            (Expected::Machine, Self::Succeeded(_) | Self::Refused(..)) => true,
            (Expected::Refused(errors, _), Self::Refused(errno, _)) => errors.contains(&errno.as_str()),
            (Expected::Violation(call), Self::Violation(message)) => message.contains(call),
            (Expected::Crashes(reason), Self::Otherwise(how)) => {
                reason.split(" or ").any(|reason| how.starts_with(&format!("crashed/{reason}")))
            }
            _ => false,
        }
    }
}

/// Returns the value of a field in `/proc/PID/status`.
pub fn status_field(pid: u32, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    field.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the namespaces of a process, by kind. The map is empty if the process does not exist.
pub fn namespaces(pid: u32) -> std::collections::BTreeMap<String, String> {
    let entries = fs::read_dir(format!("/proc/{pid}/ns")).into_iter().flatten().flatten();
    let one = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?.to_str()?.to_owned();
        Some((entry.file_name().into_string().ok()?, target))
    };
    entries.filter_map(one).collect()
}
