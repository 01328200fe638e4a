//! Takes all requested measurements, most of which are in other modules. This file contains the comparisons between the
//! two chains of `chains`, and their targets. `report` prints the figures.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use tokio::task::LocalSet;

use crate::chains::Chains;
use crate::load::{Round, median};
use crate::pairs::paired;
use crate::plan::Plan;
use crate::processes::{self, Process};
use crate::real;
use crate::report::{Figure, Report, Target};
use crate::{
    Result, attacks, confinement, embedded, fresh, http, isolation, neighbours, policy, programs, scale,
    watched,
};

/// Takes all requested measurements.
pub(crate) async fn all(plan: &Plan, report: &Report) -> Result<()> {
    // The measurements of `policy` run first, because the processes of other measurements would distort the results.
    policy::all(plan, report)?;
    let is_only = |group: &str| report.only().is_some_and(|only| only.starts_with(group));
    let other_groups = confinement::GROUPS.into_iter().chain([
        policy::GROUP,
        watched::GROUP,
        attacks::GROUP,
        isolation::GROUP,
        programs::GROUP,
        fresh::GROUP,
        http::GROUP,
        scale::GROUP,
    ]);
    if !other_groups.into_iter().any(is_only) {
        LocalSet::new().run_until(measure(plan, report)).await?;
    }
    LocalSet::new().run_until(confinement::all(&plan.confinement, report)).await?;
    if report.only().map_or(report.wants_slow(watched::GROUP), |only| only.starts_with(watched::GROUP)) {
        LocalSet::new().run_until(watched::all(&plan.watched, report)).await?;
    }
    LocalSet::new().run_until(programs::all(plan, report)).await?;
    LocalSet::new().run_until(fresh::all(plan, report)).await?;
    LocalSet::new().run_until(http::all(plan, report)).await?;
    LocalSet::new().run_until(scale::all(&plan.scale, report)).await?;
    if report.wants_slow(isolation::GROUP) || is_only(isolation::GROUP) {
        LocalSet::new().run_until(isolation::all(&plan.isolation, report)).await?;
    }
    // Takes about an hour.
    if is_only(attacks::GROUP) {
        LocalSet::new().run_until(attacks::all(&plan.attacks, report)).await?;
    }
    Ok(())
}

async fn measure(plan: &Plan, report: &Report) -> Result<()> {
    let chains = Chains::start().await?;
    if report.wants("idle worker") {
        report.add(idle_memory(&chains).await?);
    }
    for (name, bytes, total) in [("64 B", 64, plan.small), ("4 KiB", 4 << 10, plan.small)] {
        let name = format!("{name}, 1 in flight");
        if report.wants(&name) {
            latency(&chains, plan, &name, bytes, total).await?.into_iter().for_each(|f| report.add(f));
        }
    }
    for (name, bytes, total) in
        [("1 MiB", 1 << 20, plan.large), ("64 MiB", 64 << 20, plan.large.div_ceil(32))]
    {
        let name = format!("{name}, 1 in flight");
        if report.wants(&name) {
            large(&chains, plan, &name, bytes, total).await?.into_iter().for_each(|f| report.add(f));
        }
    }
    for (lanes, wanted) in [(64, 0.7), (1024, 0.6)] {
        let name = format!("64 B, {lanes} in flight");
        if report.wants(&name) {
            throughput(&chains, plan, &name, (lanes, wanted)).await?.into_iter().for_each(|f| report.add(f));
        }
    }
    for (name, bulkhead) in [(WITH_PREFETCH, real::NARROW), (WITHOUT_PREFETCH, real::WITHOUT)] {
        if report.wants(name) {
            report.add(one_at_a_time(&chains, plan, name, bulkhead).await?);
        }
    }
    if report.wants("time from worker kill to next reply") {
        report.add(recovery(&chains, plan).await?);
    }
    if report.wants("hang: time from deadline + grace to next reply") {
        report.add(hang(&chains, plan).await?);
    }
    embedded::all(&chains, plan, report).await?;
    neighbours::all(&chains, plan, report).await
}

async fn latency(
    chains: &Chains,
    plan: &Plan,
    name: &str,
    bytes: usize,
    total: usize,
) -> Result<Vec<Figure>> {
    let (mut p50, mut p99) = (Vec::new(), Vec::new());
    for _ in plan.rounds() {
        let bare = chains.bare(1, total, bytes).await?;
        let real = chains.real(real::ONE, 1, total, bytes).await?;
        p50.push((bare.quantile(0.5), real.quantile(0.5)));
        p99.push((bare.quantile(0.99), real.quantile(0.99)));
    }
    Ok(vec![
        paired(format!("{name}: p50"), "µs", &p50, Target::AtMost, 1.15),
        paired(format!("{name}: p99"), "µs", &p99, Target::AtMost, 1.6),
    ])
}

/// Measures large payloads that the worker returns, first copied at both ends and then placed in mapped files. With
/// mapped files, the client writes each payload once, and the worker copies it once.
async fn large(chains: &Chains, plan: &Plan, name: &str, bytes: usize, total: usize) -> Result<Vec<Figure>> {
    let (mut copied, mut mapped) = (Vec::new(), Vec::new());
    let per_second = |round: &Round| round.rate() * bytes as f64 / f64::from(1 << 20);
    // The first jobs request memory files, which the later jobs then use.
    chains.mapped(real::ONE, 1, 3, bytes).await?;
    for _ in plan.rounds() {
        let bare = per_second(&chains.bare(1, total, bytes).await?);
        copied.push((bare, per_second(&chains.copied(real::ONE, 1, total, bytes).await?)));
        mapped.push((bare, per_second(&chains.mapped(real::ONE, 1, total, bytes).await?)));
    }
    Ok(vec![
        paired(format!("{name}: copied"), "MiB/s", &copied, Target::AtLeast, 1.0),
        paired(format!("{name}: mapped"), "MiB/s", &mapped, Target::AtLeast, 3.0),
    ])
}

/// Measures the jobs per second, and the CPU time that the relay and the supervisor use per job.
async fn throughput(
    chains: &Chains,
    plan: &Plan,
    name: &str,
    (lanes, wanted): (usize, f64),
) -> Result<Vec<Figure>> {
    let (mut rates, mut cpu) = (Vec::new(), Vec::new());
    let (relay, supervisor) = (chains.relay.pid(), chains.real.supervisor.pid());
    for _ in plan.rounds() {
        let before = processes::cpu(relay)?;
        let bare = chains.bare(lanes, plan.many, 64).await?;
        let relayed = processes::cpu(relay)?.saturating_sub(before);
        let before = processes::cpu(supervisor)?;
        let real = chains.real(&real::wide(lanes), lanes, plan.many, 64).await?;
        let used = processes::cpu(supervisor)?.saturating_sub(before);
        rates.push((bare.rate(), real.rate()));
        let each = |used: Duration, round: &Round| used.as_secs_f64() * 1e6 / round.requests() as f64;
        cpu.push((each(relayed, &bare), each(used, &real)));
    }
    let cpu_name = format!("{name}: supervisor CPU, over the relay's");
    Ok(vec![
        paired(name.to_owned(), "jobs/s", &rates, Target::AtLeast, wanted),
        paired(cpu_name, "µs/job", &cpu, Target::FigureAtMost, 0.8),
    ])
}

const WITH_PREFETCH: &str = "64 B, 64 waiting, one at a time over 64 in flight";
const WITHOUT_PREFETCH: &str = "64 B, 64 waiting, one at a time without lookahead over 64 in flight";

/// Compares the throughput of two workers. The worker of `bulkhead` runs one job at a time, and the other worker
/// runs 64 jobs concurrently.
async fn one_at_a_time(chains: &Chains, plan: &Plan, name: &str, bulkhead: &str) -> Result<Figure> {
    let mut rates = Vec::new();
    for _ in plan.rounds() {
        let wide = chains.real(&real::wide(64), 64, plan.many, 64).await?;
        let narrow = chains.real(bulkhead, 64, plan.many / 4, 64).await?;
        rates.push((wide.rate(), narrow.rate()));
    }
    let figure = paired(name.into(), "jobs/s", &rates, Target::Told, f64::NAN);
    Ok(if bulkhead == real::NARROW { figure.with_target(Target::AtLeast, 0.8) } else { figure })
}

/// Compares the time from a worker's death to the next result with the time that a killed echo process needs to be
/// restarted and reply.
async fn recovery(chains: &Chains, plan: &Plan) -> Result<Figure> {
    let mut pairs = Vec::new();
    for _ in plan.rounds_of(plan.deaths) {
        let bare = bare_recovery()?;
        let pid = chains.real.worker(real::ONE).await?;
        let began = Instant::now();
        processes::kill(pid)?;
        // A job that was sent to the dying worker crashes, so the loop sends another job.
        while chains.real.call(real::ONE, b"x").await.is_err() {}
        pairs.push((bare.as_secs_f64() * 1e3, began.elapsed().as_secs_f64() * 1e3));
    }
    Ok(paired("time from worker kill to next reply".into(), "ms", &pairs, Target::AtMost, 2.0))
}

fn bare_recovery() -> Result<Duration> {
    let (victim, mut socket) = Process::echo()?;
    let mut byte = [0];
    socket.write_all(b"x")?;
    socket.read_exact(&mut byte)?;
    let began = Instant::now();
    processes::kill(victim.pid())?;
    // Both an end of file and a reset mean that the echo process is gone.
    let _ = socket.read(&mut byte);
    let (_next, mut socket) = Process::echo()?;
    socket.write_all(b"x")?;
    socket.read_exact(&mut byte)?;
    Ok(began.elapsed())
}

/// Measures the time from the end of a hanging job's grace period to the next job's result. This includes starting a
/// new worker.
async fn hang(chains: &Chains, plan: &Plan) -> Result<Figure> {
    let mut over = Vec::new();
    for _ in plan.rounds_of(plan.deaths) {
        over.push(chains.real.hang(real::HANGS).await?);
    }
    // The target allows 10 ms in addition to the start time of a worker, which `recovery` measures.
    let figure = Figure::alone("hang: time from deadline + grace to next reply", "ms", median(over));
    Ok(figure.with_target(Target::AtMost, 12.0))
}

async fn idle_memory(chains: &Chains) -> Result<Figure> {
    let pid = chains.real.worker(real::ONE).await?;
    let kib = processes::proportional_bytes(pid)? as f64 / 1024.0;
    Ok(Figure::alone("idle worker's memory (PSS)", "KiB", kib).with_target(Target::AtMost, 600.0))
}
