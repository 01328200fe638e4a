//! Types for the death of a worker or program, and for the reason of a kill or replacement. Derives the verdict for the
//! jobs, and the cause of the restart for metrics. `bulkhead` decides when a worker is killed or replaced, and which
//! jobs get the verdict. The data plane determines the cause of a death, unless the keeper has died, and reports the
//! death to operators. `plane::crash` classifies deaths for crash reports.

use std::fmt;

use bulkhead_shared::{CrashReason, Verdict, vocabulary};

pub(crate) const SIGKILL: i32 = 9;

/// Cause of a process's death. If the supervisor killed the process, also contains the reason for the kill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Cause of death.
    pub death: Death,
    /// Reason why the supervisor killed the process, or `None` if the supervisor did not kill it.
    pub killed: Option<KillReason>,
}

/// Cause of a process's death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// The process exited with this status.
    Exit(i32),
    /// The process was killed by the signal with this number.
    Signal(i32),
    /// The process was killed for making a forbidden system call. The string is the name of the call, or empty if
    /// unknown.
    Violation(&'static str),
    /// The process was killed by the kernel for exceeding the memory limit.
    Oom,
    /// The process was killed by the supervisor for exceeding the size limit of the temporary folder.
    TmpFull,
}

/// Reason for killing a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KillReason {
    /// One of the worker's jobs did not end in time.
    Deadline,
    /// The worker stopped sending heartbeats.
    Hung,
    /// The worker violated the protocol. The string describes the violation.
    Protocol(String),
    /// The worker did not send HELLO within `start.handshake`.
    NoHello,
    /// The worker was not ready within `start.ready`.
    NotReady,
    /// The worker was asked to exit but did not exit in time.
    ExitTimeout,
    /// The worker is no longer needed, and has not started any jobs.
    NotNeeded,
    /// The keeper died.
    KeeperDied,
}

impl KillReason {
    /// Returns true if the worker was killed for not responding in time. The stacks of such a worker show where it
    /// hangs.
    pub fn is_hang(&self) -> bool {
        matches!(self, Self::Hung | Self::NoHello | Self::NotReady)
    }
}

vocabulary! {
    /// Reason for replacing a healthy worker.
    RecycleReason {
        /// `recycle.jobs` was reached.
        Jobs = "jobs",
        /// `recycle.rss` was exceeded.
        Memory = "rss",
        /// `recycle.age` was reached.
        Age = "age",
        /// An operator requested a restart.
        Restart = "restart",
        /// `max_in_flight` was raised, but the worker cannot accept a higher limit while running.
        Resize = "resize",
        /// The worker runs an outdated program or configuration.
        Reload = "reload",
    }
}

vocabulary! {
    /// Cause of a worker restart, as used in metrics.
    #[repr(u8)]
    #[expect(missing_docs, reason = "the names are self-explanatory")]
    RestartCause {
        // The previous worker ended, and was not killed by the supervisor.
        Exit = "exit",
        Signal = "signal",
        Oom = "oom",
        Violation = "violation",
        // The previous worker was killed by the supervisor.
        Protocol = "protocol",
        Hung = "hung",
        Deadline = "deadline",
        NotReady = "not_ready",
        Stopped = "stopped",
        KeeperDied = "keeper_died",
        /// The previous attempt to start a worker failed.
        NotStarted = "not_started",
        // The previous worker was replaced.
        Jobs = RecycleReason::Jobs.name(),
        Memory = RecycleReason::Memory.name(),
        Age = RecycleReason::Age.name(),
        Restart = RecycleReason::Restart.name(),
        Resize = RecycleReason::Resize.name(),
        Reload = RecycleReason::Reload.name(),
    }
}

impl RestartCause {
    /// Returns true if the previous worker was replaced because it reached a `recycle` limit.
    pub(crate) const fn is_recycling(self) -> bool {
        matches!(self, Self::Jobs | Self::Memory | Self::Age)
    }
}

impl From<RecycleReason> for RestartCause {
    fn from(reason: RecycleReason) -> Self {
        match reason {
            RecycleReason::Jobs => Self::Jobs,
            RecycleReason::Memory => Self::Memory,
            RecycleReason::Age => Self::Age,
            RecycleReason::Restart => Self::Restart,
            RecycleReason::Resize => Self::Resize,
            RecycleReason::Reload => Self::Reload,
        }
    }
}

impl KillReason {
    /// Returns a description for operators and clients.
    pub fn describe(&self) -> String {
        match self {
            Self::Deadline => "a job in the worker continued after the deadline, run limit or cancellation, \
                               or after a result that was too large"
                .into(),
            Self::Hung => "the worker stopped sending heartbeats".into(),
            Self::Protocol(how) => format!("protocol violation: {how}"),
            Self::NoHello => "the worker did not send HELLO within start.handshake; a program that is not \
                              built with the worker SDK needs `exec` instead of `command`"
                .into(),
            Self::NotReady => "the worker was not ready within start.ready".into(),
            Self::ExitTimeout => "the worker was asked to stop but was still running".into(),
            Self::NotNeeded => "the worker had not started a job and is no longer needed".into(),
            Self::KeeperDied => "the keeper died, and all workers were killed by SIGKILL".into(),
        }
    }
}

impl From<Death> for Ending {
    /// Creates the [`Ending`] of a process that the supervisor did not kill.
    fn from(death: Death) -> Self {
        Self { death, killed: None }
    }
}

impl Ending {
    /// Returns true if the process exited on its own with status 0.
    pub fn is_clean(&self) -> bool {
        *self == Death::Exit(0).into()
    }

    /// Returns true if one of the worker's jobs may have caused the worker's death.
    pub(crate) fn may_be_caused_by_job(&self) -> bool {
        matches!(self.killed, None | Some(KillReason::Hung | KillReason::Protocol(_)))
    }

    /// Returns true if the worker exited on its own, failed to start, hung or violated the protocol. Returns false if
    /// the supervisor killed the worker for another reason.
    pub(crate) fn is_fault_of_worker(&self) -> bool {
        self.may_be_caused_by_job() || matches!(self.killed, Some(KillReason::NoHello | KillReason::NotReady))
    }

    /// Returns the cause to report if the worker is restarted after this death.
    pub(crate) fn restart_cause(&self) -> RestartCause {
        match (&self.killed, self.death) {
            (Some(KillReason::Deadline), _) => RestartCause::Deadline,
            (Some(KillReason::Hung), _) => RestartCause::Hung,
            (Some(KillReason::Protocol(_)), _) => RestartCause::Protocol,
            (Some(KillReason::NoHello | KillReason::NotReady), _) => RestartCause::NotReady,
            (Some(KillReason::ExitTimeout | KillReason::NotNeeded), _) => RestartCause::Stopped,
            (Some(KillReason::KeeperDied), _) => RestartCause::KeeperDied,
            (None, Death::Exit(_)) => RestartCause::Exit,
            (None, Death::Signal(_)) => RestartCause::Signal,
            (None, Death::Violation(_) | Death::TmpFull) => RestartCause::Violation,
            (None, Death::Oom) => RestartCause::Oom,
        }
    }

    /// Returns the verdict for the jobs of a process that died.
    pub(crate) fn verdict(&self, message: String) -> Verdict {
        let (reason, status) = match (self.restart_cause(), self.death) {
            (RestartCause::Exit, Death::Exit(code)) => (CrashReason::Exit, Some(code)),
            (RestartCause::Signal, Death::Signal(signal)) => (CrashReason::Signal, Some(signal)),
            (RestartCause::KeeperDied, _) => (CrashReason::Signal, Some(SIGKILL)),
            (RestartCause::Violation, _) => (CrashReason::Violation, None),
            (RestartCause::Oom, _) => (CrashReason::Oom, None),
            (RestartCause::Hung, _) => (CrashReason::Hung, None),
            (RestartCause::Protocol, _) => (CrashReason::Protocol, None),
            _ if self.killed == Some(KillReason::ExitTimeout) => (CrashReason::Stopped, None),
            _ => (CrashReason::Collateral, None),
        };
        Verdict::Crashed { reason, status, message }
    }
}

impl fmt::Display for Ending {
    /// Writes a phrase such as "killed by SIGKILL" that completes a sentence about the worker.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.killed {
            Some(reason) => write!(f, "killed by the supervisor: {}", reason.describe()),
            None => self.death.fmt(f),
        }
    }
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exit(code) => write!(f, "exited with status {code}"),
            Self::Signal(signal) => write!(f, "killed by {}", signal_name(*signal)),
            Self::Violation("") => write!(
                f,
                "killed by SIGSYS: it made a system call that the sandbox forbids and the kernel does not name, such \
                 as a 32-bit call, or a process sent it the signal"
            ),
            Self::Violation(call) => write!(f, "made the system call {call}, which the sandbox forbids"),
            Self::TmpFull => {
                write!(
                    f,
                    "killed by the supervisor: the temporary directory held more than sandbox.tmp allows"
                )
            }
            Self::Oom => write!(f, "killed by the kernel: the memory limit was exceeded"),
        }
    }
}

/// Returns the name of a signal, such as `SIGSEGV`. Uses the signal numbers of Linux on x86-64 and AArch64.
fn signal_name(signal: i32) -> String {
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
        "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
        "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
    ];
    let name = usize::try_from(signal).ok().and_then(|number| NAMES.get(number.checked_sub(1)?));
    name.map_or_else(|| format!("signal {signal}"), |name| format!("SIG{name}"))
}
