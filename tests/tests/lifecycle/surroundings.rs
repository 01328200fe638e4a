//! Conditions outside the supervisor's control: special files, hanging file systems, inherited limits and signals,
//! removed sockets, and lack of memory.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use bulkhead_tests::confined::is_root;
use bulkhead_tests::{Supervisor, children, is_alive, kill_pid, name, not_run, run, wait_for};
use nix::sys::signal::Signal;

const B: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n";

fn works(supervisor: &Supervisor) {
    let client = bulkhead_client::blocking::Client::connect(supervisor.socket()).unwrap();
    assert_eq!(client.job("b", "x").send().map(|_| ()).map_err(|error| error.to_string()), Ok(()));
}

fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

// The configuration file.

/// The test covers a reload, `--check` and a shutdown while the configuration file is a FIFO.
#[test]
fn fifo_as_configuration_is_rejected_without_hanging() {
    let mut supervisor = Supervisor::start(B);
    let file = supervisor.file("workers.toml");
    std::fs::remove_file(&file).unwrap();
    nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
    supervisor.signal(Signal::SIGHUP);
    let rejected = supervisor.wait_events("config_rejected", 1);
    assert!(rejected[0]["message"].as_str().unwrap().contains("not a regular file"), "{rejected:?}");
    works(&supervisor);
    let mut check = Command::new(bulkhead_tests::programs().join("bulkhead-supervisor"));
    let check = bulkhead_tests::output(check.args(["--check", "--config"]).arg(&file));
    assert_eq!(check.status.code(), Some(2));
    supervisor.signal(Signal::SIGTERM);
    assert!(supervisor.wait().success());
}

/// A FUSE file system without a server. Every access hangs.
struct Hanging {
    path: std::path::PathBuf,
    /// Dropped before the other fields, because closing this file makes hanging accesses fail.
    _served: std::fs::File,
    _folder: tempfile::TempDir,
}

impl Drop for Hanging {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.path, nix::mount::MntFlags::MNT_DETACH);
    }
}

impl Hanging {
    /// Mounts the file system for this thread and its children. Returns `None` if this machine cannot mount it.
    fn mount() -> Option<Self> {
        use nix::mount::{MsFlags, mount};
        use std::os::fd::AsRawFd;
        let served = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").ok()?;
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).ok()?;
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).ok()?;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", served.as_raw_fd());
        mount(Some("nobody"), &path, Some("fuse"), MsFlags::empty(), Some(&*options)).ok()?;
        Some(Self { _folder: folder, path, _served: served })
    }
}

#[test]
fn hanging_file_system_delays_neither_jobs_nor_shutdown() {
    let Some(hanging) = Hanging::mount() else {
        return not_run!("this machine cannot mount a FUSE file system");
    };
    for twice in [false, true] {
        let mut supervisor = Supervisor::start_with("drain_timeout = \"100s\"", B);
        let cwd = hanging.path.join("cwd");
        supervisor.configure("", &format!("{B}cwd = \"{}\"\n", cwd.display()));
        supervisor.signal(Signal::SIGHUP);
        let reads = || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", supervisor.pid())).unwrap();
            let mut names =
                tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
            names.any(|name| name.trim() == "reload").then_some(())
        };
        wait_for("the file is read", reads);
        works(&supervisor);
        let mut job = None;
        if twice {
            let submit = supervisor.command().args(["submit", "b", "hang", "--deadline", "30s"]).spawn();
            job = Some(submit.unwrap());
            supervisor.wait_number("b", "in_flight", 1);
        }
        supervisor.signal(Signal::SIGTERM);
        if twice {
            wait_for("the supervisor drains", || supervisor.log().contains("draining").then_some(()));
            supervisor.signal(Signal::SIGTERM);
        }
        assert!(supervisor.wait().success());
        if let Some(mut job) = job {
            wait_for("the submitting command exits", || job.try_wait().unwrap());
        }
    }
}

/// No other reload can start while the first reload hangs.
#[test]
fn hanging_reload_is_abandoned() {
    let Some(hanging) = Hanging::mount() else {
        return not_run!("this machine cannot mount a FUSE file system");
    };
    let supervisor = Supervisor::start(B);
    let cwd = hanging.path.join("cwd");
    supervisor.configure("", &format!("{B}cwd = \"{}\"\n", cwd.display()));
    for _ in 0..3 {
        let (status, answer) = supervisor.post("/v1/reload");
        assert!(status == 503 && answer.contains("hangs"), "{status} {answer}");
    }
    works(&supervisor);
}

// Inherited settings.

#[test]
fn supervisor_works_with_blocked_signals_and_file_size_limit() {
    let folder = tempfile::tempdir().unwrap();
    let wrapper = ["env", "--block-signal", "prlimit", "--fsize=4096:4096", "--as=1000000000:"];
    let mut supervisor = Supervisor::launch_under(&wrapper, folder, "", B).until_ready();
    wait_for("the log has reached the size limit", || {
        supervisor.signal(Signal::SIGUSR1);
        (supervisor.file_bytes("log") >= 4096).then_some(())
    });
    works(&supervisor);
    let log = supervisor.log();
    assert!(log.contains("RLIMIT_FSIZE is 4096 bytes"), "{log}");
    supervisor.signal(Signal::SIGTERM);
    assert!(supervisor.wait().success());
}

/// Starts the supervisor with a signal that is blocked and already pending.
#[test]
fn signal_during_start_takes_effect_after_the_start() {
    let launch = |signal: &str| {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("kill -{signal} $$; exec \"$@\"");
        let wrapper = ["env", &format!("--block-signal={signal}"), "sh", "-c", &script, "sh"];
        Supervisor::launch_under(&wrapper, folder, "", B)
    };
    for signal in ["TERM", "INT"] {
        let mut supervisor = launch(signal);
        assert!(supervisor.wait().success(), "{signal}: {}", supervisor.log());
        for socket in ["jobs.sock", "admin.sock"] {
            assert!(!supervisor.file(socket).exists(), "{signal}: {socket} is left");
        }
    }
    let reloaded = launch("HUP").until_ready();
    reloaded.wait_events("config_reloaded", 1);
    works(&reloaded);
    for signal in ["USR1", "USR2"] {
        let mut supervisor = launch(signal).until_ready();
        works(&supervisor);
        let worker = supervisor.worker_pids("b")[0];
        for pid in [supervisor.pid(), worker] {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            assert!(status.contains("SigBlk:\t0000000000000000"), "{status}");
        }
        supervisor.signal(Signal::SIGTERM);
        assert!(supervisor.wait().success());
    }
}

#[test]
fn workers_do_not_inherit_blocked_signals() {
    let folder = tempfile::tempdir().unwrap();
    let wrapper = ["env", "--block-signal", "--ignore-signal=XFSZ", "prlimit", "--as=8000000000:"];
    let supervisor = Supervisor::launch_under(&wrapper, folder, "", B).until_ready();
    let log = supervisor.log();
    assert!(!log.contains("RLIMIT_AS"), "the address space limit is large enough: {log}");
    let worker = supervisor.worker_pids("b")[0];
    let status = std::fs::read_to_string(format!("/proc/{worker}/status")).unwrap();
    assert!(status.contains("SigBlk:\t0000000000000000"), "{status}");
    let limits = std::fs::read_to_string(format!("/proc/{worker}/limits")).unwrap();
    let address_space = limits.lines().find(|line| line.starts_with("Max address space")).unwrap();
    assert!(address_space.contains("8000000000"), "{address_space}");
    works(&supervisor);
}

/// The supervisor and its keeper must be able to wait for child processes even if SIGCHLD was ignored at the start. The
/// child processes include workers and trials of sandbox layers.
#[test]
fn ignored_sigchld_does_not_disable_sandbox_layers() {
    let folder = tempfile::tempdir().unwrap();
    let wrapper = ["env", "--ignore-signal=CHLD"];
    let supervisor = Supervisor::launch_under(&wrapper, folder, "", B).until_ready();
    works(&supervisor);
    let usual = Supervisor::start(B);
    works(&usual);
    let confinement = |supervisor: &Supervisor| supervisor.snapshot("b")["workers"][0]["confinement"].clone();
    let (found, wanted) = (confinement(&supervisor), confinement(&usual));
    assert!(wanted.is_object(), "{wanted}");
    for layer in ["landlock", "seccomp", "no_new_privs", "namespaces"] {
        assert_eq!(found[layer], wanted[layer], "{layer}");
    }
}

#[test]
fn exec_works_with_empty_or_relative_tmpdir() {
    for variable in ["TMPDIR=", "TMPDIR=."] {
        let folder = tempfile::tempdir().unwrap();
        let bulkhead = "[bulkhead.b]\nexec = [\"/bin/cat\"]\n";
        works(&Supervisor::launch_under(&["env", variable], folder, "", bulkhead).until_ready());
    }
}

#[test]
fn exec_works_if_the_umask_removes_all_permissions() {
    let folder = tempfile::tempdir().unwrap();
    let wrapper = ["sh", "-c", "umask 777; exec \"$@\"", "sh"];
    let bulkhead = "[bulkhead.b]\nexec = [\"/bin/cat\"]\n";
    works(&Supervisor::launch_under(&wrapper, folder, "", bulkhead).until_ready());
}

#[test]
fn supervisor_rejects_descriptor_limit_below_128() {
    let start = |limit: &str| {
        let folder = tempfile::tempdir().unwrap();
        let wrapper = ["prlimit", limit];
        Supervisor::launch_under(&wrapper, folder, "", "[bulkhead.b]\nexec = [\"/bin/cat\"]\n")
    };
    let mut supervisor = start("--nofile=127");
    assert_eq!(supervisor.wait().code(), Some(1));
    let log = supervisor.log();
    assert!(log.contains("127 files") && log.contains("at least 128"), "{log}");
    let supervisor = start("--nofile=128").until_ready();
    works(&supervisor);
}

// Sockets.

#[test]
fn reload_recreates_removed_sockets() {
    let mut supervisor = Supervisor::start(B);
    let admin = supervisor.file("admin.sock");
    std::fs::remove_file(supervisor.socket()).unwrap();
    let removed = supervisor.wait_events("socket_removed", 1);
    assert_eq!((&removed[0]["socket"], &removed[0]["severity"]), (&"jobs".into(), &"warning".into()));
    std::fs::remove_file(&admin).unwrap();
    wait_for("both removals are logged", || {
        (supervisor.log().matches("socket_removed").count() == 2).then_some(())
    });
    supervisor.signal(Signal::SIGHUP);
    wait_for("both sockets exist again", || {
        let connects = |path: &Path| UnixStream::connect(path).is_ok();
        (connects(&supervisor.socket()) && connects(&admin)).then_some(())
    });
    works(&supervisor);
    assert_eq!(supervisor.wait_events("socket_renewed", 2).len(), 2);
    assert_eq!(supervisor.events("socket_removed").len(), 2, "one event per socket");
    supervisor.signal(Signal::SIGTERM);
    assert!(supervisor.wait().success());
    assert!(!supervisor.socket().exists() && !admin.exists());
}

// Death of the supervisor.

#[test]
fn killed_supervisor_with_stopped_keeper_leaves_no_processes() {
    let supervisor = Supervisor::start(B);
    let (worker, keeper) = (supervisor.worker_pids("b")[0], supervisor.keeper());
    kill_pid(keeper, Signal::SIGSTOP);
    wait_for("the keeper is stopped", || (state(keeper) == Some('T')).then_some(()));
    supervisor.signal(Signal::SIGKILL);
    wait_for("no processes are left", || (!is_alive(keeper) && !is_alive(worker)).then_some(()));
}

// Memory.

#[test]
fn oom_killer_prefers_workers_to_keeper_and_supervisor() {
    let score = |pid: u32| -> i32 {
        let text = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        text.trim().parse().unwrap()
    };
    for profile in ["none", "default", "strict"] {
        let best_effort = if profile == "strict" { "best_effort = [\"identity\"]\n" } else { "" };
        let bulkheads = format!("{B}[bulkhead.b.sandbox]\nprofile = \"{profile}\"\n{best_effort}");
        let supervisor = Supervisor::start(&bulkheads);
        let (own, keeper) = (score(supervisor.pid()), score(supervisor.keeper()));
        let worker = score(supervisor.worker_pids("b")[0]);
        assert!(own < keeper && keeper + 400 <= worker, "{profile}: {own} {keeper} {worker}");
    }
}

#[test]
fn replacement_keeper_has_same_oom_score() {
    let supervisor = Supervisor::start(B);
    let score = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    let (keeper, before) = (supervisor.keeper(), score(supervisor.keeper()));
    kill_pid(keeper, Signal::SIGKILL);
    supervisor.wait_events("supervisor_trouble", 1);
    wait_for("the keeper is replaced", || (supervisor.keeper() != keeper).then_some(()));
    supervisor.wait_number("b", "limit", 1);
    assert_eq!(score(supervisor.keeper()), before);
    run(async {
        let client = bulkhead_client::Client::connect(supervisor.socket()).await.unwrap();
        assert!(client.job("b", "x").send().await.is_ok());
    });
}

/// Simulates a container, in which processes of `docker exec` leave orphans to process 1.
#[test]
fn supervisor_running_as_pid_1_reaps_orphans() {
    if !is_root() {
        not_run!("creating a PID namespace requires root");
        return;
    }
    let wrapper = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];
    let bulkhead = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nsandbox.profile = \"none\"\n";
    let unshared = Supervisor::launch_under(&wrapper, tempfile::tempdir().unwrap(), "", bulkhead);
    wait_for("the worker is ready", || unshared.log().contains("worker_ready").then_some(()));
    let supervisor = children(unshared.pid())[0];
    for _ in 0..3 {
        let target = format!("--target={supervisor}");
        let script = "sleep 1000 </dev/null >/dev/null 2>&1 &";
        let status = Command::new("nsenter").args([&*target, "--pid", "sh", "-c", script]).status();
        assert!(status.unwrap().success());
        let orphan = wait_for("the supervisor has an orphan", || {
            children(supervisor).into_iter().find(|&pid| name(pid).is_some_and(|name| name == "sleep"))
        });
        kill_pid(orphan, Signal::SIGKILL);
        let place = format!("/proc/{orphan}");
        wait_for("the orphan was reaped", || (!Path::new(&place).exists()).then_some(()));
    }
    assert_eq!(children(supervisor).len(), 1, "only the keeper is left");
}
