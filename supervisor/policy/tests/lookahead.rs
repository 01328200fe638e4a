//! Prefetched jobs, and jobs that a worker has not begun.

mod stage;

use std::time::Duration;

use bulkhead_policy::{
    Abilities, BreakerLimits, Change, Death, Event, KillReason, Limits, Overflow, Recycle, Reply, Submission,
    WorkerId,
};
use bulkhead_shared::{Executed, JobId, Priority, Verdict};

use stage::{MS, SECOND, Stage, limits};

const ABLE: Abilities = Abilities { has_dispatch_thread: true, can_resize: true };

/// Returns workers that have each run a job of 10 ms and may prefetch jobs for 100 ms.
fn stage(limits: Limits) -> Stage {
    let mut stage = Stage::starting(Limits { lookahead: 100 * MS, ..limits });
    for worker in stage.spawned.clone() {
        stage.bring_up_with_claims(worker, ABLE);
    }
    let workers = stage.spawned.len();
    warm_up(&mut stage, workers);
    stage
}

fn warm_up(stage: &mut Stage, workers: usize) {
    for _ in 0..20 {
        let jobs = jobs(stage, workers);
        stage.wait(10 * MS);
        jobs.into_iter().for_each(|job| stage.reply(job));
    }
}

fn jobs(stage: &mut Stage, count: usize) -> Vec<JobId> {
    (0..count).map(|_| stage.job()).collect()
}

fn ahead(stage: &Stage) -> Vec<JobId> {
    stage.ahead.iter().map(|&(_, job)| job).collect()
}

/// Returns two workers, of which the first begins no further jobs.
fn beside_a_stuck_one(limits: Limits) -> (Stage, WorkerId) {
    let mut stage = stage(limits);
    let stuck = stage.spawned[0];
    stage.stick(stuck, true);
    (stage, stuck)
}

#[test]
fn each_answer_lets_the_oldest_ahead_begin() {
    let mut stage = stage(limits(1, 1, 10));
    let jobs = jobs(&mut stage, 4);
    assert_eq!(ahead(&stage), jobs[1..]);
    let is_in_flight = |stage: &mut Stage, job| {
        let worker = stage.holder(job);
        stage.bulkhead.holds(worker, job)
    };
    for (at, &job) in jobs.iter().enumerate() {
        assert_eq!(stage.bulkhead.queued(), 3 - at);
        assert_eq!(stage.bulkhead.in_flight(), 1);
        assert!(is_in_flight(&mut stage, job));
        stage.reply(job);
        stage.expect(job, "ok", None);
    }
}

#[test]
fn an_answer_out_of_turn_ends_the_worker() {
    let mut stage = stage(limits(1, 1, 10));
    let jobs = jobs(&mut stage, 3);
    stage.reply(jobs[2]);
    assert!(matches!(stage.killed[..], [(_, KillReason::Protocol(_))]));
    // The job has run, so no other worker gets it.
    stage.expect(jobs[2], "crashed", Some("protocol"));
}

#[test]
fn nothing_is_ahead_while_more_run_than_should() {
    let mut stage = stage(limits(2, 1, 20));
    let first = stage.spawned[0];
    let jobs = jobs(&mut stage, 8);
    let (runs, runs_elsewhere): (Vec<_>, Vec<_>) =
        jobs[..2].iter().copied().partition(|&job| stage.holder(job) == first);
    let before = ahead(&stage);
    assert!(!before.is_empty());
    stage.apply(Event::Change(Change { processes: Some(1), ..Change::default() }));
    assert!(before.iter().all(|job| stage.taken_back.contains(job)));
    let sent = stage.sent.len();
    stage.reply(runs[0]);
    assert_eq!(stage.sent.len(), sent, "one runs, of one that may");
    stage.reply(runs_elsewhere[0]);
    assert!(stage.sent.len() > sent);
}

#[test]
fn nothing_is_ahead_where_a_full_queue_drops_its_oldest() {
    let mut stage = stage(Limits { overflow: Overflow::EvictOldest, ..limits(1, 1, 3) });
    let jobs = jobs(&mut stage, 4);
    assert!(ahead(&stage).is_empty());
    assert!(stage.submit().is_some());
    stage.expect(jobs[1], "rejected", Some("evicted"));
}

#[test]
fn prefetch_requires_support_and_a_completed_job() {
    let mut stage = Stage::ready(Limits { lookahead: 100 * MS, ..limits(1, 1, 10) });
    warm_up(&mut stage, 1);
    jobs(&mut stage, 3);
    assert!(stage.ahead.is_empty());
    let mut stage = Stage::starting(Limits { lookahead: 100 * MS, ..limits(1, 1, 10) });
    stage.bring_up_with_claims(stage.newest_worker(), ABLE);
    jobs(&mut stage, 3);
    assert!(stage.ahead.is_empty());
}

#[test]
fn as_many_are_ahead_as_are_worth_the_time() {
    let mut stage = stage(limits(1, 1, 1000));
    jobs(&mut stage, 500);
    let many = stage.ahead.len();
    assert!((8..=13).contains(&many), "{many} jobs of 10 ms for 100 ms");
    let mut slow = Stage::starting(Limits { lookahead: 5 * MS, ..limits(1, 1, 10) });
    slow.bring_up_with_claims(slow.newest_worker(), ABLE);
    warm_up(&mut slow, 1);
    jobs(&mut slow, 3);
    assert!(slow.ahead.is_empty(), "one would wait for 10 ms");
}

#[test]
fn what_waits_longer_goes_to_one_that_is_idle() {
    let mut stage = stage(limits(2, 1, 10));
    let jobs = jobs(&mut stage, 6);
    let slow = stage.holder(jobs[0]);
    let (of_slow, of_other): (Vec<_>, Vec<_>) =
        stage.ahead.clone().into_iter().partition(|(worker, _)| *worker == slow);
    assert_eq!((of_slow.len(), of_other.len()), (2, 2), "as many for each");
    stage.wait(101 * MS);
    assert!(stage.taken_back.is_empty(), "nobody could begin it");
    stage.reply(jobs[1]);
    of_other.iter().for_each(|&(_, job)| stage.reply(job));
    assert_eq!(stage.taken_back, [of_slow[1].1, of_slow[0].1]);
    let worker = stage.holder(jobs[1]);
    assert!(stage.bulkhead.holds(worker, of_slow[0].1), "the other one has the oldest");
    assert_eq!(stage.holder(of_slow[1].1), worker, "and the rest ahead");
}

#[test]
fn a_critical_job_goes_before_those_ahead() {
    let mut stage = stage(limits(1, 1, 10));
    let first = stage.job();
    let normal = jobs(&mut stage, 3);
    let critical = stage.submit_as(Priority::Critical, "").unwrap();
    assert_eq!(stage.taken_back, [normal[2], normal[1], normal[0]]);
    stage.reply(first);
    assert!(stage.bulkhead.holds(stage.holder(first), critical));
    // Recalled jobs are first in their class.
    stage.reply(critical);
    assert!(stage.bulkhead.holds(stage.holder(first), normal[0]));
}

#[test]
fn none_is_ahead_where_another_tenant_waits() {
    let mut stage = stage(limits(1, 1, 10));
    let first = stage.submit_as(Priority::Normal, "a").unwrap();
    let second = stage.submit_as(Priority::Normal, "a").unwrap();
    let of_other = stage.submit_as(Priority::Normal, "b").unwrap();
    let last = stage.submit_as(Priority::Normal, "a").unwrap();
    assert_eq!(ahead(&stage), [second]);
    stage.reply(first);
    stage.reply(second);
    assert!(stage.was_given_out(of_other) && !ahead(&stage).contains(&last));
}

#[test]
fn who_cancels_or_is_late_hears_that_nothing_ran() {
    let mut stage = stage(limits(1, 1, 10));
    let first = stage.job();
    let cancelled = stage.job();
    let late = stage.job_with(Some(SECOND));
    assert_eq!(ahead(&stage), [cancelled, late]);
    stage.apply(Event::Cancel { job: cancelled, unless_begun: false });
    assert_eq!(stage.verdicts(cancelled), [&Verdict::Cancelled { executed: Executed::No }]);
    stage.wait(SECOND);
    stage.expect(late, "deadline_exceeded", Some("queued"));
    assert_eq!(stage.bulkhead.queued(), 0);
    assert!(stage.answers.iter().rev().take(2).all(|answer| answer.attempts == 0));
    stage.reply(first);
    assert!(stage.bulkhead.has_no_jobs() && stage.killed.is_empty());
}

#[test]
fn what_has_begun_before_its_turn_by_our_count_has_run() {
    let mut stage = stage(limits(1, 1, 10));
    let first = stage.job();
    let (cancelled, late) = (stage.job(), stage.job_with(Some(SECOND)));
    let worker = stage.holder(first);
    // The worker has begun both jobs, and its answers are in transit.
    stage.claims.get_mut(&worker).unwrap().begun.0.fetch_add(2, std::sync::atomic::Ordering::Relaxed);
    stage.apply(Event::Cancel { job: cancelled, unless_begun: true });
    assert!(stage.verdicts(cancelled).is_empty(), "it has begun");
    stage.apply(Event::Cancel { job: cancelled, unless_begun: false });
    assert_eq!(stage.verdicts(cancelled), [&Verdict::Cancelled { executed: Executed::Yes }]);
    stage.wait(SECOND);
    stage.expect(late, "deadline_exceeded", Some("running"));
    let told: Vec<_> = stage.answers.iter().map(|answer| (answer.attempts, answer.worker_pid)).collect();
    assert_eq!(told[told.len() - 2..], [(1, Some(100 + worker.generation)); 2]);
    for job in [first, cancelled, late] {
        stage.apply(Event::Replied { worker, job, reply: Reply::Ok });
    }
    assert!(stage.bulkhead.has_no_jobs());
}

#[test]
fn run_limit_begins_anew_for_what_was_not_begun() {
    let mut stage = stage(limits(1, 1, 10));
    let worker = stage.spawned[0];
    stage.stick(worker, true);
    let job = stage.job_that_runs_for(MS);
    stage.now = stage.now + MS;
    stage.apply(Event::Tick);
    assert_eq!((&stage.taken_back[..], stage.verdicts(job).len()), (&[job][..], 0));
    stage.stick(worker, false);
    stage.wait(5 * MS);
    assert_eq!(stage.bulkhead.queued(), 1, "not before it shows that it is alive");
    stage.apply(Event::Heard { worker });
    stage.wait(MS);
    stage.expect(job, "deadline_exceeded", Some("running"));
}

#[test]
fn a_death_costs_what_ran_and_gives_back_what_was_ahead() {
    let mut stage = stage(limits(1, 1, 10));
    let first = stage.job();
    let others = jobs(&mut stage, 3);
    stage.die(stage.holder(first), Death::Signal(11));
    stage.expect(first, "crashed", Some("signal"));
    assert_eq!(stage.bulkhead.queued(), 3);
    stage.bring_up_with_claims(stage.newest_worker(), ABLE);
    for job in others {
        stage.reply(job);
        stage.expect(job, "ok", None);
    }
}

#[test]
fn a_worker_has_no_more_ahead_than_it_may_begin() {
    let recycle = Recycle { jobs: Some(24), ..Recycle::default() };
    let mut stage = stage(Limits { recycle, ..limits(1, 1, 10) });
    // Twenty jobs are done.
    jobs(&mut stage, 8);
    assert_eq!(stage.ahead.len(), 3);
}

#[test]
fn a_worker_with_more_permits_runs_no_more_than_it_has_left() {
    let recycle = Recycle { jobs: Some(24), ..Recycle::default() };
    let mut stage = stage(Limits { recycle, ..limits(1, 1, 10) });
    let worker = stage.spawned[0];
    let jobs = jobs(&mut stage, 8);
    assert_eq!(jobs.iter().filter(|&&job| stage.sent.contains(&(worker, job))).count(), 4);
    stage.apply(Event::Change(Change { max_in_flight: Some(4), ..Change::default() }));
    assert_eq!(stage.bulkhead.in_flight(), 4, "what has come back is given to it again");
}

#[test]
fn places_of_the_queue_are_taken_by_those_ahead() {
    let mut stage = stage(limits(1, 1, 3));
    let first = stage.job();
    let normal = jobs(&mut stage, 3);
    assert_eq!((stage.submit(), stage.last_reason()), (None, Some("queue_full")));
    // A normal job is shed for a job of a higher class.
    let critical = stage.submit_as(Priority::Critical, "").unwrap();
    stage.expect(normal[2], "rejected", Some("shed"));
    for job in [first, critical, normal[0], normal[1]] {
        stage.reply(job);
        stage.expect(job, "ok", None);
    }
}

fn all_are_taken_back(mut stage: Stage, event: Event<u32>) -> (Stage, WorkerId, Vec<JobId>) {
    let first = stage.job();
    let others = jobs(&mut stage, 2);
    assert_eq!(ahead(&stage), others);
    stage.apply(event);
    assert_eq!(stage.taken_back, [others[1], others[0]]);
    let worker = stage.holder(first);
    (stage, worker, others)
}

#[test]
fn what_changes_the_rules_takes_them_back() {
    let change = Change { max_in_flight: Some(2), ..Change::default() };
    let (stage, worker, _) = all_are_taken_back(self::stage(limits(1, 1, 10)), Event::Change(change));
    assert_eq!(stage.limited, [(worker, 2)]);
    let (stage, _, others) = all_are_taken_back(self::stage(limits(1, 1, 10)), Event::Drain);
    for job in others {
        stage.expect(job, "rejected", Some("draining"));
    }
    let breaker = BreakerLimits {
        window: 10 * SECOND,
        min_calls: 1000,
        failure_rate: 1.0,
        slow_call: None,
        slow_rate: 1.0,
        open_for: Duration::from_secs(5),
        probes: 1,
    };
    let limits = Limits { breaker: Some(breaker), ..limits(1, 1, 10) };
    let (mut stage, ..) = all_are_taken_back(self::stage(limits), Event::ForceBreaker { open: true });
    let first = stage.dispatched.last().unwrap().1;
    stage.reply(first);
    assert_eq!(stage.bulkhead.in_flight(), 0, "none passes an open breaker");
}

#[test]
fn whom_only_the_workers_word_leaves_alone_is_not_kept_out() {
    let poison = bulkhead_policy::PoisonLimits { crashes: 1, within: 60 * SECOND };
    let mut stage = stage(Limits { poison: Some(poison), ..limits(1, 2, 10) });
    let (one, other) = (stage.submit_payload(1).unwrap(), stage.submit_payload(2).unwrap());
    let worker = stage.holder(one);
    stage.apply(Event::Unbegun { worker, job: other });
    stage.die(worker, Death::Signal(11));
    assert_eq!(stage.bulkhead.quarantined(stage.now), 0);
    stage.expect(one, "crashed", Some("signal"));
    assert!(stage.verdicts(other).is_empty(), "it waits for the next worker");
}

// Jobs with a permit that do not begin.

#[test]
fn an_unbegun_job_goes_to_an_idle_worker() {
    let (mut stage, stuck) = beside_a_stuck_one(limits(2, 1, 10));
    let job = stage.job();
    assert_eq!(stage.holder(job), stuck);
    stage.wait(102 * MS);
    assert_eq!(stage.taken_back, [job]);
    assert_ne!(stage.holder(job), stuck);
    stage.reply(job);
    stage.expect(job, "ok", None);
    assert_eq!(stage.answers.last().unwrap().attempts, 1, "what never began is no attempt");
    // The stuck worker gets no jobs before its next sign of life.
    let next = jobs(&mut stage, 2);
    assert!(next.iter().all(|&job| stage.sent.last().unwrap().0 != stuck && stage.holder(job) != stuck));
    stage.stick(stuck, false);
    stage.apply(Event::Heard { worker: stuck });
    let last = stage.job();
    assert_eq!(stage.holder(last), stuck);
}

#[test]
fn an_unbegun_job_stays_where_nobody_else_could_begin_it() {
    let (mut stage, stuck) = beside_a_stuck_one(limits(2, 1, 10));
    let (first, second) = (stage.job(), stage.job());
    stage.wait(300 * MS);
    assert_eq!((stage.holder(first), stage.taken_back.len()), (stuck, 0));
    stage.reply(second);
    assert_eq!((stage.taken_back[0], stage.holder(first)), (first, stage.holder(second)));
}

#[test]
fn deadline_and_cancellation_of_an_unbegun_job_cost_no_worker() {
    for in_flight in [1, 3] {
        let (mut stage, _) = beside_a_stuck_one(limits(1, in_flight, 10));
        let late = stage.job_with(Some(SECOND));
        let others = jobs(&mut stage, in_flight as usize - 1);
        stage.wait(SECOND);
        stage.expect(late, "deadline_exceeded", Some("queued"));
        let cancelled = stage.job();
        stage.apply(Event::Cancel { job: cancelled, unless_begun: true });
        assert_eq!(stage.verdicts(cancelled), [&Verdict::Cancelled { executed: Executed::No }]);
        assert!(others.iter().all(|&job| stage.verdicts(job).is_empty()), "they wait");
        stage.wait(2 * SECOND);
        assert!(stage.killed.is_empty(), "{:?}", stage.killed);
    }
}

#[test]
fn a_job_waits_for_a_stalled_worker_without_a_queue() {
    let (mut stage, stuck) = beside_a_stuck_one(limits(2, 1, 0));
    let moved = stage.job();
    stage.wait(102 * MS);
    assert_ne!(stage.holder(moved), stuck);
    let waits = stage.submit().expect("the stalled worker has a permit");
    assert!(stage.verdicts(waits).is_empty());
    stage.reply(moved);
    stage.reply(waits);
    stage.expect(waits, "ok", None);
}

#[test]
fn a_payload_that_is_kept_nowhere_is_not_prefetched() {
    let mut stage = stage(limits(1, 1, 10));
    let _running = stage.job();
    stage.submitted += 1;
    let submission = Submission { is_repeatable: false, ..Submission::new(stage.submitted) };
    let job = stage.apply(Event::Submit(submission)).unwrap();
    assert!(ahead(&stage).is_empty() && stage.bulkhead.queued() == 1);
    assert!(stage.verdicts(job).is_empty());
}

#[test]
fn immediate_cancellation_leaves_the_worker_available() {
    for workers in [1, 2] {
        let mut stage = stage(limits(workers, 2, 0));
        for worker in stage.spawned.clone() {
            stage.stick(worker, true);
        }
        let _held = jobs(&mut stage, 2 * workers as usize - 1);
        for _ in 0..3 {
            let cancelled = stage.job();
            stage.apply(Event::Cancel { job: cancelled, unless_begun: false });
            stage.expect(cancelled, "cancelled", None);
        }
    }
}

#[test]
fn a_drain_lets_unbegun_jobs_with_a_permit_run() {
    let (mut stage, stuck) = beside_a_stuck_one(limits(1, 2, 10));
    let all = jobs(&mut stage, 4);
    stage.apply(Event::Drain);
    assert!(all[2..].iter().all(|&job| stage.verdicts(job).len() == 1), "those that waited are answered");
    stage.stick(stuck, false);
    for &job in &all[..2] {
        assert!(stage.bulkhead.holds(stuck, job));
        stage.reply(job);
        stage.expect(job, "ok", None);
    }
}

#[test]
fn a_payload_that_is_kept_nowhere_stays_with_its_worker() {
    let (mut stage, stuck) = beside_a_stuck_one(limits(2, 1, 10));
    stage.submitted += 1;
    let submission = Submission { is_repeatable: false, ..Submission::new(stage.submitted) };
    let job = stage.apply(Event::Submit(submission)).unwrap();
    stage.wait(SECOND);
    assert_eq!((stage.holder(job), stage.taken_back.len()), (stuck, 0));
    stage.apply(Event::Cancel { job, unless_begun: false });
    assert_eq!(stage.verdicts(job), [&Verdict::Cancelled { executed: Executed::No }]);
}

#[test]
fn who_answers_what_was_taken_back_is_ended() {
    let (mut stage, stuck) = beside_a_stuck_one(limits(2, 1, 10));
    let job = stage.job();
    stage.wait(102 * MS);
    stage.apply(Event::Replied { worker: stuck, job, reply: Reply::Ok });
    assert!(matches!(stage.killed[..], [(worker, KillReason::Protocol(_))] if worker == stuck));
    stage.reply(job);
    stage.expect(job, "ok", None);
}

/// The job was recalled and is prefetched by the new worker. The worker that replies for it is killed.
#[test]
fn stale_reply_for_moved_job_leaves_the_new_worker_intact() {
    let (mut stage, stuck) = beside_a_stuck_one(limits(2, 1, 10));
    let all = jobs(&mut stage, 6);
    let other = stage.spawned[1];
    let held = |stage: &mut Stage| all.iter().copied().find(|&job| stage.bulkhead.holds(other, job));
    stage.wait(300 * MS);
    while stage.taken_back.is_empty() {
        let running = held(&mut stage).expect("the other worker works");
        stage.reply(running);
    }
    let is_elsewhere = |job: &&JobId| stage.taken_back.contains(job) && ahead(&stage).contains(job);
    let moved =
        *all.iter().find(is_elsewhere).expect("a job that was taken back is ahead of the other worker");
    stage.apply(Event::Replied { worker: stuck, job: moved, reply: Reply::Ok });
    assert!(matches!(stage.killed[..], [(worker, KillReason::Protocol(_))] if worker == stuck));
    stage.die(stuck, Death::Signal(9));
    while let Some(running) = held(&mut stage) {
        stage.reply(running);
    }
    all.iter().for_each(|&job| stage.expect(job, "ok", None));
}

#[test]
fn who_says_that_it_began_what_makes_no_sense_is_ended() {
    for says in [0, 1000] {
        let (mut stage, stuck) = beside_a_stuck_one(limits(1, 1, 10));
        let job = stage.job();
        stage.claims[&stuck].begun.0.store(says, std::sync::atomic::Ordering::Relaxed);
        stage.apply(Event::Cancel { job, unless_begun: false });
        assert!(matches!(stage.killed[..], [(_, KillReason::Protocol(_))]), "{says}");
    }
}

#[test]
fn the_job_at_the_boundary_comes_back_once() {
    let (mut stage, stuck) = beside_a_stuck_one(limits(1, 2, 10));
    let all = jobs(&mut stage, 2);
    let first = stage.claims[&stuck].count - 1;
    stage.claims[&stuck].begun.0.store(first, std::sync::atomic::Ordering::Relaxed);
    stage.apply(Event::Cancel { job: all[1], unless_begun: false });
    // The worker was about to begin the first job, and finds it recalled.
    stage.apply(Event::Returned { worker: stuck, job: all[0], arrival: first });
    assert_eq!(stage.sent.iter().filter(|(_, job)| *job == all[0]).count(), 2, "it is sent again");
    stage.apply(Event::Returned { worker: stuck, job: all[0], arrival: first });
    assert!(stage.bulkhead.holds(stuck, all[0]), "that is about the time before");
    assert!(stage.killed.is_empty());
    let arrival = stage.claims[&stuck].count;
    stage.apply(Event::Returned { worker: stuck, job: all[0], arrival });
    assert!(matches!(stage.killed[..], [(_, KillReason::Protocol(_))]), "this was not taken back");
}
