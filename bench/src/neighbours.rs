//! Measures how much jobs slow down when the workers of another bulkhead keep dying.

use std::cell::Cell;
use std::process::Command;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use crate::Result;
use crate::chains::Chains;
use crate::load::{self, Round};
use crate::pairs::paired;
use crate::plan::Plan;
use crate::processes::Process;
use crate::real::{self, Chain};
use crate::report::{Figure, Report, Target};

/// Interval between starts of a program that dies immediately. Matches the interval at which the supervisor
/// restarts workers if every job crashes.
const START_INTERVAL: Duration = Duration::from_millis(10);

/// Total number of concurrent jobs in the three honest bulkheads.
const SIBLING_LANES: usize = 48;
/// Number of concurrent jobs in the crashing bulkhead.
const CRASH_LANES: usize = 16;

/// Takes all requested measurements.
pub(crate) async fn all(chains: &Chains, plan: &Plan, report: &Report) -> Result<()> {
    for (bulkhead, way) in [(real::CRASHES, "spawned"), (real::FORKED_CRASHES, "forked")] {
        let name = format!("sibling's p99 with crashes (50/s) and without, {way}");
        if report.wants(&name) {
            report.add(sibling(chains, plan, (bulkhead, name)).await?);
        }
    }
    if report.wants_slow("siblings' p99 in a crowd") {
        report.add(crowd(chains, plan).await?);
    }
    if report.wants("siblings' p99 in a storm") {
        storm(chains, plan).await?.into_iter().for_each(|figure| report.add(figure));
    }
    Ok(())
}

/// Keeps starting a program that dies immediately, until this process is killed.
pub(crate) fn start_and_die() -> Result<()> {
    let own = std::env::current_exe()?;
    let mut due = Instant::now();
    loop {
        Command::new(&own).arg("die").spawn()?.wait()?;
        due += START_INTERVAL;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
}

/// Tasks that keep sending jobs that crash their worker. [`Crashes::end`] stops the tasks.
struct Crashes {
    is_over: Rc<Cell<bool>>,
    lanes: Vec<JoinHandle<()>>,
}

impl Crashes {
    fn begin(chain: &Rc<Chain>, bulkhead: &'static str, lanes: usize, pause: Duration) -> Self {
        let is_over = Rc::new(Cell::new(false));
        let crash_on = || {
            let (chain, is_over) = (chain.clone(), is_over.clone());
            async move {
                while !is_over.get() {
                    // Ignores the outcome, which is always a crash.
                    let _ = chain.client.job(bulkhead, "").operation("crash").send().await;
                    tokio::time::sleep(pause).await;
                }
            }
        };
        let lanes = (0..lanes).map(|_| tokio::task::spawn_local(crash_on())).collect();
        Self { is_over, lanes }
    }

    async fn end(self) -> Result<()> {
        self.is_over.set(true);
        for lane in self.lanes {
            lane.await?;
        }
        Ok(())
    }
}

/// Compares the p99 latency of a bulkhead with and without a second bulkhead whose worker dies on every job.
async fn sibling(chains: &Chains, plan: &Plan, (crashes, name): (&'static str, String)) -> Result<Figure> {
    let mut pairs = Vec::new();
    for _ in plan.rounds() {
        let quiet = chains.real(real::ONE, 1, plan.small, 64).await?;
        let crashes = Crashes::begin(&chains.real, crashes, 1, Duration::from_millis(20));
        let beside = chains.real(real::ONE, 1, plan.small, 64).await?;
        crashes.end().await?;
        pairs.push((quiet.quantile(0.99), beside.quantile(0.99)));
    }
    Ok(paired(name, "µs", &pairs, Target::AtMost, 1.5))
}

/// Maximum number of rounds in [`crowd`]. Low, because each round takes a long time.
const CROWD_ROUNDS_MAX: usize = 5;

/// Runs jobs in four bulkheads, 64 jobs at a time. In one round of each pair, every job in the fourth bulkhead
/// crashes its worker.
async fn crowd(chains: &Chains, plan: &Plan) -> Result<Figure> {
    let mut pairs = Vec::new();
    // This loop takes half a minute, because the fourth bulkhead can start at most a hundred workers per second.
    for _ in plan.rounds_of(CROWD_ROUNDS_MAX) {
        let honest = crowd_round(chains, plan.crowd, "").await?;
        let beside = crowd_round(chains, plan.crowd, "crash").await?;
        pairs.push((honest.quantile(0.99), beside.quantile(0.99)));
    }
    let name = "siblings' p99 in a crowd, a quarter of the jobs crash the worker";
    Ok(paired(name.into(), "µs", &pairs, Target::AtMost, 1.5))
}

/// Runs one round and returns the latencies of the jobs in the three honest bulkheads.
async fn crowd_round(chains: &Chains, total: usize, operation: &'static str) -> Result<Round> {
    let next = Rc::new(Cell::new(0));
    let chain = chains.real.clone();
    let call = move || {
        let (chain, index) = (chain.clone(), next.replace(next.get() + 1) % 4);
        async move {
            if index < 3 {
                chain.call(real::CROWD[index], b"x").await?;
                return Ok(true);
            }
            // Ignores the outcome, which can be a crash. Other tests check that no outcome is lost.
            let _ = chain.client.job(real::CROWD[index], "x").operation(operation).send().await;
            Ok(false)
        }
    };
    load::run_counting(64, total, call).await
}

/// Measures honest bulkheads at full load in three settings: alone, alongside a process that starts dying
/// programs as often as the supervisor starts workers, and alongside a crashing bulkhead. The second setting
/// shows the cost of starting processes, which no supervisor can avoid.
async fn storm(chains: &Chains, plan: &Plan) -> Result<Vec<Figure>> {
    let (mut over_quiet, mut over_starts, mut starts_over_quiet) = (Vec::new(), Vec::new(), Vec::new());
    for _ in plan.rounds() {
        let quiet = siblings(chains, plan.storm).await?;
        let starting = Process::role(&["start-and-die"])?;
        let starts = siblings(chains, plan.storm).await?;
        drop(starting);
        let crashes = Crashes::begin(&chains.real, real::CROWD[3], CRASH_LANES, Duration::ZERO);
        let beside = siblings(chains, plan.storm).await?;
        crashes.end().await?;
        let [quiet, starts, beside] = [quiet, starts, beside].map(|round| round.quantile(0.99));
        over_quiet.push((quiet, beside));
        starts_over_quiet.push((quiet, starts));
        over_starts.push((starts, beside));
    }
    let figure = |comparison: &str, pairs: &[_]| {
        let name = format!("siblings' p99 in a storm: {comparison}");
        paired(name, "µs", pairs, Target::Told, f64::NAN)
    };
    Ok(vec![
        figure("crashes on every job, and none", &over_quiet),
        figure("100 dying programs a second, and none", &starts_over_quiet),
        figure("crashes on every job, and such programs", &over_starts),
    ])
}

async fn siblings(chains: &Chains, total: usize) -> Result<Round> {
    let next = Rc::new(Cell::new(0));
    let chain = chains.real.clone();
    load::run(SIBLING_LANES, total, move || {
        let (chain, index) = (chain.clone(), next.replace(next.get() + 1) % 3);
        async move { chain.call(real::CROWD[index], b"x").await.map(drop) }
    })
    .await
}
