//! Compares the supervisor with other software that runs the same workloads (`--peers`), for `main`.
//!
//! Each peer is a separate process. It reads commands from standard input, and replies to each command with a
//! JSON object:
//!
//! - `latency BYTES TOTAL`: sends `TOTAL` requests one at a time; `{"us": median latency}`.
//! - `rate LANES BYTES TOTAL`: sends `TOTAL` requests, `LANES` at a time; `{"rate": answers per second}`.
//! - `recovery TOTAL`: kills the worker with SIGKILL `TOTAL` times; `{"ms": median time to the next answer}`.
//!
//! In all peers, one worker process returns its input. The programs in `bench/peers` restart the worker if their library
//! does not.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::rc::Rc;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process_group};

use crate::load::{self, median};
use crate::pairs::paired;
use crate::plan::Plan;
use crate::real::{self, Chain};
use crate::report::{Report, Target};
use crate::{Result, processes};

/// Prefix of the names of the measurements in this module.
const GROUP: &str = "peers";

/// Folder in which the peers are built, relative to the workspace.
const FOLDER: &str = "target/bench-peers";

/// Another program with which the supervisor is compared.
struct Peer {
    name: &'static str,
    from: Source,
    arguments: &'static [&'static str],
}

/// Package registry that provides a peer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Cargo,
    Pip,
    Npm,
}

const PEERS: [Peer; 7] = [
    Peer { name: "tonic, one hop", from: Source::Cargo, arguments: &["tonic", "1"] },
    Peer { name: "tonic, two hops", from: Source::Cargo, arguments: &["tonic", "2"] },
    Peer { name: "ipc-channel", from: Source::Cargo, arguments: &["ipc-channel"] },
    Peer { name: "ProcessPoolExecutor", from: Source::Pip, arguments: &["executor"] },
    Peer { name: "pebble", from: Source::Pip, arguments: &["pebble"] },
    Peer { name: "loky", from: Source::Pip, arguments: &["loky"] },
    Peer { name: "workerpool", from: Source::Npm, arguments: &[] },
];

/// A workload that every peer runs.
#[derive(Clone, Copy)]
struct Work {
    name: &'static str,
    unit: &'static str,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    Latency { bytes: usize },
    Rate { lanes: usize },
    Recovery,
}

const WORKS: [Work; 4] = [
    Work { name: "64 B, 1 in flight: p50", unit: "µs", kind: Kind::Latency { bytes: 64 } },
    Work { name: "64 B, 64 in flight", unit: "jobs/s", kind: Kind::Rate { lanes: 64 } },
    Work { name: "1 MiB, 1 in flight: p50", unit: "µs", kind: Kind::Latency { bytes: 1 << 20 } },
    Work { name: "time from worker death to next reply", unit: "ms", kind: Kind::Recovery },
];

/// Takes all requested measurements. Must be called within a `LocalSet`. Prints the peers that are not
/// available on this machine.
pub(crate) async fn all(plan: &Plan, report: &Report) -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(FOLDER);
    std::fs::create_dir_all(&folder)?;
    let chain = Rc::new(Chain::start_all(&processes::programs()?).await?);
    for source in [Source::Cargo, Source::Pip, Source::Npm] {
        let peers = PEERS.iter().filter(|peer| peer.from == source);
        let name = |peer: &Peer, work: &Work| format!("{GROUP}: {}, {}", peer.name, work.name);
        let peers: Vec<_> =
            peers.filter(|peer| WORKS.iter().any(|work| report.wants(&name(peer, work)))).collect();
        if peers.is_empty() {
            continue;
        }
        let program = match source.fetch(&folder) {
            Ok(program) => program,
            Err(error) => {
                let names: Vec<_> = peers.iter().map(|peer| peer.name).collect();
                eprintln!("NOT MEASURED: {}: {error}", names.join("; "));
                continue;
            }
        };
        for peer in peers {
            let mut driver = Driver::start(&program, &folder, peer)?;
            for work in WORKS.iter().filter(|work| report.wants(&name(peer, work))) {
                let (order, count) = work.kind.order(plan);
                let mut pairs = Vec::new();
                for _ in plan.rounds() {
                    let theirs =
                        driver.ask(&order).map_err(|error| format!("{}: {order}: {error}", peer.name))?;
                    pairs.push((theirs, work.kind.ours(&chain, count).await?));
                }
                report.add(paired(name(peer, work), work.unit, &pairs, Target::Told, f64::NAN));
            }
        }
    }
    Ok(())
}

impl Source {
    /// Fetches and builds the peers that come from this registry, if necessary. Returns the command that starts a
    /// peer.
    fn fetch(self, folder: &Path) -> Result<Vec<PathBuf>> {
        let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
        match self {
            Self::Cargo => {
                eprintln!("fetching and building tonic and ipc-channel");
                let mut cargo = Command::new(env!("CARGO"));
                cargo.args(["build", "--quiet", "--release", "--locked", "--manifest-path"]);
                run(cargo.arg(own.join("rust/Cargo.toml")).arg("--target-dir").arg(folder.join("rust")))?;
                Ok(vec![folder.join("rust/release/bulkhead-bench-peers")])
            }
            Self::Pip => {
                eprintln!("fetching pebble and loky");
                let python = folder.join("python/bin/python");
                if !python.exists() {
                    run(Command::new("python3").args(["-m", "venv"]).arg(folder.join("python")))?;
                }
                let packages = ["pebble==5.2.3", "loky==3.7.0"];
                run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(packages))?;
                Ok(vec![python, own.join("pool.py")])
            }
            Self::Npm => {
                eprintln!("fetching workerpool");
                let node = folder.join("node");
                std::fs::create_dir_all(&node)?;
                let mut npm = Command::new("npm");
                npm.args(["install", "--silent", "--no-audit", "--no-fund", "--no-save", "--prefix"]);
                run(npm.arg(&node).arg("workerpool@10.0.3"))?;
                Ok(vec!["node".into(), own.join("pool.mjs")])
            }
        }
    }
}

fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    // The output is captured, because standard output is reserved for the results of the bench.
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} failed ({}): {}", output.status, said.trim_end()).into())
}

impl Kind {
    /// Returns the command to send to a peer, and the number of requests or worker deaths that the command asks for.
    fn order(self, plan: &Plan) -> (String, usize) {
        match self {
            Self::Latency { bytes } => {
                let total = if bytes < 1 << 20 { plan.small / 4 } else { plan.large / 10 }.max(1);
                (format!("latency {bytes} {total}"), total)
            }
            Self::Rate { lanes } => {
                let total = (plan.many / 16).max(lanes);
                (format!("rate {lanes} 64 {total}"), total)
            }
            Self::Recovery => (format!("recovery {}", RECOVERIES), RECOVERIES),
        }
    }

    /// Runs this workload on the supervisor, and returns the measured value.
    async fn ours(self, chain: &Rc<Chain>, count: usize) -> Result<f64> {
        match self {
            Self::Latency { bytes } => Ok(echoes(chain, real::ONE, 1, count, bytes).await?.quantile(0.5)),
            Self::Rate { lanes } => Ok(echoes(chain, &real::wide(lanes), lanes, count, 64).await?.rate()),
            Self::Recovery => {
                let mut times = Vec::new();
                for _ in 0..count {
                    let began = Instant::now();
                    // Ignores the outcome, which is a crash.
                    let _ = chain.client.job(real::ONE, "").operation("die").send().await;
                    while chain.call(real::ONE, &[b'x'; 64]).await.is_err() {}
                    times.push(began.elapsed().as_secs_f64() * 1e3);
                }
                Ok(median(times))
            }
        }
    }
}

/// Number of times that the worker is killed per round.
const RECOVERIES: usize = 3;

async fn echoes(
    chain: &Rc<Chain>,
    bulkhead: &str,
    lanes: usize,
    total: usize,
    bytes: usize,
) -> Result<load::Round> {
    let (chain, payload, bulkhead): (_, _, Rc<str>) =
        (chain.clone(), Rc::new(vec![b'x'; bytes]), bulkhead.into());
    load::run(lanes, total, move || {
        let (chain, payload, bulkhead) = (chain.clone(), payload.clone(), bulkhead.clone());
        async move {
            let answer = chain.call(&bulkhead, &payload).await?;
            if answer.len() == payload.len() { Ok(()) } else { Err("too few bytes came back".into()) }
        }
    })
    .await
}

/// A running peer. Its process group is killed when this value is dropped.
struct Driver {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Driver {
    fn start(program: &[PathBuf], folder: &Path, peer: &Peer) -> Result<Self> {
        let [first, rest @ ..] = program else { return Err("no program".into()) };
        let mut command = Command::new(first);
        command.args(rest).args(peer.arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        // Standard error is discarded, because some of the compared systems print a long message whenever a worker
        // dies.
        command.stderr(Stdio::null()).process_group(0);
        if peer.from == Source::Npm {
            command.current_dir(folder.join("node"));
        }
        let mut process = command.spawn().map_err(|error| format!("{}: {error}", peer.name))?;
        let (orders, answers) = (process.stdin.take(), process.stdout.take());
        let (Some(orders), Some(answers)) = (orders, answers) else { return Err("no pipes".into()) };
        Ok(Self { process, orders, answers: BufReader::new(answers) })
    }

    fn ask(&mut self, order: &str) -> Result<f64> {
        writeln!(self.orders, "{order}")?;
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err(format!("the peer exited: {}", self.process.wait()?).into());
        }
        let answer: serde_json::Value = serde_json::from_str(&line)?;
        let value = answer.as_object().and_then(|object| object.values().next()?.as_f64());
        value.ok_or_else(|| format!("the peer replied {}", line.trim_end()).into())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(group) = Pid::from_raw(self.process.id() as i32) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.process.wait();
    }
}
