//! `bulkhead-bench`: what the supervisor costs, as ratios against the bare limit, in one run.
//!
//! The bare chain is a client with a waiter for each request, a relay, and an echo: three processes over
//! Unix sockets that do nothing but pass bytes on, as many at once as there are. The real chain is a
//! client, the supervisor, and a worker built with the SDK. Both run in turns, round after round, so that
//! whatever else the machine does hits both; medians of the rounds are compared.

mod attackers;
mod attacks;
mod bare;
mod chains;
mod confinement;
mod embedded;
mod fork_server;
mod fresh;
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

/// Any failure ends a measurement: a figure with a failure in it is worth nothing.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Measures the supervisor against the bare chain of sockets.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Measure just enough to see that everything can be measured; the figures are worth nothing.
    #[arg(long)]
    smoke: bool,
    /// Print one JSON object at the end, with each round, instead of a line for each figure as it is measured.
    #[arg(long)]
    json: bool,
    /// Draw the ratios, round by round, beside their targets.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Measure only what has this in its name.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Measure what takes minutes as well. Attacks are only measured when they are named: `--only attack`.
    #[arg(long, conflicts_with = "only")]
    all: bool,
    /// How often each measurement is taken, bare and real in turns [default: 9, or as often as a few seconds allow].
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Measure what people use today on the same work, in turns with the supervisor: tonic, ipc-channel,
    /// ProcessPoolExecutor, pebble, loky and workerpool. Fetches and builds them first, into the folder `target`.
    #[arg(long)]
    peers: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

/// The parts of the chains, each a process of its own.
#[derive(Debug, Subcommand)]
#[command(hide = true)]
enum Role {
    /// Passes bytes on, both ways.
    #[command(hide = true)]
    Relay {
        /// Where to listen.
        socket: PathBuf,
        /// Where to connect.
        echo: PathBuf,
    },
    /// Passes requests on to many echoes.
    #[command(hide = true)]
    Spread {
        /// Where to listen.
        socket: PathBuf,
        /// How many.
        echoes: usize,
    },
    /// Starts a program that dies at once, again and again.
    #[command(hide = true)]
    StartAndDie,
    /// That program.
    #[command(hide = true)]
    Die,
    /// Scrapes metrics and follows events until it is killed.
    #[command(hide = true)]
    Watch {
        /// The admin socket.
        admin: PathBuf,
    },
    /// A hostile client, or a busy loop in its place.
    #[command(hide = true)]
    Attack {
        /// Which attack.
        kind: String,
        /// The jobs socket.
        socket: PathBuf,
        /// Stay on the first processor.
        #[arg(long)]
        pin: bool,
    },
    /// A hostile worker.
    #[command(hide = true)]
    HostileWorker {
        /// Which attack.
        kind: String,
        /// Stay on the first processor.
        #[arg(long)]
        pin: bool,
    },
    /// Has metrics and events of nothing.
    #[command(hide = true)]
    Watched {
        /// Where to listen.
        socket: PathBuf,
        /// Bytes of a page of metrics.
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
    if let Some(file) = &args.svg {
        std::fs::write(file, plot::draw(&figures)).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}
