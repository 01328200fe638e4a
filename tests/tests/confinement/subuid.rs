//! Workers with user IDs from `/etc/subuid`, started by an unprivileged supervisor.

use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use bulkhead_client::blocking::Client;
use bulkhead_tests::confined::{DEFAULT_LAYERS, STRICT_LAYERS, has_layers, status_field};
use bulkhead_tests::subuid::User;
use bulkhead_tests::{PATIENCE, Supervisor, children, kill_pid, programs, wait_for};
use nix::sys::signal::Signal;
use serde_json::json;

const SOCKETS: &str = "[supervisor]\nsocket = \"jobs.sock\"\nadmin = \"admin.sock\"\n";

fn profiles() -> impl Iterator<Item = &'static str> {
    let all = [("default", DEFAULT_LAYERS), ("strict", STRICT_LAYERS)];
    all.into_iter().filter(|(_, layers)| has_layers(layers)).map(|(profile, _)| profile)
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Creates a home folder with mode 0700 and a checkout in it, owned by `user`.
fn home(user: User) -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let path = home.path();
    for folder in ["bin", "scripts", "data", "place", "tmp"] {
        std::fs::create_dir(path.join(folder)).unwrap();
        set_mode(&path.join(folder), 0o755);
        chown(path.join(folder), Some(user.uid), Some(user.uid)).unwrap();
    }
    for name in
        ["bulkhead-supervisor", "bulkhead-worker", "bulkhead", "hostile", "misbehave", "libthumbnail.so"]
    {
        let (from, to) = (programs().join(name), path.join("bin").join(name));
        if std::fs::hard_link(&from, &to).is_err() {
            std::fs::copy(&from, &to).unwrap();
        }
    }
    let write = |name: &str, mode: u32, text: &str| {
        std::fs::write(path.join(name), text).unwrap();
        set_mode(&path.join(name), mode);
        chown(path.join(name), Some(user.uid), Some(user.uid)).unwrap();
    };
    write("letter", 0o644, "dear diary");
    write("data/input", 0o644, "given");
    write("scripts/part.sh", 0o644, "echo beside");
    write("scripts/run", 0o755, "#!/bin/sh\n. \"$(dirname \"$0\")/part.sh\"; pwd; cat\n");
    set_mode(path, 0o700);
    chown(path, Some(user.uid), Some(user.uid)).unwrap();
    home
}

/// Returns a command that runs the supervisor as `user`. Temporary folders are created inside `home`.
fn program(user: User, home: &Path, more: &[&str]) -> Command {
    let mut command = user.command(home, more);
    command.arg(home.join("bin/bulkhead-supervisor")).current_dir(home).env("TMPDIR", home.join("tmp"));
    command
}

fn launch(user: User, home: tempfile::TempDir, config: &str) -> Supervisor {
    let path = home.path().to_owned();
    std::fs::write(path.join("workers.toml"), config).unwrap();
    let log = std::fs::File::create(path.join("log")).unwrap();
    let mut command = program(user, &path, &[]);
    command.arg("--config").arg(path.join("workers.toml"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    Supervisor { child: command.spawn().unwrap(), folder: home }
}

fn start(user: User, home: tempfile::TempDir, config: &str) -> Supervisor {
    let mut supervisor = launch(user, home, config);
    wait_for("the supervisor is ready", || {
        if let Some(status) = supervisor.child.try_wait().unwrap() {
            panic!("the supervisor exited with {status}:\n{}", supervisor.log());
        }
        (supervisor.try_get("/readyz")?.0 == 200).then_some(())
    });
    supervisor
}

fn client(supervisor: &Supervisor) -> Client {
    Client::connect(supervisor.socket()).expect("the jobs socket answers")
}

fn answer(client: &Client, bulkhead: &str, payload: &str) -> String {
    let reply = client.job(bulkhead, payload.to_owned()).deadline(PATIENCE).send();
    let reply = reply.unwrap_or_else(|error| panic!("{bulkhead} does not answer: {error}"));
    String::from_utf8_lossy(reply.payload()).into_owned()
}

fn uids(supervisor: &Supervisor, bulkhead: &str, count: usize) -> BTreeSet<u32> {
    let pids = wait_for("all workers run", || {
        Some(supervisor.worker_pids(bulkhead)).filter(|pids| pids.len() == count)
    });
    let uid = |pid| status_field(pid, "Uid").split(' ').next().unwrap().parse().unwrap();
    pids.into_iter().map(uid).collect()
}

fn output(mut command: Command) -> String {
    let output = bulkhead_tests::output(&mut command);
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Returns the temporary folders that have not been removed.
fn left(home: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(home.join("tmp")).unwrap().flatten().map(|entry| entry.path()).collect()
}

const BULKHEADS: &str = "[bulkhead.worker]\ncommand = [\"bin/misbehave\"]\ncwd = \"scripts\"\nprocesses = 3\n\
    [bulkhead.library]\nlibrary = \"bin/libthumbnail.so\"\n\
    [bulkhead.script]\nexec = [\"scripts/run\"]\ncwd = \"scripts\"\n\
    [bulkhead.reader]\nexec = [\"/bin/cat\", \"data/input\"]\n\
    [bulkhead.home]\nexec = [\"/bin/sh\", \"-c\", \"cd HOME; echo *; cat HOME/letter; id -G; true\"]\ncwd = \"scripts\"\n\
    [bulkhead.files]\nexec = [\"/bin/sh\", \"-c\", \"mkdir $HOME/inner && echo x > $HOME/inner/file && \
    chmod 000 $HOME/inner && stat -c %u $TMPDIR\"]\n\
    [defaults]\nmax_queue = 10\ndeadline = \"60s\"\nenv = { PATH = \"/usr/bin:/bin\" }\n";

#[test]
fn workers_get_separate_ids_from_subuid() {
    let Some(user) = User::with_ids() else { return };
    for profile in profiles() {
        let home = home(user);
        let path = home.path().to_owned();
        let bulkheads = BULKHEADS.replace("HOME;", &format!("{};", path.display()));
        let bulkheads = bulkheads.replace("HOME/letter", &format!("{}/letter", path.display()));
        let config = format!("{SOCKETS}{bulkheads}[defaults.sandbox]\nprofile = \"{profile}\"\n");
        let mut supervisor = start(user, home, &config);
        let all = uids(&supervisor, "worker", 3);
        assert!(all.len() == 3 && all.iter().all(|id| user.ids().contains(id)), "{profile}: {all:?}");
        for name in ["library", "script", "reader"] {
            assert!(uids(&supervisor, name, 1).iter().all(|id| user.ids().contains(id)), "{profile}, {name}");
        }
        let told = supervisor.snapshot("worker")["workers"][0]["confinement"].clone();
        assert_eq!((&told["identity"], &told["missing"]), (&json!("own"), &json!([])), "{profile}: {told}");
        let mut status = supervisor.command();
        status.args(["status", "worker"]);
        // `status` mentions the workers' user only if it is the supervisor's own user.
        assert!(!output(status).contains("shared"), "{profile}");

        let client = client(&supervisor);
        let scripts = path.join("scripts");
        assert_eq!(answer(&client, "script", "x"), format!("beside\n{}\nx", scripts.display()), "{profile}");
        assert_eq!(answer(&client, "reader", ""), "given", "{profile}");
        let seen = answer(&client, "home", "");
        assert!(!seen.contains("diary") && !seen.contains("supervisor"), "{profile}: {seen}");
        let groups: Vec<u32> = seen.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        assert!(groups.len() == 1 && user.ids().contains(&groups[0]), "{profile}: {seen}");
        let owner: u32 = answer(&client, "files", "").trim().parse().unwrap();
        assert!(user.ids().contains(&owner), "{profile}: {owner}");

        supervisor.signal(Signal::SIGTERM);
        supervisor.wait();
        assert_eq!(left(&path), [] as [PathBuf; 0], "{profile}");
    }
}

#[test]
fn check_and_doctor_report_available_user_ids() {
    let (Some(with), Some(without)) = (User::with_ids(), User::without_ids()) else { return };
    let row = |user: User, more: &[&str]| {
        let home = home(user);
        let mut command = program(user, home.path(), more);
        command.arg("doctor");
        let doctor = output(command);
        let row = doctor.lines().find(|line| line.trim_start().starts_with("worker ids"));
        row.unwrap_or_else(|| panic!("{doctor}")).to_owned()
    };
    let first = with.ids().start().to_string();
    let own = row(with, &[]);
    assert!(own.contains("yes") && own.contains(&first) && own.contains("/etc/subuid"), "{own}");
    let none = row(without, &[]);
    assert!(
        none.contains("no ") && none.contains("the supervisor's own user") && none.contains("no range"),
        "{none}"
    );
    let barred = row(with, &["--no-new-privs"]);
    assert!(barred.contains("newuidmap failed") && barred.contains("NoNewPrivileges"), "{barred}");

    for (user, whom, started) in [(with, "a separate user ID", "(own)"), (without, "shared", "(shared)")] {
        let home = home(user);
        let config =
            format!("{SOCKETS}[bulkhead.worker]\ncommand = [\"bin/misbehave\"]\ncwd = \"scripts\"\n");
        std::fs::write(home.path().join("workers.toml"), config).unwrap();
        let mut command = program(user, home.path(), &[]);
        command.args(["--config", "workers.toml", "--check", "--start"]);
        let said = output(command);
        assert!(said.contains("bulkhead 'worker' starts") && said.contains(started), "{said}");
        let summary = said.lines().find(|line| line.contains("sandbox.user")).unwrap_or_default();
        assert!(summary.contains(whom), "{said}");
    }
}

#[test]
fn workers_of_two_supervisors_have_different_subuid_ids() {
    let Some(user) = User::with_ids() else { return };
    let home = home(user);
    let path = home.path().to_owned();
    let config =
        format!("{SOCKETS}[bulkhead.x]\ncommand = [\"bin/misbehave\"]\ncwd = \"scripts\"\nprocesses = 4\n");
    let one = start(user, home, &config);
    // The second supervisor uses different sockets in the same home.
    let other = tempfile::tempdir_in(&path).unwrap();
    chown(other.path(), Some(user.uid), Some(user.uid)).unwrap();
    let config = config.replace("bin/", "../bin/").replace("scripts", "../scripts");
    std::fs::write(other.path().join("workers.toml"), config).unwrap();
    let log = std::fs::File::create(other.path().join("log")).unwrap();
    let mut command = program(user, &path, &[]);
    command.arg("--config").arg(other.path().join("workers.toml"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let other = Supervisor { child: command.spawn().unwrap(), folder: other };
    wait_for("the second supervisor is ready", || (other.try_get("/readyz")?.0 == 200).then_some(()));
    let (of_one, of_other) = (uids(&one, "x", 4), uids(&other, "x", 4));
    assert!(of_one.iter().chain(&of_other).all(|id| user.ids().contains(id)), "{of_one:?} {of_other:?}");
    assert_eq!(of_one.union(&of_other).count(), 8, "{of_one:?} {of_other:?}");
}

/// The first start of the worker fails. The error message names the command that gives the worker access to the folder.
#[test]
fn worker_with_write_folders_keeps_its_subuid_id() {
    let Some(user) = User::with_ids() else { return };
    for profile in profiles() {
        let mut home = home(user);
        let path = home.path().to_owned();
        let script = "id -u; echo x >> ../place/file; stat -c %u ../place/file";
        let config = format!(
            "{SOCKETS}[bulkhead.x]\nexec = [\"/bin/sh\", \"-c\", {script:?}]\ncwd = \"scripts\"\n\
             env = {{ PATH = \"/usr/bin:/bin\" }}\nprocesses = 2\nrestart = {{ max = 1 }}\n\
             sandbox = {{ profile = \"{profile}\", write = [\"place\"] }}\n"
        );
        let mut supervisor = start(user, home, &config);
        let why = wait_for("the bulkhead has failed", || {
            let snapshot = supervisor.snapshot("x");
            (snapshot["state"] == "failed")
                .then(|| snapshot["detail"].as_str().unwrap_or_default().to_owned())
        });
        assert!(why.contains("/place") && why.contains("\"shared\""), "{profile}: {why}");
        let remedy =
            why.split('`').find(|part| part.starts_with("unshare ")).unwrap_or_else(|| panic!("{why}"));
        let mut command = user.command(&path, &[]);
        command.args(remedy.split(' '));
        let status = command.status().unwrap();
        assert!(status.success(), "{profile}: {remedy}");
        let id = std::fs::metadata(path.join("place")).unwrap().uid();
        assert!(user.ids().contains(&id), "{profile}: {id}");
        for _ in 0..2 {
            supervisor.signal(Signal::SIGTERM);
            supervisor.wait();
            home = std::mem::replace(&mut supervisor.folder, tempfile::tempdir().unwrap());
            supervisor = start(user, home, &config);
            assert_eq!(uids(&supervisor, "x", 2), BTreeSet::from([id]), "{profile}");
            assert_eq!(answer(&client(&supervisor), "x", ""), format!("{id}\n{id}\n"), "{profile}");
        }
    }
}

/// Files of workers whose keeper was killed must be removed.
#[test]
fn replacement_keeper_uses_the_subuid_ids() {
    let Some(user) = User::with_ids() else { return };
    let home = home(user);
    let path = home.path().to_owned();
    let config =
        format!("{SOCKETS}[bulkhead.x]\ncommand = [\"bin/misbehave\"]\ncwd = \"scripts\"\nprocesses = 2\n");
    let mut supervisor = start(user, home, &config);
    let before: BTreeSet<u32> = supervisor.worker_pids("x").into_iter().collect();
    let keeper = supervisor.keeper();
    kill_pid(keeper, Signal::SIGKILL);
    let after = wait_for("both workers are replaced", || {
        let pids = supervisor.worker_pids("x");
        (pids.len() == 2 && pids.iter().all(|pid| !before.contains(pid))).then_some(pids)
    });
    assert!(after.iter().all(|&pid| children(keeper).is_empty() && pid != keeper));
    assert!(uids(&supervisor, "x", 2).iter().all(|id| user.ids().contains(id)));
    supervisor.signal(Signal::SIGTERM);
    supervisor.wait();
    assert_eq!(left(&path), [] as [PathBuf; 0]);
}

/// If no IDs are available, workers run as the supervisor's user.
#[test]
fn workers_without_subuid_ids_share_the_supervisor_user() {
    let Some(user) = User::without_ids() else { return };
    let config = format!("{SOCKETS}[bulkhead.x]\ncommand = [\"bin/misbehave\"]\ncwd = \"scripts\"\n");
    let supervisor = start(user, home(user), &config);
    assert_eq!(uids(&supervisor, "x", 1), BTreeSet::from([user.uid]));
    let told = supervisor.snapshot("x")["workers"][0]["confinement"].clone();
    assert_eq!(told["identity"], "shared", "{told}");
}
