//! What the data plane tells the control plane: events, crash reports, output of workers, spans. It formats nothing and
//! never waits: what finds no room is counted.

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
    /// Where the spans of jobs go, if they are taken.
    pub(super) spans: Option<Spans>,
    /// Whether the output of some workers found no room on its way to the control plane.
    pub(super) has_outputs: bool,
    /// Crash reports so far.
    pub(super) crashes: u32,
    /// The places for reports on their way to be kept.
    pub(super) places: Arc<Semaphore>,
    /// The job that ended by a crash last, its operation and tenant: an event that follows may be about it.
    pub(super) last_crashed: Option<(JobId, Box<str>, Box<str>)>,
    /// The report about the death that is being applied, and the process that died: events name it.
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
            places: Arc::new(Semaphore::new(REPORTS_WAITING_MAX)),
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

    /// For an event about the death of a process: the report about it.
    pub(super) fn report_about(&self, pid: Option<u32>) -> Option<CrashId> {
        let (dead, id) = self.last_report?;
        (pid == Some(dead)).then_some(id)
    }

    /// A place for a report on its way to be kept.
    pub(super) fn place(&self) -> Option<OwnedSemaphorePermit> {
        self.places.clone().try_acquire_owned().ok()
    }

    /// What was seen of the states of bulkheads is not true any more.
    pub(super) fn states_have_changed(&self) {
        self.pulse.revision.fetch_add(1, Ordering::SeqCst);
    }
}
