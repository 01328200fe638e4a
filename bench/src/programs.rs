//! Measures how many `true` processes an `exec` bulkhead runs per second under each profile, compared with threads that
//! spawn `true` directly and wait for it. `measures` calls `all`. `pairs` compares the rates, and `report` judges them
//! against the target that is set here.

use std::process::{Command, Stdio};
use std::time::Instant;

use crate::Result;
use crate::pairs::paired;
use crate::plan::Plan;
use crate::processes;
use crate::real::Chain;
use crate::report::{Report, Target};

/// Prefix of the names of the measurements in this module.
pub(crate) const GROUP: &str = "programs";

/// Number of programs that run concurrently.
const AT_ONCE: usize = 2;

const PROFILES: [&str; 3] = ["none", "default", "strict"];

/// Takes all requested measurements. Must be called within a `LocalSet`.
pub(crate) async fn all(plan: &Plan, report: &Report) -> Result<()> {
    let programs = plan.programs;
    let name = |profile: &str| format!("{GROUP}: true, {AT_ONCE} at once, {profile}");
    let is_wanted = |profile: &&&str| report.wants(&name(profile));
    let profiles: Vec<&str> = PROFILES.iter().filter(is_wanted).copied().collect();
    if profiles.is_empty() {
        return Ok(());
    }
    let bulkhead = |profile: &&str| {
        format!(
            "[bulkhead.{profile}]\nexec = [\"true\"]\nmax_in_flight = {AT_ONCE}\nmax_queue = 1\n\
             sandbox = {{ profile = \"{profile}\" }}\n"
        )
    };
    let config = profiles.iter().map(bulkhead).collect::<String>();
    let folder = processes::programs()?;
    let chain = Chain::start(&folder, &format!("[supervisor]\nsocket = \"jobs.sock\"\n{config}")).await?;
    for profile in profiles {
        if let Err(error) = run(&chain, profile, AT_ONCE).await {
            eprintln!("NOT MEASURED: programs under the profile `{profile}`: {error}");
            continue;
        }
        let mut rates = Vec::new();
        for _ in plan.rounds() {
            rates.push((spawn_and_wait(programs)?, run(&chain, profile, programs).await?));
        }
        let figure = paired(name(profile), "programs/s", &rates, Target::Told, f64::NAN);
        report.add(if profile == "none" { figure.with_target(Target::AtLeast, 0.45) } else { figure });
    }
    Ok(())
}

/// Returns the number of programs that run per second without a supervisor.
fn spawn_and_wait(programs: usize) -> Result<f64> {
    let began = Instant::now();
    std::thread::scope(|scope| {
        let lane = || -> std::io::Result<()> {
            for _ in 0..programs / AT_ONCE {
                let mut command = Command::new("true");
                command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
                if !command.status()?.success() {
                    return Err(std::io::Error::other("true is false"));
                }
            }
            Ok(())
        };
        let lanes: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(lane)).collect();
        lanes
            .into_iter()
            .try_for_each(|lane| lane.join().unwrap_or_else(|_| Err(std::io::Error::other("a panic"))))
    })?;
    Ok((programs / AT_ONCE * AT_ONCE) as f64 / began.elapsed().as_secs_f64())
}

/// Returns the number of programs that a bulkhead runs per second.
async fn run(chain: &Chain, bulkhead: &'static str, programs: usize) -> Result<f64> {
    let began = Instant::now();
    let mut lanes = tokio::task::JoinSet::new();
    for _ in 0..AT_ONCE {
        let client = chain.client.clone();
        lanes.spawn(async move {
            for _ in 0..programs / AT_ONCE {
                client.job(bulkhead, "").send().await?;
            }
            Ok::<(), bulkhead_client::JobError>(())
        });
    }
    while let Some(lane) = lanes.join_next().await {
        lane??;
    }
    Ok((programs / AT_ONCE * AT_ONCE) as f64 / began.elapsed().as_secs_f64())
}
