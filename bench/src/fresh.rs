//! Measures how soon a new worker is available: for jobs that each need a new process, and after a worker has died or
//! hung. The new worker is spawned, forked from a template, or a spare.

use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::fork_server::ForkServer;
use crate::pairs::paired;
use crate::plan::Plan;
use crate::real::Chain;
use crate::report::{Figure, Report, Target};
use crate::{Result, load, processes, real};

/// Prefix of the names of the measurements in this module.
pub(crate) const GROUP: &str = "fresh";

/// Number of jobs in flight.
const AT_ONCE: usize = 2;

/// Interval between worker deaths.
const BETWEEN_DEATHS: Duration = Duration::from_millis(50);

/// A configuration that determines how new workers are started.
struct Variant {
    /// Prefix of the bulkhead names.
    name: &'static str,
    profile: &'static str,
    /// Description used in the names of the measurements.
    description: &'static str,
    keys: &'static str,
    /// Target number of new processes per second. A lower rate is also sufficient if it reaches `OF_BARE` times the
    /// rate of a bare fork server that applies the same confinement layers.
    wanted: Option<f64>,
}

const OF_BARE: f64 = 0.45;

const SPAWNED: &str = "";
const SPARES: &str = "start = { spares = 2 }";
const FORKED: &str = "start = { mode = \"fork\", spares = 2 }";

const FORKED_ALONE: &str = "start = { mode = \"fork\" }";

const fn variant(
    name: &'static str,
    profile: &'static str,
    description: &'static str,
    keys: &'static str,
    wanted: Option<f64>,
) -> Variant {
    Variant { name, profile, description, keys, wanted }
}

const VARIANTS: [Variant; 10] = [
    variant("spawned", "none", "spawned", SPAWNED, None),
    variant("spares", "none", "spawned, spares", SPARES, None),
    variant("forked", "none", "forked, spares", FORKED, Some(2_000.0)),
    variant("alone", "none", "forked", FORKED_ALONE, None),
    variant("default-spares", "default", "spawned, spares", SPARES, None),
    variant("default-forked", "default", "forked, spares", FORKED, Some(1_500.0)),
    variant("default-alone", "default", "forked", FORKED_ALONE, None),
    variant("strict-spares", "strict", "spawned, spares", SPARES, None),
    variant("strict-forked", "strict", "forked, spares", FORKED, Some(800.0)),
    variant("strict-alone", "strict", "forked", FORKED_ALONE, None),
];

impl Variant {
    fn each(&self) -> String {
        format!("{GROUP}: a process for each job, {AT_ONCE} at once, {}, {}", self.profile, self.description)
    }

    fn next(&self) -> String {
        format!("{GROUP}: time from worker kill to next reply, {}, {}", self.profile, self.description)
    }

    fn hang(&self) -> String {
        format!(
            "{GROUP}: hang: time from deadline + grace to next reply, {}, {}",
            self.profile, self.description
        )
    }

    fn has_spares(&self) -> bool {
        self.keys == SPARES || self.keys == FORKED
    }
}

/// Takes all requested measurements. Must be called within a `LocalSet`.
pub(crate) async fn all(plan: &Plan, report: &Report) -> Result<()> {
    let is_wanted = |variant: &&Variant| {
        [variant.each(), variant.next(), variant.hang()].iter().any(|name| report.wants(name))
    };
    let variants: Vec<&Variant> = VARIANTS.iter().filter(is_wanted).collect();
    if variants.is_empty() {
        return Ok(());
    }
    let worker = processes::worker()?;
    let mut config = "[supervisor]\nsocket = \"jobs.sock\"\n".to_owned();
    for Variant { name, profile, keys, .. } in &variants {
        let common = format!(
            "command = [{worker}]\nsandbox = {{ profile = \"{profile}\" }}\nmax_queue = 16\n{keys}\n"
        );
        config +=
            &format!("[bulkhead.{name}-each]\n{common}processes = {AT_ONCE}\nrecycle = {{ jobs = 1 }}\n");
        config += &format!("[bulkhead.{name}-next]\n{common}");
        let hangs = format!("{common}{}\n", real::hanging()).replace("max_queue = 16\n", "");
        config += &format!("[bulkhead.{name}-hangs]\n{hangs}");
    }
    let chain = Rc::new(Chain::start(&processes::programs()?, &config).await?);
    for variant in variants {
        let bare = ForkServer::start(variant.profile)?;
        if report.wants(&variant.each()) {
            let mut rates = Vec::new();
            for _ in plan.rounds() {
                let bare = bare.run(AT_ONCE, plan.programs)?;
                rates.push((bare, fresh(&chain, &format!("{}-each", variant.name), plan.programs).await?));
            }
            let figure = paired(variant.each(), "jobs/s", &rates, Target::Told, f64::NAN);
            report.add(match variant.wanted {
                Some(wanted) if figure.real >= wanted => figure.with_target(Target::FigureAtLeast, wanted),
                Some(_) => figure.with_target(Target::AtLeast, OF_BARE),
                None => figure,
            });
        }
        if report.wants(&variant.next()) {
            let mut times = Vec::new();
            for _ in plan.rounds_of(plan.deaths) {
                let bare = bare.recovery()?;
                times.push((bare, recovery(&chain, &format!("{}-next", variant.name)).await?));
            }
            let figure = paired(variant.next(), "ms", &times, Target::Told, f64::NAN);
            report.add(if variant.has_spares() {
                figure.with_target(Target::FigureAtMost, 0.3)
            } else if variant.keys == FORKED_ALONE {
                figure.with_target(Target::AtMost, 1.8)
            } else {
                figure
            });
        }
        if variant.has_spares() && report.wants(&variant.hang()) {
            let mut times = Vec::new();
            for _ in plan.rounds_of(plan.deaths) {
                times.push(chain.hang(&format!("{}-hangs", variant.name)).await?);
                // Waits until the next spare worker is probably ready.
                tokio::time::sleep(BETWEEN_DEATHS).await;
            }
            report.add(
                Figure::alone(variant.hang(), "ms", load::median(times)).with_target(Target::AtMost, 2.0),
            );
        }
    }
    Ok(())
}

/// Returns the number of jobs per second when every job gets a new process.
async fn fresh(chain: &Rc<Chain>, bulkhead: &str, total: usize) -> Result<f64> {
    let (chain, bulkhead): (_, Rc<str>) = (chain.clone(), bulkhead.into());
    let round = load::run(AT_ONCE, total, move || {
        let (chain, bulkhead) = (chain.clone(), bulkhead.clone());
        async move { chain.call(&bulkhead, &[b'x'; 64]).await.map(drop) }
    });
    Ok(round.await?.rate())
}

/// Kills a worker and returns the time until the next result arrives, in ms.
async fn recovery(chain: &Rc<Chain>, bulkhead: &str) -> Result<f64> {
    let pid = chain.worker(bulkhead).await?;
    // Waits until the next spare worker is probably ready.
    tokio::time::sleep(BETWEEN_DEATHS).await;
    let began = Instant::now();
    processes::kill(pid)?;
    // A job that was sent to the dying worker crashes, so the loop sends another job.
    while chain.call(bulkhead, b"x").await.is_err() {}
    Ok(began.elapsed().as_secs_f64() * 1e3)
}
