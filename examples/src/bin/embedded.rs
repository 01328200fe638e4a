//! An application that has its supervisor in its own process. This one program is all there is: the application, its
//! worker, and the keeper that starts, confines and ends the worker.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use bulkhead_client::blocking::Client;
use bulkhead_supervisor::{Supervisor, config, keeper_main_if_asked};
use bulkhead_worker::{Ctx, HandlerError, Job};

fn main() -> ExitCode {
    // First of all: does not return in the keeper.
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

/// What is not trusted to be well: it runs in a process of its own.
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
    // The path is where relative ones begin; `config::load_embedded` reads a file.
    let config = config::parse_embedded(&text, Path::new("workers.toml"))?;
    let supervisor = Supervisor::start_blocking(config)?;
    let client = supervisor.blocking_client()?;
    ask(&client, "words", "to be or not to be");
    ask(&client, "crash", "");
    ask(&client, "hang", "");
    ask(&client, "words", "still here");
    // Nothing of it is left after this, no process and no thread.
    Ok(supervisor.shutdown()?)
}

fn ask(client: &Client, operation: &str, text: &str) {
    let deadline = Duration::from_millis(500);
    match client.job("words", text).operation(operation).deadline(deadline).send() {
        Ok(reply) => println!("{operation}: {}", String::from_utf8_lossy(reply.payload())),
        Err(error) => println!("{operation}: {error}"),
    }
}
