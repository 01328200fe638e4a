//! Implements `bulkhead upgrade`, which asks the supervisor to replace its program and prints each step. The supervisor
//! performs the upgrade, which continues if the command is interrupted.

use bulkhead_api::UpgradeStep;
use hyper::Method;

use crate::admin::{known, shown};
use crate::args::{Args, Upgrade};
use crate::output::{self, Failure, exit};
use crate::requests::{follow, percent_encoded, request};

pub(crate) async fn run(args: &Args, upgrade: &Upgrade) -> Result<u8, Failure> {
    let mut path = format!("/v1/upgrade?force={}&unmanaged={}", upgrade.force, upgrade.unmanaged);
    if let Some(program) = &upgrade.program {
        let program = std::path::absolute(program)
            .map_err(|error| Failure::new(exit::USAGE, format!("--program: {error}")))?;
        let Some(program) = program.to_str() else {
            return Err(Failure::new(exit::USAGE, "--program: the path is not valid UTF-8".to_owned()));
        };
        path.push_str(&format!("&program={}", percent_encoded(program)));
    }
    let response = request(args, Method::POST, &path).await.map_err(|failure| match failure.code() {
        // If the supervisor cannot be upgraded, the command fails with the exit code for usage errors.
        exit::INVALID => failure.with_code(exit::USAGE),
        _ => failure,
    })?;
    let mut last = UpgradeStep::default();
    let ended = follow(vec![response], |_, line| {
        let Ok(step) = serde_json::from_str::<UpgradeStep>(line) else { return Ok(()) };
        let printed = if args.json {
            output::json(line)
        } else if !matches!(&*step.step, "failed" | "stopped") {
            output::line(&sentence(&step))
        } else {
            Ok(())
        };
        last = step;
        // The exit status depends on the last step, even if the output is no longer read.
        printed.or_else(Failure::unless_closed_pipe)
    });
    if ended.await? == exit::CANCELLED {
        return Err(Failure::new(exit::CANCELLED, "interrupted; the upgrade continues"));
    }
    match &*last.step {
        "finished" => Ok(exit::OK),
        "failed" => {
            let why = known(&last.message);
            Err(Failure::new(
                exit::FAILED,
                format!("the upgrade failed: {why}; the old program continues to serve jobs"),
            ))
        }
        "stopped" => {
            let message = "a signal stopped the supervisor during the upgrade";
            Err(Failure::new(exit::FAILED, message.to_owned()))
        }
        step => {
            let message = format!(
                "the supervisor stopped responding after the step \"{step}\"; `bulkhead status` and the log show which \
                 program is serving"
            );
            Err(Failure::new(exit::FAILED, message))
        }
    }
}

fn sentence(step: &UpgradeStep) -> String {
    let (pid, version) = (known(&step.pid), known(&step.version));
    match &*step.step {
        "started" => {
            format!("started: the new program is running as process {pid} and is starting its workers")
        }
        "ready" => "ready: every bulkhead has started in the new program".to_owned(),
        "switched" => {
            format!("switched: process {pid}, version {version}, is serving; watching for failures for 10 s")
        }
        "finished" => {
            format!("finished: process {pid} is the supervisor; the old one exits after its last job")
        }
        other => shown(&other),
    }
}
