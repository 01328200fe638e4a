//! What is told of a crash: the report, its name, and its cause, by which two crashes are compared. The data
//! plane fills a report in, the control plane adds what the process said last, and `observe::crashes` keeps it.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use bulkhead_policy::{Death, KillReason, describe_end};
use bulkhead_shared::limits::{
    INLINE_PAYLOAD_BYTES_MAX, OPERATION_BYTES_MAX, TENANT_BYTES_MAX, is_bulkhead_name,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes of one job's payload that a report holds. Up to this size the data plane has a copy at hand while a
/// worker has the job; of a larger payload a report has only the size.
pub const PAYLOAD_BYTES_MAX: usize = INLINE_PAYLOAD_BYTES_MAX;

/// Bytes of all payloads in one report.
pub const PAYLOADS_BYTES_MAX: usize = 4 * PAYLOAD_BYTES_MAX;

/// Jobs that one report describes.
pub const JOBS_MAX: usize = 32;

/// Reports on their way from the data plane to where they are kept; what comes beyond is counted, and not kept.
pub const REPORTS_WAITING_MAX: usize = 64;

/// Names a crash report: when, to the millisecond, and the how-manieth of that supervisor. As text it can be a
/// file's name, and texts sort as the crashes came: `20260307T101530123-0001`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CrashId {
    at_ms: u64,
    number: u32,
}

/// Digits of the time in a [`CrashId`], with the `T` between day and hour.
const TIME_DIGITS: usize = 18;

impl CrashId {
    /// The name of a crash that happens now.
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

/// This text names no crash report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is not the id of a crash report: it looks like 20260307T101530123-0001")]
pub struct NoCrashId;

impl FromStr for CrashId {
    type Err = NoCrashId;

    /// Accepts exactly what `Display` writes.
    fn from_str(text: &str) -> Result<Self, NoCrashId> {
        let (time, number) = text.split_once('-').ok_or(NoCrashId)?;
        if time.len() != TIME_DIGITS || !time.is_ascii() {
            return Err(NoCrashId);
        }
        let part = |range: std::ops::Range<usize>| &time[range];
        let rfc3339 = format!(
            "{}-{}-{}T{}:{}:{}.{}Z",
            part(0..4),
            part(4..6),
            part(6..8),
            part(9..11),
            part(11..13),
            part(13..15),
            part(15..18)
        );
        let at = humantime::parse_rfc3339(&rfc3339).map_err(|_| NoCrashId)?;
        let id = Self::new(at, number.parse().map_err(|_| NoCrashId)?);
        if id.to_string() == text { Ok(id) } else { Err(NoCrashId) }
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

/// The kinds of crash: those of the outcome `crashed`, and the two ways not to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are the contract's")]
pub enum CauseKind {
    Exit,
    Signal,
    Oom,
    Violation,
    Protocol,
    Hung,
    NoHello,
    NotReady,
}

/// What a worker, or a program, died of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// The kind.
    #[serde(rename = "cause")]
    pub kind: CauseKind,
    /// Of [`CauseKind::Exit`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Its name, of [`CauseKind::Signal`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// The one that the sandbox forbids, of [`CauseKind::Violation`], where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_call: Option<String>,
    /// A sentence that goes on from the name of what died.
    pub message: String,
}

impl Cause {
    /// The cause of a death; `None` if the supervisor ended the process for reasons of its own. An exit with
    /// status 0 is a cause like another: whether it was fine depends on what the process had to do.
    pub fn of(death: Death, killed: Option<&KillReason>) -> Option<Self> {
        let kind = match (killed, death) {
            (None, Death::Exit(_)) => CauseKind::Exit,
            (None, Death::Signal(_)) => CauseKind::Signal,
            (None, Death::Violation(_) | Death::Overfull) => CauseKind::Violation,
            (None, Death::Oom) => CauseKind::Oom,
            (Some(KillReason::Hung), _) => CauseKind::Hung,
            (Some(KillReason::Protocol(_)), _) => CauseKind::Protocol,
            (Some(KillReason::NoHello), _) => CauseKind::NoHello,
            (Some(KillReason::NotReady), _) => CauseKind::NotReady,
            (
                Some(
                    KillReason::Deadline
                    | KillReason::Overdue
                    | KillReason::Unwanted
                    | KillReason::KeeperDied,
                ),
                _,
            ) => return None,
        };
        let (exit_code, signal, system_call) = match death {
            _ if killed.is_some() => (None, None, None),
            Death::Exit(code) => (Some(code), None, None),
            Death::Signal(number) => (None, Some(bulkhead_linux::signals::name(number)), None),
            Death::Violation("") | Death::Oom | Death::Overfull => (None, None, None),
            Death::Violation(call) => (None, None, Some(call.to_owned())),
        };
        Some(Self { kind, exit_code, signal, system_call, message: describe_end(death, killed) })
    }

    /// Whether both died the same way, whatever the words.
    pub fn is_same(&self, other: &Self) -> bool {
        self.kind == other.kind
            && self.exit_code == other.exit_code
            && self.signal == other.signal
            && self.system_call == other.system_call
    }
}

/// What died.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Victim {
    /// A worker.
    Worker,
    /// The program of one job in an `exec` bulkhead, whose worker lives on.
    Program,
}

/// What a worker was at when it died.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Stage {
    Starting,
    Idle,
    Working,
}

/// What a process and those of its descendants that it waited for have used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Usage {
    pub user_ms: u64,
    pub system_ms: u64,
    /// The most memory resident at a time, of the largest process.
    pub max_rss_bytes: u64,
}

impl From<crate::keeper::Usage> for Usage {
    fn from(usage: crate::keeper::Usage) -> Self {
        Self {
            user_ms: usage.user_us / 1000,
            system_ms: usage.system_us / 1000,
            max_rss_bytes: usage.maxrss_kib.saturating_mul(1024),
        }
    }
}

/// A crash, as `GET /v1/crashes/{id}` shows it and as it lies in `crash_dir`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are those of the events and say what they hold")]
pub struct CrashReport {
    pub id: CrashId,
    /// When; of several, the last one.
    #[serde(with = "rfc3339")]
    pub at: SystemTime,
    /// How many equal ones this stands for: workers that died alike before they were ready.
    #[serde(default = "one")]
    pub count: u32,
    pub bulkhead: String,
    /// The only tenant that the worker served, where tenants have workers of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub victim: Victim,
    pub stage: Stage,
    #[serde(flatten)]
    pub cause: Cause,
    /// The worker's, in the supervisor's view, also if a program died.
    pub pid: u32,
    pub slot: u32,
    pub generation: u32,
    pub uptime_ms: u64,
    /// How many jobs the worker had answered.
    pub served: u64,
    /// Unknown of a program, and of a worker that outlived its keeper.
    #[serde(default)]
    pub usage: Option<Usage>,
    /// Jobs that the worker held.
    pub in_flight: u32,
    /// The place in `jobs` of the one that did it, if that is known.
    #[serde(default)]
    pub culprit: Option<usize>,
    /// The jobs that the worker held, or the oldest of them.
    pub jobs: Vec<CrashJob>,
    #[serde(default)]
    pub stderr_tail: Option<String>,
    /// What confined the worker, as read back from the kernel.
    #[serde(default)]
    pub confinement: Option<serde_json::Value>,
}

const fn one() -> u32 {
    1
}

/// A job in a crash report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are those of the events and say what they hold")]
pub struct CrashJob {
    pub job: String,
    pub operation: String,
    pub tenant: String,
    #[serde(default)]
    pub trace_id: Option<String>,
    /// How often it had been given to a worker, this time included.
    pub attempts: u32,
    /// How long this worker had had it.
    pub ran_ms: u64,
    /// Whether its client had been answered already, for its deadline or since it had cancelled. Nothing else
    /// is known of the job then.
    pub is_answered: bool,
    /// Whether the worker died before it read the job, which then did nothing to it.
    pub is_unread: bool,
    pub payload_bytes: u64,
    /// In base64. Absent if there was none, or if it was too large to be kept.
    #[serde(default, with = "base64_text", skip_serializing_if = "Option::is_none")]
    pub payload: Option<Vec<u8>>,
    /// Of the payload, if it is here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<String>,
    /// Of operation and payload, as in the event `job_quarantined`; with `poison` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

impl CrashJob {
    /// Whether it can be run again.
    pub fn is_replayable(&self) -> bool {
        self.payload.is_some()
    }
}

/// One line of a list of crashes.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "the names are those of the report")]
pub struct Summary {
    pub id: CrashId,
    #[serde(with = "rfc3339")]
    pub at: SystemTime,
    pub count: u32,
    pub bulkhead: String,
    pub victim: Victim,
    pub stage: Stage,
    #[serde(flatten)]
    pub cause: Cause,
    /// Of the culprit, or of the only job.
    pub operation: Option<String>,
    pub tenant: Option<String>,
    pub pid: u32,
    pub uptime_ms: u64,
    pub served: u64,
    pub in_flight: u32,
    /// Whether a job of it can be run again.
    pub is_replayable: bool,
}

impl CrashReport {
    /// Its line in a list.
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
            victim: self.victim,
            stage: self.stage,
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

    /// Whether it is within the bounds that a report made here keeps: one that was read from a file may have
    /// been made by anybody.
    pub fn is_sound(&self) -> bool {
        let is_short = |text: &str, most: usize| text.len() <= most && !text.contains('\0');
        let is_sound = |job: &CrashJob| {
            let payload = job.payload.as_ref().map_or(0, Vec::len);
            is_short(&job.operation, OPERATION_BYTES_MAX)
                && is_short(&job.tenant, TENANT_BYTES_MAX)
                && payload <= PAYLOAD_BYTES_MAX
        };
        is_bulkhead_name(&self.bulkhead)
            && self.jobs.len() <= JOBS_MAX
            && self.culprit.is_none_or(|culprit| culprit < self.jobs.len())
            && self.jobs.iter().all(is_sound)
    }
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

mod base64_text {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &Option<Vec<u8>>, to: S) -> Result<S::Ok, S::Error> {
        match bytes {
            Some(bytes) => to.serialize_str(&STANDARD.encode(bytes)),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<u8>>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| STANDARD.decode(text).map_err(serde::de::Error::custom)).transpose()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A report with one job.
    pub(crate) fn report(at_ms: u64, number: u32, payload: &[u8]) -> CrashReport {
        let at = SystemTime::UNIX_EPOCH + Duration::from_millis(at_ms);
        CrashReport {
            id: CrashId::new(at, number),
            at,
            count: 1,
            bulkhead: "b".into(),
            tenant: None,
            victim: Victim::Worker,
            stage: Stage::Working,
            cause: Cause::of(Death::Signal(11), None).unwrap(),
            pid: 7,
            slot: 0,
            generation: 1,
            uptime_ms: 5,
            served: 0,
            usage: None,
            in_flight: 1,
            culprit: Some(0),
            jobs: vec![CrashJob {
                job: "1000000".into(),
                operation: "decode".into(),
                tenant: "acme".into(),
                trace_id: None,
                attempts: 1,
                ran_ms: 3,
                is_answered: false,
                is_unread: false,
                payload_bytes: payload.len() as u64,
                payload: Some(payload.to_vec()),
                blake3: None,
                digest: None,
            }],
            stderr_tail: Some("last words".into()),
            confinement: None,
        }
    }

    #[test]
    fn an_id_is_read_only_as_it_is_written() {
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
            assert_eq!(text.parse::<CrashId>(), Err(NoCrashId), "{text}");
        }
    }

    #[test]
    fn ids_sort_as_the_crashes_came() {
        let at = |ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms);
        let ids = [CrashId::new(at(1), 9), CrashId::new(at(1), 10), CrashId::new(at(2), 1)];
        let texts = ids.map(|id| id.to_string());
        assert!(ids.is_sorted() && texts.is_sorted(), "{texts:?}");
    }

    #[test]
    fn a_report_survives_the_way_to_a_file_and_back() {
        let report = report(1_772_878_530_123, 3, b"\0\xff\x1b[31m");
        let json = serde_json::to_string(&report).unwrap();
        assert!(
            json.contains(r#""cause":"signal","signal":"SIGSEGV","message":"killed by SIGSEGV""#),
            "{json}"
        );
        let back: CrashReport = serde_json::from_str(&json).unwrap();
        assert_eq!(back, report);
        assert!(back.is_sound());
    }

    #[test]
    fn who_was_ended_for_our_reasons_did_not_crash() {
        let killed = Death::Signal(9);
        for reason in
            [KillReason::Deadline, KillReason::Overdue, KillReason::Unwanted, KillReason::KeeperDied]
        {
            assert_eq!(Cause::of(killed, Some(&reason)), None);
        }
        let hung = Cause::of(killed, Some(&KillReason::Hung)).unwrap();
        assert_eq!((hung.kind, &hung.signal), (CauseKind::Hung, &None));
        let one = Cause::of(killed, Some(&KillReason::Protocol("rubbish".into()))).unwrap();
        let other = Cause::of(killed, Some(&KillReason::Protocol("a flood".into()))).unwrap();
        assert!(one.is_same(&other) && !one.is_same(&hung));
        assert!(!Cause::of(Death::Exit(1), None).unwrap().is_same(&Cause::of(Death::Exit(2), None).unwrap()));
        let violation = Cause::of(Death::Violation("ptrace"), None).unwrap();
        assert_eq!(violation.system_call.as_deref(), Some("ptrace"));
    }
}
