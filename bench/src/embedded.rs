//! Measures a supervisor that is embedded in this process. A supervisor with its own threads is compared with the bare
//! chain. A supervisor on the caller's thread is compared with a direct connection to an echo process.

use std::path::Path;
use std::rc::Rc;

use bulkhead_client::Client;
use bulkhead_supervisor::{Supervisor, config};

use tokio::task::LocalSet;

use crate::chains::{Chains, bare_calls};
use crate::load::{self, Round};
use crate::pairs::paired;
use crate::plan::Plan;
use crate::processes::{self, Process};
use crate::report::{Report, Target};
use crate::{Result, bare, real};

const OWN: &str = "embedded, own thread, 64 B, 1 in flight: p50";
const LOCAL: &str = "embedded, caller's thread, 64 B, 1 in flight: p50";

const BYTES: usize = 64;

pub(crate) async fn all(chains: &Chains, plan: &Plan, report: &Report) -> Result<()> {
    if report.wants(OWN) {
        let supervisor = Supervisor::start_blocking(settings()?)?;
        let client = supervisor.client();
        client.job(real::ONE, "ready?").send().await?;
        let mut p50 = Vec::new();
        for _ in plan.rounds() {
            let bare = chains.bare(1, plan.small, BYTES).await?;
            let own = calls(client.clone(), plan.small).await?;
            p50.push((bare.quantile(0.5), own.quantile(0.5)));
        }
        report.add(paired(OWN.into(), "µs", &p50, Target::AtMost, 1.3));
        supervisor.shutdown()?;
    }
    if report.wants(LOCAL) {
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("echo");
        let _echo = Process::part(&["echo", socket.to_str().ok_or("the path is not UTF-8")?])?;
        processes::wait_for(&socket)?;
        let bare = bare::Client::connect(&socket).await?;
        let mut supervisor = Supervisor::builder(settings()?).start_local()?;
        let client = supervisor.client();
        supervisor.run_until(client.job(real::ONE, "ready?").send()).await??;
        let mut p50 = Vec::new();
        for _ in plan.rounds() {
            let bare = bare_calls(&bare, 1, plan.small, BYTES).await?;
            let tasks = LocalSet::new();
            let calls = tasks.run_until(calls(client.clone(), plan.small));
            let local = supervisor.run_until(calls).await??;
            p50.push((bare.quantile(0.5), local.quantile(0.5)));
        }
        report.add(paired(LOCAL.into(), "µs", &p50, Target::AtMost, 1.3));
        supervisor.shutdown().await?;
    }
    Ok(())
}

async fn calls(client: Client, total: usize) -> Result<Round> {
    let payload = Rc::new(vec![b'x'; BYTES]);
    load::run(1, total, move || {
        let (client, payload) = (client.clone(), payload.clone());
        async move {
            let reply = client.job(real::ONE, payload.as_slice()).send().await?;
            if reply.payload().len() == BYTES {
                Ok(())
            } else {
                Err("the result differs from the payload".into())
            }
        }
    })
    .await
}

fn settings() -> Result<config::Config> {
    let text = format!("[bulkhead.{}]\ncommand = [{}]\nmax_queue = 1\n", real::ONE, processes::worker()?);
    Ok(config::parse_embedded(&text, Path::new("workers.toml"))?)
}
