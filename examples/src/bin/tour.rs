//! Builds and starts a supervisor with the bulkheads of `workers.toml`, and submits ordinary and hostile jobs at the
//! same time. Prints each outcome. Fails if an outcome is not as expected, or if a process is left after the supervisor
//! has stopped. Run by hand with `cargo run`. The checks do not depend on the speed or load of the machine.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use bulkhead_client::{Client, Job, JobError, Reply};
use bulkhead_linux::process_tree::descendants_of;
use rustix::process::{Pid, Signal, getpid, kill_process, set_child_subreaper};

/// Maximum time to wait for the start or stop of the supervisor, or for an ordinary job, on a busy machine. On an idle
/// machine, each of these takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(300);

/// Deadline for jobs that never end. If such a job expires before it leaves the queue, it is sent again with twice the
/// deadline.
const ENDLESS: Duration = Duration::from_secs(1);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A job and the expected outcomes.
struct Case {
    bulkhead: &'static str,
    operation: &'static str,
    tenant: String,
    what: String,
    payload: Vec<u8>,
    /// Acceptable outcomes.
    expected: &'static [&'static str],
    /// True if the job never ends on its own.
    is_endless: bool,
}

impl Case {
    fn good(bulkhead: &'static str, what: impl Into<String>, payload: impl Into<Vec<u8>>) -> Self {
        let (what, payload) = (what.into(), payload.into());
        let tenant = String::new();
        Self { bulkhead, operation: "", tenant, what, payload, expected: &["ok"], is_endless: false }
    }

    fn endless(self) -> Self {
        Self { expected: &["deadline_exceeded/running"], is_endless: true, ..self }
    }

    fn hostile(operation: &'static str, expected: &'static [&'static str]) -> Self {
        Self { operation, expected, ..Self::good("hostile", "", "") }
    }
}

fn main() -> ExitCode {
    match tour() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nnot as promised: {error}");
            ExitCode::FAILURE
        }
    }
}

fn tour() -> Result<()> {
    let programs = build()?;
    // Makes this process adopt orphans, so that it can detect any process that is left behind.
    set_child_subreaper(Some(getpid()))?;
    let folder = tempfile::tempdir()?;
    let thumbnails = programs.join("tour-thumbnails");
    std::fs::create_dir_all(&thumbnails)?;
    let (mut supervisor, socket) = start(&programs, folder.path())?;
    println!("bulkhead-supervisor is running (PID {})\n", supervisor.0.id());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(work(&socket, &thumbnails))?;
    println!("the thumbnails are in {}", thumbnails.display());
    if let Some(status) = supervisor.0.try_wait()? {
        return Err(format!("the supervisor exited unexpectedly with {status}").into());
    }
    let ran = processes()?.len();
    supervisor.stop()?;
    nothing_left()?;
    println!("the supervisor has exited with status 0, and none of the {ran} processes is left");
    Ok(())
}

/// The supervisor process. Killed if the tour ends early.
struct Supervisor(Child);

impl Supervisor {
    /// Stops the supervisor and waits until the process has exited.
    fn stop(&mut self) -> Result<()> {
        let pid = i32::try_from(self.0.id())?;
        kill_process(Pid::from_raw(pid).ok_or("the supervisor has no valid pid")?, Signal::TERM)?;
        let began = Instant::now();
        loop {
            match self.0.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("the supervisor exited with {status}").into()),
                None if began.elapsed() > PATIENCE => return Err("the supervisor is still running".into()),
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // When the supervisor is killed, the keeper kills all other processes.
        if let Ok(None) = self.0.try_wait() {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Returns the supervisor, the keeper, the workers, and all descendants of the workers.
fn processes() -> Result<Vec<u32>> {
    Ok(descendants_of(std::process::id())?)
}

fn nothing_left() -> Result<()> {
    let began = Instant::now();
    loop {
        let left = processes()?;
        if left.is_empty() {
            return Ok(());
        }
        if began.elapsed() > PATIENCE {
            return Err(format!("processes are still running after the stop: {left:?}").into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Builds the programs with this program's build profile. Returns the folder that contains the programs.
fn build() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().ok_or("the path of this program has no folder")?.to_owned();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--bins"]);
    cargo.args(["-p", "bulkhead-supervisor", "-p", "bulkhead-worker", "-p", "bulkhead-examples"]);
    match folder.file_name().and_then(|name| name.to_str()) {
        None | Some("debug") => {}
        Some(profile) => drop(cargo.args(["--profile", profile])),
    }
    println!("building the supervisor and the examples");
    let status = cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).status()?;
    if status.success() { Ok(folder) } else { Err("failed to build the workspace".into()) }
}

fn start(programs: &Path, folder: &Path) -> Result<(Supervisor, PathBuf)> {
    let socket = folder.join("jobs.sock");
    let config = include_str!("../../workers.toml")
        .replace("../target/release", programs.to_str().ok_or("the path is not UTF-8")?)
        .replace("/tmp/bulkhead-example/jobs.sock", socket.to_str().ok_or("the path is not UTF-8")?);
    let file = folder.join("workers.toml");
    std::fs::write(&file, config)?;
    let log = std::fs::File::create(folder.join("log"))?;
    let child = Command::new(programs.join("bulkhead-supervisor"))
        .arg("--config")
        .arg(&file)
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()?;
    let mut supervisor = Supervisor(child);
    let began = Instant::now();
    while std::os::unix::net::UnixStream::connect(&socket).is_err() {
        let log = || std::fs::read_to_string(folder.join("log")).unwrap_or_default();
        if let Some(status) = supervisor.0.try_wait()? {
            return Err(format!("the supervisor exited with {status}:\n{}", log()).into());
        }
        if began.elapsed() > PATIENCE {
            return Err(format!("the supervisor did not start in time:\n{}", log()).into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok((supervisor, socket))
}

fn cases() -> Result<Vec<Case>> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
    let mut cases = Vec::new();
    let mut pictures: Vec<_> = std::fs::read_dir(data.join("pictures"))?.collect::<std::io::Result<_>>()?;
    pictures.sort_by_key(std::fs::DirEntry::file_name);
    for picture in pictures {
        let name = picture.file_name().to_string_lossy().into_owned();
        cases.push(Case::good("thumbnail", name, std::fs::read(picture.path())?));
    }
    for tenant in ["acme", "globex", "initech"] {
        let sql = "SELECT name, sum(count * cents) / 100.0 AS turnover FROM orders \
                   JOIN product ON product.id = orders.product GROUP BY name ORDER BY turnover DESC";
        cases.push(Case { tenant: tenant.into(), ..Case::good("sql", "turnover by product", sql) });
    }
    let numbers: Vec<String> =
        (0..5000_u32).map(|i| (i.wrapping_mul(2_654_435_761) % 100_000).to_string()).collect();
    cases.push(Case::good("sort", "5,000 numbers", numbers.join("\n")));
    cases.push(Case { operation: "echo", ..Case::good("hostile", "a job among hostile jobs", "hello") });

    let crash = std::fs::read(data.join("crash.gif"))?;
    for _ in 0..3 {
        let case = Case::good("thumbnail", "crash.gif: a real memory bug", crash.clone());
        cases.push(Case { expected: &["crashed/signal"], ..case });
    }
    let case = Case::good("thumbnail", "crash.pic: CVE-2023-43898", std::fs::read(data.join("crash.pic"))?);
    cases.push(Case { expected: &["crashed/signal"], ..case });
    let case = Case::good("thumbnail", "text, not a picture", "hello");
    cases.push(Case { expected: &["failed/not_an_image"], ..case });
    let runaway = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n";
    let hungry = "SELECT hex(zeroblob(200000000))";
    let mallory = |what: &str, sql: &str| Case { tenant: "mallory".into(), ..Case::good("sql", what, sql) };
    let case = mallory("a query that eats memory", hungry);
    cases.push(Case { expected: &["failed/out_of_memory"], ..case });
    let case = mallory("a query with a syntax error", "SELEKT 1");
    cases.push(Case { expected: &["failed/sql"], ..case });
    // The endless jobs come last, because they occupy both workers until their deadlines.
    cases.push(mallory("a query that never ends", runaway).endless());
    let case = mallory("the same, watched by its worker", runaway).endless();
    cases.push(Case { operation: "polite", ..case });
    cases.push(Case::hostile("abort", &["crashed/signal"]));
    cases.push(Case::hostile("segfault", &["crashed/signal"]));
    cases.push(Case::hostile("exit", &["crashed/exit"]));
    cases.push(Case::hostile("exit99", &["crashed/exit"]));
    cases.push(Case::hostile("panic", &["failed/panic"]));
    cases.push(Case::hostile("hang", &[]).endless());
    cases.push(Case::hostile("spin", &[]).endless());
    cases.push(Case::hostile("fork", &[]).endless());
    cases.push(Case::hostile("leak", &["crashed/signal"]));
    cases.push(Case::hostile("flood", &["ok"]));
    Ok(cases)
}

async fn work(socket: &Path, thumbnails: &Path) -> Result<()> {
    let client = Client::connect(socket).await?;
    let (hostile, honest): (Vec<_>, Vec<_>) =
        cases()?.into_iter().partition(|case| case.bulkhead == "hostile");
    // Both sequences run at the same time. Within a sequence, hostile jobs run one after another, because a job queued
    // behind a hanging job would expire.
    let sequence = async {
        let mut done = Vec::new();
        for case in hostile {
            let result = send(&client, &case).await;
            done.push((case, result));
        }
        done
    };
    let burst = async {
        let mut running = Vec::new();
        for case in honest {
            let client = client.clone();
            running.push(tokio::spawn(async move {
                let result = send(&client, &case).await;
                (case, result)
            }));
        }
        let mut done = Vec::new();
        for task in running {
            done.push(task.await);
        }
        done
    };
    let (hostile, honest) = tokio::join!(sequence, burst);
    let mut jobs = Vec::new();
    for done in honest {
        jobs.push(done?);
    }
    jobs.extend(hostile);
    println!("{:<10} {:<9} {:<32} {:<28} {:>8}", "BULKHEAD", "TENANT", "JOB", "OUTCOME", "RAN");
    let mut surprises = 0;
    let mut answered = 0;
    for (case, result) in jobs {
        let name = outcome(&result);
        answered += usize::from(outcome_of(&result).is_some());
        let what = if case.what.is_empty() { case.operation.to_owned() } else { case.what.clone() };
        let ran = outcome_of(&result).map_or(0.0, |outcome| outcome.ran.as_secs_f64() * 1e3);
        let mark = if case.expected.contains(&name.as_str()) { "" } else { "  <- not as promised" };
        surprises += usize::from(!mark.is_empty());
        println!("{:<10} {:<9} {what:<32} {name:<28} {ran:>5.0} ms{mark}", case.bulkhead, case.tenant);
        if let (Ok(reply), "thumbnail") = (&result, case.bulkhead) {
            if !reply.payload().starts_with(b"\x89PNG\r\n\x1a\n") {
                return Err(format!("the thumbnail of {} is not a PNG file", case.what).into());
            }
            std::fs::write(thumbnails.join(format!("{}.png", case.what)), reply.payload())?;
        }
    }
    println!("\n{answered} jobs, each with an outcome");
    if surprises > 0 {
        return Err(format!("{surprises} jobs had an unexpected outcome").into());
    }
    println!("every honest job was answered, and every hostile job was contained");
    Ok(())
}

fn job(client: &Client, case: &Case) -> Job {
    client.job(case.bulkhead, case.payload.clone()).operation(case.operation).tenant(&case.tenant)
}

async fn send(client: &Client, case: &Case) -> std::result::Result<Reply, JobError> {
    let mut deadline = if case.is_endless { ENDLESS } else { PATIENCE };
    loop {
        let result = job(client, case).deadline(deadline).send().await;
        // A job that expired in the queue has not been tested, so it is sent again.
        if deadline >= PATIENCE || outcome(&result) != "deadline_exceeded/queued" {
            return result;
        }
        deadline *= 2;
    }
}

fn outcome_of(result: &std::result::Result<Reply, JobError>) -> Option<&bulkhead_client::Outcome> {
    match result {
        Ok(reply) => Some(reply.outcome()),
        Err(error) => error.outcome(),
    }
}

fn outcome(result: &std::result::Result<Reply, JobError>) -> String {
    match outcome_of(result) {
        None => "lost".to_owned(),
        Some(outcome) => match outcome.verdict.reason() {
            Some(reason) => format!("{}/{reason}", outcome.verdict.name()),
            None => outcome.verdict.name().to_owned(),
        },
    }
}
