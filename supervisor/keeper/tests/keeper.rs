//! Tests the keeper with real processes. The test program also runs as the keeper, which must start before the process
//! has a second thread. The standard test harness therefore cannot be used.

use std::collections::HashSet;
use std::ffi::CString;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use bulkhead_keeper::{self as keeper, Exit, KEEPER_ARGUMENT, Keeper, Report, Rlimit, SpawnOrder};
use bulkhead_linux::process_tree::descendants_of;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal};

/// Maximum time that a test waits for a condition. Conditions normally become true much sooner.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Maximum time for a fork bomb to reach the required size, which takes long on a busy machine.
const BOMB_TIMEOUT: Duration = Duration::from_secs(360);

/// Time in seconds after which a hung test case is killed. This is longer than all timeouts within a case.
const CASE_SECONDS_MAX: u32 = 3600;

// Resource numbers of the kernel. They are defined here because the types of the C library's constants differ between C
// libraries.
const RLIMIT_CORE: u32 = 4;
const RLIMIT_NOFILE: u32 = 7;
const RLIMIT_AS: u32 = 9;

const CASES: [(&str, fn()); 24] = [
    ("worker_starts_as_ordered", starts_as_ordered),
    ("failed_start_names_its_step", failed_steps),
    ("path_on_hung_file_system_does_not_block_keeper", hung_path),
    ("worker_gets_ordered_resource_limits", resource_limits),
    ("worker_inherits_only_four_descriptors", inherited_descriptors),
    ("only_orphans_of_dead_workers_are_killed", orphans_of_dead_workers),
    ("orphan_is_reparented_to_its_living_worker", orphans_of_living_workers),
    ("keeper_ignores_signals", ignored_signals),
    ("dropped_keeper_kills_all_workers", dropped_keeper),
    ("shutdown_waits_until_all_workers_are_dead", shutdown),
    ("copied_socket_does_not_keep_a_dropped_keeper_alive", copied_socket),
    ("killed_keeper_can_be_replaced", killed_keeper),
    ("traced_keeper_can_be_killed", traced_keeper),
    ("killed_detached_keeper_leaves_foreign_children_alive", killed_detached_keeper),
    ("workers_die_with_killed_guard", killed_guard),
    ("other_program_as_keeper_is_an_error", other_programs),
    ("exit_is_reported_before_descendants_are_reaped", prompt_exit_reports),
    ("exit_in_pid_namespace_is_reported_before_reaping", prompt_exit_report_in_namespace),
    ("unkillable_process_in_pid_namespace_does_not_keep_its_worker", unkillable_in_namespace),
    ("traced_worker_in_pid_namespace_is_killed", traced_worker),
    ("kill_orders_and_pings_are_never_refused", unlimited_kills),
    ("fork_bombs_are_killed", fork_bombs),
    ("unread_reports_are_kept", unread_reports),
    ("keeper_leaks_no_descriptors", descriptor_leaks),
];

fn main() {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some(KEEPER_ARGUMENT) {
        keeper::run_as_keeper();
    }
    // The first argument of `cargo test` selects cases by name. Options are ignored.
    let filter = argument.filter(|argument| !argument.starts_with('-')).unwrap_or_default();
    keeper::become_subreaper().unwrap();
    let chosen: Vec<_> = CASES.iter().filter(|(name, _)| name.contains(&filter)).collect();
    println!("\nrunning {} tests", chosen.len());
    for (name, case) in &chosen {
        print!("test {name} ... ");
        io::stdout().flush().unwrap();
        limit_run_time();
        case(); // A panic ends this program. The keeper then kills its workers and exits.
        println!("ok");
    }
    println!("\ntest result: ok. {} passed; 0 failed", chosen.len());
}

/// Limits the time of a test case. SIGALRM then kills this program, and the keeper kills its workers and exits. A
/// watchdog thread is impossible, because the keeper must start before the process has a second thread.
#[expect(unsafe_code, reason = "alarm(2) has no safe wrapper here")]
fn limit_run_time() {
    // SAFETY: accesses no memory.
    unsafe { libc::alarm(CASE_SECONDS_MAX) };
}

struct Fixture {
    keeper: Keeper,
    workers: u64,
}

/// A worker, with the test's end of the link and of the pipe for standard output.
struct Worker {
    number: u64,
    link: UnixStream,
    stdout: io::PipeReader,
}

impl Fixture {
    fn start() -> Self {
        let mut this = Self { keeper: Keeper::start(Path::new("/proc/self/exe")).unwrap(), workers: 0 };
        match this.next() {
            Report::Started { scan_always } => {
                if scan_always {
                    println!(
                        "NOTE: this kernel cannot distinguish orphans, so every exit triggers a scan of /proc ... "
                    );
                }
            }
            other => panic!("{other:?}"),
        }
        this
    }

    fn start_detached() -> Self {
        let (keeper, found) = Keeper::start_detached(Path::new("/proc/self/exe")).unwrap();
        assert!(found.layers.iter().any(|layer| layer.layer == "pidfd" && layer.is_available));
        let mut this = Self { keeper, workers: 0 };
        assert!(matches!(this.next(), Report::Started { .. }));
        this
    }

    /// Waits for the next report and returns it. Sends pending orders in the meantime.
    fn next(&mut self) -> Report {
        let until = Instant::now() + TIMEOUT;
        loop {
            self.keeper.flush().unwrap();
            if let Some(report) = self.keeper.receive().unwrap() {
                return report;
            }
            assert!(Instant::now() < until, "no report within {TIMEOUT:?}");
            let flags =
                if self.keeper.has_pending_orders() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
            rustix::event::poll(&mut [PollFd::new(&self.keeper, flags)], Some(&limit)).unwrap();
        }
    }

    fn order(&mut self, mut order: SpawnOrder<'_>) -> Worker {
        self.workers += 1;
        order.worker = self.workers;
        let (link, theirs) = UnixStream::pair().unwrap();
        let (stdout, writer) = io::pipe().unwrap();
        let stderr = io::stderr().as_fd().try_clone_to_owned().unwrap();
        self.keeper.spawn(&order, theirs.into(), writer.into(), stderr).unwrap();
        Worker { number: self.workers, link, stdout }
    }

    /// Runs a shell script in a worker. Returns the worker and its PID.
    fn run(&mut self, script: &str) -> (Worker, u32) {
        let worker = self.order(shell(script));
        match self.next() {
            Report::Spawned { worker: number, pid, .. } if number == worker.number => (worker, pid),
            other => panic!("{other:?}"),
        }
    }

    /// Waits until a worker has been reaped. Returns the cause of the worker's exit.
    fn exit_of(&mut self, worker: &Worker) -> Exit {
        let exit = match self.next() {
            Report::Exited { worker: number, exit, .. } if number == worker.number => exit,
            other => panic!("{other:?}"),
        };
        self.expect_reaped(worker);
        exit
    }

    fn expect_reaped(&mut self, worker: &Worker) {
        match self.next() {
            Report::Reaped { worker: number } if number == worker.number => {}
            other => panic!("{other:?}"),
        }
    }

    fn signal_keeper(&self, signal: Signal) {
        send(self.keeper.pid(), signal);
    }

    fn failed_step_of(&mut self, order: SpawnOrder<'_>) -> (String, Option<i32>) {
        let ordered = self.order(order);
        match self.next() {
            Report::SpawnFailed { worker, step, error } if worker == ordered.number => {
                (step, error.raw_os_error())
            }
            other => panic!("{other:?}"),
        }
    }
}

fn shell(script: &str) -> SpawnOrder<'_> {
    SpawnOrder {
        program: "/bin/sh",
        arguments: vec!["sh", "-c", script],
        environment: vec!["PATH=/usr/bin:/bin"],
        directory: "/",
        ..SpawnOrder::default()
    }
}

impl Worker {
    /// Reads a line from the worker's output and returns the PID in it.
    fn read_pid(&mut self) -> u32 {
        let mut line = Vec::new();
        let mut byte = [0];
        while self.stdout.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
            line.push(byte[0]);
        }
        String::from_utf8(line).unwrap().trim().parse().unwrap()
    }

    fn read_all(&mut self) -> String {
        let mut text = String::new();
        self.stdout.read_to_string(&mut text).unwrap();
        text
    }
}

fn send(pid: u32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

fn process_state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process state follows the program's name, which is in parentheses.
    stat.rsplit_once(") ")?.1.chars().next()
}

fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The process state follows the program's name, which is in parentheses.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn wait_until(what: &str, limit: Duration, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < limit, "timed out after {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Script that starts a process in a separate session, prints that process's PID, and exits when the link is closed.
const LEAVES_ORPHAN: &str = "(setsid sleep 1000 & echo $!); read -r line <&3";

fn starts_as_ordered() {
    let mut fixture = Fixture::start();
    let mut worker = fixture.order(SpawnOrder {
        environment: vec!["A=b c", "PATH=/usr/bin:/bin"],
        directory: "/usr",
        ..shell("pwd; umask; echo \"$A\"; cat <&3; cat; exit 7")
    });
    worker.link.write_all(b"over the link").unwrap();
    worker.link.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(matches!(fixture.next(), Report::Spawned { .. }));
    assert_eq!(worker.read_all(), "/usr\n0077\nb c\nover the link");
    match fixture.next() {
        Report::Exited { exit, usage, .. } => {
            assert_eq!(exit, Exit::Code(7));
            assert!(usage.maxrss_kib > 100 && usage.user_us + usage.system_us > 0, "{usage:?}");
        }
        other => panic!("{other:?}"),
    }
    fixture.expect_reaped(&worker);
    let (worker, _) = fixture.run("ulimit -c 0; kill -TERM $$");
    assert_eq!(fixture.exit_of(&worker), Exit::Signal { number: 15, core_dumped: false });
    let (worker, pid) = fixture.run("read -r line <&3");
    fixture.keeper.kill(worker.number).unwrap();
    assert_eq!(fixture.exit_of(&worker), Exit::Signal { number: 9, core_dumped: false });
    assert!(!is_alive(pid));
    fixture.keeper.kill(worker.number).unwrap(); // The worker is gone, so nothing happens.
    fixture.keeper.shut_down().unwrap();
}

fn failed_steps() {
    let mut fixture = Fixture::start();
    let order = SpawnOrder { program: "/no/such/program", ..shell("") };
    assert_eq!(fixture.failed_step_of(order), ("exec /no/such/program".to_owned(), Some(libc::ENOENT)));
    let order = SpawnOrder { program: "/etc/passwd", ..shell("") };
    assert_eq!(fixture.failed_step_of(order), ("exec".to_owned(), Some(libc::EACCES)));
    let order = SpawnOrder { directory: "/no/such/folder", ..shell("") };
    assert_eq!(
        fixture.failed_step_of(order),
        ("working directory /no/such/folder".to_owned(), Some(libc::ENOENT))
    );
    let upside_down = Rlimit { resource: RLIMIT_AS, soft: 2, hard: 1 };
    let order = SpawnOrder { rlimits: vec![upside_down], ..shell("") };
    assert_eq!(fixture.failed_step_of(order), ("rlimit as".to_owned(), Some(libc::EINVAL)));

    let large = "x".repeat(keeper::ORDER_BYTES_MAX);
    for script in [large.as_str(), "a\0b"] {
        let (link, theirs) = UnixStream::pair().unwrap();
        let result = fixture.keeper.spawn(&shell(script), theirs.into(), link.into(), dev_null());
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
    // A large order succeeds, and the rejected orders have left no processes behind.
    let variable = format!("A={}", "x".repeat(100_000));
    let order = SpawnOrder { environment: vec![&variable], ..shell("exit ${#A}") };
    let worker = fixture.order(order);
    assert!(matches!(fixture.next(), Report::Spawned { .. }));
    assert_eq!(fixture.exit_of(&worker), Exit::Code(100_000 % 256));
    assert_eq!(descendants_of(fixture.keeper.pid()).unwrap(), Vec::<u32>::new());
}

/// A mounted FUSE file system without a server that answers.
struct HungMount {
    folder: tempfile::TempDir,
    _connection: fs::File,
}

impl HungMount {
    #[expect(unsafe_code, reason = "mount(2) has no safe wrapper here")]
    fn create() -> io::Result<Self> {
        let connection = fs::File::options().read(true).write(true).open("/dev/fuse")?;
        let folder = tempfile::tempdir()?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", connection.as_raw_fd());
        let [target, options] =
            [folder.path().to_str().unwrap(), &options].map(|it| CString::new(it).unwrap());
        let (kind, data) = (c"fuse.hung".as_ptr(), options.as_ptr().cast());
        // SAFETY: the pointers refer to local variables, and the strings end with NUL.
        match unsafe { libc::mount(c"hung".as_ptr(), target.as_ptr(), kind, 0, data) } {
            0 => Ok(Self { folder, _connection: connection }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for HungMount {
    #[expect(unsafe_code, reason = "umount2(2) has no safe wrapper here")]
    fn drop(&mut self) {
        let target = CString::new(self.folder.path().to_str().unwrap()).unwrap();
        // SAFETY: the pointer refers to a local variable that ends with NUL.
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}

fn hung_path() {
    let hung = match HungMount::create() {
        Ok(hung) => hung,
        Err(error) => return print!("NOT RUN: failed to mount a FUSE file system: {error} ... "),
    };
    let path = hung.folder.path().to_str().unwrap();
    let mut fixture = Fixture::start();
    for _ in 0..2 {
        let mut order = shell("exit 0");
        (order.confinement.layers.no_new_privs, order.confinement.layers.landlock) = (true, true);
        order.confinement.read = vec![path];
        let expected = (format!("{path}: the file system does not respond"), Some(libc::ETIMEDOUT));
        assert_eq!(fixture.failed_step_of(order), expected);
    }
    let (worker, _) = fixture.run("exit 4");
    assert_eq!(fixture.exit_of(&worker), Exit::Code(4));
    let keeper = fixture.keeper.pid();
    wait_until("no process is left", TIMEOUT, || descendants_of(keeper).unwrap().is_empty());
}

fn dev_null() -> OwnedFd {
    fs::File::open("/dev/null").unwrap().into()
}

fn resource_limits() {
    let mut fixture = Fixture::start();
    let rlimits = vec![
        Rlimit { resource: RLIMIT_NOFILE, soft: 77, hard: 88 },
        Rlimit { resource: RLIMIT_CORE, soft: 0, hard: 0 },
        Rlimit { resource: RLIMIT_AS, soft: 1 << 30, hard: u64::MAX },
    ];
    let script = "ulimit -Sn; ulimit -Hn; ulimit -c; ulimit -Sv; ulimit -Hv";
    let mut worker = fixture.order(SpawnOrder { rlimits, ..shell(script) });
    assert_eq!(worker.read_all(), "77\n88\n0\n1048576\nunlimited\n");
}

fn open_files_of(pid: u32) -> HashSet<String> {
    let folder = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    folder.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn inherited_descriptors() {
    let mut fixture = Fixture::start();
    // A careless library might open a descriptor like this one, without the close-on-exec flag.
    let careless = fs::File::open("/dev/zero").unwrap();
    rustix::io::fcntl_setfd(&careless, rustix::io::FdFlags::empty()).unwrap();
    let mut careless_fixture = Fixture::start();
    for fixture in [&mut fixture, &mut careless_fixture] {
        let (_others, _) = fixture.run("read -r line <&3");
        // The worker is not a shell, because a shell would open additional descriptors and set additional variables.
        let sleep = SpawnOrder { program: "/bin/sleep", arguments: vec!["sleep", "1000"], ..shell("") };
        let worker = fixture.order(sleep);
        let Report::Spawned { pid, .. } = fixture.next() else { panic!("the worker did not start") };
        // The dynamic loader opens some descriptors temporarily.
        let expected = HashSet::from(["0", "1", "2", "3"].map(str::to_owned));
        wait_until("only descriptors 0 to 3 are open", TIMEOUT, || open_files_of(pid) == expected);
        let stdin = fs::read_link(format!("/proc/{pid}/fd/0")).unwrap();
        assert_eq!(stdin, Path::new("/dev/null"));
        // The kernel reports the exec shortly before the new environment becomes visible.
        wait_until("the environment is as requested", TIMEOUT, || {
            fs::read_to_string(format!("/proc/{pid}/environ")).unwrap() == "PATH=/usr/bin:/bin\0"
        });
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        for field in ["SigBlk:\t0000000000000000", "SigIgn:\t0000000000000000"] {
            assert!(status.contains(field), "{status}");
        }
        let stat = |pid: u32| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let nice = |pid: u32| stat(pid).rsplit_once(") ").unwrap().1.split(' ').nth(16).map(str::to_owned);
        assert_eq!(nice(pid), nice(std::process::id()));
        fixture.keeper.kill(worker.number).unwrap();
        fixture.exit_of(&worker);
    }
    let name = fs::read_to_string(format!("/proc/{}/comm", fixture.keeper.pid())).unwrap();
    assert_eq!(name, "bulkhead-keeper\n");
}

fn orphans_of_dead_workers() {
    let mut fixture = Fixture::start();
    let (mut dies, _) = fixture.run(LEAVES_ORPHAN);
    let (mut lives, _) = fixture.run(LEAVES_ORPHAN);
    let (goes, stays) = (dies.read_pid(), lives.read_pid());
    assert!(is_alive(goes) && is_alive(stays));
    dies.link.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(fixture.exit_of(&dies), Exit::Code(1));
    assert!(!is_alive(goes), "the worker was reported as reaped before its orphan was dead");
    assert!(is_alive(stays), "an orphan of a living worker was killed");
    fixture.keeper.kill(lives.number).unwrap();
    assert_eq!(fixture.exit_of(&lives), Exit::Signal { number: 9, core_dumped: false });
    assert!(!is_alive(stays));
}

/// If the intermediate parent of a process is killed, the process is reparented to the worker, not to the keeper.
fn orphans_of_living_workers() {
    let mut fixture = Fixture::start();
    let script = "sh -c 'sh -c \"setsid sleep 1000 & echo \\$!\" & wait; kill -9 $$' 2>&-; read -r line <&3";
    let (mut worker, pid) = fixture.run(script);
    let orphan = worker.read_pid();
    wait_until("the worker is the parent of the orphan", TIMEOUT, || {
        let stat = fs::read_to_string(format!("/proc/{orphan}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.split(' ').nth(1) == Some(&pid.to_string())
    });
    let (other, _) = fixture.run("exit 0");
    assert_eq!(fixture.exit_of(&other), Exit::Code(0));
    assert!(is_alive(orphan));
    worker.link.shutdown(std::net::Shutdown::Both).unwrap();
    fixture.exit_of(&worker);
    assert!(!is_alive(orphan));
}

fn ignored_signals() {
    let mut fixture = Fixture::start();
    let pid = Pid::from_raw(fixture.keeper.pid() as i32).unwrap();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::USR1] {
        rustix::process::kill_process(pid, signal).unwrap();
    }
    let (worker, _) = fixture.run("exit 3");
    assert_eq!(fixture.exit_of(&worker), Exit::Code(3));
}

/// Starts workers that each have an orphaned descendant. Returns the workers, and the PIDs of the workers and of the
/// orphans.
fn start_workers_with_orphans(fixture: &mut Fixture, count: usize) -> (Vec<Worker>, Vec<u32>) {
    let mut workers = Vec::new();
    let mut pids = Vec::new();
    for _ in 0..count {
        let (mut worker, pid) = fixture.run(LEAVES_ORPHAN);
        pids.extend([pid, worker.read_pid()]);
        workers.push(worker);
    }
    (workers, pids)
}

fn dropped_keeper() {
    let mut fixture = Fixture::start();
    let (_workers, pids) = start_workers_with_orphans(&mut fixture, 100);
    let keeper = fixture.keeper.pid();
    let start = Instant::now();
    drop(fixture);
    wait_until("the keeper is gone", TIMEOUT, || !is_alive(keeper));
    print!("[after {:?}] ", start.elapsed());
    assert_eq!(pids.iter().filter(|&&pid| is_alive(pid)).count(), 0);
}

fn shutdown() {
    let mut fixture = Fixture::start();
    let (_workers, pids) = start_workers_with_orphans(&mut fixture, 20);
    fixture.keeper.shut_down().unwrap();
    assert_eq!(pids.iter().filter(|&&pid| is_alive(pid)).count(), 0);
}

/// If the application forks, its child holds copies of all of the application's descriptors.
fn copied_socket() {
    for start in [Fixture::start, Fixture::start_detached] {
        let mut fixture = start();
        let (_workers, mut pids) = start_workers_with_orphans(&mut fixture, 3);
        pids.push(fixture.keeper.pid());
        let copy = fixture.keeper.as_fd().try_clone_to_owned().unwrap();
        drop(fixture);
        wait_until("the keeper is gone", TIMEOUT, || !pids.iter().any(|&pid| is_alive(pid)));
        drop(copy);
    }
}

fn killed_keeper() {
    let mut fixture = Fixture::start();
    let (_workers, pids) = start_workers_with_orphans(&mut fixture, 20);
    let pid = Pid::from_raw(fixture.keeper.pid() as i32).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
    let error = loop {
        match fixture.keeper.receive() {
            Ok(None) => {}
            Ok(Some(other)) => panic!("{other:?}"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    let workers = || pids.iter().step_by(2);
    wait_until("the workers are dead", TIMEOUT, || !workers().any(|&pid| is_alive(pid)));
    keeper::reap_after_keeper(fixture.keeper).unwrap();
    assert!(!pids.iter().any(|&pid| is_alive(pid)));
    let mut fixture = Fixture::start();
    let (worker, _) = fixture.run("exit 4");
    assert_eq!(fixture.exit_of(&worker), Exit::Code(4));
    keeper::reap_after_keeper(fixture.keeper).unwrap();
    assert_eq!(descendants_of(std::process::id()).unwrap(), Vec::<u32>::new());
}

/// A killed keeper that is being traced, or that is in uninterruptible sleep, does not exit.
fn traced_keeper() {
    if !rustix::process::geteuid().is_root() {
        return print!("NOT RUN: only root can trace the keeper everywhere ... ");
    }
    let fixture = Fixture::start();
    let script = "import ctypes, sys, time
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), None, None) == 0
print('traces', flush=True)
time.sleep(600)
print('gave up')";
    let mut tracer = std::process::Command::new("python3");
    tracer.args(["-c", script, &fixture.keeper.pid().to_string()]).stdout(std::process::Stdio::piped());
    let Ok(mut tracer) = tracer.spawn() else {
        return print!("NOT RUN: python3 is not installed ... ");
    };
    let mut output = tracer.stdout.take().unwrap();
    let mut line = [0; 7];
    output.read_exact(&mut line).unwrap();
    keeper::reap_after_keeper(fixture.keeper).unwrap();
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert_eq!((&line, rest.as_str()), (b"traces\n", ""));
    assert!(tracer.wait().is_err(), "the tracer was not reaped");
    assert_eq!(descendants_of(std::process::id()).unwrap(), Vec::<u32>::new());
}

fn killed_detached_keeper() {
    let mut other = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let mut fixture = Fixture::start_detached();
    let (_workers, pids) = start_workers_with_orphans(&mut fixture, 20);
    fixture.signal_keeper(Signal::KILL);
    wait_until("the keeper's exit is reported", TIMEOUT, || fixture.keeper.receive().is_err());
    let launcher = fixture.keeper.launcher();
    keeper::reap_after_keeper(fixture.keeper).unwrap();
    assert!(!pids.iter().any(|&pid| is_alive(pid)));
    assert!(is_alive(other.id()), "a process of the application was killed");
    let mut fixture = Fixture { keeper: launcher.start().unwrap(), workers: 0 };
    assert!(matches!(fixture.next(), Report::Started { .. }));
    let (worker, _) = fixture.run("exit 4");
    assert_eq!(fixture.exit_of(&worker), Exit::Code(4));
    let (_workers, pids) = start_workers_with_orphans(&mut fixture, 3);
    fixture.keeper.shut_down().unwrap();
    assert!(!pids.iter().any(|&pid| is_alive(pid)));
    assert_eq!(descendants_of(std::process::id()).unwrap(), [other.id()]);
    other.kill().unwrap();
    other.wait().unwrap();
}

fn killed_guard() {
    let mut fixture = Fixture::start_detached();
    let (_workers, pids) = start_workers_with_orphans(&mut fixture, 3);
    let stat = fs::read_to_string(format!("/proc/{}/stat", fixture.keeper.pid())).unwrap();
    let guard = stat.rsplit_once(") ").unwrap().1.split(' ').nth(1).unwrap().parse().unwrap();
    send(guard, Signal::KILL);
    wait_until("the keeper's exit is reported", TIMEOUT, || fixture.keeper.receive().is_err());
    keeper::reap_after_keeper(fixture.keeper).unwrap();
    assert!(!pids.iter().any(|&pid| is_alive(pid)));
}

fn other_programs() {
    for program in ["/bin/true", "/bin/cat"] {
        let error = Keeper::start_detached(Path::new(program)).unwrap_err().to_string();
        assert!(error.contains("did not become a keeper"), "{error}");
    }
    let error = Keeper::start_detached(Path::new("/no/such/program")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}");
    wait_until("no descendant is left", TIMEOUT, || {
        while bulkhead_linux::wait::peek_ended()
            .is_some_and(|pid| bulkhead_linux::wait::wait4(pid as i32, 0).is_ok())
        {}
        descendants_of(std::process::id()).unwrap().is_empty()
    });
}

/// Kills several workers while the keeper is stopped. The first worker leaves many processes behind.
fn prompt_exit_reports() {
    let mut fixture = Fixture::start();
    let script = "for i in $(seq 300); do sleep 1000 & done; echo 1; read -r line <&3";
    let (mut crowd, crowd_pid) = fixture.run(script);
    crowd.read_pid();
    let others: Vec<_> = (0..5).map(|_| fixture.run("read -r line <&3")).collect();
    fixture.signal_keeper(Signal::STOP);
    wait_until("the keeper is stopped", TIMEOUT, || process_state(fixture.keeper.pid()) == Some('T'));
    let all: Vec<u32> = [crowd_pid].into_iter().chain(others.iter().map(|(_, pid)| *pid)).collect();
    for &pid in &all {
        send(pid, Signal::KILL);
        wait_until("the worker is dead", TIMEOUT, || process_state(pid) == Some('Z'));
    }
    fixture.signal_keeper(Signal::CONT);
    let dead: HashSet<u64> = (0..all.len())
        .map(|_| match fixture.next() {
            Report::Exited { worker, exit: Exit::Signal { number: 9, .. }, .. } => worker,
            other => panic!("not all exits are reported: {other:?}"),
        })
        .collect();
    assert_eq!(dead.len(), all.len());
    for _ in &all {
        let Report::Reaped { worker } = fixture.next() else { panic!("not reaped") };
        assert!(dead.contains(&worker));
    }
    assert_eq!(descendants_of(fixture.keeper.pid()).unwrap(), Vec::<u32>::new());
}

/// Starts a worker in a PID namespace, and traces a child of the worker. The traced child disappears only once
/// `reap_traced` has been called. Returns the worker and the PID of the child.
#[expect(unsafe_code, reason = "ptrace(2) has no safe wrapper here")]
fn start_with_traced_child(fixture: &mut Fixture) -> (Worker, u32) {
    let mut order = shell("sleep 1000 & read -r line <&3; exit 3");
    order.confinement.layers.namespaces.pid = true;
    let worker = fixture.order(order);
    let Report::Spawned { pid, .. } = fixture.next() else { panic!("the worker did not start") };
    let mut sleeper = 0;
    wait_until("the worker has a child", TIMEOUT, || {
        sleeper = descendants_of(pid).unwrap().first().copied().unwrap_or(0);
        sleeper != 0
    });
    // SAFETY: neither call accesses memory of this process.
    let ptrace = |request: libc::c_uint| unsafe { libc::ptrace(request, sleeper as libc::pid_t, 0, 0) };
    assert_eq!(ptrace(libc::PTRACE_SEIZE), 0, "{}", io::Error::last_os_error());
    (worker, sleeper)
}

#[expect(unsafe_code, reason = "waitpid(2) has no safe wrapper here")]
fn reap_traced(pid: u32) {
    wait_until("the traced process is dead", TIMEOUT, || process_state(pid) == Some('Z'));
    let mut status = 0;
    // SAFETY: the pointer refers to a local variable.
    let waited = unsafe { libc::waitpid(pid as libc::pid_t, &mut status, libc::__WALL) };
    assert_eq!(waited, pid as libc::pid_t);
}

/// The first process of a namespace exits after all other processes in the namespace.
fn prompt_exit_report_in_namespace() {
    if !rustix::process::geteuid().is_root() {
        return print!("NOT RUN: a pid namespace without a user namespace requires root ... ");
    }
    let mut fixture = Fixture::start();
    let (worker, sleeper) = start_with_traced_child(&mut fixture);
    worker.link.shutdown(std::net::Shutdown::Both).unwrap();
    match fixture.next() {
        Report::Exited { exit, .. } => assert_eq!(exit, Exit::Code(3)),
        other => panic!("{other:?}"),
    }
    reap_traced(sleeper);
    fixture.expect_reaped(&worker);
}

/// A process in uninterruptible sleep survives SIGKILL, and the first process of its namespace waits for it. A traced
/// process has the same effect.
fn unkillable_in_namespace() {
    if !rustix::process::geteuid().is_root() {
        return print!("NOT RUN: a pid namespace without a user namespace requires root ... ");
    }
    let mut fixture = Fixture::start();
    for is_ordered in [false, true] {
        let (worker, sleeper) = start_with_traced_child(&mut fixture);
        let expected = if is_ordered {
            fixture.keeper.kill(worker.number).unwrap();
            Exit::Signal { number: 9, core_dumped: false }
        } else {
            worker.link.shutdown(std::net::Shutdown::Both).unwrap();
            Exit::Code(3)
        };
        match fixture.next() {
            Report::Exited { exit, .. } => assert_eq!(exit, expected),
            other => panic!("{other:?}"),
        }
        assert!(matches!(fixture.next(), Report::Unkillable { count: 1 }));
        fixture.expect_reaped(&worker);
        reap_traced(sleeper);
        let keeper = fixture.keeper.pid();
        wait_until("the namespace is gone", TIMEOUT, || descendants_of(keeper).unwrap().is_empty());
        // The worker is not reported again.
        let (next, _) = fixture.run("exit 0");
        assert_eq!(fixture.exit_of(&next), Exit::Code(0));
    }
}

/// A worker that asks to be traced and then stops is not reported as exited.
fn traced_worker() {
    if !rustix::process::geteuid().is_root() {
        return print!("NOT RUN: a pid namespace without a user namespace requires root ... ");
    }
    let mut fixture = Fixture::start();
    let script =
        "exec python3 -c 'import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19)'";
    let mut order = shell(script);
    order.confinement.layers.namespaces.pid = true;
    // The first process of the namespace has no capabilities, so it can trace only a worker that has none.
    order.confinement.layers.no_capabilities = true;
    let worker = fixture.order(order);
    assert!(matches!(fixture.next(), Report::Spawned { .. }));
    assert_eq!(fixture.exit_of(&worker), Exit::Signal { number: 9, core_dumped: false });
}

/// Kill and ping orders are accepted no matter how many orders are pending.
fn unlimited_kills() {
    let mut fixture = Fixture::start();
    let (worker, _) = fixture.run("read -r line <&3");
    fixture.signal_keeper(Signal::STOP);
    let mut ordered = 0;
    let refused = loop {
        let (link, theirs) = UnixStream::pair().unwrap();
        drop(link);
        let order = SpawnOrder { worker: 1_000 + ordered, program: "/no/such/program", ..shell("") };
        match fixture.keeper.spawn(&order, theirs.into(), dev_null(), dev_null()) {
            Ok(()) => ordered += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
    fixture.keeper.kill(worker.number).unwrap();
    fixture.keeper.ping().unwrap();
    fixture.signal_keeper(Signal::CONT);
    let (mut failed, mut is_dead, mut is_there) = (0, false, false);
    while failed < ordered || !is_dead || !is_there {
        match fixture.next() {
            Report::SpawnFailed { .. } => failed += 1,
            Report::Exited { worker: dead, .. } => is_dead = dead == worker.number,
            Report::Pong => is_there = true,
            Report::Reaped { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

fn fork_bombs() {
    // All processes of the fork bomb keep forking. In one case, many processes are in the worker's process
    // group. In the other case, each process is in a separate session, so only a scan finds it.
    let bomb = "if [ $1 -gt 0 ]; then
            $FORK sh -c \"$BOMB\" sh $(($1 - 1)) & $FORK sh -c \"$BOMB\" sh $(($1 - 1)) &
        fi
        while :; do sh -c '(setsid sleep 0.2 &) &'; sleep 0.05; done";
    for (fork, generations, enough) in [("FORK=setsid", "5", 70), ("FORK=", "7", 400)] {
        run_fork_bomb(bomb, fork, generations, enough);
    }
}

fn run_fork_bomb(bomb: &str, fork: &str, generations: &str, enough: usize) {
    let mut fixture = Fixture::start();
    let variable = format!("BOMB={bomb}");
    let order = SpawnOrder {
        arguments: vec!["sh", "-c", bomb, "sh", generations],
        environment: vec!["PATH=/usr/bin:/bin", &variable, fork],
        ..shell("")
    };
    let light = |fixture: &mut Fixture| {
        let worker = fixture.order(order.clone());
        let Report::Spawned { pid, .. } = fixture.next() else { panic!("the worker did not start") };
        wait_until("the fork bomb has grown", BOMB_TIMEOUT, || descendants_of(pid).unwrap().len() > enough);
        worker
    };
    let worker = light(&mut fixture);
    let start = Instant::now();
    fixture.keeper.kill(worker.number).unwrap();
    assert_eq!(fixture.exit_of(&worker), Exit::Signal { number: 9, core_dumped: false });
    print!("[ended after {:?}", start.elapsed());
    assert_eq!(descendants_of(fixture.keeper.pid()).unwrap(), Vec::<u32>::new());

    let _worker = light(&mut fixture);
    let start = Instant::now();
    fixture.keeper.shut_down().unwrap();
    print!(", with the keeper after {:?}] ", start.elapsed());
    assert_eq!(descendants_of(std::process::id()).unwrap(), Vec::<u32>::new());
}

fn unread_reports() {
    let mut fixture = Fixture::start();
    let mut expected = HashSet::new();
    // Makes the keeper send more reports than fit into the socket's buffer.
    for _ in 0..1000 {
        let worker = fixture.order(SpawnOrder { program: "/no/such/program", ..shell("") });
        expected.insert(worker.number);
        wait_until("the keeper accepts orders", TIMEOUT, || {
            fixture.keeper.flush().unwrap();
            !fixture.keeper.has_pending_orders()
        });
    }
    while !expected.is_empty() {
        match fixture.next() {
            Report::SpawnFailed { worker, .. } => assert!(expected.remove(&worker)),
            other => panic!("{other:?}"),
        }
    }
}

/// Waits until the keeper has executed all orders. Returns the keeper's open descriptors.
fn open_descriptors_when_idle(fixture: &mut Fixture) -> HashSet<String> {
    let (worker, _) = fixture.run("exit 0");
    fixture.exit_of(&worker);
    open_files_of(fixture.keeper.pid())
}

fn descriptor_leaks() {
    let mut fixture = Fixture::start();
    let (_stays, _) = fixture.run("read -r line <&3");
    let before = open_descriptors_when_idle(&mut fixture);
    let (mut spawns, mut kills) = (Vec::new(), Vec::new());
    for _ in 0..200 {
        let start = Instant::now();
        let (worker, _) = fixture.run("read -r line <&3");
        spawns.push(start.elapsed());
        let start = Instant::now();
        fixture.keeper.kill(worker.number).unwrap();
        fixture.exit_of(&worker);
        kills.push(start.elapsed());
    }
    open_descriptors_when_idle(&mut fixture);
    // The keeper briefly opens a descriptor whenever it scans `/proc`.
    let keeper = fixture.keeper.pid();
    wait_until("no further descriptor is open", TIMEOUT, || open_files_of(keeper).is_subset(&before));
    for (what, times) in [("spawn", &mut spawns), ("kill", &mut kills)] {
        times.sort();
        print!("[{what}: median {:?}, 99 % {:?}] ", times[100], times[198]);
    }
}
