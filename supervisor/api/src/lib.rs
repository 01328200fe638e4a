//! The documents that a supervisor writes and that people and programs read: each described once, as a type that is
//! written and read as JSON and says its own JSON schema. Nothing here decides anything.
//!
//! A document may come from a supervisor that is newer or older than its reader: a field that the reader does not
//! know is skipped, one that is absent has its default, and a word that is not in its vocabulary is kept as it is.

mod advice;
mod answers;
mod change;
mod crash;
mod events;
mod histogram;
mod outcome;
mod reload;
mod snapshot;
mod word;

pub use advice::{Advice, Kept, Late, Marks, Proposal, Seen, Setting};
pub use answers::{Done, LogLine, Readiness, ShortState};
pub use bulkhead_policy::{BreakerState, BulkheadState};
pub use bulkhead_shared::{Vocabulary, text};
pub use change::{BreakerMode, Change, ChangedPer, ChangedRate, TenantChange, TenantRate};
pub use crash::{
    Cause, CauseKind, CrashId, CrashJob, CrashReport, Crashes, JOBS_MAX, NoCrashId, PAYLOAD_BYTES_MAX,
    PAYLOADS_BYTES_MAX, Replay, ReplayVerdict, ReplayedJob, Stage, Summary, Usage, Victim,
};
pub use events::{Event, Severity, What};
pub use histogram::Histogram;
pub use outcome::{JobOutcome, Problem, millis};
pub use reload::{BulkheadChange, ChangeKind, Changes, Reloaded};
pub use snapshot::{
    Adaptive, Bulkheads, Confinement, Latencies, Percentiles, Rate, Snapshot, Tenant, Worker,
};
pub use word::{Service, Word};

/// A text that the supervisor mostly has at hand, and that a reader owns.
pub type Text = std::borrow::Cow<'static, str>;
