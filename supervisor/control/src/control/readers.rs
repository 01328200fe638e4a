//! The thread that serves low-priority readers: metrics, events, logs and the dashboard. It has the lowest priority
//! that there is, so that on a machine whose processors all have work the work of jobs goes first, however many look
//! on. What decides whether a supervisor is well, and what steers it, is not served here.

use std::io;
use std::thread::JoinHandle;

use tokio::net::{TcpStream, UnixStream};

use super::Shared;
use super::connections::{Arrivals, serve};
use bulkhead_plane::threads::{Fate, panic_on_request};

use super::{CLOSE_WITHIN, http, tcp, watch};

/// As a nice value. With less, Linux lets a running thread go on for long enough to be seen in the latency of jobs.
const PRIORITY: i32 = 19;

/// Where they come from: the listeners.
pub(super) struct Entrances {
    pub(super) local: Arrivals<UnixStream>,
    pub(super) tcp: Option<(Arrivals<TcpStream>, tcp::Gate)>,
}

/// Starts to serve them, until the control plane ends.
pub(super) fn start(control: Shared, entrances: Entrances, fate: &Fate) -> io::Result<JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tasks = fate.clone();
    let run = move || {
        // Of this thread alone. Where it is refused they are served all the same.
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

/// Tells followers of events of new ones.
async fn tell_of_events(control: Shared) {
    control.until_end(control.events.tell_readers()).await;
}
