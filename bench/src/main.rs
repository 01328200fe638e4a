//! `bulkhead-bench` measures the cost of the supervisor. Parses the arguments, and then either takes the measurements
//! (`measures`, or `peers` with `--peers`) or runs as one of the helper processes of a measurement (`Role`).
//!
//! Most measurements compare the two chains of `chains`, a bare one and one with a supervisor; others have their own
//! baselines. The variants run in alternating rounds, so that other load on the machine affects both. `pairs` computes
//! the ratios.

mod attackers;
mod attacks;
mod bare;
mod chains;
mod confinement;
mod embedded;
mod fork_server;
mod fresh;
mod http;
mod isolation;
mod load;
mod measures;
mod neighbours;
mod pairs;
mod peers;
mod plan;
mod plot;
mod policy;
mod processes;
mod programs;
mod real;
mod report;
mod rounds;
mod scale;
mod watched;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::task::LocalSet;

use crate::plan::Plan;
use crate::report::Report;

/// Result of a measurement. An error ends the measurement, because figures that include failed jobs are worthless.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Measures the supervisor and compares it with a bare chain of sockets.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Run each measurement only briefly, to check that it works. The figures are worthless.
    #[arg(long)]
    smoke: bool,
    /// Print one JSON object with all rounds at the end, instead of one line for each figure.
    #[arg(long)]
    json: bool,
    /// Write an SVG image that shows the ratio of each round and the targets to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Take only the measurements whose name contains this text.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Include measurements that run for minutes. Attacks are measured only on request: `--only attack`.
    #[arg(long, conflicts_with = "only")]
    all: bool,
    /// Number of rounds of each measurement [default: 9, or the number that fits into a few seconds].
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Compare the supervisor with other software that does the same work: tonic, ipc-channel,
    /// ProcessPoolExecutor, pebble, loky and workerpool. Fetches and builds this software first, in the
    /// folder `target`.
    #[arg(long)]
    peers: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

/// Parts of the chains. Each part runs as a separate process.
#[derive(Debug, Subcommand)]
#[command(hide = true)]
enum Role {
    /// Forwards bytes in both directions.
    #[command(hide = true)]
    Relay {
        /// Socket on which the relay listens.
        socket: PathBuf,
        /// Socket of the echo process.
        echo: PathBuf,
    },
    /// Forwards requests to many echo processes.
    #[command(hide = true)]
    Spread {
        /// Socket on which this process listens.
        socket: PathBuf,
        /// Number of echo processes.
        echoes: usize,
    },
    /// Repeatedly starts a program that dies immediately.
    #[command(hide = true)]
    StartAndDie,
    /// Dies immediately.
    #[command(hide = true)]
    Die,
    /// Scrapes metrics and follows events until it is killed.
    #[command(hide = true)]
    Watch {
        /// Admin socket.
        admin: PathBuf,
    },
    /// Runs a hostile client, or a busy loop for comparison.
    #[command(hide = true)]
    Attack {
        /// Kind of attack.
        kind: String,
        /// Jobs socket of the supervisor.
        socket: PathBuf,
        /// Use only the first processor.
        #[arg(long)]
        pin: bool,
    },
    /// Runs a hostile worker.
    #[command(hide = true)]
    HostileWorker {
        /// Kind of attack.
        kind: String,
        /// Use only the first processor.
        #[arg(long)]
        pin: bool,
    },
    /// Serves meaningless metrics and events.
    #[command(hide = true)]
    Watched {
        /// Socket on which this process listens.
        socket: PathBuf,
        /// Size of the page of metrics, in bytes.
        page: usize,
    },
}

fn main() -> ExitCode {
    bulkhead_supervisor::keeper_main_if_asked();
    let args = Args::parse();
    let result = match &args.role {
        Some(Role::Relay { socket, echo }) => bare::relay(socket, echo),
        Some(Role::Spread { socket, echoes }) => bare::spread(socket, *echoes),
        Some(Role::StartAndDie) => neighbours::start_and_die(),
        Some(Role::Die) => std::process::abort(),
        Some(Role::Attack { kind, socket, pin }) => attack(*pin, || match kind.as_str() {
            "spin" => attackers::spin(),
            kind => attackers::client(kind, socket),
        }),
        Some(Role::HostileWorker { kind, pin }) => attack(*pin, || attackers::worker(kind)),
        Some(Role::Watch { admin }) => watched::watch(admin),
        Some(Role::Watched { socket, page }) => watched::stand_in(socket, *page),
        None => run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("failed to measure: {error}");
            ExitCode::FAILURE
        }
    }
}

fn attack(is_pinned: bool, attack: impl FnOnce() -> Result<()>) -> Result<()> {
    if is_pinned {
        attackers::pin()?;
    }
    attack()
}

fn run(args: &Args) -> Result<()> {
    let plan = if args.smoke { Plan::smoke() } else { Plan::full(args.rounds) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = Report::new(args.only.clone(), args.all, args.json);
    match args.peers {
        true => runtime.block_on(LocalSet::new().run_until(peers::all(&plan, &report)))?,
        false => runtime.block_on(measures::all(&plan, &report))?,
    }
    let figures = report.finish();
    if let (Some(only), true) = (&args.only, figures.is_empty()) {
        eprintln!("no figure matches `--only {only:?}`; docs/benchmarks.md lists the measurements");
    }
    if let Some(file) = &args.svg {
        std::fs::write(file, plot::draw(&figures)).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}
