//! Tests of withheld places. After a tenant's job has taken down a worker, a place in the tenant's quota is withheld.

use crate::fixture::{Fixture, MS, SECOND, limits};
use bulkhead_policy::{
    Death, Event, KillReason, Limits, Reply, RestartPolicy, RetryLimits, Submission, TenantLimits,
};
use bulkhead_shared::{JobId, Priority};

const SEGFAULT: Death = Death::Signal(11);

/// Returns limits for a bulkhead whose tenants share all workers. Each tenant can have `share` jobs in flight.
fn shared(processes: u32, max_in_flight: u32, share: u32) -> Limits {
    let mut limits = limits(processes, max_in_flight, 100);
    limits.tenants = TenantLimits { max_in_flight: Some(share), ..TenantLimits::default() };
    limits.deadline = 600 * SECOND;
    limits.deadline_max = limits.deadline;
    limits
}

fn submit(fixture: &mut Fixture, tenant: &str) -> JobId {
    fixture
        .submit_as(Priority::Normal, tenant)
        .unwrap_or_else(|| panic!("the job was rejected: {:?}", fixture.outcomes.last()))
}

/// Cancels a job whose worker ignores the cancellation, and waits until the worker has been killed.
fn cancel_until_killed(fixture: &mut Fixture, job: JobId) {
    let worker = fixture.holder(job);
    fixture.apply(Event::Cancel { job, unless_begun: false });
    fixture.wait(fixture.bulkhead.limits().grace);
    assert_eq!(fixture.killed.last(), Some(&(worker, KillReason::Deadline)));
    fixture.exit_worker(worker, Death::Signal(9));
}

/// Submits a job for the tenant, and returns true if the job is dispatched immediately.
fn may_go(fixture: &mut Fixture, tenant: &str) -> bool {
    let job = submit(fixture, tenant);
    let is_given = fixture.was_dispatched(job);
    fixture.apply(Event::Cancel { job, unless_begun: false });
    if is_given {
        fixture.reply(job);
    }
    is_given
}

#[test]
fn withholds_permit_until_next_worker_is_ready() {
    let mut fixture = Fixture::ready(shared(2, 1, 1));
    let killer = submit(&mut fixture, "greedy");
    cancel_until_killed(&mut fixture, killer);
    let next = submit(&mut fixture, "greedy");
    assert!(
        !fixture.was_dispatched(next),
        "the tenant's only place must be withheld although a worker is idle"
    );
    assert!(may_go(&mut fixture, "other"));
    let worker = fixture.newest_worker();
    fixture.bring_up(worker);
    assert!(fixture.was_dispatched(next));
    // A crash has the same effect as a kill.
    let worker = fixture.holder(next);
    fixture.exit_worker(worker, SEGFAULT);
    assert!(!may_go(&mut fixture, "greedy"));
    assert!(may_go(&mut fixture, "other"));
}

#[test]
fn tenant_with_quota_of_two_kills_at_most_two_workers() {
    let mut fixture = Fixture::ready(shared(4, 1, 2));
    for _ in 0..2 {
        let job = submit(&mut fixture, "greedy");
        let worker = fixture.holder(job);
        fixture.exit_worker(worker, SEGFAULT);
    }
    assert!(!may_go(&mut fixture, "greedy"));
    let worker = fixture.newest_worker();
    fixture.bring_up(worker);
    assert!(may_go(&mut fixture, "greedy"), "one place must be released, because one replacement is ready");
}

#[test]
fn takeover_by_a_spare_releases_withheld_permit() {
    let mut limits = shared(2, 1, 1);
    limits.start.spares = 1;
    let mut fixture = Fixture::ready(limits);
    let job = submit(&mut fixture, "greedy");
    let worker = fixture.holder(job);
    fixture.exit_worker(worker, SEGFAULT);
    assert!(may_go(&mut fixture, "greedy"), "the place must be released, because a spare took over");
    let job = submit(&mut fixture, "greedy");
    let worker = fixture.holder(job);
    fixture.exit_worker(worker, SEGFAULT);
    assert!(!may_go(&mut fixture, "greedy"), "the place must stay withheld, because there is no other spare");
}

#[test]
fn withheld_permit_is_released_after_start_ready() {
    let mut limits = shared(2, 1, 1);
    limits.start.ready = SECOND;
    let mut fixture = Fixture::ready(limits);
    let job = submit(&mut fixture, "greedy");
    let worker = fixture.holder(job);
    fixture.exit_worker(worker, SEGFAULT);
    let next = submit(&mut fixture, "greedy");
    fixture.wait(SECOND - MS);
    assert!(!fixture.was_dispatched(next));
    fixture.wait(MS);
    assert!(fixture.was_dispatched(next));
}

#[test]
fn withheld_permit_is_released_when_the_slot_stops() {
    let mut limits = shared(2, 1, 1);
    limits.restart.policy = RestartPolicy::Never;
    let mut fixture = Fixture::ready(limits);
    let job = submit(&mut fixture, "greedy");
    let worker = fixture.holder(job);
    fixture.apply(Event::Exited { worker, death: SEGFAULT });
    assert!(!may_go(&mut fixture, "greedy"));
    fixture.apply(Event::Reaped { worker });
    assert!(may_go(&mut fixture, "greedy"), "the place must be released, because no other worker will start");
    // A slot also disappears if the number of slots is reduced.
    let mut fixture = Fixture::ready(shared(2, 1, 1));
    let (other, job) = (submit(&mut fixture, "other"), submit(&mut fixture, "greedy"));
    let worker = fixture.holder(job);
    fixture.exit_worker(worker, SEGFAULT);
    fixture.reply(other);
    assert!(!may_go(&mut fixture, "greedy"));
    let limits = Limits { processes: 1, ..fixture.bulkhead.limits().clone() };
    fixture.apply(Event::Reconfigure(Box::new(limits)));
    assert!(may_go(&mut fixture, "greedy"));
}

#[test]
fn withholds_permit_only_for_the_overdue_job() {
    let mut limits = shared(2, 2, 2);
    (limits.deadline, limits.deadline_max) = (SECOND, SECOND);
    let mut fixture = Fixture::ready(limits);
    let neighbours: Vec<JobId> = ["late", "b", "c"].map(|tenant| submit(&mut fixture, tenant)).into();
    assert_eq!(fixture.holder(neighbours[0]), fixture.holder(neighbours[2]));
    fixture.wait(500 * MS);
    fixture.reply(neighbours[2]);
    let neighbour = submit(&mut fixture, "c");
    fixture.reply(neighbours[1]);
    let worker = fixture.holder(neighbours[0]);
    assert_eq!(fixture.holder(neighbour), worker);
    fixture.wait(SECOND);
    assert_eq!(fixture.killed, [(worker, KillReason::Deadline)]);
    fixture.exit_worker(worker, Death::Signal(9));
    let given = ["late", "late", "c", "c"].map(|tenant| {
        let job = submit(&mut fixture, tenant);
        fixture.was_dispatched(job)
    });
    // The remaining worker has two free permits.
    assert_eq!(given, [true, false, true, false]);
    let worker = fixture.newest_worker();
    fixture.bring_up(worker);
    assert_eq!(fixture.bulkhead.in_flight(), 4, "each tenant must have its two permits again");
}

#[test]
fn crash_with_several_jobs_withholds_a_permit_from_each_tenant() {
    let mut fixture = Fixture::ready(shared(2, 4, 1));
    let jobs = ["a", "x", "b"].map(|tenant| submit(&mut fixture, tenant));
    let worker = fixture.holder(jobs[0]);
    assert_eq!(worker, fixture.holder(jobs[2]));
    fixture.exit_worker(worker, SEGFAULT);
    fixture.reply(jobs[1]);
    assert_eq!(["a", "b", "x"].map(|tenant| may_go(&mut fixture, tenant)), [false, false, true]);
    let worker = fixture.newest_worker();
    fixture.bring_up(worker);
    assert_eq!(["a", "b", "x"].map(|tenant| may_go(&mut fixture, tenant)), [true, true, true]);
}

#[test]
fn unread_job_does_not_withhold_a_permit() {
    let mut fixture = Fixture::ready(shared(2, 1, 1));
    let job = submit(&mut fixture, "a");
    let worker = fixture.holder(job);
    fixture.apply(Event::JobUnread { worker, job });
    fixture.exit_worker(worker, SEGFAULT);
    assert_ne!(fixture.holder(job), worker, "another worker must get the job immediately");
}

#[test]
fn permit_stays_withheld_after_quota_changes() {
    let mut fixture = Fixture::ready(shared(2, 1, 1));
    let job = submit(&mut fixture, "greedy");
    let worker = fixture.holder(job);
    fixture.exit_worker(worker, SEGFAULT);
    for stranger in 0..40_000 {
        fixture.bulkhead.tenant(&format!("stranger {stranger}"));
    }
    assert!(
        !may_go(&mut fixture, "greedy"),
        "a tenant without jobs must not be forgotten while its place is withheld"
    );
    let with_share = |fixture: &Fixture, share| {
        let tenants = TenantLimits { max_in_flight: share, ..TenantLimits::default() };
        Event::Reconfigure(Box::new(Limits { tenants, ..fixture.bulkhead.limits().clone() }))
    };
    fixture.apply(with_share(&fixture, None));
    assert!(may_go(&mut fixture, "greedy"));
    fixture.apply(with_share(&fixture, Some(2)));
    let first = submit(&mut fixture, "greedy");
    assert!(fixture.was_dispatched(first), "only one of two places must be withheld");
    fixture.apply(with_share(&fixture, Some(1)));
    fixture.reply(first);
    assert!(!may_go(&mut fixture, "greedy"));
    let worker = fixture.newest_worker();
    fixture.bring_up(worker);
    assert!(may_go(&mut fixture, "greedy"));
}

#[test]
fn suspect_waits_for_a_permit_from_its_tenant() {
    let mut limits = shared(3, 1, 1);
    limits.retry = Some(RetryLimits { attempts: 3, budget: 1.0 });
    let mut fixture = Fixture::ready(limits);
    let tenant = fixture.bulkhead.tenant("greedy");
    let submission = Submission { idempotent: true, tenant, ..Submission::new(1) };
    let job = fixture.apply(Event::Submit(submission)).unwrap_or_else(|| panic!("refused"));
    let first = fixture.holder(job);
    fixture.exit_worker(first, SEGFAULT);
    assert_eq!(
        fixture.holder(job),
        first,
        "the suspect must not run yet, because its tenant has no free permit"
    );
    assert!(may_go(&mut fixture, "other"));
    let worker = fixture.newest_worker();
    fixture.bring_up(worker);
    assert_ne!(fixture.holder(job), first);
    fixture.reply(job);
    fixture.expect(job, "ok", None);
}

#[test]
fn withholds_no_permit_without_a_quota_or_culprit() {
    let mut fixture = Fixture::ready(limits(2, 1, 100));
    let job = submit(&mut fixture, "a");
    let worker = fixture.holder(job);
    fixture.exit_worker(worker, SEGFAULT);
    assert!(may_go(&mut fixture, "a"));
    // No job is to blame if a worker exits without a job or is killed because the keeper died.
    let mut fixture = Fixture::ready(shared(2, 1, 1));
    let job = submit(&mut fixture, "a");
    let worker = fixture.holder(job);
    fixture.apply(Event::Replied { worker, job, reply: Reply::Ok });
    fixture.exit_worker(worker, SEGFAULT);
    let job = submit(&mut fixture, "a");
    let worker = fixture.holder(job);
    fixture.apply(Event::LostWithKeeper { worker });
    let first = fixture.spawned[2];
    fixture.bring_up(first);
    assert!(may_go(&mut fixture, "a"));
}

#[test]
fn withheld_permits_do_not_delay_a_stop() {
    let mut fixture = Fixture::ready(shared(1, 1, 1));
    let job = submit(&mut fixture, "a");
    let worker = fixture.holder(job);
    fixture.exit_worker(worker, SEGFAULT);
    fixture.apply(Event::Stop { by: fixture.now });
    let worker = fixture.newest_worker();
    fixture.exit_worker(worker, Death::Signal(9));
    assert_eq!(fixture.bulkhead.next_deadline(), None);
    assert!(fixture.bulkhead.is_stopped());
}
