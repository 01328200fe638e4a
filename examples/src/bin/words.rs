//! A worker that counts words. This is the program shown in `docs/worker-rust.md`.

use std::process::ExitCode;

use bulkhead_worker::{HandlerError, serve};

fn main() -> ExitCode {
    serve(|job, _ctx| {
        let text = std::str::from_utf8(job.payload())
            .map_err(|error| HandlerError::new("not_utf8", error.to_string()).caller())?;
        Ok(format!("{}\n", text.split_whitespace().count()))
    })
}
