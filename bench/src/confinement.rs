//! Measures the cost of confinement: the start time and memory of a worker under each profile, and the performance of
//! jobs under `strict` in comparison with `none`.

use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::Result;
use crate::load;
use crate::pairs::{compared, paired};
use crate::processes::{self, Process};
use crate::real::{self, Chain};
use crate::report::{Figure, Report, Target};
use crate::rounds::Rounds;

/// Prefixes of the names of the measurements in this module.
pub(crate) const GROUPS: [&str; 2] = ["startup", "confined"];

/// Numbers of workers, rounds and jobs for the measurements in this module.
pub(crate) struct Plan {
    /// Number of workers started under each profile.
    pub(crate) starts: usize,
    /// Number of pairs of rounds. Each pair consists of one round under `none` and one round under `strict`.
    pub(crate) pairs: usize,
    /// Maximum total duration of all pairs, or `None` for no limit.
    pub(crate) duration: Option<Duration>,
    /// Number of jobs per round when jobs are sent one at a time.
    pub(crate) one_by_one: usize,
    /// Number of jobs per round when [`WIDE`] jobs are in flight.
    pub(crate) many: usize,
}

const PROFILES: [&str; 3] = ["none", "default", "strict"];

/// Number of jobs in flight when throughput is measured.
const WIDE: usize = 64;

/// Payload size of each job, in bytes.
const BYTES: usize = 64;

/// Maximum time for a worker to start.
const START_TIMEOUT: Duration = Duration::from_secs(15);

const STARTUP: &str = "startup: new worker's first answer";
const MEMORY: &str = "startup: idle worker's memory (PSS)";
const INIT_MEMORY: &str = "startup: memory of the namespace's init (PSS)";
const LATENCY: &str = "confined: 64 B, 1 in flight: p50, none and strict";
const THROUGHPUT: &str = "confined: 64 B, 64 in flight, none and strict";

/// Takes all requested measurements. Must be called within a `LocalSet`. Prints the profiles that are not
/// available on this machine.
pub(crate) async fn all(plan: &Plan, report: &Report) -> Result<()> {
    let is_one_wanted = |names: &[&str]| {
        names.iter().any(|name| PROFILES.iter().any(|profile| report.wants(&format!("{name}, {profile}"))))
    };
    let wants_startup = is_one_wanted(&[STARTUP, MEMORY, INIT_MEMORY]);
    let wants_confined = report.wants(LATENCY) || report.wants(THROUGHPUT);
    if !wants_startup && !wants_confined {
        return Ok(());
    }
    let Some((chain, profiles)) = start().await? else { return Ok(()) };
    if wants_startup {
        let figures = startup(&chain, plan, &profiles).await?;
        figures.into_iter().for_each(|figure| report.add(figure));
    }
    if wants_confined {
        let figures = confined(&chain, plan, &profiles).await?;
        figures.into_iter().for_each(|figure| report.add(figure));
    }
    Ok(())
}

/// Starts a supervisor. Returns the supervisor and the available profiles, or `None` if no profile is available.
async fn start() -> Result<Option<(Rc<Chain>, Vec<&'static str>)>> {
    let programs = processes::programs()?;
    let mut accepted = Vec::new();
    for profile in PROFILES {
        match real::check(&programs, &config(&[profile])?)? {
            Ok(()) => accepted.push(profile),
            Err(refused) => report_missing(profile, &refused),
        }
    }
    if accepted.is_empty() {
        return Ok(None);
    }
    let chain = Chain::start(&programs, &config(&accepted)?).await?;
    let mut profiles = Vec::new();
    for profile in accepted {
        match first_answer(&chain, profile, "ready?").await {
            Ok(_) => profiles.push(profile),
            Err(error) => {
                report_missing(profile, &format!("workers with this profile do not start: {error}"))
            }
        }
    }
    Ok(Some((Rc::new(chain), profiles)))
}

fn report_missing(profile: &str, why: &str) {
    eprintln!("NOT MEASURED: the profile `{profile}` is not available on this machine: {why}");
}

fn config(profiles: &[&str]) -> Result<String> {
    let worker = processes::worker()?;
    let is_root = rustix::process::geteuid().is_root();
    let mut text = "[supervisor]\nsocket = \"jobs.sock\"\n".to_owned();
    // Without root, the supervisor rejects `strict`, and the bench prints that this profile is not available.
    if is_root && profiles.contains(&"strict") {
        text += "worker_uids = \"200000-200999\"\n";
    }
    for &profile in profiles {
        let user = if is_root && profile == "strict" { ", user = \"auto\"" } else { "" };
        let common = format!("command = [{worker}]\nsandbox = {{ profile = {profile:?}{user} }}\n");
        // Each tenant has a separate worker, which is started by the tenant's first job.
        let tenants = "tenants = { isolate = true, max_active = 256, idle = \"1h\" }\n";
        text += &format!("[bulkhead.{profile}]\n{common}max_queue = 1\n{tenants}");
        text += &format!("[bulkhead.{}]\n{common}max_in_flight = {WIDE}\n", wide(profile));
    }
    Ok(text)
}

/// Returns the name of the bulkhead that runs many jobs concurrently under the given profile.
fn wide(profile: &str) -> String {
    format!("{profile}-wide")
}

/// Submits a tenant's first job, which starts a worker. Returns the time until the result arrives, and the worker's
/// PID.
async fn first_answer(chain: &Chain, profile: &str, tenant: &str) -> Result<(Duration, u32)> {
    let began = Instant::now();
    let job = chain.client.job(profile, "").tenant(tenant).deadline(START_TIMEOUT);
    let reply = job.send().await?;
    let took = began.elapsed();
    Ok((took, reply.outcome().worker_pid.ok_or("no worker served the job")?))
}

/// Starts the worker's program without a supervisor. Returns the time until the first reply.
fn bare_first_answer() -> Result<Duration> {
    use std::io::{Read, Write};
    let began = Instant::now();
    let (_process, mut socket) = Process::echo()?;
    let mut byte = [0];
    socket.write_all(b"x")?;
    socket.read_exact(&mut byte)?;
    Ok(began.elapsed())
}

async fn startup(chain: &Chain, plan: &Plan, profiles: &[&str]) -> Result<Vec<Figure>> {
    let mut figures = memory(chain, profiles).await?;
    let mut bare = Vec::new();
    let mut real = vec![Vec::new(); profiles.len()];
    for round in 0..plan.starts {
        bare.push(bare_first_answer()?.as_secs_f64() * 1e3);
        let tenant = format!("t{round}");
        for (times, profile) in real.iter_mut().zip(profiles) {
            times.push(first_answer(chain, profile, &tenant).await?.0.as_secs_f64() * 1e3);
        }
    }
    figures.extend(profiles.iter().zip(real).map(|(profile, real)| {
        let pairs: Vec<_> = bare.iter().copied().zip(real).collect();
        paired(format!("{STARTUP}, {profile}"), "ms", &pairs, Target::Told, f64::NAN)
    }));
    Ok(figures)
}

/// Measures the memory of a worker that has run one job. If the worker has a PID namespace, also measures the memory
/// of the first process in that namespace.
async fn memory(chain: &Chain, profiles: &[&str]) -> Result<Vec<Figure>> {
    let mut workers = Vec::new();
    for profile in profiles {
        workers.push(first_answer(chain, profile, "idle").await?.1);
    }
    let mut figures = Vec::new();
    // All workers are started before the first measurement, because a process's proportional set size decreases as more
    // processes share its pages.
    for (profile, worker) in profiles.iter().zip(workers) {
        figures.push(proportional(format!("{MEMORY}, {profile}"), worker)?);
        if let Some(init) = processes::init_of(worker)? {
            figures.push(proportional(format!("{INIT_MEMORY}, {profile}"), init)?);
        }
    }
    Ok(figures)
}

fn proportional(name: String, pid: u32) -> Result<Figure> {
    Ok(Figure::alone(name, "KiB", processes::proportional_bytes(pid)? as f64 / 1024.0))
}

/// Runs the same load under `none` and under `strict`. In every other pair of rounds, the order is reversed.
async fn confined(chain: &Rc<Chain>, plan: &Plan, profiles: &[&str]) -> Result<Vec<Figure>> {
    const COMPARED: [&str; 2] = ["none", "strict"];
    if let Some(missing) = COMPARED.iter().find(|profile| !profiles.contains(profile)) {
        eprintln!("NOT MEASURED: the comparison of none and strict, because `{missing}` is not available");
        return Ok(Vec::new());
    }
    for profile in COMPARED {
        load(chain, profile, 1, plan.one_by_one / 4).await?;
        load(chain, &wide(profile), WIDE, plan.many / 4).await?;
    }
    let (mut p50, mut rate) = (Vec::new(), Vec::new());
    for pair in Rounds::new(plan.pairs, plan.duration) {
        let mut found = [(0.0, 0.0); 2];
        let order = if pair % 2 == 0 { [0, 1] } else { [1, 0] };
        for which in order {
            let one = load(chain, COMPARED[which], 1, plan.one_by_one).await?;
            let many = load(chain, &wide(COMPARED[which]), WIDE, plan.many).await?;
            found[which] = (one.quantile(0.5), many.rate());
        }
        p50.push((found[0].0, found[1].0));
        rate.push((found[0].1, found[1].1));
    }
    Ok(vec![compared(LATENCY, "µs", &p50), compared(THROUGHPUT, "jobs/s", &rate)])
}

async fn load(chain: &Rc<Chain>, profile: &str, lanes: usize, total: usize) -> Result<load::Round> {
    let (chain, profile): (_, Rc<str>) = (chain.clone(), profile.into());
    let payload = Rc::new(vec![b'x'; BYTES]);
    load::run(lanes, total, move || {
        let (chain, profile, payload) = (chain.clone(), profile.clone(), payload.clone());
        async move {
            let reply = chain.client.job(&*profile, &payload[..]).send().await?;
            if reply.into_payload().len() == BYTES { Ok(()) } else { Err("too few bytes came back".into()) }
        }
    })
    .await
}
