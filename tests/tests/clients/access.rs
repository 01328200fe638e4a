//! Access control: `[[access]]` rules for clients of the jobs socket, and attempts by workers to connect to their
//! supervisor.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use bulkhead_tests::{Supervisor, heavy, not_run, outcome, programs, wait_for};
use nix::sys::signal::Signal;
use nix::unistd::{Group, Uid, User};
use serde_json::Value;

/// User and group IDs for the tests. The IDs need not exist on this machine.
const ALICE: u32 = 61_001;
const BOB: u32 = 61_002;
const STAFF: u32 = 61_100;
const NOBODYS: u32 = 61_999;

/// Configuration of two bulkheads whose workers return each job's payload unchanged.
const ECHO: &str =
    "[bulkhead.front]\ncommand = [\"MISBEHAVE\"]\n[bulkhead.back]\ncommand = [\"MISBEHAVE\"]\n";

/// Returns true if this test can run programs as other users. Otherwise prints a `NOT RUN` message and returns false.
fn may_be_others() -> bool {
    if Uid::effective().is_root() {
        return true;
    }
    not_run!("running programs as other users requires root");
    false
}

/// Starts a supervisor in a folder that other users can enter. The file modes of the sockets still apply.
fn start(access: &str, bulkheads: &str) -> Supervisor {
    let supervisor = Supervisor::start(&format!("{bulkheads}{access}"));
    open(&supervisor);
    supervisor
}

fn open(supervisor: &Supervisor) {
    std::fs::set_permissions(supervisor.folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    // `cp` makes the copies, because a child that another test starts at the same time could inherit a file that this
    // process is writing. Executing that file would fail with ETXTBSY.
    let programs = programs();
    let copied = Command::new("cp")
        .args([programs.join("bulkhead"), programs.join("caller")])
        .arg(supervisor.folder.path())
        .status();
    assert!(copied.unwrap().success());
}

/// Exit code and output of a finished process.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn of(command: &mut Command) -> Self {
        let ran = command.stdin(Stdio::null()).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { code: ran.status.code(), stdout: text(&ran.stdout), stderr: text(&ran.stderr) }
    }

    /// Returns the exit code and the text `outcome/reason`, which is read from the `--json` output.
    fn end(&self) -> (i32, String) {
        let object: Value = serde_json::from_str(&self.stdout).unwrap_or_else(|_| panic!("{self:?}"));
        let reason = object["reason"].as_str().unwrap_or("-");
        (self.code.unwrap(), format!("{}/{reason}", object["outcome"].as_str().unwrap()))
    }

    fn is_ok(&self) {
        assert_eq!(self.end(), (0, "ok/-".into()), "{self:?}");
    }

    fn is_forbidden(&self, why: &str) {
        assert_eq!(self.end(), (77, "rejected/forbidden".into()), "{self:?}");
        assert!(self.stderr.contains(why) || self.stdout.contains(why), "{why}: {self:?}");
    }
}

/// Returns a command that runs a program in the supervisor's folder with the given UID, GID and supplementary groups.
fn by(supervisor: &Supervisor, (uid, gid, groups): (u32, u32, &str), program: &str) -> Command {
    let mut command = Command::new(supervisor.file("caller"));
    command.args(["as", &uid.to_string(), &gid.to_string(), groups]).arg(supervisor.file(program));
    command
}

/// Runs `bulkhead submit … --json` as another user.
fn submit(supervisor: &Supervisor, who: (u32, u32, &str), arguments: &[&str]) -> Ran {
    let mut command = by(supervisor, who, "bulkhead");
    command.arg("--socket").arg(supervisor.socket()).args(["submit", "--json"]).args(arguments);
    Ran::of(&mut command)
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn access_rules_match_user_and_group_ids() {
    if !may_be_others() {
        return;
    }
    let access = format!("[[access]]\nuid = {ALICE}\n[[access]]\ngid = {STAFF}\n");
    let supervisor = start(&access, ECHO);
    let nobody = (BOB, NOBODYS, "");
    submit(&supervisor, (ALICE, NOBODYS, ""), &["front"]).is_ok();
    submit(&supervisor, (BOB, STAFF, ""), &["front"]).is_ok();
    submit(&supervisor, (BOB, NOBODYS, &format!("7,{STAFF},61200")), &["back"]).is_ok();
    // The list does not fit into the supervisor's first buffer for `SO_PEERGROUPS` (64 groups).
    let many: Vec<String> = (62_000..62_300).chain([STAFF]).map(|gid| gid.to_string()).collect();
    submit(&supervisor, (BOB, NOBODYS, &many.join(",")), &["back"]).is_ok();
    submit(&supervisor, nobody, &["front"]).is_forbidden("user 61002 cannot submit jobs here");
    submit(&supervisor, (BOB, NOBODYS, "62000"), &["front"]).is_forbidden("[[access]]");
    // Without a matching rule, even the supervisor's own user (here root) is rejected.
    submit(&supervisor, (0, 0, ""), &["front"]).is_forbidden("user 0 cannot");
    // `[[access]]` does not apply to operators on the admin socket.
    assert_eq!(supervisor.snapshot("front")["done"], 2);
    assert_eq!(supervisor.snapshot("front")["submitted"], 2);
}

#[test]
fn access_rules_match_user_and_group_names() {
    let users = ["nobody", "daemon", "mail"].into_iter().filter_map(|name| User::from_name(name).ok()?);
    let groups = ["users", "mail", "daemon"].into_iter().filter_map(|name| Group::from_name(name).ok()?);
    let (Some(user), Some(group)) = (users.clone().next(), groups.clone().next()) else {
        not_run!("this machine lacks the users and groups of this test");
        return;
    };
    if !may_be_others() {
        return;
    }
    let access = format!("[[access]]\nuser = \"{}\"\n[[access]]\ngroup = \"{}\"\n", user.name, group.name);
    let supervisor = start(&access, ECHO);
    submit(&supervisor, (user.uid.as_raw(), NOBODYS, ""), &["front"]).is_ok();
    submit(&supervisor, (BOB, group.gid.as_raw(), ""), &["front"]).is_ok();
    submit(&supervisor, (BOB, NOBODYS, ""), &["front"]).is_forbidden("user 61002");
}

#[test]
fn access_rule_limits_bulkheads_and_tenants() {
    if !may_be_others() {
        return;
    }
    let access = format!(
        "[[access]]\nuid = {ALICE}\nbulkheads = [\"front\"]\n\
         [[access]]\nuid = {BOB}\ntenants = [\"acme\", \"größe 3\"]\n\
         [[access]]\ngid = {STAFF}\nbulkheads = [\"back\"]\ntenants = [\"staff\"]\n"
    );
    let supervisor = start(&access, ECHO);
    let (alice, bob) = ((ALICE, NOBODYS, ""), (BOB, NOBODYS, ""));
    submit(&supervisor, alice, &["front"]).is_ok();
    submit(&supervisor, alice, &["front", "--tenant", "any"]).is_ok();
    // The message is the same for a bulkhead that does not exist. A client with limited access must not learn which
    // bulkheads exist.
    submit(&supervisor, alice, &["back"]).is_forbidden("you have no access to a bulkhead named 'back'");
    submit(&supervisor, alice, &["missing"]).is_forbidden("you have no access to a bulkhead named 'missing'");

    for tenant in ["acme", "größe 3"] {
        submit(&supervisor, bob, &["front", "--tenant", tenant]).is_ok();
    }
    let other = submit(&supervisor, bob, &["back", "--tenant", "acme2"]);
    other.is_forbidden("you cannot send jobs for tenant 'acme2' to bulkhead 'back'");
    submit(&supervisor, bob, &["front"]).is_forbidden("must name a permitted tenant");
    let missing = submit(&supervisor, bob, &["missing", "--tenant", "acme"]);
    assert_eq!(missing.end(), (66, "rejected/not_found".into()));

    // A client that matches several rules can use any of them, but cannot combine the bulkheads of one rule with the
    // tenants of another.
    let both = (ALICE, STAFF, "");
    submit(&supervisor, both, &["front", "--tenant", "other"]).is_ok();
    submit(&supervisor, both, &["back", "--tenant", "staff"]).is_ok();
    submit(&supervisor, both, &["back", "--tenant", "other"]).is_forbidden("for tenant 'other'");

    // The bulkhead counts the rejections, but creates no records for the tenants.
    let back = supervisor.snapshot("back");
    assert_eq!((&back["rejected"]["forbidden"], &back["done"]), (&3.into(), &1.into()), "{back}");
    let tenants = back["tenants"].to_string();
    assert!(!tenants.contains("acme2") && !tenants.contains("other"), "{tenants}");
}

#[test]
fn forbidden_tenant_does_not_start_isolated_workers() {
    if !may_be_others() {
        return;
    }
    let access = format!("[[access]]\nuid = {ALICE}\ntenants = [\"acme\"]\n");
    let apart = "[bulkhead.apart]\ncommand = [\"MISBEHAVE\"]\ntenants = { isolate = true, max_active = 4 }\n";
    let supervisor = start(&access, apart);
    submit(&supervisor, (ALICE, NOBODYS, ""), &["apart", "--tenant", "other"]).is_forbidden("other");
    let (status, body) = supervisor.try_get("/v1/bulkheads/apart?tenant=other").unwrap();
    assert_eq!(status, 404, "{body}");
    assert_eq!(supervisor.snapshot("apart")["rejected"]["forbidden"], 1);
    submit(&supervisor, (ALICE, NOBODYS, ""), &["apart", "--tenant", "acme"]).is_ok();
}

#[test]
fn fallback_serves_client_without_access_to_it() {
    if !may_be_others() {
        return;
    }
    let access = format!("[[access]]\nuid = {ALICE}\nbulkheads = [\"front\"]\n");
    let bulkheads = "[bulkhead.front]\ncommand = [\"MISBEHAVE\"]\nfallback = [\"back\"]\n\
                     breaker = { min_calls = 1000 }\n[bulkhead.back]\ncommand = [\"MISBEHAVE\"]\n";
    let supervisor = start(&access, bulkheads);
    supervisor.resize("front", r#"{"breaker": "forced_open"}"#);
    let ran = submit(&supervisor, (ALICE, NOBODYS, ""), &["front"]);
    ran.is_ok();
    assert!(ran.stdout.contains("\"bulkhead\":\"back\""), "{ran:?}");
    submit(&supervisor, (ALICE, NOBODYS, ""), &["back"]).is_forbidden("'back'");
}

#[test]
fn access_rules_apply_to_jobs_with_large_payloads() {
    if !may_be_others() {
        return;
    }
    let access = format!("[[access]]\nuid = {ALICE}\nbulkheads = [\"front\"]\n");
    let supervisor = start(&access, ECHO);
    let payload = supervisor.file("payload");
    std::fs::write(&payload, vec![7; 1 << 20]).unwrap();
    let with = ["--payload-file", payload.to_str().unwrap()];
    submit(&supervisor, (ALICE, NOBODYS, ""), &[&["front"][..], &with].concat()).is_ok();
    submit(&supervisor, (ALICE, NOBODYS, ""), &[&["back"][..], &with].concat()).is_forbidden("'back'");
}

#[test]
fn umask_does_not_change_socket_modes() {
    let launch = |keys: &str, access: &str| {
        let folder = tempfile::tempdir().unwrap();
        let config = format!(
            "[supervisor]\nsocket = \"run/jobs.sock\"\nadmin = \"run/admin.sock\"\n{keys}\n{access}\n{}",
            ECHO.replace("MISBEHAVE", programs().join("misbehave").to_str().unwrap())
        );
        std::fs::write(folder.path().join("workers.toml"), config).unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = Command::new("/bin/sh")
            .args(["-c", "umask 077; exec \"$@\"", "sh"])
            .arg(programs().join("bulkhead-supervisor"))
            .arg("--config")
            .arg(folder.path().join("workers.toml"))
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let supervisor = Supervisor { child, folder };
        let run = supervisor.file("run");
        wait_for("the admin socket exists", || run.join("admin.sock").exists().then_some(()));
        let modes = [&run, &run.join("jobs.sock"), &run.join("admin.sock")].map(|path| mode(path));
        let locks = [run.join("jobs.sock.lock"), run.join("admin.sock.lock")].map(|path| mode(&path));
        assert_eq!(locks, [0o600, 0o600]);
        modes
    };
    let access = "[[access]]\nuid = 61001\n";
    assert_eq!(launch("", ""), [0o700, 0o600, 0o600]);
    assert_eq!(launch("", access), [0o755, 0o666, 0o600]);
    assert_eq!(launch("socket_mode = \"0660\"", access), [0o755, 0o660, 0o600]);
    assert_eq!(launch("socket_mode = \"0600\"", access), [0o700, 0o600, 0o600]);
}

#[test]
fn other_user_can_only_use_the_jobs_socket() {
    if !may_be_others() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // The folder exists before the supervisor starts, and is closed to other users.
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let supervisor = Supervisor::launch(folder, "", &format!("{ECHO}[[access]]\nuid = {ALICE}\n"));
    wait_for("the supervisor warns about the closed folder", || {
        supervisor.log().contains("so other users cannot reach the jobs socket").then_some(())
    });
    open(&supervisor);
    wait_for("the supervisor is ready", || {
        supervisor.try_get("/readyz").filter(|(status, _)| *status == 200)
    });
    let alice = (ALICE, NOBODYS, "");
    submit(&supervisor, alice, &["front"]).is_ok();

    let admin = supervisor.file("admin.sock");
    let mut status = by(&supervisor, alice, "bulkhead");
    let ran = Ran::of(status.arg("--admin").arg(&admin).arg("status"));
    assert_eq!(ran.code, Some(77), "{ran:?}");
    // With a permissive file mode, the user can connect, but the supervisor rejects the request with a reason.
    std::fs::set_permissions(&admin, PermissionsExt::from_mode(0o666)).unwrap();
    let mut status = by(&supervisor, alice, "bulkhead");
    let ran = Ran::of(status.arg("--admin").arg(&admin).arg("status"));
    assert_eq!(ran.code, Some(77), "{ran:?}");
    assert!(ran.stderr.contains("user 61001 cannot use the admin socket"), "{ran:?}");
    let told = supervisor.wait_events("access_refused", 1);
    assert_eq!((&told[0]["socket"], &told[0]["uid"]), (&"admin".into(), &ALICE.into()), "{told:?}");

    let folder = supervisor.folder.path().display();
    let script = format!(
        "cd {folder} || exit 3; \
         for f in *.lock; do (: > $f) && echo wrote $f; (: < $f) && echo read $f; done; \
         for f in *.sock *.lock; do rm -f $f && echo removed $f; mv $f $f.old && echo moved $f; done; \
         (: > jobs.sock.new) && echo made; exit 0"
    );
    let mut shell = Command::new(supervisor.file("caller"));
    let ran = Ran::of(shell.args(["as", "61001", "61999", "", "/bin/sh", "-c", &script]));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), ""), "{ran:?}");
    submit(&supervisor, alice, &["front"]).is_ok();
}

#[test]
fn rejected_clients_do_not_flood_events_and_log() {
    let _turn = heavy();
    if !may_be_others() {
        return;
    }
    let access = format!("[[access]]\nuid = {ALICE}\nbulkheads = [\"front\"]\n");
    let supervisor = start(&access, ECHO);
    let began = Instant::now();
    let knock = |_| {
        let mut command = by(&supervisor, (BOB, NOBODYS, ""), "caller");
        command.args(["knock"]).arg(supervisor.socket()).arg("2000").stdout(Stdio::piped()).spawn().unwrap()
    };
    let crowd: Vec<Child> = (0..4).map(knock).collect();
    for _ in 0..20 {
        submit(&supervisor, (ALICE, NOBODYS, ""), &["front"]).is_ok();
    }
    for child in crowd {
        let ran = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&ran.stdout), "2000\n", "each rejected client gets a reason");
    }
    // Sends many jobs, all of them rejected, on one connection.
    let repeat = ["back", "--repeat", "3000", "--concurrency", "50"];
    assert_eq!(submit(&supervisor, (ALICE, NOBODYS, ""), &repeat).code, Some(77));
    supervisor.wait_number("back", "submitted", 3000);
    // An event can summarise several rejections. The `refused` field contains their count.
    let count = |events: &[Value], uid: u32| -> u64 {
        let of = events.iter().filter(|event| event["uid"] == uid);
        of.filter_map(|event| event["refused"].as_u64()).sum()
    };
    let events = wait_for("the events count all rejections", || {
        let events = supervisor.events("access_refused");
        (count(&events, BOB) == 8000 && count(&events, ALICE) == 3000).then_some(events)
    });
    // At most one event every ten seconds for each user.
    assert!(events.len() <= 2 * (2 + began.elapsed().as_secs() as usize / 10), "{events:?}");
    assert_eq!(events[0]["severity"], "warning");
    let lines = supervisor.log().lines().filter(|line| line.contains("access_refused")).count();
    assert!(lines <= events.len(), "{}", supervisor.log());
    submit(&supervisor, (ALICE, NOBODYS, ""), &["front"]).is_ok();
}

// Workers.

/// Configuration of a bulkhead that runs shell scripts, and of a target bulkhead `b`.
const SHELL: &str = "[bulkhead.shell]\nsandbox = { profile = \"none\" }\nexec = [\"/bin/sh\"]\nenv = { PATH = \"/usr/bin:/bin\" }\n\
                     deadline = \"300s\"\n[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n";

/// Replaces `SUBMIT`, `STATUS`, `CALLER` and `JOBS` in a script with the commands and the path of the jobs socket.
fn script(supervisor: &Supervisor, text: &str) -> String {
    let path = |path: PathBuf| format!("'{}'", path.display());
    let command = path(programs().join("bulkhead"));
    text.replace("SUBMIT", &format!("{command} --socket {} submit b --json", path(supervisor.socket())))
        .replace("STATUS", &format!("{command} --admin {} status", path(supervisor.file("admin.sock"))))
        .replace("CALLER", &path(programs().join("caller")))
        .replace("JOBS", &path(supervisor.socket()))
}

/// Runs a script in a worker and returns the output.
fn run_in_worker(supervisor: &Supervisor, text: &str) -> String {
    let client = bulkhead_client::blocking::Client::connect(supervisor.socket()).unwrap();
    let result = client.job("shell", script(supervisor, text).into_bytes()).send();
    match &result {
        Ok(reply) => String::from_utf8_lossy(reply.payload()).into_owned(),
        Err(error) => panic!("{}: {error:?}", outcome(&result)),
    }
}

#[test]
fn worker_cannot_connect_to_jobs_or_admin_socket() {
    let supervisor = Supervisor::start(SHELL);
    let told = run_in_worker(&supervisor, "SUBMIT 2>&1; echo code=$?; STATUS 2>&1; echo code=$?");
    assert_eq!(told.matches("code=77").count(), 2, "{told}");
    assert!(told.contains("\"reason\":\"forbidden\""), "{told}");
    assert!(told.contains("bulkhead: workers and their descendants cannot connect"), "{told}");

    let events = supervisor.wait_events("worker_refused", 1);
    let event = &events[0];
    assert_eq!(
        (&event["severity"], &event["bulkhead"], &event["socket"]),
        (&"critical".into(), &"shell".into(), &"jobs".into()),
        "{event}"
    );
    assert_eq!(supervisor.number("b", "submitted"), 0);
    // Clients that are not workers can still connect.
    let ran = Ran::of(supervisor.command().args(["submit", "b", "--json"]));
    ran.is_ok();
    // Connects from a detached daemon, which leads a separate session and whose parent has exited.
    let daemon = "sleep 0.1; SUBMIT > out 2>&1; echo code=$? >> out; STATUS >> out 2>&1; \
                  echo code=$? >> out; mv out all";
    std::fs::write(supervisor.file("daemon"), script(&supervisor, daemon)).unwrap();
    let start =
        "(setsid /bin/sh daemon > /dev/null 2>&1 &); while [ ! -e all ]; do sleep 0.01; done; cat all";
    let told = run_in_worker(&supervisor, start);
    assert_eq!(told.matches("code=77").count(), 2, "{told}");
    assert_eq!(supervisor.number("b", "submitted"), 1);
}

#[test]
fn worker_without_access_rule_is_reported_as_worker() {
    if !may_be_others() {
        return;
    }
    let supervisor = start(&format!("[[access]]\nuid = {ALICE}\n"), SHELL);
    let file = supervisor.file("script");
    std::fs::write(&file, script(&supervisor, "SUBMIT")).unwrap();
    let ran = submit(&supervisor, (ALICE, NOBODYS, ""), &["shell", "--payload-file", file.to_str().unwrap()]);
    assert_eq!(ran.end(), (1, "failed/exit_77".into()), "{ran:?}");
    assert_eq!(supervisor.wait_events("worker_refused", 1)[0]["bulkhead"], "shell");
    assert_eq!(supervisor.events("access_refused").len(), 0);
}

#[test]
fn connection_from_exited_worker_process_is_rejected() {
    let supervisor = Supervisor::start(SHELL);
    // The stopped supervisor accepts no connections, so the connecting process exits before the supervisor looks up its
    // credentials.
    let script = "touch begun; while [ ! -e stopped ]; do sleep 0.01; done; CALLER leave JOBS > said; \
                  touch left; while [ ! -s said ]; do sleep 0.01; done; cat said";
    let told = std::thread::scope(|scope| {
        let told = scope.spawn(|| run_in_worker(&supervisor, script));
        wait_for("the script runs", || supervisor.file("begun").exists().then_some(()));
        let paused = supervisor.pause();
        supervisor.touch("stopped");
        wait_for("the connecting process has exited", || supervisor.file("left").exists().then_some(()));
        drop(paused);
        told.join().unwrap()
    });
    assert!(told.contains("the process that connected has exited"), "{told}");
}

#[test]
fn client_outside_pid_namespace_is_accepted() {
    if !may_be_others() {
        return;
    }
    // The supervisor runs in a separate PID namespace, and the client runs outside that namespace.
    let folder = tempfile::tempdir().unwrap();
    let config = format!(
        "[supervisor]\nsocket = \"jobs.sock\"\nadmin = \"admin.sock\"\n{}",
        ECHO.replace("MISBEHAVE", programs().join("misbehave").to_str().unwrap())
    );
    std::fs::write(folder.path().join("workers.toml"), config).unwrap();
    let log = std::fs::File::create(folder.path().join("log")).unwrap();
    let launched = Command::new("unshare")
        .args(["--pid", "--fork", "--mount-proc", "--kill-child"])
        .arg(programs().join("bulkhead-supervisor"))
        .arg("--config")
        .arg(folder.path().join("workers.toml"))
        .stdin(Stdio::null())
        .stderr(log)
        .spawn();
    let Ok(child) = launched else {
        not_run!("this machine has no unshare(1)");
        return;
    };
    let mut supervisor = Supervisor { child, folder };
    let is_ready = wait_for("the supervisor is ready or has exited", || {
        let has_ended = supervisor.child.try_wait().unwrap().is_some();
        let is_ready = supervisor.try_get("/readyz").is_some_and(|(status, _)| status == 200);
        (has_ended || is_ready).then_some(is_ready)
    });
    if !is_ready && supervisor.log().contains("unshare") {
        not_run!("this machine cannot create a PID namespace: {}", supervisor.log());
        return;
    }
    assert!(is_ready, "{}", supervisor.log());
    Ran::of(supervisor.command().args(["submit", "front", "--json"])).is_ok();
}

#[test]
fn worker_connection_attempts_do_not_block_clients() {
    let _turn = heavy();
    let supervisor = Supervisor::start(SHELL);
    let began = Instant::now();
    std::thread::scope(|scope| {
        let knocks = scope.spawn(|| run_in_worker(&supervisor, "CALLER knock JOBS 3000"));
        for _ in 0..20 {
            Ran::of(supervisor.command().args(["submit", "b", "--json"])).is_ok();
        }
        assert_eq!(knocks.join().unwrap(), "3000\n");
    });
    let events = wait_for("the events count all rejections", || {
        let events = supervisor.events("worker_refused");
        let count: u64 = events.iter().filter_map(|event| event["refused"].as_u64()).sum();
        (count == 3000).then_some(events)
    });
    assert!(events.len() <= 1 + began.elapsed().as_secs() as usize / 10, "{events:?}");
}

#[test]
fn connection_from_exited_client_process_is_rejected() {
    let supervisor = Supervisor::start(ECHO);
    supervisor.signal(Signal::SIGSTOP);
    let mut caller = Command::new(programs().join("caller"))
        .arg("leave")
        .arg(supervisor.socket())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    assert!(caller.wait().unwrap().success());
    supervisor.signal(Signal::SIGCONT);
    let mut told = Vec::new();
    caller.stdout.take().unwrap().read_to_end(&mut told).unwrap();
    let told = String::from_utf8_lossy(&told);
    assert!(told.contains("the process that connected has exited"), "{told}");
    let events = supervisor.wait_events("access_refused", 1);
    assert_eq!((&events[0]["severity"], &events[0]["reason"]), (&"info".into(), &"unauthenticated".into()));
}
