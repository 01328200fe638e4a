//! Documents of the admin API. Each document is a type that serializes to JSON, deserializes from JSON, and generates
//! its own JSON schema. This crate contains no supervisor logic.
//!
//! A document can come from a newer or older supervisor. Deserialization ignores unknown fields, uses
//! defaults for absent fields, and keeps unknown words unchanged.

mod advice;
mod change;
mod crash;
mod events;
mod histogram;
mod jobs;
mod native;
mod outcome;
mod reload;
mod responses;
mod snapshot;
mod word;

pub use advice::{Advice, DeadlineMisses, Kept, Marks, Observations, Proposal, Setting};
pub use bulkhead_policy::{BreakerState, BulkheadState, JobProgress};
pub use bulkhead_shared::{Vocabulary, exit, text};
pub use change::{BreakerMode, Change, ChangedPer, ChangedRate, TenantChange, TenantRate};
pub use crash::{
    Cause, CauseKind, CrashId, CrashJob, CrashReport, Crashes, InvalidCrashId, JOBS_MAX, PAYLOAD_BYTES_MAX,
    PAYLOADS_BYTES_MAX, Replay, ReplayVerdict, ReplayedJob, Stage, Summary, Usage, Victim,
};
pub use events::{Event, EventKind, Severity};
pub use histogram::Histogram;
pub use jobs::{Job, Jobs};
pub use native::{
    NATIVE_BYTES_MAX, NATIVE_FRAMES_MAX, NATIVE_FRAMES_TOTAL_MAX, NATIVE_THREADS_MAX, NativeCrash,
    NativeFrame, NativeThread, hex,
};
pub use outcome::{CommandFailure, JobOutcome, Problem, millis};
pub use reload::{BulkheadChange, ChangeKind, Changes, ConfigProblem, RejectedConfig, Reloaded};
pub use responses::{Done, LogLine, Readiness, ShortState, UpgradeStep};
pub use snapshot::{
    Adaptive, Bulkheads, Confinement, Latencies, Percentiles, Rate, Snapshot, Tenant, Worker,
};
pub use word::{Service, Word};

/// Text field of a document. The supervisor mostly borrows static strings, whereas programs that read documents own
/// their strings.
pub type Text = std::borrow::Cow<'static, str>;
