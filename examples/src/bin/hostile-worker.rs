//! A worker that misbehaves on request. The job's operation selects the misbehaviour. The bulkhead `hostile` in
//! `workers.toml` runs this worker, and `tour` and the confinement tests submit jobs to the bulkhead. The worker does
//! not attack the sandbox or violate the protocol, unlike the workers `hostile` and `misbehave` in `tests`.

use std::process::{Command, ExitCode};
use std::time::Duration;

use bulkhead_worker::{Ctx, HandlerError, Job};

fn main() -> ExitCode {
    bulkhead_worker::serve(misbehave)
}

fn misbehave(job: &Job, ctx: &Ctx) -> Result<Vec<u8>, HandlerError> {
    match ctx.operation() {
        "echo" | "" => Ok(job.payload().to_vec()),
        "abort" => std::process::abort(),
        "segfault" => segfault(),
        "exit" => std::process::exit(0),
        "exit99" => std::process::exit(99),
        "panic" => panic!("a handler panicked"),
        "hang" => loop {
            std::thread::sleep(Duration::from_secs(1000));
        },
        "spin" => loop {
            std::hint::spin_loop();
        },
        // Starts processes that leave the session and ignore SIGTERM, then hangs.
        "fork" => {
            let script =
                "trap '' TERM; (setsid sleep 1000 &); (setsid sh -c 'sleep 1000 & sleep 1000' &); true";
            Command::new("/bin/sh").args(["-c", script]).env("PATH", "/usr/bin:/bin").status()?;
            loop {
                std::thread::sleep(Duration::from_secs(1000));
            }
        }
        "leak" => {
            let mut kept: Vec<Vec<u8>> = Vec::new();
            loop {
                kept.push(vec![1; 1 << 20]);
            }
        }
        "flood" => {
            for _ in 0..20_000 {
                eprintln!("{}", "all work and no play makes jack a dull boy ".repeat(10));
            }
            Ok(b"flooded".to_vec())
        }
        other => Err(HandlerError::new("unknown_operation", other).caller()),
    }
}

/// Writes to an unmapped address.
fn segfault() -> ! {
    let nowhere = std::ptr::without_provenance_mut::<u8>(8);
    #[expect(unsafe_code, reason = "this operation demonstrates a memory bug")]
    // SAFETY: none. The first page is never mapped, so this write does nothing but kill the process.
    unsafe {
        nowhere.write_volatile(1);
    }
    std::process::abort()
}
