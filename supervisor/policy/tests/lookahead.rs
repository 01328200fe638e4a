//! Jobs ahead of their worker, case by case.

mod stage;

use std::time::Duration;

use bulkhead_policy::{
    Abilities, BreakerLimits, Change, Death, Event, KillReason, Limits, Overflow, Recycle, Submission,
    WorkerId,
};
use bulkhead_shared::{Executed, JobId, Priority, Verdict};

use stage::{MS, SECOND, Stage, limits};

const ABLE: Abilities = Abilities { has_dispatch_thread: true, can_resize: true, can_look_ahead: true };

/// Workers that have done a job each in 10 ms and may have jobs ahead for 100.
fn stage(limits: Limits) -> Stage {
    let mut stage = Stage::starting(Limits { lookahead: 100 * MS, ..limits });
    for worker in stage.spawned.clone() {
        stage.bring_up_as(worker, ABLE);
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

fn give_back(stage: &mut Stage, job: JobId) {
    let worker = stage.holder(job);
    stage.apply(Event::Returned { worker, job });
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
    // It ran, and is not given to another worker.
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
    for job in before {
        assert!(stage.recalled.contains(&job));
        give_back(&mut stage, job);
    }
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
fn none_is_ahead_of_a_worker_that_is_not_able_or_has_done_nothing() {
    let mut stage = Stage::ready(Limits { lookahead: 100 * MS, ..limits(1, 1, 10) });
    warm_up(&mut stage, 1);
    jobs(&mut stage, 3);
    assert!(stage.ahead.is_empty());
    let mut stage = Stage::starting(Limits { lookahead: 100 * MS, ..limits(1, 1, 10) });
    stage.bring_up_as(stage.newest_worker(), ABLE);
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
    slow.bring_up_as(slow.newest_worker(), ABLE);
    warm_up(&mut slow, 1);
    jobs(&mut slow, 3);
    assert!(slow.ahead.is_empty(), "one would wait for 10 ms");
}

#[test]
fn what_waits_longer_than_that_is_asked_back_and_others_have_it() {
    let mut stage = stage(limits(2, 1, 10));
    let jobs = jobs(&mut stage, 6);
    let (one, other) = (jobs[0], jobs[1]);
    let of_one: Vec<JobId> =
        stage.ahead.iter().filter(|(worker, _)| *worker == stage.holder(one)).map(|&(_, job)| job).collect();
    assert_eq!(of_one.len(), 2, "as many for each");
    stage.reply(other);
    stage.wait(101 * MS);
    assert!(of_one.iter().all(|job| stage.recalled.contains(job)), "{:?}", stage.recalled);
    of_one.iter().rev().for_each(|&job| give_back(&mut stage, job));
    assert_eq!(stage.ahead.len(), 4, "nothing more for one that is slow");
    // The other has two of its own, which are as slow by now.
    for job in jobs[2..].iter().filter(|job| !of_one.contains(job)) {
        stage.reply(*job);
    }
    let worker = stage.holder(other);
    assert!(stage.bulkhead.holds(worker, of_one[0]), "the other one takes them");
}

#[test]
fn a_critical_job_goes_before_those_ahead() {
    let mut stage = stage(limits(1, 1, 10));
    let first = stage.job();
    let normal = jobs(&mut stage, 3);
    let critical = stage.submit_as(Priority::Critical, "").unwrap();
    assert_eq!(stage.recalled, [normal[2], normal[1], normal[0]]);
    for job in stage.recalled.clone() {
        give_back(&mut stage, job);
    }
    stage.reply(first);
    assert!(stage.bulkhead.holds(stage.holder(first), critical));
    // Those that came back are first among their own.
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
fn who_cancels_or_is_late_hears_that_it_may_have_run() {
    let mut stage = stage(limits(1, 1, 10));
    let first = stage.job();
    let cancelled = stage.job();
    let late = stage.job_with(Some(SECOND));
    assert_eq!(ahead(&stage), [cancelled, late]);
    stage.apply(Event::Cancel { job: cancelled, unless_begun: false });
    assert_eq!(stage.verdicts(cancelled), [&Verdict::Cancelled { executed: Executed::Yes }]);
    stage.wait(SECOND);
    stage.expect(late, "deadline_exceeded", Some("running"));
    assert_eq!(stage.bulkhead.queued(), 0);
    // What may have run was an attempt of that worker's.
    let pid = 100 + stage.holder(first).generation;
    let told =
        stage.answers.iter().filter(|answer| answer.job == Some(cancelled) || answer.job == Some(late));
    let told: Vec<_> = told.map(|answer| (answer.attempts, answer.worker_pid)).collect();
    assert_eq!(told, [(1, Some(pid)), (1, Some(pid))]);
    // What is given back was not run, and is told of no more.
    give_back(&mut stage, late);
    give_back(&mut stage, cancelled);
    stage.reply(first);
    assert_eq!(stage.bulkhead.in_flight(), 0);
    assert!(stage.bulkhead.has_no_jobs());
}

#[test]
fn the_run_limit_of_a_job_that_is_given_back_begins_anew() {
    let mut stage = stage(limits(1, 1, 10));
    stage.submitted += 1;
    let submission = Submission { run_limit: Some(MS), ..Submission::new(stage.submitted) };
    let job = stage.apply(Event::Submit(submission)).unwrap();
    // It had its turn by our count, and was not begun. The limit is over as its worker says so.
    stage.now = stage.now + MS;
    give_back(&mut stage, job);
    assert_eq!(stage.verdicts(job), [] as [&Verdict; 0]);
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
    stage.bring_up_as(stage.newest_worker(), ABLE);
    for job in others {
        stage.reply(job);
        stage.expect(job, "ok", None);
    }
}

#[test]
fn a_worker_has_no_more_ahead_than_it_may_begin() {
    let recycle = Recycle { jobs: Some(24), ..Recycle::default() };
    let mut stage = stage(Limits { recycle, ..limits(1, 1, 10) });
    // Twenty are done.
    jobs(&mut stage, 8);
    assert_eq!(stage.ahead.len(), 3);
}

/// They may have begun by the time they are asked for.
#[test]
fn those_ahead_count_when_a_worker_may_run_more_than_it_has_left() {
    let recycle = Recycle { jobs: Some(24), ..Recycle::default() };
    let mut stage = stage(Limits { recycle, ..limits(1, 1, 10) });
    let worker = stage.spawned[0];
    let jobs = jobs(&mut stage, 8);
    let given = |stage: &Stage| jobs.iter().filter(|&&job| stage.sent.contains(&(worker, job))).count();
    assert_eq!(given(&stage), 4);
    stage.apply(Event::Change(Change { max_in_flight: Some(4), ..Change::default() }));
    assert_eq!(given(&stage), 4, "twenty are done, and it may begin twenty-four");
    for job in ahead(&stage) {
        give_back(&mut stage, job);
    }
    assert_eq!(stage.bulkhead.in_flight(), 4, "what has come back is given to it again");
}

#[test]
fn a_worker_that_gives_its_job_back_for_ever_is_ended() {
    let mut stage = stage(limits(1, 1, 10));
    let job = stage.job();
    for _ in 0..10 {
        if stage.killed.is_empty() {
            give_back(&mut stage, job);
        }
    }
    assert!(matches!(stage.killed[..], [(_, KillReason::Protocol(_))]));
    assert_eq!(stage.dispatched.iter().filter(|(_, given)| *given == job).count(), 4);
}

/// However short the run limits of clients are, no worker is ended for them.
#[test]
fn a_job_that_comes_back_since_its_run_limit_is_over_counts_against_no_worker() {
    let mut stage = stage(limits(1, 2, 10));
    let beside = stage.job();
    let job = stage.job_that_runs_for(MS);
    for _ in 0..20 {
        // Heard before the timer, as what came in the same turn.
        stage.now = stage.now + MS;
        give_back(&mut stage, job);
    }
    assert!(stage.killed.is_empty(), "{:?}", stage.killed);
    stage.reply(job);
    stage.expect(job, "ok", None);
    stage.reply(beside);
    stage.expect(beside, "ok", None);
}

#[test]
fn places_of_the_queue_are_taken_by_those_ahead() {
    let mut stage = stage(limits(1, 1, 3));
    let first = stage.job();
    let normal = jobs(&mut stage, 3);
    assert_eq!((stage.submit(), stage.last_reason()), (None, Some("queue_full")));
    // One of them leaves for a job of a higher class, as soon as it is known that it has not begun.
    let critical = stage.submit_as(Priority::Critical, "").unwrap();
    give_back(&mut stage, normal[2]);
    stage.expect(normal[2], "rejected", Some("shed"));
    give_back(&mut stage, normal[1]);
    give_back(&mut stage, normal[0]);
    for job in [first, critical, normal[0], normal[1]] {
        stage.reply(job);
        stage.expect(job, "ok", None);
    }
}

fn all_are_recalled(mut stage: Stage, event: Event<u32>) -> (Stage, WorkerId, Vec<JobId>) {
    let first = stage.job();
    let others = jobs(&mut stage, 2);
    assert_eq!(ahead(&stage), others);
    stage.apply(event);
    assert_eq!(stage.recalled, [others[1], others[0]]);
    let worker = stage.holder(first);
    (stage, worker, others)
}

#[test]
fn what_changes_the_rules_asks_them_back() {
    let change = Change { max_in_flight: Some(2), ..Change::default() };
    let (stage, worker, _) = all_are_recalled(self::stage(limits(1, 1, 10)), Event::Change(change));
    assert_eq!(stage.limited, [(worker, 2)]);
    let (mut stage, _, others) = all_are_recalled(self::stage(limits(1, 1, 10)), Event::Drain);
    for job in others {
        give_back(&mut stage, job);
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
    let (mut stage, _, others) = all_are_recalled(self::stage(limits), Event::ForceBreaker { open: true });
    for job in others {
        give_back(&mut stage, job);
    }
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
