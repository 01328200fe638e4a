//! The tables of a bulkhead about the life of its workers. What they become are policy's own types.

use std::time::Duration;

use bulkhead_policy::{Health, Recycle, Restart, RestartPolicy, Start, StartMode};

use super::kinds::*;
use crate::defaults::*;
use crate::table::section;

section! {
    /// `restart`: when a dead worker is started again.
    RestartKeys => Restart, "bulkhead.NAME.restart", by rows;

    /// Which deaths are followed by a restart: all, all but a clean exit, or none.
    policy: RestartPolicy as one_of::<RestartPolicy>(), default RestartPolicy::Always;
    /// The first restart comes at once, the second after this pause; then it doubles, with jitter.
    backoff: Duration as at_least(ANY), default Duration::from_millis(100);
    /// The longest pause, and that between probes of a failed worker slot. At least `backoff`.
    backoff_max: Duration as at_least(ANY), default Duration::from_secs(30);
    /// This many deaths that say the worker is unfit, within `within`, are borne; one more and its slot has failed.
    max: u32 as count(1, RESTART_CEILING), default 5;
    /// The window in which deaths are counted.
    within: Duration as at_least(SOME), default Duration::from_secs(30);
}

section! {
    /// `start`: how long a start may take, and what is started ahead.
    StartKeys => Start, "bulkhead.NAME.start", by rows;

    /// From the start of the process to its hello; until the process runs, which is the supervisor's doing, it has a
    /// minute at least.
    handshake: Duration as at_least(SOME), default Duration::from_secs(5);
    /// From the hello to ready; the worker can ask for more.
    ready: Duration as at_least(SOME), default Duration::from_secs(60);
    /// How a worker process comes to be: started anew, or forked from one that is initialised once; see
    /// [below](#fork).
    mode: StartMode as one_of::<StartMode>(), default StartMode::Spawn, reload ReplacesWorkers;
    /// Workers that are kept ready beside those that run jobs, to take over at once; see [below](#spares).
    spares: u32 as count(0, SPARES_CEILING), default 0;
}

section! {
    /// `health`: when a silent worker counts as hung.
    HealthKeys => Health, "bulkhead.NAME.health", by rows;

    /// Time between heartbeats.
    heartbeat: Duration as at_least(SOME), default Duration::from_secs(1), reload ReplacesWorkers;
    /// A worker that misses this many in a row is hung and killed.
    missed: u32 as count(1, MISSED_CEILING), default 5;
}

section! {
    /// `recycle`: when a worker that works is replaced all the same.
    RecycleKeys => Recycle, "bulkhead.NAME.recycle", by rows;

    /// A worker begins this many jobs and no more: 1 is a fresh process for each job. Its replacement is started
    /// early enough to be ready by then, and waits for its turn.
    jobs: u64 as count(1, NUMBER_MAX), without "off", such as "1000";
    /// Replace a worker whose resident memory exceeds this.
    rss: u64 as size(1, NUMBER_MAX), without "off", such as "\"8MiB\"";
    /// Replace a worker this long after its start.
    age: Duration as at_least(SOME), without "off", such as "\"5s\"";
}
