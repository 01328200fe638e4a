//! The thread that serves low-priority readers: metrics, events, logs and the dashboard. It runs at the
//! lowest priority, so that on a busy machine jobs take precedence over any number of readers. Health checks
//! and operator commands are not served here.

use std::io;
use std::thread::JoinHandle;

use tokio::net::{TcpStream, UnixStream};

use super::Shared;
use super::connections::{Arrivals, serve};
use bulkhead_plane::threads::{Fate, panic_on_request};

use super::{CLOSE_WITHIN, http, tcp, watch};

/// Nice value of the thread. With a lower value, Linux lets the thread run long enough to affect the latency
/// of jobs.
const PRIORITY: i32 = 19;

/// Connections from the listeners.
pub(super) struct Entrances {
    pub(super) local: Arrivals<UnixStream>,
    pub(super) tcp: Option<(Arrivals<TcpStream>, tcp::Gate)>,
}

/// Starts the thread. It serves connections until the control plane ends.
pub(super) fn start(control: Shared, entrances: Entrances, fate: &Fate) -> io::Result<JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tasks = fate.clone();
    let run = move || {
        // Applies to this thread only. Without permission to change the priority, readers are served at
        // normal priority.
        let _ = rustix::process::setpriority_process(None, PRIORITY);
        runtime.block_on(async {
            tokio::spawn(tasks.task("watch", watch::look(control.clone())));
            tokio::spawn(tasks.task("followers", tell_of_events(control.clone())));
            let served = tokio::spawn(tasks.task("onlookers' API", serve_all(control.clone(), entrances)));
            control.until_end(panic_on_request("ONLOOKERS")).await;
            let _ = tokio::time::timeout(CLOSE_WITHIN, served).await;
        });
    };
    fate.spawn("onlookers", run)
}

async fn serve_all(control: Shared, entrances: Entrances) {
    let Entrances { local, tcp } = entrances;
    let over_tcp = async {
        if let Some((arrivals, gate)) = tcp {
            serve(arrivals, tcp::router(control.clone(), gate)).await;
        }
    };
    tokio::join!(serve(local, http::router(control.clone())), over_tcp);
}

/// Wakes followers of events when there are new ones.
async fn tell_of_events(control: Shared) {
    control.until_end(control.events.tell_readers()).await;
}
