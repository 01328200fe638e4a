//! Programs of `exec` that one worker runs, at once or one after the other: what they must not be able to do to
//! each other, and what is left of one for the next.

use std::path::{Path, PathBuf};

use bulkhead_client::JobError;
use bulkhead_tests::attempts::{BETWEEN_PROGRAMS, Expected};
use bulkhead_tests::confined::{
    DEFAULT_LAYERS, Ended, NOBODY, Place, STRICT_LAYERS, Setup, has_layers, is_root,
};
use bulkhead_tests::wait_for;
use serde_json::json;

const NONE: &str = "profile = \"none\"";
const DEFAULT: &str = "profile = \"default\"";
const STRICT: &str = "profile = \"strict\", best_effort = [\"identity\"]";
const GIVEN: &str = ", read = [\"PLACE/read\"], write = [\"PLACE/write\"]";

/// The operation `hold` leaves its number and a temporary file, and waits until it is told to end; every other
/// one is an attempt.
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

/// Every attempt of one program against another that runs at the same time. The other one's job ends as if
/// nothing had been.
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
    let (pid, file) = told.trim().split_once(' ').expect("two words");
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
        // The folder that the last attempt shut is open for the next program.
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

/// An unprivileged supervisor's programs can do no more; what is refused may be refused for other reasons.
fn refused(ended: &Ended) -> bool {
    matches!(ended, Ended::Refused(..))
}

#[test]
fn programs_of_one_worker_do_not_reach_each_other_under_default() {
    if has_layers(DEFAULT_LAYERS) {
        attack(DEFAULT, None, exactly, |number| BETWEEN_PROGRAMS[number].default);
        if is_root() {
            attack(DEFAULT, Some(NOBODY), refused, |number| BETWEEN_PROGRAMS[number].default);
        }
    }
}

#[test]
fn programs_of_one_worker_do_not_reach_each_other_under_strict() {
    if has_layers(STRICT_LAYERS) {
        attack(STRICT, None, exactly, |number| BETWEEN_PROGRAMS[number].strict);
        if is_root() {
            attack(STRICT, Some(NOBODY), refused, |number| BETWEEN_PROGRAMS[number].strict);
        }
    }
}

/// Also shows that the attempts work.
#[test]
fn without_a_sandbox_they_do() {
    if is_root() {
        attack(NONE, None, exactly, |number| BETWEEN_PROGRAMS[number].none);
    }
}

fn text(result: Result<bulkhead_client::Reply, JobError>) -> String {
    String::from_utf8(result.unwrap().payload().to_vec()).unwrap()
}

#[test]
fn nothing_is_left_of_one_program_for_the_next() {
    let users: &[Option<u32>] = if is_root() { &[None, Some(NOBODY)] } else { &[None] };
    for (profile, layers) in [(DEFAULT, DEFAULT_LAYERS), (STRICT, STRICT_LAYERS)] {
        for user in users.iter().filter(|_| has_layers(layers)) {
            let place = start(profile, "", *user);
            let client = place.client();
            let worker = place.worker("x");
            let on_disk = |told: &str| Path::new(&format!("/proc/{worker}/root")).join(&told[1..]);
            let mut seen: Vec<PathBuf> = Vec::new();
            for operation in ["leave", "look", "fill", "look"] {
                let told = text(client.job("x", "").operation(operation).send());
                assert!(told.starts_with('/') && !told.contains('\n'), "{operation}, {profile}: {told}");
                assert!(!seen.contains(&PathBuf::from(&told)), "{told} was there before");
                let folder = on_disk(&told);
                if operation == "fill" {
                    // What takes long is removed beside the next jobs, which cannot reach it.
                    wait_for("the folder is removed", || (!folder.exists()).then_some(()));
                } else {
                    assert!(!folder.exists(), "{operation}, {profile}: {} is left", folder.display());
                }
                seen.push(told.into());
            }
            assert_eq!(place.supervisor.worker_pids("x"), [worker]);
        }
    }
}

#[test]
fn programs_that_nothing_keeps_apart_run_one_at_a_time_or_by_best_effort() {
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
    assert!(body.contains("max_in_flight must be at most 1"), "{body}");
    assert_eq!(resize("risk").0, 200);
}

#[test]
fn an_executable_without_a_shebang_is_not_run_by_a_shell() {
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
