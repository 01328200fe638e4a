//! Runs the hostile worker under each profile. The table in `bulkhead_tests::attempts` lists the attempts and the
//! expected results.

use std::collections::BTreeSet;
use std::process::Command;

use bulkhead_tests::attempts::{
    ATTEMPTS, Attempt, ELSEWHERE, Expected, KERNELS_OWN, OF_A_SHARED_ID, OF_ONE_USER, OF_PROGRAMS,
    OF_SHARED_PROCESSES, Setting, markdown,
};
use bulkhead_tests::confined::{
    DEFAULT_LAYERS, Ended, Ground, NOBODY, Place, STRICT_LAYERS, Setup, has_layers, is_root,
};
use bulkhead_tests::subuid::User;
use bulkhead_tests::{descriptors, heavy, not_run, programs, refuses_descriptors, wait_for};

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/confinement/attempts.md");
const MARKER: &str = "<!-- attempts -->\n";

fn all() -> impl Iterator<Item = &'static Attempt> {
    ATTEMPTS.iter().flat_map(|(_, attempts)| *attempts)
}

const WORKER: &str = "command = [\"HOSTILE\"]";
const PROGRAM: &str = "exec = [\"HOSTILE\", \"once\"]";

/// Sandbox keys of the confined workers. The workers run as the supervisor's user, because a separate user ID could
/// hide the failure of another layer.
const GIVEN: &str = "read = [\"PLACE/read\"], write = [\"PLACE/write\"], tmp = \"1MiB\"";
const NONE: &str = "profile = \"none\"";
const DEFAULT: &str = "profile = \"default\", user = \"shared\"";
const STRICT: &str = "profile = \"strict\", user = \"shared\"";

/// Returns the configuration of a target bulkhead, and of one bulkhead for each sandbox setting. Each attempt runs
/// in a fresh process.
fn bulkheads(runs: &str, profile: &str) -> String {
    let given = if profile == NONE { String::new() } else { format!(", {GIVEN}") };
    let bulkhead = |name: &str, more: &str| {
        format!(
            "[bulkhead.{name}]\n{runs}\ncwd = \"work\"\nmax_queue = 10\ndeadline = \"60s\"\n{more}\n\
             restart = {{ backoff = \"1ms\", backoff_max = \"1ms\", max = 1000 }}\n\
             sandbox = {{ {profile}{given} }}\n"
        )
    };
    let limits = "recycle = { jobs = 1 }\nrlimits = { nofile = 64, fsize = \"1MiB\", as = \"1GiB\" }";
    let plain = bulkhead("plain", "recycle = { jobs = 1 }");
    plain + &bulkhead("limited", limits) + &bulkhead("sibling", "")
}

/// Runs all attempts. Panics with a list of the attempts for which `judge` returns an error.
fn try_all(place: &Place, judge: impl Fn(&Attempt, &Ended) -> Result<(), String>) {
    let client = place.client();
    let is_own = |attempt: &&Attempt| {
        let is_skipped = KERNELS_OWN.contains(&attempt.name) && !refuses_descriptors();
        if is_skipped {
            not_run!("{}: this kernel cannot reject descriptors", attempt.name);
        }
        !is_skipped
    };
    let tried = all().filter(is_own).map(|attempt| {
        let bulkhead = match attempt.setting {
            Setting::Plain => "plain",
            Setting::Limited => "limited",
        };
        let ended = place.attempt(&client, bulkhead, attempt.name, &place.targets("sibling"));
        judge(attempt, &ended).map_err(|why| format!("{}: {ended:?}, {why}", attempt.name))
    });
    let wrong: Vec<String> = tried.filter_map(Result::err).collect();
    assert!(wrong.is_empty(), "{} attempts have an unexpected result:\n{}", wrong.len(), wrong.join("\n"));
}

fn as_written(expected: Expected, ended: &Ended) -> Result<(), String> {
    if ended.is(expected) { Ok(()) } else { Err(format!("expected {expected:?}")) }
}

fn start(runs: &str, profile: &str, user: Option<u32>) -> Place {
    Setup { bulkheads: &bulkheads(runs, profile), user, ..Setup::default() }.start()
}

#[test]
fn hostile_worker_implements_every_attempt_in_the_table() {
    let output = bulkhead_tests::output(Command::new(programs().join("hostile")).arg("list"));
    let listed = String::from_utf8(output.stdout).unwrap();
    let listed: BTreeSet<&str> = listed.lines().collect();
    let written: BTreeSet<&str> =
        all().map(|attempt| attempt.name).chain(ELSEWHERE.iter().copied()).collect();
    // Some system calls exist only on one architecture.
    let gone: Vec<_> = written.difference(&listed).collect();
    assert!(gone.is_empty() || !cfg!(target_arch = "x86_64"), "the worker does not implement {gone:?}");
    assert_eq!(listed.difference(&written).count(), 0, "{listed:?}");
    assert_eq!(written.len(), all().count() + ELSEWHERE.len(), "the table has a duplicate name");
    let others = OF_PROGRAMS.iter().map(|(name, ..)| name).chain(OF_ONE_USER).chain(OF_SHARED_PROCESSES);
    assert!(others.into_iter().all(|name| written.contains(name)));
}

#[test]
fn documented_table_matches_the_tested_attempts() {
    let docs = std::fs::read_to_string(DOCS).unwrap();
    let start = docs.find(MARKER).unwrap_or_else(|| panic!("{DOCS} has no {MARKER}")) + MARKER.len();
    let end = start + docs[start..].find("<!-- end -->").expect("the generated table ends");
    let current = format!("{}{}{}", &docs[..start], markdown(), &docs[end..]);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(DOCS, current).unwrap();
        return;
    }
    assert!(docs == current, "docs/confinement/attempts.md is outdated; run this test with UPDATE_DOCS=1");
}

/// Checks that every attempt succeeds without confinement. A refusal under another profile is then due to the layer
/// that the table names.
#[test]
fn attempts_succeed_without_confinement() {
    if is_root() {
        let place = start(WORKER, NONE, None);
        try_all(&place, |attempt, ended| as_written(attempt.none, ended));
    }
}

#[test]
fn default_profile_stops_attempts_as_documented() {
    if is_root() && has_layers(DEFAULT_LAYERS) {
        let place = start(WORKER, DEFAULT, None);
        try_all(&place, |attempt, ended| as_written(attempt.default, ended));
    }
}

/// Runs all attempts under an embedded supervisor. The `application` program judges the results by the same table.
fn stops_as_much_in_an_application(profile: &str, word: &str) {
    let ground = Ground::prepare(&bulkheads(WORKER, profile));
    std::fs::write(ground.path().join("targets"), ground.targets.to_string()).unwrap();
    let mut application = Command::new(programs().join("application"));
    application.args(["attempts", word]).current_dir(ground.path()).env("TMPDIR", ground.path().join("tmp"));
    let ended = application.output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let tried = String::from_utf8(ended.stdout).unwrap();
    assert!(tried.lines().count() > 100, "{tried}");
}

#[test]
fn default_profile_stops_escape_attempts_in_embedded_supervisor() {
    if is_root() && has_layers(DEFAULT_LAYERS) {
        stops_as_much_in_an_application(DEFAULT, "default");
    }
}

#[test]
fn strict_profile_stops_attempts_under_embedded_supervisor() {
    if is_root() && has_layers(STRICT_LAYERS) {
        stops_as_much_in_an_application(STRICT, "strict");
    }
}

/// Runs all attempts under a root supervisor. The configuration names no user, so each worker has a separate user ID.
fn stops_more_by_an_id(runs: &str, profile: &str, written: impl Fn(&Attempt) -> Expected) {
    let place = start(runs, profile, None);
    try_all(&place, |attempt, ended| match (OF_A_SHARED_ID.contains(&attempt.name), ended) {
        (true, Ended::Refused(..)) => Ok(()),
        (true, _) => Err("expected a refusal".into()),
        (false, ended) => no_more_than_written(written(attempt), ended),
    });
}

#[test]
fn default_profile_stops_more_attempts_with_separate_user_id() {
    if is_root() && has_layers(DEFAULT_LAYERS) {
        stops_more_by_an_id(WORKER, "profile = \"default\"", |attempt| attempt.default);
    }
}

#[test]
fn strict_profile_stops_attempts_with_separate_user_id() {
    if is_root() && has_layers(STRICT_LAYERS) {
        stops_more_by_an_id(WORKER, "profile = \"strict\"", |attempt| attempt.strict);
    }
}

/// Runs all attempts under an unprivileged supervisor whose user has IDs in `/etc/subuid`.
fn stops_more_by_an_id_of_subuid(profile: &str, written: impl Fn(&Attempt) -> Expected) {
    let Some(user) = User::with_ids() else { return };
    let bulkheads = bulkheads(WORKER, profile);
    let place = Setup { bulkheads: &bulkheads, user_with_ids: Some(user), ..Setup::default() }.start();
    try_all(&place, |attempt, ended| match (OF_A_SHARED_ID.contains(&attempt.name), ended) {
        (true, Ended::Refused(..)) => Ok(()),
        (true, _) => Err("expected a refusal".into()),
        (false, ended) => no_more_than_written(written(attempt), ended),
    });
}

#[test]
fn default_profile_stops_more_attempts_with_subuid_ids() {
    if is_root() && has_layers(DEFAULT_LAYERS) {
        // With IDs from `/etc/subuid`, the temporary folder is in memory, as under `strict`.
        let written = |attempt: &Attempt| match attempt.name {
            "fill-temporary-folder" => attempt.strict,
            _ => attempt.default,
        };
        stops_more_by_an_id_of_subuid("profile = \"default\"", written);
    }
}

#[test]
fn strict_profile_stops_attempts_with_subuid_ids() {
    if is_root() && has_layers(STRICT_LAYERS) {
        stops_more_by_an_id_of_subuid("profile = \"strict\"", |attempt| attempt.strict);
    }
}

/// Judges a program's attempt according to the table, with the exceptions in `OF_PROGRAMS`. A program has no link to
/// the supervisor, so attempts to use the link find no target.
fn as_written_of_program(
    attempt: &Attempt,
    ended: &Ended,
    profile: impl Fn(Expected, Expected) -> Expected,
) -> Result<(), String> {
    let otherwise = OF_PROGRAMS.iter().find(|(name, ..)| *name == attempt.name);
    let (default, strict) = otherwise.map_or((attempt.default, attempt.strict), |(_, d, s)| (*d, *s));
    if ended.had_no_target() { Ok(()) } else { as_written(profile(default, strict), ended) }
}

#[test]
fn default_profile_stops_attempts_by_programs() {
    if is_root() && has_layers(DEFAULT_LAYERS) {
        let place = start(PROGRAM, DEFAULT, None);
        try_all(&place, |attempt, ended| as_written_of_program(attempt, ended, |default, _| default));
    }
}

#[test]
fn strict_profile_stops_attempts_as_documented() {
    if is_root() && has_layers(STRICT_LAYERS) {
        let place = start(WORKER, STRICT, None);
        try_all(&place, |attempt, ended| as_written(attempt.strict, ended));
    }
}

#[test]
fn strict_profile_stops_attempts_by_programs() {
    if is_root() && has_layers(STRICT_LAYERS) {
        let place = start(PROGRAM, STRICT, None);
        try_all(&place, |attempt, ended| as_written_of_program(attempt, ended, |_, strict| strict));
    }
}

/// Judges an attempt under an unprivileged supervisor, where another layer can be the first to refuse. Where the table
/// expects a refusal by a particular layer, any refusal is accepted.
fn no_more_than_written(expected: Expected, ended: &Ended) -> Result<(), String> {
    let is_right = match (expected, ended) {
        (Expected::Refused(..), Ended::Refused(..)) | (Expected::Machine, _) => true,
        (expected, ended) => ended.is(expected),
    };
    if is_right { Ok(()) } else { Err(format!("expected {expected:?}")) }
}

#[test]
fn default_profile_stops_attempts_under_unprivileged_supervisor() {
    if is_root() && has_layers(DEFAULT_LAYERS) {
        let place = start(WORKER, DEFAULT, Some(NOBODY));
        try_all(&place, |attempt, ended| no_more_than_written(attempt.default, ended));
    }
}

/// Tests the profile without a PID namespace, which many containers do not allow. The other layers must stop nearly all
/// attempts.
#[test]
fn default_profile_stops_most_attempts_in_shared_pid_namespace() {
    if !is_root() || !has_layers(DEFAULT_LAYERS) {
        return;
    }
    for (user, open) in [(None, &[][..]), (Some(NOBODY), OF_ONE_USER)] {
        let (bulkheads, without) = (bulkheads(WORKER, DEFAULT), "pid_namespace");
        let place = Setup { bulkheads: &bulkheads, user, without, ..Setup::default() }.start();
        try_all(&place, |attempt, ended| {
            let is_open = open.contains(&attempt.name) || OF_SHARED_PROCESSES.contains(&attempt.name);
            no_more_than_written(if is_open { Expected::Succeeds } else { attempt.default }, ended)
        });
    }
}

#[test]
fn strict_profile_stops_attempts_under_unprivileged_supervisor() {
    if is_root() && has_layers(STRICT_LAYERS) {
        let place = start(WORKER, STRICT, Some(NOBODY));
        try_all(&place, |attempt, ended| no_more_than_written(attempt.strict, ended));
    }
}

/// If the kernel can refuse descriptors, sending a descriptor fails with EPERM. Otherwise, the supervisor closes
/// received descriptors and kills the worker.
#[test]
fn supervisor_keeps_no_descriptors_sent_by_workers() {
    let _turn = heavy();
    for profile in [NONE, STRICT] {
        if profile == STRICT && !has_layers(STRICT_LAYERS) {
            return;
        }
        let place = start(WORKER, profile, None);
        let client = place.client();
        let send = || place.attempt(&client, "sibling", "pass-descriptors", &place.targets("sibling"));
        let is_refused = || match send() {
            Ended::Refused(errno, _) => assert!(refuses_descriptors() && errno == "EPERM", "{profile}"),
            ended => assert!(!refuses_descriptors() && ended.is(Expected::Crashes("protocol")), "{ended:?}"),
        };
        is_refused();
        let before = descriptors(place.supervisor.pid());
        (0..3).for_each(|_| is_refused());
        wait_for("the supervisor has no more descriptors than before", || {
            (descriptors(place.supervisor.pid()) <= before).then_some(())
        });
    }
}
