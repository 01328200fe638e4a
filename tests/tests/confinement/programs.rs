//! Normal programs and workers under confinement, and the effects of the `sandbox` keys.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use bulkhead_tests::attempts::Expected;
use bulkhead_tests::confined::{DEFAULT_LAYERS, Ended, Place, STRICT_LAYERS, Setup, has_layers, has_program};
use bulkhead_tests::{kill_pid, not_run, outcome, overrun_blocking, programs, wait_for};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const DEFAULT: &str = "profile = \"default\"";
const STRICT: &str = "profile = \"strict\", best_effort = [\"identity\"]";

fn start(bulkheads: &str) -> Place {
    Setup { bulkheads, ..Setup::default() }.start()
}

/// Returns the configuration of a bulkhead with the given program and sandbox.
fn bulkhead(name: &str, runs: &str, sandbox: &str) -> String {
    format!(
        "[bulkhead.{name}]\n{runs}\ncwd = \"work\"\nenv = {{ PATH = \"/usr/bin:/bin\" }}\nmax_queue = 10\n\
         deadline = \"60s\"\nrestart = {{ backoff = \"1ms\", max = 1000 }}\nsandbox = {{ {sandbox} }}\n"
    )
}

const WORKER: &str = "command = [\"HOSTILE\"]";

fn profiles() -> impl Iterator<Item = &'static str> {
    let all = [(DEFAULT, DEFAULT_LAYERS), (STRICT, STRICT_LAYERS)];
    all.into_iter().filter(|(_, layers)| has_layers(layers)).map(|(profile, _)| profile)
}

/// Runs a program under the `default` profile and compares its standard output with `expected`.
fn assert_unharmed(arguments: &[&str], expected: &str) {
    if has_layers(DEFAULT_LAYERS) {
        assert_unharmed_under(DEFAULT, arguments, expected);
    }
}

fn assert_unharmed_under(profile: &str, arguments: &[&str], expected: &str) {
    if !has_program(arguments[0]) {
        return;
    }
    let place = start(&bulkhead("x", &format!("exec = {arguments:?}"), profile));
    let reply = place.client().job("x", "").deadline(Duration::from_secs(60)).send();
    let reply = reply.unwrap_or_else(|error| panic!("{}: {error}\n{}", arguments[0], place.supervisor.log()));
    assert_eq!(String::from_utf8_lossy(reply.payload()).trim(), expected);
}

/// The private root folder contains the entries of the system's root folder, but is not that folder itself.
#[test]
fn strict_worker_can_read_all_entries_of_the_root() {
    if !has_layers(STRICT_LAYERS) {
        return;
    }
    let list = "exec = [\"/bin/sh\", \"-c\", \"ls /sys | grep -x kernel; ls / 2>/dev/null; true\"]";
    let place = start(&bulkhead("x", list, &format!("{STRICT}, read = [\"/\"]")));
    let reply = place.client().job("x", "").deadline(Duration::from_secs(60)).send();
    let reply = reply.unwrap_or_else(|error| panic!("{error}\n{}", place.supervisor.log()));
    assert_eq!(String::from_utf8_lossy(reply.payload()), "kernel\n");
}

#[test]
fn python_runs_under_default_profile() {
    let script = "
import json, threading, subprocess, ssl, tempfile, os, pwd, socket, sqlite3, time, concurrent.futures
assert ssl.create_default_context()
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert sum(pool.map(lambda n: n * n, range(100))) == 328350
with tempfile.NamedTemporaryFile('w') as file:
    file.write(json.dumps([1])); file.flush()
    assert open(file.name).read() == '[1]'
with tempfile.TemporaryDirectory() as folder:
    sqlite3.connect(folder + '/db').execute('create table t (x)')
assert subprocess.run(['/bin/echo', 'x'], capture_output=True).stdout == b'x\\n'
assert subprocess.run('exit 3', shell=True).returncode == 3
assert os.cpu_count() and time.localtime() and len(os.listdir('/proc/self/fd')) and pwd.getpwall()
left, right = socket.socketpair(); left.send(b'x'); assert right.recv(1) == b'x'
print('fine')";
    assert_unharmed(&["/usr/bin/python3", "-c", script], "fine");
}

#[test]
fn node_runs_under_default_profile() {
    let script = "
const fs = require('fs'), os = require('os'), { Worker } = require('worker_threads');
require('crypto').randomBytes(8); require('tls').createSecureContext(); os.cpus();
const folder = fs.mkdtempSync(os.tmpdir() + '/a'); fs.writeFileSync(folder + '/a', 'x');
const child = require('child_process').execFileSync('/bin/echo', ['x']).toString().trim();
new Worker('0', { eval: true }).on('exit', () => console.log(child + fs.readFileSync(folder + '/a')));";
    assert_unharmed(&["/usr/bin/node", "-e", script], "xx");
}

/// C libraries, allocators and virtual machines read certain files in `/proc`.
#[test]
fn programs_can_read_machine_information() {
    let files = "cpuinfo filesystems loadavg meminfo mounts self/cgroup self/maps self/stat stat sys/vm/overcommit_memory \
                 sys/vm/max_map_count sys/kernel/osrelease sys/kernel/threads-max sys/net/core/somaxconn uptime version";
    let script = format!("cd /proc && cat {files} > /dev/null && head -c 5 version");
    let node = "const os = require('os'); console.log(os.cpus().length > 0 && os.totalmem() > 0 && os.freemem() > 0)";
    let python = "import os; print(os.cpu_count() > 0 and os.sysconf('SC_PHYS_PAGES') > 0)";
    for profile in profiles() {
        assert_unharmed_under(profile, &["/bin/sh", "-c", &script], "Linux");
        assert_unharmed_under(profile, &["/usr/bin/node", "-e", node], "true");
        assert_unharmed_under(profile, &["/usr/bin/python3", "-c", python], "True");
        assert_unharmed_under(profile, &["/usr/bin/java", "-XX:+UseSerialGC", "-version"], "");
    }
}

#[test]
fn shell_runs_under_default_profile() {
    let script = "id -u >/dev/null; ls /usr >/dev/null; echo x > $TMPDIR/a; mv $TMPDIR/a $TMPDIR/b; \
        seq 1000 | sort -rn | head -1; cat $TMPDIR/b; sleep 9 & kill $!; wait";
    assert_unharmed(&["/bin/sh", "-c", script], "1000\nx");
}

/// Runs the configuration from the tour under the `default` profile.
#[test]
fn examples_run_under_default_profile() {
    if !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let text = std::fs::read_to_string(source.join("workers.toml")).unwrap();
    let (_, bulkheads) = text.split_once("[defaults]\n").unwrap();
    let built = programs();
    let bulkheads = bulkheads.replace("../target/release", built.to_str().unwrap());
    let place = start(&format!("[defaults]\nsandbox = {{ profile = \"default\" }}\n{bulkheads}"));
    let client = place.client();
    let job = |bulkhead: &str, operation: &str, payload: &[u8]| {
        client.job(bulkhead, payload).operation(operation).tenant("acme")
    };
    let submit = |bulkhead: &str, operation: &str, payload: &[u8]| {
        outcome(&job(bulkhead, operation, payload).deadline(Duration::from_secs(60)).send())
    };
    let picture = |name: &str| std::fs::read(source.join("data").join(name)).unwrap();
    assert_eq!(submit("thumbnail", "", &picture("pictures/landscape.jpg")), "ok");
    assert_eq!(submit("thumbnail", "", &picture("crash.pic")), "crashed/signal");
    assert_eq!(submit("thumbnail", "", &picture("pictures/tiny.bmp")), "ok");
    assert_eq!(submit("sql", "", b"SELECT 1"), "ok");
    assert_eq!(submit("sort", "", b"3\n1\n2\n"), "ok");
    assert_eq!(submit("hostile", "echo", b"x"), "ok");
    let forked = overrun_blocking(&job("hostile", "fork", b""));
    assert_eq!(outcome(&forked), "deadline_exceeded/running");
}

/// A worker that can write to its program's folder must not be able to gain more access for later workers.
#[test]
fn files_written_beside_program_grant_no_access() {
    for profile in profiles() {
        let folder = tempfile::tempdir().unwrap();
        let (bin, secret) = (folder.path().join("own/bin"), folder.path().join("secret"));
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::create_dir(&secret).unwrap();
        std::fs::write(secret.join("key"), "SECRET").unwrap();
        let program = bin.join("run");
        let script = format!("#!/bin/sh\ncat {}/key 2>/dev/null; echo done\n", secret.display());
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        // A malicious worker could have created this link.
        std::os::unix::fs::symlink(&secret, folder.path().join("own/share")).unwrap();
        let sandbox = format!("{profile}, user = \"shared\", write = [{:?}]", folder.path().join("own"));
        let place = start(&bulkhead("x", &format!("exec = [{program:?}]"), &sandbox));
        assert_eq!(place.ask("x", "").trim(), "done", "{profile}");
    }
}

// Reports of violations.

/// Source of a C library that makes a forbidden system call and runs programs.
const LIBRARY: &str = r#"
#include <bulkhead.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

BULKHEAD_LIBRARY

static int early;

int bulkhead_init(char *message, size_t size)
{
    early = system("exit 7");
    return 0;
}

int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host)
{
    char text[64];
    if (!strcmp(job->operation, "violate"))
        syscall(SYS_bpf, 0xffff, NULL, 0);
    if (!strcmp(job->operation, "early"))
        snprintf(text, sizeof text, "%d", early >> 8);
    else if (!strcmp(job->operation, "late"))
        execl("/bin/true", "true", NULL), snprintf(text, sizeof text, "%d", errno == EPERM);
    else
        snprintf(text, sizeof text, "well");
    return host->result(job, text, strlen(text));
}
"#;

/// Compiles the library into `folder` and returns its path.
fn compile(folder: &Path) -> PathBuf {
    let (input, output) = (folder.join("library.c"), folder.join("library.so"));
    std::fs::write(&input, LIBRARY).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/include");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-Wall", "-shared", "-fPIC", "-I"])
        .arg(include)
        .arg("-o")
        .arg(&output)
        .arg(&input);
    assert!(cc.status().expect("a C compiler named `cc`").success());
    output
}

fn assert_named(place: &Place, bulkhead: &str, ended: &Ended) {
    match ended {
        Ended::Violation(message) => assert!(message.contains("bpf"), "{bulkhead}: {message}"),
        other => panic!("{bulkhead}: {other:?}"),
    }
    let events = place.supervisor.wait_events("sandbox_violation", 1);
    let told = events.iter().any(|event| event["bulkhead"] == bulkhead && event.to_string().contains("bpf"));
    assert!(told, "{events:?}");
}

#[test]
fn violation_report_names_the_system_call() {
    for profile in profiles() {
        let folder = tempfile::tempdir().unwrap();
        let library = compile(folder.path());
        let bulkheads = bulkhead("command", WORKER, profile)
            + &bulkhead("program", "exec = [\"HOSTILE\", \"once\"]", profile)
            + &bulkhead("library", &format!("library = {library:?}"), profile);
        let place = start(&bulkheads);
        let client = place.client();
        for (name, operation) in [("command", "load-bpf"), ("program", "load-bpf"), ("library", "violate")] {
            assert_named(&place, name, &place.attempt(&client, name, operation, &json!({})));
            // The bulkhead serves jobs again.
            let next = wait_for("a worker accepts jobs", || client.job(name, "{}").send().ok());
            drop(next);
        }
        assert_eq!(place.supervisor.wait_events("sandbox_violation", 3).len(), 3, "{profile}");
    }
}

#[test]
fn violation_kills_only_the_child_process() {
    for profile in profiles() {
        let script = "HOSTILE once load-bpf </dev/null; echo lives";
        let runs = format!("max_in_flight = 2\nexec = [\"/bin/sh\", \"-c\", {script:?}]");
        let place = start(&bulkhead("x", &runs, profile));
        assert_eq!(place.ask("x", "").trim(), "lives", "{profile}");
    }
}

#[test]
fn concurrent_violations_kill_every_violating_process() {
    for profile in profiles() {
        let script = "for i in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19; do \
            HOSTILE once load-bpf </dev/null & done; wait; echo lives";
        let place = start(&bulkhead("x", &format!("exec = [\"/bin/sh\", \"-c\", {script:?}]"), profile));
        for _ in 0..5 {
            assert_eq!(place.ask("x", "").trim(), "lives", "{profile}");
        }
    }
}

#[test]
fn violation_does_not_affect_other_programs_in_the_worker() {
    for profile in profiles() {
        let script = "if [ $BULKHEAD_OPERATION = violate ]; then exec HOSTILE once load-bpf; fi; \
            while [ ! -e PLACE/write/go ]; do sleep 0.01; done; echo lives";
        let runs = format!("max_in_flight = 2\nexec = [\"/bin/sh\", \"-c\", {script:?}]");
        let place = start(&bulkhead("x", &runs, &format!("{profile}, write = [\"PLACE/write\"]")));
        let client = place.client();
        let neighbour = client.job("x", "").deadline(Duration::from_secs(60)).start().unwrap();
        place.supervisor.wait_number("x", "in_flight", 1);
        assert_named(&place, "x", &place.attempt(&client, "x", "violate", &json!({})));
        std::fs::write(place.path().join("write/go"), "").unwrap();
        assert_eq!(neighbour.wait().unwrap().payload(), b"lives\n", "{profile}");
    }
}

/// The violation report, the host's answer and the host's exit reach the supervisor at the same time.
#[test]
fn violation_is_reported_when_worker_exits_immediately() {
    const JOBS: usize = 60;
    if !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let runs = "exec = [\"HOSTILE\", \"once\"]\nrecycle = { jobs = 1 }";
    let place = start(&bulkhead("x", runs, DEFAULT));
    let client = place.client();
    let ended = (0..JOBS).map(|_| place.attempt(&client, "x", "load-bpf", &json!({})));
    let others: Vec<_> = ended.filter(|ended| !ended.is(Expected::Violation("bpf"))).collect();
    assert!(others.is_empty(), "{} of {JOBS} jobs have a different outcome: {:?}", others.len(), others[0]);
}

// Sealing.

#[test]
fn strict_worker_is_sealed_when_it_becomes_ready() {
    if !has_layers(STRICT_LAYERS) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let library = compile(folder.path());
    let place = start(
        &(bulkhead("command", "command = [\"HOSTILE\", \"prepare\"]", STRICT)
            + &bulkhead("library", &format!("library = {library:?}"), STRICT)),
    );
    let prepared: Value = serde_json::from_str(&place.ask("command", "prepared")).unwrap();
    for early in prepared.as_array().unwrap() {
        assert_eq!(early["succeeded"], true, "{early}");
    }
    let client = place.client();
    for (name, errno) in [("run-a-program", "EPERM"), ("pair-of-sockets", "EAFNOSUPPORT")] {
        let late = place.attempt(&client, "command", name, &json!({}));
        assert!(matches!(&late, Ended::Refused(found, _) if found == errno), "{name}: {late:?}");
    }
    assert_eq!((place.ask("library", "early"), place.ask("library", "late")), ("7".into(), "1".into()));
}

// Configuration keys.

#[test]
fn network_access_does_not_include_the_supervisor() {
    for profile in profiles() {
        let place = start(&bulkhead("x", WORKER, &format!("{profile}, network = true")));
        let (client, targets) = (place.client(), place.targets("x"));
        let attempt = |name: &str| place.attempt(&client, "x", name, &targets);
        for name in ["connect-by-tcp", "listen-on-tcp"] {
            let ended = attempt(name);
            assert!(ended.is(Expected::Succeeds), "{profile}, {name}: {ended:?}");
        }
        let sent = attempt("send-by-udp");
        assert!(sent.is(Expected::Succeeds), "{profile}: {sent:?}");
        let closed = [
            "submit-jobs",
            "administer",
            "connect-to-abstract-socket",
            "take-an-abstract-name",
            "connect-to-path-socket",
            "packet-socket",
        ];
        for name in closed.into_iter().chain(["raw-socket", "netfilter-socket", "virtual-machine-socket"]) {
            let ended = attempt(name);
            assert!(matches!(ended, Ended::Refused(..)), "{profile}, {name}: {ended:?}");
        }
    }
}

#[test]
fn syscalls_key_allows_and_denies_system_calls() {
    let cases = [
        ("allow = [\"io_uring_setup\"]", "io-uring", Expected::Machine),
        ("allow = [\"shmget\", \"shmctl\"]", "shared-memory-by-number", Expected::Machine),
        ("allow = [\"execve\"]", "run-a-program", Expected::Succeeds),
        ("deny = [\"inotify_init1\"]", "watch-neighbour", Expected::Violation("inotify_init1")),
        ("deny = [\"memfd_create\"]", "run-from-memory", Expected::Violation("memfd_create")),
    ];
    for profile in profiles() {
        let bulkheads = cases.iter().enumerate().map(|(number, (calls, ..))| {
            bulkhead(&format!("b{number}"), WORKER, &format!("{profile}, syscalls = {{ {calls} }}"))
        });
        let place = start(&bulkheads.collect::<String>());
        let (client, targets) = (place.client(), place.targets("b0"));
        for (number, (calls, name, expected)) in cases.iter().enumerate() {
            let ended = place.attempt(&client, &format!("b{number}"), name, &targets);
            assert!(ended.is(*expected), "{profile}, {calls}: {ended:?}, not {expected:?}");
        }
    }
}

/// A worker cannot start if its filter denies `execve`.
#[test]
fn denied_execve_prevents_start() {
    if !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let sandbox = format!("{DEFAULT}, syscalls = {{ deny = [\"execve\"] }}");
    let bulkheads = bulkhead("x", WORKER, &sandbox).replace("max = 1000", "max = 1");
    let mut place = Setup { bulkheads: &bulkheads, ..Setup::default() }.launch();
    wait_for("the start fails and the log names `execve`", || {
        let supervisor = &mut place.supervisor;
        let is_over = supervisor.child.try_wait().unwrap().is_some();
        let has_failed = is_over
            || supervisor.try_get("/v1/bulkheads/x").is_some_and(|(_, body)| body.contains("\"failed\""));
        (has_failed && supervisor.log().contains("execve")).then_some(())
    });
}

#[test]
fn zero_sandbox_tmp_disables_temporary_folder() {
    for profile in profiles() {
        let place = start(&bulkhead("x", WORKER, &format!("{profile}, tmp = 0")));
        let ended = place.attempt(&place.client(), "x", "write-to-own-temporary-folder", &json!({}));
        assert!(matches!(ended, Ended::Refused(..)), "{profile}: {ended:?}");
    }
}

/// The configuration file is in the working folder. The worker can read all other files in this folder.
#[test]
fn worker_cannot_read_the_configuration() {
    for profile in profiles() {
        let runs = bulkhead("x", WORKER, profile).replace("cwd = \"work\"", "cwd = \".\"");
        let place = start(&runs);
        let client = place.client();
        let read = |name: &str| {
            let path = place.path().join(name);
            place.attempt(&client, "x", "read-neighbour", &json!({ "secret": path.to_str().unwrap() }))
        };
        let ended = read("read/file");
        assert!(ended.is(Expected::Succeeds), "{profile}: the working folder is not readable: {ended:?}");
        let is_kept_from_it = || {
            let ended = read("workers.toml");
            let is_empty = matches!(&ended, Ended::Succeeded(what) if what.starts_with("0 bytes"));
            assert!(is_empty || !matches!(ended, Ended::Succeeded(..)), "{profile}: {ended:?}");
        };
        is_kept_from_it();
        // Editors and deployment tools replace a file by renaming another.
        let new = place.path().join("new.toml");
        std::fs::write(&new, "# secrets of the next version\n").unwrap();
        std::fs::rename(&new, place.path().join("workers.toml")).unwrap();
        is_kept_from_it();
    }
}

/// A Landlock rule for a folder applies to all files in the folder, so a hard link could give access to the
/// configuration.
#[test]
fn worker_cannot_read_hard_link_to_configuration() {
    for profile in profiles() {
        let runs = bulkhead("x", WORKER, profile).replace("cwd = \"work\"", "cwd = \".\"");
        let place = start(&runs);
        let links = ["linked.toml", "read/linked.toml"].map(|name| place.path().join(name));
        for link in &links {
            std::fs::hard_link(place.path().join("workers.toml"), link).unwrap();
        }
        let before = place.worker("x");
        kill_pid(before, Signal::SIGKILL);
        wait_for("the worker is replaced", || {
            place.supervisor.worker_pids("x").first().copied().filter(|pid| *pid != before)
        });
        let names = links.iter().cloned().chain([place.path().join("workers.toml")]);
        for name in names.chain([place.path().join("read/file")]) {
            let target = json!({ "secret": name.to_str().unwrap() });
            let ended = place.attempt(&place.client(), "x", "read-neighbour", &target);
            let is_given = matches!(&ended, Ended::Succeeded(what) if !what.starts_with("0 bytes"));
            assert_eq!(is_given, name.ends_with("read/file"), "{profile}: {name:?}: {ended:?}");
        }
    }
}

/// `shm_open` and `sem_open` create files in `/dev/shm`.
#[test]
fn worker_has_private_dev_shm() {
    for profile in profiles() {
        if !has_layers(STRICT_LAYERS) {
            not_run!("{profile}: a private /dev/shm requires namespaces");
            continue;
        }
        let both = bulkhead("x", WORKER, profile) + &bulkhead("y", WORKER, profile);
        let place = start(&both);
        for worker in ["x", "y"] {
            let ended = place.attempt(&place.client(), worker, "make-shared-memory", &json!({}));
            assert!(ended.is(Expected::Succeeds), "{profile}: {worker}: {ended:?}");
        }
        assert!(
            !Path::new("/dev/shm/bulkhead-attempt").exists(),
            "{profile}: the file is in the /dev/shm of the machine"
        );
    }
}

/// The worker's temporary folder contains the programs' temporary folders and is also mounted at `/dev/shm`.
#[test]
fn dev_shm_does_not_expose_other_programs_files() {
    for profile in profiles() {
        let runs = "exec = [\"/bin/sh\", \"-c\", \"case $BULKHEAD_OPERATION in \
                    keep) echo mine > $TMPDIR/secret; touch PLACE/write/kept; \
                    while [ ! -e PLACE/write/go ]; do sleep 0.01; done;; \
                    *) cat /dev/shm/*/secret /dev/shm/secret 2>&1; true;; esac\"]\n\
                    max_in_flight = 2";
        let place = start(&bulkhead("x", runs, &format!("{profile}, write = [\"PLACE/write\"]")));
        let client = place.client();
        let keeper = client.job("x", "").operation("keep").start().unwrap();
        wait_for("the first program has its secret", || {
            place.path().join("write/kept").exists().then_some(())
        });
        let seen = client.job("x", "").send().unwrap();
        let seen = String::from_utf8_lossy(seen.payload()).into_owned();
        assert!(!seen.contains("mine"), "{profile}: {seen}");
        std::fs::write(place.path().join("write/go"), "").unwrap();
        keeper.wait().unwrap();
    }
}

#[test]
fn files_in_write_paths_persist() {
    for profile in profiles() {
        let runs = "exec = [\"/bin/sh\", \"-c\", \"cat > PLACE/write/kept; cat PLACE/read/file\"]";
        let given = "read = [\"PLACE/read/file\"], write = [\"PLACE/write\"]";
        let place = start(&bulkhead("x", runs, &format!("{profile}, {given}")));
        let reply = place.client().job("x", "from inside").send().unwrap();
        assert_eq!(reply.payload(), b"something", "{profile}");
        assert_eq!(std::fs::read(place.path().join("write/kept")).unwrap(), b"from inside", "{profile}");
    }
}

#[test]
fn temporary_folder_is_private_and_removed_with_the_worker() {
    for profile in profiles() {
        let place = start(&(bulkhead("x", WORKER, profile) + &bulkhead("y", WORKER, profile)));
        let left = place.ask("x", "leave-a-file");
        let ended = place.attempt(&place.client(), "y", "read-neighbour", &json!({ "secret": left }));
        assert!(matches!(ended, Ended::Refused(..)), "{profile}: another worker reads {left}: {ended:?}");
        let before = place.worker("x");
        kill_pid(before, Signal::SIGKILL);
        wait_for("the worker is replaced", || {
            place.supervisor.worker_pids("x").first().copied().filter(|pid| *pid != before)
        });
        let mine = place.attempt(&place.client(), "x", "read-neighbour", &json!({ "secret": left }));
        assert!(matches!(mine, Ended::Refused(..)), "{profile}: the next worker reads {left}: {mine:?}");
        wait_for("the file of the killed worker is removed", || (!Path::new(&left).exists()).then_some(()));
    }
}

/// The program path contains `..`. A `strict` worker sees only the folders on the path to its program, so the folder
/// before `..` must also be visible.
#[test]
fn program_path_with_dot_dot_is_accepted() {
    let program = programs().join("deps/../misbehave");
    for profile in ["none", "default", "strict"] {
        let supervisor = bulkhead_tests::Supervisor::start(&format!(
            "[bulkhead.b]\ncommand = [{program:?}]\nsandbox.profile = \"{profile}\"\n"
        ));
        bulkhead_tests::run(async {
            let client = bulkhead_client::Client::connect(supervisor.socket()).await.unwrap();
            let told = outcome(&client.job("b", "x").send().await);
            assert_eq!(told, "ok", "{profile}: {}", supervisor.log());
        });
    }
}
