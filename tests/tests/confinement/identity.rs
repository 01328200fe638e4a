//! User IDs of workers, and the files that workers can access, in particular in a checkout below a home folder with
//! mode 0700.

use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use bulkhead_client::blocking::Client;
use bulkhead_tests::confined::{
    DEFAULT_LAYERS, NOBODY, STRICT_LAYERS, Setup, has_layers, has_program, is_root, status_field,
};
use bulkhead_tests::{PATIENCE, Supervisor, kill_pid, outcome, programs, wait_for};
use nix::sys::signal::Signal;
use nix::unistd::chown;
use serde_json::json;

/// Range of worker user IDs if the configuration names no user. This is systemd's range for dynamic users.
const IDS: std::ops::RangeInclusive<u32> = 61_184..=65_519;

/// Returns the names of the profiles that this machine supports.
fn profiles() -> impl Iterator<Item = &'static str> {
    let all = [("default", DEFAULT_LAYERS), ("strict", STRICT_LAYERS)];
    all.into_iter().filter(|(_, layers)| is_root() && has_layers(layers)).map(|(profile, _)| profile)
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn uid(pid: u32) -> u32 {
    status_field(pid, "Uid").split(' ').next().unwrap().parse().unwrap()
}

fn uids(supervisor: &Supervisor, bulkhead: &str, count: usize) -> BTreeSet<u32> {
    let pids = wait_for("all workers run", || {
        Some(supervisor.worker_pids(bulkhead)).filter(|pids| pids.len() == count)
    });
    pids.into_iter().map(uid).collect()
}

fn client(supervisor: &Supervisor) -> Client {
    Client::connect(supervisor.socket()).expect("the jobs socket answers")
}

fn answer(client: &Client, bulkhead: &str, operation: &str, payload: &str) -> String {
    let reply = client.job(bulkhead, payload.to_owned()).operation(operation).deadline(PATIENCE).send();
    let reply = reply.unwrap_or_else(|error| panic!("{bulkhead} does not answer: {error}"));
    String::from_utf8_lossy(reply.payload()).into_owned()
}

/// Starts a supervisor whose programs, configuration and sockets are all in `folder`.
fn start_in(folder: tempfile::TempDir, config: &str) -> Supervisor {
    let mut supervisor = launch_in(folder, config);
    wait_for("the supervisor is ready", || {
        if let Some(status) = supervisor.child.try_wait().unwrap() {
            panic!("the supervisor exited with {status}:\n{}", supervisor.log());
        }
        (supervisor.try_get("/readyz")?.0 == 200).then_some(())
    });
    supervisor
}

fn launch_in(folder: tempfile::TempDir, config: &str) -> Supervisor {
    let path = folder.path().to_owned();
    std::fs::write(path.join("workers.toml"), config).unwrap();
    let log = std::fs::File::create(path.join("log")).unwrap();
    let own = path.join("bin/bulkhead-supervisor");
    let program = if own.exists() { own } else { programs().join("bulkhead-supervisor") };
    let mut command = Command::new(program);
    command.arg("--config").arg(path.join("workers.toml")).current_dir(&path);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    Supervisor { child: command.spawn().unwrap(), folder }
}

const SOCKETS: &str = "[supervisor]\nsocket = \"jobs.sock\"\nadmin = \"admin.sock\"\n";

/// Creates a home folder with mode 0700. The folder contains programs, scripts, and a library that depends on
/// another library.
fn home() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let path = home.path();
    for folder in ["bin", "lib", "scripts", "data"] {
        std::fs::create_dir(path.join(folder)).unwrap();
        set_mode(&path.join(folder), 0o755);
    }
    for name in ["bulkhead-supervisor", "bulkhead-worker", "bulkhead", "hostile", "misbehave"] {
        copy(&programs().join(name), &path.join("bin").join(name));
    }
    let write = |name: &str, mode: u32, text: &str| {
        std::fs::write(path.join(name), text).unwrap();
        set_mode(&path.join(name), mode);
    };
    write("letter", 0o644, "dear diary");
    write("data/input", 0o644, "given");
    write("scripts/part.sh", 0o644, "echo beside");
    write("scripts/run", 0o755, "#!/bin/sh\n. \"$(dirname \"$0\")/part.sh\"; pwd; cat\n");
    write("inner.c", 0o644, "const char *inner(void) { return \"inner\"; }\n");
    write("outer.c", 0o644, LIBRARY);
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/include");
    let cc = |arguments: &[&str]| {
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-I"]).arg(&include).args(arguments).current_dir(path);
        assert!(cc.status().expect("a C compiler named `cc`").success());
    };
    cc(&["inner.c", "-o", "lib/libinner.so"]);
    cc(&["outer.c", "-o", "lib/libouter.so", "-Llib", "-linner", "-Wl,-rpath,$ORIGIN"]);
    ["lib/libinner.so", "lib/libouter.so"].iter().for_each(|name| set_mode(&path.join(name), 0o755));
    set_mode(path, 0o700);
    home
}

fn copy(from: &Path, to: &Path) {
    if std::fs::hard_link(from, to).is_err() {
        std::fs::copy(from, to).unwrap();
    }
}

const LIBRARY: &str = r#"
#include <bulkhead.h>
#include <string.h>
BULKHEAD_LIBRARY
const char *inner(void);
int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host)
{
    return host->result(job, inner(), strlen(inner()));
}
"#;

const HOME: &str = "[bulkhead.worker]\ncommand = [\"bin/hostile\"]\ncwd = \"scripts\"\n\
    [bulkhead.library]\nlibrary = \"lib/libouter.so\"\n\
    [bulkhead.script]\nexec = [\"scripts/run\"]\ncwd = \"scripts\"\n\
    [bulkhead.reader]\nexec = [\"/bin/cat\", \"data/input\"]\n\
    [bulkhead.home]\nexec = [\"/bin/sh\", \"-c\", \"echo *; cat letter; cat workers.toml; true\"]\ncwd = \"scripts\"\n\
    [defaults]\nmax_queue = 10\ndeadline = \"60s\"\n";

#[test]
fn worker_reaches_only_permitted_files_in_closed_home() {
    for profile in profiles() {
        let home = home();
        let path = home.path().to_owned();
        let bulkheads =
            HOME.replace("echo *; cat letter", &format!("cd {0}; echo *; cat {0}/letter", path.display()));
        let config = format!("{SOCKETS}{bulkheads}[defaults.sandbox]\nprofile = \"{profile}\"\n");
        let supervisor = start_in(home, &config);
        let client = client(&supervisor);
        for name in ["worker", "library", "script", "reader"] {
            assert!(uids(&supervisor, name, 1).iter().all(|id| IDS.contains(id)), "{profile}, {name}");
        }
        assert!(answer(&client, "worker", "pid", "{}").parse::<u32>().is_ok(), "{profile}");
        assert_eq!(answer(&client, "library", "", ""), "inner", "{profile}");
        let scripts = path.join("scripts");
        assert_eq!(
            answer(&client, "script", "", "x"),
            format!("beside\n{}\nx", scripts.display()),
            "{profile}"
        );
        assert_eq!(answer(&client, "reader", "", ""), "given", "{profile}");
        let seen = answer(&client, "home", "", "");
        assert!(!seen.contains("diary") && !seen.contains("supervisor"), "{profile}: {seen}");
    }
}

/// Without `cwd`, workers run in the configuration's folder. In this test, this folder is a home folder with mode 0700.
#[test]
fn worker_can_run_in_closed_home() {
    for profile in profiles() {
        let home = home();
        let path = home.path().to_owned();
        let script = "echo *; cat letter; cat workers.toml 2>/dev/null; true";
        let bulkheads = format!(
            "[bulkhead.x]\nexec = [\"/bin/sh\", \"-c\", {script:?}]\n\
             [defaults.sandbox]\nprofile = \"{profile}\"\n"
        );
        let supervisor = start_in(home, &format!("{SOCKETS}{bulkheads}"));
        let seen = answer(&client(&supervisor), "x", "", "");
        assert!(seen.contains("letter") && seen.contains("dear diary"), "{profile}: {seen}");
        assert!(!seen.contains("[supervisor]"), "{profile}: {seen}");
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700, "{profile}");
    }
}

/// Each entry of a folder with mode 0700 is made visible to the worker separately, so the number of entries is limited.
#[test]
fn entries_of_closed_folders_are_shown_up_to_a_limit() {
    for profile in profiles() {
        let home = home();
        let path = home.path().to_owned();
        for (name, entries) in [("many", 600), ("too-many", 4097)] {
            std::fs::create_dir(path.join(name)).unwrap();
            (0..entries).for_each(|file| std::fs::write(path.join(format!("{name}/{file}")), "").unwrap());
            set_mode(&path.join(name), 0o700);
        }
        let count = "exec = [\"/bin/sh\", \"-c\", \"ls $FOLDER | wc -l\"]";
        let config = format!(
            "{SOCKETS}[bulkhead.cwd]\n{count}\nenv = {{ FOLDER = \".\" }}\ncwd = \"many\"\n\
             [bulkhead.read]\n{count}\ncwd = \"scripts\"\nenv = {{ FOLDER = \"{0}/many\" }}\nsandbox.read = [\"many\"]\n\
             [bulkhead.refused]\n{count}\ncwd = \"scripts\"\nsandbox.read = [\"too-many\"]\n\
             [defaults.sandbox]\nprofile = \"{profile}\"\n",
            path.display()
        );
        let supervisor = start_in(home, &config);
        for name in ["cwd", "read"] {
            assert_eq!(answer(&client(&supervisor), name, "", "").trim(), "600", "{profile}: {name}");
        }
        let log = supervisor.log();
        let warned =
            format!("workers see only the entries of {}/many that exist when they start", path.display());
        assert_eq!(log.matches(&warned).count(), 1, "{profile}: {log}");
        let state = supervisor.state("refused");
        let why = state.detail.unwrap_or_default();
        assert!(
            why.contains("more than 4096")
                && why.contains(&format!("chmod go+rx {}/too-many", path.display())),
            "{profile}: {why}"
        );
    }
}

#[test]
fn worker_with_reachable_files_needs_no_mounts() {
    if !is_root() || !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let home = home();
    set_mode(home.path(), 0o755);
    let supervisor = start_in(home, &format!("{SOCKETS}{HOME}"));
    let mounts = |bulkhead: &str| {
        let pid = wait_for("a worker runs", || supervisor.worker_pids(bulkhead).first().copied());
        std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap()
    };
    let home = supervisor.folder.path().to_str().unwrap();
    assert!(!mounts("worker").contains(home) && !mounts("reader").contains(home), "{}", mounts("worker"));
}

/// Runs the configuration from the tour as root in a home folder with mode 0700.
#[test]
fn examples_run_in_closed_home() {
    if !is_root() || !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let home = home();
    let path = home.path().to_owned();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    for name in ["libthumbnail.so", "sql-worker", "hostile-worker"] {
        copy(&programs().join(name), &path.join("bin").join(name));
    }
    let text = std::fs::read_to_string(source.join("workers.toml")).unwrap();
    let (_, bulkheads) = text.split_once("[defaults]\n").unwrap();
    let bulkheads = bulkheads.replace("../target/release", "bin").replace("deadline", "#");
    let supervisor = start_in(home, &format!("{SOCKETS}[defaults]\n{bulkheads}"));
    let client = client(&supervisor);
    let submit = |bulkhead: &str, operation: &str, payload: &[u8]| {
        outcome(&client.job(bulkhead, payload).operation(operation).tenant("acme").deadline(PATIENCE).send())
    };
    let picture = |name: &str| std::fs::read(source.join("data").join(name)).unwrap();
    assert_eq!(submit("thumbnail", "", &picture("pictures/landscape.jpg")), "ok");
    assert_eq!(submit("thumbnail", "", &picture("crash.pic")), "crashed/signal");
    assert_eq!(submit("sql", "", b"SELECT 1"), "ok");
    assert_eq!(submit("sort", "", b"3\n1\n2\n"), "ok");
    assert_eq!(submit("hostile", "echo", b"x"), "ok");
}

const WORKERS: &str = "[bulkhead.x]\ncommand = [\"bin/misbehave\"]\nprocesses = 3\n";

#[test]
fn workers_of_two_supervisors_have_different_user_ids() {
    for profile in profiles() {
        let config = format!("{SOCKETS}{WORKERS}[defaults.sandbox]\nprofile = \"{profile}\"\n");
        let (one, other) = (start_in(home(), &config), start_in(home(), &config));
        let (of_one, of_other) = (uids(&one, "x", 3), uids(&other, "x", 3));
        assert!(of_one.iter().chain(&of_other).all(|id| IDS.contains(id)), "{of_one:?} {of_other:?}");
        assert_eq!(of_one.union(&of_other).count(), 6, "{profile}: {of_one:?} {of_other:?}");
    }
}

#[test]
fn sandbox_user_selects_the_user_that_the_worker_runs_as() {
    for profile in profiles() {
        for (user, expected) in [("root", 0), ("shared", 0), ("nobody", NOBODY)] {
            let sandbox = format!("[defaults.sandbox]\nprofile = \"{profile}\"\nuser = \"{user}\"\n");
            let supervisor = start_in(home(), &format!("{SOCKETS}{WORKERS}{sandbox}"));
            assert_eq!(uids(&supervisor, "x", 3), BTreeSet::from([expected]), "{profile}, {user}");
        }
    }
}

#[test]
fn error_suggests_user_root_if_root_cannot_change_user() {
    if !is_root() || !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let bulkheads = "[bulkhead.x]\ncommand = [\"HOSTILE\"]\ncwd = \"work\"\n\
        sandbox = { best_effort = [\"identity\"] }\n";
    let place = Setup { bulkheads, without: "identity", ..Setup::default() }.start();
    let why = place.failure("x");
    assert!(why.contains("user = \"root\""), "{why}");
}

#[test]
fn unprivileged_supervisor_reports_shared_user() {
    if !is_root() || !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let bulkheads = "[bulkhead.x]\ncommand = [\"HOSTILE\"]\ncwd = \"work\"\n";
    let place = Setup { bulkheads, user: Some(NOBODY), ..Setup::default() }.start();
    let told = place.supervisor.snapshot("x")["workers"][0]["confinement"].clone();
    assert_eq!((&told["identity"], &told["uid"]), (&json!("shared"), &json!(NOBODY)), "{told}");
    let mut command = place.supervisor.command();
    let status = bulkhead_tests::output(command.args(["status", "x"]));
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("shared"), "{status}");
    let run = |arguments: &[&str]| {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new(place.path().join("bin/bulkhead-supervisor"));
        command.args(arguments).uid(NOBODY).gid(NOBODY).current_dir(place.path());
        String::from_utf8(bulkhead_tests::output(&mut command).stdout).unwrap()
    };
    let checked = run(&["--config", "workers.toml", "--check"]);
    assert!(checked.contains("sandbox.user: shared"), "{checked}");
    let doctor = run(&["doctor"]);
    let line = doctor.lines().find(|line| line.trim_start().starts_with("worker ids")).unwrap_or_default();
    assert!(line.contains("no") && line.contains("the supervisor's own user"), "{doctor}");
}

/// The supervisor must log a warning about the unusable IDs, and `--check --start` must print the same warning.
#[test]
fn unusable_worker_uids_are_reported_with_reason() {
    if !is_root() || !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let bulkheads = "[bulkhead.x]\ncommand = [\"HOSTILE\"]\ncwd = \"work\"\n";
    let ids = "worker_uids = \"200000-200999\"";
    let place = Setup { supervisor: ids, bulkheads, user: Some(NOBODY), ..Setup::default() }.start();
    let mut command = Command::new(place.path().join("bin/bulkhead-supervisor"));
    command.args(["--config", "workers.toml", "--check", "--start"]).current_dir(place.path());
    std::os::unix::process::CommandExt::uid(&mut command, NOBODY);
    std::os::unix::process::CommandExt::gid(&mut command, NOBODY);
    let checked = texts(&bulkhead_tests::output(&mut command)).0;
    for told in [place.supervisor.log(), checked] {
        assert!(told.contains("the sandbox lacks identity"), "{told}");
        let reason = told.split_once("`worker_uids` has no effect: ").map_or("", |(_, reason)| reason);
        assert!(!reason.lines().next().unwrap_or_default().trim().is_empty(), "{told}");
    }
}

/// Workers of a bulkhead with `write` folders keep their user ID across restarts, because files in these folders
/// persist.
#[test]
fn worker_with_write_folders_keeps_its_user_id() {
    for profile in profiles() {
        let mut home = home();
        let place = home.path().join("place");
        std::fs::create_dir(&place).unwrap();
        set_mode(&place, 0o755);
        let script = "id -u; echo x >> ../place/file; stat -c %u ../place/file";
        let config = format!(
            "{SOCKETS}[bulkhead.x]\nexec = [\"/bin/sh\", \"-c\", {script:?}]\ncwd = \"scripts\"\n\
             env = {{ PATH = \"/usr/bin:/bin\" }}\nprocesses = 2\nrestart = {{ max = 1 }}\n\
             sandbox = {{ profile = \"{profile}\", write = [\"place\"] }}\n"
        );
        let mut refused = start_in(home, &config);
        let why = wait_for("the bulkhead has failed", || {
            let snapshot = refused.snapshot("x");
            (snapshot["state"] == "failed")
                .then(|| snapshot["detail"].as_str().unwrap_or_default().to_owned())
        });
        assert!(
            why.contains("chown") && why.contains("/place") && why.contains("`user`"),
            "{profile}: {why}"
        );
        let id: u32 = why.split_once(": user ").unwrap().1.split(' ').next().unwrap().parse().unwrap();
        assert!(IDS.contains(&id), "{why}");
        chown(&place, Some(id.into()), Some(id.into())).unwrap();
        for _ in 0..2 {
            refused.signal(Signal::SIGTERM);
            refused.wait();
            home = std::mem::replace(&mut refused.folder, tempfile::tempdir().unwrap());
            refused = start_in(home, &config);
            assert_eq!(uids(&refused, "x", 2), BTreeSet::from([id]), "{profile}");
            let answer = answer(&client(&refused), "x", "", "");
            assert_eq!(answer, format!("{id}\n{id}\n"), "{profile}");
        }
    }
}

#[test]
fn home_is_the_temporary_folder_by_default() {
    for profile in profiles() {
        let script = "echo x > $HOME/file && cat $HOME/file";
        let config = format!(
            "{SOCKETS}[bulkhead.x]\nexec = [\"/bin/sh\", \"-c\", {script:?}]\n\
             [bulkhead.y]\nexec = [\"/bin/sh\", \"-c\", \"echo $HOME\"]\nenv = {{ HOME = \"/given\" }}\n\
             [defaults.sandbox]\nprofile = \"{profile}\"\n"
        );
        let supervisor = start_in(home(), &config);
        assert_eq!(answer(&client(&supervisor), "x", "", ""), "x\n", "{profile}");
        assert_eq!(answer(&client(&supervisor), "y", "", ""), "/given\n", "{profile}");
    }
}

// `--check --start`.

fn check(folder: &Path) -> Output {
    let mut command = Command::new(programs().join("bulkhead-supervisor"));
    command.arg("--config").arg(folder.join("workers.toml")).args(["--check", "--start"]);
    bulkhead_tests::output(&mut command)
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// `--check --start` starts one worker for each bulkhead.
#[test]
fn check_can_start_workers_while_a_supervisor_is_running() {
    for profile in profiles() {
        let sandbox = format!("[defaults.sandbox]\nprofile = \"{profile}\"\n");
        let supervisor = start_in(home(), &format!("{SOCKETS}{HOME}{sandbox}"));
        let output = check(supervisor.folder.path());
        let (out, error) = texts(&output);
        assert_eq!(output.status.code(), Some(0), "{profile}: {out}{error}");
        for name in ["worker", "library", "script", "reader", "home"] {
            assert!(out.contains(&format!("bulkhead '{name}' starts")), "{profile}: {out}");
        }
        assert!(out.contains("(own)") && error.is_empty(), "{profile}: {out}{error}");
        assert_eq!(supervisor.try_get("/readyz").unwrap().0, 200);
    }
}

#[test]
fn check_suggests_exec_for_program_without_sdk() {
    let home = home();
    let path = home.path();
    let config = |command: &str| {
        let text = format!("{SOCKETS}[bulkhead.b]\ncommand = [\"{command}\"]\nsandbox.profile = \"none\"\n");
        std::fs::write(path.join("workers.toml"), text).unwrap();
    };
    config("sort");
    let (out, error) = texts(&check(path));
    assert!(error.contains("needs `exec` instead of `command`"), "{error}");
    assert!(!out.contains("# ok"), "{out}");
    config("bin/misbehave");
    let (out, error) = texts(&check(path));
    assert!(
        out.trim_end().ends_with("# ok: the configuration is valid, and a worker of each bulkhead starts"),
        "{out}{error}"
    );
}

#[test]
fn check_explains_why_a_worker_does_not_start() {
    if !is_root() || !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let home = home();
    let path: PathBuf = home.path().to_owned();
    std::fs::create_dir(path.join("place")).unwrap();
    std::fs::write(path.join("secret"), "x").unwrap();
    set_mode(&path.join("secret"), 0o600);
    let config = format!(
        "{SOCKETS}[bulkhead.good]\ncommand = [\"bin/misbehave\"]\n\
         [bulkhead.writer]\ncommand = [\"bin/misbehave\"]\nsandbox = {{ write = [\"place\"] }}\n\
         [bulkhead.reader]\ncommand = [\"bin/misbehave\"]\nsandbox = {{ read = [\"secret\"] }}\n\
         [bulkhead.ends]\ncommand = [\"/bin/sh\", \"-c\", \"echo so be it >&2; exit 3\"]\n"
    );
    std::fs::write(path.join("workers.toml"), config).unwrap();
    let output = check(&path);
    let (out, error) = texts(&output);
    assert_eq!(output.status.code(), Some(2), "{out}{error}");
    assert!(out.contains("bulkhead 'good' starts"), "{out}");
    let line = |name: &str| {
        let line = error.lines().find(|line| line.contains(&format!("bulkhead '{name}' does not start")));
        line.unwrap_or_else(|| panic!("no error about {name}: {error}")).to_owned()
    };
    assert!(line("writer").contains("chown") && line("reader").contains("/secret"), "{error}");
    assert!(line("ends").contains("(exit code 3)"), "{error}");
    assert!(error.contains("so be it"), "{error}");
    assert!(!path.join("jobs.sock.lock").exists() && !path.join("jobs.sock").exists());
}

/// Each request of a starting worker for more time postpones the timeout by at most `start.ready`. This also applies to
/// `--check --start`.
#[test]
fn check_uses_the_same_start_timeout_as_the_supervisor() {
    let home = home();
    let bulkhead = |name: &str, mode: &str| {
        format!(
            "[bulkhead.{name}]\ncommand = [\"bin/misbehave\", \"init-hangs\", \"extends\"]\n\
             sandbox.profile = \"none\"\nstart = {{ ready = \"500ms\", mode = \"{mode}\" }}\n"
        )
    };
    let config = format!("{SOCKETS}{}{}", bulkhead("spawned", "spawn"), bulkhead("forked", "fork"));
    std::fs::write(home.path().join("workers.toml"), config).unwrap();
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", &PATIENCE.as_secs().to_string()]);
    command.arg(programs().join("bulkhead-supervisor"));
    command.args(["--check", "--start", "--config"]).arg(home.path().join("workers.toml"));
    let output = command.output().unwrap();
    let (out, error) = texts(&output);
    assert_eq!(output.status.code(), Some(2), "{out}{error}");
    assert_eq!(error.matches("did not become ready in time").count(), 2, "{error}");
}

/// Replaces the program with a link to a private folder, as a worker that can write there could, until the next worker
/// has started or failed to start.
#[test]
fn link_in_place_of_program_does_not_reveal_private_folder() {
    for profile in profiles() {
        let home = tempfile::tempdir().unwrap();
        set_mode(home.path(), 0o755);
        let path = |name: &str| home.path().join(name);
        for (name, mode) in [("work", 0o777), ("private", 0o700)] {
            std::fs::create_dir(path(name)).unwrap();
            set_mode(&path(name), mode);
        }
        let (tool, aside, private) = (path("work/tool"), path("work/aside"), path("private"));
        std::fs::write(private.join("note"), "a secret").unwrap();
        let script = format!("#!/bin/sh\ncat {}/note 2>/dev/null || echo hidden\n", private.display());
        std::fs::write(&tool, script).unwrap();
        set_mode(&tool, 0o755);
        let config = format!(
            "{SOCKETS}[bulkhead.x]\nexec = [\"work/tool\"]\nmax_queue = 10\nenv = {{ PATH = \"/usr/bin:/bin\" }}\n\
             sandbox = {{ profile = \"{profile}\", write = [\"work\"], tmp = 0 }}\n\
             restart = {{ max = 1000, backoff = \"10ms\", backoff_max = \"100ms\" }}\n"
        );
        let supervisor = start_in(home, &config);
        let client = client(&supervisor);
        assert_eq!(answer(&client, "x", "", ""), "hidden\n", "{profile}");
        let ends_of_starts =
            || supervisor.events("worker_ready").len() + supervisor.events("worker_exited").len();
        let killed = ends_of_starts() + 1;
        std::fs::rename(&tool, &aside).unwrap();
        std::os::unix::fs::symlink(&private, &tool).unwrap();
        kill_pid(supervisor.worker_pids("x")[0], Signal::SIGKILL);
        wait_for("another start has ended", || (ends_of_starts() > killed).then_some(()));
        std::fs::rename(&aside, &tool).unwrap();
        assert_eq!(answer(&client, "x", "", ""), "hidden\n", "{profile}");
    }
}

/// A host can open a program or library by descriptor instead of by path. A program must be a single ELF file. A
/// library must not load other libraries from its folder.
#[test]
fn host_opens_programs_by_descriptor_if_it_cannot_mount() {
    if !is_root() || !has_layers(DEFAULT_LAYERS) || !has_program("/usr/bin/setpriv") {
        return;
    }
    let home = home();
    let path = home.path().to_owned();
    copy(&programs().join("libthumbnail.so"), &path.join("lib/libthumbnail.so"));
    std::fs::copy("/bin/cat", path.join("bin/cat")).unwrap();
    set_mode(&path.join("bin/cat"), 0o755);
    let config = format!(
        "{SOCKETS}[bulkhead.program]\nexec = [\"bin/cat\"]\ncwd = \"scripts\"\n\
         [bulkhead.descriptors]\nexec = [\"bin/cat\", \"/proc/self/environ\"]\ncwd = \"scripts\"\n\
         [bulkhead.library]\nlibrary = \"lib/libthumbnail.so\"\ncwd = \"scripts\"\n\
         [defaults]\nmax_queue = 10\ndeadline = \"60s\"\n"
    );
    std::fs::write(path.join("workers.toml"), config).unwrap();
    let log = std::fs::File::create(path.join("log")).unwrap();
    let mut command = Command::new("/usr/bin/setpriv");
    command.arg("--bounding-set=-sys_admin").arg(path.join("bin/bulkhead-supervisor"));
    command.arg("--config").arg(path.join("workers.toml")).current_dir(&path);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let supervisor = Supervisor { child: command.spawn().unwrap(), folder: home };
    wait_for("the supervisor is ready", || (supervisor.try_get("/readyz")?.0 == 200).then_some(()));
    let client = client(&supervisor);
    assert_eq!(answer(&client, "program", "", "x"), "x");
    assert!(!answer(&client, "descriptors", "", "").contains("BULKHEAD_PROGRAM_FD"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/pictures/landscape.jpg");
    let picture = std::fs::read(source).unwrap();
    assert_eq!(outcome(&client.job("library", picture).deadline(PATIENCE).send()), "ok");
    for name in ["program", "descriptors", "library"] {
        assert!(uids(&supervisor, name, 1).iter().all(|id| IDS.contains(id)), "{name}");
    }
}

/// Simulates a container that cannot mount file systems. Programs that need an unreachable folder must fail with an
/// error that names this folder.
#[test]
fn error_names_unreachable_folder_if_worker_cannot_mount_it() {
    if !is_root() || !has_layers(STRICT_LAYERS) || !has_program("/usr/bin/setpriv") {
        return;
    }
    let home = home();
    let path = home.path().to_owned();
    let config = format!(
        "{SOCKETS}[bulkhead.worker]\ncommand = [\"bin/hostile\"]\ncwd = \"scripts\"\n\
         [bulkhead.reader]\nexec = [\"/bin/cat\", \"data/input\"]\n\
         [bulkhead.script]\nexec = [\"scripts/run\"]\n\
         [bulkhead.library]\nlibrary = \"lib/libouter.so\"\n\
         [bulkhead.private]\ncommand = [\"bin/hostile\"]\ncwd = \"scripts\"\nsandbox.profile = \"strict\"\n"
    );
    std::fs::write(path.join("workers.toml"), config).unwrap();
    let mut command = Command::new("/usr/bin/setpriv");
    command.arg("--bounding-set=-sys_admin").arg(path.join("bin/bulkhead-supervisor"));
    command.arg("--config").arg(path.join("workers.toml")).args(["--check", "--start"]);
    let output = bulkhead_tests::output(&mut command);
    let (out, error) = texts(&output);
    assert_eq!(output.status.code(), Some(2), "{out}{error}");
    assert!(out.contains("bulkhead 'worker' starts") && out.contains("(own)"), "{out}{error}");
    for name in ["reader", "script", "library", "private"] {
        let line = error.lines().find(|line| line.contains(&format!("'{name}' does not start")));
        let line = line.unwrap_or_else(|| panic!("{name}: {out}{error}"));
        assert!(line.contains(path.to_str().unwrap()) && line.contains("chmod o+x"), "{line}");
    }
    set_mode(&path, 0o755);
    let output = bulkhead_tests::output(&mut command);
    assert_eq!(output.status.code(), Some(0), "{:?}", texts(&output));
}

/// Removes the host program and the working directory while the supervisor is running.
#[test]
fn failed_start_names_missing_host_program_or_working_directory() {
    let home = home();
    let path = home.path().to_owned();
    // The supervisor looks for the host program in its own directory.
    let (host, cwd) = (path.join("bin/bulkhead-worker"), path.join("data"));
    let none = "sandbox.profile = \"none\"\nrestart = { backoff = \"10ms\", max = 2 }\n";
    let config = format!(
        "{SOCKETS}[bulkhead.host]\nexec = [\"/bin/cat\"]\n{none}\
         [bulkhead.cwd]\ncommand = [\"bin/misbehave\"]\ncwd = \"data\"\n{none}"
    );
    let supervisor = start_in(home, &config);
    std::fs::remove_file(&host).unwrap();
    std::fs::remove_dir_all(&cwd).unwrap();
    for (bulkhead, missing) in [("host", host), ("cwd", cwd)] {
        let missing = missing.to_str().unwrap();
        kill_pid(supervisor.worker_pids(bulkhead)[0], Signal::SIGKILL);
        wait_for("the failed start is reported", || {
            let events = supervisor.events("worker_not_started");
            let mut of_bulkhead = events.iter().filter(|event| event["bulkhead"] == bulkhead);
            of_bulkhead.any(|event| event.to_string().contains(missing)).then_some(())
        });
    }
}

#[test]
fn check_forks_a_worker_from_a_template() {
    let home = home();
    let path = home.path();
    let config = format!(
        "{SOCKETS}[defaults]\nstart = {{ mode = \"fork\" }}\nsandbox.profile = \"none\"\n\
         [bulkhead.forked]\ncommand = [\"bin/misbehave\"]\n\
         [bulkhead.ends]\ncommand = [\"/bin/sh\", \"-c\", \"echo so be it >&2; exit 3\"]\n\
         [bulkhead.again]\ncommand = [\"bin/misbehave\"]\n"
    );
    std::fs::write(path.join("workers.toml"), config).unwrap();
    let output = check(path);
    let (out, error) = texts(&output);
    assert_eq!(output.status.code(), Some(2), "{out}{error}");
    assert!(
        out.contains("bulkhead 'forked' starts") && out.contains("bulkhead 'again' starts"),
        "{out}{error}"
    );
    assert!(error.contains("'ends' does not start: the template of /bin/sh exited"), "{error}");
    assert!(error.contains("(exit code 3)") && error.contains("so be it"), "{error}");
}

#[test]
fn check_reports_exit_status_and_signal() {
    for (script, how) in [("exit 3", "(exit code 3)"), ("kill -SEGV $$", "(signal SIGSEGV)")] {
        let folder = tempfile::tempdir().unwrap();
        let config = format!(
            "{SOCKETS}[bulkhead.worker]\ncommand = [\"/bin/sh\", \"-c\", \"{script}\"]\n\
             sandbox.profile = \"none\"\n"
        );
        std::fs::write(folder.path().join("workers.toml"), config).unwrap();
        let output = check(folder.path());
        let (out, error) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{out}{error}");
        assert!(error.contains(&format!("exited before it was ready {how}")), "{error}");
    }
}
