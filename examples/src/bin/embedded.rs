//! An application with an embedded supervisor. The same program is the application, the worker, and the
//! keeper that starts, confines and stops the worker.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use bulkhead_client::blocking::Client;
use bulkhead_supervisor::{Supervisor, config, keeper_main_if_asked};
use bulkhead_worker::{Ctx, HandlerError, Job};

fn main() -> ExitCode {
    // This call must come first. In the keeper process, it does not return.
    keeper_main_if_asked();
    if std::env::args().nth(1).is_some_and(|argument| argument == "worker") {
        return bulkhead_worker::serve(count);
    }
    match application() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The untrusted code, which runs in a worker process.
fn count(job: &Job, ctx: &Ctx) -> Result<Vec<u8>, HandlerError> {
    match ctx.operation() {
        "words" => Ok(String::from_utf8_lossy(job.payload()).split_whitespace().count().to_string().into()),
        "hang" => loop {
            std::thread::park();
        },
        _ => std::process::abort(),
    }
}

fn application() -> Result<(), Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let text = format!(
        "[bulkhead.words]
        command = [{program:?}, \"worker\"]
        processes = 2
        deadline = \"1s\"
        grace = \"100ms\"
        "
    );
    // The path only determines the folder against which relative paths are resolved. To read a file, use
    // `config::load_embedded`.
    let config = config::parse_embedded(&text, Path::new("workers.toml"))?;
    let supervisor = Supervisor::start_blocking(config)?;
    let client = supervisor.blocking_client()?;
    ask(&client, "words", "to be or not to be");
    ask(&client, "crash", "");
    ask(&client, "hang", "");
    ask(&client, "words", "still here");
    // Returns after all of the supervisor's processes and threads have exited.
    Ok(supervisor.shutdown()?)
}

fn ask(client: &Client, operation: &str, text: &str) {
    let deadline = Duration::from_millis(500);
    match client.job("words", text).operation(operation).deadline(deadline).send() {
        Ok(reply) => println!("{operation}: {}", String::from_utf8_lossy(reply.payload())),
        Err(error) => println!("{operation}: {error}"),
    }
}
