//! Defines crash reports, their IDs, and the results of replaying their jobs. The data plane fills in the reports, and
//! the control plane stores them. Reports that are read from files must be checked with [`CrashReport::is_valid`]. The
//! data plane decides which crashes are reported.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use bulkhead_shared::limits::{
    INLINE_PAYLOAD_BYTES_MAX, OPERATION_BYTES_MAX, TENANT_BYTES_MAX, is_bulkhead_name,
};
use bulkhead_shared::vocabulary;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{NativeCrash, Text, Word};

/// Maximum size of one job's payload in a report, in bytes. The data plane keeps a copy of payloads up to
/// this size while a worker has the job. For a larger payload, the report contains only the size.
pub const PAYLOAD_BYTES_MAX: usize = INLINE_PAYLOAD_BYTES_MAX;

/// Maximum total size of the payloads in one report, in bytes.
pub const PAYLOADS_BYTES_MAX: usize = 4 * PAYLOAD_BYTES_MAX;

/// Maximum number of jobs in one report.
pub const JOBS_MAX: usize = 32;

/// The ID of a crash report. It consists of the time of the crash in milliseconds and a number that the supervisor
/// increments with each crash. The text form, such as `20260307T101530123-0001`, is a valid file name. Sorting these
/// names sorts the reports by time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CrashId {
    at_ms: u64,
    number: u32,
}

/// Number of characters in the time part of a [`CrashId`], including the `T` between date and time.
const TIME_DIGITS: usize = 18;

impl CrashId {
    /// Creates the ID of a crash from its time and number.
    pub fn new(at: SystemTime, number: u32) -> Self {
        let since_epoch = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { at_ms: u64::try_from(since_epoch.as_millis()).unwrap_or(0), number }
    }

    fn at(self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(self.at_ms)
    }
}

impl fmt::Display for CrashId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = humantime::format_rfc3339_millis(self.at()).to_string();
        let digits: String = time.chars().filter(|c| c.is_ascii_digit() || *c == 'T').collect();
        write!(f, "{digits}-{:04}", self.number)
    }
}

/// Error for text that is not a valid crash report ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidCrashId;

impl fmt::Display for InvalidCrashId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this is not a crash report ID; such an ID looks like 20260307T101530123-0001")
    }
}

impl std::error::Error for InvalidCrashId {}

impl FromStr for CrashId {
    type Err = InvalidCrashId;

    /// Parses an ID. Accepts only the exact text that `Display` writes.
    fn from_str(text: &str) -> Result<Self, InvalidCrashId> {
        let (time, number) = text.split_once('-').ok_or(InvalidCrashId)?;
        if time.len() != TIME_DIGITS || !time.is_ascii() {
            return Err(InvalidCrashId);
        }
        let (mut rfc3339, mut digits) = (String::new(), time);
        for (count, mark) in [(4, '-'), (2, '-'), (2, 'T'), (2, ':'), (2, ':'), (2, '.'), (3, 'Z')] {
            let (part, rest) =
                digits.strip_prefix('T').unwrap_or(digits).split_at_checked(count).ok_or(InvalidCrashId)?;
            rfc3339.extend(part.chars().chain([mark]));
            digits = rest;
        }
        let at = humantime::parse_rfc3339(&rfc3339).map_err(|_| InvalidCrashId)?;
        let id = Self::new(at, number.parse().map_err(|_| InvalidCrashId)?);
        if id.to_string() == text { Ok(id) } else { Err(InvalidCrashId) }
    }
}

impl Serialize for CrashId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CrashId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

vocabulary! {
    /// Kind of a crash report. A report describes a crash that ended a job, a worker that failed to start, or a job
    /// that missed its deadline.
    CauseKind {
        /// The process exited on its own, with any exit status.
        Exit = "exit",
        /// A signal killed the process.
        Signal = "signal",
        /// The process ran out of memory.
        Oom = "oom",
        /// The process violated its sandbox.
        Violation = "violation",
        /// The process violated the protocol.
        Protocol = "protocol",
        /// The process stopped responding.
        Hung = "hung",
        /// The process did not send HELLO within the time limit.
        NoHello = "no_hello",
        /// The process did not become ready within the time limit.
        NotReady = "not_ready",
        /// A job was still running at its deadline. Nothing crashed, but the report shows what the job was doing.
        Deadline = "deadline",
    }
}

/// Cause of death of a worker or program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Cause {
    /// Kind of crash.
    #[serde(rename = "cause")]
    pub kind: Word<CauseKind>,
    /// Exit status of the process, if the kind is [`CauseKind::Exit`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Name of the signal that killed the process, if the kind is [`CauseKind::Signal`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// Name of the forbidden system call, if it is known and the kind is [`CauseKind::Violation`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_call: Option<String>,
    /// Human-readable description that completes a sentence about the process, such as `killed by SIGSEGV`.
    pub message: String,
}

impl Cause {
    /// Returns true if both causes are equal, apart from their messages.
    pub fn has_same_cause(&self, other: &Self) -> bool {
        self.kind == other.kind
            && self.exit_code == other.exit_code
            && self.signal == other.signal
            && self.system_call == other.system_call
    }
}

vocabulary! {
    /// The process that died.
    Victim {
        /// A worker.
        Worker = "worker",
        /// The program that an `exec` worker started for one job. The worker itself survives.
        Program = "program",
    }
}

vocabulary! {
    /// Activity of a worker at the time of its death.
    Stage {
        /// The worker was not ready yet.
        Starting = "starting",
        /// The worker had no job.
        Idle = "idle",
        /// The worker had at least one job.
        Working = "working",
    }
}

/// Resource usage of a process and its reaped descendants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub struct Usage {
    pub user_ms: u64,
    pub system_ms: u64,
    /// Peak resident memory, in bytes, of the process that used the most memory.
    pub max_rss_bytes: u64,
}

/// A crash report, as shown by `GET /v1/crashes/{id}` and stored in `crash_dir`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[expect(missing_docs, reason = "the field names match those of the events and are self-explanatory")]
pub struct CrashReport {
    #[schemars(with = "String")]
    pub id: CrashId,
    /// Time of the crash. If the report combines several crashes, the time of the latest crash.
    #[serde(with = "rfc3339")]
    #[schemars(with = "String")]
    pub at: SystemTime,
    /// Number of crashes that this report represents. Crashes are combined only if they have equal causes and occurred
    /// before a worker was ready.
    #[serde(default = "one")]
    pub count: u32,
    pub bulkhead: String,
    /// The tenant that the worker was reserved for, if tenants are isolated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub victim: Word<Victim>,
    pub stage: Word<Stage>,
    #[serde(flatten)]
    pub cause: Cause,
    /// Process ID of the worker, as seen by the supervisor. If a program died, this is the ID of the worker that
    /// started the program.
    pub pid: u32,
    pub slot: u32,
    pub generation: u32,
    pub uptime_ms: u64,
    /// Number of jobs that the worker had completed before the crash.
    pub served: u64,
    /// Resource usage of the worker. Absent if a program died, or if the worker died after its keeper.
    #[serde(default)]
    pub usage: Option<Usage>,
    /// Number of jobs that were in flight in the worker.
    pub in_flight: u32,
    /// Index, in `jobs`, of the job that caused the crash. Absent if that job is not known.
    #[serde(default)]
    pub culprit: Option<usize>,
    /// Jobs that were in flight in the worker. Contains only the oldest jobs if there were too many for one report.
    pub jobs: Vec<CrashJob>,
    #[serde(default)]
    pub stderr_tail: Option<String>,
    /// Stacks, as text, that the worker itself wrote when it exceeded a time limit. Only Python workers write them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime_stack: Option<String>,
    /// Backtraces, if a signal killed the process or the process exceeded a time limit. Added to the report shortly
    /// after the crash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub native: Option<NativeCrash>,
    /// Confinement of the worker, as read back from the kernel.
    #[serde(default)]
    #[schemars(with = "Option<crate::Confinement>")]
    pub confinement: Option<serde_json::Value>,
}

const fn one() -> u32 {
    1
}

/// A job in a crash report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[expect(missing_docs, reason = "the field names match those of the events and are self-explanatory")]
pub struct CrashJob {
    pub job: String,
    pub operation: String,
    pub tenant: String,
    #[serde(default)]
    pub trace_id: Option<String>,
    /// Number of attempts to run the job, including the attempt that ended with the crash.
    pub attempts: u32,
    /// Time in milliseconds between the dispatch of the job to this worker and the crash.
    pub ran_ms: u64,
    /// True if the client already had the outcome of this job, because its deadline had passed or the client had
    /// cancelled it. In that case, the supervisor knows nothing else about the job.
    pub is_answered: bool,
    /// True if the worker died before it read the job, so that the job had no effect.
    pub is_unread: bool,
    pub payload_bytes: u64,
    /// Payload in base64. Absent if the job had no payload, or if the supervisor kept no copy of it.
    #[serde(default, with = "base64_text", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub payload: Option<Vec<u8>>,
    /// BLAKE3 hash of the payload. Present if `payload` is present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<String>,
    /// Hash of the operation and the payload, as in the `job_quarantined` event. Present only if the bulkhead has a
    /// `poison` table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

impl CrashJob {
    /// Returns true if the job can be replayed.
    pub fn is_replayable(&self) -> bool {
        self.payload.is_some()
    }
}

/// Response of `GET /v1/crashes`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct Crashes {
    /// Crashes, oldest first.
    pub crashes: Vec<Summary>,
}

/// Summary of a crash report, as in the list of crashes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Crash")]
#[expect(missing_docs, reason = "the names match the report")]
pub struct Summary {
    #[schemars(with = "String")]
    pub id: CrashId,
    #[serde(with = "rfc3339")]
    #[schemars(with = "String")]
    pub at: SystemTime,
    pub count: u32,
    pub bulkhead: String,
    pub victim: Word<Victim>,
    pub stage: Word<Stage>,
    #[serde(flatten)]
    pub cause: Cause,
    /// Operation of the job that caused the crash, or of the only job in flight.
    pub operation: Option<String>,
    pub tenant: Option<String>,
    pub pid: u32,
    pub uptime_ms: u64,
    pub served: u64,
    pub in_flight: u32,
    /// True if at least one job in the report can be replayed.
    pub is_replayable: bool,
}

impl CrashReport {
    /// Returns the summary that appears in the list of crashes.
    pub fn summary(&self) -> Summary {
        let job = match (self.culprit, &self.jobs[..]) {
            (Some(culprit), jobs) => jobs.get(culprit),
            (None, [only]) => Some(only),
            _ => None,
        };
        let tenant = job.map(|job| job.tenant.clone()).or_else(|| self.tenant.clone());
        Summary {
            id: self.id,
            at: self.at,
            count: self.count,
            bulkhead: self.bulkhead.clone(),
            victim: self.victim.clone(),
            stage: self.stage.clone(),
            cause: self.cause.clone(),
            operation: job.map(|job| job.operation.clone()),
            tenant,
            pid: self.pid,
            uptime_ms: self.uptime_ms,
            served: self.served,
            in_flight: self.in_flight,
            is_replayable: self.jobs.iter().any(CrashJob::is_replayable),
        }
    }

    /// Returns true if the report is within the limits that the supervisor applies when it writes reports. Callers
    /// must check reports that they read from files, because any process could have written the files.
    pub fn is_valid(&self) -> bool {
        let is_short = |text: &str, max: usize| text.len() <= max && !text.contains('\0');
        let is_valid_job = |job: &CrashJob| {
            let payload = job.payload.as_ref().map_or(0, Vec::len);
            is_short(&job.operation, OPERATION_BYTES_MAX)
                && is_short(&job.tenant, TENANT_BYTES_MAX)
                && payload <= PAYLOAD_BYTES_MAX
        };
        is_bulkhead_name(&self.bulkhead)
            && self.jobs.len() <= JOBS_MAX
            && self.culprit.is_none_or(|culprit| culprit < self.jobs.len())
            && self.jobs.iter().all(is_valid_job)
            && self.native.as_ref().is_none_or(NativeCrash::is_valid)
    }
}

vocabulary! {
    /// Result of a replay. The variants are ordered by increasing similarity to the original crash.
    ReplayVerdict {
        /// The job did not run, because no worker was available.
        NotRun = "not_run",
        /// The job ended without a crash.
        NoCrash = "no_crash",
        /// The job crashed again, but with a different cause.
        Different = "different",
        /// The job crashed again, with the same cause as the original crash.
        Same = "same",
    }
}

/// Response of `POST /v1/crashes/{id}/replay`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Replay {
    /// Cause of the original crash.
    pub before: Cause,
    /// Name of the bulkhead in which the crash occurred.
    pub bulkhead: String,
    /// ID of the crash report.
    #[schemars(with = "String")]
    pub id: CrashId,
    /// Results of the jobs, in the order in which they were run.
    pub replays: Vec<ReplayedJob>,
    /// Verdict of the job whose replay was most similar to the original crash.
    pub verdict: Word<ReplayVerdict>,
}

/// Result of a replayed job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[expect(missing_docs, reason = "the field names match those of the outcome and the report")]
pub struct ReplayedJob {
    pub cause: Option<Cause>,
    /// Index of the job in the crash report.
    pub job: usize,
    pub message: Option<String>,
    pub operation: String,
    /// Outcome of the job. Both `outcome` and `reason` are absent if the job did not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Text>,
    pub payload_bytes: u64,
    pub ran_ms: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Option<String>>,
    pub stderr_tail: Option<String>,
    pub tenant: String,
    pub verdict: Word<ReplayVerdict>,
    pub worker_pid: Option<u32>,
}

mod rfc3339 {
    use std::time::SystemTime;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(at: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_rfc3339_millis(*at))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
        humantime::parse_rfc3339(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

pub(crate) mod base64_text {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(bytes: &Option<Vec<u8>>, to: S) -> Result<S::Ok, S::Error> {
        match bytes {
            Some(bytes) => to.serialize_str(&STANDARD.encode(bytes)),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<u8>>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| STANDARD.decode(text).map_err(serde::de::Error::custom)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crash_id_parser_accepts_only_canonical_form() {
        let id = CrashId::new(SystemTime::UNIX_EPOCH + Duration::from_millis(1_772_878_530_123), 1);
        assert_eq!(id.to_string(), "20260307T101530123-0001");
        assert_eq!("20260307T101530123-0001".parse(), Ok(id));
        let many = CrashId::new(SystemTime::UNIX_EPOCH, u32::MAX);
        assert_eq!(many.to_string().parse(), Ok(many));
        let others = [
            "",
            "-",
            "../../etc/passwd",
            "20260307T101530123-1",
            "20260307T101530123-+001",
            "20260307T101530123-0001.json",
            "20260307T101530123-0001/..",
            "20261307T101530123-0001",
            "20260307X101530123-0001",
            "2026030ßT10153012-0001",
            "20260307T101530123-00000000000000000001",
            "20260307T101530123",
        ];
        for text in others {
            assert_eq!(text.parse::<CrashId>(), Err(InvalidCrashId), "{text}");
        }
    }

    #[test]
    fn crash_ids_sort_by_time() {
        let at = |ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms);
        let ids = [CrashId::new(at(1), 9), CrashId::new(at(1), 10), CrashId::new(at(2), 1)];
        let texts = ids.map(|id| id.to_string());
        assert!(ids.is_sorted() && texts.is_sorted(), "{texts:?}");
    }

    #[test]
    fn crash_report_from_newer_supervisor_can_be_read() {
        let document = serde_json::json!({
            "id": "20260307T101530123-0001", "at": "2026-03-07T10:15:30.123Z", "bulkhead": "b", "victim": "cat",
            "stage": "dreaming", "cause": "boredom", "message": "died of boredom", "pid": 7, "slot": 0,
            "generation": 1, "uptime_ms": 5, "served": 0, "in_flight": 0, "jobs": [], "mood": "sad",
        });
        let report: CrashReport = serde_json::from_value(document).unwrap();
        assert_eq!((report.cause.kind.as_str(), report.stage.as_str()), ("boredom", "dreaming"));
        assert!(report.victim != Victim::Worker && report.is_valid());
    }
}
