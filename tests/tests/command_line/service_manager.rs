//! The supervisor under a service manager: the watchdog, and sockets passed in by the service manager. The tests play
//! the role of systemd.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use bulkhead_client::blocking::Client;
use bulkhead_tests::manager::Manager;
use bulkhead_tests::{PATIENCE, Supervisor, not_run, programs, wait_for};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tempfile::TempDir;

/// A fake service manager that reads all notifications.
struct ServiceManager {
    path: PathBuf,
    received: Arc<Mutex<Vec<String>>>,
}

impl ServiceManager {
    fn start(folder: &Path) -> Self {
        let path = folder.join("notify.sock");
        let socket = UnixDatagram::bind(&path).unwrap();
        let received = Arc::<Mutex<Vec<String>>>::default();
        let log = received.clone();
        // The thread ends with the test process.
        std::thread::spawn(move || {
            let mut buffer = [0; 1024];
            while let Ok(count) = socket.recv(&mut buffer) {
                log.lock().unwrap().push(String::from_utf8_lossy(&buffer[..count]).into_owned());
            }
        });
        Self { path, received }
    }

    /// Returns the number of notifications that contain the given line.
    fn count(&self, line: &str) -> usize {
        let received = self.received.lock().unwrap();
        received.iter().filter(|text| text.lines().any(|found| found == line)).count()
    }

    /// Returns the number of notifications that contain the given line. First waits until all notifications sent so
    /// far have arrived.
    fn count_sent(&self, line: &str) -> usize {
        const MARK: &str = "MARK=1";
        let before = self.count(MARK);
        UnixDatagram::unbound().unwrap().send_to(MARK.as_bytes(), &self.path).unwrap();
        wait_for("the mark arrives", || (self.count(MARK) > before).then_some(()));
        self.count(line)
    }

    fn wait_for_another(&self, line: &str) {
        let before = self.count(line);
        wait_for(&format!("another {line} arrives"), || (self.count(line) > before).then_some(()));
    }
}

const BULKHEAD: &str = "[bulkhead.b]\nexec = [\"cat\"]\n";

/// Stops the data plane while the control plane still responds. The watchdog notifications must stop until the data
/// plane continues.
#[test]
fn watchdog_is_notified_only_while_data_plane_responds() {
    const PING: &str = "WATCHDOG=1";
    let folder = tempfile::tempdir().unwrap();
    let manager = ServiceManager::start(folder.path());
    let variables = [("NOTIFY_SOCKET", manager.path.to_str().unwrap()), ("WATCHDOG_USEC", "50000")];
    let supervisor = Supervisor::launch_with_variables(folder, &variables, "", BULKHEAD).until_ready();
    manager.wait_for_another(PING);
    manager.wait_for_another(PING);

    // The first thread runs the data plane.
    let thread = Pid::from_raw(supervisor.pid() as i32);
    if let Err(error) = ptrace::seize(thread, ptrace::Options::empty()) {
        not_run!("this machine does not permit ptrace(2) of another process: {error}");
        return;
    }
    ptrace::interrupt(thread).unwrap();
    wait_for("the data plane has stopped", || {
        let status = waitpid(thread, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG)).unwrap();
        (status != WaitStatus::StillAlive).then_some(())
    });
    // The control plane waits longer for the data plane than the watchdog interval. After the first request, no
    // notification can therefore result from an earlier response.
    assert_eq!(supervisor.try_get("/healthz").unwrap().0, 503);
    let before = manager.count_sent(PING);
    assert_eq!(supervisor.try_get("/healthz").unwrap().0, 503);
    assert_eq!(manager.count_sent(PING), before);
    ptrace::detach(thread, None).unwrap();
    manager.wait_for_another(PING);
    assert_eq!(supervisor.try_get("/healthz").unwrap().0, 200);
}

#[test]
fn supervisor_without_watchdog_sends_no_pings() {
    let folder = tempfile::tempdir().unwrap();
    let manager = ServiceManager::start(folder.path());
    // The watchdog is set for another process.
    let variables =
        [("NOTIFY_SOCKET", manager.path.to_str().unwrap()), ("WATCHDOG_USEC", "2000"), ("WATCHDOG_PID", "1")];
    let mut supervisor = Supervisor::launch_with_variables(folder, &variables, "", BULKHEAD).until_ready();
    supervisor.signal(Signal::SIGTERM);
    assert_eq!(supervisor.wait().code(), Some(0));
    wait_for("the supervisor announces its shutdown", || (manager.count("STOPPING=1") == 1).then_some(()));
    assert_eq!((manager.count("READY=1"), manager.count("WATCHDOG=1")), (1, 0));
}

#[test]
fn upgrade_notifies_service_manager_at_an_abstract_address() {
    let manager = Manager::start_with_abstract_address(tempfile::tempdir().unwrap(), BULKHEAD);
    let old = manager.main();
    let output = bulkhead_tests::output(manager.command().arg("upgrade"));
    assert_eq!(output.status.code(), Some(0), "{output:?}\n{}", manager.log());
    let new = wait_for("the main process changes", || Some(manager.main()).filter(|&main| main != old));
    wait_for("the old program has exited", || (manager.supervisors() == [new]).then_some(()));
    assert_eq!(manager.stop(), WaitStatus::Exited(Pid::from_raw(new as i32), 0));
    assert!(manager.has_notified(old) && manager.has_notified(new));
}

/// Listening sockets that the fake service manager passes to each supervisor. The sockets outlive the supervisor.
struct SocketUnits {
    jobs: UnixListener,
    http: TcpListener,
}

impl SocketUnits {
    fn listen(folder: &Path) -> Self {
        let jobs = UnixListener::bind(folder.join("jobs.sock")).unwrap();
        Self { jobs, http: TcpListener::bind("127.0.0.1:0").unwrap() }
    }

    /// Starts a supervisor that inherits the sockets as descriptors 3 and 4. The supervisor itself could not bind
    /// the configured `http` address.
    fn start(&self, folder: TempDir, names: &str) -> Supervisor {
        let config = format!(
            "[supervisor]\nsocket = \"jobs.sock\"\nhttp = \"127.0.0.1:1\"\nhttp_token_file = \"token\"\n\
             [defaults.sandbox]\nprofile = \"none\"\n{BULKHEAD}"
        );
        std::fs::write(folder.path().join("workers.toml"), config).unwrap();
        let token = folder.path().join("token");
        std::fs::write(&token, "0123456789abcdef").unwrap();
        std::fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        const SCRIPT: &str = "exec 3<&0 4<&1 </dev/null >/dev/null; export LISTEN_PID=$$; exec \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT, "sh"]).arg(programs().join("bulkhead-supervisor"));
        command.arg("--config").arg(folder.path().join("workers.toml"));
        command.env("LISTEN_FDS", "2").env("LISTEN_FDNAMES", names);
        command.stdin(OwnedFd::from(self.jobs.try_clone().unwrap()));
        command.stdout(OwnedFd::from(self.http.try_clone().unwrap())).stderr(log);
        Supervisor { child: command.spawn().unwrap(), folder }
    }

    /// Requests `/healthz` over TCP. Returns true if the response has status 200.
    fn is_healthy(&self) -> bool {
        let mut socket = std::net::TcpStream::connect(self.http.local_addr().unwrap()).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut response = String::new();
        socket.read_to_string(&mut response).unwrap();
        response.starts_with("HTTP/1.1 200 ")
    }
}

/// Clients that connect while no supervisor is running are served by the next supervisor.
#[test]
fn inherited_sockets_outlive_the_supervisor() {
    let folder = tempfile::tempdir().unwrap();
    let units = SocketUnits::listen(folder.path());
    let mut supervisor = units.start(folder, "jobs:http").until_ready();
    let submit = |path: &Path| Client::connect(path).unwrap().job("b", "x").send().unwrap().into_payload();
    assert_eq!(submit(&supervisor.socket()), b"x");
    assert!(units.is_healthy());
    // A reload does not replace the sockets.
    assert_eq!(supervisor.post("/v1/reload").0, 200);
    let jobs = std::fs::metadata(supervisor.socket()).unwrap();
    supervisor.signal(Signal::SIGTERM);
    assert_eq!(supervisor.wait().code(), Some(0), "{}", supervisor.log());
    assert!(!supervisor.file("admin.sock").exists());
    let kept = std::fs::metadata(supervisor.socket()).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::ino(&jobs), std::os::unix::fs::MetadataExt::ino(&kept));

    let folder = std::mem::replace(&mut supervisor.folder, tempfile::tempdir().unwrap());
    drop(supervisor);
    let socket = folder.path().join("jobs.sock");
    std::thread::scope(|scope| {
        let waiting = UnixStream::connect(&socket).unwrap();
        let job = scope.spawn(|| submit(&socket));
        let health = scope.spawn(|| units.is_healthy());
        let supervisor = units.start(folder, "jobs:http").until_ready();
        assert_eq!(job.join().unwrap(), b"x", "{}", supervisor.log());
        assert!(health.join().unwrap());
        drop(waiting);
    });
}

#[test]
fn inherited_sockets_with_wrong_names_are_rejected() {
    for (names, expected) in [
        (
            "bulkhead.socket:http",
            "set FileDescriptorName= in the socket unit to jobs, admin, http or jobs_http",
        ),
        ("http:jobs", "`http` must be a TCP socket"),
        ("jobs:jobs_http", "`jobs_http` is not set in the configuration"),
        ("admin:http", "is already listening on this socket"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let units = SocketUnits::listen(folder.path());
        let mut supervisor = units.start(folder, names);
        assert_eq!(supervisor.wait().code(), Some(1), "{names}");
        let log = supervisor.log();
        assert!(log.contains(expected), "{names}: {log}");
        assert!(supervisor.socket().exists(), "the socket belongs to the service manager");
    }
}

/// The example in the packaged configuration must work as shipped, without any other files.
#[test]
fn packaged_configuration_serves_jobs() {
    let packaged = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/debian/workers.toml");
    let text = std::fs::read_to_string(packaged).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let crashes = folder.path().join("crashes");
    let text = text.replace("/var/lib/bulkhead/crashes", crashes.to_str().unwrap());
    let text = text.replace("[supervisor]\n", "[supervisor]\nsocket = \"jobs.sock\"\n");
    std::fs::write(folder.path().join("workers.toml"), text).unwrap();
    let log = std::fs::File::create(folder.path().join("log")).unwrap();
    let mut command = Command::new(programs().join("bulkhead-supervisor"));
    command.env("BULKHEAD_CONFIG", folder.path().join("workers.toml")).stdin(Stdio::null()).stderr(log);
    let supervisor = Supervisor { child: command.spawn().unwrap(), folder }.until_ready();
    let client = Client::connect(supervisor.socket()).unwrap();
    assert_eq!(client.job("upper", "hi\n").send().unwrap().payload(), b"HI\n");
}

#[test]
fn every_program_writes_man_pages() {
    let folder = tempfile::tempdir().unwrap();
    for (program, pages) in [
        ("bulkhead-supervisor", &["bulkhead-supervisor.8", "bulkhead-worker.8", "workers.toml.5"][..]),
        ("bulkhead-fleet", &["bulkhead-fleet.8", "bulkhead-fleet-agent.8", "bulkhead-fleet-dead-list.8"]),
    ] {
        let man = |folder: &Path| {
            let mut command = Command::new(programs().join(program));
            bulkhead_tests::output(command.arg("man").arg(folder))
        };
        let output = man(&folder.path().join("new/pages"));
        assert!(output.status.success(), "{output:?}");
        let listed = String::from_utf8(output.stdout).unwrap();
        for page in pages {
            let text = std::fs::read_to_string(folder.path().join("new/pages").join(page)).unwrap();
            assert!(text.contains(".TH") && listed.lines().any(|line| line.ends_with(page)), "{page}");
        }
        std::fs::write(folder.path().join("file"), "").unwrap();
        assert_eq!(man(&folder.path().join("file")).status.code(), Some(74));
    }
}
