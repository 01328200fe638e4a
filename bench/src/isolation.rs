//! Measures how much an attacker slows down honest jobs in the same bulkhead, as p50 and p99 latencies. Rounds with
//! and without the attack alternate. `measures` calls this module, `pairs` compares the rounds, and `report` compares
//! the results with the targets. `attacks` measures other attackers, such as hostile clients and workers of other
//! bulkheads.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use bulkhead_client::Client;
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::Result;
use crate::load;
use crate::pairs::paired;
use crate::processes::{self, Process};
use crate::report::{Figure, Report, Target};

/// Prefix of the names of the measurements in this module.
pub(crate) const GROUP: &str = "isolation";

/// Numbers of rounds and jobs for the measurements in this module.
pub(crate) struct Plan {
    /// Number of pairs of rounds. Each pair consists of one round without and one round with the attack.
    pub(crate) pairs: usize,
    /// Number of honest jobs per round.
    pub(crate) jobs: usize,
}

/// Number of honest jobs per burst.
const BURST: usize = 60;

/// Deadline of an honest job. A missed deadline is an error and ends the measurement.
const DEADLINE: Duration = Duration::from_secs(20);

/// Deadline of a job that attacks the template from which the job's worker was forked.
const ATTACK_DEADLINE: Duration = Duration::from_secs(3);

/// Deadline of a job that is supposed to be killed as soon as possible.
const KILL_DEADLINE: Duration = Duration::from_millis(5);

/// Time between the start of an attack and the first honest job.
const ATTACK_LEAD_TIME: Duration = Duration::from_millis(500);

/// An attack, and a comparable load that does not attack.
struct Scene {
    name: &'static str,
    /// Configuration of the bulkhead. The first value is used without the attack, and the second value with the attack.
    keys: [&'static str; 2],
    /// The worker program: either the role of a Rust program or the source code of a Python module.
    worker: Worker,
    /// Operation and deadline of the attacker's jobs. The first value is used without the attack, and the second value
    /// with the attack.
    attacker: [Option<(&'static str, Duration)>; 2],
    /// Number of jobs that the attacker keeps in flight. If this is 0, the attacker sends one job before each
    /// burst of honest jobs.
    attackers: usize,
    /// Operation of the honest jobs.
    operation: &'static str,
    /// Tenants of the honest jobs. Empty if the jobs have no tenants.
    tenants: &'static [&'static str],
    /// Number of honest jobs in flight.
    lanes: usize,
}

enum Worker {
    Rust(&'static str),
    Python(&'static str),
}

/// Python module whose `hold` operation holds the interpreter lock for about half a second in a single C call.
const HOLDS_LOCK: &str = "import bulkhead\n\
    def handle(payload, ctx):\n    \
        if ctx.operation == 'hold':\n        \
            sum(range(20_000_000))\n    \
        return payload\n\
    bulkhead.serve(handle)\n";

const PREFETCH: [&str; 2] = ["processes = 2\nlookahead = \"0s\"\n", "processes = 2\n"];
const TWICE_HOLD: [Option<(&str, Duration)>; 2] = [Some(("hold", DEADLINE)), Some(("hold", DEADLINE))];
const FORKED: &str = "processes = 3\nstart = { mode = \"fork\" }\nrlimits = { nproc = 1024 }\n";
const SHARES: &str = "processes = 8\ntenants = { max_in_flight = 2, max_queue = 100 }\n";
const SLOW_START: &str = "processes = 4\ntenants = { max_in_flight = 1, max_queue = 100 }\ngrace = \"0ms\"\n\
    restart = { backoff = \"1ms\", backoff_max = \"1ms\", max = 1000, within = \"1s\" }\n";
const OTHERS: &[&str] = &["anna", "bert", "cleo"];

const SCENES: [Scene; 5] = [
    Scene {
        name: "a call holds the interpreter's lock",
        keys: PREFETCH,
        worker: Worker::Python(HOLDS_LOCK),
        attacker: TWICE_HOLD,
        attackers: 0,
        operation: "",
        tenants: &[],
        lanes: BURST,
    },
    Scene {
        name: "a worker is stopped",
        keys: PREFETCH,
        worker: Worker::Rust("worker"),
        attacker: TWICE_HOLD,
        attackers: 0,
        operation: "",
        tenants: &[],
        lanes: BURST,
    },
    Scene {
        name: "a job starts chains of processes",
        keys: [FORKED, FORKED],
        worker: Worker::Rust("worker"),
        attacker: [Some(("loops", ATTACK_DEADLINE)), Some(("chains", ATTACK_DEADLINE))],
        attackers: 1,
        operation: "sleep 10",
        tenants: &[],
        lanes: 2,
    },
    Scene {
        name: "a slow tenant with an adaptive limit",
        keys: [
            SHARES,
            "processes = 8\ntenants = { max_in_flight = 2, max_queue = 100 }\nadaptive = { min = 1, max = 8, target = \"50ms\" }\n",
        ],
        worker: Worker::Rust("worker"),
        attacker: [Some(("sleep 60", DEADLINE)), Some(("sleep 60", DEADLINE))],
        attackers: 8,
        operation: "sleep 5",
        tenants: OTHERS,
        lanes: 6,
    },
    Scene {
        name: "a tenant whose workers are killed",
        keys: [SLOW_START, SLOW_START],
        worker: Worker::Rust("slow-worker"),
        attacker: [Some(("sleep 1000", DEADLINE)), Some(("hang", KILL_DEADLINE))],
        attackers: 4,
        operation: "sleep 15",
        tenants: OTHERS,
        lanes: 3,
    },
];

/// Takes all requested measurements. Must be called within a `LocalSet`.
pub(crate) async fn all(plan: &Plan, report: &Report) -> Result<()> {
    for scene in &SCENES {
        let names = ["p50", "p99"].map(|quantile| format!("{GROUP}: {}, others' {quantile}", scene.name));
        if !names.iter().any(|name| report.wants(name)) {
            continue;
        }
        let Plan { pairs, jobs } = *plan;
        let mut rounds = [Vec::new(), Vec::new()];
        for _ in 0..pairs {
            let without = round(scene, 0, jobs).await?;
            let with = round(scene, 1, jobs).await?;
            rounds[0].push((without.quantile(0.5), with.quantile(0.5)));
            rounds[1].push((without.quantile(0.99), with.quantile(0.99)));
        }
        let [p50, p99] = names;
        report.add(figure(p50, &rounds[0], Target::AtMost, 1.5));
        report.add(figure(p99, &rounds[1], Target::AtMostOrSlack, 2.0));
    }
    Ok(())
}

fn figure(name: String, pairs: &[(f64, f64)], target: Target, limit: f64) -> Figure {
    paired(name, "µs", pairs, target, limit)
}

/// Runs one round and returns the latencies of the honest jobs, all of which must succeed. `way` is 0 for a round
/// without the attack and 1 for a round with it.
async fn round(scene: &Scene, way: usize, jobs: usize) -> Result<load::Round> {
    let host = Host::start(scene, way).await?;
    // Warms up the workers, and lets the supervisor learn the run times of the jobs.
    others(scene, &host.client, jobs.min(200)).await?;
    if scene.attackers == 0 {
        return bursts(scene, way, &host.client, jobs).await;
    }
    let attack = scene.attacker[way].map(|attacker| Attack::begin(scene, attacker, &host.client));
    tokio::time::sleep(ATTACK_LEAD_TIME).await;
    let round = others(scene, &host.client, jobs).await;
    if let Some(attack) = attack {
        attack.0.iter().for_each(JoinHandle::abort);
    }
    round
}

/// Sends bursts of honest jobs. Each burst follows immediately after one of the attacker's jobs.
async fn bursts(scene: &Scene, way: usize, client: &Client, jobs: usize) -> Result<load::Round> {
    let mut rounds = Vec::new();
    for _ in 0..jobs.div_ceil(scene.lanes) {
        let attack = scene.attacker[way].map(|(operation, deadline)| {
            let job = client.job("shared", "x").operation(operation).deadline(deadline);
            tokio::task::spawn_local(job.send())
        });
        // Lets the attacker's task send its job first.
        tokio::task::yield_now().await;
        rounds.push(others(scene, client, scene.lanes).await?);
        if let Some(attack) = attack {
            attack.await??;
        }
    }
    Ok(load::Round::merged(rounds))
}

async fn others(scene: &Scene, client: &Client, jobs: usize) -> Result<load::Round> {
    let (client, operation, tenants) = (client.clone(), scene.operation, scene.tenants);
    let next = std::rc::Rc::new(std::cell::Cell::new(0_usize));
    load::run(scene.lanes, jobs, move || {
        let number = next.replace(next.get() + 1);
        let tenant = tenants.get(number % tenants.len().max(1)).copied().unwrap_or("");
        let job = client.job("shared", "x").operation(operation).tenant(tenant).deadline(DEADLINE);
        async move { Ok(job.send().await.map(drop)?) }
    })
    .await
}

/// Tasks that keep sending the attacker's jobs until the tasks are aborted.
struct Attack(Vec<JoinHandle<()>>);

impl Attack {
    fn begin(scene: &Scene, (operation, deadline): (&'static str, Duration), client: &Client) -> Self {
        let tenant = if scene.tenants.is_empty() { "" } else { "mallory" };
        let lane = || {
            let client = client.clone();
            tokio::task::spawn_local(async move {
                loop {
                    let job = client.job("shared", "x").operation(operation).tenant(tenant);
                    if job.deadline(deadline).send().await.is_err() {
                        // Limits the rate of jobs, because rejected jobs end immediately.
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                }
            })
        };
        Self((0..scene.attackers).map(|_| lane()).collect())
    }
}

struct Host {
    client: Client,
    _supervisor: Process,
    _folder: TempDir,
}

impl Host {
    async fn start(scene: &Scene, way: usize) -> Result<Self> {
        let programs = processes::programs()?;
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("workers.toml");
        std::fs::write(&file, config(scene, way, folder.path())?)?;
        let mut command = Command::new(programs.join("bulkhead-supervisor"));
        command.args(["--log-level", "error", "--config"]).arg(&file);
        let supervisor = Process::start(command.stdin(Stdio::null()).stderr(Stdio::null()))?;
        let socket = folder.path().join("jobs.sock");
        processes::wait_for(&socket)?;
        let client = Client::connect(&socket).await?;
        client.job("shared", "ready?").deadline(DEADLINE).send().await?;
        Ok(Self { client, _supervisor: supervisor, _folder: folder })
    }
}

fn config(scene: &Scene, way: usize, folder: &Path) -> Result<String> {
    let worker = match scene.worker {
        Worker::Rust(role) => format!("command = [{}]\n", processes::part_of(role)?),
        Worker::Python(module) => {
            let file = folder.join("handler.py");
            std::fs::write(&file, module)?;
            let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../python/src").canonicalize()?;
            format!(
                "command = [\"python3\", {file:?}]\nenv = {{ PYTHONPATH = {package:?} }}\n\
                 sandbox = {{ profile = \"none\" }}\n"
            )
        }
    };
    Ok(format!(
        "[supervisor]\nsocket = \"jobs.sock\"\n[bulkhead.shared]\n{worker}max_queue = 1000\ndeadline = \"60s\"\n\
         {}",
        scene.keys[way]
    ))
}
