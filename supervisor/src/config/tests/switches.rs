//! Keys that wait for the code that enforces them: refused as they are built, each group by itself.

use super::*;

/// A use of each key and word of each group, and what a message says of it.
const USES: [(Group, &str, &str); 13] = [
    (Group::Sandbox, "sandbox.profile = \"default\"", "`sandbox.profile = \"default\"`"),
    (Group::Sandbox, "sandbox.profile = \"strict\"", "`sandbox.profile = \"strict\"`"),
    (Group::Sandbox, "sandbox.network = true", "`sandbox.network`"),
    (Group::Sandbox, "sandbox.read = []", "`sandbox.read`"),
    (Group::Sandbox, "sandbox.write = []", "`sandbox.write`"),
    (Group::Sandbox, "sandbox.tmp = 0", "`sandbox.tmp`"),
    (Group::Sandbox, "sandbox.user = \"auto\"", "`sandbox.user`"),
    (Group::Sandbox, "sandbox.syscalls.allow = []", "`sandbox.syscalls`"),
    (Group::Sandbox, "sandbox.best_effort = []", "`sandbox.best_effort`"),
    (Group::Sandbox, "[supervisor]\nworker_uids = \"1-2\"", "`worker_uids`"),
    (Group::Cgroup, "[bulkhead.a.cgroup]\npids = 3", "`cgroup`"),
    (Group::Access, "[[access]]\nuid = 1", "`access`"),
    (Group::Crashes, "[supervisor]\ncrash_dir = \"work\"\ncrash_keep = 7", "`crash_dir`"),
];

#[test]
fn a_group_that_is_off_is_refused_and_no_other() {
    for off in Group::ALL {
        let on: Vec<Group> = Group::ALL.iter().copied().filter(|group| group != off).collect();
        let folder = Folder { supported: on.leak(), ..Folder::new() };
        for (group, text, message) in USES {
            let answer = folder.parse(&bulkhead(text));
            let refused = answer.is_err_and(|errors| {
                let message = format!("{message} is not supported yet");
                errors.problems().iter().any(|problem| problem.message == message)
            });
            assert_eq!(refused, group == *off, "{text}");
        }
    }
}

/// Whoever turns a switch: the code that enforces the keys is in, and the documentation says so.
#[test]
fn the_built_program_refuses_what_nothing_enforces() {
    let folder = Folder::shipped();
    for (group, text, message) in USES {
        if schema::SUPPORTED.contains(&group) {
            continue;
        }
        let problems = folder.refuse(&bulkhead(text));
        let problem = problems.iter().find(|problem| problem.message.contains(message)).unwrap();
        assert!(problem.message.ends_with(" is not supported yet"), "{problem:#?}");
        assert!(problem.help.is_some());
    }
    folder.accept(&bulkhead("sandbox = { profile = \"none\" }"));
}

#[test]
fn the_reference_has_what_the_built_program_accepts() {
    let keys = reference();
    let has = |table: &str| keys.iter().any(|key| key.table == table);
    for (group, table) in
        [(Group::Access, schema::ACCESS), (Group::Cgroup, schema::CGROUP), (Group::Sandbox, schema::SYSCALLS)]
    {
        assert_eq!(has(table), schema::SUPPORTED.contains(&group), "{table}");
    }
    assert!(has(schema::SANDBOX));
}

#[test]
fn the_summary_of_the_built_program_is_accepted_by_it() {
    let folder = Folder::shipped();
    let config = folder.accept(&bulkhead(""));
    let summary = config.summary();
    assert_eq!(folder.accept(&summary), config);
    for (group, name) in
        [(Group::Crashes, "crash_"), (Group::Cgroup, "cgroup"), (Group::Sandbox, "worker_uids")]
    {
        assert_eq!(summary.contains(name), schema::SUPPORTED.contains(&group), "{name} in\n{summary}");
    }
}

#[test]
fn nobody_gets_a_profile_that_nothing_enforces() {
    let enforced = schema::SUPPORTED.contains(&Group::Sandbox);
    assert!(enforced || defaults::SANDBOX_PROFILE == Profile::None.name());
}
