//! Tables of a bulkhead about the life cycle of its workers. `policy` defines the types of the checked
//! values.

use std::time::Duration;

use bulkhead_policy::{Health, Recycle, Restart, RestartPolicy, Start, StartMode};

use super::kinds::*;
use crate::defaults::*;
use crate::table::section;

section! {
    /// `restart`: restarts of dead workers.
    RestartKeys => Restart, "bulkhead.NAME.restart", by rows;

    /// Deaths after which a worker is restarted: all (`"always"`), all except for an exit with status 0 while
    /// idle (`"on-failure"`), or none (`"never"`).
    policy: RestartPolicy as one_of::<RestartPolicy>(), default RestartPolicy::Always;
    /// Pause before the second restart; the first is immediate. The pause then doubles for each restart, with
    /// jitter.
    backoff: Duration as at_least(ANY_DURATION), default Duration::from_millis(100);
    /// Maximum pause between restarts, and the pause between probes of a failed worker slot. At least
    /// `backoff`.
    backoff_max: Duration as at_least(ANY_DURATION), default Duration::from_secs(30);
    /// Number of deaths within `within` that a worker slot survives. With one more, the slot has failed. Only
    /// deaths that indicate an unfit worker count.
    max: u32 as count(1, RESTART_CEILING), default 5;
    /// Period in which deaths are counted.
    within: Duration as at_least(POSITIVE_DURATION), default Duration::from_secs(30);
}

section! {
    /// `start`: time limits for starting workers, template mode, and spares.
    StartKeys => Start, "bulkhead.NAME.start", by rows;

    /// Maximum time from the moment when the process runs to its hello. Until the supervisor has started the process,
    /// the limit is at least one minute.
    handshake: Duration as at_least(POSITIVE_DURATION), default Duration::from_secs(5);
    /// Maximum time from the hello to ready. The worker can ask for more time.
    ready: Duration as at_least(POSITIVE_DURATION), default Duration::from_secs(60);
    /// Creation of worker processes: as new processes (`"spawn"`), or forked from a template that is
    /// initialised once (`"fork"`); see [below](#fork).
    mode: StartMode as one_of::<StartMode>(), default StartMode::Spawn, reload ReplacesWorkers;
    /// Number of ready workers kept in addition to the working ones, to take over immediately; see
    /// [below](#spares).
    spares: u32 as count(0, SPARES_CEILING), default 0;
}

section! {
    /// `health`: detection of unresponsive workers.
    HealthKeys => Health, "bulkhead.NAME.health", by rows;

    /// Interval between heartbeats.
    heartbeat: Duration as at_least(POSITIVE_DURATION), default Duration::from_secs(1), reload ReplacesWorkers;
    /// Number of consecutive missed heartbeats after which a worker counts as hung and is killed.
    missed: u32 as count(1, MISSED_CEILING), default 5;
}

section! {
    /// `recycle`: replacement of working workers.
    RecycleKeys => Recycle, "bulkhead.NAME.recycle", by rows;

    /// Maximum number of jobs that a worker begins. With 1, each job gets a fresh process. The replacement is
    /// started early enough to be ready in time, and then waits until it is needed.
    jobs: u64 as count(1, NUMBER_MAX), without "off", such as "1000";
    /// Resident memory above which a worker is replaced.
    rss: u64 as size(1, NUMBER_MAX), without "off", such as "\"8MiB\"";
    /// Time after its start at which a worker is replaced.
    age: Duration as at_least(POSITIVE_DURATION), without "off", such as "\"5s\"";
}
