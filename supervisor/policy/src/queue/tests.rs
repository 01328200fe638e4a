//! Compares the queue with a simple model and with the algorithm in the paper. Also checks fairness, the strict
//! priority of classes, and that neither the work per operation nor the memory per job grows with the number of waiting
//! jobs.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};

use bulkhead_shared::Priority::{self, BestEffort, Critical, Normal};

use super::{COST_MAX, Queue, RETAINED_LEN_MAX};

thread_local! {
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

pub(super) fn count_step() {
    STEPS.set(STEPS.get() + 1);
}

/// Work done by queue operations: the maximum number of steps in a single operation, and the total number of steps.
#[derive(Default)]
struct Steps {
    max: u64,
    total: u64,
}

impl Steps {
    fn of<R>(&mut self, operation: impl FnOnce() -> R) -> R {
        STEPS.set(0);
        let result = operation();
        self.max = self.max.max(STEPS.get());
        self.total += STEPS.get();
        result
    }
}

/// SplitMix64 random number generator (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u32) -> u32 {
        (self.next() % u64::from(end)) as u32
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u32) as usize]
    }
}

/// Pops all jobs and returns them in the order in which they were popped.
fn drain(queue: &mut Queue) -> Vec<u32> {
    std::iter::from_fn(|| queue.pop(BestEffort)).collect()
}

#[test]
fn single_tenant_is_served_in_order() {
    let mut queue = Queue::default();
    for (job, cost) in [(0, 7), (1, 1), (2, u32::MAX), (3, 0), (4, 30)] {
        queue.push(job, Normal, 3, cost);
    }
    assert_eq!(queue.peek(BestEffort), Some(0));
    assert_eq!(drain(&mut queue), [0, 1, 2, 3, 4]);
}

#[test]
fn higher_classes_are_served_first() {
    let mut queue = Queue::default();
    for (job, class) in [(0, BestEffort), (1, Normal), (2, Critical), (3, Normal), (4, Critical)] {
        queue.push(job, class, job, 1 + 100 * job);
    }
    assert_eq!([Critical, Normal, BestEffort].map(|class| queue.len_of(class)), [2, 2, 1]);
    assert_eq!([Critical, Normal, BestEffort].map(|class| queue.newest(class)), [Some(4), Some(3), Some(0)]);
    assert_eq!((queue.pop(Critical), queue.pop(Critical), queue.pop(Critical)), (Some(2), Some(4), None));
    assert_eq!((queue.pop(Normal), queue.peek(Critical)), (Some(1), None));
    queue.push(5, Critical, 0, COST_MAX);
    assert_eq!(drain(&mut queue), [5, 3, 0]);
}

/// Tenants with waiting jobs take turns.
#[test]
fn new_tenant_waits_for_at_most_one_round() {
    let mut queue = Queue::default();
    (0..6).for_each(|job| queue.push(job, Normal, 0, 1));
    (10..13).for_each(|job| queue.push(job, Normal, 1, 1));
    assert_eq!((queue.pop(Normal), queue.pop(Normal)), (Some(0), Some(10)));
    queue.push(20, Normal, 2, 1);
    assert_eq!(drain(&mut queue), [1, 11, 20, 2, 12, 3, 4, 5]);
}

#[test]
fn returned_job_comes_first_without_a_second_charge() {
    let mut queue = Queue::default();
    (0..3).for_each(|job| queue.push(job, Normal, 0, 4));
    (10..22).for_each(|job| queue.push(job, Normal, 1, 1));
    (0..3).for_each(|_| _ = queue.pop(Normal));
    assert_eq!(queue.pop(Normal), Some(0));
    queue.push_first(0, Normal, 0);
    queue.push(30, Critical, 1, 1);
    assert_eq!((queue.pop(Normal), queue.peek(Normal)), (Some(30), Some(0)));
    assert_eq!(drain(&mut queue), [0, 13, 14, 15, 16, 1, 17, 18, 19, 20, 2, 21]);
}

/// A blocked tenant keeps its position in the round.
#[test]
fn blocked_tenant_keeps_its_credit() {
    let mut queue = Queue::default();
    queue.push(0, Normal, 0, 5);
    (10..30).for_each(|job| queue.push(job, Normal, 1, 1));
    (10..13).for_each(|job| assert_eq!(queue.pop(Normal), Some(job)));
    // The tenant is blocked two rounds before its turn. Jobs served while the tenant is blocked do not count as rounds.
    queue.block(0);
    (13..20).for_each(|job| assert_eq!(queue.pop(Normal), Some(job)));
    assert_eq!((queue.len(), queue.len_of_tenant(0), queue.oldest(0)), (11, 1, Some(0)));
    queue.unblock(0);
    assert_eq!((0..3).map(|_| queue.pop(Normal)).collect::<Vec<_>>(), [Some(20), Some(0), Some(21)]);
    queue.block(1);
    assert_eq!((queue.len(), queue.peek(BestEffort)), (8, None));
    queue.push(40, Normal, 1, 1);
    queue.push_first(41, Normal, 1);
    assert_eq!((queue.len(), queue.peek(BestEffort)), (10, None));
    queue.unblock(1);
    assert_eq!(drain(&mut queue), [41, 22, 23, 24, 25, 26, 27, 28, 29, 40]);
}

/// A blocked tenant stays blocked even when memory is released.
#[test]
fn tenant_stays_blocked_without_jobs() {
    let mut queue = Queue::default();
    queue.block(7);
    (0..5000).for_each(|job| queue.push(job, Normal, 0, 1));
    (0..5000).for_each(|job| queue.remove(job));
    queue.push(1, Normal, 7, 1);
    assert_eq!(queue.peek(BestEffort), None);
    queue.unblock(7);
    assert_eq!(queue.peek(BestEffort), Some(1));
}

#[test]
fn cancelled_jobs_do_not_earn_extra_turns() {
    let mut queue = Queue::default();
    queue.push(0, Normal, 0, 1000);
    (1..50).for_each(|job| queue.push(job, Normal, 0, 1));
    (100..400).for_each(|job| queue.push(job, Normal, 1, 1));
    (0..200).for_each(|_| assert!(queue.pop(Normal) >= Some(100)));
    queue.remove(0);
    let next: Vec<u32> = (0..20).filter_map(|_| queue.pop(Normal)).collect();
    assert!(next.iter().filter(|&&job| job < 100).count().abs_diff(10) <= 1, "{next:?}");
}

// Fairness.

/// Queues all jobs, and pops up to `pops` of them. Returns the total cost of each tenant's served jobs after each pop.
fn shares(flows: &[(usize, u32)], pops: usize) -> Vec<Vec<u64>> {
    let (mut queue, mut owner) = (Queue::default(), Vec::new());
    for (tenant, &(count, cost)) in flows.iter().enumerate() {
        for _ in 0..count {
            queue.push(owner.len() as u32, Normal, tenant as u32, cost);
            owner.push(tenant);
        }
    }
    let mut served = vec![0; flows.len()];
    let next = |_| {
        let tenant = owner[queue.pop(Normal)? as usize];
        served[tenant] += u64::from(flows[tenant].1);
        Some(served.clone())
    };
    (0..pops).map_while(next).collect()
}

/// Checks that the total costs served for any two backlogged tenants differ by at most the maximum cost plus one.
fn assert_equal_while_backlogged(flows: &[(usize, u32)]) {
    let bound = 1 + flows.iter().map(|flow| u64::from(flow.1)).max().unwrap_or(0);
    let all: Vec<u64> = flows.iter().map(|&(count, cost)| count as u64 * u64::from(cost)).collect();
    for served in shares(flows, usize::MAX) {
        let backlogged = || (0..flows.len()).filter(|&t| served[t] < all[t]).map(|t| served[t]);
        let (least, most) = (backlogged().min().unwrap_or(0), backlogged().max().unwrap_or(0));
        assert!(most - least <= bound, "served {served:?} for the flows {flows:?}");
    }
}

#[test]
fn long_and_short_flows_get_equal_service() {
    assert_equal_while_backlogged(&[(1, 1), (10, 1), (1000, 1)]);
    assert_equal_while_backlogged(&[(1000, 1), (10, 1), (1, 1)]);
    // A flow of small jobs ends after as many rounds as it has jobs, regardless of how long the large flow is.
    let after = shares(&[(1000, 1), (10, 1), (1, 1)], 21);
    assert_eq!(after[2], [1, 1, 1]);
    assert_eq!(after[20], [10, 10, 1]);
}

#[test]
fn flows_with_unequal_job_costs_get_equal_total_cost() {
    assert_equal_while_backlogged(&[(1000, 1), (100, 10), (10, 100), (1, 1000)]);
    assert_equal_while_backlogged(&[(3, COST_MAX), (2000, 3), (5000, 2), (100, 64), (100, 65)]);
}

#[test]
fn repeated_blocking_does_not_change_tenant_share() {
    let (mut queue, mut served) = (Queue::default(), [0_u32; 3]);
    (0..3000).for_each(|job| queue.push(job, Normal, job % 3, 1 + job % 7));
    for _ in 0..2000 {
        let Some(job) = queue.pop(Normal) else { panic!("all jobs were served before the last pop") };
        served[(job % 3) as usize] += 1 + job % 7;
        queue.block(job % 3);
        queue.block(0);
        queue.unblock(job % 3);
        queue.unblock(0);
        assert!(served.iter().all(|&share| share.abs_diff(served[0]) <= 8), "{served:?}");
    }
}

/// Serves `seats` jobs in each of `seconds` rounds, and returns the total cost served for each tenant. Each client
/// waits for its result before it submits the next job, as in the tests of Kubernetes API Priority and Fairness.
fn closed_loop(clients: &[(u32, u32)], seats: usize, seconds: usize) -> Vec<u64> {
    let mut queue = Queue::default();
    let (mut owner, mut got) = (Vec::new(), vec![0; clients.len()]);
    for (tenant, &(count, cost)) in clients.iter().enumerate() {
        for _ in 0..count {
            queue.push(owner.len() as u32, Normal, tenant as u32, cost);
            owner.push(tenant);
        }
    }
    for _ in 0..seconds {
        let running: Vec<u32> = (0..seats).filter_map(|_| queue.pop(Normal)).collect();
        for job in running {
            let tenant = owner[job as usize];
            got[tenant] += u64::from(clients[tenant].1);
            queue.push(job, Normal, tenant as u32, clients[tenant].1);
        }
    }
    got
}

#[test]
fn tenants_with_unequal_numbers_of_clients_get_equal_shares() {
    // Follows a test of Kubernetes' queue set: if 8 and 7 clients compete for 4 seats, both groups get the same share,
    // within 1 %.
    let got = closed_loop(&[(8, 1), (7, 1)], 4, 1000);
    assert!(got[0].abs_diff(got[1]) * 100 <= got[0], "{got:?}");
    // The shares are also equal if the numbers of clients differ far more.
    let got = closed_loop(&[(5, 1), (50, 1), (5000, 1)], 4, 3000);
    assert!(got.iter().all(|&share| share.abs_diff(4000) <= 40), "{got:?}");
}

#[test]
fn unused_share_goes_to_the_other_tenant() {
    // A tenant that demands less than its share gets everything it demands. The other tenant gets the rest.
    assert_eq!(closed_loop(&[(4, 1), (1, 1)], 3, 1000), [2000, 1000]);
}

#[test]
fn tenants_with_different_job_costs_get_equal_shares() {
    let got = closed_loop(&[(13, 1), (7, 2)], 6, 1000);
    assert!(got[0].abs_diff(got[1]) * 100 <= got[0], "{got:?}");
}

/// If five tenants submit jobs at the same rate, no tenant loses more than 30 % of the evicted jobs.
#[test]
fn evictions_are_nearly_even_at_equal_rates() {
    let (mut random, mut evicted) = (Random(5), [0_u32; 5]);
    let (mut queue, mut free, mut owner) = (Queue::default(), (0..100).collect::<Vec<u32>>(), [0; 100]);
    for _ in 0..20_000 {
        let tenant = random.below(5);
        let job = free.pop().or_else(|| {
            let fullest = queue.fullest()?;
            let job = queue.oldest(fullest)?;
            queue.remove(job);
            evicted[fullest as usize] += 1;
            Some(job)
        });
        let Some(job) = job else { panic!("a full queue has a fullest tenant") };
        owner[job as usize] = tenant;
        queue.push(job, Normal, tenant, 1);
        if random.below(3) == 0 {
            free.extend(queue.pop(Normal));
        }
    }
    let all: u32 = evicted.iter().sum();
    assert!(all > 10_000 && evicted.iter().all(|&of| of * 100 <= all * 30), "{evicted:?}");
}

// Comparison of the queue with the original paper and with a model.

/// Returns the jobs served in each round by deficit round robin with a quantum of 1, as described in the
/// original paper.
fn textbook(flows: &[Vec<u32>]) -> Vec<Vec<(usize, u32)>> {
    let mut active: VecDeque<(usize, u32, VecDeque<u32>)> = flows
        .iter()
        .enumerate()
        .map(|(tenant, costs)| (tenant, 0, costs.iter().copied().collect()))
        .collect();
    let mut rounds = Vec::new();
    while !active.is_empty() {
        let mut round = Vec::new();
        for _ in 0..active.len() {
            let Some((tenant, mut deficit, mut costs)) = active.pop_front() else { break };
            deficit += 1;
            while let Some(&cost) = costs.front().filter(|&&cost| cost <= deficit) {
                deficit -= cost;
                costs.pop_front();
                round.push((tenant, cost));
            }
            if !costs.is_empty() {
                active.push_back((tenant, deficit, costs));
            }
        }
        rounds.push(round);
    }
    rounds
}

#[test]
fn rounds_match_the_algorithm_in_the_paper() {
    let mut random = Random(11);
    for _ in 0..200 {
        let cost_max = random.pick(&[1, 2, 10, 300]);
        let mut flow = || (0..1 + random.below(20)).map(|_| 1 + random.below(cost_max)).collect();
        let flows: Vec<Vec<u32>> = (0..7).map(|_| flow()).collect();
        let (mut queue, mut jobs) = (Queue::default(), Vec::new());
        for (tenant, costs) in flows.iter().enumerate() {
            for &cost in costs {
                queue.push(jobs.len() as u32, Normal, tenant as u32, cost);
                jobs.push((tenant, cost));
            }
        }
        for mut expected in textbook(&flows) {
            let pop = |_: &_| queue.pop(Normal).map_or((usize::MAX, 0), |job| jobs[job as usize]);
            let mut got: Vec<(usize, u32)> = expected.iter().map(pop).collect();
            if cost_max > 1 {
                // The two results can differ only in the order of jobs within a round.
                got.sort_unstable();
                expected.sort_unstable();
            }
            assert_eq!(got, expected);
        }
        assert_eq!(queue.len(), 0);
    }
}

/// A waiting job in the model.
#[derive(Clone, Copy)]
struct Waiting {
    job: u32,
    class: Priority,
    tenant: u32,
    cost: u64,
    is_returned: bool,
}

/// A model of the queue that uses linear searches instead of indexes. For each class and tenant, it stores the number
/// of rounds until the tenant's turn, and the tenant's position among the tenants whose turn is in the same round.
#[derive(Default)]
struct Model {
    /// All waiting jobs, from oldest to newest.
    jobs: Vec<Waiting>,
    standings: BTreeMap<(Priority, u32), (u64, i64)>,
    /// Tenants whose jobs were returned to the queue. The tenant of the most recently returned job comes first.
    returned: Vec<(Priority, u32)>,
    blocked: Vec<u32>,
    /// Time at which the number of each tenant's waiting jobs last changed.
    counted: BTreeMap<u32, i64>,
    stamp: i64,
}

impl Model {
    fn stamp(&mut self) -> i64 {
        self.stamp += 1;
        self.stamp
    }

    fn len(&self, is_meant: impl Fn(&Waiting) -> bool) -> usize {
        self.jobs.iter().filter(|job| is_meant(job)).count()
    }

    fn first(&self, flow: (Priority, u32), is_returned: bool) -> Option<Waiting> {
        let is_meant = |job: &&Waiting| (job.class, job.tenant) == flow && job.is_returned == is_returned;
        self.jobs.iter().find(is_meant).copied()
    }

    fn push(&mut self, job: u32, class: Priority, tenant: u32, cost: u32) {
        let cost = u64::from(cost.clamp(1, COST_MAX));
        if self.first((class, tenant), false).is_none() {
            let stamp = self.stamp();
            self.standings.insert((class, tenant), (cost, stamp));
        }
        self.jobs.push(Waiting { job, class, tenant, cost, is_returned: false });
        let stamp = self.stamp();
        self.counted.insert(tenant, stamp);
    }

    fn push_first(&mut self, job: u32, class: Priority, tenant: u32) {
        self.jobs.insert(0, Waiting { job, class, tenant, cost: 0, is_returned: true });
        self.returned.retain(|&flow| flow != (class, tenant));
        self.returned.insert(0, (class, tenant));
        let stamp = self.stamp();
        self.counted.insert(tenant, stamp);
    }

    fn remove(&mut self, job: u32) -> Option<Waiting> {
        let gone = self.jobs.remove(self.jobs.iter().position(|waiting| waiting.job == job)?);
        let stamp = self.stamp();
        self.counted.insert(gone.tenant, stamp);
        let flow = (gone.class, gone.tenant);
        if gone.is_returned {
            if self.first(flow, true).is_none() {
                self.returned.retain(|&other| other != flow);
            }
            return Some(gone);
        }
        if self.jobs.iter().any(|job| (job.class, job.tenant) == flow && !job.is_returned) {
            return Some(gone);
        }
        self.standings.remove(&flow);
        Some(gone)
    }

    /// Removes a job without serving it. If the job was the oldest in its flow, the number of rounds that it has
    /// already waited counts towards the flow's next job.
    fn cancel(&mut self, job: u32) {
        let Some(at) = self.jobs.iter().find(|waiting| waiting.job == job).copied() else { return };
        let flow = (at.class, at.tenant);
        let was_oldest = self.first(flow, false).is_some_and(|first| first.job == job);
        self.remove(job);
        if let Some(next) = self.first(flow, false).filter(|_| was_oldest) {
            let stamp = self.stamp();
            if let Some(standing) = self.standings.get_mut(&flow) {
                let left = (standing.0 + next.cost).saturating_sub(at.cost);
                if left != standing.0 {
                    *standing = (left, stamp);
                }
            }
        }
    }

    fn next(&self, lowest: Priority) -> Option<Waiting> {
        let mut classes = [Critical, Normal, BestEffort].into_iter().filter(|&class| class >= lowest);
        classes.find_map(|class| {
            let is_free = |flow: &(Priority, u32)| flow.0 == class && !self.blocked.contains(&flow.1);
            if let Some(&flow) = self.returned.iter().find(|flow| is_free(flow)) {
                return self.first(flow, true);
            }
            let free = self.standings.iter().filter(|(flow, _)| is_free(flow));
            self.first(*free.min_by_key(|(_, standing)| **standing)?.0, false)
        })
    }

    fn pop(&mut self, lowest: Priority) -> Option<u32> {
        let next = self.next(lowest)?;
        let flow = (next.class, next.tenant);
        let passed = self.standings.get(&flow).map_or(0, |standing| standing.0);
        self.remove(next.job);
        if next.is_returned {
            return Some(next.job);
        }
        for (other, standing) in &mut self.standings {
            if other.0 == next.class && !self.blocked.contains(&other.1) {
                standing.0 -= passed;
            }
        }
        let stamp = self.stamp();
        if let Some(following) = self.first(flow, false) {
            self.standings.insert(flow, (following.cost, stamp));
        }
        Some(next.job)
    }

    fn block(&mut self, tenant: u32) {
        if !self.blocked.contains(&tenant) {
            self.blocked.push(tenant);
        }
    }

    fn unblock(&mut self, tenant: u32) {
        if !self.blocked.contains(&tenant) {
            return;
        }
        self.blocked.retain(|&other| other != tenant);
        let first = -self.stamp();
        for (_, standing) in self.standings.iter_mut().filter(|(flow, _)| flow.1 == tenant) {
            standing.1 = first;
        }
        let (own, others): (Vec<_>, Vec<_>) = self.returned.iter().partition(|flow| flow.1 == tenant);
        self.returned = own.into_iter().chain(others).collect();
    }

    fn fullest(&self) -> Option<u32> {
        let len = |tenant: u32| self.len(|job| job.tenant == tenant);
        let most = self.jobs.iter().map(|job| len(job.tenant)).max()?;
        let counted = self.counted.iter().filter(|(tenant, _)| len(**tenant) == most);
        counted.min_by_key(|(_, since)| **since).map(|(&tenant, _)| tenant)
    }
}

fn assert_agree(queue: &Queue, model: &Model, tenants: u32) {
    assert_eq!(queue.len(), model.jobs.len());
    for class in Priority::ALL {
        assert_eq!(queue.len_of(class), model.len(|job| job.class == class));
        let newest = model.jobs.iter().rfind(|job| job.class == class);
        assert_eq!(queue.newest(class), newest.map(|job| job.job));
        assert_eq!(
            queue.peek(class),
            model.next(class).map(|job| job.job),
            "wrong next job among the classes from {class} upwards"
        );
    }
    for tenant in 0..tenants {
        assert_eq!(queue.len_of_tenant(tenant), model.len(|job| job.tenant == tenant));
        let oldest = model.jobs.iter().find(|job| job.tenant == tenant);
        assert_eq!(queue.oldest(tenant), oldest.map(|job| job.job));
    }
    assert_eq!(queue.fullest(), model.fullest());
}

/// Applies a random sequence of operations to the queue and to the model. Phases that fill the queue alternate with
/// phases that empty it.
fn history(seed: u64, steps: usize) -> usize {
    let mut random = Random(seed);
    let (mut queue, mut model) = (Queue::default(), Model::default());
    let jobs_max = random.pick(&[4, 20, 60]);
    let tenants = random.pick(&[1, 2, 5, 12]);
    let costs: &[u32] =
        random.pick(&[&[1][..], &[1, 2, 3, 5], &[0, 1, 10, 63, 64, 200], &[1, 4000, u32::MAX]]);
    let mut free: Vec<u32> = (0..jobs_max).collect();
    for step in 0..steps {
        let is_filling = step / 200 % 2 == 0;
        let (class, tenant) = (random.pick(&Priority::ALL), random.below(tenants));
        let cost = random.pick(costs);
        match random.below(20) {
            0..4 if !free.is_empty() && is_filling => {
                let job = free.swap_remove(random.below(free.len() as u32) as usize);
                queue.push(job, class, tenant, cost);
                model.push(job, class, tenant, cost);
            }
            4..7 => {
                if let Some(job) = free.pop() {
                    queue.push(job, class, tenant, cost);
                    model.push(job, class, tenant, cost);
                }
            }
            7..9 => {
                if let Some(job) = free.pop() {
                    queue.push_first(job, class, tenant);
                    model.push_first(job, class, tenant);
                }
            }
            9..12 => {
                let job = random.below(jobs_max);
                queue.remove(job);
                model.cancel(job);
                free.retain(|&other| other != job);
                free.push(job);
            }
            12..16 => {
                let job = queue.pop(class);
                assert_eq!(job, model.pop(class));
                free.extend(job);
            }
            16..18 => {
                queue.block(tenant);
                model.block(tenant);
            }
            _ => {
                queue.unblock(tenant);
                model.unblock(tenant);
            }
        }
        assert_agree(&queue, &model, tenants);
    }
    (0..tenants).for_each(|tenant| queue.unblock(tenant));
    (0..tenants).for_each(|tenant| model.unblock(tenant));
    drain(&mut queue).into_iter().for_each(|job| assert_eq!(model.pop(BestEffort), Some(job)));
    assert_eq!((queue.len(), model.jobs.len()), (0, 0));
    steps
}

#[test]
fn queue_matches_model_under_random_use() {
    let mut steps = 0;
    for seed in 0..60 {
        steps += history(seed, 4000);
    }
    assert!(steps >= 200_000, "{steps}");
}

// Work and memory.

/// Measures the work done by each queue operation. The test uses the given numbers of tenants and jobs, and random job
/// costs up to `cost_max`.
fn steps_with(tenants: u32, jobs: u32, cost_max: u32) -> Steps {
    let (mut random, mut queue, mut steps) = (Random(3), Queue::default(), Steps::default());
    // Allocates the slots before the measurement, because this work is done only once.
    queue.push(0, Normal, 0, COST_MAX);
    queue.remove(0);
    let cost = |random: &mut Random| 1 + random.below(cost_max);
    for job in 0..jobs {
        let cost = cost(&mut random);
        steps.of(|| queue.push(job, Normal, job % tenants, cost));
    }
    for _ in 0..jobs {
        let tenant = random.below(tenants);
        steps.of(|| queue.block(tenant));
        steps.of(|| queue.peek(BestEffort));
        steps.of(|| queue.unblock(tenant));
        steps.of(|| (queue.fullest(), queue.oldest(tenant), queue.newest(Normal)));
        let (job, cost) = (random.below(jobs), cost(&mut random));
        steps.of(|| queue.remove(job));
        steps.of(|| queue.push(job, Normal, job % tenants, cost));
        if let Some(job) = steps.of(|| queue.pop(BestEffort)) {
            steps.of(|| queue.push_first(job, Normal, job % tenants));
        }
    }
    steps
}

#[test]
fn operations_take_a_constant_number_of_steps() {
    let few = steps_with(2, 10, 10);
    for (tenants, jobs, cost_max) in [(10_000, 20_000, 1), (10_000, 20_000, u32::MAX), (3, 20_000, 5000)] {
        let many = steps_with(tenants, jobs, cost_max);
        assert!(
            many.max <= 12 && few.max <= 12,
            "an operation takes {} steps with few jobs and {} with many",
            few.max,
            many.max
        );
    }
}

/// Each queue operation takes at most twelve steps, even if a job is very expensive.
#[test]
fn job_with_huge_cost_is_served_in_bounded_time() {
    let (mut queue, mut steps) = (Queue::default(), Steps::default());
    steps.of(|| queue.push(0, Normal, 0, u32::MAX));
    (1..10_000).for_each(|job| queue.push(job, Normal, 1, 1));
    let place = (0..10_000_u32).find(|_| steps.of(|| queue.pop(Normal)) == Some(0));
    assert!(place.is_some_and(|place| place.abs_diff(COST_MAX) <= 1), "{place:?}");
    // If the queue has only one tenant, rounds are skipped and not visited individually.
    let mut queue = Queue::default();
    (0..100).for_each(|job| queue.push(job, Normal, 0, u32::MAX));
    (0..100).for_each(|_| _ = steps.of(|| queue.pop(Normal)));
    assert!(steps.max <= 12, "{}", steps.max);
}

#[test]
fn growing_slots_keeps_all_turns() {
    let (mut queue, mut steps) = (Queue::default(), Steps::default());
    let costs = [1, 63, 64, 65, 500, 127, 128, 4095, 2048];
    for (job, &cost) in costs.iter().enumerate() {
        steps.of(|| queue.push(job as u32, Normal, job as u32, cost));
    }
    assert!(steps.total <= 2 * u64::from(COST_MAX), "{}", steps.total);
    let mut sorted = costs;
    sorted.sort_unstable();
    assert_eq!(drain(&mut queue).iter().map(|&job| costs[job as usize]).collect::<Vec<_>>(), sorted);
}

/// Returns the number of entries for which the queue has allocated memory.
fn places(queue: &Queue) -> usize {
    let of_class = |class: &super::Class| {
        let rounds = &class.rounds;
        class.flows.capacity()
            + class.returned_links.0.capacity()
            + rounds.slots.capacity()
            + rounds.links.0.capacity()
    };
    queue.jobs.table.capacity()
        + queue.jobs.of_flow.0.capacity()
        + queue.jobs.of_class.0.capacity()
        + queue.ranking.lens.capacity()
        + queue.ranking.ranks.capacity()
        + queue.is_blocked.capacity()
        + queue.classes.iter().map(of_class).sum::<usize>()
}

/// Cancels 9,000 of 10,000 jobs, most of them in the middle of the queue.
#[test]
fn cancelled_jobs_release_memory() {
    for tenants in [1, 100, 10_000] {
        let (mut queue, mut steps) = (Queue::default(), Steps::default());
        (0..10_000).for_each(|job| queue.push(job, Normal, job % tenants, 1));
        for job in (0..10_000).filter(|job| job % 10 != 3) {
            steps.of(|| queue.remove(job));
        }
        assert_eq!(queue.len(), 1000);
        let mut left = 0;
        while steps.of(|| queue.pop(BestEffort)).is_some() {
            left += 1;
        }
        assert_eq!((left, places(&queue)), (1000, 0));
        assert!(steps.max <= 12, "{}", steps.max);
        queue.push(0, Normal, 0, 1);
        assert_eq!(queue.pop(Normal), Some(0));
    }
}

/// Adding and removing a job with a high number does not resize a table each time.
#[test]
fn large_tables_shrink_only_after_many_operations() {
    let mut queue = Queue::default();
    for job in 0..RETAINED_LEN_MAX as u32 {
        queue.push(job, Normal, 0, 1);
    }
    drain(&mut queue);
    assert!(places(&queue) >= RETAINED_LEN_MAX);
    for _ in 0..100 {
        queue.push(90_000, Normal, 0, 1);
        queue.remove(90_000);
        assert!(places(&queue) >= 90_000);
    }
    let cycles = (0..100_000).find(|_| {
        queue.push(90_000, Normal, 0, 1);
        queue.remove(90_000);
        places(&queue) == 0
    });
    assert!(cycles.is_some_and(|cycles| cycles > 80_000), "{cycles:?}");
}

#[test]
fn removed_jobs_are_not_found() {
    let mut queue = Queue::default();
    queue.remove(5);
    queue.unblock(5);
    queue.push(1, Normal, 2, 1);
    queue.remove(0);
    queue.remove(1);
    queue.remove(1);
    assert_eq!((queue.len(), queue.pop(BestEffort), queue.fullest()), (0, None, None));
    assert_eq!((queue.oldest(2), queue.oldest(9), queue.len_of_tenant(9)), (None, None, 0));
    assert!(Priority::ALL.iter().all(|&class| queue.newest(class).is_none()));
}
