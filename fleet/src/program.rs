//! Runs the commands of the `bulkhead-fleet` program, most of which have a submodule. The `bulkhead_fleet` library does
//! the work, such as that of the agent. Each kind of failure has the same exit code as in the `bulkhead` command.

mod agent;
mod args;
mod dead;
mod init;
mod output;
mod pages;
mod status;
mod submit;
mod try_out;
mod with_parent;

use std::process::ExitCode;

use args::{Args, Command};
use bulkhead_fleet::settings::Settings;
use clap::Parser;
use output::{Failure, exit};

/// Runs the program.
pub(crate) fn main() -> ExitCode {
    let result = match Args::try_parse() {
        Ok(args) => run(&args),
        Err(error) if error.use_stderr() => error.exit(),
        // Help or the version.
        Err(message) => output::raw(message.render().to_string().as_bytes()).map(|()| exit::OK),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => failure.report(),
    }
}

fn run(args: &Args) -> Result<u8, Failure> {
    if let Command::Man { folder } = &args.command {
        return pages::write(folder);
    }
    if let Command::WithParent(options) = &args.command {
        return Err(with_parent::run(options));
    }
    let fail = |error| Failure::new(exit::FAILED, format!("failed to start: {error}"));
    let mut runtime = match args.command {
        Command::Agent(_) => tokio::runtime::Builder::new_multi_thread(),
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = runtime.enable_all().build().map_err(fail)?;
    let result = runtime.block_on(run_command(args));
    runtime.shutdown_background();
    result
}

async fn run_command(args: &Args) -> Result<u8, Failure> {
    match &args.command {
        Command::Agent(agent) => agent::run(settings(args)?, agent).await,
        Command::Init => init::run(&settings(args)?, args.json).await,
        Command::Submit(submit) => submit::run(&settings(args)?, submit, args.json).await,
        Command::Result(result) => submit::result(&settings(args)?, result, args.json).await,
        Command::Status => status::run(&settings(args)?, args.json).await,
        Command::Dead(dead) => dead::run(&settings(args)?, dead, args.json).await,
        Command::Try(options) => try_out::run(options).await,
        Command::Man { .. } | Command::WithParent(_) => Ok(exit::OK), // Handled before the runtime starts.
    }
}

fn settings(args: &Args) -> Result<Settings, Failure> {
    Settings::read(&args.config).map_err(|error| Failure::new(exit::USAGE, error.to_string()))
}
