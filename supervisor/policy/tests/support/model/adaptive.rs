//! Model of the adaptive limit, which is computed from a list of all run times in a window.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bulkhead_policy::{Action, AdaptiveLimits, AdaptiveMode, Bulkhead, TenantId, Time};
use bulkhead_shared::{JobId, Verdict};

use super::Model;
use crate::support::Tag;

pub(super) struct Adaptive {
    limits: AdaptiveLimits,
    pub(super) limit: u32,
    since: Time,
    runs: Vec<(TenantId, Duration)>,
    in_use: usize,
    was_full: bool,
    fell_at: Time,
    grew: bool,
    pause: u32,
    next_pause: u32,
}

impl Adaptive {
    pub(super) fn new(limits: AdaptiveLimits, now: Time) -> Self {
        Self {
            limit: limits.max,
            limits,
            since: now,
            runs: Vec::new(),
            in_use: 0,
            was_full: false,
            fell_at: Time::ZERO,
            grew: false,
            pause: 0,
            next_pause: 1,
        }
    }

    fn window(&mut self, now: Time) {
        (self.since, self.in_use, self.was_full) = (now, 0, false);
        self.runs.clear();
    }

    /// Returns the 90th percentile of a tenant's most recent run times.
    fn latency(mut runs: Vec<Duration>) -> Duration {
        let mut runs = runs.split_off(runs.len().saturating_sub(128));
        runs.sort();
        let at_most =
            |ran: &&Duration| runs.iter().filter(|other| other <= ran).count() * 10 >= runs.len() * 9;
        *runs.iter().find(at_most).expect("the list of run times must not be empty")
    }

    /// Adjusts the limit based on the lower median of the tenants' latencies.
    fn adjust(&mut self, now: Time) {
        let mut by_tenant: BTreeMap<TenantId, Vec<Duration>> = BTreeMap::new();
        for &(tenant, ran) in &self.runs {
            by_tenant.entry(tenant).or_default().push(ran);
        }
        let votes: Vec<Duration> = by_tenant.into_values().map(Self::latency).collect();
        let is_kept =
            |latency: &&Duration| votes.iter().filter(|vote| vote <= latency).count() * 2 >= votes.len();
        let latency = *votes.iter().filter(is_kept).min().expect("the list of run times must not be empty");
        let ratio = |count: u32| {
            let count = u128::from(count) * self.limits.target.as_nanos() / latency.as_nanos().max(1);
            u32::try_from(count).unwrap_or(u32::MAX)
        };
        if latency > self.limits.target {
            let is_enforced = self.limits.mode == AdaptiveMode::Enforce;
            let from = if is_enforced { self.limit } else { self.in_use as u32 };
            let to = self.limit.min(ratio(from).max(self.limit / 2));
            self.limit = to.max(self.limits.min).min(self.limits.max);
            if self.grew {
                self.next_pause = 32.min(self.next_pause * 2);
            }
            (self.grew, self.pause, self.fell_at) = (false, self.next_pause, now);
        } else {
            if self.grew {
                self.next_pause = 1.max(self.next_pause / 2);
            }
            self.grew = false;
            if self.pause > 0 {
                self.pause -= 1;
            } else if self.was_full && self.limit < self.limits.max {
                let headroom = f64::from(self.limit).sqrt() as u32;
                let most = ratio(self.limit).max(self.limit + 1).min(self.limits.max);
                self.limit = most.min(self.limit + headroom);
                self.grew = true;
            }
        }
        self.window(now);
    }
}

impl Model {
    pub(super) fn reconfigure_adaptive(&mut self) {
        let now = self.now;
        match (&self.limits.adaptive, &mut self.adaptive) {
            (Some(limits), Some(adaptive)) if adaptive.limits != *limits => {
                adaptive.limits = limits.clone();
                adaptive.limit = adaptive.limit.max(limits.min).min(limits.max);
                adaptive.window(now);
            }
            (Some(_), Some(_)) => {}
            (limits, _) => self.adaptive = limits.clone().map(|limits| Adaptive::new(limits, now)),
        }
    }

    /// Returns the number of permits, reduced to the adaptive limit if this limit is enforced.
    pub(super) fn adaptive_limit(&self, permits: usize) -> usize {
        let enforced = self.adaptive.as_ref().filter(|a| a.limits.mode == AdaptiveMode::Enforce);
        enforced.map_or(permits, |adaptive| permits.min(adaptive.limit as usize))
    }

    /// Returns the jobs that were recalled before the limit changed: all jobs recalled from workers in which at least
    /// one recalled job has ended, for example because its deadline has passed.
    fn recalled_early(&self, actions: &[Action<Tag>]) -> Vec<JobId> {
        let is_due = |id: &JobId| {
            let job = &self.jobs[id];
            let has_run = job.run_limits[0].is_some_and(|limit| job.since + limit <= self.now);
            let is_impatient = job.is_prefetched() && job.queue_timeout_at.is_some_and(|at| at <= self.now);
            job.deadline_at <= self.now || has_run || is_impatient || self.step.required.contains_key(id)
        };
        let back = actions.iter().filter_map(|action| match action {
            Action::Recalled { worker, job } => Some((*worker, *job)),
            _ => None,
        });
        let back: Vec<_> = back.collect();
        let early: BTreeSet<_> =
            back.iter().filter(|(_, job)| is_due(job)).map(|(worker, _)| *worker).collect();
        back.into_iter().filter(|(worker, _)| early.contains(worker)).map(|(_, job)| job).collect()
    }

    pub(super) fn adapt(&mut self, actions: &[Action<Tag>]) {
        let now = self.now;
        let reserved_permits = self.reserved_before_event;
        let Some(mut adaptive) = self.adaptive.take() else { return };
        let unbegun = self.recalled_early(actions);
        let mut ended = Vec::new();
        let mut has_news = false;
        for (at, action) in actions.iter().enumerate() {
            let Action::SendOutcome(answer) = action else { continue };
            let Some((id, job)) = answer.job.and_then(|id| Some((id, self.jobs.get(&id)?))) else { continue };
            let count_fallback_outcome =
                |action: &Action<Tag>| matches!(action, Action::Recalled { job, .. } if *job == id);
            if actions[..at].iter().any(count_fallback_outcome) {
                continue;
            }
            ended.push(id);
            let ran = now.since(job.since);
            let is_telling = match answer.verdict {
                Verdict::Ok => true,
                Verdict::Crashed { .. } => false,
                _ => ran > adaptive.limits.target,
            };
            if job.worker.is_some() && is_telling && job.since >= adaptive.fell_at {
                // A run that exceeded the target in an earlier window was already counted in that window.
                let was_late = job.since + adaptive.limits.target < adaptive.since;
                adaptive.runs.extend((!was_late).then_some((job.tenant, ran)));
                adaptive.in_use = adaptive.in_use.max(self.in_use_before_event);
                adaptive.was_full |= self.in_use_before_event + reserved_permits >= adaptive.limit as usize;
                has_news = true;
            }
        }
        let length =
            (adaptive.limits.target * 2).max(Duration::from_millis(100)).min(Duration::from_secs(10));
        if has_news && adaptive.runs.len() >= 10 && adaptive.since + length <= now {
            let runs = self.jobs.iter().filter(|(id, job)| {
                job.worker.is_some()
                    && !job.is_answered
                    && !ended.contains(id)
                    && !unbegun.contains(id)
                    && job.since >= adaptive.fell_at
            });
            let (since, target) = (adaptive.since, adaptive.limits.target);
            let runs = runs.filter(|(_, job)| job.since + target >= since);
            let late =
                runs.map(|(_, job)| (job.tenant, now.since(job.since))).filter(|(_, ran)| *ran > target);
            adaptive.runs.extend(late);
            let before = adaptive.limit;
            adaptive.adjust(now);
            let mode = adaptive.limits.mode.name();
            match adaptive.limit.cmp(&before) {
                std::cmp::Ordering::Less => {
                    self.counters.limit_lowered += 1;
                    self.coverage.see(&format!("limit lowered {mode}"));
                }
                std::cmp::Ordering::Equal => self.coverage.see("limit unchanged"),
                std::cmp::Ordering::Greater => {
                    self.counters.limit_raised += 1;
                    self.coverage.see(&format!("limit raised {mode}"));
                }
            }
        }
        self.adaptive = Some(adaptive);
    }

    pub(super) fn check_adaptive(&mut self, bulkhead: &Bulkhead<Tag>) {
        let (expected, got) = (self.adaptive.as_ref().map(|a| a.limit), bulkhead.adaptive());
        assert_eq!(got.as_ref().map(|view| view.limit), expected, "{got:?}");
        if let Some(view) = got {
            assert!((view.limits.min..=view.limits.max).contains(&view.limit), "{view:?}");
            let is_short = self.permits().1 > 0 && self.adaptive_limit(usize::MAX) <= self.permits().0;
            if is_short && !self.queue.is_empty() {
                self.coverage.see("waits for the adaptive limit");
            }
        }
    }
}
