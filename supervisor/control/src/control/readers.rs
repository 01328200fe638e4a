//! The low-priority reader thread, which serves metrics, events, logs and the dashboard. It runs at the lowest
//! priority, so that on a busy machine jobs take precedence over any number of readers. The main thread of the control
//! plane serves health checks and operators' requests.

use std::io;
use std::thread::JoinHandle;

use tokio::net::{TcpStream, UnixStream};

use super::Shared;
use super::connections::{Queue, serve};
use bulkhead_plane::threads::{ThreadMonitor, panic_on_request};

use super::{CLOSE_TIMEOUT, http, tcp, watch};

/// Nice value of the low-priority reader thread. With a smaller value, Linux would let the thread run long enough to
/// increase the latency of jobs.
const NICE: i32 = 19;

/// Connection queues of the low-priority reader thread.
pub(super) struct ReaderQueues {
    pub(super) local: Queue<UnixStream>,
    pub(super) tcp: Option<(Queue<TcpStream>, tcp::RequestCheck)>,
}

/// Starts the low-priority reader thread, which serves connections until the control plane shuts down.
pub(super) fn start(
    control: Shared,
    reader_queues: ReaderQueues,
    threads: &ThreadMonitor,
) -> io::Result<JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tasks = threads.clone();
    let run = move || {
        // The call changes the priority of this thread only. If it fails, readers are served at normal
        // priority.
        let _ = rustix::process::setpriority_process(None, NICE);
        runtime.block_on(async {
            tokio::spawn(tasks.wrap_task("watch", watch::publish(control.clone())));
            tokio::spawn(tasks.wrap_task("followers", wake_followers(control.clone())));
            let served =
                tokio::spawn(tasks.wrap_task("onlookers' API", serve_all(control.clone(), reader_queues)));
            control.until_shutdown(panic_on_request("ONLOOKERS")).await;
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, served).await;
        });
    };
    threads.spawn("onlookers", run)
}

async fn serve_all(control: Shared, reader_queues: ReaderQueues) {
    let ReaderQueues { local, tcp } = reader_queues;
    let over_tcp = async {
        if let Some((queue, check)) = tcp {
            serve(queue, tcp::router(control.clone(), check)).await;
        }
    };
    tokio::join!(serve(local, http::router(control.clone())), over_tcp);
}

/// Wakes the clients that follow events whenever there are new events, until the control plane shuts down.
async fn wake_followers(control: Shared) {
    control.until_shutdown(control.events.wake_readers_periodically()).await;
}
