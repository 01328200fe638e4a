//! Limits a client's retries to a share of its recent jobs, so that callers do not multiply the load on an overloaded
//! supervisor. `job` asks for each retry, decides which errors are retried, and waits. The share within a window is
//! taken from Finagle's `RetryBudget`. Envoy's `retry_budget` uses the same default.

use std::time::Duration;

/// Number of seconds over which jobs and retries are counted. Finagle calls this number `ttl`.
const WINDOW_SECONDS: usize = 10;

/// Maximum number of retries per hundred jobs.
const RETRIES_PERCENT: u64 = 20;

/// Number of retries that are always allowed per window. Without this minimum, a client with few jobs could not retry
/// at all. The supervisor uses the same minimum for its own retries.
const RETRIES_FLOOR: u64 = 10;

/// Counts one client's jobs and retries.
#[derive(Debug, Default)]
pub(crate) struct RetryBudget {
    /// Job and retry counts for each of the most recent seconds. The counts for second `n` are at index `n` modulo
    /// [`WINDOW_SECONDS`].
    seconds: [Second; WINDOW_SECONDS],
}

#[derive(Clone, Copy, Debug, Default)]
struct Second {
    number: u64,
    jobs: u64,
    retries: u64,
}

impl RetryBudget {
    /// Counts a job for which retries are enabled. `now` is the time since a fixed but arbitrary instant.
    pub(crate) fn job(&mut self, now: Duration) {
        self.second(now).jobs += 1;
    }

    /// Returns true if the budget allows a retry. In that case, the retry is charged to the budget.
    pub(crate) fn try_retry(&mut self, now: Duration) -> bool {
        let first = now.as_secs().saturating_sub(WINDOW_SECONDS as u64 - 1);
        let recent = self.seconds.iter().filter(|second| (first..=now.as_secs()).contains(&second.number));
        let (jobs, retries) =
            recent.fold((0, 1), |(jobs, retries), second| (jobs + second.jobs, retries + second.retries));
        let is_allowed = retries <= RETRIES_FLOOR || retries * 100 <= jobs * RETRIES_PERCENT;
        self.second(now).retries += u64::from(is_allowed);
        is_allowed
    }

    fn second(&mut self, now: Duration) -> &mut Second {
        let number = now.as_secs();
        let second = &mut self.seconds[(number % WINDOW_SECONDS as u64) as usize];
        if second.number != number {
            *second = Second { number, ..Second::default() };
        }
        second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests retries until the budget is exhausted. Returns the number of allowed retries.
    fn spend(budget: &mut RetryBudget, now: Duration) -> u64 {
        (0..10_000).take_while(|_| budget.try_retry(now)).count() as u64
    }

    #[test]
    fn minimum_retries_are_allowed_with_few_jobs() {
        let mut budget = RetryBudget::default();
        assert_eq!(spend(&mut budget, Duration::ZERO), RETRIES_FLOOR);
        budget.job(Duration::ZERO);
        assert_eq!(spend(&mut budget, Duration::from_secs(9)), 0);
        assert_eq!(spend(&mut budget, Duration::from_secs(10)), RETRIES_FLOOR);
    }

    #[test]
    fn retries_are_limited_to_a_fifth_of_jobs() {
        let mut budget = RetryBudget::default();
        (0..1000).for_each(|_| budget.job(Duration::from_secs(3)));
        assert_eq!(spend(&mut budget, Duration::from_secs(4)), 200);
        assert_eq!(spend(&mut budget, Duration::from_secs(12)), 0);
        assert_eq!(spend(&mut budget, Duration::from_secs(60)), RETRIES_FLOOR);
    }

    /// Applies random sequences of jobs and retries, and compares the budget with a model that keeps every event.
    #[test]
    fn random_histories_stay_within_the_budget() {
        for seed in 1..=50_u64 {
            let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let mut below = |bound: u64| {
                // xorshift64
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state % bound
            };
            let (mut budget, mut now) = (RetryBudget::default(), Duration::ZERO);
            let mut events: Vec<(u64, bool)> = Vec::new();
            let retries_wanted = 1 + below(9);
            for _ in 0..3_000 {
                // The time usually advances in small steps, and sometimes by more than the window.
                now += Duration::from_millis(if below(500) == 0 { below(30_000) } else { below(30) });
                let in_window = |kind: bool, events: &[(u64, bool)]| {
                    let recent = |&&(at, is): &&(u64, bool)| is == kind && at + 10 > now.as_secs();
                    events.iter().filter(recent).count() as u64
                };
                if below(10) >= retries_wanted {
                    budget.job(now);
                    events.push((now.as_secs(), false));
                    continue;
                }
                let (jobs, retries) = (in_window(false, &events), in_window(true, &events) + 1);
                let expected = retries <= 10 || retries <= jobs / 5;
                assert_eq!(budget.try_retry(now), expected, "seed {seed}: {retries} retries of {jobs} jobs");
                if expected {
                    events.push((now.as_secs(), true));
                }
            }
        }
    }
}
