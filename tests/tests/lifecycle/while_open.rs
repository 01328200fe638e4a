//! `--while-open` and `--own-folder`, for a supervisor that another program starts as its child. The supervisor exits
//! together with that program.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bulkhead_client::blocking::Client;
use bulkhead_tests::confined::is_root;
use bulkhead_tests::{
    PATIENCE, Supervisor, in_time, is_alive, kill_pid, not_run, output_within, programs, wait_for,
};
use nix::sys::signal::Signal;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// The descriptor is a pipe to the parent program or a pidfd of the parent program. Either way, the supervisor stops
/// even if the parent is killed.
#[test]
fn supervisor_stops_when_its_while_open_descriptor_closes() {
    const LONG: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"900s\"\n";
    let inherited = |fd: BorrowedFd<'_>| {
        fcntl_setfd(fd, FdFlags::empty()).unwrap();
        fd.as_raw_fd().to_string()
    };
    let ends = |mut supervisor: Supervisor, end: Box<dyn FnOnce()>| {
        let client = Client::connect(supervisor.socket()).unwrap();
        let job = client.job("b", "").operation("hang").start().unwrap();
        supervisor.wait_number("b", "in_flight", 1);
        let pids = supervisor.worker_pids("b");
        end();
        assert_eq!(supervisor.wait().code(), Some(0), "{}", supervisor.log());
        assert!(supervisor.log().contains("--while-open"), "{}", supervisor.log());
        assert!(pids.iter().all(|&pid| !is_alive(pid)), "{pids:?}");
        assert_eq!(job.wait().unwrap_err().outcome().and_then(|o| o.verdict.reason()), Some("stopped"));
    };
    // Watches a pipe that carries some bytes before it is closed.
    let (read, mut write) = std::io::pipe().unwrap();
    let supervisor = Supervisor::start_as(&["--while-open", &inherited(read.as_fd())], &[], LONG);
    write.write_all(&[7; 10_000]).unwrap();
    ends(supervisor, Box::new(|| drop(write)));
    // Watches a process by its pidfd.
    let mut program = Command::new("sleep").arg("900").spawn().unwrap();
    let pid = Pid::from_raw(program.id() as i32).unwrap();
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    let supervisor = Supervisor::start_as(&["--while-open", &inherited(pidfd.as_fd())], &[], LONG);
    let id = program.id();
    ends(supervisor, Box::new(move || kill_pid(id, Signal::SIGKILL)));
    program.wait().unwrap();
}

#[test]
fn while_open_rejects_descriptor_that_cannot_report_a_close() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("workers.toml");
    std::fs::write(&config, "[supervisor]\nsocket = \"jobs.sock\"\n[bulkhead.b]\nexec = [\"/bin/true\"]\n")
        .unwrap();
    let start = |number: &str, stdin: Stdio| {
        let mut command = Command::new(programs().join("bulkhead-supervisor"));
        command.arg("--config").arg(&config).args(["--while-open", number]).stdin(stdin);
        let ran = output_within(PATIENCE, &mut command);
        (ran.status.code(), String::from_utf8_lossy(&ran.stderr).into_owned())
    };
    let file = || Stdio::from(std::fs::File::open(&config).unwrap());
    let listener = std::os::unix::net::UnixListener::bind(folder.path().join("listener")).unwrap();
    let (datagrams, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
    for (number, stdin, sentence) in [
        ("0", file(), "descriptor 0 cannot report that its other end was closed: pass a pipe"),
        ("0", Stdio::null(), "descriptor 0 cannot report that its other end was closed"),
        (
            "0",
            Stdio::from(OwnedFd::from(listener)),
            "descriptor 0 cannot report that its other end was closed",
        ),
        (
            "0",
            Stdio::from(OwnedFd::from(datagrams)),
            "descriptor 0 cannot report that its other end was closed",
        ),
        ("977", Stdio::null(), "descriptor 977 is not open"),
        ("-1", Stdio::null(), "-1"),
        ("x", Stdio::null(), "invalid value 'x'"),
    ] {
        let (code, told) = start(number, stdin);
        assert!(code == Some(2) && told.contains(sentence), "{number}: {code:?} {told}");
    }
    let (ended, _) = std::io::pipe().unwrap();
    let (code, told) = start("0", ended.into());
    assert_eq!(code, Some(0), "the descriptor was closed before the start: {told}");
}

#[test]
fn own_folder_is_removed_at_exit() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("own");
    let make = |mode| {
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(mode)).unwrap();
        std::fs::create_dir(folder.join("further")).unwrap();
        std::fs::write(folder.join("further/file"), "x").unwrap();
        let config = "[supervisor]\nsocket = \"jobs.sock\"\n[bulkhead.b]\nexec = [\"/bin/true\"]\n";
        std::fs::write(folder.join("workers.toml"), config).unwrap();
    };
    let start = || {
        let mut command = Command::new(programs().join("bulkhead-supervisor"));
        command.arg("--config").arg(folder.join("workers.toml")).args(["--while-open", "0", "--own-folder"]);
        command.arg(&folder).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    make(0o700);
    let mut supervisor = start();
    wait_for("the supervisor listens", || folder.join("admin.sock").exists().then_some(()));
    drop(supervisor.stdin.take());
    let ended = in_time("the supervisor exits", || supervisor.wait_with_output().unwrap());
    assert_eq!(ended.status.code(), Some(0), "{}", String::from_utf8_lossy(&ended.stderr));
    assert!(!folder.exists(), "{}", String::from_utf8_lossy(&ended.stderr));
    // In a folder with the setgid bit, new folders have this bit as well.
    make(0o2700);
    let mut supervisor = start();
    wait_for("the supervisor listens", || folder.join("admin.sock").exists().then_some(()));
    drop(supervisor.stdin.take());
    let ended = in_time("the supervisor exits", || supervisor.wait_with_output().unwrap());
    assert_eq!(ended.status.code(), Some(0), "{}", String::from_utf8_lossy(&ended.stderr));
    // A folder that other users can read is rejected, because such a folder was not created for the supervisor.
    make(0o755);
    let refused = start();
    let refused = in_time("the supervisor exits", || refused.wait_with_output().unwrap());
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && told.contains("mode 0700"), "{told}");
    assert!(folder.join("further/file").exists());
}

/// The folder contains a mount. The supervisor must not remove the mounted data, because the data does not belong
/// to it.
#[test]
fn cleanup_does_not_delete_files_on_a_mount() {
    if !is_root() {
        not_run!("mounting requires root");
        return;
    }
    let outer = tempfile::tempdir().unwrap();
    let (folder, data) = (outer.path().join("own"), outer.path().join("data"));
    let place = folder.join("further/data");
    std::fs::create_dir_all(&place).unwrap();
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o700)).unwrap();
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("file"), "x").unwrap();
    let config = "[supervisor]\nsocket = \"jobs.sock\"\n[bulkhead.b]\nexec = [\"/bin/true\"]\n";
    std::fs::write(folder.join("workers.toml"), config).unwrap();
    // The mount is in a private mount namespace, which disappears when the program exits.
    let script = "mount --bind \"$1\" \"$2\" && exec \"$3\" --config \"$4/workers.toml\" --while-open 0 --own-folder \"$4\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).args([&data, &place]);
    command.arg(programs().join("bulkhead-supervisor")).arg(&folder);
    let mut supervisor = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for("the supervisor listens", || folder.join("admin.sock").exists().then_some(()));
    drop(supervisor.stdin.take());
    let ended = in_time("the supervisor exits", || supervisor.wait_with_output().unwrap());
    let told = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(std::fs::read(data.join("file")).ok().as_deref(), Some(&b"x"[..]), "{told}");
    assert!(told.contains("failed to remove the supervisor's own directory"), "{told}");
}

/// Kills the supervisor at many different moments during its start.
#[test]
fn supervisor_killed_during_start_leaves_no_processes() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("workers.toml");
    std::fs::write(&config, "[supervisor]\nsocket = \"jobs.sock\"\n[bulkhead.b]\nexec = [\"/bin/true\"]\n")
        .unwrap();
    let mut longest = Duration::ZERO;
    for number in 0..400 {
        let mut command = Command::new(programs().join("bulkhead-supervisor"));
        command.arg("--config").arg(&config).stdout(Stdio::null()).stderr(Stdio::null());
        let began = Instant::now();
        let mut supervisor = command.spawn().unwrap();
        if number < 4 {
            // Measures the time until the supervisor listens.
            wait_for("the jobs socket exists", || folder.path().join("jobs.sock").exists().then_some(()));
            longest = longest.max(began.elapsed());
            kill_pid(supervisor.id(), Signal::SIGKILL);
        } else {
            // Kills the supervisor at evenly spaced moments of its start.
            std::thread::sleep(longest * (number - 4) / 396);
            kill_pid(supervisor.id(), Signal::SIGKILL);
        }
        supervisor.wait().unwrap();
        let _ = std::fs::remove_file(folder.path().join("jobs.sock"));
    }
    let name = config.to_str().unwrap();
    let left = || {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let told = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
        told.filter(|line| String::from_utf8_lossy(line).contains(name)).count()
    };
    wait_for("no process of a supervisor is left", || (left() == 0).then_some(()));
}
