//! The ledger for a supervisor that is embedded in the clients' process, with the data plane on a separate
//! thread or on the clients' thread. There is no admin API, so the ledger observes the supervisor only from
//! outside.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bulkhead_client::Client;
use bulkhead_supervisor::{Supervisor, config};
use nix::sys::signal::Signal;
use tempfile::TempDir;

use super::chaos::{Deed, Random, pause};
use super::clients::{CONNECTIONS, Entry, drive, fill_all, on_this_thread};
use super::worker::now_us;
use super::{Findings, LOOKS_AT_REST, Plan, has_more_descriptors};
use crate::{PATIENCE, descriptors, kill_pid, name, output_within, parent, processes_with, programs};

/// Runs the `ledger` program with the given arguments, then checks that the program has left no processes or files
/// behind.
pub fn keep_in_process(arguments: &[&str]) -> Result<String, String> {
    let (notes, temporary) = (folder(), folder());
    super::open_to_all(notes.path());
    let mut command = Command::new(programs().join("ledger"));
    command.args(["in", text(notes.path())]).args(arguments).env("TMPDIR", temporary.path());
    command.stdin(Stdio::null());
    // The program limits its own run time.
    let output = output_within(Duration::MAX, &mut command);
    let told =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // The keepers' guards exit shortly after the keepers.
    let began = Instant::now();
    let mut left = super::left_of(notes.path(), temporary.path());
    while !left.is_empty() && began.elapsed() < PATIENCE {
        std::thread::park_timeout(Duration::from_millis(20));
        left = super::left_of(notes.path(), temporary.path());
    }
    if ExitStatus::success(&output.status) && left.is_empty() {
        Ok(told)
    } else {
        Err(format!("{}, left: {left:?}\n{told}", output.status))
    }
}

fn folder() -> TempDir {
    TempDir::new().expect("a temporary folder")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("an ordinary path")
}

/// Runs the ledger in this process. The process must have called `keeper_main_if_asked` first.
pub fn keep(notes: &Path, plan: Plan, is_local: bool) -> Findings {
    let text = format!("[supervisor]\ndrain_timeout = \"20s\"\n{}", super::config(notes, 0, plan));
    let config =
        config::parse_embedded(&text, Path::new("workers.toml")).unwrap_or_else(|errors| panic!("{errors}"));
    let (told, deeds, findings) =
        if is_local { on_caller(config, notes, plan) } else { on_own(config, notes, plan) };
    super::judge(told, deeds, findings, notes, plan)
}

type Kept = (HashMap<u64, Entry>, Vec<Deed>, Findings);

/// Runs the ledger with the data plane on a separate thread.
fn on_own(config: config::Config, notes: &Path, plan: Plan) -> Kept {
    let supervisor = Supervisor::start_blocking(config).unwrap_or_else(|error| panic!("{error}"));
    let kept = on_this_thread(keep_with(|| supervisor.client(), notes, plan));
    supervisor.shutdown().unwrap_or_else(|error| panic!("{error}"));
    kept
}

/// Runs the ledger with the data plane on the clients' thread.
fn on_caller(config: config::Config, notes: &Path, plan: Plan) -> Kept {
    on_this_thread(async {
        let mut supervisor =
            Supervisor::builder(config).start_local().unwrap_or_else(|error| panic!("{error}"));
        let mut clients: Vec<Client> = (0..CLIENTS).map(|_| supervisor.client()).collect();
        let next = || clients.pop().expect("there are enough clients");
        let kept = supervisor.run_until(keep_with(next, notes, plan)).await;
        supervisor.shutdown().await.unwrap_or_else(|error| panic!("{error}"));
        kept.unwrap_or_else(|error| panic!("{error}"))
    })
}

/// Number of clients that a single run needs.
const CLIENTS: usize = 2 * CONNECTIONS + 2;

async fn keep_with(mut client: impl FnMut() -> Client, notes: &Path, plan: Plan) -> Kept {
    let (looks_on, floods) = (client(), client());
    fill_all(&looks_on).await;
    let before = at_rest().await;
    let (mut told, mut deeds) = (HashMap::new(), Vec::new());
    let fifth = plan.lasts / 5;
    let rest = Plan { lasts: plan.lasts - fifth, seed: plan.seed.wrapping_add(1), ..plan };
    for (round, plan) in [Plan { lasts: fifth, ..plan }, rest].into_iter().enumerate() {
        let clients = (0..CONNECTIONS).map(|_| client()).collect();
        let chaos = Chaos::begin(notes, plan, floods.clone());
        told.extend(drive(clients, plan, round as u64).await);
        deeds.extend(chaos.end().await);
        fill_all(&looks_on).await;
    }
    let mut findings = Findings { descriptors: (before, at_rest().await), ..Findings::default() };
    // Each crash record that waits for the symbolizer keeps descriptors open.
    let began = Instant::now();
    while has_more_descriptors(&findings) && began.elapsed() < PATIENCE {
        findings.descriptors.1 = at_rest().await;
    }
    (told, deeds, findings)
}

/// Returns the lowest of several counts of this process's open descriptors, because recycling a worker briefly uses
/// more descriptors. Memory is not measured, because this process also holds the clients' records, which keep growing.
async fn at_rest() -> usize {
    let mut counts = Vec::new();
    while counts.len() < LOOKS_AT_REST {
        counts.push(descriptors(std::process::id()));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    counts.into_iter().min().expect("at least one measurement")
}

/// Tasks that inject faults into the embedded supervisor until the run is over.
struct Chaos {
    is_over: std::sync::Arc<AtomicBool>,
    threads: Vec<tokio::task::JoinHandle<Vec<Deed>>>,
}

impl Chaos {
    fn begin(notes: &Path, plan: Plan, client: Client) -> Self {
        let is_over = std::sync::Arc::new(AtomicBool::new(false));
        let disturbs = Disturbs { notes: notes.to_owned(), has_hangs: plan.has_hangs };
        let disturbed = is_over.clone();
        let until = is_over.clone();
        let threads = vec![
            tokio::task::spawn_blocking(move || disturbs.disturb(Random::new(plan.seed), &disturbed)),
            tokio::task::spawn_blocking(move || flood(&client, Random::new(!plan.seed), &until)),
        ];
        Self { is_over, threads }
    }

    async fn end(mut self) -> Vec<Deed> {
        self.is_over.store(true, Ordering::SeqCst);
        let mut deeds = Vec::new();
        for thread in std::mem::take(&mut self.threads) {
            deeds.extend(thread.await.expect("chaos does not panic"));
        }
        deeds
    }
}

/// Stops injecting faults if the run panics. Otherwise, the runtime would wait for the tasks forever.
impl Drop for Chaos {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

struct Disturbs {
    notes: PathBuf,
    has_hangs: bool,
}

impl Disturbs {
    fn disturb(&self, mut random: Random, is_over: &AtomicBool) -> Vec<Deed> {
        let mut done = Vec::new();
        while !is_over.load(Ordering::SeqCst) {
            let at_us = now_us();
            done.push((at_us, self.deed(&mut random)));
            pause(random.below(150));
        }
        done
    }

    fn deed(&self, random: &mut Random) -> &'static str {
        let ends = |pid, signal, name| {
            kill_pid(pid, signal);
            name
        };
        let stops = |pid, ms, name| {
            kill_pid(pid, Signal::SIGSTOP);
            pause(ms);
            kill_pid(pid, Signal::SIGCONT);
            name
        };
        let chance = random.below(100);
        let keeper = |random: &mut Random| self.above(random, "bulkhead-keeper");
        match chance {
            0..70 => {
                self.worker(random).map_or("no worker", |pid| ends(pid, Signal::SIGKILL, "worker killed"))
            }
            70..80 => self
                .worker(random)
                .map_or("no worker", |pid| ends(pid, Signal::SIGTERM, "SIGTERM to a worker")),
            80..92 if self.has_hangs => {
                let ms = random.below(1_500);
                self.worker(random).map_or("no worker", |pid| stops(pid, ms, "worker stopped and continued"))
            }
            92..96 => keeper(random)
                .map_or("no keeper", |pid| stops(pid, random.below(300), "keeper stopped and continued")),
            96..97 => keeper(random).map_or("no keeper", |pid| ends(pid, Signal::SIGKILL, "keeper killed")),
            97..98 => self
                .above(random, "bulkhead-guard")
                .map_or("no guard", |pid| ends(pid, Signal::SIGKILL, "guard killed")),
            _ => "nothing",
        }
    }

    /// Returns the PID of a random worker or template.
    fn worker(&self, random: &mut Random) -> Option<u32> {
        let workers = processes_with(text(&self.notes));
        let workers: Vec<u32> = workers.into_iter().filter(|pid| *pid != std::process::id()).collect();
        (!workers.is_empty()).then(|| workers[random.below(workers.len())])
    }

    /// Picks a random worker and returns the PID of its ancestor named `wanted`, which is the keeper or the guard.
    fn above(&self, random: &mut Random, wanted: &str) -> Option<u32> {
        let worker = self.worker(random)?;
        let mut above = std::iter::successors(Some(worker), |pid| parent(*pid).filter(|pid| *pid > 1));
        above.find(|pid| name(*pid).is_some_and(|name| name == wanted))
    }
}

/// Submits bursts of jobs that name an unknown bulkhead or are dropped immediately.
fn flood(client: &Client, mut random: Random, is_over: &AtomicBool) -> Vec<Deed> {
    let mut done = Vec::new();
    while !is_over.load(Ordering::SeqCst) {
        let at_us = now_us();
        let burst = match random.below(2) {
            0 => "a flood of jobs whose bulkhead is missing",
            _ => "a flood of immediately dropped jobs",
        };
        let bulkhead = if burst.ends_with("missing") { "missing" } else { "ahead" };
        on_this_thread(async {
            let job = || client.job(bulkhead, vec![0; 1_000]).operation("meet 0");
            let mut jobs = Vec::new();
            for _ in 0..1_000 {
                jobs.push(job().start().await);
            }
            drop(jobs);
        });
        done.push((at_us, burst));
        pause(random.below(500));
    }
    done
}
