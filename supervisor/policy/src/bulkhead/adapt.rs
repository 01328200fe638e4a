//! Connects the adaptive limit to the bulkhead. Passes the run times of jobs to the algorithm in [`crate::adaptive`],
//! which decides the limit. Combines this limit with the workers' permits, and reports changes. Admission and dispatch
//! apply the result.

use std::cmp::Ordering;

use bulkhead_shared::Verdict;

use super::Bulkhead;
use crate::adaptive::{Adaptive, AdaptiveView};
use crate::jobs::JobState;
use crate::messages::{Action, OperatorEvent};
use crate::tenants::TenantId;
use crate::time::Time;

impl<T> Bulkhead<T> {
    /// Returns the state of the adaptive limit, or `None` if it is not configured.
    pub fn adaptive(&self) -> Option<AdaptiveView> {
        self.adaptive.as_deref().map(Adaptive::view)
    }

    /// Returns the number of jobs that can currently run at once. Each ready worker contributes `max_in_flight` jobs,
    /// or fewer if the worker was started with a lower value and cannot change this value. The adaptive limit caps the
    /// sum. During an upgrade, the other supervisor's permits are excluded.
    pub fn limit(&self) -> u64 {
        self.own_permits(self.workers.totals().permits.min(self.adaptive_bound()))
    }

    /// Returns true if workers are missing, so that there are fewer permits than configured. Ignores the adaptive
    /// limit.
    pub fn is_short_of_workers(&self) -> bool {
        self.workers.totals().permits
            < u64::from(self.limits.processes) * u64::from(self.limits.max_in_flight)
    }

    /// Returns the maximum number of running jobs according to the adaptive limit, or `u64::MAX` if there is no
    /// adaptive limit.
    pub(super) fn adaptive_bound(&self) -> u64 {
        self.adaptive.as_deref().and_then(Adaptive::bound).map_or(u64::MAX, u64::from)
    }

    pub(super) fn reconfigure_adaptive(&mut self, now: Time) {
        self.adaptive = match (self.limits.adaptive.clone(), self.adaptive.take()) {
            (None, _) => None,
            (Some(limits), None) => Some(Box::new(Adaptive::new(limits, now))),
            (Some(limits), Some(mut adaptive)) => {
                adaptive.reconfigure(limits, now);
                Some(adaptive)
            }
        };
    }

    /// Records the run time of a job whose outcome is about to be sent. Ignores crashes, because the duration of a
    /// crashed run says nothing about normal run times.
    pub(super) fn record_run_time(&mut self, now: Time, since: Time, tenant: TenantId, verdict: &Verdict) {
        let taken = (self.in_use_before_event, self.reserved_before_event);
        if let Some(adaptive) = self.adaptive.as_deref_mut()
            && !matches!(verdict, Verdict::Crashed { .. })
        {
            adaptive.count_ended(now, since, tenant.0, *verdict == Verdict::Ok, taken);
        }
    }

    /// Closes the adaptive limit's measurement window if the window is complete. Reports changes to the limit.
    pub(super) fn adapt(&mut self, now: Time) {
        if let Some(mut adaptive) = self.adaptive.take_if(|adaptive| adaptive.is_due(now)) {
            for index in self.workers.iter().flat_map(|worker| &worker.jobs) {
                let job = self.jobs.get(*index);
                if let (JobState::InFlight { since, .. }, true) = (job.state, job.record.is_some()) {
                    adaptive.count_running(now, since, job.tenant.0);
                }
            }
            let moved = adaptive.close_window(now);
            self.counters.limit_raised += u64::from(moved == Ordering::Greater);
            self.counters.limit_lowered += u64::from(moved == Ordering::Less);
            self.adaptive = Some(adaptive);
        }
        if let Some(adaptive) = self.adaptive.as_deref_mut()
            && let Some(reported) = adaptive.take_report(now)
        {
            let limits = adaptive.view().limits;
            let note = OperatorEvent::LimitAdapted {
                from: reported.from,
                to: reported.to,
                latency: reported.latency,
                limits,
            };
            self.actions.push(Action::Report(note));
        }
    }
}
