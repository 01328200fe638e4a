//! Measures the cost of readers that scrape metrics ten times per second and follow fifty event streams. The same load
//! runs without readers, with readers of the supervisor, and with readers of another server. The readers of the other
//! server show the cost of the readers themselves. In all three settings, a worker crashes about every 100 ms, to
//! produce events.

use std::cell::Cell;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::Result;
use crate::load::{self, Round};
use crate::pairs::compared;
use crate::processes::{self, Process};
use crate::real::{self, Chain};
use crate::report::Report;

/// Prefix of the names of the measurements in this module.
pub(crate) const GROUP: &str = "watched";

/// Numbers of rounds and jobs for the measurements in this module.
pub(crate) struct Plan {
    /// Number of turns. Each turn consists of three rounds: without readers, with readers of another server, and with
    /// readers of the supervisor.
    pub(crate) pairs: usize,
    /// Number of jobs per round when jobs are sent one at a time.
    pub(crate) one_by_one: usize,
    /// Number of jobs per round when [`LANES`] jobs are in flight.
    pub(crate) many: usize,
}

/// Number of event streams that the readers follow.
const STREAMS: usize = 50;

/// Interval between scrapes of the metrics.
const SCRAPE_INTERVAL: Duration = Duration::from_millis(100);

/// Interval between crashes, with or without readers. Each crash causes one or two events.
const CRASH_INTERVAL: Duration = Duration::from_millis(100);

/// Size of a crash event, in bytes.
const EVENT_BYTES: usize = 700;

/// Number of jobs to keep in flight so that every processor is busy.
const LANES: usize = 64;

/// Reads metrics and events with as little work as possible until this process is killed. Prints a line once reading
/// has started.
pub(crate) fn watch(admin: &Path) -> Result<()> {
    let mut streams = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    for _ in 0..STREAMS {
        // Excludes past events, because reading them would be part of connecting, and only the reading of new events is
        // measured.
        let mut stream = request(admin, "/v1/events?limit=0", "keep-alive")?;
        // The response headers show that the stream has begun.
        if stream.read(&mut buffer)? == 0 {
            return Err("an event stream ended".into());
        }
        stream.set_nonblocking(true)?;
        streams.push(stream);
    }
    println!("watching");
    let mut page = Vec::new();
    loop {
        let began = Instant::now();
        page.clear();
        request(admin, "/metrics", "close")?.read_to_end(&mut page)?;
        if !page.ends_with(b"# EOF\n") {
            return Err("the scraped page does not end with `# EOF`".into());
        }
        for stream in &mut streams {
            while stream.read(&mut buffer).is_ok_and(|count| count == buffer.len()) {}
        }
        std::thread::sleep(SCRAPE_INTERVAL.saturating_sub(began.elapsed()));
    }
}

/// Runs a stand-in for the supervisor's admin API until this process is killed. The stand-in runs no jobs. It only
/// returns a page for each metrics request, and sends each follower an event every [`CRASH_INTERVAL`].
pub(crate) fn stand_in(socket: &Path, page: usize) -> Result<()> {
    const HEAD: &str = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n";
    let page = format!("{HEAD}{}# EOF\n", "#\n".repeat(page / 2));
    let event = format!("data: {}\n\n", "x".repeat(EVENT_BYTES));
    let listener = UnixListener::bind(socket)?;
    let followers = Arc::new(Mutex::new(Vec::<UnixStream>::new()));
    let told = followers.clone();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(CRASH_INTERVAL);
            let mut followers = told.lock().unwrap_or_else(PoisonError::into_inner);
            // Drops followers that have disconnected.
            followers.retain_mut(|follower| follower.write_all(event.as_bytes()).is_ok());
        }
    });
    let mut buffer = vec![0; 1024];
    for connection in listener.incoming() {
        let mut connection = connection?;
        let count = connection.read(&mut buffer)?;
        if buffer[..count].starts_with(b"GET /metrics ") {
            // The write fails if the reader has disconnected.
            let _ = connection.write_all(page.as_bytes());
        } else if connection.write_all(HEAD.as_bytes()).is_ok() {
            followers.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        }
    }
    Ok(())
}

fn request(admin: &Path, path: &str, connection: &str) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(admin)?;
    let head = format!("GET {path} HTTP/1.1\r\nHost: bench\r\nConnection: {connection}\r\n\r\n");
    // Sends the whole request in one write, as scrapers do.
    stream.write_all(head.as_bytes())?;
    Ok(stream)
}

/// Latencies and CPU times measured in one round.
struct Cost {
    /// p99 latency with one job in flight, in µs.
    p99_alone: f64,
    /// p99 latency with [`LANES`] jobs in flight, in µs.
    p99: f64,
    /// CPU time per job that the data plane's thread uses, in µs.
    data_plane: f64,
    /// CPU time per job that the whole supervisor uses, in µs.
    supervisor: f64,
}

/// Takes the measurements. Must be called within a `LocalSet`.
pub(crate) async fn all(plan: &Plan, report: &Report) -> Result<()> {
    let chain = Rc::new(Chain::start_all(&processes::programs()?).await?);
    let is_over = Rc::new(Cell::new(false));
    let crashes = tokio::task::spawn_local(crash_on(chain.clone(), is_over.clone()));
    let folder = tempfile::tempdir()?;
    let elsewhere = folder.path().join("admin.sock");
    let mut page = Vec::new();
    request(&chain.admin(), "/metrics", "close")?.read_to_end(&mut page)?;
    let text = elsewhere.to_str().ok_or("the path is not UTF-8")?;
    let _stand_in = Process::role(&["watched", text, &page.len().to_string()])?;
    processes::wait_for(&elsewhere)?;
    load(&chain, real::ONE, 1, plan.one_by_one / 4).await?;
    load(&chain, &real::wide(LANES), LANES, plan.many / 4).await?;
    // The rounds run without readers, with readers of another server, and with readers of the supervisor.
    let arms = [None, Some(elsewhere), Some(chain.admin())];
    let mut costs = Vec::new();
    for turn in 0..plan.pairs {
        let mut found = [const { None }; 3];
        for place in 0..arms.len() {
            let which = if turn % 2 == 0 { place } else { arms.len() - 1 - place };
            let mut watcher = arms[which].as_deref().map(watcher).transpose()?;
            found[which] = Some(round(&chain, plan).await?);
            if let Some(watcher) = &mut watcher
                && watcher.has_ended()?
            {
                return Err("the watcher has exited".into());
            }
        }
        let [Some(alone), Some(elsewhere), Some(watched)] = found else {
            return Err("a measurement is missing from the round".into());
        };
        costs.push((alone, elsewhere, watched));
    }
    is_over.set(true);
    crashes.await?;
    type Of = fn(&Cost) -> f64;
    let figures: [(&str, &str, Of); 4] = [
        ("64 B, 1 in flight: p99", "µs", |cost| cost.p99_alone),
        ("64 B, 64 in flight: p99", "µs", |cost| cost.p99),
        ("CPU of the data plane", "µs/job", |cost| cost.data_plane),
        ("CPU of the whole supervisor", "µs/job", |cost| cost.supervisor),
    ];
    for (name, unit, of) in figures {
        let pairs = |which: fn(&(Cost, Cost, Cost)) -> (&Cost, &Cost)| -> Vec<_> {
            costs.iter().map(which).map(|(before, after)| (of(before), of(after))).collect()
        };
        report.add(compared(&format!("watched: {name}"), unit, &pairs(|costs| (&costs.0, &costs.2))));
        let name = format!("watched, compared with another server: {name}");
        report.add(compared(&name, unit, &pairs(|costs| (&costs.1, &costs.2))));
    }
    Ok(())
}

/// Starts a reader, and waits until it is reading.
fn watcher(admin: &Path) -> Result<Process> {
    let (watcher, mut said) =
        Process::role_with_output(&["watch", admin.to_str().ok_or("the path is not UTF-8")?])?;
    let mut word = [0; 8];
    said.read_exact(&mut word)?;
    Ok(watcher)
}

async fn round(chain: &Rc<Chain>, plan: &Plan) -> Result<Cost> {
    let one_by_one = load(chain, real::ONE, 1, plan.one_by_one).await?;
    let pid = chain.supervisor.pid();
    let (thread, all) = (processes::first_thread_cpu(pid)?, processes::cpu(pid)?);
    let round = load(chain, &real::wide(LANES), LANES, plan.many).await?;
    let each = |used: Duration| used.as_secs_f64() * 1e6 / round.requests() as f64;
    Ok(Cost {
        p99_alone: one_by_one.quantile(0.99),
        p99: round.quantile(0.99),
        data_plane: each(processes::first_thread_cpu(pid)?.saturating_sub(thread)),
        supervisor: each(processes::cpu(pid)?.saturating_sub(all)),
    })
}

async fn load(chain: &Rc<Chain>, bulkhead: &str, lanes: usize, total: usize) -> Result<Round> {
    let (chain, bulkhead): (_, Rc<str>) = (chain.clone(), bulkhead.into());
    load::run(lanes, total, move || {
        let (chain, bulkhead) = (chain.clone(), bulkhead.clone());
        async move { chain.call(&bulkhead, &[b'x'; 64]).await.map(drop) }
    })
    .await
}

/// Crashes a worker at regular intervals to produce events.
async fn crash_on(chain: Rc<Chain>, is_over: Rc<Cell<bool>>) {
    while !is_over.get() {
        // Ignores the outcome, which is a crash.
        let _ = chain.client.job(real::CRASHES, "").operation("crash").send().await;
        tokio::time::sleep(CRASH_INTERVAL).await;
    }
}
