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
use bulkhead_fleet::check_files;
use bulkhead_fleet::settings::Settings;
use clap::Parser;
use output::{Failure, exit};

/// Runs the program.
pub(crate) fn main() -> ExitCode {
    let result = match Args::try_parse() {
        Ok(args) => run_or_print(&args),
        Err(error) if error.use_stderr() => error.exit(),
        // Help or the version.
        Err(message) => output::raw(message.render().to_string().as_bytes()).map(|()| exit::OK),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => failure.report(),
    }
}

/// Runs a command. With `--json`, also prints a failure to standard output.
fn run_or_print(args: &Args) -> Result<u8, Failure> {
    let result = run(args);
    // These commands print a line for each job, even if the job was not sent.
    let prints_jobs = matches!(args.command, Command::Submit(_) | Command::Result(_));
    if let Err(failure) = &result
        && args.json
        && !prints_jobs
        && !failure.message().is_empty()
    {
        // Ignores write errors, because the message is also written to standard error.
        let _ = output::json(&failure.json());
    }
    result
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
        Command::Submit(submit) => submit::run(args, submit).await,
        Command::Result(result) => submit::result(args, result).await,
        Command::Status => status::run(&settings(args)?, args.json).await,
        Command::Dead(dead) => dead::run(&settings(args)?, dead, args.json).await,
        Command::Try(options) => try_out::run(options).await,
        Command::Man { .. } | Command::WithParent(_) => Ok(exit::OK), // Handled before the runtime starts.
    }
}

/// Reads the configuration, and checks the files that it names.
fn settings(args: &Args) -> Result<Settings, Failure> {
    let settings = Settings::read(&args.config);
    let settings = settings.map_err(|error| Failure::new(exit::USAGE, error.to_string()))?;
    check_files(&settings.nats).map_err(|error| Failure::new(exit::USAGE, error.to_string()))?;
    Ok(settings)
}
