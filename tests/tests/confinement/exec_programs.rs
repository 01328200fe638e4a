//! Programs run by `exec` that share a worker, at the same time or one after another. Covers attempts against each
//! other, and leftover files and processes. Also covers exit statuses and output of programs.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bulkhead_client::{Fault, JobError, Verdict};
use bulkhead_tests::attempts::{BETWEEN_PROGRAMS, Expected};
use bulkhead_tests::confined::{
    DEFAULT_LAYERS, Ended, NOBODY, Place, STRICT_LAYERS, Setup, has_layers, is_root,
};
use bulkhead_tests::http::Place as Http;
use bulkhead_tests::{descriptors, not_run, processes_with, wait_for};
use serde_json::json;

const NONE: &str = "profile = \"none\"";
const DEFAULT: &str = "profile = \"default\"";
const STRICT: &str = "profile = \"strict\", best_effort = [\"identity\"]";
const GIVEN: &str = ", read = [\"PLACE/read\"], write = [\"PLACE/write\"]";

/// Script that every program runs. `hold` writes its PID and the path of a temporary file, and then waits for the file
/// `go`. `leave` and `fill` create files in the temporary folder, and `look` lists them. All other operations are
/// attempts by the hostile program.
const SCRIPT: &str = "case $BULKHEAD_OPERATION in \
    hold) umask 0; echo secret > ${TMPDIR:-/tmp}/secret; cd PLACE/write; \
          echo $$ ${TMPDIR:-/tmp}/secret > told.new; mv told.new told; \
          n=0; while [ ! -e go ] && [ $n -lt 12000 ]; do sleep 0.01; n=$((n+1)); done; cat;; \
    leave) printf left > $TMPDIR/left; mkdir -p $TMPDIR/locked/inner; : > $TMPDIR/locked/inner/file; \
           chmod 0 $TMPDIR/locked/inner $TMPDIR/locked; (setsid sleep 1000 &) ; printf %s $TMPDIR; chmod 0 $TMPDIR;; \
    fill) mkdir -p $TMPDIR/a/b; n=0; while [ $n -lt 600 ]; do : > $TMPDIR/a/$n; n=$((n+1)); done; printf %s $TMPDIR;; \
    look) ls $TMPDIR/.. 2>/dev/null; ls -A $TMPDIR; printf %s $TMPDIR;; \
    *) exec HOSTILE once;; esac";

fn start(profile: &str, more: &str, user: Option<u32>) -> Place {
    let given = if profile == NONE { "" } else { GIVEN };
    let bulkheads = format!(
        "[bulkhead.x]\nexec = [\"/bin/sh\", \"-c\", {SCRIPT:?}]\ncwd = \"work\"\nmax_queue = 10\n\
         deadline = \"120s\"\nenv = {{ PATH = \"/usr/bin:/bin\" }}\n{more}\nsandbox = {{ {profile}{given} }}\n"
    );
    Setup { bulkheads: &bulkheads, user, ..Setup::default() }.start()
}

/// Runs a program that makes each attempt against another running program. The attacked program's job must succeed.
fn attack(
    profile: &str,
    user: Option<u32>,
    judge: impl Fn(&Ended) -> bool + Copy,
    expected: fn(usize) -> Expected,
) {
    let place = start(profile, "max_in_flight = 2", user);
    let client = place.client();
    let worker = place.worker("x");
    let victim = client.job("x", "payload of A").operation("hold").start().unwrap();
    let told =
        wait_for("the other program runs", || std::fs::read_to_string(place.path().join("write/told")).ok());
    let (pid, file) = told.trim().split_once(' ').expect("the file contains a pid and a path");
    let mut targets = place.targets("x");
    targets["sibling"] = json!(pid.parse::<u32>().unwrap());
    targets["temporary file of sibling"] = json!(file);
    let mut wrong = Vec::new();
    for (number, attempt) in BETWEEN_PROGRAMS.iter().enumerate() {
        let ended = place.attempt(&client, "x", attempt.name, &targets);
        if !ended.is(expected(number)) && !judge(&ended) {
            wrong.push(format!("{}: {ended:?}, expected {:?}", attempt.name, expected(number)));
        }
    }
    std::fs::write(place.path().join("write/go"), "").unwrap();
    assert_eq!(victim.wait().unwrap().payload(), b"payload of A");
    if profile != NONE {
        // The last attempt made the folder inaccessible. The host restores access for the next program.
        assert!(text(client.job("x", "").operation("look").send()).starts_with('/'));
    }
    if profile == NONE {
        let _ = std::fs::remove_file("/tmp/secret");
    }
    assert!(wrong.is_empty(), "under {profile}:\n{}", wrong.join("\n"));
    assert_eq!(place.supervisor.worker_pids("x"), [worker]);
}

fn exactly(_: &Ended) -> bool {
    false
}

/// Returns true if the attempt was refused by any layer. Used for unprivileged supervisors, because the refusing layer
/// can differ from the expected layer.
fn refused(ended: &Ended) -> bool {
    matches!(ended, Ended::Refused(..))
}

#[test]
fn default_profile_isolates_programs_sharing_a_worker() {
    if has_layers(DEFAULT_LAYERS) {
        attack(DEFAULT, None, exactly, |number| BETWEEN_PROGRAMS[number].default);
        if is_root() {
            attack(DEFAULT, Some(NOBODY), refused, |number| BETWEEN_PROGRAMS[number].default);
        }
    }
}

#[test]
fn strict_profile_isolates_programs_sharing_a_worker() {
    if has_layers(STRICT_LAYERS) {
        attack(STRICT, None, exactly, |number| BETWEEN_PROGRAMS[number].strict);
        if is_root() {
            attack(STRICT, Some(NOBODY), refused, |number| BETWEEN_PROGRAMS[number].strict);
        }
    }
}

/// Checks that the attempts succeed without confinement.
#[test]
fn programs_without_sandbox_can_reach_each_other() {
    if is_root() {
        attack(NONE, None, exactly, |number| BETWEEN_PROGRAMS[number].none);
    }
}

fn text(result: Result<bulkhead_client::Reply, JobError>) -> String {
    String::from_utf8(result.unwrap().payload().to_vec()).unwrap()
}

#[test]
fn files_and_processes_of_a_program_are_removed_when_it_exits() {
    let users: &[Option<u32>] = if is_root() { &[None, Some(NOBODY)] } else { &[None] };
    for (profile, layers) in [(DEFAULT, DEFAULT_LAYERS), (STRICT, STRICT_LAYERS)] {
        for user in users.iter().filter(|_| has_layers(layers)) {
            let place = start(profile, "output_grace = \"0s\"", *user);
            let client = place.client();
            let worker = place.worker("x");
            let on_disk = |told: &str| Path::new(&format!("/proc/{worker}/root")).join(&told[1..]);
            let mut seen: Vec<PathBuf> = Vec::new();
            for operation in ["leave", "look", "fill", "look"] {
                let told = text(client.job("x", "").operation(operation).send());
                assert!(told.starts_with('/') && !told.contains('\n'), "{operation}, {profile}: {told}");
                assert!(!seen.contains(&PathBuf::from(&told)), "the folder {told} was used twice");
                let folder = on_disk(&told);
                if operation == "fill" {
                    // The host removes a large folder while it runs the next jobs, which cannot access the folder.
                    wait_for("the folder is removed", || (!folder.exists()).then_some(()));
                } else {
                    assert!(!folder.exists(), "{operation}, {profile}: {} still exists", folder.display());
                }
                seen.push(told.into());
            }
            assert_eq!(place.supervisor.worker_pids("x"), [worker]);
        }
    }
}

/// Without the `program_scopes` layer, a bulkhead can run programs concurrently only if `best_effort` lists
/// `program_scopes`.
#[test]
fn unisolated_programs_run_one_at_a_time() {
    let bulkhead = |name: &str, more: &str, sandbox: &str| {
        format!(
            "[bulkhead.{name}]\nexec = [\"/bin/cat\"]\ncwd = \"work\"\n{more}\n\
             sandbox = {{ profile = \"default\"{sandbox} }}\n"
        )
    };
    let bulkheads = bulkhead("several", "max_in_flight = 2", "")
        + &bulkhead("single", "", "")
        + &bulkhead("risk", "max_in_flight = 2", ", best_effort = [\"program_scopes\"]");
    let setup = Setup { bulkheads: &bulkheads, without: "landlock_scopes", ..Setup::default() };
    let place = setup.start();
    let why = place.failure("several");
    for word in ["program_scopes", "best_effort", "max_in_flight = 1"] {
        assert!(why.contains(word), "{word} is not in: {why}");
    }
    for name in ["single", "risk"] {
        assert_eq!(text(place.client().job(name, "here").send()), "here");
    }
    let missing = |name: &str| place.confinement(name)[0].missing.clone();
    assert!(missing("risk").contains(&"program_scopes".to_owned()));
    assert!(!missing("single").contains(&"program_scopes".to_owned()));
    let resize = |name: &str| {
        let (status, body) =
            place.supervisor.patch(&format!("/v1/bulkheads/{name}"), "{\"max_in_flight\": 2}");
        (status, body.to_string())
    };
    let (status, body) = resize("single");
    assert!(status == 422 || status == 400 || status == 409, "{status}: {body}");
    assert!(body.contains("max_in_flight must not exceed 1"), "{body}");
    assert_eq!(resize("risk").0, 200);
}

#[test]
fn script_without_shebang_fails() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("program");
    std::fs::write(&program, "echo run by a shell\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let bulkheads = format!("[bulkhead.x]\nexec = [{program:?}]\ncwd = \"work\"\n");
    let place = Setup { bulkheads: &bulkheads, ..Setup::default() }.start();
    let error = place.client().job("x", "").send().unwrap_err().to_string();
    assert!(error.contains("#!") && error.contains("program"), "{error}");
}

// Exit and output of a program.

const PROFILES: [(&str, &[&str]); 3] = [(NONE, &[]), (DEFAULT, DEFAULT_LAYERS), (STRICT, STRICT_LAYERS)];

/// Starts a bulkhead `x` that runs each job's operation as a shell command.
fn start_shell(profile: &str, more: &str) -> Place {
    let given = if profile == NONE { "" } else { GIVEN };
    let bulkheads = format!(
        "[bulkhead.x]\nexec = [\"/bin/sh\", \"-c\", 'eval \"$BULKHEAD_OPERATION\"']\nmax_queue = 10\n\
         deadline = \"120s\"\nenv = {{ PATH = \"/usr/bin:/bin\" }}\n{more}\nsandbox = {{ {profile}{given} }}\n"
    );
    Setup { bulkheads: &bulkheads, ..Setup::default() }.start()
}

/// Runs a test under each profile that this machine supports.
fn under_each_profile(more: &str, test: impl Fn(&Place)) {
    for (profile, _) in PROFILES.iter().filter(|(_, layers)| layers.is_empty() || has_layers(layers)) {
        test(&start_shell(profile, more));
    }
}

fn code_of(error: &JobError) -> &str {
    error.outcome().and_then(|outcome| outcome.verdict.reason()).unwrap_or_default()
}

/// Returns a unique duration for a `sleep` command, by which a test can recognise its own process.
fn own_pause() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1000);
    format!("{}{}", NEXT.fetch_add(1, Ordering::Relaxed), std::process::id())
}

#[test]
fn output_of_processes_that_outlive_the_program_is_included() {
    under_each_profile("output_grace = \"100s\"", |place| {
        let client = place.client();
        // The payload exceeds the capacity of the pipes, so the host still writes after the program has exited.
        let payload = "some words\n".repeat(100_000);
        for filter in ["tr a-z A-Z", "setsid tr a-z A-Z", "sh -c 'tr a-z A-Z & exit 0'"] {
            let operation = format!("exec 3<&0; {} <&3 & exit 0", filter.replace("A-Z &", "A-Z <&3 &"));
            let result = text(client.job("x", payload.clone()).operation(operation).send());
            assert!(
                result == payload.to_uppercase(),
                "{filter}: {} of {} bytes",
                result.len(),
                payload.len()
            );
        }
    });
}

/// Shell command that waits until the most recent background process has executed `sleep`.
const SLEEPS: &str = "until read -r a b c < /proc/$!/stat && [ $b = '(sleep)' ]; do :; done";

#[test]
fn output_still_open_after_output_grace_fails_the_job() {
    under_each_profile("output_grace = \"50ms\"", |place| {
        let pause = own_pause();
        // The program exits once the other process has executed `sleep`, because the error names that process.
        let operation = format!("sleep {pause} & {SLEEPS}; echo started");
        let error = place.client().job("x", "").operation(operation).send().unwrap_err();
        assert_eq!(code_of(&error), "output_incomplete");
        assert_eq!(error.payload(), b"started\n");
        assert_eq!((error.outcome().unwrap().status, error.is_retryable()), (Some(0), false));
        let message = error.to_string();
        for word in ["sleep (pid ", "50 ms", "redirect", "output_grace = \"0s\""] {
            assert!(message.contains(word), "{word} is not in: {message}");
        }
        assert!(processes_with(&pause).is_empty());
        // The code is that of the exit status, so only the message tells that output can be missing.
        let operation = format!("sleep {pause} & {SLEEPS}; echo why >&2; exit 3");
        let error = place.client().job("x", "").operation(operation).send().unwrap_err();
        assert_eq!(code_of(&error), "exit_3");
        let message = error.to_string();
        assert!(message.contains("why") && message.contains("sleep (pid "), "{message}");
    });
}

#[test]
fn zero_output_grace_ends_output_when_the_program_exits() {
    under_each_profile("output_grace = \"0s\"", |place| {
        let pause = own_pause();
        let operation = format!("sleep {pause} & echo started");
        assert_eq!(text(place.client().job("x", "").operation(operation).send()), "started\n");
        assert!(processes_with(&pause).is_empty());
    });
}

#[test]
fn failed_program_returns_its_output() {
    let place = start_shell(NONE, "output_grace = \"100s\"");
    let client = place.client();
    let error =
        client.job("x", "").operation("echo early; (sleep 0.1; echo late) & exit 3").send().unwrap_err();
    assert_eq!((code_of(&error), error.payload()), ("exit_3", &b"early\nlate\n"[..]));
    assert_eq!(error.outcome().unwrap().status, Some(3));
    // Only the first 64 KiB reach the client.
    let operation = "yes | head -c 100000; exit 4";
    let error = client.job("x", "").operation(operation).send().unwrap_err();
    assert_eq!((code_of(&error), error.payload().len()), ("exit_4", 64 * 1024));
    assert_eq!(&error.payload()[..4], b"y\ny\n");
    let http = Http::of(&place.supervisor).job("x", "echo some; exit 5", &[], b"");
    let problem = http.problem(422);
    assert_eq!((&problem["code"], &problem["exit_code"]), (&json!("exit_5"), &json!(5)));
    assert_eq!((&problem["payload"], http.header("bulkhead-status")), (&json!("c29tZQo="), "5"));
    assert_eq!(Http::of(&place.supervisor).job("x", "true", &[], b"").header("bulkhead-status"), "0");
    let file = place.path().join("write/out");
    let submit = |arguments: &[&str]| {
        let mut command = place.supervisor.command();
        command.args(arguments).args(["submit", "-n", "x", "echo some; exit 6"]);
        command
    };
    let output = bulkhead_tests::output(submit(&[]).arg("--output").arg(&file));
    assert_eq!((output.status.code(), &*std::fs::read(&file).unwrap()), (Some(1), &b"some\n"[..]));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains(", exit status 6, "), "{told}");
    let output = bulkhead_tests::output(&mut submit(&[]));
    assert_eq!((output.status.code(), &*output.stdout), (Some(1), &b"some\n"[..]));
    let line: serde_json::Value =
        serde_json::from_slice(&bulkhead_tests::output(&mut submit(&["--json"])).stdout).unwrap();
    assert_eq!((&line["status"], &line["payload"]), (&json!(6), &json!("c29tZQo=")));
}

/// The host cannot tell a forbidden call that the kernel does not name from a signal that a process has sent.
#[test]
fn sent_sigsys_is_named_as_a_possible_cause() {
    if !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let place = start_shell(DEFAULT, "");
    let error = place.client().job("x", "").operation("kill -SYS $$").send().unwrap_err();
    let message = error.to_string();
    assert!(message.contains("killed by SIGSYS") && message.contains("a process sent"), "{message}");
}

/// A call that the host makes for each job is refused, and other calls can be denied.
#[test]
fn exec_worker_runs_jobs_with_denied_calls() {
    if !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let calls =
        "syscalls = { deny = [\"symlink\", \"symlinkat\", \"socket\", \"mkdir\", \"kill\", \"chmod\"] }";
    let place = start_shell(&format!("{DEFAULT}, {calls}"), "");
    let job = |operation: &str| place.client().job("x", "").operation(operation).send();
    assert_eq!(text(job("echo some > file; sleep 1000 > /dev/null & echo ok")), "ok\n");
    assert_eq!(text(job("cat file || echo removed")), "removed\n");
}

/// The grace period is an hour, so a job that waited for the end of the grace period would miss its deadline.
#[test]
fn job_that_already_failed_skips_output_grace() {
    under_each_profile("output_grace = \"1h\"\nmax_result = \"1MiB\"", |place| {
        let client = place.client();
        let job = |operation: &str| client.job("x", "").operation(operation);
        let pause = own_pause();
        let died = job(&format!("sleep {pause} & kill -9 $$")).send().unwrap_err();
        assert_eq!(code_of(&died), "signal", "{died}");
        let large = job("yes & exit 0").send().unwrap_err();
        assert_eq!(code_of(&large), "result_too_large", "{large}");
        assert_eq!(text(job(&format!("echo out; sleep {pause} > /dev/null & exit 0")).send()), "out\n");
        // On a busy machine, the deadline can pass before the worker has begun the job.
        let late = wait_for("the worker begins the job before the deadline", || {
            let late = job(&format!("sleep {pause} & exit 0")).deadline(Duration::from_millis(300)).send();
            late.err().filter(|late| code_of(late) != "queued")
        });
        assert_eq!(code_of(&late), "running");
        let job = job(&format!("sleep {pause} & exit 0")).start().unwrap();
        wait_for("the program has left a process", || (!processes_with(&pause).is_empty()).then_some(()));
        job.cancel();
        assert!(matches!(job.wait(), Err(JobError::Cancelled(_))));
        wait_for("all processes of the job are killed", || processes_with(&pause).is_empty().then_some(()));
    });
}

#[test]
fn orphans_within_output_grace_survive_other_programs() {
    // The orphan creates `held` once the job's program is a zombie. The pause lasts several clock ticks, so that the
    // orphan is older than the other programs.
    let ended = "until read -r a b s c < /proc/'$$'/stat && [ $s = Z ]; do :; done";
    let hold = "sleep 0.05; cd PLACE/write; : > held; until [ -e go ]; do sleep 0.01; done; tr a-z A-Z <&3";
    let starts = [
        format!("sh -c '{ended}; {hold}'"),
        format!("setsid sh -c '{ended}; {hold}'"),
        format!("({}; setsid sh -c '{hold}' &)", ended.replace('\'', "")),
    ];
    under_each_profile("output_grace = \"100s\"\nmax_in_flight = 2", |place| {
        let client = place.client();
        let folder = place.path().join("write");
        for start in &starts {
            let operation = format!("exec 3<&0; {start} & exit 0");
            let operation = operation.replace("PLACE", place.path().to_str().unwrap());
            let payload = "word ".repeat(50_000);
            let kept = client.job("x", payload.clone()).operation(operation).start().unwrap();
            wait_for("the orphan has created `held`", || folder.join("held").exists().then_some(()));
            let pause = own_pause();
            for setsid in ["", "setsid"] {
                let operation =
                    format!("({setsid} sleep {pause} > /dev/null &); {setsid} sleep {pause} > /dev/null &");
                assert_eq!(text(client.job("x", "").operation(operation.clone()).send()), "");
                assert!(processes_with(&pause).is_empty(), "processes of the other program are left");
                let crashes = client.job("x", "").operation(operation + " kill -9 $$");
                assert_eq!(code_of(&crashes.send().unwrap_err()), "signal");
                assert!(processes_with(&pause).is_empty(), "processes of the crashed program are left");
            }
            std::fs::write(folder.join("go"), "").unwrap();
            assert!(text(kept.wait()) == payload.to_uppercase(), "{start}");
            ["held", "go"].iter().for_each(|name| std::fs::remove_file(folder.join(name)).unwrap());
        }
    });
}

/// The other profiles forbid `CLONE_PARENT`.
#[test]
fn process_with_the_hosts_thread_as_parent_is_killed() {
    if !std::process::Command::new("perl").args(["-e", "1"]).status().is_ok_and(|status| status.success()) {
        return not_run!("perl is not installed");
    }
    let place = start_shell(NONE, "");
    // With CLONE_VFORK, the program continues once the new process has executed its command.
    let flags = libc::CLONE_PARENT | libc::CLONE_VFORK | libc::SIGCHLD;
    for setsid in ["", "'setsid', "] {
        let pause = own_pause();
        let operation = format!(
            "exec perl -e \"my \\$pid = syscall({}, {flags}, 0, 0, 0, 0); \
             \\$pid or do {{ open(STDOUT, '>', '/dev/null'); exec({setsid}'sleep', '{pause}'); exit 1 }}; \
             print 'started' if \\$pid > 0\"",
            libc::SYS_clone
        );
        assert_eq!(text(place.client().job("x", "").operation(operation).send()), "started");
        assert!(processes_with(&pause).is_empty());
    }
}

#[test]
fn exit_status_key_classifies_exit_statuses() {
    let more = "exit_status = { ok = [0, 1], caller = [2], retryable = [3] }\n\
                breaker = { min_calls = 3, failure_rate = 0.5, window = \"1m\" }";
    let place = start_shell(NONE, more);
    let client = place.client();
    let grep = |payload: &str| client.job("x", payload).operation("grep -h needle - $BULKHEAD_TENANT");
    for _ in 0..5 {
        let nothing = grep("hay\n").send().unwrap();
        assert_eq!((nothing.payload(), nothing.outcome().status), (&b""[..], Some(1)));
        let wrong = grep("hay\n").tenant("/no/such/file").send().unwrap_err();
        let outcome = wrong.outcome().unwrap();
        assert!(
            matches!(&outcome.verdict, Verdict::Failed(failure) if failure.fault == Fault::Caller),
            "{wrong}"
        );
    }
    assert_eq!(place.supervisor.state("x").breaker.as_str(), "closed");
    let found = grep("a needle\n").send().unwrap();
    assert_eq!((found.payload(), found.outcome().status), (&b"a needle\n"[..], Some(0)));
    let error = client.job("x", "").operation("exit 3").send().unwrap_err();
    assert!(error.is_retryable() && code_of(&error) == "exit_3", "{error}");
    // With `exit_status`, the statuses 64 and 75 have no special meaning.
    for status in [64, 75] {
        let error = client.job("x", "").operation(format!("exit {status}")).send().unwrap_err();
        let outcome = error.outcome().unwrap();
        assert!(matches!(&outcome.verdict, Verdict::Failed(failure) if failure.fault == Fault::Dependency));
        assert!(!error.is_retryable(), "{error}");
    }
}

#[test]
fn program_can_use_files_for_payload_and_result() {
    under_each_profile(
        "files = { input = \"in.txt\", output = \"out.txt\" }\nmax_result = \"1MiB\"",
        |place| {
            let client = place.client();
            let job = |operation: &str| client.job("x", "payload").operation(operation).send();
            let beside = "[ -z \"$(cat)\" ] && echo logged && cp in.txt in.txt.bak && tr a-z A-Z < in.txt.bak > out.txt";
            let done = job(beside).unwrap();
            assert_eq!((done.payload(), done.outcome().status), (&b"PAYLOAD"[..], Some(0)));
            wait_for("standard output is in the log", || {
                place.supervisor.log().contains("logged").then_some(())
            });
            assert_eq!(text(job("ls -A > out.txt; [ $PWD = $TMPDIR ]")), "in.txt\nout.txt\n");
            for (operation, why) in [
                (":", "No such file"),
                ("ln -s /etc/hostname out.txt", "symbolic link"),
                ("mkdir out.txt", "not a regular file"),
            ] {
                let error = job(operation).unwrap_err();
                assert_eq!(code_of(&error), "no_output", "{error}");
                assert!(
                    error.to_string().contains(why) && error.to_string().contains("`out.txt`"),
                    "{error}"
                );
            }
            let large = job("head -c 1048577 /dev/zero > out.txt").unwrap_err();
            assert_eq!(code_of(&large), "result_too_large", "{large}");
            let failed = job("echo some > out.txt; echo chatter; echo why >&2; exit 3").unwrap_err();
            assert_eq!((code_of(&failed), failed.payload()), ("exit_3", &b""[..]));
            let message = failed.to_string();
            assert!(message.contains("why") && !message.contains("chatter"), "{message}");
            wait_for("all of standard output is in the log", || {
                place.supervisor.log().contains("chatter").then_some(())
            });
            assert_eq!(text(job("echo some > out.txt; chmod 0 .")), "some\n");
        },
    );
}

#[test]
fn result_file_is_complete_if_written_after_exit() {
    under_each_profile("files = { output = \"out\" }\noutput_grace = \"100s\"", |place| {
        let late = "cat > >(sleep 0.1; tr a-z A-Z > out)";
        let result = place.client().job("x", "late").operation(format!("exec bash -c '{late}'")).send();
        assert_eq!(text(result), "LATE");
        // The host has not seen the new session before its parent exits.
        let late = "(until read -r a b s c < /proc/$$/stat && [ $s = Z ]; do :; done; \
                    setsid sh -c 'sleep 0.1; echo late > out' &) & exit 0";
        for _ in 0..5 {
            assert_eq!(text(place.client().job("x", "").operation(late).send()), "late\n");
        }
    });
    let place = start_shell(NONE, "files = { output = \"out\" }\noutput_grace = \"50ms\"");
    let pause = own_pause();
    let send = |operation: String| place.client().job("x", "").operation(operation).send();
    // A remaining process that does not hold the file open does not delay the result.
    assert_eq!(text(send(format!("sleep {pause} > /dev/null & echo done > out"))), "done\n");
    let error = send(format!("(echo some; exec sleep {pause}) > out & {SLEEPS}")).unwrap_err();
    assert_eq!((code_of(&error), error.payload()), ("output_incomplete", &b"some\n"[..]));
    assert!(error.to_string().contains("file `out` was still open in sleep (pid "), "{error}");
    assert!(processes_with(&pause).is_empty());
    let error = send("echo cannot open display >&2".to_owned()).unwrap_err();
    assert!(code_of(&error) == "no_output" && error.to_string().contains("cannot open display"), "{error}");
}

#[test]
fn fifo_as_result_file_fails_the_job() {
    let place = start_shell(NONE, "files = { output = \"out\" }");
    let error = place.client().job("x", "").operation("mkfifo out").send().unwrap_err();
    assert_eq!(code_of(&error), "no_output", "{error}");
}

#[test]
fn input_and_output_files_can_be_used_separately() {
    let input = start_shell(NONE, "files = { input = \"-\" }");
    assert_eq!(text(input.client().job("x", "payload").operation("cat ./-").send()), "payload");
    let output = start_shell(NONE, "files = { output = \"out\" }");
    assert_eq!(text(output.client().job("x", "payload").operation("cat > out").send()), "payload");
}

#[test]
fn payload_file_larger_than_sandbox_tmp_fails_the_job() {
    if has_layers(STRICT_LAYERS) {
        let place = start_shell(&format!("{STRICT}, tmp = \"1MiB\""), "files = { input = \"in\" }");
        let error = place.client().job("x", vec![0; 2 << 20]).operation("cat in").send().unwrap_err();
        assert!(error.to_string().contains("`sandbox.tmp`"), "{error}");
        let fits = place.client().job("x", vec![0; 1 << 16]).operation("wc -c < in").send();
        assert_eq!(text(fits), "65536\n", "the payload of the previous job uses no space");
    }
}

#[test]
fn host_holds_no_descriptors_for_readable_paths() {
    if !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let paths: Vec<PathBuf> =
        std::fs::read_dir("/usr/bin").unwrap().flatten().map(|entry| entry.path()).take(100).collect();
    let bulkhead = |name: &str, read: &[PathBuf]| {
        format!("[bulkhead.{name}]\nexec = [\"/bin/cat\"]\nsandbox = {{ {DEFAULT}, read = {read:?} }}\n")
    };
    let bulkheads = bulkhead("few", &[]) + &bulkhead("many", &paths);
    let place = Setup { bulkheads: &bulkheads, ..Setup::default() }.start();
    let serve = |name: &str| {
        assert_eq!(text(place.client().job(name, "here").send()), "here");
        place.worker(name)
    };
    let (many, few) = (serve("many"), serve("few"));
    // A host may close its last descriptors only after it has sent the outcome.
    wait_for("both hosts have the same number of descriptors", || {
        (descriptors(many) == descriptors(few)).then_some(())
    });
}
