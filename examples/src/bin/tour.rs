//! The tour: supervises the examples, sends real work and hostile work at the same time, shows what
//! became of every job, and checks that nothing but the hostile jobs came to harm.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use bulkhead_client::{Client, Job, JobError, Reply};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A job, and what must become of it.
struct Case {
    bulkhead: &'static str,
    operation: &'static str,
    tenant: String,
    what: String,
    payload: Vec<u8>,
    /// The outcomes that are as promised.
    expected: &'static [&'static str],
}

impl Case {
    fn good(bulkhead: &'static str, what: impl Into<String>, payload: impl Into<Vec<u8>>) -> Self {
        let (what, payload) = (what.into(), payload.into());
        Self { bulkhead, operation: "", tenant: String::new(), what, payload, expected: &["ok"] }
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
    let folder = tempfile::tempdir()?;
    let (mut supervisor, socket) = start(&programs, folder.path())?;
    println!("bulkhead-supervisor runs as process {}\n", supervisor.id());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let result = runtime.block_on(work(&socket, folder.path()));
    Command::new("kill").args(["-TERM", &supervisor.id().to_string()]).status()?;
    let status = supervisor.wait()?;
    result?;
    if !status.success() {
        return Err(format!("the supervisor ended with {status}").into());
    }
    let left = workers_left(folder.path())?;
    if left > 0 {
        return Err(format!("{left} processes are left").into());
    }
    println!("the supervisor has stopped with status 0, and no process of it is left");
    Ok(())
}

/// Builds whatever the tour starts, in this program's own profile, and returns where it is.
fn build() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().ok_or("this program is nowhere")?.to_owned();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--workspace", "--bins"]);
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    let status = cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).status()?;
    if status.success() { Ok(folder) } else { Err("the workspace does not build".into()) }
}

fn start(programs: &Path, folder: &Path) -> Result<(Child, PathBuf)> {
    let socket = folder.join("jobs.sock");
    let config = include_str!("../../workers.toml")
        .replace("../target/release", programs.to_str().ok_or("an odd path")?)
        .replace("/tmp/bulkhead-example/jobs.sock", socket.to_str().ok_or("an odd path")?);
    let file = folder.join("workers.toml");
    std::fs::write(&file, config)?;
    let log = std::fs::File::create(folder.join("log"))?;
    let child = Command::new(programs.join("bulkhead-supervisor"))
        .arg("--config")
        .arg(&file)
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()?;
    let began = Instant::now();
    while !socket.exists() {
        if began.elapsed() > Duration::from_secs(20) {
            return Err("the supervisor does not start; see its log".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok((child, socket))
}

fn workers_left(folder: &Path) -> Result<usize> {
    let marker = folder.to_string_lossy().into_owned();
    let mut left = 0;
    for entry in std::fs::read_dir("/proc")? {
        let line = std::fs::read(entry?.path().join("cmdline")).unwrap_or_default();
        left += usize::from(String::from_utf8_lossy(&line).contains(&marker));
    }
    Ok(left)
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
    cases.push(Case { operation: "echo", ..Case::good("hostile", "a job among the hostile ones", "hello") });

    let crash = std::fs::read(data.join("crash.gif"))?;
    for _ in 0..3 {
        let case = Case::good("thumbnail", "crash.gif: a real memory bug", crash.clone());
        cases.push(Case { expected: &["crashed/signal"], ..case });
    }
    let runaway = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n";
    let case = Case::good("sql", "a query that never ends", runaway);
    cases.push(Case { tenant: "mallory".into(), expected: &["deadline_exceeded/running"], ..case });
    let hungry = "WITH RECURSIVE n(i, t) AS (SELECT 1, hex(zeroblob(1000000)) UNION ALL SELECT i + 1, hex(zeroblob(1000000)) \
                  FROM n WHERE i < 100000) SELECT count(*) FROM (SELECT DISTINCT t || i AS u FROM n ORDER BY u)";
    let case = Case::good("sql", "a query that eats memory", hungry);
    let ends = &["failed/out_of_memory", "deadline_exceeded/running", "crashed/signal"];
    cases.push(Case { tenant: "mallory".into(), expected: ends, ..case });
    cases.push(Case::hostile("abort", &["crashed/signal"]));
    cases.push(Case::hostile("exit", &["crashed/exit"]));
    cases.push(Case::hostile("panic", &["failed/panic"]));
    cases.push(Case::hostile("hang", &["deadline_exceeded/running"]));
    cases.push(Case::hostile("spin", &["deadline_exceeded/running"]));
    cases.push(Case::hostile("fork", &["deadline_exceeded/running"]));
    cases.push(Case::hostile("leak", &["crashed/signal", "deadline_exceeded/running"]));
    cases.push(Case::hostile("flood", &["ok", "deadline_exceeded/running"]));
    Ok(cases)
}

async fn work(socket: &Path, folder: &Path) -> Result<()> {
    let client = Client::connect(socket).await?;
    let (hostile, honest): (Vec<_>, Vec<_>) =
        cases()?.into_iter().partition(|case| case.bulkhead == "hostile");
    // At the same time; but the hostile ones one after the other, since what waits behind a job that hangs
    // would end in the queue.
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
            let job = job(&client, &case);
            running.push((case, tokio::spawn(job.send())));
        }
        let mut done = Vec::new();
        for (case, task) in running {
            done.push((case, task.await));
        }
        done
    };
    let (hostile, honest) = tokio::join!(sequence, burst);
    let mut jobs = Vec::new();
    for (case, result) in honest {
        jobs.push((case, result?));
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
            std::fs::write(folder.join(format!("{}.png", case.what)), reply.payload())?;
        }
    }
    println!("\n{answered} jobs, each with its outcome");
    if surprises > 0 {
        return Err(format!("{surprises} jobs ended otherwise").into());
    }
    println!("every honest job was answered, every hostile one contained");
    Ok(())
}

fn job(client: &Client, case: &Case) -> Job {
    client.job(case.bulkhead, case.payload.clone()).operation(case.operation).tenant(&case.tenant)
}

async fn send(client: &Client, case: &Case) -> std::result::Result<Reply, JobError> {
    job(client, case).send().await
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
