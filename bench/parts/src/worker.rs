//! The worker of the real chain.

use std::process::{Command, ExitCode};

use bulkhead_worker::{HandlerError, Job};

/// Serves until the supervisor ends it.
pub fn serve() -> ExitCode {
    bulkhead_worker::serve(|job: &Job, ctx| match ctx.operation() {
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
        "hang" => loop {
            std::thread::park();
        },
        "crash" => std::process::abort(),
        "die" => {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            std::process::abort()
        }
        // Dies and leaves many processes in sessions of their own.
        "orphans" => {
            let script = "for n in $(seq 1500); do setsid sleep 100 & done";
            let _ = Command::new("/bin/sh").args(["-c", script]).env("PATH", "/usr/bin:/bin").status();
            std::process::abort()
        }
        other => Err(HandlerError::new("unknown_operation", other)),
    })
}
