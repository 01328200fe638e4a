//! Commands from the control plane.

use std::collections::BTreeMap;

use bulkhead_api::{
    BreakerMode, Change, ChangedPer, EventKind, Rate, Severity, Snapshot, TenantChange, TenantRate,
};
use bulkhead_config::defaults::{IN_FLIGHT_CEILING, ISOLATED_WORKERS_CEILING, PERMITS_CEILING};
use bulkhead_config::{self as config, Overflow, TenantConfig};
use bulkhead_plane::command::{Command, SteerAction, SteerError};
use bulkhead_plane::confinement::Sandbox;
use bulkhead_plane::notices::Milestone;
use bulkhead_plane::peer_check::SocketKind;
use bulkhead_policy::{BreakerState, Event, LimitChange, Limits, RateLimit, RatePer};
use bulkhead_shared::limits::TENANT_BYTES_MAX;
use bulkhead_shared::{Priority, RejectReason, Verdict};

use super::bulkheads::{Layout, Presence};
use super::shares::Owner;
use super::slab::{BulkheadIndex, CompartmentIndex};
use super::{DataPlane, Incoming};

/// Maximum number of tenants per bulkhead with individual limits.
const OWN_MAX: usize = 16_384;

impl DataPlane {
    pub(super) fn command(&mut self, command: Command) {
        self.count_refused_by_http();
        match command {
            Command::Listen(listener) => self.listen(listener),
            Command::Snapshot { bulkhead, reply } => self.want_snapshot(bulkhead.as_deref(), reply),
            Command::States { reply } => {
                let _ = reply.send(self.states());
            }
            Command::Scrape { reply } => {
                let _ = reply.send(self.scrape());
            }
            Command::Steer { bulkhead, action, reply } => {
                let done = self.steer(&bulkhead, action);
                self.reporter.states_have_changed();
                let _ = reply.send(done);
            }
            Command::Change { bulkhead, change, reply } => {
                let done = self.change(&bulkhead, &change);
                self.reporter.states_have_changed();
                let _ = reply.send(done);
            }
            Command::TenantSnapshot { bulkhead, tenant, reply } => {
                let _ = reply.send(self.tenant_snapshot(&bulkhead, &tenant));
            }
            Command::ChangeTenant { bulkhead, tenant, change, reply } => {
                let done = self.change_tenant(&bulkhead, &tenant, &change);
                self.reporter.states_have_changed();
                let _ = reply.send(done);
            }
            Command::Observe { bulkhead, reply } => {
                let _ = reply.send(self.observation(&bulkhead));
            }
            Command::WorkerProcesses { reply } => {
                let _ = reply.send(self.worker_processes());
            }
            Command::ReportMemory { bulkhead, pid, generation, rss_bytes } => {
                self.memory(&bulkhead, pid, generation, rss_bytes);
            }
            Command::ReportTemporaryFolder { worker, bytes, bytes_without_forked, template } => {
                self.temporary(worker, (bytes, bytes_without_forked), template);
            }
            Command::Replay { request, accepted, done } => {
                let _ = accepted.send(self.replay(request, done));
            }
            Command::AddInProcessClient { end } => self.welcome_embedded(end),
            Command::AddClient { socket, permit, client } => self.welcome_own(socket, permit, client),
            Command::AddSpool { token, spool } => self.memory.add_spool(Owner::Token(token), spool),
            Command::ReportRejection { rejection, .. } => self.note_refusal(SocketKind::Admin, rejection),
            Command::Reload { reload, reply } => {
                let done = self.reload(*reload);
                self.reporter.states_have_changed();
                let _ = reply.send(done);
            }
            Command::TryReload { reload, reply } => {
                let _ = reply.send(self.would_drop(&reload));
            }
            Command::Summarise => self.summarise(),
            Command::ReapOrphans { reply } => {
                let _ = reply.send(self.keeper.reap_orphans());
            }
        }
    }

    /// Counts the jobs that the HTTP server has rejected, so that the next counts include them.
    fn count_refused_by_http(&mut self) {
        let counters = self.reporter.counters.clone();
        for ((name, priority, reason), count) in counters.rejected_jobs.take() {
            if let Some(&bulkhead) = self.bulkheads.by_name.get(&*name) {
                (0..count).for_each(|_| self.count_rejected(bulkhead, (priority, self.label_of("")), reason));
            }
        }
    }

    /// Counts a job that was rejected before reaching a compartment.
    pub(super) fn count_rejected(
        &mut self,
        bulkhead: BulkheadIndex,
        (priority, label): (Priority, u32),
        reason: RejectReason,
    ) {
        let verdict = Verdict::rejected(reason);
        let (now, entry) = (self.now, &mut self.bulkheads[bulkhead]);
        entry.counters.count_submitted(priority);
        entry.counters.count_outcome(priority, label, &verdict);
        entry.service.count(now, &verdict);
        match &mut self.bulkheads[bulkhead].layout {
            Layout::Shared(compartment) => {
                self.compartments[*compartment].policy.count_rejected(reason);
            }
            Layout::Isolated(isolated) => isolated.past.count_rejected(reason),
        }
    }

    fn find(&self, name: &str) -> Result<BulkheadIndex, SteerError> {
        let &bulkhead = self.bulkheads.by_name.get(name).ok_or(SteerError::NotFound)?;
        if self.stopping { Err(SteerError::Stopping) } else { Ok(bulkhead) }
    }

    fn steer(&mut self, name: &str, action: SteerAction) -> Result<(), SteerError> {
        let bulkhead = self.find(name)?;
        if let Some(isolated) = self.bulkheads[bulkhead].isolated() {
            match action {
                SteerAction::Drain => isolated.is_draining = true,
                SteerAction::Resume => isolated.is_draining = false,
                SteerAction::Reset => isolated.is_forced_open = false,
                SteerAction::Restart => {}
            }
        }
        for compartment in self.compartments_of(bulkhead) {
            let event = match action {
                SteerAction::Restart => Event::Restart,
                SteerAction::Drain => Event::Drain,
                SteerAction::Resume => Event::Resume,
                SteerAction::Reset => Event::Reset,
            };
            self.apply_quietly(compartment, event);
        }
        // A single event covers all tenants.
        let what = match action {
            SteerAction::Drain => EventKind::Draining { drain_timeout_ms: None },
            SteerAction::Resume => EventKind::Resumed {},
            SteerAction::Restart | SteerAction::Reset => return Ok(()),
        };
        if self.bulkheads[bulkhead].isolated().is_some() {
            self.bulkhead_event(Severity::Info, bulkhead, what);
        }
        Ok(())
    }

    // Limits.

    fn change(&mut self, name: &str, change: &Change) -> Result<Box<Snapshot>, SteerError> {
        let bulkhead = self.find(name)?;
        let so_far = self.limits_of(bulkhead).rate_limit.map_or(RatePer::Bulkhead, |limit| limit.per);
        let rate = change.rate_limit.as_ref().map(|rate| {
            let rate = rate.as_ref()?;
            let per = match rate.per {
                Some(ChangedPer::Bulkhead) => RatePer::Bulkhead,
                Some(ChangedPer::Tenant) => RatePer::Tenant,
                None => so_far,
            };
            Some(rate_limit(rate.per_second, rate.burst, per))
        });
        let Change { processes, max_in_flight, max_queue, .. } = *change;
        let numbers = LimitChange { processes, max_in_flight, max_queue, rate_limit: rate };
        self.check_change(bulkhead, &numbers)?;
        for compartment in self.compartments_of(bulkhead) {
            let own = self.own_numbers(bulkhead, compartment);
            let numbers = LimitChange {
                processes: processes.filter(|_| own.processes.is_none()),
                max_in_flight: max_in_flight.filter(|_| own.max_in_flight.is_none()),
                max_queue: max_queue.filter(|_| own.max_queue.is_none()),
                rate_limit: rate.filter(|_| own.rate_limit.is_none()),
            };
            self.apply(compartment, Event::ChangeLimits(numbers), Incoming::None);
        }
        if let Some(isolated) = self.bulkheads[bulkhead].isolated() {
            numbers.apply_to(&mut isolated.limits);
        }
        if let Some(mode) = change.breaker {
            self.force_breaker(bulkhead, mode == BreakerMode::ForcedOpen);
        }
        self.note_numbers(bulkhead, None, &numbers);
        Ok(Box::new(self.snapshot(bulkhead)))
    }

    fn force_breaker(&mut self, bulkhead: BulkheadIndex, open: bool) {
        let was_open = self.bulkheads[bulkhead]
            .isolated()
            .map(|isolated| std::mem::replace(&mut isolated.is_forced_open, open));
        for compartment in self.compartments_of(bulkhead) {
            self.apply_quietly(compartment, Event::ForceBreaker { open });
        }
        let (closed, forced) = (BreakerState::Closed.into(), BreakerState::ForcedOpen.into());
        let (calls, failure_rate, slow_rate) = (None, None, None);
        match (was_open, open) {
            (Some(false), true) => {
                let what =
                    EventKind::BreakerOpened { from: closed, to: forced, calls, failure_rate, slow_rate };
                self.bulkhead_event(Severity::Warning, bulkhead, what);
            }
            (Some(true), false) => {
                let what =
                    EventKind::BreakerClosed { from: forced, to: closed, calls, failure_rate, slow_rate };
                self.bulkhead_event(Severity::Info, bulkhead, what);
            }
            _ => {}
        }
    }

    /// Returns the individual limits of the compartment's tenant, if the compartment serves a single tenant.
    fn own_numbers(&self, bulkhead: BulkheadIndex, compartment: CompartmentIndex) -> TenantConfig {
        match (&self.bulkheads[bulkhead].layout, &self.compartments[compartment].tenant) {
            (Layout::Isolated(isolated), Some(tenant)) => {
                isolated.own.get(&**tenant).copied().unwrap_or_default()
            }
            _ => TenantConfig::default(),
        }
    }

    /// Returns the limits in force for all tenants of a bulkhead.
    pub(super) fn limits_of(&self, bulkhead: BulkheadIndex) -> &Limits {
        match &self.bulkheads[bulkhead].layout {
            Layout::Shared(compartment) => self.compartments[*compartment].policy.limits(),
            Layout::Isolated(isolated) => &isolated.limits,
        }
    }

    /// Returns the configured bulkheads.
    pub(super) fn present(&self) -> Vec<BulkheadIndex> {
        let here = self.bulkheads.iter().filter(|(_, entry)| entry.presence == Presence::Here);
        here.map(|(index, _)| index).collect()
    }

    fn check_change(&self, bulkhead: BulkheadIndex, numbers: &LimitChange) -> Result<(), SteerError> {
        let mut limits = self.limits_of(bulkhead).clone();
        numbers.apply_to(&mut limits);
        let entry = &self.bulkheads[bulkhead];
        let max_active = match &entry.layout {
            Layout::Shared(_) => None,
            Layout::Isolated(isolated) => Some(isolated.max_active),
        };
        let (sandbox, has_own_pressure) = (entry.program.sandbox(), entry.has_own_pressure);
        check_fit(&limits, &entry.own, Fixed { sandbox, max_active, has_own_pressure })
    }

    fn change_tenant(
        &mut self,
        name: &str,
        tenant: &str,
        change: &TenantChange,
    ) -> Result<TenantChange, SteerError> {
        let bulkhead = self.find(name)?;
        let rate = change.rate_limit.as_ref();
        let rate = rate.map(|rate| rate_limit(rate.per_second, rate.burst, RatePer::Tenant));
        let TenantChange { processes, max_in_flight, max_queue, .. } = *change;
        let own = TenantConfig { processes, max_in_flight, max_queue, rate_limit: rate };
        let numbers = own.of_workers();
        self.check_tenant(bulkhead, tenant, &numbers)?;
        let all = match &mut self.bulkheads[bulkhead].layout {
            Layout::Isolated(isolated) => {
                let entry = isolated.own.entry(tenant.to_owned()).or_default();
                *entry = own.or(*entry);
                let (all, compartment) = (*entry, isolated.by_tenant.get(tenant).copied());
                if let Some(compartment) = compartment {
                    self.apply(compartment, Event::ChangeLimits(numbers), Incoming::None);
                }
                all
            }
            Layout::Shared(compartment) => {
                let compartment = *compartment;
                let entry = self.bulkheads[bulkhead].own.entry(tenant.to_owned()).or_default();
                *entry = own.or(*entry);
                let all = *entry;
                let event =
                    Event::ChangeTenantLimits { tenant: tenant.to_owned(), overrides: all.of_share() };
                self.apply(compartment, event, Incoming::None);
                all
            }
        };
        self.note_numbers(bulkhead, Some(tenant), &numbers);
        Ok(TenantChange {
            processes: all.processes,
            max_in_flight: all.max_in_flight,
            max_queue: all.max_queue,
            rate_limit: all
                .rate_limit
                .map(|rate| TenantRate { per_second: rate.per_second, burst: Some(rate.burst) }),
        })
    }

    fn check_tenant(
        &self,
        bulkhead: BulkheadIndex,
        tenant: &str,
        numbers: &LimitChange,
    ) -> Result<(), SteerError> {
        let unfit = |message: String| Err(SteerError::Conflict(message));
        if tenant.is_empty() || tenant.len() > TENANT_BYTES_MAX || tenant.contains('\0') {
            return unfit(format!("a tenant's name has 1 to {TENANT_BYTES_MAX} bytes, and no NUL"));
        }
        match &self.bulkheads[bulkhead].layout {
            Layout::Isolated(isolated) => {
                let is_new = !isolated.own.contains_key(tenant);
                if is_new && isolated.own.len() >= OWN_MAX {
                    return unfit(format!("{OWN_MAX} tenants, the maximum, already have separate numbers"));
                }
                let mut limits = isolated.limits_of(tenant);
                numbers.apply_to(&mut limits);
                let (processes, in_flight) = (limits.processes, limits.max_in_flight);
                check_programs(self.bulkheads[bulkhead].program.sandbox(), in_flight)?;
                if u64::from(in_flight) > IN_FLIGHT_CEILING {
                    return unfit(format!("max_in_flight (per worker) must be at most {IN_FLIGHT_CEILING}"));
                }
                if u64::from(processes) * u64::from(in_flight) > PERMITS_CEILING {
                    return unfit(format!("processes x max_in_flight must be at most {PERMITS_CEILING}"));
                }
                check_adaptive(&limits, processes, in_flight)?;
                if in_flight == 0 && limits.max_queue > 0 {
                    return unfit("this tenant's max_in_flight is 0: no queued job would run".into());
                }
                check_workers(processes, limits.start.spares, isolated.max_active)
            }
            Layout::Shared(compartment) => {
                let own = &self.bulkheads[bulkhead].own;
                if !own.contains_key(tenant) && own.len() >= OWN_MAX {
                    return unfit(format!("{OWN_MAX} tenants, the maximum, already have separate numbers"));
                }
                if numbers.processes.is_some() {
                    return unfit("a tenant's own processes need tenants.isolate = true".into());
                }
                let limit = self.compartments[*compartment].policy.limits().rate_limit;
                let is_common = limit.is_some_and(|limit| limit.per == RatePer::Bulkhead);
                if numbers.rate_limit.is_some() && is_common {
                    return unfit("a tenant's own rate_limit needs rate_limit.per = \"tenant\"".into());
                }
                Ok(())
            }
        }
    }

    fn note_numbers(&mut self, bulkhead: BulkheadIndex, tenant: Option<&str>, numbers: &LimitChange) {
        if *numbers == LimitChange::default() {
            return;
        }
        let what = EventKind::LimitsChanged {
            max_in_flight: numbers.max_in_flight,
            processes: numbers.processes,
            max_queue: numbers.max_queue,
            rate_limit: numbers.rate_limit.map(|limit| limit.map(Rate::from)),
            tenant: tenant.map(str::to_owned),
        };
        self.bulkhead_event(Severity::Info, bulkhead, what);
    }

    fn memory(&mut self, name: &str, pid: u32, generation: u32, rss_bytes: u64) {
        let Some(&bulkhead) = self.bulkheads.by_name.get(name) else { return };
        for compartment in self.compartments_of(bulkhead) {
            let views = self.compartments[compartment].policy.workers(self.now);
            let worker = views.iter().find(|v| v.pid == Some(pid) && v.id.generation == generation);
            if let Some(worker) = worker.map(|view| view.id) {
                self.apply(compartment, Event::Memory { worker, rss_bytes }, Incoming::None);
                return;
            }
        }
    }

    /// Stops all bulkheads. The first call allows jobs in flight `drain_timeout`, and the second allows no time.
    pub(super) fn stop(&mut self) {
        let patience = if self.stopping { std::time::Duration::ZERO } else { self.limits.drain_timeout };
        if !self.stopping {
            self.stopping = true;
            self.reporter.states_have_changed();
            self.reporter.notices.send_milestone(Milestone::Stopping);
            let drain_timeout_ms = u64::try_from(patience.as_millis()).ok();
            self.event(Severity::Info, None, EventKind::Draining { drain_timeout_ms });
        }
        let by = self.now + patience;
        for index in self.compartments.indices() {
            self.apply(index, Event::Stop { by }, Incoming::None);
        }
    }

    fn summarise(&mut self) {
        for bulkhead in self.present() {
            let told = self.snapshot(bulkhead);
            let what = EventKind::Summary {
                rejected: told.rejections(),
                workers: told.workers.len(),
                state: told.state,
                service: told.service,
                service_cause: told.service_cause,
                in_flight: told.in_flight,
                limit: told.limit,
                queued: told.queued,
                done: told.done,
                failed: told.failed,
                crashed: told.crashed,
                deadline_exceeded: told.deadline_exceeded,
                cancelled: told.cancelled,
                restarts: told.restarts,
            };
            self.bulkhead_event(Severity::Info, bulkhead, what);
        }
        let what = EventKind::SummaryOfAll {
            clients: self.sessions.clients,
            buffered_bytes: self.memory.held(),
            undelivered_bytes: self.sessions.undelivered,
            keeper_pid: self.keeper.pid(),
        };
        self.event(Severity::Info, None, what);
    }
}

fn rate_limit(per_second: f64, burst: Option<u32>, per: RatePer) -> RateLimit {
    RateLimit { per_second, burst: burst.unwrap_or_else(|| per_second.ceil() as u32), per }
}

/// Rejects concurrent programs in a worker if nothing isolates the programs.
fn check_programs(sandbox: &Sandbox, max_in_flight: u32) -> Result<(), SteerError> {
    match sandbox.why_single_program() {
        Some(why) if max_in_flight > 1 => Err(SteerError::Conflict(format!(
            "max_in_flight must be at most 1, because programs of the same worker could reach each other: \
             {why}"
        ))),
        _ => Ok(()),
    }
}

/// Rejects an adaptive limit above the number of permits.
fn check_adaptive(limits: &Limits, processes: u32, in_flight: u32) -> Result<(), SteerError> {
    let most = u64::from(processes) * u64::from(in_flight);
    match &limits.adaptive {
        Some(adaptive) if u64::from(adaptive.max) > most => Err(SteerError::Conflict(format!(
            "adaptive.max ({}) would be above processes x max_in_flight ({most}): lower adaptive.max in the \
             file first",
            adaptive.max
        ))),
        _ => Ok(()),
    }
}

/// Limits the number of processes of a bulkhead with isolated tenants, including spares.
fn check_workers(processes: u32, spares: u32, max_active: usize) -> Result<(), SteerError> {
    let each = u64::from(processes) + u64::from(spares);
    match each * max_active as u64 <= ISOLATED_WORKERS_CEILING {
        true => Ok(()),
        false => Err(SteerError::Conflict(format!(
            "(processes + start.spares) x tenants.max_active must be at most {ISOLATED_WORKERS_CEILING}"
        ))),
    }
}

/// Settings that cannot be changed live.
#[derive(Clone, Copy)]
pub(super) struct Fixed<'s> {
    pub(super) sandbox: &'s Sandbox,
    /// Maximum number of tenants with workers, if tenants are isolated.
    pub(super) max_active: Option<usize>,
    pub(super) has_own_pressure: bool,
}

/// Rejects settings that need a queue if there is no queue.
fn check_queue(limits: &Limits, has_own_pressure: bool) -> Result<(), SteerError> {
    let unfit = |(what, help): (String, String)| Err(SteerError::Conflict(format!("{what}: {help}")));
    match limits.max_queue {
        0 if limits.overflow == Overflow::EvictOldest => unfit(config::overflow_needs_queue(
            format_args!("\"{}\"", limits.overflow.name()),
            limits.max_queue,
        )),
        0 if has_own_pressure => unfit(config::pressure_needs_queue(limits.max_queue)),
        _ => Ok(()),
    }
}

/// Checks the relations between keys that apply to a configuration file too.
pub(super) fn check_fit(
    limits: &Limits,
    own: &BTreeMap<String, TenantConfig>,
    Fixed { sandbox, max_active, has_own_pressure }: Fixed<'_>,
) -> Result<(), SteerError> {
    let unfit = |message: String| Err(SteerError::Conflict(message));
    check_programs(sandbox, limits.max_in_flight)?;
    check_queue(limits, has_own_pressure)?;
    let (processes, in_flight) = (u64::from(limits.processes), u64::from(limits.max_in_flight));
    if processes * in_flight > PERMITS_CEILING {
        return unfit(format!("processes x max_in_flight must be at most {PERMITS_CEILING}"));
    }
    check_adaptive(limits, limits.processes, limits.max_in_flight)?;
    for own in own.values().filter(|_| max_active.is_some()) {
        let processes = own.processes.unwrap_or(limits.processes);
        check_adaptive(limits, processes, own.max_in_flight.unwrap_or(limits.max_in_flight))?;
    }
    if in_flight == 0 && limits.max_queue > 0 {
        return unfit("max_in_flight = 0 rejects every job: set max_queue to 0 as well".into());
    }
    let is_common = limits.rate_limit.is_some_and(|limit| limit.per == RatePer::Bulkhead);
    let has_own = own.values().any(|own| own.rate_limit.is_some());
    if max_active.is_none() && is_common && has_own {
        let message = "some tenants have a separate rate limit, which needs rate_limit.per = \"tenant\"";
        return unfit(message.into());
    }
    max_active.map_or(Ok(()), |tenants| check_workers(limits.processes, limits.start.spares, tenants))
}
