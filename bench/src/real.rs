//! Starts the real chain, which is a supervisor configured for the bench and a worker built with the SDK. Also sends
//! single jobs for the measurements in other modules. `load` sends many jobs and measures their latencies.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bulkhead_client::Client;
use tempfile::TempDir;

use crate::Result;
use crate::processes::{self, Process};

/// Two bulkheads that run one job at a time: one with prefetching and one without. Their queues have room for all
/// concurrent jobs.
pub(crate) const NARROW: &str = "narrow";
pub(crate) const WITHOUT: &str = "narrow-without";

/// Names of bulkheads. Each name states the bulkhead's purpose.
pub(crate) const ONE: &str = "one";
pub(crate) const HANGS: &str = "hangs";
pub(crate) const CRASHES: &str = "crashes";

/// Name of a bulkhead that differs from [`CRASHES`] only in that its workers are forked from a template.
pub(crate) const FORKED_CRASHES: &str = "forked-crashes";

/// Three honest bulkheads, and a fourth whose workers crash in some measurements.
pub(crate) const CROWD: [&str; 4] = ["crowd-a", "crowd-b", "crowd-c", "crowd-d"];

/// Returns the name of the bulkhead that runs `in_flight` jobs at once.
pub(crate) fn wide(in_flight: usize) -> String {
    format!("wide-{in_flight}")
}

/// Deadline of the jobs in [`HANGS`].
pub(crate) const HANG_DEADLINE: Duration = Duration::from_millis(100);
/// Grace period after [`HANG_DEADLINE`].
pub(crate) const HANG_GRACE: Duration = Duration::from_millis(20);

/// A running supervisor and a client that is connected to it.
pub(crate) struct Chain {
    pub(crate) supervisor: Process,
    pub(crate) client: Client,
    folder: TempDir,
}

impl Chain {
    /// Starts a supervisor with the bench's bulkheads, and waits until most of the bulkheads have run a job.
    pub(crate) async fn start_all(programs: &Path) -> Result<Self> {
        let chain = Self::start(programs, &config()?).await?;
        for bulkhead in [ONE, &wide(64), &wide(1024), HANGS, CRASHES, FORKED_CRASHES] {
            chain.client.job(bulkhead, "ready?").deadline(Duration::from_secs(10)).send().await?;
        }
        Ok(chain)
    }

    /// Starts a supervisor with this configuration, which must set the path of the jobs socket to `jobs.sock`.
    pub(crate) async fn start(programs: &Path, config: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let supervisor = Process::start(&mut supervisor(programs, folder.path(), config)?)?;
        let socket = folder.path().join("jobs.sock");
        processes::wait_for(&socket)?;
        let client = Client::connect(&socket).await?;
        Ok(Self { supervisor, client, folder })
    }

    /// Sends a job and returns its result.
    pub(crate) async fn call(&self, bulkhead: &str, payload: &[u8]) -> Result<Vec<u8>> {
        Ok(self.client.job(bulkhead, payload).send().await?.into_payload())
    }

    /// Sends a job and writes the payload directly into the send buffer. Returns the size of the result in bytes.
    pub(crate) async fn call_copied(&self, bulkhead: &str, payload: Arc<Vec<u8>>) -> Result<usize> {
        let job = self.client.job(bulkhead, "");
        let job = job.payload_in_place(payload.len(), move |place| place.copy_from_slice(&payload));
        Ok(job.send().await?.payload().len())
    }

    /// Sends a job. If memory files are available, uses them for the payload and the result. Returns the size of
    /// the result in bytes.
    pub(crate) async fn call_mapped(&self, bulkhead: &str, bytes: usize) -> Result<usize> {
        let job = self.client.job(bulkhead, "").payload_in_place(bytes, |place| place.fill(b'x'));
        let reply = job.operation("mapped").map_result().send().await?;
        Ok(reply.mapped().map_or(reply.payload().len(), |mapped| mapped.len()))
    }

    /// Returns the path of the jobs socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("jobs.sock")
    }

    /// Sends a job that hangs, and another job after it. Returns the time from the end of the first job's grace
    /// period to the second job's result, in ms.
    pub(crate) async fn hang(&self, bulkhead: &str) -> Result<f64> {
        let began = Instant::now();
        let hanging = self.client.job(bulkhead, "").operation("hang").start().await?;
        let next = self.client.job(bulkhead, "").deadline(Duration::from_secs(10)).start().await?;
        if hanging.await.is_ok() {
            return Err("a job that should have hung succeeded".into());
        }
        next.await?;
        Ok(began.elapsed().saturating_sub(HANG_DEADLINE + HANG_GRACE).as_secs_f64() * 1e3)
    }

    /// Returns the path of the admin socket.
    pub(crate) fn admin(&self) -> PathBuf {
        self.folder.path().join("admin.sock")
    }

    /// Returns the PID of a bulkhead's only worker.
    pub(crate) async fn worker(&self, bulkhead: &str) -> Result<u32> {
        let reply = self.client.job(bulkhead, "").send().await?;
        Ok(reply.outcome().worker_pid.ok_or("no worker served the job")?)
    }
}

/// Checks a configuration by running the supervisor with `--check`. The inner error contains the problems that the
/// supervisor found in the configuration.
pub(crate) fn check(programs: &Path, config: &str) -> Result<std::result::Result<(), String>> {
    let folder = tempfile::tempdir()?;
    let output = supervisor(programs, folder.path(), config)?.arg("--check").output()?;
    if output.status.success() {
        return Ok(Ok(()));
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let errors: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("error: ")).collect();
    Ok(Err(if errors.is_empty() { text.trim_end().to_owned() } else { errors.join("; ") }))
}

/// Returns a command that starts a supervisor in `folder` with this configuration.
fn supervisor(programs: &Path, folder: &Path, config: &str) -> Result<Command> {
    let file = folder.join("workers.toml");
    std::fs::write(&file, config)?;
    let mut command = Command::new(programs.join("bulkhead-supervisor"));
    command.args(["--log-level", "error", "--config"]).arg(file).stdin(Stdio::null());
    Ok(command)
}

/// Returns the configuration keys of a bulkhead whose jobs hang.
pub(crate) fn hanging() -> String {
    format!(
        "deadline = \"{}ms\"\ndeadline_max = \"10s\"\ngrace = \"{}ms\"\nmax_queue = 1",
        HANG_DEADLINE.as_millis(),
        HANG_GRACE.as_millis()
    )
}

fn config() -> Result<String> {
    let worker = processes::worker()?;
    let bulkhead = |name: &str, keys: &str| format!("[bulkhead.{name}]\ncommand = [{worker}]\n{keys}\n");
    Ok([
        "[supervisor]\nsocket = \"jobs.sock\"\n".to_owned(),
        bulkhead(ONE, "max_queue = 1"),
        bulkhead(&wide(64), "max_in_flight = 64"),
        bulkhead(NARROW, "max_queue = 64"),
        bulkhead(WITHOUT, "max_queue = 64\nlookahead = \"0s\""),
        bulkhead(&wide(1024), "max_in_flight = 1024"),
        bulkhead(HANGS, &hanging()),
        bulkhead(CRASHES, "max_queue = 8"),
        bulkhead(
            FORKED_CRASHES,
            "max_queue = 8\nstart = { mode = \"fork\" }\nsandbox = { profile = \"none\" }",
        ),
        CROWD[..3].iter().map(|name| bulkhead(name, "max_in_flight = 8\nmax_queue = 1000")).collect(),
        bulkhead(CROWD[3], "processes = 2\nmax_queue = 1000\nmax_in_flight = 1"),
    ]
    .concat())
}
