//! Sends events, crash reports, workers' output and spans to the control plane. Formats nothing and never waits.
//! Dropped messages are counted.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bulkhead_api::CrashId;
use bulkhead_plane::command::{Event, Notice};
use bulkhead_plane::counters::SharedCounters;
use bulkhead_plane::crash::REPORTS_WAITING_MAX;
use bulkhead_plane::notices::Speaker;
use bulkhead_plane::span::SpanSender;
use bulkhead_shared::JobId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::spans::Spans;

pub(super) struct Reporter {
    pub(super) notices: Speaker,
    pub(super) pulse: Arc<SharedCounters>,
    /// Set if tracing is on.
    pub(super) spans: Option<Spans>,
    /// True if the output of some worker found no room.
    pub(super) has_outputs: bool,
    /// Number of crash reports so far.
    pub(super) crashes: u32,
    /// Permits for crash reports that wait to be stored.
    pub(super) report_permits: Arc<Semaphore>,
    /// Last job that crashed or exceeded its deadline, with operation and tenant. The next event may be about this
    /// job.
    pub(super) last_crashed: Option<(JobId, Box<str>, Box<str>)>,
    /// Process and crash report of the death that is being applied. Events about the death refer to the report.
    pub(super) last_report: Option<(u32, CrashId)>,
    /// Suppresses the events of single compartments during a command for a whole bulkhead.
    pub(super) is_quiet: bool,
}

impl Reporter {
    pub(super) fn new(notices: Speaker, pulse: Arc<SharedCounters>, spans: Option<SpanSender>) -> Self {
        Self {
            notices,
            pulse,
            spans: spans.map(Spans::new),
            has_outputs: false,
            crashes: 0,
            report_permits: Arc::new(Semaphore::new(REPORTS_WAITING_MAX)),
            last_crashed: None,
            last_report: None,
            is_quiet: false,
        }
    }

    pub(super) fn notify(&mut self, notice: Notice) {
        if !self.notices.notice(notice) {
            self.pulse.notices_dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn event(&mut self, event: Event) {
        self.notify(Notice::Event(Box::new(event)));
    }

    /// Returns the crash report for an event about the death of process `pid`.
    pub(super) fn report_about(&self, pid: Option<u32>) -> Option<CrashId> {
        let (dead, id) = self.last_report?;
        (pid == Some(dead)).then_some(id)
    }

    /// Returns a permit for a crash report, if available.
    pub(super) fn report_permit(&self) -> Option<OwnedSemaphorePermit> {
        self.report_permits.clone().try_acquire_owned().ok()
    }

    /// Signals that earlier observations of the bulkheads' states are outdated.
    pub(super) fn states_have_changed(&self) {
        self.pulse.revision.fetch_add(1, Ordering::SeqCst);
    }
}
