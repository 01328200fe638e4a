//! A pure state machine that makes the decisions of one bulkhead.
//!
//! [`Bulkhead`] owns the queue, the workers and their slots, the assignment of jobs to workers, and the restart
//! history. The caller passes in each [`Event`] with the current time and performs the returned [`Action`]s. The crate
//! never blocks, performs no I/O and does not read the clock. Its only source of randomness is the given seed. Since
//! time and seed are arguments, a sequence of events can be replayed.
//!
//! ```
//! use bulkhead_policy::{Action, Bulkhead, Capabilities, Event, Limits, Submission, Time};
//!
//! let mut bulkhead = Bulkhead::<&str>::new(Limits::default(), 42);
//! let mut actions = Vec::new();
//! bulkhead.apply(Time::ZERO, Event::Start, &mut actions);
//! let Some(Action::Spawn { worker, .. }) = actions.pop() else { panic!() };
//! bulkhead.apply(Time::ZERO, Event::Spawned { worker, pid: 7 }, &mut actions);
//! let hello = Event::Hello { worker, capabilities: Capabilities::default(), journal: None };
//! bulkhead.apply(Time::ZERO, hello, &mut actions);
//! bulkhead.apply(Time::ZERO, Event::Ready { worker }, &mut actions);
//! actions.clear();
//! bulkhead.apply(Time::ZERO, Event::Submit(Submission::new("my job")), &mut actions);
//! assert!(matches!(actions[..], [Action::Dispatch { .. }]));
//! ```

mod adaptive;
mod breaker;
mod budget;
mod bulkhead;
mod ending;
mod growth;
mod jobs;
mod limits;
mod load;
mod messages;
mod poison;
mod queue;
mod rate;
mod restart;
mod retry_after;
mod tenants;
mod time;
mod timers;
mod worker;
mod workers;

pub use adaptive::{AdaptiveLimits, AdaptiveMode, AdaptiveView};
pub use breaker::{BreakerLimits, BreakerState, Transition};
pub use budget::RetryLimits;
pub use bulkhead::{
    Activity, Bulkhead, BulkheadState, Counters, HeldJob, JobProgress, JobView, PostMortem, TenantView,
    WorkerSummary, WorkerView,
};
pub use ending::{Death, Ending, KillReason, RecycleReason, RestartCause};
pub use limits::{
    Health, Limits, Overflow, Pressure, RARE_HEARTBEATS_MISSED, Recycle, Restart, RestartPolicy, Start,
    StartMode, TenantLimits, TenantOverrides,
};
pub use messages::{
    Action, Capabilities, Event, JobJournal, JobOutcome, LimitChange, OperatorEvent, Reply, StopReason,
    Submission, WorkerId,
};
pub use poison::{Digest, PoisonLimits};
pub use rate::{RateLimit, RatePer};
pub use tenants::TenantId;
pub use time::Time;
pub use timers::Timers;
pub use worker::WORKER_STATES;
