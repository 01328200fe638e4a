//! Places withheld from a tenant's share after its job has ended a worker.

#![expect(clippy::panic, reason = "a test says what is wrong by panicking")]

mod stage;

use bulkhead_policy::{
    Death, Event, KillReason, Limits, Reply, RestartPolicy, RetryLimits, Submission, TenantLimits,
};
use bulkhead_shared::{JobId, Priority};
use stage::{MS, SECOND, Stage, limits};

const SEGFAULT: Death = Death::Signal(11);

/// Limits of shared workers, with a `share` of jobs in flight for each tenant.
fn shared(processes: u32, max_in_flight: u32, share: u32) -> Limits {
    let mut limits = limits(processes, max_in_flight, 100);
    limits.tenants = TenantLimits { max_in_flight: Some(share), ..TenantLimits::default() };
    limits.deadline = 600 * SECOND;
    limits.deadline_max = limits.deadline;
    limits
}

fn submit(stage: &mut Stage, tenant: &str) -> JobId {
    stage.submit_as(Priority::Normal, tenant).unwrap_or_else(|| panic!("refused: {:?}", stage.answers.last()))
}

/// Cancels a job whose worker does not obey, until the worker is killed.
fn cancel_until_killed(stage: &mut Stage, job: JobId) {
    let worker = stage.holder(job);
    stage.apply(Event::Cancel { job, unless_begun: false });
    stage.wait(stage.bulkhead.limits().grace);
    assert_eq!(stage.killed.last(), Some(&(worker, KillReason::Deadline)));
    stage.die(worker, Death::Signal(9));
}

/// Returns true if the tenant's next job is dispatched at once.
fn may_go(stage: &mut Stage, tenant: &str) -> bool {
    let job = submit(stage, tenant);
    let is_given = stage.was_given_out(job);
    stage.apply(Event::Cancel { job, unless_begun: false });
    if is_given {
        stage.reply(job);
    }
    is_given
}

#[test]
fn place_is_withheld_until_the_next_worker_is_ready() {
    let mut stage = Stage::ready(shared(2, 1, 1));
    let killer = submit(&mut stage, "greedy");
    cancel_until_killed(&mut stage, killer);
    let next = submit(&mut stage, "greedy");
    assert!(!stage.was_given_out(next), "its one place is withheld, although a worker is idle");
    assert!(may_go(&mut stage, "other"));
    let worker = stage.newest_worker();
    stage.bring_up(worker);
    assert!(stage.was_given_out(next));
    // A crash has the same effect as a kill.
    let worker = stage.holder(next);
    stage.die(worker, SEGFAULT);
    assert!(!may_go(&mut stage, "greedy"));
    assert!(may_go(&mut stage, "other"));
}

#[test]
fn share_of_two_ends_two_workers_at_most() {
    let mut stage = Stage::ready(shared(4, 1, 2));
    for _ in 0..2 {
        let job = submit(&mut stage, "greedy");
        let worker = stage.holder(job);
        stage.die(worker, SEGFAULT);
    }
    assert!(!may_go(&mut stage, "greedy"));
    let worker = stage.newest_worker();
    stage.bring_up(worker);
    assert!(may_go(&mut stage, "greedy"), "one of the two is ready");
}

#[test]
fn spare_gives_the_place_back_at_once() {
    let mut limits = shared(2, 1, 1);
    limits.start.spares = 1;
    let mut stage = Stage::ready(limits);
    let job = submit(&mut stage, "greedy");
    let worker = stage.holder(job);
    stage.die(worker, SEGFAULT);
    assert!(may_go(&mut stage, "greedy"), "the spare is ready");
    let job = submit(&mut stage, "greedy");
    let worker = stage.holder(job);
    stage.die(worker, SEGFAULT);
    assert!(!may_go(&mut stage, "greedy"), "there was only one");
}

#[test]
fn place_is_given_back_when_start_ready_has_passed() {
    let mut limits = shared(2, 1, 1);
    limits.start.ready = SECOND;
    let mut stage = Stage::ready(limits);
    let job = submit(&mut stage, "greedy");
    let worker = stage.holder(job);
    stage.die(worker, SEGFAULT);
    let next = submit(&mut stage, "greedy");
    stage.wait(SECOND - MS);
    assert!(!stage.was_given_out(next));
    stage.wait(MS);
    assert!(stage.was_given_out(next));
}

#[test]
fn place_is_given_back_with_a_slot_that_is_given_up() {
    let mut limits = shared(2, 1, 1);
    limits.restart.policy = RestartPolicy::Never;
    let mut stage = Stage::ready(limits);
    let job = submit(&mut stage, "greedy");
    let worker = stage.holder(job);
    stage.apply(Event::Exited { worker, death: SEGFAULT });
    assert!(!may_go(&mut stage, "greedy"));
    stage.apply(Event::Swept { worker });
    assert!(may_go(&mut stage, "greedy"), "no worker follows");
    // A smaller bulkhead has fewer slots.
    let mut stage = Stage::ready(shared(2, 1, 1));
    let (other, job) = (submit(&mut stage, "other"), submit(&mut stage, "greedy"));
    let worker = stage.holder(job);
    stage.die(worker, SEGFAULT);
    stage.reply(other);
    assert!(!may_go(&mut stage, "greedy"));
    let limits = Limits { processes: 1, ..stage.bulkhead.limits().clone() };
    stage.apply(Event::Reconfigure(Box::new(limits)));
    assert!(may_go(&mut stage, "greedy"));
}

#[test]
fn late_job_pays_for_its_worker_and_its_neighbours_do_not() {
    let mut limits = shared(2, 2, 2);
    (limits.deadline, limits.deadline_max) = (SECOND, SECOND);
    let mut stage = Stage::ready(limits);
    let neighbours: Vec<JobId> = ["late", "b", "c"].map(|tenant| submit(&mut stage, tenant)).into();
    assert_eq!(stage.holder(neighbours[0]), stage.holder(neighbours[2]));
    stage.wait(500 * MS);
    stage.reply(neighbours[2]);
    let neighbour = submit(&mut stage, "c");
    stage.reply(neighbours[1]);
    let worker = stage.holder(neighbours[0]);
    assert_eq!(stage.holder(neighbour), worker);
    stage.wait(SECOND);
    assert_eq!(stage.killed, [(worker, KillReason::Deadline)]);
    stage.die(worker, Death::Signal(9));
    let given = ["late", "late", "c", "c"].map(|tenant| {
        let job = submit(&mut stage, tenant);
        stage.was_given_out(job)
    });
    // The remaining worker has room for two jobs.
    assert_eq!(given, [true, false, true, false]);
    let worker = stage.newest_worker();
    stage.bring_up(worker);
    assert_eq!(stage.bulkhead.in_flight(), 4, "each has its two again");
}

#[test]
fn tenants_whose_jobs_shared_a_crashed_worker_all_pay() {
    let mut stage = Stage::ready(shared(2, 4, 1));
    let jobs = ["a", "x", "b"].map(|tenant| submit(&mut stage, tenant));
    let worker = stage.holder(jobs[0]);
    assert_eq!(worker, stage.holder(jobs[2]));
    stage.die(worker, SEGFAULT);
    stage.reply(jobs[1]);
    assert_eq!(["a", "b", "x"].map(|tenant| may_go(&mut stage, tenant)), [false, false, true]);
    let worker = stage.newest_worker();
    stage.bring_up(worker);
    assert_eq!(["a", "b", "x"].map(|tenant| may_go(&mut stage, tenant)), [true, true, true]);
}

#[test]
fn job_that_was_never_read_costs_its_tenant_nothing() {
    let mut stage = Stage::ready(shared(2, 1, 1));
    let job = submit(&mut stage, "a");
    let worker = stage.holder(job);
    stage.apply(Event::Unread { worker, job });
    stage.die(worker, SEGFAULT);
    assert_ne!(stage.holder(job), worker, "another worker has it at once");
}

#[test]
fn withheld_place_outlasts_strangers_and_other_shares() {
    let mut stage = Stage::ready(shared(2, 1, 1));
    let job = submit(&mut stage, "greedy");
    let worker = stage.holder(job);
    stage.die(worker, SEGFAULT);
    for stranger in 0..40_000 {
        stage.bulkhead.tenant(&format!("stranger {stranger}"));
    }
    assert!(
        !may_go(&mut stage, "greedy"),
        "a tenant without jobs is not forgotten while its place is withheld"
    );
    let with_share = |stage: &Stage, share| {
        let tenants = TenantLimits { max_in_flight: share, ..TenantLimits::default() };
        Event::Reconfigure(Box::new(Limits { tenants, ..stage.bulkhead.limits().clone() }))
    };
    stage.apply(with_share(&stage, None));
    assert!(may_go(&mut stage, "greedy"));
    stage.apply(with_share(&stage, Some(2)));
    let first = submit(&mut stage, "greedy");
    assert!(stage.was_given_out(first), "one of two is withheld");
    stage.apply(with_share(&stage, Some(1)));
    stage.reply(first);
    assert!(!may_go(&mut stage, "greedy"));
    let worker = stage.newest_worker();
    stage.bring_up(worker);
    assert!(may_go(&mut stage, "greedy"));
}

#[test]
fn suspect_waits_for_a_place_of_its_tenant() {
    let mut limits = shared(3, 1, 1);
    limits.retry = Some(RetryLimits { attempts: 3, budget: 1.0 });
    let mut stage = Stage::ready(limits);
    let tenant = stage.bulkhead.tenant("greedy");
    let submission = Submission { idempotent: true, tenant, ..Submission::new(1) };
    let job = stage.apply(Event::Submit(submission)).unwrap_or_else(|| panic!("refused"));
    let first = stage.holder(job);
    stage.die(first, SEGFAULT);
    assert_eq!(stage.holder(job), first, "it is not tried again in place of other tenants' jobs");
    assert!(may_go(&mut stage, "other"));
    let worker = stage.newest_worker();
    stage.bring_up(worker);
    assert_ne!(stage.holder(job), first);
    stage.reply(job);
    stage.expect(job, "ok", None);
}

#[test]
fn tenants_without_a_share_and_quiet_deaths_cost_nothing() {
    let mut stage = Stage::ready(limits(2, 1, 100));
    let job = submit(&mut stage, "a");
    let worker = stage.holder(job);
    stage.die(worker, SEGFAULT);
    assert!(may_go(&mut stage, "a"));
    // A worker's exit without a job, or together with the keeper, was caused by no job.
    let mut stage = Stage::ready(shared(2, 1, 1));
    let job = submit(&mut stage, "a");
    let worker = stage.holder(job);
    stage.apply(Event::Replied { worker, job, reply: Reply::Ok });
    stage.die(worker, SEGFAULT);
    let job = submit(&mut stage, "a");
    let worker = stage.holder(job);
    stage.apply(Event::Lost { worker });
    let first = stage.spawned[2];
    stage.bring_up(first);
    assert!(may_go(&mut stage, "a"));
}

#[test]
fn withheld_places_do_not_keep_a_stop_waiting() {
    let mut stage = Stage::ready(shared(1, 1, 1));
    let job = submit(&mut stage, "a");
    let worker = stage.holder(job);
    stage.die(worker, SEGFAULT);
    stage.apply(Event::Stop { by: stage.now });
    let worker = stage.newest_worker();
    stage.die(worker, Death::Signal(9));
    assert_eq!(stage.bulkhead.next_deadline(), None);
    assert!(stage.bulkhead.is_stopped());
}
