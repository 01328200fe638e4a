//! Secrets from files (`env_files`). Every kind of worker receives its secrets, and a restart rereads the files. An
//! invalid file makes the start fail with a reason. No output contains a secret.

use std::fs::{self, Permissions};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use bulkhead_client::blocking::Client;
use bulkhead_tests::confined::{DEFAULT_LAYERS, Ended, Place, STRICT_LAYERS, Setup, has_layers, is_root};
use bulkhead_tests::{Supervisor, kill_pid, not_run, outcome, programs, wait_for};
use nix::sys::signal::Signal;

/// Contents of the file `neighbour/secret` in the supervisor's folder. No worker can read this file.
const CONTENT: &str = "something";

const PROFILES: [(&str, &[&str]); 3] = [
    ("profile = \"none\"", &[]),
    ("profile = \"default\"", DEFAULT_LAYERS),
    ("profile = \"strict\", best_effort = [\"identity\"]", STRICT_LAYERS),
];

fn write(path: &Path, content: impl AsRef<[u8]>) {
    let next = path.with_extension("next");
    fs::write(&next, content).unwrap();
    fs::set_permissions(&next, Permissions::from_mode(0o600)).unwrap();
    fs::rename(&next, path).unwrap();
}

/// Returns a folder that contains a secret file, and the path of the file.
fn folder_with(content: impl AsRef<[u8]>) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret");
    write(&path, content);
    (folder, path)
}

fn variable_of(place: &Place, bulkhead: &str, name: &str) -> String {
    let variables: serde_json::Value = serde_json::from_str(&place.ask(bulkhead, "environment")).unwrap();
    variables[name].as_str().unwrap_or("not set").to_owned()
}

#[test]
fn every_kind_of_worker_receives_the_secret() {
    for (profile, layers) in PROFILES {
        if !has_layers(layers) {
            continue;
        }
        let bulkhead = |name: &str, runs: &str| {
            format!(
                "[bulkhead.{name}]\n{runs}\ncwd = \"work\"\nmax_queue = 10\ndeadline = \"60s\"\n\
                 env = {{ PATH = \"/usr/bin:/bin\" }}\nenv_files = {{ SECRET = \"PLACE/neighbour/secret\" }}\n\
                 sandbox = {{ {profile} }}\n"
            )
        };
        let forked = bulkhead("forked", "command = [\"HOSTILE\"]\nstart.mode = \"fork\"");
        let bulkheads = bulkhead("worker", "command = [\"HOSTILE\"]")
            + &bulkhead("program", "exec = [\"HOSTILE\", \"once\"]")
            + if is_root() { &forked } else { "" };
        let place = Setup { bulkheads: &bulkheads, ..Setup::default() }.start();
        for name in ["worker", "program", "forked"].into_iter().take(if is_root() { 3 } else { 2 }) {
            assert_eq!(variable_of(&place, name, "SECRET"), CONTENT, "{profile}, {name}");
            if !layers.is_empty() {
                // The worker needs no access to the file.
                let targets = place.targets("worker");
                let ended = place.attempt(&place.client(), name, "read-neighbour", &targets);
                assert!(matches!(ended, Ended::Refused(..)), "{profile}, {name}: {ended:?}");
            }
        }
    }
}

/// Workers cannot read secret files, even in a folder that they can otherwise read.
#[test]
fn worker_cannot_read_secret_file_in_its_own_folder() {
    if !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let (folder, path) = folder_with("sesame");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    fs::write(path.with_file_name("other"), "readable").unwrap();
    let bulkhead = format!(
        "[bulkhead.x]\ncommand = [\"HOSTILE\"]\ncwd = {:?}\ndeadline = \"60s\"\nenv_files = {{ SECRET = {path:?} }}\n\
         sandbox = {{ profile = \"default\", user = \"shared\" }}\n",
        folder.path()
    );
    let place = Setup { bulkheads: &bulkhead, ..Setup::default() }.start();
    let read = |name: &str| {
        let target = serde_json::json!({ "secret": path.with_file_name(name) });
        place.attempt(&place.client(), "x", "read-neighbour", &target)
    };
    assert!(matches!(read("secret"), Ended::Refused(errno, _) if errno == "EACCES"));
    assert!(matches!(read("other"), Ended::Succeeded(_)), "the rest of the folder is readable");
    assert_eq!(variable_of(&place, "x", "SECRET"), "sesame");
}

#[test]
fn secret_can_contain_any_bytes_except_nul() {
    let (folder, _) = folder_with(b"\xff\xfe=\n two\n");
    let bulkhead = "[bulkhead.x]\nexec = [\"/bin/sh\", \"-c\", 'printf %s \"$SECRET\"']\n\
                    env_files = { SECRET = \"secret\" }\n";
    let supervisor = Supervisor::launch(folder, "", bulkhead).until_ready();
    let client = Client::connect(supervisor.socket()).unwrap();
    let reply = client.job("x", "").deadline(PATIENCE).send().unwrap();
    assert_eq!(reply.payload(), b"\xff\xfe=\n two");
}

const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the configuration of a bulkhead whose workers return their environment for the `environment` operation.
fn hostile(name: &str, more: &str) -> String {
    let program = programs().join("hostile");
    format!(
        "[bulkhead.{name}]\ncommand = [{program:?}]\nmax_queue = 10\ndeadline = \"60s\"\n\
         restart = {{ backoff = \"1ms\", backoff_max = \"10ms\", max = 1000 }}\n{more}\n\
         env_files = {{ SECRET = \"secret\" }}\n"
    )
}

fn secret_of(supervisor: &Supervisor, bulkhead: &str) -> Option<String> {
    let client = Client::connect(supervisor.socket()).unwrap();
    let reply = client.job(bulkhead, "").operation("environment").deadline(PATIENCE).send().ok()?;
    let variables: serde_json::Value = serde_json::from_slice(reply.payload()).unwrap();
    Some(variables["SECRET"].as_str().unwrap_or("not set").to_owned())
}

#[test]
fn restart_rereads_the_secret() {
    let (folder, path) = folder_with("first\n");
    let bulkheads = hostile("worker", "start = { spares = 1 }") + &hostile("forked", "start.mode = \"fork\"");
    let supervisor = Supervisor::launch(folder, "", &bulkheads).until_ready();
    for name in ["worker", "forked"] {
        assert_eq!(secret_of(&supervisor, name).as_deref(), Some("first"));
    }
    write(&path, "second\n");
    for name in ["worker", "forked"] {
        assert_eq!(secret_of(&supervisor, name).as_deref(), Some("first"), "{name} was not restarted");
        assert!(supervisor.post(&format!("/v1/bulkheads/{name}/restart")).0 < 300);
        wait_for("a worker has the new secret", || {
            (secret_of(&supervisor, name).as_deref() == Some("second")).then_some(())
        });
    }
}

/// Returns the configuration of a bulkhead with slowly starting processes. Each process writes the secret to the
/// file `NAME.seen`, and then waits for the file `NAME.start`.
fn starting_slowly(name: &str, more: &str) -> String {
    let program = format!("{:?}", programs().join("hostile"));
    let script = "echo $SECRET >> $0.seen; until test -e $0.start; do sleep 0.05; done; exec $1";
    let more = format!(
        "cwd = \".\"\nenv = {{ PATH = \"/usr/bin:/bin\" }}\nsandbox = {{ profile = \"none\" }}\n{more}"
    );
    let command = format!("[\"sh\", \"-c\", \"{script}\", \"{name}\", {program}]");
    hostile(name, &more).replace(&format!("[{program}]"), &command)
}

/// A worker, spare or template that is still starting may have read the old secret. A restart must therefore
/// replace these processes, too.
#[test]
fn restart_replaces_processes_that_are_still_starting() {
    let (folder, path) = folder_with("first");
    let bulkheads = starting_slowly("worker", "processes = 2\nstart = { handshake = \"60s\", spares = 1 }")
        + &starting_slowly("forked", "start = { mode = \"fork\", handshake = \"60s\" }");
    let supervisor = Supervisor::launch(folder, "", &bulkheads);
    let wait_for_starts = |name: &str, secret: &str, count: usize| {
        wait_for(&format!("{count} processes of {name} have read the secret {secret}"), || {
            let seen = fs::read_to_string(supervisor.file(&format!("{name}.seen"))).ok()?;
            (seen.lines().filter(|line| *line == secret).count() == count).then_some(())
        });
    };
    let bulkheads = [("worker", 3), ("forked", 1)];
    for (name, count) in bulkheads {
        wait_for_starts(name, "first", count);
    }
    write(&path, "second");
    for (name, count) in bulkheads {
        let mut command = supervisor.command();
        let mut restart =
            command.args(["restart", name, "--wait=60s"]).stdout(Stdio::null()).spawn().unwrap();
        wait_for_starts(name, "second", count);
        assert!(restart.try_wait().unwrap().is_none(), "{name}: no worker is ready yet");
        supervisor.touch(&format!("{name}.start"));
        assert!(restart.wait().unwrap().success(), "{name}");
        assert!(supervisor.state(name).workers.iter().all(|worker| !worker.outdated), "{name}");
        assert_eq!(secret_of(&supervisor, name).as_deref(), Some("second"), "{name}");
    }
}

/// The replacement for a dead worker also receives the new secret. Forked workers receive the secret that their
/// template has read.
#[test]
fn replacement_of_dead_worker_reads_current_secret() {
    let (folder, path) = folder_with("first");
    let bulkheads = hostile("worker", "") + &hostile("forked", "start.mode = \"fork\"");
    let supervisor = Supervisor::launch(folder, "", &bulkheads).until_ready();
    write(&path, "second");
    for (name, expected) in [("worker", "second"), ("forked", "first")] {
        let pid = wait_for("a worker runs", || supervisor.worker_pids(name).first().copied());
        kill_pid(pid, Signal::SIGKILL);
        wait_for("another worker runs", || {
            supervisor.worker_pids(name).first().filter(|other| **other != pid).map(drop)
        });
        let secret = wait_for("the worker answers", || secret_of(&supervisor, name));
        assert_eq!(secret, expected, "{name}");
    }
}

/// The old worker stays in service until a replacement has started.
#[test]
fn worker_with_invalid_secret_starts_after_correction() {
    const NAMES: [&str; 2] = ["worker", "forked"];
    let (folder, path) = folder_with("sesame");
    // On a busy machine, a start can be slow. A failed restart is not repeated.
    let bulkheads = hostile("worker", "start.handshake = \"60s\"")
        + &hostile("forked", "start = { mode = \"fork\", handshake = \"60s\" }");
    let supervisor = Supervisor::launch(folder, "", &bulkheads).until_ready();
    let pid_of = |name: &str| wait_for("a worker runs", || supervisor.worker_pids(name).first().copied());
    let spoil = |how: &dyn Fn(&Path), cause: &str| {
        how(&path);
        for name in NAMES {
            assert!(supervisor.post(&format!("/v1/bulkheads/{name}/restart")).0 < 300);
            let told = wait_for(&format!("{name} does not start: {cause}"), || {
                let (_, events) = supervisor.try_get("/v1/events?follow=false")?;
                let is_told = |event: &&str| event.contains(cause) && event.contains(&format!("\"{name}\""));
                events.lines().find(is_told).map(str::to_owned)
            });
            assert!(told.contains("env_files.SECRET") && told.contains(path.to_str().unwrap()), "{told}");
            assert_eq!(
                secret_of(&supervisor, name).as_deref(),
                Some("sesame"),
                "the old worker stays in service"
            );
        }
        let old = NAMES.map(pid_of);
        write(&path, "sesame");
        for (name, old) in NAMES.into_iter().zip(old) {
            assert!(supervisor.post(&format!("/v1/bulkheads/{name}/restart")).0 < 300);
            wait_for("another worker starts", || (pid_of(name) != old).then_some(()));
            wait_for("the worker has the secret", || {
                (secret_of(&supervisor, name).as_deref() == Some("sesame")).then_some(())
            });
        }
    };
    spoil(&|path| fs::remove_file(path).unwrap(), "No such file or directory");
    let set_mode = |path: &Path| fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
    spoil(&set_mode, "has mode 0644");
    spoil(&|path| write(path, "sesame".repeat(11_000)), "is larger than 65536 bytes");
    spoil(&|path| write(path, "sesame\0"), "contains a NUL byte");
    assert!(!supervisor.log().contains("sesamesesame"));
}

#[test]
fn oversized_secrets_cause_a_clear_error_at_startup() {
    let (folder, _) = folder_with("x".repeat(64 * 1024));
    let files: Vec<String> = (0..64).map(|number| format!("S{number} = \"secret\"")).collect();
    let program = programs().join("hostile");
    let bulkhead = format!("[bulkhead.x]\ncommand = [{program:?}]\nenv_files = {{ {} }}\n", files.join(", "));
    let supervisor = Supervisor::launch(folder, "", &bulkhead);
    wait_for("the log names `env_files`", || {
        let log = supervisor.log();
        (log.contains("Argument list too long") && log.contains("`env_files` is too large")).then_some(())
    });
}

// Outputs.

/// Secret value that is unlikely to occur anywhere else.
const VALUE: &str = "open-sesame-7d1f0c";

#[track_caller]
fn assert_hidden(what: &str, output: impl AsRef<[u8]>) {
    let output = output.as_ref();
    assert!(!output.is_empty(), "{what} is empty, so the test proves nothing");
    let found = output.windows(VALUE.len()).any(|window| window == VALUE.as_bytes());
    assert!(!found, "{what} contains the secret:\n{}", String::from_utf8_lossy(output));
}

#[test]
fn no_output_contains_the_secret() {
    let (folder, path) = folder_with(VALUE);
    let bulkheads = hostile("worker", "") + &hostile("forked", "start.mode = \"fork\"");
    let supervisor = Supervisor::launch(folder, "crash_dir = \"crashes\"", &bulkheads).until_ready();
    assert_eq!(secret_of(&supervisor, "worker").as_deref(), Some(VALUE));
    let client = Client::connect(supervisor.socket()).unwrap();
    for name in ["worker", "forked"] {
        let crash = client.job(name, "").operation("crash").deadline(PATIENCE).send();
        assert!(outcome(&crash).starts_with("crashed"), "{crash:?}");
    }
    let reports = wait_for("both crashes are reported", || {
        let reports = supervisor.get("/v1/crashes");
        let ids: Vec<String> = reports["crashes"]
            .as_array()
            .or(reports.as_array())?
            .iter()
            .filter_map(|report| report["id"].as_str().map(str::to_owned))
            .collect();
        Some(ids).filter(|ids| ids.len() >= 2)
    });
    let crashes: Vec<String> = reports.iter().map(|id| format!("/v1/crashes/{id}")).collect();
    let pages = [
        "/v1/config",
        "/v1/bulkheads",
        "/v1/bulkheads/worker",
        "/v1/bulkheads/forked",
        "/v1/bulkheads/worker/advice",
        "/v1/events?follow=false",
        "/v1/crashes",
        "/metrics",
        "/openapi.json",
        "/readyz",
    ];
    for page in pages.into_iter().chain(crashes.iter().map(String::as_str)) {
        let (status, body) = supervisor.try_get(page).unwrap();
        assert_eq!(status, 200, "{page}: {body}");
        assert_hidden(page, body);
    }
    let (_, config) = supervisor.try_get("/v1/config").unwrap();
    assert!(config.contains(path.to_str().unwrap()), "the configuration shows the path: {config}");
    for entry in fs::read_dir(supervisor.file("crashes")).unwrap() {
        let entry = entry.unwrap().path();
        if entry.ends_with(".lock") {
            continue;
        }
        // A temporary file disappears when a report is complete.
        let Ok(content) = fs::read(&entry) else { continue };
        assert_hidden(&entry.display().to_string(), content);
    }
    for arguments in [
        &["status", "--json"][..],
        &["status", "worker"],
        &["crashes", "--json"],
        &["reload", "--dry-run"],
        &["reload"],
    ] {
        let ended = supervisor.command().args(arguments).output().unwrap();
        assert_hidden(&format!("{arguments:?}"), [ended.stdout, ended.stderr].concat());
    }
    for arguments in [&["--check"][..], &["--check", "--start"]] {
        let mut check = Command::new(programs().join("bulkhead-supervisor"));
        check.arg("--config").arg(supervisor.file("workers.toml")).args(arguments);
        let ended = check.output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        assert_hidden(&format!("{arguments:?}"), [ended.stdout, ended.stderr].concat());
    }
    assert_hidden("the log", supervisor.log());
}

/// Returns true if the memory of a process contains the secret, or `None` if this process cannot read the memory.
fn is_in_memory(pid: u32) -> Option<bool> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let mut memory = fs::File::open(format!("/proc/{pid}/mem")).ok()?;
    for line in maps.lines().filter(|line| line.contains(" rw") && !line.contains("[v")) {
        let (from, to) = line.split(' ').next()?.split_once('-')?;
        let (from, to) = (u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?);
        let mut bytes = vec![0; (to - from) as usize];
        memory.seek(SeekFrom::Start(from)).ok()?;
        // A mapping may have been removed in the meantime.
        if memory.read_exact(&mut bytes).is_ok()
            && bytes.windows(VALUE.len()).any(|window| window == VALUE.as_bytes())
        {
            return Some(true);
        }
    }
    Some(false)
}

/// The supervisor and the keeper erase the secret once the worker has started.
#[test]
fn supervisor_and_keeper_do_not_keep_the_secret_in_memory() {
    let (folder, _) = folder_with(VALUE);
    let supervisor = Supervisor::launch(folder, "", &hostile("worker", "")).until_ready();
    // The secret must not be in a job's result, because the supervisor would store the result.
    let worker = supervisor.worker_pids("worker")[0];
    if is_in_memory(worker) != Some(true) {
        not_run!("the memory of other processes cannot be read");
        return;
    }
    for (what, pid) in [("the supervisor", supervisor.pid()), ("the keeper", supervisor.keeper())] {
        wait_for(&format!("{what} has erased the secret"), || {
            (is_in_memory(pid) == Some(false)).then_some(())
        });
    }
}

#[test]
fn check_reports_an_invalid_secret() {
    let (folder, path) = folder_with(VALUE);
    fs::set_permissions(&path, Permissions::from_mode(0o640 | 0o004)).unwrap();
    let config = folder.path().join("workers.toml");
    fs::write(&config, format!("[supervisor]\nsocket = \"s\"\n{}", hostile("worker", ""))).unwrap();
    let check = || {
        let mut check = Command::new(programs().join("bulkhead-supervisor"));
        check.arg("--config").arg(&config).arg("--check").output().unwrap()
    };
    let ended = check();
    let told = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(2), "{told}");
    assert!(told.contains("`env_files.SECRET`") && told.contains("has mode 0644"), "{told}");
    assert_hidden("the error", told);
    fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    assert!(check().status.success());
}

#[test]
fn secret_can_be_a_systemd_credential() {
    let (credentials, path) = folder_with(VALUE);
    fs::rename(&path, credentials.path().join("db")).unwrap();
    let bulkhead = hostile("worker", "").replace("\"secret\"", "\"credential:db\"");
    let variables = [("CREDENTIALS_DIRECTORY", credentials.path().to_str().unwrap())];
    let folder = tempfile::tempdir().unwrap();
    let supervisor = Supervisor::launch_with_variables(folder, &variables, "", &bulkhead).until_ready();
    assert_eq!(secret_of(&supervisor, "worker").as_deref(), Some(VALUE));
}
