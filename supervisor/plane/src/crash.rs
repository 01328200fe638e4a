//! Converts the end of a process to the cause that its crash report shows. Also defines the crash record that a
//! symbolizer reads. The data plane's `crashes` decides which deaths are reported and creates the reports. The control
//! plane adds the last output of the process and stores the reports.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bulkhead_api::{Cause, CauseKind, CrashId, CrashJob, CrashReport, Stage, Usage, Victim};
use bulkhead_policy::{Death, Ending, KillReason};
use bulkhead_shared::crash_record::RECORDED_SIGNALS;

use crate::program::Program;

/// Stack traces of a worker's threads, recorded in a file for a symbolizer.
pub struct CrashRecord {
    /// File that contains the recorded stacks; see [`bulkhead_shared::crash_record`].
    pub file: OwnedFd,
    /// Format of the file.
    pub kind: RecordKind,
    /// The worker's program.
    pub program: Arc<Program>,
}

/// Format of the file in a [`CrashRecord`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// The worker recorded its own crash in a memory file.
    Crash {
        /// Number of the signal that killed the worker.
        signal: i32,
    },
    /// Stacks recorded by the keeper; see [`bulkhead_keeper::Keeper::sample`].
    Sample,
}

impl fmt::Debug for CrashRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CrashRecord").field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// Returns the signal number if the process was killed by a signal for which workers write a crash record.
pub fn recorded_signal(ending: &Ending) -> Option<i32> {
    match ending {
        Ending { death: Death::Signal(signal), killed: None } if RECORDED_SIGNALS.contains(signal) => {
            Some(*signal)
        }
        _ => None,
    }
}

/// Maximum number of crash reports waiting to be stored. Further reports are dropped and counted.
pub const REPORTS_WAITING_MAX: usize = 64;

/// Returns the cause of a process's death, or `None` if the supervisor killed the process for reasons such as a resize
/// or shutdown. An exit with status 0 is also returned as a cause. The caller decides whether the process was supposed
/// to exit.
pub fn cause_of(ending: &Ending) -> Option<Cause> {
    let kind = match (&ending.killed, ending.death) {
        (None, Death::Exit(_)) => CauseKind::Exit,
        (None, Death::Signal(_)) => CauseKind::Signal,
        (None, Death::Violation(_) | Death::TmpFull) => CauseKind::Violation,
        (None, Death::Oom) => CauseKind::Oom,
        (Some(KillReason::Hung), _) => CauseKind::Hung,
        (Some(KillReason::Protocol(_)), _) => CauseKind::Protocol,
        (Some(KillReason::NoHello), _) => CauseKind::NoHello,
        (Some(KillReason::NotReady), _) => CauseKind::NotReady,
        // For all other reasons, the kill was not caused by a fault of the process.
        (Some(_), _) => return None,
    };
    let (exit_code, signal, system_call) = match ending.death {
        _ if ending.killed.is_some() => (None, None, None),
        Death::Exit(code) => (Some(code), None, None),
        Death::Signal(number) => (None, Some(bulkhead_linux::signals::name(number)), None),
        Death::Violation("") | Death::Oom | Death::TmpFull => (None, None, None),
        Death::Violation(call) => (None, None, Some(call.to_owned())),
    };
    Some(Cause { kind: kind.into(), exit_code, signal, system_call, message: ending.to_string() })
}

/// Returns the cause to report if a job was still running at its deadline.
pub fn late_job_cause() -> Cause {
    let message = "still running a job at its deadline".to_owned();
    Cause { kind: CauseKind::Deadline.into(), exit_code: None, signal: None, system_call: None, message }
}

pub fn usage(usage: bulkhead_keeper::Usage) -> Usage {
    Usage {
        user_ms: usage.user_us / 1000,
        system_ms: usage.system_us / 1000,
        max_rss_bytes: usage.maxrss_kib.saturating_mul(1024),
    }
}

/// Returns a crash report with one job. Used in tests.
#[doc(hidden)]
pub fn sample_report(at_ms: u64, number: u32, payload: &[u8]) -> CrashReport {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(at_ms);
    CrashReport {
        id: CrashId::new(at, number),
        at,
        count: 1,
        bulkhead: "b".into(),
        tenant: None,
        victim: Victim::Worker.into(),
        stage: Stage::Working.into(),
        cause: cause_of(&Death::Signal(11).into()).unwrap(),
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
        runtime_stack: None,
        native: None,
        confinement: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crash_report_is_unchanged_after_serialization() {
        let report = sample_report(1_772_878_530_123, 3, b"\0\xff\x1b[31m");
        let json = serde_json::to_string(&report).unwrap();
        assert!(
            json.contains(r#""cause":"signal","signal":"SIGSEGV","message":"killed by SIGSEGV""#),
            "{json}"
        );
        let back: CrashReport = serde_json::from_str(&json).unwrap();
        assert_eq!(back, report);
        assert!(back.is_valid());
    }

    #[test]
    fn intended_kill_is_not_a_crash() {
        let killed = |reason| Ending { death: Death::Signal(9), killed: Some(reason) };
        for reason in
            [KillReason::Deadline, KillReason::ExitTimeout, KillReason::NotNeeded, KillReason::KeeperDied]
        {
            assert_eq!(cause_of(&killed(reason)), None);
        }
        let hung = cause_of(&killed(KillReason::Hung)).unwrap();
        assert_eq!((&hung.kind, &hung.signal), (&CauseKind::Hung.into(), &None));
        let one = cause_of(&killed(KillReason::Protocol("rubbish".into()))).unwrap();
        let other = cause_of(&killed(KillReason::Protocol("a flood".into()))).unwrap();
        assert!(one.has_same_cause(&other) && !one.has_same_cause(&hung));
        let exit = |code| cause_of(&Death::Exit(code).into()).unwrap();
        assert!(!exit(1).has_same_cause(&exit(2)));
        let violation = cause_of(&Death::Violation("ptrace").into()).unwrap();
        assert_eq!(violation.system_call.as_deref(), Some("ptrace"));
    }
}
