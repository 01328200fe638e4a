//! Computes the recommended limits of a bulkhead from observations of its load. Each rule examines one key, and either
//! proposes a new value or explains why the current value should stay the same. `observations` computes the input. Only
//! operators change limits, for example with `bulkhead resize`.

use std::time::Duration;

use super::adaptive;
use super::observations::{can_lower, expired, missing, not_served, rejections, rejections_by_reason};
use super::{Kept, Machine, Observations, Proposal, Setting, Settings};
use bulkhead_config::defaults::{
    CGROUP_MEMORY_MIN, DURATION_MAX, IN_FLIGHT_CEILING, ISOLATED_WORKERS_CEILING, PERMITS_CEILING,
    PROCESSES_CEILING, QUEUE_CEILING,
};
use bulkhead_config::{format_duration, format_size};

/// If all permits were in use for more than this share of the time, the observed concurrency reflects the limit rather
/// than the demand.
const AT_LIMIT_MAX: f64 = 0.01;

/// If there were too few workers for more than this share of the time, the rules do not recommend a number of workers.
const MISSING_WORKERS_MAX: f64 = 0.05;

/// If more than this share of all jobs was rejected or late, the number of rejected or late jobs counts as significant.
const MANY_JOBS_SHARE: f64 = 0.01;

/// If jobs were in flight for less than this share of the time, the bulkhead counts as idle.
const IDLE_MAX: f64 = 0.01;

/// Processor usage per job, as a fraction of one processor, above which jobs count as CPU-bound. Running more CPU-bound
/// jobs at once than there are processors does not increase the throughput.
const CPU_BOUND: f64 = 0.7;

/// Maximum share of the machine's memory that the workers of one bulkhead should use.
const MEMORY_SHARE: f64 = 0.8;

/// If the p99 run time reaches this fraction of the deadline, the deadline counts as too short.
const DEADLINE_NEAR: f64 = 0.8;

/// If the deadline is at least this many times the longest job duration, the deadline counts as too long. The
/// proposed deadline is `DEADLINE_ROOM` times the longest job duration.
const DEADLINE_FAR: f64 = 20.0;
const DEADLINE_ROOM: f64 = 5.0;
const DEADLINE_MIN: Duration = Duration::from_secs(1);

/// Granularity of proposed sizes, in bytes.
const SIZE_STEP: u64 = 4 << 20;

type Verdicts = (Vec<Proposal>, Vec<Kept>);

/// Applies all rules to the observations of a bulkhead.
pub(super) fn advise(seen: &Observations, settings: &Settings, machine: &Machine) -> Verdicts {
    let mut verdicts = Verdicts::default();
    if settings.permits() == 0 {
        let reason = "a value of 0 rejects every job: set a value of at least 1".to_owned();
        verdicts.keep("max_in_flight", Setting::Count(0), reason);
        return verdicts;
    }
    if seen.concurrency.max == 0 {
        let rejected = reasons(seen.rejected.iter().map(|(reason, count)| (&**reason, *count)));
        let reason = format!("no job has run, so there are no measurements; rejected jobs: {rejected}");
        verdicts.keep("processes", Setting::Count(settings.processes.into()), reason);
        return verdicts;
    }
    let busy = seen.busy_ms as f64 / millis(seen.watched).max(1.0);
    if busy < IDLE_MAX && not_served(seen).next().is_none() && seen.deadline_exceeded.running == 0 {
        let reason = format!(
            "jobs were in flight for only {} of the time, so there is too little data to size this bulkhead",
            percent(busy)
        );
        verdicts.keep("processes", Setting::Count(settings.processes.into()), reason);
        return verdicts;
    }
    let permits = match settings.adaptive.as_ref().and_then(adaptive::bottleneck) {
        Some(reason) => {
            verdicts.keep(SizingKey::of(settings).key, Setting::Count(SizingKey::of(settings).now), reason);
            settings.permits()
        }
        None => advise_permits(seen, settings, machine, &mut verdicts),
    };
    let adds_permits = verdicts.0.iter().any(|proposal| proposal.proposed > proposal.now);
    if let Some(adaptive) = &settings.adaptive {
        verdicts.keep("adaptive", Setting::Count(adaptive.limit), adaptive::describe(adaptive));
    }
    advise_queue(seen, settings, (permits, adds_permits), &mut verdicts);
    advise_queue_timeout(seen, settings, &mut verdicts);
    advise_deadline(seen, settings, &mut verdicts);
    advise_memory(seen, settings, &mut verdicts);
    verdicts
}

trait RecordVerdict {
    fn propose(&mut self, key: &'static str, now: Setting, proposed: Setting, reason: String);
    fn keep(&mut self, key: &'static str, now: Setting, reason: String);
}

impl RecordVerdict for Verdicts {
    fn propose(&mut self, key: &'static str, now: Setting, proposed: Setting, reason: String) {
        self.0.push(Proposal { key: key.into(), now, proposed, reason });
    }

    fn keep(&mut self, key: &'static str, now: Setting, reason: String) {
        self.1.push(Kept { key: key.into(), now, reason });
    }
}

// Rules for the number of permits (`processes` × `max_in_flight`).

/// Configuration key that determines the number of permits. Advice recommends a new value for this key.
struct SizingKey {
    key: &'static str,
    now: u64,
    /// Number of permits added when the value of the key increases by 1.
    permits_each: u64,
    most: u64,
}

impl SizingKey {
    /// Selects the configuration key that determines the number of permits: `processes`, or `max_in_flight` if a single
    /// process runs several jobs at once.
    fn of(settings: &Settings) -> Self {
        let (processes, in_flight) = (u64::from(settings.processes), u64::from(settings.max_in_flight));
        if processes == 1 && in_flight > 1 {
            return Self { key: "max_in_flight", now: in_flight, permits_each: 1, most: IN_FLIGHT_CEILING };
        }
        let of_tenants = ISOLATED_WORKERS_CEILING / u64::from(settings.worker_sets.max(1));
        let of_tenants = of_tenants.saturating_sub(u64::from(settings.spares));
        let most = PROCESSES_CEILING.min(of_tenants).min(PERMITS_CEILING / in_flight);
        Self { key: "processes", now: processes, permits_each: in_flight, most: most.max(1) }
    }
}

/// Applies the rules for the number of permits and for `adaptive.max`. If both limit the number of running jobs,
/// raising only one of them has no effect. Returns the number of permits after the proposed change, if any.
fn advise_permits(
    seen: &Observations,
    settings: &Settings,
    machine: &Machine,
    verdicts: &mut Verdicts,
) -> u64 {
    let Some(max) = settings.adaptive.as_ref().and_then(adaptive::enforced_max) else {
        return advise_size(seen, settings, machine, verdicts);
    };
    let (key, now, permits) = ("adaptive.max", Setting::Count(max), settings.permits());
    let most = settings.adaptive_ceiling;
    let (wanted, why) = wanted_permits(seen, max);
    let has_workers = seen.time_short_of_workers <= MISSING_WORKERS_MAX;
    if has_workers && wanted > max && (max < permits || max >= most) {
        let sizing = SizingKey::of(settings);
        let proposed = wanted.min(permits).min(most);
        let reason = match proposed > max {
            true => format!("the adaptive limit is at most {max}: first raise `adaptive.max`"),
            false => format!(
                "the adaptive limit is at most {max}, and a tenant with separate limits has only {most} permits: \
                 first raise the limits of that tenant"
            ),
        };
        verdicts.keep(sizing.key, Setting::Count(sizing.now), reason);
        if proposed > max {
            verdicts.propose(key, now, Setting::Count(proposed), why);
        }
        return permits;
    }
    let after = advise_size(seen, settings, machine, verdicts);
    if after > permits && after.min(most) > max {
        let reason = "more permits have an effect only if the adaptive limit can rise as well".to_owned();
        verdicts.propose(key, now, Setting::Count(after.min(most)), reason);
    }
    after
}

/// Applies the rule for the number of permits. Returns the number of permits after the proposed change, if
/// any.
fn advise_size(seen: &Observations, settings: &Settings, machine: &Machine, verdicts: &mut Verdicts) -> u64 {
    let (sizing, limit) = (SizingKey::of(settings), settings.permits());
    let now = Setting::Count(sizing.now);
    if seen.time_short_of_workers > MISSING_WORKERS_MAX {
        let missing = percent(seen.time_short_of_workers);
        let reason = format!(
            "workers were missing for {missing} of the busy time, so the required number of workers is \
             unknown: first find out why workers exit or do not start"
        );
        verdicts.keep(sizing.key, now, reason);
        return limit;
    }
    let (wanted, why) = wanted_permits(seen, limit);
    let proposed = if wanted > limit {
        raised(&sizing, wanted, seen, settings, machine)
    } else {
        lowered(&sizing, wanted, seen, settings)
    };
    let permits = proposed.map_or(limit, |proposed| proposed * sizing.permits_each);
    let held = if permits < wanted { bound_by(seen, settings, machine) } else { String::new() };
    match proposed {
        Some(proposed) => {
            let total =
                if sizing.key == "processes" { total_memory(seen, proposed, machine) } else { String::new() };
            verdicts.propose(sizing.key, now, Setting::Count(proposed), format!("{why}{held}{total}"));
        }
        None => verdicts.keep(sizing.key, now, format!("{why}{held}")),
    }
    permits
}

/// Returns true if the number of jobs in flight often reached the limit.
fn is_capped(seen: &Observations) -> bool {
    seen.time_at_limit > AT_LIMIT_MAX
}

/// Returns the number of permits that the load requires, with an explanation. `limit` is the current maximum number of
/// jobs in flight.
fn wanted_permits(seen: &Observations, limit: u64) -> (u64, String) {
    if is_capped(seen) { wanted_at_limit(seen, limit) } else { wanted_below_limit(seen) }
}

/// Returns the number of permits that the load requires, with an explanation. Applies if the number of jobs in flight
/// stayed below the limit.
fn wanted_below_limit(seen: &Observations) -> (u64, String) {
    let p99 = seen.concurrency.p99.max(1);
    let wanted = with_headroom(p99);
    let why = format!(
        "for 99 % of the busy time, at most {p99} {} in flight (peak: {}); with 25 % headroom: {wanted}",
        jobs_were(p99),
        seen.concurrency.max
    );
    (wanted, why)
}

/// Returns the required number of permits, with an explanation. Used if the number of jobs in flight reached the limit.
/// The required number is computed from waiting and rejected jobs, because the observed concurrency only reflects the
/// limit.
fn wanted_at_limit(seen: &Observations, limit: u64) -> (u64, String) {
    let in_all: u64 = not_served(seen).map(|(_, count)| count).sum();
    let served = seen.jobs.saturating_sub(in_all).max(1);
    // By Little's law, the number of jobs in flight is proportional to the number of jobs per second.
    let offered = (u128::from(seen.concurrency.p99) * u128::from(seen.jobs) / u128::from(served)) as u64;
    let needed = with_headroom(seen.demand.p99.max(offered));
    let wanted = needed.clamp(limit, 2 * limit);
    let (at_limit, p99, demand) = (percent(seen.time_at_limit), seen.concurrency.p99, seen.demand.p99);
    let mut why = format!(
        "no permit was free for {at_limit} of the busy time, so the {p99} jobs in flight only reflect the \
         limit; including waiting jobs, demand was {demand}"
    );
    if in_all > 0 {
        why +=
            &format!(", and {in_all} of {} jobs were not served ({})", seen.jobs, reasons(not_served(seen)));
    }
    why += &match needed > wanted {
        true => format!("; {needed} would be needed, but one recommendation at most doubles the value"),
        false => format!("; with 25 % headroom: {wanted}"),
    };
    (wanted, why)
}

/// Returns the number of permits that keeps all processors busy, or `None` if jobs are not CPU-bound. If the processor
/// time of a job is unknown, jobs might be CPU-bound, so the number of processes should not exceed the number of
/// processors.
fn processors_permit(seen: &Observations, settings: &Settings, machine: &Machine) -> Option<u64> {
    match seen.processors_per_job {
        Some(each) if each >= CPU_BOUND => {
            Some(((f64::from(machine.processors) / each).ceil() as u64).max(1))
        }
        Some(_) => None,
        None => (SizingKey::of(settings).key == "processes")
            .then(|| u64::from(machine.processors) * u64::from(settings.max_in_flight)),
    }
}

/// Returns the maximum number of permits for which the machine has enough memory. Returns `None` if the memory size or
/// the memory use is unknown, or if the memory use does not depend on the number of permits.
fn memory_permits(seen: &Observations, settings: &Settings, machine: &Machine) -> Option<u64> {
    let (each, all) = (seen.rss_max_bytes.filter(|each| *each > 0)?, machine.memory_bytes?);
    let sets = u64::from(settings.worker_sets.max(1));
    let processes = (all as f64 * MEMORY_SHARE) as u64 / each / sets;
    // The machine's memory does not bound `max_in_flight`, because a process does not necessarily need more memory to
    // run more jobs at once.
    (SizingKey::of(settings).key == "processes")
        .then(|| (processes * u64::from(settings.max_in_flight)).max(1))
}

/// Returns a sentence that says which of the machine's resources limits the number of permits.
fn bound_by(seen: &Observations, settings: &Settings, machine: &Machine) -> String {
    let by_processors = processors_permit(seen, settings, machine).unwrap_or(u64::MAX);
    let by_memory = memory_permits(seen, settings, machine).unwrap_or(u64::MAX);
    match (by_processors, by_memory) {
        (u64::MAX, u64::MAX) => "; no higher value is possible".to_owned(),
        (processors, memory) if processors <= memory => match seen.processors_per_job {
            Some(each) => format!(
                "; but a running job uses {} of a processor, so with {} processors, more than {processors} \
                 concurrent jobs would only compete for processor time",
                percent(each),
                machine.processors
            ),
            None => format!(
                "; but the processor time of a job is unknown, because most workers exit within seconds or \
                 started only recently, so there should not be more processes than processors ({})",
                machine.processors
            ),
        },
        (_, memory) => format!(
            "; but more than {memory} concurrent jobs could need over {} of this machine's memory ({})",
            percent(MEMORY_SHARE),
            size(machine.memory_bytes.unwrap_or(0))
        ),
    }
}

/// Returns a higher value for the key, up to the maximum that this machine supports. Returns `None` if the value cannot
/// be raised.
fn raised(
    sizing: &SizingKey,
    wanted: u64,
    seen: &Observations,
    settings: &Settings,
    machine: &Machine,
) -> Option<u64> {
    let bounds = [processors_permit(seen, settings, machine), memory_permits(seen, settings, machine)];
    let most = bounds.into_iter().flatten().min().map_or(sizing.most, |most| most / sizing.permits_each);
    let proposed = wanted.div_ceil(sizing.permits_each).min(sizing.most).min(most);
    (proposed > sizing.now).then_some(proposed)
}

/// Returns a lower value for the key if at most half of the current value was needed over a long observation time.
fn lowered(sizing: &SizingKey, wanted: u64, seen: &Observations, settings: &Settings) -> Option<u64> {
    if is_capped(seen) || not_served(seen).next().is_some() || !can_lower(seen) {
        return None;
    }
    // Without a queue, each job of a burst needs a permit.
    let at_once = if settings.max_queue == 0 { seen.concurrency.max } else { 0 };
    let least = settings.adaptive.as_ref().map_or(0, |adaptive| adaptive.max.into());
    let proposed = wanted.max(at_once).max(least).div_ceil(sizing.permits_each).max(1);
    (2 * proposed <= sizing.now).then_some(proposed)
}

fn total_memory(seen: &Observations, processes: u64, machine: &Machine) -> String {
    let (Some(each), Some(all)) = (seen.rss_max_bytes, machine.memory_bytes) else { return String::new() };
    let total = each.saturating_mul(processes);
    format!(
        "; at {} per worker, the workers use up to {} of this machine's {}",
        size(each),
        size(total),
        size(all)
    )
}

// Rules for the queue.

/// Applies the rule for the length of the queue. `adds_permits` is true if the advice already recommends more permits.
fn advise_queue(
    seen: &Observations,
    settings: &Settings,
    (permits, adds_permits): (u64, bool),
    verdicts: &mut Verdicts,
) {
    let (key, now) = ("max_queue", u64::from(settings.max_queue));
    let (rejections, expired) = (rejections(seen), expired(seen));
    let used = format!("at most {} of {now} queue places were used", seen.queued.max);
    let Some(useful) = useful_length(seen, settings, permits) else { return };
    let in_time = format!(
        "the number of jobs that {permits} permits can complete within {}",
        describe_wait_limit(seen, settings)
    );
    if is_many(expired, seen.jobs) && now > with_headroom(useful) {
        let reason = format!(
            "{expired} of {} jobs waited but then did not run, and {in_time} is {useful}: jobs that cannot \
             run in time should be rejected immediately",
            seen.jobs
        );
        return verdicts.propose(key, Setting::Count(now), Setting::Count(useful), reason);
    }
    let now_set = Setting::Count(now);
    if rejections == 0 {
        let others = reasons(seen.rejected.iter().map(|(reason, count)| (&**reason, *count)));
        let rejected = match seen.rejected.is_empty() {
            true => "no job was rejected".to_owned(),
            false => format!("no job was rejected because of a full queue (other rejections: {others})"),
        };
        return verdicts.keep(key, now_set, format!("{rejected}, and {used}"));
    }
    let why =
        format!("{rejections} of {} jobs were rejected ({})", seen.jobs, reasons(rejections_by_reason(seen)));
    if adds_permits {
        return verdicts.keep(key, now_set, format!("{why}, but first add permits"));
    }
    let wanted = (2 * now).max(settings.permits()).min(useful).min(QUEUE_CEILING);
    if wanted <= now {
        let reason = format!("{why}, but {in_time} is {useful}: further jobs would not run in time");
        return verdicts.keep(key, now_set, reason);
    }
    let reason = format!("{why}; {in_time} is {useful}, and one recommendation at most doubles the queue");
    verdicts.propose(key, now_set, Setting::Count(wanted), reason);
}

/// Returns the number of queued jobs that can still run in time, computed with Little's law. Returns `None` if no job
/// has run.
fn useful_length(seen: &Observations, settings: &Settings, permits: u64) -> Option<u64> {
    let each = (seen.ran > 0).then_some(seen.run_mean_ms)?.max(1e-3);
    let places = wait_limit_ms(seen, settings) * permits as f64 / each;
    Some((places as u64).clamp(1, QUEUE_CEILING))
}

/// Returns the maximum time, in milliseconds, that a job can wait and still meet the deadline.
fn wait_limit_ms(seen: &Observations, settings: &Settings) -> f64 {
    let until_late = (millis(settings.deadline) - seen.run_ms.p99).max(0.0);
    settings.queue_timeout.map_or(until_late, |timeout| millis(timeout).min(until_late))
}

fn describe_wait_limit(seen: &Observations, settings: &Settings) -> String {
    let wait_limit = time(wait_limit_ms(seen, settings));
    match settings.queue_timeout {
        Some(timeout) if millis(timeout) <= wait_limit_ms(seen, settings) => {
            format!("queue_timeout ({wait_limit})")
        }
        _ => format!("the {wait_limit} that the deadline leaves"),
    }
}

/// Proposes a value for `queue_timeout` if many jobs were still waiting when their deadline passed. With a timeout,
/// clients learn earlier that a job will not run.
fn advise_queue_timeout(seen: &Observations, settings: &Settings, verdicts: &mut Verdicts) {
    let queued = seen.deadline_exceeded.queued;
    let run = Duration::from_secs_f64(seen.run_ms.p99 / 1e3);
    if settings.queue_timeout.is_some() || settings.max_queue == 0 || !is_many(queued, seen.jobs) {
        return;
    }
    if 2 * run >= settings.deadline {
        return;
    }
    let proposed = rounded_down(settings.deadline - run);
    let reason = format!(
        "{queued} of {} jobs waited until their deadline; after {} of {}, too little time is left to run a \
         job (99 % of the jobs need at most {}), and a client whose job is rejected at that point can still \
         try another service",
        seen.jobs,
        format_duration(proposed),
        format_duration(settings.deadline),
        time(seen.run_ms.p99)
    );
    verdicts.propose("queue_timeout", Setting::Unset, Setting::Time(proposed), reason);
}

// Rule for the deadline.

fn advise_deadline(seen: &Observations, settings: &Settings, verdicts: &mut Verdicts) {
    if seen.ran == 0 {
        return;
    }
    let (key, now) = ("deadline", Setting::Time(settings.deadline));
    let (p99, deadline) = (seen.run_ms.p99, millis(settings.deadline));
    let by_own = seen.deadline_exceeded.by_own;
    let used =
        format!("99 % of the jobs ran for at most {} of {}", time(p99), format_duration(settings.deadline));
    let longer = |factor_of: f64, why: String, verdicts: &mut Verdicts| {
        let longest = settings.deadline_max;
        let most = if longest > settings.deadline { longest } else { DURATION_MAX };
        let proposed = rounded_up(factor_of).min(2 * settings.deadline).min(most);
        verdicts.propose(key, now, Setting::Time(proposed), why);
        if settings.has_deadline_max && proposed > longest {
            let reason = "`deadline` cannot exceed `deadline_max`".to_owned();
            verdicts.propose("deadline_max", Setting::Time(longest), Setting::Time(proposed), reason);
        }
    };
    if is_many(by_own, seen.ran) {
        let ran = seen.ran;
        let why = format!(
            "{by_own} of {ran} jobs were stopped at the deadline, so the run time is unknown: double the deadline, \
             unless the jobs hang"
        );
        return longer(2.0 * deadline, why, verdicts);
    }
    if p99 >= DEADLINE_NEAR * deadline {
        return longer(
            1.5 * p99,
            format!("{used}: a deadline of 1.5 times this run time leaves headroom"),
            verdicts,
        );
    }
    let wait = seen.queue_ms.max.max(settings.queue_timeout.map_or(0.0, millis));
    let longest = seen.run_ms.max + wait;
    // Without a separate `deadline_max`, lowering the deadline also lowers `deadline_max`.
    let least = if settings.has_deadline_max { Duration::ZERO } else { settings.deadline_max_least };
    let proposed = rounded_up(DEADLINE_ROOM * longest).max(DEADLINE_MIN).max(least);
    if can_lower(seen) && deadline >= DEADLINE_FAR * longest && 2 * proposed <= settings.deadline {
        let enough = match proposed > least {
            true => "five times the longest job is enough",
            false => "`run_limit` and `adaptive.target` permit no shorter deadline",
        };
        let reason = format!(
            "the longest job took {} including the waiting time, and a job that hangs holds a permit for {}; \
             {enough}",
            time(longest),
            format_duration(settings.deadline)
        );
        return verdicts.propose(key, now, Setting::Time(proposed), reason);
    }
    verdicts.keep(key, now, used);
}

// Rule for the memory of workers.

fn advise_memory(seen: &Observations, settings: &Settings, verdicts: &mut Verdicts) {
    let Some(peak) = seen.rss_max_bytes.filter(|_| missing(seen).is_none()) else { return };
    let wanted = (2 * peak).next_multiple_of(SIZE_STEP).max(CGROUP_MEMORY_MIN);
    let most = format!("the largest worker used {} of memory", size(peak));
    let (key, double) = ("cgroup.memory", Setting::Bytes(wanted));
    match settings.cgroup_memory {
        Some(limit) if 5 * peak > 4 * limit => {
            let reason =
                format!("{most}, which is over 80 % of the limit of {}: allow twice the peak", size(limit));
            verdicts.propose(key, Setting::Bytes(limit), double, reason);
        }
        // The limit is never lowered, because it also covers the worker's children and files in memory, which are not
        // measured.
        Some(limit) => {
            verdicts.keep(key, Setting::Bytes(limit), format!("{most}, with a limit of {}", size(limit)))
        }
        None if settings.has_memory_limit => {}
        None => {
            let reason = format!(
                "{most}, and nothing limits a leaking worker: replace workers that use about twice the peak"
            );
            verdicts.propose("recycle.rss", Setting::Unset, double, reason);
        }
    }
}

// Formatting of numbers and units.

/// Returns `count` plus 25%.
fn with_headroom(count: u64) -> u64 {
    count.saturating_mul(5).div_ceil(4)
}

fn is_many(part: u64, whole: u64) -> bool {
    part > 0 && part as f64 >= MANY_JOBS_SHARE * whole as f64
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Returns the rounding step, in milliseconds, that keeps two significant digits of a duration.
fn step_of(ms: u64) -> u64 {
    10_u64.pow(ms.max(1).ilog10().saturating_sub(1))
}

fn rounded_up(ms: f64) -> Duration {
    let ms = (ms.ceil() as u64).max(1);
    Duration::from_millis(ms.next_multiple_of(step_of(ms))).min(DURATION_MAX)
}

fn rounded_down(time: Duration) -> Duration {
    let ms = (time.as_millis() as u64).max(1);
    Duration::from_millis(ms - ms % step_of(ms))
}

fn jobs_were(count: u64) -> &'static str {
    if count == 1 { "job was" } else { "jobs were" }
}

fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent >= 9.95 { format!("{percent:.0} %") } else { format!("{percent:.1} %") }
}

fn time(ms: f64) -> String {
    match ms {
        ms if ms >= 10_000.0 => format!("{:.0} s", ms / 1e3),
        ms if ms >= 1000.0 => format!("{:.1} s", ms / 1e3),
        ms if ms >= 10.0 => format!("{ms:.0} ms"),
        ms => format!("{ms:.1} ms"),
    }
}

/// Formats a size in units that are easy to read, such as `13.4MiB`.
fn size(bytes: u64) -> String {
    let units = [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(scale, _)| bytes >= *scale) {
        Some((scale, _)) if bytes.is_multiple_of(scale) => format_size(bytes),
        Some((scale, unit)) => format!("{:.1}{unit}", bytes as f64 / scale as f64),
        None => format_size(bytes),
    }
}

/// Formats reject reasons, each with the number of jobs that were rejected for this reason.
fn reasons<'r>(counted: impl Iterator<Item = (&'r str, u64)>) -> String {
    counted.map(|(reason, count)| format!("{reason} {count}")).collect::<Vec<_>>().join(", ")
}
