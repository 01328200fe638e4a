//! Declares a bulkhead's `restart`, `start`, `health` and `recycle` tables, which control the life cycle of its
//! workers. `relations` checks rules that span several keys. `policy` defines the types of the validated values and
//! acts on them.

use std::time::Duration;

use bulkhead_policy::{Health, Recycle, Restart, RestartPolicy, Start, StartMode};

use super::kinds::*;
use crate::defaults::*;
use crate::table::section;

section! {
    /// `restart`: rules for restarting dead workers.
    RestartKeys => Restart, "bulkhead.NAME.restart", by rows;

    /// Deaths after which the worker is restarted: every death (`"always"`), every death except for an exit
    /// with status 0 while idle (`"on-failure"`), or none (`"never"`).
    policy: RestartPolicy as one_of::<RestartPolicy>(), default RestartPolicy::Always;
    /// Pause before the second consecutive restart of a worker; the first restart is immediate. The pause
    /// doubles with each further restart, with jitter.
    backoff: Duration as at_least(ANY_DURATION), default Duration::from_millis(100);
    /// Maximum pause between restarts. Also the interval at which a worker is started in a failed slot to
    /// test whether the slot works again. At least `backoff`.
    backoff_max: Duration as at_least(ANY_DURATION), default Duration::from_secs(30);
    /// Maximum number of deaths in a worker slot during the `within` period. One more death marks the slot as
    /// failed. Only deaths that suggest a faulty worker count.
    max: u32 as count(1, RESTART_CEILING), default 5;
    /// Period over which deaths are counted for `max`.
    within: Duration as at_least(POSITIVE_DURATION), default Duration::from_secs(30);
}

section! {
    /// `start`: time limits for starting workers, template mode, and spares.
    StartKeys => Start, "bulkhead.NAME.start", by rows;

    /// Maximum time from the start of a worker process until it sends HELLO. Until the process has been
    /// started, the limit is at least one minute.
    handshake: Duration as at_least(POSITIVE_DURATION), default Duration::from_secs(5);
    /// Maximum time from a worker's HELLO until the worker is ready. The worker can ask for more time.
    ready: Duration as at_least(POSITIVE_DURATION), default Duration::from_secs(60);
    /// Method of creating worker processes: each as a new process (`"spawn"`), or forked from a template that
    /// is initialised once (`"fork"`); see [below](#fork).
    mode: StartMode as one_of::<StartMode>(), default StartMode::Spawn, reload ReplacesWorkers;
    /// Number of additional workers that are kept ready, so that one can take over a worker slot immediately;
    /// see [below](#spares).
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
    /// `recycle`: limits after which a worker that still works is replaced.
    RecycleKeys => Recycle, "bulkhead.NAME.recycle", by rows;

    /// Maximum number of jobs that a worker runs before it is replaced. With 1, each job gets a fresh
    /// process. The replacement is started early enough to be ready in time, and then waits until it is
    /// needed.
    jobs: u64 as count(1, NUMBER_MAX), without "off", such as "1000";
    /// Resident memory above which a worker is replaced.
    rss: u64 as size(1, NUMBER_MAX), without "off", such as "\"8MiB\"";
    /// Age at which a worker is replaced.
    age: Duration as at_least(POSITIVE_DURATION), without "off", such as "\"5s\"";
}
