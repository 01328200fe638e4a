//! Sends events, notices and worker output to the control plane. Never blocks or formats text. If a channel is full, an
//! event or notice is dropped and counted, and worker output is returned to the caller. The callers decide what to
//! report.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bulkhead_api::{CrashId, EventKind, Severity};
use bulkhead_plane::command::{DroppableNotice, Event};
use bulkhead_plane::counters::SharedCounters;
use bulkhead_plane::notices::{Milestone, NoticeSender, WorkerOutput};
use bulkhead_policy::OperatorEvent;

pub(super) struct Reporter {
    notices: NoticeSender,
    counters: Arc<SharedCounters>,
    /// True while events about individual compartments are suppressed because a command applies to the whole bulkhead.
    is_quiet: bool,
}

impl Reporter {
    pub(super) fn new(notices: NoticeSender, counters: Arc<SharedCounters>) -> Self {
        Self { notices, counters, is_quiet: false }
    }

    pub(super) fn notify(&mut self, notice: DroppableNotice) {
        if !self.notices.send_droppable(notice) {
            self.counters.notices_dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn milestone(&self, milestone: Milestone) {
        self.notices.send_milestone(milestone);
    }

    /// Passes the read ends of a worker's stdout and stderr pipes to the control plane. If the channel is full, returns
    /// the read ends to the caller.
    pub(super) fn output(&self, output: WorkerOutput) -> Result<(), WorkerOutput> {
        self.notices.send_output(output)
    }

    /// Notifies the control plane that the states of bulkheads might have changed.
    pub(super) fn states_have_changed(&self) {
        self.counters.revision.fetch_add(1, Ordering::SeqCst);
    }

    // Events.

    fn event(&mut self, event: Event) {
        self.notify(DroppableNotice::Event(Box::new(event)));
    }

    /// Reports an event that concerns the whole supervisor.
    pub(super) fn supervisor_event(&mut self, severity: Severity, what: EventKind) {
        self.event(Event::new(severity, None, what));
    }

    /// Reports an event that concerns a whole bulkhead.
    pub(super) fn bulkhead_event(&mut self, severity: Severity, bulkhead: &Arc<str>, what: EventKind) {
        self.event(Event::new(severity, Some(bulkhead.clone()), what));
    }

    /// Reports an event about one compartment. Adds the tenant if the compartment belongs to a single tenant, and the
    /// crash report if there is a report about the event.
    pub(super) fn compartment_event(
        &mut self,
        severity: Severity,
        (bulkhead, tenant): (&Arc<str>, &Option<Arc<str>>),
        what: EventKind,
        report: Option<CrashId>,
    ) {
        let event = Event::new(severity, Some(bulkhead.clone()), what);
        self.event(Event { tenant: tenant.clone(), report, ..event });
    }

    /// Reports a problem with the supervisor itself.
    pub(super) fn trouble(&mut self, what: &str, detail: &str) {
        let trouble = EventKind::SupervisorTrouble { what: what.to_owned(), detail: detail.to_owned() };
        self.supervisor_event(Severity::Critical, trouble);
    }

    /// Sets whether events about individual compartments are suppressed.
    pub(super) fn set_quiet(&mut self, is_quiet: bool) {
        self.is_quiet = is_quiet;
    }

    /// Returns true if an operator event must be suppressed because a single event for the whole bulkhead replaces it.
    pub(super) fn is_suppressed(&self, note: &OperatorEvent) -> bool {
        self.is_quiet
            && matches!(note, OperatorEvent::Draining | OperatorEvent::Resumed | OperatorEvent::Breaker(_))
    }
}
