//! Declares each kind of event for operators once, with its fields in the order in which the log shows them. The data
//! plane and the control plane emit events. `observe::events` in the control plane numbers, limits and stores them.

use bulkhead_shared::vocabulary;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{
    BreakerState, BulkheadState, Changes, CrashId, JobProgress, Rate, ReplayVerdict, Service, Text, Word,
};

vocabulary! {
    /// Severity of an event.
    Severity {
        /// Normal operation.
        Info = "info",
        /// Operators should know about the event.
        Warning = "warning",
        /// Operators should act on the event.
        Critical = "critical",
    }
}

/// An event, as shown by `GET /v1/events` and `GET /v1/watch`. Programs can show an event even if they do not know its
/// kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Event {
    /// Time of the event in UTC, formatted as in RFC 3339.
    pub at: String,
    /// Sequence number of the event, starting at 1.
    pub seq: u64,
    /// Severity of the event.
    pub severity: Word<Severity>,
    /// Kind of the event.
    pub kind: Text,
    /// Name of the bulkhead that the event is about. Absent if the event is about the whole supervisor.
    pub bulkhead: Option<String>,
    /// Further fields, which depend on the kind.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

impl Event {
    /// Returns the kind with its fields. Returns [`EventKind::Unknown`] if this version does not know the
    /// kind, or if a field has the wrong type.
    pub fn event_kind(&self) -> EventKind {
        let mut tagged = self.fields.clone();
        tagged.insert("kind".to_owned(), json!(self.kind));
        EventKind::deserialize(Value::Object(tagged)).unwrap_or(EventKind::Unknown)
    }
}

/// Declares the event kinds. Fields in the first pair of braces are always present. Fields in the second pair
/// are omitted if they have no value.
macro_rules! events {
    ($($(#[serde($flag:ident)])? $(#[doc = $sentence:literal])+ $variant:ident = $kind:literal
        { $($field:ident: $type:ty),* } $({ $($more:ident: $more_type:ty),* })?;)*) => {
        /// Kind of an event, with its fields.
        #[derive(Clone, Debug, PartialEq, Deserialize)]
        #[serde(tag = "kind")]
        #[expect(missing_docs, reason = "the documentation describes each field under the same name")]
        pub enum EventKind {
            $($(#[doc = $sentence])+
            $(#[serde($flag)])?
            #[serde(rename = $kind)]
            $variant {
                $(#[serde(default)] $field: $type,)*
                $($(#[serde(default)] $more: Option<$more_type>,)*)?
            },)*
            /// An event kind that this version does not know.
            #[serde(other)]
            Unknown,
        }

        impl EventKind {
            /// The names of all event kinds.
            pub const KINDS: &[&str] = &[$($kind),*];

            /// Rows of the table of events in the documentation. Each row contains the name, the fields and the
            /// description of an event kind.
            #[cfg(test)]
            const ROWS: &[(&str, &[&str], &str)] = &[$((
                $kind,
                &[$(stringify!($field),)* $($(stringify!($more)),*)?],
                concat!($($sentence),+),
            )),*];

            /// Returns the name of the event kind.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => $kind,)*
                    Self::Unknown => "unknown",
                }
            }

            /// Returns the fields with their values, in the order in which the log shows them.
            pub fn fields(&self) -> Vec<(&'static str, Value)> {
                match self {
                    $(Self::$variant { $($field,)* $($($more,)*)? } => {
                        #[allow(unused_mut, reason = "not every kind has optional fields")]
                        let mut fields = vec![$((stringify!($field), json!($field))),*];
                        $($(fields.extend($more.as_ref().map(|value| (stringify!($more), json!(value))));)*)?
                        fields
                    })*
                    Self::Unknown => Vec::new(),
                }
            }
        }
    };
}

events! {
    /// A worker process has started.
    WorkerStarted = "worker_started" { pid: u32, slot: u32, generation: u32 };
    /// A worker has become ready for jobs.
    WorkerReady = "worker_ready" { pid: u32, generation: u32, after_ms: f64 };
    /// A worker's program could not be executed.
    WorkerNotStarted = "worker_not_started" { slot: u32, message: String };
    /// A worker has exited.
    WorkerExited = "worker_exited" {
        pid: u32, slot: u32, generation: u32, exit_code: Option<i32>, signal: Option<Text>, killed: Option<String>,
        uptime_ms: f64, served: u64, in_flight: u32
    };
    /// A worker is killed because it stopped responding.
    WorkerHung = "worker_hung" { pid: u32, reason: String };
    /// A worker is killed because of a deadline or a protocol violation, or because it did not exit when
    /// asked to.
    WorkerKilled = "worker_killed" { pid: u32, reason: String };
    /// A worker is replaced because of `recycle`, a restart, a resize or a reload.
    WorkerRecycled = "worker_recycled" { pid: u32, reason: Text };
    /// A spare worker has taken over a slot.
    SpareTookOver = "spare_took_over" { pid: u32, slot: u32, generation: u32 };
    /// A worker that should be replaced stays in service, because its replacement failed to start.
    ReplacementFailed = "replacement_failed" { slot: u32, message: String, serves_on: bool } { again_in_ms: f64 };
    /// The next worker of a slot starts after a delay.
    RestartBackoff = "restart_backoff" { slot: u32, delay_ms: f64 };
    /// The bulkhead has no worker, and none of its slots will get one soon.
    BulkheadFailed = "bulkhead_failed" { message: String };
    /// A job is sent to another worker, because the worker that ran it has died.
    JobRetried = "job_retried" {
        job: String, attempts: u32, pid: Option<u32>, reason: Option<Text>, message: Option<String>
    } { operation: String, tenant: String };
    /// Jobs with this operation and payload are rejected from now on, because they have killed workers.
    JobQuarantined = "job_quarantined" { job: String, digest: String } { operation: String, tenant: String };
    /// A job was still running at its deadline, or exceeded its run limit.
    JobTimeout = "job_timeout" {
        job: Option<String>, operation: String, tenant: String, trace_id: Option<String>, pid: Option<u32>,
        payload_bytes: u64, timeout_ms: f64, run_limit_ms: Option<f64>, actual_duration_ms: f64
    };
    /// A worker has died with this job in flight.
    JobCrashed = "job_crashed" {
        job: Option<String>, operation: String, tenant: String, trace_id: Option<String>, pid: Option<u32>,
        payload_bytes: u64, reason: Option<Text>, message: Option<String>, attempts: u32
    };
    /// An operator has cancelled a job.
    JobCancelled = "job_cancelled" {
        job: String, operation: String, tenant: String, trace_id: Option<String>, pid: Option<u32>, state: Word<JobProgress>
    };
    /// The breaker has opened, so jobs are rejected immediately.
    BreakerOpened = "breaker_opened" { from: Word<BreakerState>, to: Word<BreakerState> }
        { calls: u32, failure_rate: f64, slow_rate: f64 };
    /// The breaker admits a few jobs as probes.
    BreakerHalfOpen = "breaker_half_open" { from: Word<BreakerState>, to: Word<BreakerState> }
        { calls: u32, failure_rate: f64, slow_rate: f64 };
    /// The breaker has closed, so jobs are admitted again.
    BreakerClosed = "breaker_closed" { from: Word<BreakerState>, to: Word<BreakerState> }
        { calls: u32, failure_rate: f64, slow_rate: f64 };
    /// The queue has reached the level set by `pressure.warn`.
    QueuePressure = "queue_pressure" { queued: usize, queue_capacity: usize, percent: usize };
    /// Jobs exceed the rate limit of the tenant in `tenant` or, without this field, the rate limit of the
    /// bulkhead.
    TenantThrottled = "tenant_throttled" { limit: String, retry_after_ms: f64 } { tenant: String };
    /// More than half of the last 64 evicted jobs (at least 32) belonged to one tenant.
    TenantEvictions = "tenant_evictions" { tenant: String, share: f64 };
    /// Jobs of a bulkhead are forwarded to a fallback.
    FallbackUsed = "fallback_used" { target: String, reason: Option<Text>, jobs: u64 };
    /// A worker made a system call that its sandbox forbids.
    SandboxViolation = "sandbox_violation" { pid: u32, process: u32, system_call: Text };
    /// A worker tried to connect as a client.
    WorkerRefused = "worker_refused" {
        socket: Text, uid: Option<u32>, gid: Option<u32>, pid: Option<u32>, reason: Text, message: String, refused: u64
    };
    /// A client was rejected.
    AccessRefused = "access_refused" {
        socket: Text, uid: Option<u32>, gid: Option<u32>, pid: Option<u32>, reason: Text, message: String, refused: u64
    };
    /// Connections waited at least a second to be accepted, because too many clients connected at the same
    /// time.
    ClientsDelayed = "clients_delayed" { for_ms: u64, accepted: u64 };
    /// The adaptive limit has changed. Reported at most once every ten seconds.
    LimitAdapted = "limit_adapted" { from: u32, to: u32, latency_ms: f64, target_ms: f64, min: u32, max: u32, mode: Text };
    /// An operator has changed limits.
    LimitsChanged = "limits_changed" {}
        { max_in_flight: u32, processes: u32, max_queue: u32, rate_limit: Option<Rate>, tenant: String };
    /// A new version of the configuration file has been applied.
    ConfigReloaded = "config_reloaded" { file: String, changes: Changes };
    /// The configuration file has errors and was not applied.
    ConfigRejected = "config_rejected" { file: String }
        { line: Option<usize>, message: Option<String>, errors: Vec<Value>, errors_in_all: usize };
    /// The last job of a bulkhead that was removed from the configuration has ended.
    BulkheadRemoved = "bulkhead_removed" { submitted: u64, done: u64 };
    /// A bulkhead, or the whole supervisor, no longer accepts jobs.
    Draining = "draining" {} { drain_timeout_ms: u64 };
    /// A bulkhead accepts jobs again.
    Resumed = "resumed" {};
    /// The supervisor has stopped.
    Stopped = "stopped" {};
    /// An upgrade has started a new program.
    UpgradeStarted = "upgrade_started" { program: String, pid: u32 };
    /// The new program has taken over. Both programs report this event.
    UpgradeSwitched = "upgrade_switched" { pid: u32, version: String };
    /// The upgrade is complete. The old program reports that the new program is the main process; the new
    /// program reports that the old program has exited.
    UpgradeFinished = "upgrade_finished" { pid: u32, version: String };
    /// The upgrade failed at the step in `step`. The old program continues to serve, unless it is stopping.
    UpgradeFailed = "upgrade_failed" { step: Text, message: String };
    /// Some crashes were not reported, because too many occurred in a short time.
    CrashesNotReported = "crashes_not_reported" { crashes: u64, reported_per_second: u32 };
    /// The job of a crash report was run again.
    CrashReplayed = "crash_replayed" { report: Option<CrashId>, verdict: Word<ReplayVerdict> };
    /// The file of a listening socket was removed.
    SocketRemoved = "socket_removed" { socket: String, path: String, message: String };
    /// The supervisor has created the file of a listening socket again.
    SocketRenewed = "socket_renewed" { socket: String, path: String };
    /// The supervisor could not create the file of a listening socket again.
    SocketNotRenewed = "socket_not_renewed" { socket: String, path: String, message: String };
    /// The supervisor did not run for a while, because it was stopped or got no processor time, or because the machine
    /// was suspended.
    HeldUp = "held_up" { late_ms: u64 } { suspended_ms: u64 };
    /// An error occurred in the supervisor itself.
    SupervisorTrouble = "supervisor_trouble" { what: String, detail: String };
    /// Some events of the kind in `of` were suppressed.
    EventsSuppressed = "events_suppressed" { of: Text, suppressed: u64 };
    /// The state of a bulkhead, reported on SIGUSR1.
    Summary = "summary" {
        state: Word<BulkheadState>, service: Option<Word<Service>>, service_cause: Option<String>, workers: usize,
        in_flight: u64, limit: u64, queued: u64, done: u64, failed: u64, crashed: u64, deadline_exceeded: u64,
        cancelled: u64, rejected: u64, restarts: u64
    };
    #[serde(skip_deserializing)]
    /// The state of the whole supervisor, reported on SIGUSR1.
    SummaryOfAll = "summary" { clients: usize, buffered_bytes: usize, undelivered_bytes: usize, keeper_pid: Option<u32> };
}

impl EventKind {
    /// Returns true if events of this kind can be as frequent as jobs, for example because each event reports a single
    /// job or worker. Events of other kinds report state changes and are never suppressed.
    pub const fn is_frequent(&self) -> bool {
        matches!(
            self,
            Self::WorkerStarted { .. }
                | Self::WorkerReady { .. }
                | Self::WorkerExited { .. }
                | Self::WorkerKilled { .. }
                | Self::WorkerRecycled { .. }
                | Self::SpareTookOver { .. }
                | Self::RestartBackoff { .. }
                | Self::JobTimeout { .. }
                | Self::JobCancelled { .. }
                | Self::JobCrashed { .. }
                | Self::JobRetried { .. }
                | Self::QueuePressure { .. }
                | Self::TenantThrottled { .. }
                | Self::SandboxViolation { .. }
        )
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations/events.md");

    fn table() -> String {
        let mut table = String::from("| kind | fields | |\n| --- | --- | --- |\n");
        for (kind, fields, sentence) in EventKind::ROWS {
            let fields: Vec<String> = fields.iter().map(|field| format!("`{field}`")).collect();
            writeln!(table, "| `{kind}` | {} | {} |", fields.join(" "), sentence.trim()).unwrap();
        }
        table
    }

    /// Run `UPDATE_DOCS=1 cargo test -p bulkhead-api --lib events` to update the table of events in the documentation.
    #[test]
    fn documentation_lists_all_event_kinds() {
        let docs = std::fs::read_to_string(DOCS).unwrap();
        let (head, rest) = docs.split_once("<!-- events -->\n").expect("the page has no start marker");
        let (_, tail) = rest.split_once("<!-- end -->").expect("the page has no end marker");
        let current = format!("{head}<!-- events -->\n{}<!-- end -->{tail}", table());
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(DOCS, current).unwrap();
            return;
        }
        assert!(
            docs == current,
            "docs/operations/events.md is out of date; run this test with UPDATE_DOCS=1"
        );
    }

    #[test]
    fn event_from_newer_supervisor_can_be_read() {
        let document = json!({
            "at": "2026-11-21T14:07:35.187Z", "seq": 7, "severity": "fatal", "kind": "moon_rose", "bulkhead": "b",
            "phase": "full",
        });
        let event = Event::deserialize(&document).unwrap();
        assert_eq!((event.event_kind(), event.severity.as_str()), (EventKind::Unknown, "fatal"));
        assert_eq!((&*event.kind, &event.fields["phase"]), ("moon_rose", &json!("full")));
        assert_eq!(serde_json::to_value(&event).unwrap(), document, "unknown fields are kept");
        let document = json!({"kind": "worker_started", "pid": 5, "colour": "red", "seq": 1});
        let kind = Event::deserialize(document).unwrap().event_kind();
        assert_eq!(kind, EventKind::WorkerStarted { pid: 5, slot: 0, generation: 0 });
        let document = json!({"kind": "worker_started", "pid": "five"});
        assert_eq!(Event::deserialize(document).unwrap().event_kind(), EventKind::Unknown);
        assert_eq!(Event::deserialize(json!({})).unwrap().event_kind(), EventKind::Unknown);
    }

    #[test]
    fn event_kinds_survive_serialization() {
        for kind in EventKind::KINDS {
            let event_kind = Event::deserialize(json!({"kind": kind})).unwrap().event_kind();
            assert_eq!(event_kind.name(), *kind);
            let fields =
                event_kind.fields().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            let again = Event { kind: (*kind).into(), fields, ..Event::default() };
            assert_eq!(again.event_kind(), event_kind);
        }
    }

    #[test]
    fn unset_event_fields_are_omitted() {
        let open = Word::from(BreakerState::Open);
        let kind = EventKind::BreakerOpened {
            from: open.clone(),
            to: open,
            calls: None,
            failure_rate: None,
            slow_rate: None,
        };
        assert_eq!(kind.fields(), [("from", json!("open")), ("to", json!("open"))]);
        let kind = EventKind::LimitsChanged {
            max_in_flight: Some(2),
            processes: None,
            max_queue: None,
            rate_limit: Some(None),
            tenant: None,
        };
        assert_eq!(kind.fields(), [("max_in_flight", json!(2)), ("rate_limit", Value::Null)]);
    }
}
