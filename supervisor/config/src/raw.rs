//! What the file says, key by key, with places: each value in range by itself, none yet judged against
//! another, nothing looked up on the disk. `[defaults]` and a bulkhead have the same shape.

mod access;
mod admission;
mod confinement;
mod tenants;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

pub(super) use access::RawAccess;
pub(super) use admission::{
    RawAdmission, RawBreaker, RawPoison, RawPressure, RawPriority, RawRateLimit, RawRetry, RawTenants,
};
use bulkhead_shared::limits::is_bulkhead_name;
pub(super) use confinement::{RawCgroup, RawSandbox};
pub(super) use tenants::{RawTenant, check_name as check_tenant_name};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::diagnostics::{Problems, shown};
use super::reader::{Arguments, Field, Origin, TableReader};
use super::{Resource, UidRange, defaults, schema, values};

/// A whole file.
pub(super) struct RawFile {
    pub(super) supervisor: RawSupervisor,
    /// In the order of the file.
    pub(super) access: Vec<RawAccess>,
    /// In the order of the file, `[defaults]` merged in.
    pub(super) bulkheads: Vec<RawBulkhead>,
    /// Every name that the file has for a bulkhead, also of one that could not be read.
    pub(super) names: Vec<String>,
}

/// `[supervisor]`.
pub(super) struct RawSupervisor {
    /// Its heading; the start of the file if it has none.
    pub(super) heading: Range<usize>,
    pub(super) socket: Field<String>,
    pub(super) socket_mode: Field<u32>,
    pub(super) admin: Field<String>,
    pub(super) http: Field<String>,
    pub(super) http_token_file: Field<String>,
    pub(super) drain_timeout: Field<Duration>,
    pub(super) max_clients: Field<u64>,
    pub(super) max_payload: Field<u64>,
    pub(super) max_buffered: Field<u64>,
    pub(super) crash_dir: Field<String>,
    pub(super) crash_keep: Field<u64>,
    pub(super) tenant_labels: Field<u64>,
    pub(super) worker_uids: Field<UidRange>,
}

/// `[bulkhead.NAME]` or `[defaults]`.
pub(super) struct RawBulkhead {
    pub(super) name: String,
    pub(super) heading: Range<usize>,
    pub(super) command: Field<Arguments>,
    pub(super) library: Field<String>,
    pub(super) entry: Field<String>,
    pub(super) exec: Field<Arguments>,
    pub(super) env: BTreeMap<String, String>,
    pub(super) cwd: Field<String>,
    pub(super) processes: Field<u64>,
    pub(super) max_in_flight: Field<u64>,
    pub(super) max_queue: Field<u64>,
    pub(super) queue_timeout: Field<Duration>,
    pub(super) deadline: Field<Duration>,
    pub(super) deadline_max: Field<Duration>,
    pub(super) grace: Field<Duration>,
    pub(super) max_payload: Field<u64>,
    pub(super) max_result: Field<u64>,
    pub(super) admission: RawAdmission,
    pub(super) restart: RawRestart,
    pub(super) handshake: Field<Duration>,
    pub(super) ready: Field<Duration>,
    pub(super) heartbeat: Field<Duration>,
    pub(super) missed: Field<u64>,
    pub(super) recycle_jobs: Field<u64>,
    pub(super) recycle_rss: Field<u64>,
    pub(super) recycle_age: Field<Duration>,
    /// In the order of [`Resource::ALL`].
    pub(super) rlimits: [Field<Option<u64>>; Resource::ALL.len()],
    pub(super) sandbox: RawSandbox,
    pub(super) cgroup: RawCgroup,
}

/// `restart`.
pub(super) struct RawRestart {
    pub(super) policy: Field<&'static str>,
    pub(super) backoff: Field<Duration>,
    pub(super) backoff_max: Field<Duration>,
    pub(super) max: Field<u64>,
    pub(super) within: Field<Duration>,
}

/// Keys of a bulkhead that make no sense for all of them at once.
const WHAT_RUNS: &[&str] = &["command", "library", "entry", "exec"];

/// Tenants make no sense for all of them at once either.
const WHOSE: &[&str] = &["tenant"];

/// Whether a key of bulkheads may not stand in `[defaults]`.
pub(super) fn cannot_be_shared(name: &str) -> bool {
    WHAT_RUNS.contains(&name) || WHOSE.contains(&name)
}

/// Reads a whole document.
pub(super) fn read(root: &DeTable<'_>, problems: &mut Problems) -> RawFile {
    let mut top = TableReader::open(schema::TOP, String::new(), Origin::Own, root, problems);
    let heading = root.get_key_value("supervisor").map_or(0..0, |(key, _)| key.span());
    let empty = DeTable::new();
    let supervisor = match top.table("supervisor", schema::SUPERVISOR) {
        Some(mut table) => read_supervisor(heading, &mut table),
        None => {
            let mut nothing = Problems::default();
            let (schema, title) = (schema::SUPERVISOR, String::new());
            let mut table = TableReader::open(schema, title, Origin::Own, &empty, &mut nothing);
            read_supervisor(heading, &mut table)
        }
    };
    let access = access::read(&mut top);
    let shared = top.bare_table("defaults").unwrap_or(&empty);
    let named = top.bare_table("bulkhead");
    let missing = !root.contains_key("bulkhead");

    let (schema, title) = (schema::BULKHEAD, "defaults".to_owned());
    let mut shared = TableReader::open(schema, title, Origin::Defaults, shared, problems);
    shared.refuse(WHAT_RUNS, "each [bulkhead.NAME] says for itself what it runs");
    shared.refuse(WHOSE, "each [bulkhead.NAME] names its own tenants");
    let shared = read_bulkhead(String::new(), 0..0, &mut shared);
    let bulkheads = read_bulkheads(named.unwrap_or(&empty), &shared, problems);
    let names = named.unwrap_or(&empty).keys().map(|name| name.get_ref().to_string()).collect();
    if missing || named.is_some_and(|named| named.is_empty()) {
        let place = root.get_key_value("bulkhead").map_or(0..0, |(key, _)| key.span());
        let help = "add a section [bulkhead.NAME] that says what to run, as in `command = [\"./worker\"]`";
        problems.report(place, "the file has no bulkhead", help);
    }
    RawFile { supervisor, access, bulkheads, names }
}

fn read_bulkheads(named: &DeTable<'_>, shared: &RawBulkhead, problems: &mut Problems) -> Vec<RawBulkhead> {
    let mut entries: Vec<_> = named.iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    if let Some((name, _)) = entries.get(defaults::BULKHEADS_MAX) {
        problems.report(
            name.span(),
            format!("more than {} bulkheads in one file", defaults::BULKHEADS_MAX),
            "run a second supervisor for some of them",
        );
        entries.truncate(defaults::BULKHEADS_MAX);
    }
    let mut bulkheads = Vec::new();
    for (name, value) in entries {
        check_name(name, problems);
        let title = format!("bulkhead.{}", shown(name.get_ref()));
        let DeValue::Table(table) = value.get_ref() else {
            report_not_a_bulkhead(name, value, problems);
            continue;
        };
        let mut reader = TableReader::open(schema::BULKHEAD, title, Origin::Own, table, problems);
        let own = read_bulkhead(name.get_ref().to_string(), name.span(), &mut reader);
        bulkheads.push(own.over(shared));
    }
    bulkheads
}

fn check_name(name: &Spanned<toml::de::DeString<'_>>, problems: &mut Problems) {
    if is_bulkhead_name(name.get_ref()) {
        return;
    }
    let better: String = name.get_ref().to_lowercase().chars().map(name_char).take(64).collect();
    let help = match better.is_empty() {
        true => "write [bulkhead.NAME] with 1 to 64 of a-z, 0-9, `.`, `_` and `-`".to_owned(),
        false => format!("use 1 to 64 of a-z, 0-9, `.`, `_` and `-`, as in `{better}`"),
    };
    problems.report(name.span(), format!("`{}` cannot name a bulkhead", shown(name.get_ref())), help);
}

fn name_char(c: char) -> char {
    if matches!(c, 'a'..='z' | '0'..='9' | '.' | '_' | '-') { c } else { '-' }
}

/// Keys straight below `[bulkhead]` are most likely meant for all bulkheads.
fn report_not_a_bulkhead(
    name: &Spanned<toml::de::DeString<'_>>,
    value: &Spanned<DeValue<'_>>,
    problems: &mut Problems,
) {
    let help = match schema::find(schema::BULKHEAD, name.get_ref()) {
        Some(_) => "keys for every bulkhead go into [defaults], keys for one into [bulkhead.NAME]".to_owned(),
        None => format!("write a section [bulkhead.{}]", shown(name.get_ref())),
    };
    let found = values::type_name(value.get_ref());
    problems.report(
        value.span(),
        format!("bulkhead `{}` must be a table, not {found}", shown(name.get_ref())),
        help,
    );
}

fn read_supervisor(heading: Range<usize>, table: &mut TableReader<'_, '_>) -> RawSupervisor {
    RawSupervisor {
        heading,
        socket: table.text("socket"),
        socket_mode: table.mode("socket_mode"),
        admin: table.text("admin"),
        http: table.text("http"),
        http_token_file: table.text("http_token_file"),
        drain_timeout: table.duration("drain_timeout"),
        max_clients: table.count("max_clients"),
        max_payload: table.size("max_payload"),
        max_buffered: table.size("max_buffered"),
        crash_dir: table.text("crash_dir"),
        crash_keep: table.count("crash_keep"),
        tenant_labels: table.count("tenant_labels"),
        worker_uids: table.ids("worker_uids"),
    }
}

fn read_bulkhead(name: String, heading: Range<usize>, table: &mut TableReader<'_, '_>) -> RawBulkhead {
    let admission = RawAdmission::read(table);
    let restart = read_restart(table);
    let (handshake, ready) = match table.table("start", schema::START) {
        Some(mut start) => {
            // What later versions can do otherwise is checked, and has nothing to say yet.
            start.word("mode");
            start.zero_for_now("spares");
            (start.duration("handshake"), start.duration("ready"))
        }
        None => (Field::Absent, Field::Absent),
    };
    let (heartbeat, missed) = match table.table("health", schema::HEALTH) {
        Some(mut health) => (health.duration("heartbeat"), health.count("missed")),
        None => (Field::Absent, Field::Absent),
    };
    let (recycle_jobs, recycle_rss, recycle_age) = match table.table("recycle", schema::RECYCLE) {
        Some(mut recycle) => (recycle.count("jobs"), recycle.size("rss"), recycle.duration("age")),
        None => (Field::Absent, Field::Absent, Field::Absent),
    };
    let rlimits = match table.table("rlimits", schema::RLIMITS) {
        Some(mut rlimits) => Resource::ALL.map(|resource| rlimits.limit(resource)),
        None => Resource::ALL.map(|_| Field::Absent),
    };
    let sandbox = RawSandbox::read(table);
    let cgroup = RawCgroup::read(table);
    RawBulkhead {
        name,
        heading,
        command: table.arguments("command"),
        library: table.text("library"),
        entry: table.text("entry"),
        exec: table.arguments("exec"),
        env: table.environment("env"),
        cwd: table.text("cwd"),
        processes: table.count("processes"),
        max_in_flight: table.count("max_in_flight"),
        max_queue: table.count("max_queue"),
        queue_timeout: table.duration("queue_timeout"),
        deadline: table.duration("deadline"),
        deadline_max: table.duration("deadline_max"),
        grace: table.duration("grace"),
        max_payload: table.size("max_payload"),
        max_result: table.size("max_result"),
        admission,
        restart,
        handshake,
        ready,
        heartbeat,
        missed,
        recycle_jobs,
        recycle_rss,
        recycle_age,
        rlimits,
        sandbox,
        cgroup,
    }
}

fn read_restart(table: &mut TableReader<'_, '_>) -> RawRestart {
    match table.table("restart", schema::RESTART) {
        Some(mut restart) => RawRestart {
            policy: restart.word("policy"),
            backoff: restart.duration("backoff"),
            backoff_max: restart.duration("backoff_max"),
            max: restart.count("max"),
            within: restart.duration("within"),
        },
        None => RawRestart {
            policy: Field::Absent,
            backoff: Field::Absent,
            backoff_max: Field::Absent,
            max: Field::Absent,
            within: Field::Absent,
        },
    }
}

impl RawBulkhead {
    /// This bulkhead with `defaults` where it is silent, tables key by key.
    fn over(self, defaults: &Self) -> Self {
        let mut env = defaults.env.clone();
        env.extend(self.env);
        let mut rlimits = self.rlimits;
        for (own, default) in rlimits.iter_mut().zip(&defaults.rlimits) {
            *own = own.or(default);
        }
        Self {
            name: self.name,
            heading: self.heading,
            command: self.command,
            library: self.library,
            entry: self.entry,
            exec: self.exec,
            env,
            cwd: self.cwd.or(&defaults.cwd),
            processes: self.processes.or(&defaults.processes),
            max_in_flight: self.max_in_flight.or(&defaults.max_in_flight),
            max_queue: self.max_queue.or(&defaults.max_queue),
            queue_timeout: self.queue_timeout.or(&defaults.queue_timeout),
            deadline: self.deadline.or(&defaults.deadline),
            deadline_max: self.deadline_max.or(&defaults.deadline_max),
            grace: self.grace.or(&defaults.grace),
            max_payload: self.max_payload.or(&defaults.max_payload),
            max_result: self.max_result.or(&defaults.max_result),
            admission: self.admission.over(&defaults.admission),
            restart: self.restart.over(&defaults.restart),
            handshake: self.handshake.or(&defaults.handshake),
            ready: self.ready.or(&defaults.ready),
            heartbeat: self.heartbeat.or(&defaults.heartbeat),
            missed: self.missed.or(&defaults.missed),
            recycle_jobs: self.recycle_jobs.or(&defaults.recycle_jobs),
            recycle_rss: self.recycle_rss.or(&defaults.recycle_rss),
            recycle_age: self.recycle_age.or(&defaults.recycle_age),
            rlimits,
            sandbox: self.sandbox.over(&defaults.sandbox),
            cgroup: self.cgroup.over(&defaults.cgroup),
        }
    }
}

impl RawRestart {
    fn over(self, defaults: &Self) -> Self {
        Self {
            policy: self.policy.or(&defaults.policy),
            backoff: self.backoff.or(&defaults.backoff),
            backoff_max: self.backoff_max.or(&defaults.backoff_max),
            max: self.max.or(&defaults.max),
            within: self.within.or(&defaults.within),
        }
    }
}
