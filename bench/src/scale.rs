//! Measures how the cost of a job grows with the number of bulkheads, tenants and waiting jobs, each separately. Also
//! measures idle workers with many bulkheads, and the latency of jobs during scrapes. `measures` calls `all` if slow
//! figures are requested. `plan` sets the numbers.

use std::cell::Cell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bulkhead_client::Client;
use tokio::task::JoinSet;

use crate::load::{self, Round};
use crate::pairs::paired;
use crate::processes::{self, Process};
use crate::real::Chain;
use crate::report::{Figure, Report, Target};
use crate::{Result, bare};

/// Prefix of the names of the measurements in this module.
pub(crate) const GROUP: &str = "scale";

/// Maximum ratio between the cost of a job at large scale and at small scale.
const RATIO: f64 = 1.5;

/// Bulkhead that all tenants share.
const SHARED: &str = "shared";
/// Bulkhead whose jobs have to wait in the queue.
const WAITS: &str = "waits";

/// Numbers of rounds, jobs, bulkheads, tenants and clients for the measurements in this module.
pub(crate) struct Plan {
    pub(crate) rounds: usize,
    /// Number of jobs per round when jobs are sent one at a time.
    pub(crate) one_by_one: usize,
    /// Number of jobs per round when many jobs are in flight.
    pub(crate) many: usize,
    pub(crate) bulkheads: usize,
    pub(crate) tenants: usize,
    /// Number of tenants that submit jobs.
    pub(crate) active: usize,
    pub(crate) clients: usize,
    /// Number of waiting jobs per client.
    pub(crate) waiting: usize,
    /// Duration for which an idle supervisor is observed.
    pub(crate) idle: Duration,
}

/// Takes all requested measurements.
pub(crate) async fn all(plan: &Plan, report: &Report) -> Result<()> {
    if !report.wants_slow(GROUP) {
        return Ok(());
    }
    let alone = start(1).await?;
    let many = start(plan.bulkheads).await?;
    idle(&alone, &many, plan, report).await?;
    bulkheads(&many, plan, report).await?;
    tenants(&alone, plan, report).await?;
    scrapes(&many, plan, report).await?;
    drop(many);
    crowd(alone, plan, report).await
}

/// Starts a supervisor with `bulkheads` bulkheads, and waits until their workers are ready.
async fn start(bulkheads: usize) -> Result<Rc<Chain>> {
    let command = format!("command = [{}]", processes::worker()?);
    let mut config = format!(
        "[supervisor]\nsocket = \"jobs.sock\"\nmax_clients = 4000\nmax_buffered = \"1GiB\"\n\
         drain_timeout = \"1s\"\n\
         [defaults]\nsandbox = {{ profile = \"none\" }}\n\
         [bulkhead.{SHARED}]\n{command}\nmax_in_flight = 64\ntenants = {{ max_in_flight = 64 }}\n\
         [bulkhead.{WAITS}]\n{command}\nmax_queue = 1000000\ndeadline = \"1h\"\ndeadline_max = \"1h\"\n"
    );
    for number in 0..bulkheads {
        config.push_str(&format!("[bulkhead.b{number}]\n{command}\nmax_queue = 64\n"));
    }
    let chain = Rc::new(Chain::start(&processes::programs()?, &config).await?);
    for name in (0..bulkheads).map(|number| format!("b{number}")).chain([SHARED.into(), WAITS.into()]) {
        chain.client.job(&name, "").send().await?;
    }
    Ok(chain)
}

/// Returns the supervisor's CPU time per job in µs, with `lanes` jobs in flight. `names` yields the bulkhead and the
/// tenant for each job.
async fn cpu(
    chain: &Rc<Chain>,
    (lanes, total): (usize, usize),
    names: impl Fn() -> (Rc<str>, Rc<str>) + 'static,
) -> Result<f64> {
    let pid = chain.supervisor.pid();
    let before = processes::cpu(pid)?;
    let round = run(chain, (lanes, total), names).await?;
    let used = processes::cpu(pid)?.saturating_sub(before);
    Ok(used.as_secs_f64() * 1e6 / round.requests() as f64)
}

async fn run(
    chain: &Rc<Chain>,
    (lanes, total): (usize, usize),
    names: impl Fn() -> (Rc<str>, Rc<str>) + 'static,
) -> Result<Round> {
    let (client, names) = (chain.client.clone(), Rc::new(names));
    load::run(lanes, total, move || {
        let (client, names) = (client.clone(), names.clone());
        async move {
            let (bulkhead, tenant) = names();
            client.job(&*bulkhead, vec![b'x'; 64]).tenant(&*tenant).send().await?;
            Ok(())
        }
    })
    .await
}

/// Returns a function that yields the given names in turn.
fn in_turn(names: impl Iterator<Item = String>) -> impl Fn() -> Rc<str> {
    let (names, turn): (Vec<Rc<str>>, _) = (names.map(Into::into).collect(), Cell::new(0));
    move || {
        let next = turn.replace(turn.get() + 1);
        names[next % names.len()].clone()
    }
}

/// Returns a function that yields the first `count` bulkheads in turn.
fn to_bulkheads(count: usize) -> impl Fn() -> (Rc<str>, Rc<str>) {
    let names = in_turn((0..count).map(|number| format!("b{number}")));
    move || (names(), "".into())
}

/// Returns a function that yields the first `count` tenants in turn.
fn of_tenants(count: usize) -> impl Fn() -> (Rc<str>, Rc<str>) {
    let names = in_turn((0..count).map(|number| format!("tenant-{number}")));
    move || (SHARED.into(), names())
}

/// Compares jobs that go to all bulkheads in turn with jobs that all go to one bulkhead. If each job goes to a
/// different worker, each read and write moves fewer bytes. A bare relay with the same number of echo processes shows
/// how much of the extra cost is due to these smaller reads and writes.
async fn bulkheads(many: &Rc<Chain>, plan: &Plan, report: &Report) -> Result<()> {
    let count = plan.bulkheads;
    let mut relay = None;
    for (lanes, total) in [(1, plan.one_by_one), (64, plan.many)] {
        let name = format!(
            "scale: {count} bulkheads in turn over a single bulkhead, {lanes} in flight: supervisor CPU"
        );
        if !report.wants(&name) {
            continue;
        }
        let relay = match &mut relay {
            Some(relay) => relay,
            none => none.insert(Spread::start(count).await?),
        };
        let (mut pairs, mut growths) = (Vec::new(), Vec::new());
        for _ in 0..plan.rounds {
            let bare = (relay.cpu((lanes, total), 1).await?, relay.cpu((lanes, total), count).await?);
            let one = cpu(many, (lanes, total), to_bulkheads(1)).await?;
            let all = cpu(many, (lanes, total), to_bulkheads(count)).await?;
            pairs.push((one, all));
            growths.push((bare.1 / bare.0, all / one));
        }
        report.add(paired(name.clone(), "µs/job", &pairs, Target::Told, f64::NAN));
        let name = format!("{name}, over the growth for a bare relay");
        report.add(paired(name, "times", &growths, Target::AtMost, RATIO));
    }
    Ok(())
}

/// A bare relay that is connected to many echo processes.
struct Spread {
    relay: Process,
    client: bare::Client,
}

impl Spread {
    async fn start(echoes: usize) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let near = folder.path().join("near");
        let relay =
            Process::role(&["spread", near.to_str().ok_or("the path is not UTF-8")?, &echoes.to_string()])?;
        processes::wait_for(&near)?;
        Ok(Self { relay, client: bare::Client::connect(&near).await? })
    }

    /// Returns the relay's CPU time per request in µs. `lanes` requests are in flight. The requests are sent to the
    /// first `echoes` echo processes in turn.
    async fn cpu(&self, (lanes, total): (usize, usize), echoes: usize) -> Result<f64> {
        let before = processes::cpu(self.relay.pid())?;
        let (client, turn) = (self.client.clone(), Rc::new(Cell::new(0)));
        let round = load::run(lanes, total, move || {
            let (client, turn) = (client.clone(), turn.clone());
            async move {
                let mut payload = [b'x'; 64];
                let number = turn.replace(turn.get() + 1) % echoes;
                payload[..4].copy_from_slice(&u32::try_from(number)?.to_le_bytes());
                client.call(&payload).await.map(drop)
            }
        });
        let round = round.await?;
        let used = processes::cpu(self.relay.pid())?.saturating_sub(before);
        Ok(used.as_secs_f64() * 1e6 / round.requests() as f64)
    }
}

async fn tenants(alone: &Rc<Chain>, plan: &Plan, report: &Report) -> Result<()> {
    let (count, active) = (plan.tenants, plan.active);
    let name =
        format!("scale: {active} of {count} tenants over a single tenant, 64 in flight: supervisor CPU");
    if !report.wants(&name) {
        return Ok(());
    }
    // Each tenant submits one job, so that the supervisor creates a record of each tenant.
    run(alone, (64, count.next_multiple_of(64)), of_tenants(count)).await?;
    let mut pairs = Vec::new();
    for _ in 0..plan.rounds {
        let one = cpu(alone, (64, plan.many), of_tenants(1)).await?;
        pairs.push((one, cpu(alone, (64, plan.many), of_tenants(active)).await?));
    }
    report.add(paired(name, "µs/job", &pairs, Target::AtMost, RATIO));
    Ok(())
}

async fn idle(alone: &Chain, many: &Chain, plan: &Plan, report: &Report) -> Result<()> {
    let count = plan.bulkheads;
    let name = format!("scale: {count} bulkheads with an idle worker each");
    if !report.wants(&name) {
        return Ok(());
    }
    let (few, all) = (alone.supervisor.pid(), many.supervisor.pid());
    // Waits until the workers are idle and the supervisor has checked each worker once.
    tokio::time::sleep(plan.idle).await;
    let (before, began) = (processes::cpu(all)?, Instant::now());
    tokio::time::sleep(plan.idle).await;
    let used = processes::cpu(all)?.saturating_sub(before).as_secs_f64() / began.elapsed().as_secs_f64();
    let figure = Figure::alone(format!("{name}: supervisor CPU"), "% of a core", used * 100.0);
    report.add(figure.with_target(Target::FigureAtMost, 0.2));
    let more = processes::own_bytes(all)?.saturating_sub(processes::own_bytes(few)?);
    let each = more as f64 / 1024.0 / (count.max(2) - 1) as f64;
    report.add(
        Figure::alone(format!("{name}: memory of each"), "KiB", each).with_target(Target::FigureAtMost, 20.0),
    );
    let page = get(&many.admin(), "/metrics")?.len() as f64 / 1e6;
    report.add(Figure::alone(format!("{name}: a scrape"), "MB", page));
    Ok(())
}

/// Returns the body of a response from the admin API.
fn get(admin: &Path, path: &str) -> std::io::Result<String> {
    let mut socket = UnixStream::connect(admin)?;
    write!(socket, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    Ok(answer.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
}

/// Compares the p99 latency of one bulkhead when metrics are not scraped and when the metrics of all bulkheads are
/// scraped once per second.
async fn scrapes(many: &Rc<Chain>, plan: &Plan, report: &Report) -> Result<()> {
    let name = format!("scale: {} bulkheads, one scrape per second: p99, 1 in flight", plan.bulkheads);
    if !report.wants(&name) {
        return Ok(());
    }
    let mut pairs = Vec::new();
    for _ in 0..plan.rounds {
        let quiet = run(many, (1, plan.one_by_one), to_bulkheads(1)).await?;
        let (is_over, told) = std::sync::mpsc::channel::<()>();
        let admin = many.admin();
        let scraper = std::thread::spawn(move || -> std::io::Result<()> {
            while told.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                get(&admin, "/metrics")?;
                let _ = told.recv_timeout(Duration::from_secs(1));
            }
            Ok(())
        });
        let watched = run(many, (1, plan.one_by_one), to_bulkheads(1)).await?;
        drop(is_over);
        scraper.join().map_err(|_| "the scraper panicked")??;
        pairs.push((quiet.quantile(0.99), watched.quantile(0.99)));
    }
    report.add(paired(name, "µs", &pairs, Target::AtMost, RATIO));
    Ok(())
}

/// Measures many clients that each have their own tenant and waiting jobs. Memory and CPU time per job are measured
/// with a tenth of the jobs and with all of them, and must not grow with the number of jobs. Delivering the outcomes
/// at shutdown is measured only with all jobs.
async fn crowd(chain: Rc<Chain>, plan: &Plan, report: &Report) -> Result<()> {
    let name = format!("scale: {} clients, {} waiting jobs", plan.clients, plan.clients * plan.waiting);
    if !report.wants(&name) {
        return Ok(());
    }
    let pid = chain.supervisor.pid();
    let mut clients = Vec::new();
    for _ in 0..plan.clients {
        clients.push(Client::connect(chain.socket()).await?);
    }
    // Keeps the only worker busy.
    let hangs = chain.client.job(WAITS, "").operation("hang").deadline(Duration::from_secs(3000));
    let hangs = tokio::task::spawn_local(hangs.send());
    let (mut coming, mut held, mut cancelled) = (Vec::new(), Vec::new(), Vec::new());
    for each in [plan.waiting.div_ceil(10), plan.waiting] {
        let count = each * clients.len();
        let per_job = |used: Duration| used.as_secs_f64() * 1e6 / count as f64;
        let (before, bytes) = (processes::cpu(pid)?, processes::own_bytes(pid)?);
        let (mut goes, mut stays) = (JoinSet::new(), JoinSet::new());
        for (number, client) in clients.iter().enumerate() {
            let jobs = if number < clients.len() / 2 { &mut goes } else { &mut stays };
            for _ in 0..each {
                let job = client.job(WAITS, vec![b'x'; 64]).tenant(format!("tenant-{number}"));
                jobs.spawn_local(job.deadline(Duration::from_secs(3000)).send());
            }
        }
        wait_queued(&chain, count).await?;
        let came = processes::cpu(pid)?;
        coming.push(per_job(came.saturating_sub(before)));
        held.push(processes::own_bytes(pid)?.saturating_sub(bytes) as f64 / count as f64);
        // Cancels the jobs of half of the clients. In the last iteration, the jobs of the other half are rejected when
        // the supervisor shuts down.
        goes.shutdown().await;
        wait_queued(&chain, stays.len()).await?;
        cancelled.push(per_job(2 * processes::cpu(pid)?.saturating_sub(came)));
        if each < plan.waiting {
            stays.shutdown().await;
            wait_queued(&chain, 0).await?;
            continue;
        }
        let count = stays.len();
        let began = Instant::now();
        processes::terminate(pid)?;
        let mut rejected = 0;
        while let Some(ended) = stays.join_next().await {
            rejected += usize::from(ended?.is_err_and(|error| error.to_string().contains("draining")));
        }
        let took = began.elapsed().as_secs_f64() * 1e6 / count as f64;
        report.add(Figure::alone(
            format!("{name}: half of the clients notified of a shutdown"),
            "µs/job",
            took,
        ));
        if rejected < count {
            return Err(format!("only {rejected} of {count} jobs were rejected as `draining`").into());
        }
    }
    hangs.abort();
    let compared = [
        ("arrival, supervisor CPU", "µs/job", coming),
        ("cancellation, supervisor CPU", "µs/job", cancelled),
    ];
    for (quantity, unit, figures) in compared.into_iter().chain([("memory of each", "bytes", held)]) {
        let pairs: Vec<_> =
            figures.iter().zip(figures.iter().skip(1)).map(|(few, all)| (*few, *all)).collect();
        report.add(paired(format!("{name} over a tenth: {quantity}"), unit, &pairs, Target::AtMost, RATIO));
    }
    Ok(())
}

/// Waits until `count` jobs are in the queue.
async fn wait_queued(chain: &Chain, count: usize) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(300);
    loop {
        // Gives the clients' tasks time to send their jobs.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let told = get(&chain.admin(), &format!("/v1/bulkheads/{WAITS}"))?;
        let told: serde_json::Value = serde_json::from_str(&told)?;
        if told["queued"] == count {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(format!("{} jobs are waiting instead of {count}", told["queued"]).into());
        }
    }
}
