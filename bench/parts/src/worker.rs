//! The worker process of the real chain, in which a supervisor forwards the requests. Returns the payload, or crashes,
//! hangs or forks as the operation says. The bench program measures; this worker does not.

use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use bulkhead_worker::{Ctx, HandlerError, Job, Server};

/// Time that the slow worker takes to initialise.
const SLOW_START: Duration = Duration::from_secs(1);

/// Takes one second to initialise, then runs jobs until the supervisor stops the worker.
pub fn serve_slowly() -> ExitCode {
    Server::new()
        .init(|_| {
            std::thread::sleep(SLOW_START);
            Ok::<(), HandlerError>(())
        })
        .handler(|job: &Job, ctx: &Ctx| handle(job, ctx))
        .serve()
}

/// Runs jobs until the supervisor stops the worker.
pub fn serve() -> ExitCode {
    bulkhead_worker::serve(|job: &Job, ctx: &Ctx| handle(job, ctx))
}

fn handle(job: &Job, ctx: &Ctx) -> Result<Vec<u8>, HandlerError> {
    match ctx.operation() {
        "" => Ok(job.payload().to_vec()),
        "mapped" => {
            let place = job.mapped_payload().and_then(|payload| job.result_in_place(payload.len()));
            if let (Some(payload), Some(mut result)) = (job.mapped_payload(), place) {
                payload.read(0, &mut result);
                result.finish();
                return Ok(Vec::new());
            }
            Ok(job.payload().to_vec())
        }
        "hang" => park(),
        "crash" => std::process::abort(),
        "die" => {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            std::process::abort()
        }
        // Starts many processes, each in a separate session, and then aborts without stopping them.
        "orphans" => {
            let script = "for n in $(seq 1500); do setsid sleep 100 & done";
            let _ = Command::new("/bin/sh").args(["-c", script]).env("PATH", "/usr/bin:/bin").status();
            std::process::abort()
        }
        // Stops all threads of the worker for half a second, like a call that holds the interpreter lock.
        "hold" => {
            let mut waker = shell("sleep 0.5; kill -CONT $PPID").spawn()?;
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP)?;
            waker.wait()?;
            Ok(Vec::new())
        }
        // Starts chains of processes until the worker dies. In a chain, each process starts a successor and exits.
        "chains" => {
            let chains = "f() { f & exit 0; }; for chain in $(seq 50); do f & done; wait";
            shell(chains).spawn()?.wait()?;
            park()
        }
        "loops" => {
            shell("for loop in $(seq 50); do while :; do :; done & done; wait").spawn()?.wait()?;
            park()
        }
        other => match other.strip_prefix("sleep ").and_then(|ms| ms.parse().ok()) {
            Some(ms) => {
                std::thread::sleep(Duration::from_millis(ms));
                Ok(Vec::new())
            }
            None => Err(HandlerError::new("unknown_operation", other)),
        },
    }
}

fn park() -> ! {
    loop {
        std::thread::park();
    }
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]).env("PATH", "/usr/bin:/bin").stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::null());
    command
}
