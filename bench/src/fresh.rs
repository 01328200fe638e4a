//! Workers that are there at once: a fresh process for each job, and the next answer after a death, where the next
//! worker is spawned, forked from a template, or a spare.

use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::fork_server::ForkServer;
use crate::pairs::paired;
use crate::plan::Plan;
use crate::real::Chain;
use crate::report::{Figure, Report, Target};
use crate::{Result, load, processes};

/// What the names of these measurements begin with.
pub(crate) const GROUP: &str = "fresh";

/// Jobs at once.
const AT_ONCE: usize = 2;

/// From one death to the next.
const BETWEEN_DEATHS: Duration = Duration::from_millis(50);

/// A way to the next worker: its bulkhead, what its name says, and its keys.
const WAYS: [(&str, &str, &str); 3] = [
    ("spawned", "spawned", ""),
    ("spares", "spawned, spares", "start = { spares = 2 }"),
    ("forked", "forked, spares", "start = { mode = \"fork\", spares = 2 }"),
];

/// Takes every measurement that is wanted; within a `LocalSet`.
pub(crate) async fn all(plan: &Plan, report: &Report) -> Result<()> {
    let each = |way: &str| format!("{GROUP}: a process for each job, {AT_ONCE} at once, none, {way}");
    let next = |way: &str| format!("{GROUP}: worker killed to next answer, none, {way}");
    let is_wanted = |way: &str| report.wants(&each(way)) || report.wants(&next(way));
    if !WAYS.iter().any(|(_, way, _)| is_wanted(way)) {
        return Ok(());
    }
    let own = std::env::current_exe()?;
    let own = own.to_str().ok_or("this program has an odd path")?;
    let mut config = "[supervisor]\nsocket = \"jobs.sock\"\n".to_owned();
    for (name, _, keys) in WAYS {
        let common = format!(
            "command = [{own:?}, \"worker\"]\nsandbox = {{ profile = \"none\" }}\nmax_queue = 16\n{keys}\n"
        );
        config +=
            &format!("[bulkhead.{name}-each]\n{common}processes = {AT_ONCE}\nrecycle = {{ jobs = 1 }}\n");
        config += &format!("[bulkhead.{name}-next]\n{common}");
    }
    let bare = ForkServer::start()?;
    let chain = Rc::new(Chain::start(&processes::programs()?, &config).await?);
    for (name, way, _) in WAYS {
        if report.wants(&each(way)) {
            let mut rates = Vec::new();
            for _ in plan.rounds() {
                let bare = bare.run(AT_ONCE, plan.programs)?;
                rates.push((bare, fresh(&chain, &format!("{name}-each"), plan.programs).await?));
            }
            let figure = paired(each(way), "jobs/s", &rates, Target::Told, f64::NAN);
            report.tell(if name == "forked" { figure.wanted(Target::AtLeast, 0.45) } else { figure });
        }
        if report.wants(&next(way)) {
            let mut times = Vec::new();
            for _ in plan.rounds_of(plan.deaths) {
                times.push(recovery(&chain, &format!("{name}-next")).await?);
            }
            let figure = Figure::alone(next(way), "ms", load::median(times));
            report.tell(if name == "spares" { figure.wanted(Target::AtMost, 0.3) } else { figure });
        }
    }
    Ok(())
}

/// Jobs a second, each in a process of its own.
async fn fresh(chain: &Rc<Chain>, bulkhead: &str, total: usize) -> Result<f64> {
    let (chain, bulkhead): (_, Rc<str>) = (chain.clone(), bulkhead.into());
    let round = load::run(AT_ONCE, total, move || {
        let (chain, bulkhead) = (chain.clone(), bulkhead.clone());
        async move { chain.call(&bulkhead, &[b'x'; 64]).await.map(drop) }
    });
    Ok(round.await?.rate())
}

/// From the kill of a worker to the next answer, in ms.
async fn recovery(chain: &Rc<Chain>, bulkhead: &str) -> Result<f64> {
    let pid = chain.worker(bulkhead).await?;
    // For the spare that follows the last one to be ready.
    tokio::time::sleep(BETWEEN_DEATHS).await;
    let began = Instant::now();
    processes::kill(pid)?;
    // A job that meets the dying worker is a crash; the next one is what counts.
    while chain.call(bulkhead, b"x").await.is_err() {}
    Ok(began.elapsed().as_secs_f64() * 1e3)
}
