//! The `bulkhead` command. Parses the command line, runs the module of the subcommand, and turns a failure into an exit
//! code. With `--json`, a failure is also printed to standard output. Subcommands use the jobs socket, the admin
//! socket, or TCP (`--host`); `completions`, `man` and `fleet` contact no supervisor.

mod admin;
mod advise;
mod args;
mod bench;
mod crashes;
mod events;
mod fleet;
mod follow;
mod jobs;
mod load;
mod logs;
mod output;
mod pages;
mod payload;
mod reload;
mod requests;
mod severity;
mod steer;
mod submit;
mod target;
mod times;
mod top;
mod upgrade;

use std::io::IsTerminal;
use std::process::ExitCode;

use args::{Args, Command};
use output::{Failure, exit};

fn main() -> ExitCode {
    let args = match Args::from_command_line() {
        Ok(args) => args,
        Err(error) => return print_clap_message(&error),
    };
    let result = match &args.command {
        Command::Completions { shell } => pages::completions(*shell),
        Command::Man { folder } => pages::man(&args, folder),
        Command::Fleet { arguments } => Err(fleet::run(&args, arguments)),
        _ => run_with_runtime(&args),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            // `submit` has already printed a line for each job, including the failed one.
            if args.json && !matches!(args.command, Command::Submit(_)) && !failure.message().is_empty() {
                // Ignores write errors, because the message is also written to standard error.
                let _ = output::json(failure.json());
            }
            failure.report()
        }
    }
}

/// Prints the error or help text returned by clap.
fn print_clap_message(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        error.exit();
    }
    let text = error.render();
    let has_colours = std::io::stdout().is_terminal();
    let text = if has_colours { text.ansi().to_string() } else { text.to_string() };
    output::raw(text.as_bytes()).map_or_else(Failure::report, |()| ExitCode::SUCCESS)
}

fn run_with_runtime(args: &Args) -> Result<u8, Failure> {
    let fail = |error| Failure::new(exit::FAILED, format!("failed to start the async runtime: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(fail)?;
    let result = runtime.block_on(run(args));
    runtime.shutdown_background();
    result
}

async fn run(args: &Args) -> Result<u8, Failure> {
    match &args.command {
        Command::Submit(submit) => submit::run(args, submit).await,
        Command::Bench(bench) => bench::run(args, bench).await,
        Command::Status(status) => admin::status(args, status).await,
        Command::Top(top) => top::run(args, top).await,
        Command::Events(events) => events::run(args, events).await,
        Command::Logs(logs) => logs::run(args, logs).await,
        Command::Jobs(list) => jobs::list(args, list).await,
        Command::Cancel(cancel) => jobs::cancel(args, cancel).await,
        Command::IsReady(is_ready) => steer::is_ready(args, is_ready).await,
        Command::Restart(restart) => steer::restart(args, restart).await,
        Command::Drain(drain) => steer::drain(args, drain).await,
        Command::Resume { name } => steer::resume(args, name).await,
        Command::Reset { name } => steer::reset(args, name).await,
        Command::Reload { dry_run } => reload::run(args, *dry_run).await,
        Command::Upgrade(upgrade) => upgrade::run(args, upgrade).await,
        Command::Resize(resize) => admin::resize(args, resize).await,
        Command::Advise { name } => advise::run(args, name.as_deref()).await,
        Command::Crashes(crashes) => crashes::run(args, crashes).await,
        Command::Replay { id, job } => crashes::replay(args, id, *job).await,
        Command::Completions { .. } | Command::Man { .. } | Command::Fleet { .. } => Ok(exit::OK),
    }
}
