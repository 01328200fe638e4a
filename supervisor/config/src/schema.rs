//! The keys: name, kind, range, default and one sentence each. The reader, its error messages, the
//! reference for the documentation and the list of what comes later are all taken from these tables.

use std::fmt;
use std::time::Duration;

use super::checked::{Layer, Overflow, Profile, RatePer, RestartPolicy};
use super::rlimits::{Measure, Resource};
use super::{defaults, units};

/// Keys of the contract that this version refuses, as (table, key). To support one, take its line out here,
/// give it one in [`KEYS`], and read it in `raw.rs`. A table stands for all that is in it.
pub(super) const LATER: &[(&str, &str)] = &[(BULKHEAD, "adaptive")];

pub(super) const TOP: &str = "";
pub(super) const ACCESS: &str = "access";
pub(super) const SUPERVISOR: &str = "supervisor";
pub(super) const BULKHEAD: &str = "bulkhead.NAME";
pub(super) const PRIORITY: &str = "bulkhead.NAME.priority";
pub(super) const PRESSURE: &str = "bulkhead.NAME.pressure";
pub(super) const RATE_LIMIT: &str = "bulkhead.NAME.rate_limit";
pub(super) const TENANTS: &str = "bulkhead.NAME.tenants";
pub(super) const BREAKER: &str = "bulkhead.NAME.breaker";
pub(super) const RETRY: &str = "bulkhead.NAME.retry";
pub(super) const POISON: &str = "bulkhead.NAME.poison";
pub(super) const TENANT: &str = "bulkhead.NAME.tenant.TENANT";
pub(super) const TENANT_RATE_LIMIT: &str = "bulkhead.NAME.tenant.TENANT.rate_limit";
pub(super) const RESTART: &str = "bulkhead.NAME.restart";
pub(super) const START: &str = "bulkhead.NAME.start";
pub(super) const HEALTH: &str = "bulkhead.NAME.health";
pub(super) const RECYCLE: &str = "bulkhead.NAME.recycle";
pub(super) const RLIMITS: &str = "bulkhead.NAME.rlimits";
pub(super) const SANDBOX: &str = "bulkhead.NAME.sandbox";
pub(super) const SYSCALLS: &str = "bulkhead.NAME.sandbox.syscalls";
pub(super) const CGROUP: &str = "bulkhead.NAME.cgroup";

/// One key of the configuration file.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// The table it belongs to: `supervisor`, `bulkhead.NAME`, `bulkhead.NAME.restart`, …
    pub table: &'static str,
    /// Its name in that table.
    pub name: &'static str,
    /// What its value looks like.
    pub kind: Kind,
    /// What holds without it.
    pub default: Preset,
    /// What it does.
    pub about: &'static str,
}

/// What a value looks like. `Display` says it in a few words.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// `"1m 30s"`, up to a year.
    Duration {
        /// The shortest that makes sense.
        min: Duration,
    },
    /// `"64MiB"`, or a number of bytes.
    Size {
        /// The smallest that makes sense.
        min: u64,
        /// The largest that is allowed.
        max: u64,
    },
    /// A whole number.
    Count {
        /// The smallest that makes sense.
        min: u64,
        /// The largest that is allowed.
        max: u64,
    },
    /// A fraction of a whole, from 0 to 1.
    Share {
        /// Whether 0 itself is allowed.
        none: bool,
        /// Whether 1 itself is allowed; otherwise something is left to others.
        all: bool,
    },
    /// A number above 0, whole or not.
    Number {
        /// The largest that is allowed.
        max: u64,
    },
    /// `true` or `false`.
    Boolean,
    /// A number that can only be 0 until a later version.
    ZeroForNow,
    /// `"0600"`.
    Mode,
    /// A path; a relative one starts at the file's folder.
    Path,
    /// Any other text.
    Text,
    /// One of a few words.
    Word {
        /// Those that work.
        now: &'static [&'static str],
        /// Those that are for a later version.
        later: &'static [&'static str],
    },
    /// Some of a few words, or none.
    Words {
        /// Those that there are.
        of: &'static [&'static str],
    },
    /// A program and its arguments.
    Program,
    /// Names, in order, or none.
    Names {
        /// The most that are allowed.
        max: usize,
    },
    /// Paths, or none; relative ones start at the file's folder.
    Paths {
        /// The most that are allowed.
        max: usize,
    },
    /// The first and the last of some user ids: `"200000-200999"`.
    Ids,
    /// A table of strings.
    Environment,
    /// A value of setrlimit(2).
    Limit(Resource),
    /// A table with keys of its own.
    Table,
    /// Any number of such tables.
    Tables {
        /// The most that are allowed.
        max: usize,
    },
}

/// What holds without a key. `Display` gives the value as TOML, or says it in words.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Preset {
    /// A duration.
    Duration(Duration),
    /// A number of bytes.
    Size(u64),
    /// A number.
    Count(u64),
    /// A fraction.
    Share(f64),
    /// Whether something is on.
    Boolean(bool),
    /// Octal digits.
    Mode(u32),
    /// A word.
    Word(&'static str),
    /// Something that is worked out, or nothing at all.
    Described(&'static str),
}

const ANY: Duration = Duration::ZERO;
const SOME: Duration = defaults::DURATION_MIN;
const PAYLOAD_MAX: u64 = bulkhead_shared::limits::PAYLOAD_BYTES_CEILING;
const POLICIES: &[&str] = &{
    let [a, b, c] = RestartPolicy::ALL;
    [a.name(), b.name(), c.name()]
};
const OVERFLOWS: &[&str] = &{
    let [a, b] = Overflow::ALL;
    [a.name(), b.name()]
};
const RATES_PER: &[&str] = &{
    let [a, b] = RatePer::ALL;
    [a.name(), b.name()]
};
const PROFILES: &[&str] = &{
    let [a, b, c] = Profile::ALL;
    [a.name(), b.name(), c.name()]
};
const LAYERS: &[&str] = &{
    let mut names = [""; Layer::ALL.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = Layer::ALL[index].name();
        index += 1;
    }
    names
};
/// The id of a user or a group.
const ID: Kind = Kind::Count { min: 0, max: defaults::ID_MAX };
/// A share that must be something.
const PART: Kind = Kind::Share { none: false, all: true };

const fn key(
    table: &'static str,
    name: &'static str,
    kind: Kind,
    default: Preset,
    about: &'static str,
) -> Key {
    Key { table, name, kind, default, about }
}

const fn table(table: &'static str, name: &'static str) -> Key {
    key(table, name, Kind::Table, Preset::Described("none"), "")
}

/// Every key but for those of `rlimits`, which [`Resource`] has.
#[rustfmt::skip]
const KEYS: &[Key] = &[
    table(TOP, "supervisor"),
    table(TOP, "defaults"),
    table(TOP, "bulkhead"),
    key(TOP, "access", Kind::Tables { max: defaults::ACCESS_MAX }, Preset::Described("none"), ""),

    key(SUPERVISOR, "socket", Kind::Path, Preset::Described("`$XDG_RUNTIME_DIR/bulkhead/jobs.sock`; for root `/run/bulkhead/jobs.sock`"),
        "The Unix socket that jobs come in by. At most 107 bytes."),
    key(SUPERVISOR, "socket_mode", Kind::Mode, Preset::Mode(defaults::SOCKET_MODE),
        "The mode of `socket`, as octal digits. Its folder is made 0700 if it is missing."),
    key(SUPERVISOR, "admin", Kind::Path, Preset::Described("`admin.sock` beside `socket`"),
        "The Unix socket of the admin API, mode 0600. At most 107 bytes, and not `socket`."),
    key(SUPERVISOR, "http", Kind::Text, Preset::Described("off"),
        "The address and port that the admin API is served on over TCP too, as in `127.0.0.1:9464`. Needs `http_token_file`."),
    key(SUPERVISOR, "http_token_file", Kind::Path, Preset::Described("none"),
        "The file that holds the token which requests over TCP must have, 16 to 4096 visible ASCII characters. Others may not read it; its group may. Needs `http`."),
    key(SUPERVISOR, "drain_timeout", Kind::Duration { min: ANY }, Preset::Duration(defaults::DRAIN_TIMEOUT),
        "How long a stop waits for jobs in flight; `\"0s\"` does not wait."),
    key(SUPERVISOR, "max_clients", Kind::Count { min: 1, max: defaults::CLIENTS_CEILING }, Preset::Count(defaults::CLIENTS_MAX),
        "Clients served at once. One user alone may have all; when another finds none free, the longest-idle connection of the user with most is closed, and only if none is idle the newcomer is told `overloaded`."),
    key(SUPERVISOR, "max_payload", Kind::Size { min: 1, max: PAYLOAD_MAX }, Preset::Size(defaults::PAYLOAD_BYTES_MAX),
        "The largest payload of any job, and the largest `max_payload` and `max_result` of any bulkhead."),
    key(SUPERVISOR, "max_buffered", Kind::Size { min: 1, max: defaults::NUMBER_MAX }, Preset::Size(defaults::BUFFERED_BYTES_MAX),
        "What all that waits holds: payloads as far as they have arrived, names and records; beyond it jobs are rejected `overloaded`. One client alone may use all; one below an equal share gets room, and the one furthest over gives. At least `max_payload`."),
    key(SUPERVISOR, "crash_dir", Kind::Path, Preset::Described("none: they are kept in memory only"),
        "The folder that crash reports are kept in; made 0700 if it is missing. A report holds the payload of the job."),
    key(SUPERVISOR, "crash_keep", Kind::Count { min: 1, max: defaults::CRASH_KEEP_CEILING }, Preset::Count(defaults::CRASH_KEEP),
        "Crash reports that are kept: the newest, and beside them as many of workers that never started."),
    key(SUPERVISOR, "tenant_labels", Kind::Count { min: 0, max: defaults::TENANT_LABELS_CEILING }, Preset::Count(defaults::TENANT_LABELS),
        "How many tenants have a label of their own in the metrics: those that the file names, from its first bulkhead to its last, by name, and then those of `[[access]]`. All others are `_other`."),
    key(SUPERVISOR, "worker_uids", Kind::Ids, Preset::Described("`\"61184-65519\"` if the supervisor may start workers as other users; else those of `/etc/subuid`"),
        "The ids that workers with `sandbox.user = \"auto\"` get, one each: the first and the last, from 1 to 4294967294, at most 1000000. Those that a user, a process or another supervisor of this host has are passed over. Without privileges they have to be of the range that `/etc/subuid` gives the supervisor's user."),

    key(ACCESS, "uid", ID, Preset::Described("none"),
        "The user that the entry is for, by id."),
    key(ACCESS, "gid", ID, Preset::Described("none"),
        "The group that the entry is for, by id."),
    key(ACCESS, "user", Kind::Text, Preset::Described("none"),
        "The user that the entry is for, by a name that there is when the file is read."),
    key(ACCESS, "group", Kind::Text, Preset::Described("none"),
        "The group that the entry is for, by a name that there is when the file is read."),
    key(ACCESS, "bulkheads", Kind::Names { max: defaults::BULKHEADS_MAX }, Preset::Described("all"),
        "The bulkheads of the file that they may use."),
    key(ACCESS, "tenants", Kind::Names { max: defaults::ACCESS_TENANTS_MAX }, Preset::Described("any, or none"),
        "The tenants that their jobs may name. With it each of their jobs names one."),

    key(BULKHEAD, "command", Kind::Program, Preset::Described("none"),
        "A program built with the worker SDK, and its arguments."),
    key(BULKHEAD, "library", Kind::Path, Preset::Described("none"),
        "A C library; the host loads it and calls `entry`."),
    key(BULKHEAD, "entry", Kind::Text, Preset::Word(defaults::ENTRY),
        "The function of `library` that serves a job."),
    key(BULKHEAD, "exec", Kind::Program, Preset::Described("none"),
        "An unmodified program, one process per job: the payload is its standard input, its standard output the result."),
    key(BULKHEAD, "env", Kind::Environment, Preset::Described("`{}`"),
        "The environment of the workers. It is empty but for this and the few variables the SDK needs; names that start with `BULKHEAD_` are reserved."),
    key(BULKHEAD, "cwd", Kind::Path, Preset::Described("the file's folder"),
        "The folder the workers start in."),
    key(BULKHEAD, "processes", Kind::Count { min: 1, max: defaults::PROCESSES_CEILING }, Preset::Count(defaults::PROCESSES),
        "Worker processes."),
    key(BULKHEAD, "max_in_flight", Kind::Count { min: 0, max: defaults::IN_FLIGHT_CEILING }, Preset::Count(defaults::IN_FLIGHT_MAX),
        "Jobs in flight per worker process; 0 rejects every job. `processes` × `max_in_flight` is at most 1000000."),
    key(BULKHEAD, "max_queue", Kind::Count { min: 0, max: defaults::QUEUE_CEILING }, Preset::Count(defaults::QUEUE_MAX),
        "Jobs that may wait; 0 means none. Needs a `max_in_flight` above 0."),
    key(BULKHEAD, "queue_timeout", Kind::Duration { min: SOME }, Preset::Described("until the deadline"),
        "The longest wait for a permit."),
    key(BULKHEAD, "deadline", Kind::Duration { min: SOME }, Preset::Duration(defaults::DEADLINE),
        "From a job's receipt to its answer, the wait included, unless the client asks for another."),
    key(BULKHEAD, "deadline_max", Kind::Duration { min: SOME }, Preset::Described("`deadline`"),
        "The most a client may ask for; more is cut to it. At least `deadline`."),
    key(BULKHEAD, "grace", Kind::Duration { min: ANY }, Preset::Duration(defaults::GRACE),
        "After a missed deadline the worker is asked to stop, and killed this much later; `\"0s\"` kills at once."),
    key(BULKHEAD, "max_payload", Kind::Size { min: 1, max: PAYLOAD_MAX }, Preset::Described("the supervisor's `max_payload`"),
        "The largest payload of a job. At most the supervisor's."),
    key(BULKHEAD, "max_result", Kind::Size { min: 1, max: PAYLOAD_MAX }, Preset::Described("the supervisor's `max_payload`"),
        "The largest result of a job; a larger one is `failed` as `result_too_large`. At most the supervisor's `max_payload`."),
    key(BULKHEAD, "overflow", Kind::Word { now: OVERFLOWS, later: &[] }, Preset::Word(defaults::OVERFLOW),
        "What a full queue does: reject the next job, or take it in place of the oldest job of the tenant that holds most of the queue. `\"evict-oldest\"` needs a `max_queue` above 0."),
    key(BULKHEAD, "fallback", Kind::Names { max: defaults::FALLBACKS_MAX }, Preset::Described("`[]`"),
        "Bulkheads that take a job which this one turns away as `circuit_open`, `queue_full`, `backpressure`, `unavailable` or `draining`, and an idempotent one whose worker crashed: tried in order, each at most once."),
    table(BULKHEAD, "priority"),
    table(BULKHEAD, "pressure"),
    table(BULKHEAD, "rate_limit"),
    table(BULKHEAD, "tenants"),
    table(BULKHEAD, "tenant"),
    table(BULKHEAD, "breaker"),
    table(BULKHEAD, "retry"),
    table(BULKHEAD, "poison"),
    table(BULKHEAD, "restart"),
    table(BULKHEAD, "start"),
    table(BULKHEAD, "health"),
    table(BULKHEAD, "recycle"),
    table(BULKHEAD, "rlimits"),
    table(BULKHEAD, "sandbox"),
    table(BULKHEAD, "cgroup"),

    key(PRIORITY, "critical_reserve", Kind::Share { none: true, all: false }, Preset::Described("required"),
        "The share of permits that only critical jobs may take, rounded up."),

    key(PRESSURE, "warn", PART, Preset::Share(defaults::PRESSURE_WARN),
        "The share of `max_queue` at which a `queue_pressure` event is told. At most `reject`, also without being written."),
    key(PRESSURE, "reject", PART, Preset::Share(defaults::PRESSURE_REJECT),
        "The share of `max_queue` above which normal and best-effort jobs are rejected `backpressure`."),

    key(RATE_LIMIT, "per_second", Kind::Number { max: defaults::RATE_CEILING }, Preset::Described("required"),
        "Jobs a second in the long run, each counted by its cost."),
    key(RATE_LIMIT, "burst", Kind::Count { min: 1, max: defaults::RATE_CEILING }, Preset::Described("`per_second`, rounded up"),
        "Jobs that may come at once after a pause."),
    key(RATE_LIMIT, "per", Kind::Word { now: RATES_PER, later: &[] }, Preset::Word(defaults::RATE_PER),
        "Who shares the limit: all jobs of the bulkhead, or those of one tenant."),

    key(TENANTS, "max_in_flight", Kind::Count { min: 1, max: defaults::PERMITS_CEILING }, Preset::Described("no limit"),
        "Jobs of one tenant in flight in the whole bulkhead; over it a job waits."),
    key(TENANTS, "max_queue", Kind::Count { min: 0, max: defaults::QUEUE_CEILING }, Preset::Described("no limit"),
        "Jobs of one tenant that may wait; over it a job is rejected `tenant_quota`."),

    key(TENANTS, "isolate", Kind::Boolean, Preset::Boolean(defaults::TENANTS_ISOLATE),
        "Whether each tenant has workers of its own. Then `processes`, `max_in_flight`, `max_queue`, `rate_limit` whatever its `per`, `breaker` and the restart history of the bulkhead are each tenant's, and the two keys above are refused."),
    key(TENANTS, "max_active", Kind::Count { min: 1, max: defaults::TENANTS_ACTIVE_CEILING }, Preset::Count(defaults::TENANTS_ACTIVE_MAX),
        "Isolated tenants that have workers at once; for one more those of the longest idle go, and if none is idle its job is rejected `unavailable`. `processes` × `max_active` is at most 16384. Needs `isolate`."),
    key(TENANTS, "idle", Kind::Duration { min: SOME }, Preset::Duration(defaults::TENANTS_IDLE),
        "An isolated tenant without a job for so long gives its workers back. Needs `isolate`."),

    key(TENANT, "max_in_flight", Kind::Count { min: 1, max: defaults::PERMITS_CEILING }, Preset::Described("as for every tenant"),
        "Jobs of this tenant in flight in the whole bulkhead, as in `tenants`; with `tenants.isolate` per worker process, at most 4096."),
    key(TENANT, "max_queue", Kind::Count { min: 0, max: defaults::QUEUE_CEILING }, Preset::Described("as for every tenant"),
        "Jobs of this tenant that may wait."),
    key(TENANT, "processes", Kind::Count { min: 1, max: defaults::PROCESSES_CEILING }, Preset::Described("the bulkhead's `processes`"),
        "Worker processes of this tenant. Needs `tenants.isolate`."),
    table(TENANT, "rate_limit"),

    key(TENANT_RATE_LIMIT, "per_second", Kind::Number { max: defaults::RATE_CEILING }, Preset::Described("required"),
        "Jobs of this tenant a second in the long run, each counted by its cost."),
    key(TENANT_RATE_LIMIT, "burst", Kind::Count { min: 1, max: defaults::RATE_CEILING }, Preset::Described("`per_second`, rounded up"),
        "Jobs of this tenant that may come at once after a pause."),

    key(BREAKER, "window", Kind::Duration { min: defaults::BREAKER_WINDOW_MIN }, Preset::Duration(defaults::BREAKER_WINDOW),
        "How far back the rates look."),
    key(BREAKER, "min_calls", Kind::Count { min: 1, max: defaults::BREAKER_CALLS_CEILING }, Preset::Count(defaults::BREAKER_MIN_CALLS),
        "Jobs in the window before the rates say anything."),
    key(BREAKER, "failure_rate", PART, Preset::Share(defaults::BREAKER_FAILURE_RATE),
        "The share of failed jobs that opens the breaker."),
    key(BREAKER, "slow_call", Kind::Duration { min: SOME }, Preset::Described("off"),
        "A job that runs longer than this is slow."),
    key(BREAKER, "slow_rate", PART, Preset::Share(defaults::BREAKER_SLOW_RATE),
        "The share of slow jobs that opens the breaker. Needs `slow_call`."),
    key(BREAKER, "open_for", Kind::Duration { min: SOME }, Preset::Duration(defaults::BREAKER_OPEN_FOR),
        "How long the breaker stays open before it tries again; doubles with each opening in a row, up to 8 times this."),
    key(BREAKER, "probes", Kind::Count { min: 1, max: defaults::BREAKER_PROBES_CEILING }, Preset::Count(defaults::BREAKER_PROBES),
        "Jobs let through to try."),

    key(RETRY, "attempts", Kind::Count { min: 2, max: defaults::RETRY_CEILING }, Preset::Count(defaults::RETRY_ATTEMPTS),
        "How often a job is tried at most; counts the first time."),
    key(RETRY, "budget", PART, Preset::Share(defaults::RETRY_BUDGET),
        "Retries as a share of jobs; what is beyond is not retried."),

    key(POISON, "crashes", Kind::Count { min: 1, max: defaults::POISON_CEILING }, Preset::Count(defaults::POISON_CRASHES),
        "A payload that killed this many workers, alone in each, is rejected `quarantined`."),
    key(POISON, "within", Kind::Duration { min: SOME }, Preset::Duration(defaults::POISON_WITHIN),
        "The window in which its crashes are counted."),

    key(RESTART, "policy", Kind::Word { now: POLICIES, later: &[] }, Preset::Word(defaults::RESTART_POLICY),
        "Which deaths are followed by a restart: all, all but a clean exit, or none."),
    key(RESTART, "backoff", Kind::Duration { min: ANY }, Preset::Duration(defaults::RESTART_BACKOFF),
        "The first restart comes at once, the second after this pause; then it doubles, with jitter."),
    key(RESTART, "backoff_max", Kind::Duration { min: ANY }, Preset::Duration(defaults::RESTART_BACKOFF_MAX),
        "The longest pause, and that between probes of a failed worker slot. At least `backoff`."),
    key(RESTART, "max", Kind::Count { min: 1, max: defaults::RESTART_CEILING }, Preset::Count(defaults::RESTART_MAX),
        "This many deaths that say the worker is unfit, within `within`, are borne; one more and its slot has failed."),
    key(RESTART, "within", Kind::Duration { min: SOME }, Preset::Duration(defaults::RESTART_WITHIN),
        "The window in which deaths are counted."),

    key(START, "handshake", Kind::Duration { min: SOME }, Preset::Duration(defaults::START_HANDSHAKE),
        "From the start of the process to its hello; until the process runs, which is the supervisor's doing, it has a minute at least."),
    key(START, "ready", Kind::Duration { min: SOME }, Preset::Duration(defaults::START_READY),
        "From the hello to ready; the worker can ask for more."),
    key(START, "mode", Kind::Word { now: &["spawn"], later: &["fork"] }, Preset::Word("spawn"),
        "How a worker process comes to be."),
    key(START, "spares", Kind::ZeroForNow, Preset::Count(0),
        "Warm workers in reserve."),

    key(HEALTH, "heartbeat", Kind::Duration { min: SOME }, Preset::Duration(defaults::HEALTH_HEARTBEAT),
        "Time between heartbeats."),
    key(HEALTH, "missed", Kind::Count { min: 1, max: defaults::MISSED_CEILING }, Preset::Count(defaults::HEALTH_MISSED),
        "A worker that misses this many in a row is hung and killed."),

    key(RECYCLE, "jobs", Kind::Count { min: 1, max: defaults::NUMBER_MAX }, Preset::Described("off"),
        "A worker begins this many jobs and no more: 1 is a fresh process for each job. Its replacement is started early enough to be ready by then, and waits for its turn."),
    key(RECYCLE, "rss", Kind::Size { min: 1, max: defaults::NUMBER_MAX }, Preset::Described("off"),
        "Replace a worker whose resident memory exceeds this."),
    key(RECYCLE, "age", Kind::Duration { min: SOME }, Preset::Described("off"),
        "Replace a worker this long after its start."),

    key(SANDBOX, "profile", Kind::Word { now: PROFILES, later: &[] }, Preset::Word(defaults::SANDBOX_PROFILE),
        "How far the workers are confined."),
    key(SANDBOX, "network", Kind::Boolean, Preset::Boolean(defaults::SANDBOX_NETWORK),
        "Whether the workers may use the network."),
    key(SANDBOX, "read", Kind::Paths { max: defaults::SANDBOX_PATHS_MAX }, Preset::Described("`[]`"),
        "Further files and folders that the workers may read. The program, its libraries and its loader come by themselves."),
    key(SANDBOX, "write", Kind::Paths { max: defaults::SANDBOX_PATHS_MAX }, Preset::Described("`[]`"),
        "Files and folders that the workers may write, besides their own `/tmp`."),
    key(SANDBOX, "tmp", Kind::Size { min: 0, max: defaults::NUMBER_MAX }, Preset::Size(defaults::SANDBOX_TMP_BYTES),
        "A private `/tmp` of this size; 0 for none. With `default` it is a folder on disk that `TMPDIR` names and that is looked at every second: a worker that has more in it is ended as `crashed`/`violation`; for workers with ids of `/etc/subuid` it is in memory."),
    key(SANDBOX, "user", Kind::Text, Preset::Described("`\"auto\"`; without a profile `\"shared\"`"),
        "Whom the workers run as: `\"auto\"` for an unprivileged id of each worker's own (with `write` one of the bulkhead's), where the supervisor may start workers as other users, or `/etc/subuid` gives it ids; `\"shared\"` for the supervisor's own user; or the name of a user. Under root only `\"root\"` and `\"shared\"` make a worker root."),
    table(SANDBOX, "syscalls"),
    key(SANDBOX, "best_effort", Kind::Words { of: LAYERS }, Preset::Described("`[]`"),
        "Layers of the profile that may be missing on this machine; without any other the workers do not start."),

    key(SYSCALLS, "allow", Kind::Names { max: defaults::SYSCALLS_MAX }, Preset::Described("`[]`"),
        "System calls that the workers may make on top of the profile."),
    key(SYSCALLS, "deny", Kind::Names { max: defaults::SYSCALLS_MAX }, Preset::Described("`[]`"),
        "System calls that the workers may not make, though the profile has them."),

    key(CGROUP, "memory", Kind::Size { min: defaults::CGROUP_MEMORY_MIN, max: defaults::NUMBER_MAX }, Preset::Described("no limit"),
        "Memory of one worker and all that it starts, page cache included."),
    key(CGROUP, "pids", Kind::Count { min: 1, max: defaults::NUMBER_MAX }, Preset::Described("no limit"),
        "Processes and threads of one worker and all that it starts."),
    key(CGROUP, "cpu", Kind::Number { max: defaults::CGROUP_CPU_CEILING }, Preset::Described("no limit"),
        "Processor cores that one worker and all that it starts may use."),
];

/// Every key that a configuration file of this version may have, table by table: what the reader reads,
/// and what `docs/configuration.md` is tested against.
///
/// ```
/// use bulkhead_config as config;
/// let key = config::reference().into_iter().find(|key| key.path() == "bulkhead.NAME.grace").unwrap();
/// assert_eq!(key.default.to_string(), "`\"100ms\"`");
/// ```
pub fn reference() -> Vec<Key> {
    all().filter(|key| !matches!(key.kind, Kind::Table | Kind::Tables { .. })).collect()
}

/// What a file is refused for as not supported yet: keys as paths, words of supported keys as
/// `path = "word"`.
pub fn later() -> Vec<String> {
    let keys = LATER.iter().map(|(table, name)| path(table, name));
    let words = all().flat_map(|key| match key.kind {
        Kind::Word { later, .. } => later.iter().map(|word| format!("{} = \"{word}\"", key.path())).collect(),
        Kind::ZeroForNow => vec![format!("{} above 0", key.path())],
        _ => Vec::new(),
    });
    keys.chain(words).collect()
}

/// Every key that a file may have, tables included.
pub(super) fn all() -> impl Iterator<Item = Key> {
    KEYS.iter().copied().chain(Resource::ALL.map(|resource| Key {
        table: RLIMITS,
        name: resource.name(),
        kind: Kind::Limit(resource),
        default: match resource {
            Resource::Core => Preset::Count(0),
            Resource::Fsize => Preset::Described("4GiB; without a sandbox the supervisor's own"),
            Resource::Nproc => Preset::Described(
                "1024 where it counts for each worker: with a user id or a user namespace of its own; else the supervisor's own",
            ),
            _ => Preset::Described("the supervisor's own"),
        },
        about: resource.about(),
    }))
}

/// The key `name` of `table`, if a file may have it.
pub(super) fn find(table: &str, name: &str) -> Option<Key> {
    all().find(|key| key.table == table && key.name == name)
}

/// How the heading of a table is written.
pub(super) fn heading(table: &str) -> String {
    if table == ACCESS { format!("[[{table}]]") } else { format!("[{table}]") }
}

fn path(table: &str, name: &str) -> String {
    if table == TOP { name.to_owned() } else { format!("{table}.{name}") }
}

impl Key {
    /// Table and name: `bulkhead.NAME.restart.backoff`.
    pub fn path(&self) -> String {
        path(self.table, self.name)
    }

    /// A value that would do, as TOML.
    pub(super) fn example(&self) -> String {
        match (self.default, self.kind) {
            (Preset::Described(_), Kind::Duration { .. }) => "\"5s\"".to_owned(),
            (Preset::Described(_), Kind::Size { .. }) => "\"8MiB\"".to_owned(),
            (Preset::Described(_), Kind::Count { .. }) => self.count_example().to_owned(),
            (Preset::Described(_), Kind::Share { .. }) => "0.2".to_owned(),
            (Preset::Described(_), Kind::Number { .. }) if self.table == CGROUP => "1.5".to_owned(),
            (Preset::Described(_), Kind::Number { .. }) => "100".to_owned(),
            (Preset::Described(_), Kind::Path) => self.path_example().to_owned(),
            (Preset::Described(_), Kind::Names { .. }) => self.names_example().to_owned(),
            (Preset::Described(_), Kind::Paths { .. }) => "[\"/usr/share/fonts\"]".to_owned(),
            (Preset::Described(_), Kind::Words { of }) => {
                format!("[\"{}\"]", of.first().copied().unwrap_or_default())
            }
            (Preset::Described(_), Kind::Ids) => "\"200000-200999\"".to_owned(),
            (Preset::Described(_), Kind::Text) => self.text_example().to_owned(),
            (_, Kind::Tables { .. }) => "[{ uid = 1001 }]".to_owned(),
            (_, Kind::Boolean) => "true".to_owned(),
            (Preset::Described(_), Kind::Program) => "[\"./worker\", \"--flag\"]".to_owned(),
            (Preset::Described(_), Kind::Environment) => "{ RUST_LOG = \"info\" }".to_owned(),
            (_, Kind::Limit(resource)) => match resource.measure() {
                Measure::Bytes => "\"1GiB\"".to_owned(),
                Measure::Count => "64".to_owned(),
                Measure::Seconds => "\"60s\"".to_owned(),
                Measure::Microseconds => "\"200ms\"".to_owned(),
                Measure::Zero => "0".to_owned(),
            },
            (default, _) => default.toml().unwrap_or_default(),
        }
    }

    fn count_example(&self) -> &'static str {
        match (self.table, self.name) {
            (TENANTS | TENANT, "max_in_flight" | "processes") => "2",
            (TENANTS | TENANT, _) => "20",
            (ACCESS, _) => "1001",
            (CGROUP, _) => "32",
            _ => "1000",
        }
    }

    fn names_example(&self) -> &'static str {
        match (self.table, self.name) {
            (ACCESS, "bulkheads") => "[\"thumbnail\"]",
            (ACCESS, _) => "[\"acme\"]",
            (SYSCALLS, _) => "[\"mlock\"]",
            _ => "[\"other\"]",
        }
    }

    fn text_example(&self) -> &'static str {
        match self.table {
            SUPERVISOR => "\"127.0.0.1:9464\"",
            SANDBOX => "\"auto\"",
            _ => "\"www-data\"",
        }
    }

    fn path_example(&self) -> &'static str {
        match self.name {
            "socket" => "\"/run/bulkhead/jobs.sock\"",
            "admin" => "\"/run/bulkhead/admin.sock\"",
            "library" => "\"./libworker.so\"",
            "http_token_file" => "\"/etc/bulkhead/token\"",
            "crash_dir" => "\"/var/lib/bulkhead/crashes\"",
            _ => "\"/srv/work\"",
        }
    }
}

impl Preset {
    /// The value as it would stand in the file, if it is one.
    pub(super) fn toml(&self) -> Option<String> {
        match *self {
            Self::Duration(duration) => Some(units::duration_literal(&duration)),
            Self::Size(bytes) => Some(format!("\"{}\"", units::format_size(bytes))),
            Self::Count(count) => Some(count.to_string()),
            Self::Share(share) => Some(units::share_literal(&share)),
            Self::Boolean(on) => Some(on.to_string()),
            Self::Mode(mode) => Some(format!("\"{mode:04o}\"")),
            Self::Word(word) => Some(format!("\"{word}\"")),
            Self::Described(_) => None,
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.toml()) {
            (Self::Described(words), _) => f.write_str(words),
            (_, toml) => write!(f, "`{}`", toml.unwrap_or_default()),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Duration { min } if min.is_zero() => f.write_str("duration"),
            Self::Duration { min } => write!(f, "duration, at least {}", units::format_duration(min)),
            Self::Size { min: 0, max: defaults::NUMBER_MAX } => f.write_str("size"),
            Self::Size { min, max: defaults::NUMBER_MAX } => {
                write!(f, "size, at least {}", units::size_bound(min))
            }
            Self::Size { min, max } => write!(f, "size, {min} to {}", units::format_size(max)),
            Self::Count { min, max: defaults::NUMBER_MAX } => write!(f, "number, at least {min}"),
            Self::Count { min, max } => write!(f, "number, {min} to {max}"),
            Self::Share { none, all } => {
                write!(
                    f,
                    "share, {} 0 {} 1",
                    if none { "from" } else { "above" },
                    if all { "to" } else { "to below" }
                )
            }
            Self::Number { max } => write!(f, "number, whole or not, above 0 to {max}"),
            Self::Boolean => f.write_str("`true` or `false`"),
            Self::ZeroForNow => f.write_str("`0`"),
            Self::Mode => f.write_str("octal digits as a string"),
            Self::Path => f.write_str("path"),
            Self::Text => f.write_str("string"),
            Self::Word { now, .. } => {
                let words: Vec<_> = now.iter().map(|word| format!("`\"{word}\"`")).collect();
                f.write_str(&words.join(", "))
            }
            Self::Words { of } => {
                let words: Vec<_> = of.iter().map(|word| format!("`\"{word}\"`")).collect();
                write!(f, "array of {}", words.join(", "))
            }
            Self::Program => f.write_str("array of strings"),
            Self::Names { max } => write!(f, "array of names, at most {max}"),
            Self::Paths { max } => write!(f, "array of paths, at most {max}"),
            Self::Ids => f.write_str("range of ids as a string"),
            Self::Environment => f.write_str("table of strings"),
            Self::Limit(resource) => f.write_str(match resource.measure() {
                Measure::Bytes => "size or `\"unlimited\"`",
                Measure::Count => "number or `\"unlimited\"`",
                Measure::Seconds => "duration, number of seconds, or `\"unlimited\"`",
                Measure::Microseconds => "duration, number of microseconds, or `\"unlimited\"`",
                Measure::Zero => "`0`",
            }),
            Self::Table => f.write_str("table"),
            Self::Tables { max } => write!(f, "array of tables, at most {max}"),
        }
    }
}
